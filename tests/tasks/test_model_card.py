"""What a run leaves for people who did not see it: the model card, and what a notebook shows."""

import csv
import json
import re
from html.parser import HTMLParser

from loopwright import api
from loopwright.cli import main
from loopwright.report.run_view import view
from loopwright.report.summary import card_of
from loopwright.run_folder import RunFolder
from loopwright.tasks.scoring import without_formula


class Checked(HTMLParser):
    """Refuses elements that are not closed in their order; collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def shown_by(run):
    page = Checked()
    page.feed(run._repr_html_())
    assert page.open == []
    return page, " ".join(" ".join(page.words).split())


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": None, **fields}))


def exported_card(run, tmp_path):
    return (run.export(tmp_path / "model") / "README.md").read_text()


def test_the_card_has_the_data_hash_the_metrics_with_their_intervals_the_baselines_and_what_chose_it(finished):
    card = (finished.path / "model" / "README.md").read_text()
    plan = json.loads((finished.path / "data.json").read_text())
    result = finished.result
    assert [file["sha256"] in card for file in plan["files"]] == [True]
    low, high = result["intervals"]["accuracy"]
    value = f"{(best := result['metrics']['accuracy']):.4f} ±{max(high - best, best - low):.3f}"
    assert f"| accuracy | {value} | {low:.4f} to {high:.4f} |" in card
    for name, baselines in result["baselines"].items():
        for metric, baseline in baselines.items():
            assert f"| {name} (baseline): {metric} | {baseline:.4f} | |" in card
    assert f"The best model by {result['metric']} (more is better) on the validation data" in card
    assert "labels: neg, pos" in card and "no test data was given" in card
    assert str(finished.path) not in card


def test_missing_intervals_and_undefined_metrics_of_both_splits_are_told_apart(copied):
    tested = {"test_metrics": {"loss": 1.0}, "test_no_intervals": {"loss": "B"}, "test_nonfinite": {"f1": "nan"}}
    change(copied.path / "result.json", no_intervals={"loss": "A"}, **tested)
    card = card_of(view(RunFolder(copied.path)))
    assert card.missing == ["No interval for loss: A.", "No interval for test loss: B."]
    assert ("test f1", "nan", "") in card.others


def test_a_notebook_shows_the_top_of_the_report(finished):
    page, words = shown_by(finished)
    assert f"{finished.metrics['accuracy']:.4f}" in words and finished.path.name in words and "done" in words
    assert "this run" in words and "majority" in words
    # It stands by itself in light and dark: no sheet, no script, the colour of the notebook for texts.
    assert {name for name, _ in page.attributes} == {"style"}
    assert "color:inherit" in finished._repr_html_() and "<script" not in finished._repr_html_()


def test_a_notebook_shows_the_name_of_a_run_escaped_and_an_unfinished_run_with_its_results_so_far(copied):
    change(copied.path / "run.json", task="<b>")
    copied = api.Run.find(copied.path.rename(copied.path.with_name("<script>alert(1)")))
    text = copied._repr_html_()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert shown_by(api.Run.find(copied.path))
    (copied.path / "result.json").unlink()
    assert "So far, at the best evaluation" in shown_by(api.Run.find(copied.path))[1]
    (copied.path / "metrics.jsonl").write_text("")
    words = shown_by(api.Run.find(copied.path))[1]
    assert "has no records yet" in words and re.search(r"train rows \d+", words)


def test_the_card_of_an_unfinished_run_says_so(finished, copied, tmp_path):
    change(copied.path / "status.json", state="preempted", update=99)
    for name in ("result.json", "model/README.md", "model/model.safetensors", "model/SHA256SUMS"):
        (copied.path / name).unlink()
    card = exported_card(copied, tmp_path)
    update, best = finished.result["update"], finished.result["metrics"]["accuracy"]
    assert "The best model by accuracy (more is better) on the validation data, " in card
    assert f"after update {update} of 99, and the run is not finished." in card
    assert f"| accuracy | {best:.4f} ±" in card and "| majority (baseline): accuracy |" in card
    assert 'from_pretrained("FOLDER")' in card and "None" not in card


def test_a_run_saved_before_its_first_evaluation_has_a_card_without_metrics(copied, tmp_path):
    change(copied.path / "status.json", state="preempted")
    for name in ("result.json", "metrics.jsonl", "checkpoints/best.json"):
        (copied.path / name).unlink()
    card = exported_card(copied, tmp_path)
    assert "and the run is not finished; it was not evaluated." in card and "| validation |" not in card


def test_a_run_stopped_early_keeps_its_card(finished, copied, tmp_path):
    change(copied.path / "status.json", state="stopped", message="no improvement")
    assert exported_card(copied, tmp_path) == (finished.path / "model" / "README.md").read_text()


def test_the_card_of_a_resumed_run_describes_its_newer_weights(copied, tmp_path):
    later = json.loads((copied.path / "status.json").read_text())["update"] + 5
    change(copied.path / "status.json", update=later)
    assert f"of {later}, and the run is not finished" in exported_card(copied, tmp_path)


HOSTILE = (
    "<script>x</script>",
    "[a](http://evil.example)",
    "![](x)",
    "\x1b[31mred",
    "a|b",
    "`rm`",
    "\u202egnp",
    "@all",
    "=1+1",
)


def test_names_from_the_data_are_plain_text_in_the_card_on_the_terminal_and_on_request_in_csv(tmp_path, capsys):
    column = "=cmd<img src=x>\x1b[2J"
    rows = [[f"{HOSTILE[n % 9]} {n}", HOSTILE[n % 2 * 8 if n % 20 else 3]] for n in range(90)]
    with (tmp_path / "d.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[column, "label"], *rows])
    words = ["train", "text-classification", "--data", "d.csv", "--text_column", column, "--max_steps", "2"]
    assert main([*words, "--out", "kept", "--threads", "1", "--safe_csv", "--plain"]) == 0
    printed = "".join(capsys.readouterr())
    card, log = ((tmp_path / "kept" / name).read_text(encoding="utf-8") for name in ("model/README.md", "log.txt"))
    assert "&#60;script&#62;x&#60;/script&#62;" in card and "=cmd&#60;img src=x&#62;" in card
    assert not re.search(r"<[a-z/]|\]\(|\x1b|\u202e|@", card)
    assert "\\x1b" in printed and not re.search(r"[\x1b\u202e]", printed + log)
    assert main(["predict", "kept", "d.csv", "--out", "p.csv", "--safe_csv"]) == 0
    assert main(["predict", "kept", "d.csv", "--out", "exact.csv"]) == 0
    safe, exact = (list(csv.reader((tmp_path / name).read_text().splitlines())) for name in ("p.csv", "exact.csv"))
    assert not any(cell[:1] in tuple("=+-@") for row in safe for cell in row)
    assert [row for row in safe if "'=1+1" in row] and [row for row in exact if "=1+1" in row]


def test_formulas_are_quoted_and_numbers_are_not():
    formulas = ("=1", "+a", "-a", "@a", "\t=1", "\r=1", " =1", "＝1", "-2+3+cmd|' /C calc'!A0", "-1.5.2")
    assert [without_formula(each) for each in formulas] == [f"'{each}" for each in formulas]
    harmless = ("-1", "+1.5e-3", "a=b", "", "-.5")
    assert tuple(map(without_formula, harmless)) == harmless
