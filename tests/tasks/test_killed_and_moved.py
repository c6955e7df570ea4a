"""Every text task on a small sample, by command line: killed, moved, used, resumed, evaluated and used again.

What the resumed run ends with is, bit for bit, what a run ends with that nobody killed.
"""

import json
import signal

import pytest

from loopwright.cli import main
from loopwright.run_folder import read_json
from loopwright.tasks import TASKS
from sample_data import SAMPLES
from tasks.forked import run_lines
from tasks.reviews import events, read_lines

FLAGS = ["--epochs", 3, "--batch", 4, "--lr", 1e-3, "--threads", 1, "--no_rehearsal", "--dropout", 0.1]
FLAGS += ["--save_strategy", "steps", "--save_steps", 2]
KILL = "after_optimizer_step:6:kill"  # two updates after a checkpoint, and in the second epoch
FEW = "--max_train_samples 12 --max_eval_samples 6"
WIKI = f"--file_kind txt --block_size 32 --vocab_size 400 {FEW}"
GENERATE = "--vocabulary_size 400 --num_beams 2 --max_source_length 48 --max_target_length 8"
TRANSLATE = "--vocabulary_size 400 --source_lang en --target_lang ro --generation_max_length 8"
SENTENCES = ["He said so.", "So he said."]
QUESTION = ["Where is Normandy?", "Normandy is a region in France."]
ENDING = "The answer is unknown, and what comes next is"
# Files of tests/samples to train on and to validate with (or one for both), flags, what is predicted (or the validation
# file is), and keys of a prediction.
CASES = {
    "text-classification": ("mrpc/train.csv mrpc/test.csv", f"--glue mrpc {FEW}", SENTENCES, "label score"),
    "token-classification": ("conll/sample.json", "", [], "entities tags tokens"),
    "question-answering": ("SQUAD/sample.json", f"--max_length 96 {FEW}", QUESTION, "answer start end n_best"),
    "causal-lm": ("wiki_text/wiki_00", WIKI, [ENDING], "text continuation"),
    "masked-lm": ("wiki_text/wiki_00", WIKI, ["Anarchism is a [MASK] philosophy."], "text masks"),
    "multiple-choice": ("swag/sample.json", "", [], "choice scores"),
    "preference": ("preference/sample.jsonl", "--vocab_size 320", [], "preferred margin"),
    "summarization": ("xsum/sample.json", GENERATE, [], "summary"),
    "translation": ("wmt16/sample.json", TRANSLATE, [], "translation"),
    "sentence-embedding": ("STS-B/train.tsv STS-B/dev.tsv", "", ["a man\ta woman"], "similarity"),
}


def result_of(run):
    result = read_json(run / "result.json")
    return {name: value for name, value in result.items() if name != "seconds"}


def test_each_text_task_has_a_sample():
    assert set(CASES) <= set(TASKS) and len(CASES) == 10


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(CASES))
def test_a_killed_run_resumes_in_another_folder_to_the_same_bits(task, tmp_path, capsys):
    files, flags, inputs, answer = CASES[task]
    train, *_, validation = [str(SAMPLES / name) for name in 2 * files.split()]
    inputs = inputs or [validation]
    words = ["train", task, "--train_file", train, "--validation_file", validation, "--keep_duplicates"]
    words += [*flags.split(), *FLAGS]
    code, said = run_lines([*words, "--out", "killed"], folder=tmp_path, failpoint=KILL)
    assert code == -signal.SIGKILL, said
    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    used = [["predict", moved, *inputs, "--out", f"{name}.jsonl", "--only_predictions"] for name in "ab"]
    code, said = run_lines(used[0], ["resume", moved], used[1], ["evaluate", moved, "--json"], folder=tmp_path)
    assert code == 0 and "Resumed training state" in said, said
    assert main([*map(str, words), "--out", "whole"]) == 0
    whole = tmp_path / "whole"
    for name in ("model/model.safetensors", "model/SHA256SUMS", "eval/predictions.jsonl", "baselines.json"):
        assert (moved / name).read_bytes() == (whole / name).read_bytes()
    assert events(moved) == events(whole) and result_of(moved) == result_of(whole)
    told = json.loads(said.splitlines()[-1])
    assert told["metrics"] == result_of(whole)["metrics"]
    capsys.readouterr()
    assert main(["predict", "whole", *inputs]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert read_lines(tmp_path / "b.jsonl") == expected and expected
    assert all(set(answer.split()) <= set(each) for each in expected)
    assert len(read_lines(tmp_path / "a.jsonl")) == len(expected)
