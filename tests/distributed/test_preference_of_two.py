"""preference on two processes: each computes the reference of half of the batches, and both get all of it."""

import json
import os

from distributed.launcher import run
from tasks.pairs import chat_rows, write_model
from tasks.reviews import write_jsonl


def train_preference(results) -> None:
    from loopwright.cli import main
    from loopwright.tasks.text.preference import answers

    compute, sizes = answers.answer_log_probs, []

    def counting(model, batch, job=None):
        if job is None:
            sizes.append(len(batch["input_ids"]))
        return compute(model, batch, job)

    answers.answer_log_probs = counting
    words = ["train", "preference", "--train_file", "train.jsonl", "--validation_file", "validation.jsonl"]
    words += ["--model", "model", "--batch", "4", "--per_device_eval_batch_size", "4", "--max_steps", "2"]
    words += ["--threads", "1", "--no_rehearsal", "--num_samples", "0"]
    results["code"] = main([*words, "--out", os.environ["RUN"]])
    results["sizes"] = sizes


def test_the_reference_is_shared_out_and_has_the_bits_of_one_process(tmp_path):
    write_model(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", chat_rows(22))
    write_jsonl(tmp_path / "validation.jsonl", chat_rows(9, seed=1))
    found = {}
    for name, num_processes in (("one", 1), ("two", 2)):
        ranks = run(train_preference, tmp_path, num_processes, 100, RUN=name)
        assert [rank["code"] for rank in ranks] == [0] * num_processes, ranks[0].output[-4000:]
        found[name] = [rank["sizes"] for rank in ranks]
    train, validation = [4, 4, 4, 4, 4, 2], [4, 4, 1]
    assert found["one"] == [[*train, *validation]]
    assert found["two"] == [[4, 4, 4, 4, 1], [4, 4, 2, 4]]
    one, two = ((tmp_path / name / "reference.json").read_text() for name in ("one", "two"))
    assert json.loads(one) == json.loads(two)
