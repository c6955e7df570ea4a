"""Every text task on a small sample, by command line: killed, moved, used, resumed, evaluated and used again.

What the resumed run ends with is, bit for bit, what a run ends with that nobody killed.
"""

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loopwright.cli import main
from loopwright.tasks import TASKS
from sample_data import SAMPLES
from tasks.forked import run_lines
from tasks.reviews import events, read_lines

FLAGS = ["--epochs", 3, "--batch", 4, "--lr", 1e-3, "--threads", 1, "--no_rehearsal"]
SAVING = ["--save_strategy", "steps", "--save_steps", 2]
KILL = "after_optimizer_step:6:kill"  # two updates after a checkpoint, and in the second epoch
ENDING = "The answer is unknown, and what comes next is"
WIKI = ["--file_kind", "txt", "--block_size", 32, "--vocab_size", 400, "--max_train_samples", 12]
WIKI += ["--max_eval_samples", 6]


@dataclass(frozen=True)
class Case:
    """What a task is trained on, and what is predicted then.

    Attributes:
        train: a file of tests/samples.
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


CASES = {
    "text-classification": Case(
        "mrpc/train.csv",
        "mrpc/test.csv",
        ["--glue", "mrpc", "--max_train_samples", 12, "--max_eval_samples", 6],
        ("He said so.", "So he said."),
        ("label", "score"),
    ),
    "token-classification": Case("conll/sample.json", answer=("entities", "tags", "tokens")),
    "question-answering": Case(
        "SQUAD/sample.json",
        flags=["--max_length", 96, "--max_train_samples", 12, "--max_eval_samples", 6],
        inputs=("Where is Normandy?", "Normandy is a region in France."),
        answer=("answer", "start", "end", "n_best"),
    ),
    "causal-lm": Case("wiki_text/wiki_00", flags=WIKI, inputs=(ENDING,), answer=("text", "continuation")),
    "masked-lm": Case(
        "wiki_text/wiki_00", flags=WIKI, inputs=("Anarchism is a [MASK] philosophy.",), answer=("text", "masks")
    ),
    "multiple-choice": Case("swag/sample.json", answer=("choice", "scores")),
    "summarization": Case(
        "xsum/sample.json",
        flags=["--max_source_length", 48, "--max_target_length", 8, "--num_beams", 2, "--vocabulary_size", 400],
        answer=("summary",),
    ),
    "translation": Case(
        "wmt16/sample.json",
        flags=["--source_lang", "en", "--target_lang", "ro", "--generation_max_length", 8, "--vocabulary_size", 400],
        answer=("translation",),
    ),
    "sentence-embedding": Case("STS-B/train.tsv", "STS-B/dev.tsv", inputs=("a man\ta woman",), answer=("similarity",)),
}


def result_of(run: Path) -> dict[str, object]:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return {name: value for name, value in result.items() if name != "seconds"}


def test_each_text_task_has_a_sample():
    assert set(CASES) <= set(TASKS) and len(CASES) == 9


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(CASES))
def test_a_killed_run_resumes_in_another_folder_to_the_same_bits(task, tmp_path, capsys):
    case = CASES[task]
    train, validation = SAMPLES / case.train, SAMPLES / (case.validation or case.train)
    words = ["train", task, "--train_file", train, "--validation_file", validation, "--keep_duplicates"]
    words += [*case.flags, *FLAGS, *SAVING]
    code, said = run_lines([*words, "--out", "killed"], folder=tmp_path, failpoint=KILL)
    assert code == -signal.SIGKILL, said
    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    used = [["predict", moved, *(case.inputs or [validation]), "--out", f"{name}.jsonl"] for name in "ab"]
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
    assert main(["predict", "whole", *(case.inputs or [str(validation)])]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert read_lines(tmp_path / "b.jsonl") == expected and expected
    assert all(set(case.answer) <= set(each) for each in expected)
    assert len(read_lines(tmp_path / "a.jsonl")) == len(expected)
