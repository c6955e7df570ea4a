"""`lw predict` gives one row per row of its input, in order, whatever is in it."""

import csv
import io
import json
import shlex

import openpyxl
import pyarrow.parquet
import pytest

from cli.following import failure_in, follow
from cli.streams import parsed, run
from loopwright.cli import main
from loopwright.errors import InputError
from loopwright.sources import DataPlan
from tasks.dirty_inputs import KINDS, assert_aligned, odd_jsonl, ragged_csv
from tasks.reviews import read_lines


def codes(found):
    return [(each.get("error") or "").partition(":")[0] for each in found]


@pytest.mark.parametrize("dirt", KINDS)
def test_each_row_of_a_dirty_file_has_its_row_of_output(dirt, capsys, finished, tmp_path):
    file, expected = dirt(tmp_path)
    code, out, err = run(capsys, "predict", finished.path, file)
    found = parsed(out)
    assert code == 0 and codes(found) == expected
    assert all((each["label"] is None) == bool(error) for each, error in zip(found, expected, strict=True))
    failed = len([code for code in expected if code])
    assert f"{failed} of {len(expected)} rows could not be predicted; see the field error" in err
    assert finished.predict(file) == found
    code, out, err = run(capsys, "predict", finished.path, file, "--strict", "--out", "none.csv")
    assert code == 2 and f"error[{next(filter(None, expected))}]" in err and "--missing_values" not in err
    fix = shlex.split(err.split("fix: ")[1])
    assert not (tmp_path / "none.csv").exists() and main(fix[1:]) == 0 and (tmp_path / "none.csv").exists()


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_the_columns_of_the_input_are_kept_and_never_overwritten(ending, capsys, finished, tmp_path):
    file, expected = ragged_csv(tmp_path)
    out = tmp_path / "new" / f"found.{ending}"
    code, _, err = run(capsys, "predict", finished.path, file, "--out", out)
    assert code == 0 and "'predicted_label'" in err and "see the" in err
    if ending == "csv":
        with out.open(newline="", encoding="utf-8") as text:
            found = list(csv.DictReader(text))
    else:
        found = read_lines(out) if ending == "jsonl" else pyarrow.parquet.read_table(out).to_pylist()
    given = ["id", "review", "label", "error", "predicted_label", "score", "predicted_error"]
    assert list(found[0]) == (given if ending != "jsonl" else given[:-1])
    assert [each["id"] or "" for each in found] == ["1", "2", "3", "", "4", "5"] and found[4]["review"] == "dull\nplot"
    assert (found[0]["label"], found[0]["predicted_label"], found[4]["error"]) == ("a", "pos", "x")
    assert codes([{"error": each.get("predicted_error")} for each in found]) == expected


def test_columns_of_mixed_types_and_late_ones_are_written_as_parquet(capsys, finished, tmp_path):
    file, expected = odd_jsonl(tmp_path)
    code, out, _ = run(capsys, "predict", finished.path, file, "--out", "found.parquet", "--json")
    (end,) = parsed(out)
    assert (code, end["event"], end["num_rows"], end["num_failed"]) == (0, "end", 8, 6)
    assert end["renamed"] == {"label": "predicted_label"} and end["out"] == "found.parquet"
    found = pyarrow.parquet.read_table("found.parquet").to_pylist()
    assert codes(found) == expected and [each["label"] for each in found] == [*[None] * 7, "z"]
    assert [each["review"] for each in found][3:5] == ["great", json.dumps({"x": 1})]


def test_texts_and_lines_have_a_row_each_and_json_ends_with_the_counts(capsys, finished, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("great film\n\n \t \r\ndull plot"))
    code, out, err = run(capsys, "predict", finished.path, "-", "--json")
    *found, end = parsed(out)
    assert (code, err) == (0, "") and codes(found) == ["", "data.missing", "data.missing", ""]
    assert (end["num_rows"], end["num_failed"], end["exit_code"]) == (4, 2, 0)
    code, out, err = run(capsys, "predict", finished.path, "good", " ")
    assert code == 0 and codes(parsed(out)) == ["", "data.missing"] and "1 of 2 rows" in err
    code, out, err = run(capsys, "predict", finished.path, "good", "", "--strict")
    assert (code, out) == (2, "") and "error[data.missing]" in err
    code, out, _ = run(capsys, "predict", finished.path, "absent.csv", "--json")
    assert code == 2 and parsed(out)[0]["code"] == "data.file"
    assert run(capsys, "predict", finished.path, "great film " * 60)[0] == 0  # longer than the name of a file


def test_python_is_given_the_same_rows_and_may_be_strict(finished, caplog):
    assert_aligned(finished, ["great film", "dull plot"], {None: "data.missing", "\ud800": "data.value"})
    assert "of 6 rows could not be predicted" in caplog.text
    rows = [{"review": "great"}, {"review": ["a"]}, {"text": "dull"}, {"other": 1}, "great", None]
    expected = ["", "data.value", "", "data.missing", "", "data.missing"]
    assert codes(finished.predict(rows)) == expected
    with pytest.raises(InputError) as caught:
        finished.predict(rows, strict=True)
    assert caught.value.code == "data.value" and len(caught.value.saw) == 3
    with pytest.raises(InputError) as caught:
        finished.predict([{"txt": "great"}])
    assert caught.value.code == "data.column"


def test_a_file_without_a_known_ending_is_not_taken_for_a_text(capsys, finished, tmp_path):
    (tmp_path / "rows.dat").write_text("review;id\ngreat film;1\n")
    code, _, err = run(capsys, "predict", finished.path, "rows.dat")
    assert code == 2 and "error[data.ending]" in err
    code, out, _ = run(capsys, "predict", finished.path, "rows.dat", "--file_kind", "csv", "--delimiter", ";")
    assert code == 0 and [each["label"] for each in parsed(out)] == ["pos"]
    code, _, err = run(capsys, "predict", finished.path, "rows.dat", "--out", "new/found.xml")
    assert code == 2 and "--out new/found.jsonl" in err


@pytest.mark.parametrize("kind", ["csv", "tsv", "xlsx"])
def test_a_file_without_a_header_loses_no_row(kind, capsys, finished, tmp_path):
    texts = ["a great film", "dull plot and boring actors", "fine", "it was nice, and superb"]
    file = tmp_path / f"texts.{kind}"
    if kind == "xlsx":
        book = openpyxl.Workbook()
        for text in texts:
            book.active.append([text])
        book.save(file)
    else:
        with file.open("w", newline="") as opened:
            csv.writer(opened, delimiter="\t" if kind == "tsv" else ",").writerows([text] for text in texts)
    code, _, err = run(capsys, "predict", finished.path, file)
    failure = failure_in(err)
    assert (code, failure.code, len(failure.ways)) == (2, "data.header", 2)
    found = [parsed(run(capsys, *follow(["predict", str(finished.path), str(file)], way))[1]) for way in failure.ways]
    assert [len(each) for each in found] == [4, 3] and found[0][1:] == found[1]


def test_notes_name_the_column_that_is_read_and_the_one_that_is_taken(capsys, finished, tmp_path):
    (tmp_path / "rows.csv").write_text(
        "id,comment,label,predicted_label\n1,a great film of mine,x,y\n2,dull and poor,x,y\n"
    )
    code, _, err = run(capsys, "predict", finished.path, "rows.csv", "--out", "found.csv")
    assert code == 0 and "text is read from 'comment'" in err
    assert "a column 'predicted_label': the predicted label is 'predicted_predicted_label'" in err


def test_a_nul_byte_spoils_its_row_only(capsys, finished, tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"review,id\ngreat film,1\ndu\0ll,2\nfine,3\n")
    (tmp_path / "lines.txt").write_bytes(b"great film\ndu\0ll\nfine\n")
    for name in ("rows.csv", "lines.txt"):
        code, out, _ = run(capsys, "predict", finished.path, name)
        assert code == 0 and codes(parsed(out)) == ["", "data.nul", ""]


def test_the_inputs_are_never_overwritten(capsys, finished, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("review\ngreat film\n")
    (tmp_path / "link.csv").symlink_to(file)
    before = file.read_bytes()
    trained = DataPlan.read(finished.path / "data.json").files[0].path
    for out in ("rows.csv", f"../{tmp_path.name}/rows.csv", "link.csv", trained):
        words = ["predict", str(finished.path), "rows.csv", "--out", out]
        code, _, err = run(capsys, *words)
        assert code == 2 and failure_in(err).code == "args.value" and file.read_bytes() == before
        assert run(capsys, *follow(words, failure_in(err).fix))[0] == 0
