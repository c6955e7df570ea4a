"""summarization end to end: training, ROUGE of what is generated, lead baselines, prefixes."""

from pathlib import Path

import pytest

from loopwright import api
from loopwright.cli.main import main
from loopwright.errors import InputError
from tasks.dirty_inputs import assert_aligned
from tasks.phrases import articles, tiny_t5
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_csv, write_jsonl

FLAGS = {"lr": 5e-3, "epochs": 4, "batch": 8, "threads": 1, "vocabulary_size": 400, "quiet": True}
SHORT = {**FLAGS, "epochs": 1, "max_train_samples": 16, "rehearsal": False}
TEXTS = [text for row in articles() for text in row.values()]


@pytest.fixture
def news(tmp_path) -> Path:
    return write_jsonl(tmp_path / "news.jsonl", articles())


def test_summaries_are_learnt_and_written(news):
    run = api.train("summarization", data=news, **FLAGS, max_eval_samples=4)
    assert set(run.metrics) == {"rouge1", "rouge2", "rougeL", "rougeLsum", "loss"}
    assert run.result["metric"] == "rougeL" and set(run.result["baselines"]) == {"lead", "lead-3", "usual text"}
    assert run.metrics["rougeL"] >= run.result["baselines"]["lead"]["rougeL"] + 0.3
    assert run.result["no_intervals"]["rougeL"].startswith("at least 5 samples are needed, there are ")
    assert_recomputed(run)
    (written,) = run.predict(["Somebody saw a tree there."])
    assert list(written) == ["summary"] and written["summary"].startswith("News about")
    assert_aligned(run, ["Somebody saw a tree there."], {" ": "data.missing", None: "data.missing"})
    worst = read_lines(run.path / "eval" / "worst.jsonl")
    assert {"source", "reference", "prediction", "loss", "num_target_tokens", "position", "place"} == set(worst[0])


def test_the_tokens_of_a_language_without_spaces_are_printed_beside_the_numbers(tmp_path, capsys):
    made = [{"document": f"第{k}天的天气很好。我们去了公园。", "summary": f"第{k}天天气好。"} for k in range(60)]
    data = write_jsonl(tmp_path / "zh.jsonl", made)
    run = api.train("summarization", data=data, test_file=data, **{**SHORT, "quiet": False})
    names, beside = ("rouge1", "rouge2", "rougeL", "rougeLsum"), "(Chinese characters)"
    assert run.result["tokens"] == run.result["test_tokens"] == dict.fromkeys(names, beside[1:-1])
    assert run.result["baselines"]["lead"]["rouge1"] > 0.7
    log, card = (run.path / "log.txt").read_text(), (run.path / "model" / "README.md").read_text()
    assert log.count(f" {beside}") == 8 and all(f"| {name} {beside} |" in card for name in names)
    page = (run.path / "report.html").read_text()
    assert f"rougeL {beside}</div>" in page and f"<dt>test rouge1 {beside}</dt>" in page
    capsys.readouterr()
    assert main(["evaluate", str(run.path), "--quiet"]) == 0
    assert capsys.readouterr().out.count(beside) == 4


def test_truncation_is_reported_and_the_whole_summary_is_compared(news):
    run = api.train("summarization", data=news, max_target_length=2, max_source_length=10, **SHORT)
    log = (run.path / "log.txt").read_text()
    assert "max_target_length 2 cuts 100.0 % of rows" in log and "max_source_length 10 cuts 100.0 %" in log
    predictions = read_lines(run.path / "eval" / "predictions.jsonl")
    assert {each["reference"] for each in predictions} <= {row["summary"] for row in articles()}


def test_the_prefix_is_given_or_comes_from_the_model(news, tmp_path):
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


def test_columns_are_also_named_as_in_the_scripts(tmp_path):
    made = [{"number": "1", "long": row["document"], "short": row["summary"]} for row in articles(30)]
    data = write_csv(tmp_path / "odd.csv", made)
    with pytest.raises(InputError, match=r"data\.column"):
        api.check("summarization", data=data, text_column="lnog", **SHORT)
    plan = api.check("summarization", data=data, text_column="long", summary_column="short", **SHORT)
    assert plan.columns == {"source": "long", "target": "short"}


def test_rows_without_a_summary_are_refused_or_dropped(tmp_path):
    made = articles(30)
    made[3]["summary"] = ""
    data = write_csv(tmp_path / "gaps.csv", made)
    with pytest.raises(InputError, match=r"data\.missing"):
        api.train("summarization", data=data, **SHORT)
    assert api.train("summarization", data=data, missing_values="drop", **SHORT).status == "done"
