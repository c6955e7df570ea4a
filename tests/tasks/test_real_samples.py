"""Every text task on a small real sample, by command line: killed, moved, used, resumed, evaluated and used again.

What the resumed run ends with is, bit for bit, what a run ends with that nobody killed.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loopwright.cli import main
from loopwright.tasks import TASKS
from tasks.forked import run_lines
from tasks.reviews import events, read_lines

FLAGS = ["--epochs", 3, "--batch", 4, "--lr", 1e-3, "--threads", 1, "--no_rehearsal"]
SAVING = ["--save_strategy", "steps", "--save_steps", 2]
KILL = "after_optimizer_step:6:kill"  # two updates after a checkpoint, and in the second epoch
ENDING = "The answer is unknown, and what comes next is"
WIKI = ["--file_kind", "txt", "--block_size", 32, "--vocab_size", 400, "--max_train_samples", 12]
WIKI += ["--max_eval_samples", 6]


@dataclass(frozen=True)
class Sample:
    """What a task is trained on, and what is predicted then.

    Attributes:
        train: a file under shared/data.
        validation: another; the same one where there is none.
        flags: of the task.
        inputs: what is predicted; the validation file where there is none.
        answer: keys of a prediction.
    """

    train: str
    validation: str = ""
    flags: list[object] = field(default_factory=list)
    inputs: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()


SAMPLES = {
    "text-classification": Sample(
        "mrpc/train.csv",
        "mrpc/test.csv",
        ["--glue", "mrpc", "--max_train_samples", 12, "--max_eval_samples", 6],
        ("He said so.", "So he said."),
        ("label", "score"),
    ),
    "token-classification": Sample("samples/conll/sample.json", answer=("entities", "tags", "tokens")),
    "question-answering": Sample(
        "samples/SQUAD/sample.json",
        flags=["--max_length", 96, "--max_train_samples", 12, "--max_eval_samples", 6],
        inputs=("Where is Normandy?", "Normandy is a region in France."),
        answer=("answer", "start", "end", "n_best"),
    ),
    "causal-lm": Sample("samples/wiki_text/wiki_00", flags=WIKI, inputs=(ENDING,), answer=("text", "continuation")),
    "masked-lm": Sample(
        "samples/wiki_text/wiki_00", flags=WIKI, inputs=("Anarchism is a [MASK] philosophy.",), answer=("text", "masks")
    ),
    "multiple-choice": Sample("samples/swag/sample.json", answer=("choice", "scores")),
    "summarization": Sample(
        "samples/xsum/sample.json",
        flags=["--max_source_length", 48, "--max_target_length", 8, "--num_beams", 2, "--vocabulary_size", 400],
        answer=("summary",),
    ),
    "translation": Sample(
        "samples/wmt16/sample.json",
        flags=["--source_lang", "en", "--target_lang", "ro", "--generation_max_length", 8, "--vocabulary_size", 400],
        answer=("translation",),
    ),
    "sentence-embedding": Sample(
        "samples/STS-B/train.tsv", "samples/STS-B/dev.tsv", inputs=("a man\ta woman",), answer=("similarity",)
    ),
}


def result_of(run: Path) -> dict[str, object]:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in result.items() if name != "seconds"}


def test_each_text_task_has_a_sample():
    assert set(SAMPLES) <= set(TASKS) and len(SAMPLES) == 9


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(SAMPLES))
def test_a_killed_run_on_real_data_goes_on_where_it_was_moved_to_as_if_nothing_had_been(
    task, shared_data, tmp_path, capsys
):
    sample = SAMPLES[task]
    train, validation = shared_data / sample.train, shared_data / (sample.validation or sample.train)
    words = ["train", task, "--train_file", train, "--validation_file", validation, "--keep_duplicates"]
    words += [*sample.flags, *FLAGS, *SAVING]
    code, said = run_lines([*words, "--out", "killed"], folder=tmp_path, failpoint=KILL)
    assert code == -signal.SIGKILL, said
    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    used = [["predict", moved, *(sample.inputs or [validation]), "--out", f"{name}.jsonl"] for name in "ab"]
    code, said = run_lines(used[0], ["resume", moved], used[1], ["evaluate", moved, "--json"], folder=tmp_path)
    assert code == 0 and "Resumed training state" in said, said
    assert main([*map(str, words), "--out", "whole"]) == 0
    whole = tmp_path / "whole"
    for name in ("model/model.safetensors", "eval/predictions.jsonl", "baselines.json"):
        assert (moved / name).read_bytes() == (whole / name).read_bytes()
    assert events(moved) == events(whole) and result_of(moved) == result_of(whole)
    told = json.loads(said.splitlines()[-1])
    assert told["metrics"] == result_of(whole)["metrics"]
    capsys.readouterr()
    assert main(["predict", "whole", *(sample.inputs or [str(validation)])]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert read_lines(tmp_path / "b.jsonl") == expected and expected
    assert all(set(sample.answer) <= set(each) for each in expected)
    assert len(read_lines(tmp_path / "a.jsonl")) == len(expected)
