"""Odd things that a command line is given to predict, or to train on: each ends with a sentence and a way out."""

import io
import json
import os

import pytest

from cli.streams import run
from tasks.reviews import rows, write_csv


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command line, which must be refused, and returns what it said."""

    def check(*words):
        code, _, err = run(capsys, *words)
        assert code == 2 and "fix: " in err and "Traceback" not in err
        return err

    return check


def test_inputs_that_are_no_utf8_no_files_or_empty_are_refused(refused, finished, monkeypatch, tmp_path):
    chinese = "\u597d".encode("gbk")
    assert "error[data.encoding]" in refused("predict", finished.path, os.fsdecode(chinese))
    for stdin in (io.StringIO(os.fsdecode(chinese)), io.TextIOWrapper(io.BytesIO(b"good\n" + chinese))):
        monkeypatch.setattr("sys.stdin", stdin)
        said = refused("predict", finished.path, "-")
        assert "stdin is not UTF-8" in said and "fix: --encoding gb18030" in said
    (tmp_path / "rows.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    assert "rows.csv is a folder" in refused("predict", finished.path, "rows.csv")
    assert "pipe.csv is no ordinary file" in refused("predict", finished.path, "pipe.csv")
    for task in ("text-classification", "image-classification"):
        assert "--data is empty" in refused("check", task, "--files", "--data", "")


def test_the_encoding_of_inputs_is_detected_or_given(capsys, finished, monkeypatch, tmp_path):
    text = "un film tr\u00e8s dr\u00f4le, jou\u00e9 \u00e0 merveille, l\u2019\u00e9t\u00e9 \u00e0 No\u00ebl"
    for encoding, flags in (("cp1252", []), ("gbk", ["--encoding", "gbk"])):
        data = (text if encoding == "cp1252" else "\u597d").encode(encoding)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        assert run(capsys, "predict", finished.path, "-", *flags)[0] == 0
        assert run(capsys, "predict", finished.path, os.fsdecode(data), *flags)[0] == 0


def test_a_run_shows_the_encoding_of_its_data_and_keeps_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["text,label", *("\u597d" * (1 + k % 2) + f" {k},{k % 2}" for k in range(40))]
    for encoding in ("gb18030", "utf-8"):
        (tmp_path / f"{encoding}.csv").write_bytes("\n".join(lines).encode(encoding))
    given = ("--encoding", "gb18030", "--out", "run", "--max_steps", "2", "--batch", "4")
    code, *printed = run(capsys, "train", "text-classification", "--data", "gb18030.csv", *given)
    assert code == 0 and "encoding gb18030" in "".join(printed) and "(detected)" not in "".join(printed)
    for name in ("gb18030.csv", "utf-8.csv"):  # the run's encoding, and a file that is evidently in another
        assert run(capsys, "evaluate", "run", "--data", name)[0] == 0
    code, *printed = run(capsys, "check", "text-classification", "--files", "--data", "utf-8.csv", "--encoding", "gbk1")
    assert code == 2 and "fix: --encoding gbk" in "".join(printed)


def test_a_very_long_label_is_cut_off_where_it_is_shown(capsys, tmp_path):
    names = ["x" * 300, "y" * 300]
    made = [row | {"stars": names[place % 2]} for place, row in enumerate(rows(30))]
    data = write_csv(tmp_path / "long.csv", made)
    code, *printed = run(capsys, "check", "text-classification", "--files", "--data", data)
    said = "".join(printed)
    assert code == 0 and "labels xxx" in said and max(map(len, said.splitlines())) < 200


def test_halves_of_characters_are_predicted_too(capsys, finished, tmp_path):
    lines = [json.dumps({"text": text}) for text in ("a good film", "half \ud83d a film")]
    (tmp_path / "new.jsonl").write_text("\n".join(lines) + "\n")
    assert run(capsys, "predict", finished.path, "new.jsonl", "--out", "found.jsonl")[0] == 0
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2


def test_what_a_terminal_would_obey_is_spelt_out(capsys, tmp_path):
    made = [row | {"stars": ["good\x1b[31m", "bad\u202e"][place % 2]} for place, row in enumerate(rows(30))]
    code, *printed = run(
        capsys, "check", "text-classification", "--files", "--data", write_csv(tmp_path / "a.csv", made)
    )
    said = "".join(printed)
    assert code == 0 and r"good\x1b[31m" in said and r"bad\u202e" in said
    assert "\x1b" not in said and "\u202e" not in said
    code, *printed = run(
        capsys, "check", "text-classification", "--files", "--data", "a.csv", "--label_column", "\x1b[2J"
    )
    assert code == 2 and "\x1b" not in "".join(printed)
