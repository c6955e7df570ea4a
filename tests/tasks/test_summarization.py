"""summarization end to end: training, ROUGE of what is generated, lead baselines, prefixes, resuming after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright import api
from loopwright.cli import main
from loopwright.errors import InputError
from tasks.phrases import articles, tiny_t5
from tasks.reviews import events, read_lines, write_csv, write_jsonl

FLAGS = {"lr": 5e-3, "epochs": 4, "batch": 8, "threads": 1, "vocabulary_size": 400, "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_train_samples": 16, "rehearsal": False}
TEXTS = [text for row in articles() for text in row.values()]
SHARED = Path(os.environ.get("LOOPWRIGHT_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
XSUM = SHARED / "samples" / "xsum" / "sample.json"


@pytest.fixture
def news(tmp_path) -> Path:
    """Return a file of articles."""
    return write_jsonl(tmp_path / "news.jsonl", articles())


def test_summaries_are_learnt_and_written(news):
    run = api.train("summarization", data=news, **FLAGS)
    assert set(run.metrics) == {"rouge1", "rouge2", "rougeL", "rougeLsum", "loss"}
    assert run.result["metric"] == "rougeL" and set(run.result["baselines"]) == {"lead", "lead-3"}
    assert run.metrics["rougeL"] >= run.result["baselines"]["lead"]["rougeL"] + 0.3
    low, high = run.result["intervals"]["rougeL"]
    assert low <= run.metrics["rougeL"] <= high
    (written,) = run.predict(["Somebody saw a tree there."])
    assert list(written) == ["summary"] and written["summary"].startswith("News about")
    worst = read_lines(run.path / "eval" / "worst.jsonl")
    assert {"source", "reference", "prediction", "loss", "position"} == set(worst[0])


def test_what_is_cut_is_told_and_the_whole_summary_is_compared(news):
    run = api.train("summarization", data=news, max_target_length=2, max_source_length=10, **SHORT)
    log = (run.path / "log.txt").read_text()
    assert "max_target_length 2 cuts 100.0 % of rows" in log and "max_source_length 10 cuts 100.0 %" in log
    predictions = read_lines(run.path / "eval" / "predictions.jsonl")
    assert {each["reference"] for each in predictions} <= {row["summary"] for row in articles()}


def test_the_prefix_is_the_one_asked_for_or_that_of_the_model(news, tmp_path):
    model = tiny_t5(tmp_path / "t5", TEXTS, task_specific_params={"summarization": {"prefix": "summarize: "}})
    own = api.train("summarization", data=news, model=model, **SHORT)
    asked = api.train("summarization", data=news, model=model, source_prefix="In short:  ", **SHORT)
    none = api.train("summarization", data=news, model=model, prefix="", **SHORT)
    for run, prefix in ((own, "summarize: "), (asked, "In short:  "), (none, "")):
        job = api.load_run(run.folder)
        assert job.args.source_prefix == prefix
        (features,) = job.task.create_dataset(job, [{"source": "a tree"}], is_labelled=False)
        assert features["input_ids"] == job.processor(f"{prefix}a tree")["input_ids"]
        assert prefix in (run.path / "log.txt").read_text()


def test_columns_have_the_names_of_the_scripts_too(tmp_path):
    made = [{"number": "1", "long": row["document"], "short": row["summary"]} for row in articles(30)]
    data = write_csv(tmp_path / "odd.csv", made)
    with pytest.raises(InputError, match=r"data\.column"):
        api.check("summarization", data=data, text_column="lnog", **SHORT)
    plan = api.check("summarization", data=data, text_column="long", summary_column="short", **SHORT)
    assert plan.columns == {"source": "long", "target": "short"}


def test_rows_without_a_summary_are_refused_or_left_out(tmp_path):
    made = articles(30)
    made[3]["summary"] = ""
    data = write_csv(tmp_path / "gaps.csv", made)
    with pytest.raises(InputError, match=r"data\.missing"):
        api.train("summarization", data=data, **SHORT)
    assert api.train("summarization", data=data, missing_values="drop", **SHORT).status == "done"


@pytest.mark.slow
@pytest.mark.skipif(not XSUM.is_file(), reason="the shared data is not here")
def test_a_killed_run_on_the_sample_of_xsum_goes_on_where_it_was_moved_to(tmp_path, capsys):
    model = tiny_t5(tmp_path / "t5", [text for row in read_lines(XSUM) for text in row.values()])
    words = ["train", "summarization", "--train_file", XSUM, "--validation_file", XSUM, "--keep_duplicates"]
    words += ["--model", model, "--epochs", 3, "--batch", 4, "--lr", 1e-3, "--threads", 1]
    words += ["--max_source_length", 64, "--generation_max_length", 8, "--num_beams", 2]
    words = list(map(str, words))
    killed = subprocess.run(
        [sys.executable, "-m", "loopwright.cli", *words, "--out", "killed"],
        env={**os.environ, "LW_FAILPOINT": "after_optimizer_step:8:kill"},
        capture_output=True,
        timeout=100,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    moved = (tmp_path / "killed").rename(tmp_path / "moved")
    assert main(["resume", str(moved)]) == main([*words, "--out", "whole"]) == 0
    whole = tmp_path / "whole"
    name = Path("model", "model.safetensors")
    assert (moved / name).read_bytes() == (whole / name).read_bytes() and events(moved) == events(whole)
    capsys.readouterr()
    told = []
    for run in (moved, whole):
        assert main(["evaluate", str(run), "--json"]) == main(["predict", str(run), str(XSUM)]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and len(told[0].splitlines()) == 1 + 10
