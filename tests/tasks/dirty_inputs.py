"""Inputs of `predict` with rows that cannot be predicted, one function per kind of dirt, and their expected outcome."""

import json
from pathlib import Path
from typing import Any

from loopwright import api

COLUMN = "review"  # of the texts in the files


def assert_aligned(run: api.Run, good: list[Any], bad: dict[Any, str]) -> None:
    """Assert that each input has its prediction, and the bad ones, given with their codes, an error instead."""
    expected, inputs = [run.predict([each])[0] for each in good], []
    for each in bad:
        inputs += [each, *good]
    found = run.predict(inputs)
    assert len(found) == len(inputs)
    for each, code in bad.items():
        place = inputs.index(each)
        error, *rest = found[place : place + 1 + len(good)]
        assert error["error"].startswith(f"{code}: ") and set(error) == {*expected[0], "error"}
        assert all(value is None for name, value in error.items() if name not in ("error", "image"))
        assert [_settled(one) for one in rest] == [_settled(one) for one in expected]


def _settled(prediction: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a prediction that depends neither on its batch nor on random masks."""
    return {name: value for name, value in prediction.items() if name not in ("score", "scores", "masked_mse")}


def damaged_images(folder: Path, whole: Path) -> dict[Path, str]:
    """Return images that cannot be opened, each with its code: truncated, empty, and something else."""
    folder.mkdir()
    contents = {"cut.png": whole.read_bytes()[:30], "empty.jpg": b"", "words.png": b"not an image"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {folder / name: "data.image" for name in contents}


# Each returns a file and, for each of its rows, the code of its error, or "" for a row that is predicted.


def ragged_csv(folder: Path) -> tuple[Path, list[str]]:
    lines = ["id,review,label,error", "1,great film,a,", "2,dull", "3,a,b,c,d,e", "", '4,"dull\nplot",b,x', "5,,c,"]
    (folder / "ragged.csv").write_text("\n".join(lines) + "\n")
    return folder / "ragged.csv", ["", "data.ragged", "data.ragged", "data.missing", "", "data.missing"]


def blank_tsv(folder: Path) -> tuple[Path, list[str]]:
    (folder / "blank.tsv").write_text("review\tid\n\t1\n   \t2\ngreat film\t3\n")
    return folder / "blank.tsv", ["data.missing", "data.missing", ""]


def _objects() -> tuple[list[Any], list[str]]:
    rows = [{"review": None}, {"review": "great"}, {"review": {"x": 1}}, {"other": 1}, [2], {"review": 5, "label": "z"}]
    return rows, ["data.missing", "", "data.value", "data.missing", "data.json", ""]


def odd_jsonl(folder: Path) -> tuple[Path, list[str]]:
    rows, codes = _objects()
    (folder / "odd.jsonl").write_text("{broken\n\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return folder / "odd.jsonl", ["data.json", "data.missing", *codes]


def odd_json(folder: Path) -> tuple[Path, list[str]]:
    rows, codes = _objects()
    (folder / "odd.json").write_text(json.dumps(rows))
    return folder / "odd.json", codes


def blank_lines(folder: Path) -> tuple[Path, list[str]]:
    (folder / "lines.txt").write_text("great film\r\n\r\n  \r\ndull plot\r\n\r\n", newline="")
    return folder / "lines.txt", ["", "data.missing", "data.missing", ""]


def blank_csv(folder: Path) -> tuple[Path, list[str]]:
    (folder / "one.csv").write_bytes(b"\n\nreview\ngreat film\n\n\r\ndull plot\n\n\n")
    return folder / "one.csv", ["", "data.missing", "data.missing", ""]


def blank_xlsx(folder: Path) -> tuple[Path, list[str]]:
    import openpyxl

    book = openpyxl.Workbook()
    for text in (None, "review", None, "great film", None, "dull plot", None):
        book.active.append([text, None])
    book.active.cell(20, 1, None)
    book.save(folder / "blank.xlsx")
    return folder / "blank.xlsx", ["data.missing", "", "data.missing", ""]


def only_bad_csv(folder: Path) -> tuple[Path, list[str]]:
    (folder / "bad.csv").write_text("review,id\n,1\n,2\n")
    return folder / "bad.csv", ["data.missing"] * 2


KINDS = (ragged_csv, blank_tsv, odd_jsonl, odd_json, blank_lines, blank_csv, blank_xlsx, only_bad_csv)
