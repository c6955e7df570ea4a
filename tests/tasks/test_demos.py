"""The demos of texts and of objects: listed with their seconds, and each of them learns, here in a shortened run."""

import re

import pytest

from loopwright.api import Run
from loopwright.cli import main
from loopwright.demos import find_minilm, stdlib_docs
from loopwright.tasks import get_task
from report.demo_panels import assert_every_panel_has_data
from tasks.recomputed import assert_recomputed

_ONCE = "--eval_strategy no"  # evaluated at the end alone
# Flags that shorten the demo, rows of validation, a metric, the value that it has to be better than, and the baseline
# that this value itself is better than.
SHORT = {
    "text-classification": ("--max_train_samples 160 --batch 8", 60, "accuracy", 0.3, "majority"),
    "token-classification": ("--max_train_samples 160 --batch 4 --lr 8e-4", 50, "f1", 0.15, "majority"),
    "question-answering": (f"--max_train_samples 80 --batch 4 --freeze 5 {_ONCE}", 32, "f1", 33, "frequent answer"),
    "multiple-choice": (f"--max_train_samples 60 --batch 4 {_ONCE}", 40, "accuracy", 0.38, "chance"),
    "sentence-embedding": ("--max_train_samples 128 --batch 16 --max_length 16", 100, "mrr", 0.6, "word-overlap"),
    "causal-lm": ("--max_steps 60 --batch 8 --max_train_samples 3000", 60, "bits_per_byte", 3.2, "unigram"),
    "chat": ("--max_steps 30 --max_train_samples 300", 60, "perplexity", 3, "unigram"),
    "masked-lm": ("--max_steps 60 --batch 8 --max_train_samples 1000", 60, "token_accuracy", 0.12, "unigram"),
    "preference": ("--max_train_samples 600 --num_samples 1", 60, "reward_accuracy", 0.7, "shorter answer"),
    "summarization": ("--max_train_samples 1300", 50, "rougeL", 0.35, "lead"),
    "translation": ("--max_train_samples 3000", 60, "chrf", 31, "copy"),
    "object-detection": (f"--max_train_samples 300 --epochs 2 {_ONCE}", 40, "map_50", 0.1, "nothing"),
    "instance-segmentation": (f"--max_train_samples 300 --epochs 2 {_ONCE}", 40, "mask_map_50", 0.1, "nothing"),
}


@pytest.fixture(scope="module", autouse=True)
def docs_read_once(tmp_path_factory):
    """Keep the docs of the standard library in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv(stdlib_docs.NO_CACHE_VARIABLE, raising=False)
        yield


def test_each_demo_is_listed_with_its_seconds(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["demo"]) == 0
    listed = {line.split()[2]: line for line in capsys.readouterr().out.splitlines()}
    assert set(SHORT) <= set(listed) and len(SHORT) == 13
    for task in SHORT:
        assert 10 <= int(re.search(r", (\d+) s$", listed[task])[1]) <= 150


@pytest.mark.slow
@pytest.mark.parametrize("task", SHORT)
def test_a_shortened_demo_is_better_than_its_baseline(task, capsys, few_scenes, monkeypatch):
    kind = type(get_task(task))
    if kind.demo_first:
        monkeypatch.setattr(kind, "demo_first", {**kind.demo_first, "max_steps": 60})
    if get_task(task).demo_model == "minilm" and find_minilm().folder is None:
        pytest.skip(find_minilm().problem)
    flags, num_rows, metric, least, baseline = SHORT[task]
    few_scenes(train=300, validation=num_rows)
    words = ["--no_rehearsal", "--logging_steps", "20", "--max_eval_samples", str(num_rows), *flags.split()]
    words += [] if {"--max_steps", "--epochs"} & set(words) else ["--epochs", "1"]
    assert main(["demo", task, *words]) == 0
    assert "best " in capsys.readouterr().out
    result = Run.find("last").result
    reached = result["metrics"][metric]
    sign = -1 if metric in ("bits_per_byte", "perplexity") else 1
    assert sign * reached > sign * least > sign * result["baselines"][baseline][metric]
    if "untrained" in result["baselines"]:  # a model that is good before it is trained has to become better
        assert reached > result["baselines"]["untrained"][metric]
    assert_every_panel_has_data(Run.find("last").path, has_evaluations=_ONCE not in flags)
    assert_recomputed(Run.find("last"))
