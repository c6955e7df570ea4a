"""Files that cannot be read: each is refused with its code, its place and a way out, and nothing is left behind."""

import gzip
import json
import os
import pickle
import sys
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.sources.refusing import assert_refused, refused, write

from loopwright.errors import DataError, InputError
from loopwright.sources import SCHEMAS, DataOptions, files, open_table
from loopwright.sources.locations import is_hub, locate, split_files

CLASSIFY = SCHEMAS["text-classification"]


def test_an_input_error_prints_its_parts_and_survives_pickling():
    error = InputError("data.column", "no such column", saw=["a", "b"], fix="--text_column a")
    assert isinstance(error, DataError) and isinstance(error, ValueError)
    assert str(error) == "error[data.column]: no such column\n  a\n  b\n  fix: --text_column a"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code, again.saw, again.fix) == (str(error), error.code, error.saw, error.fix)


def test_a_missing_file_names_the_nearest_ones(tmp_path):
    write(tmp_path / "train.csv", "text,label\n")
    refusal = assert_refused("data.file", tmp_path / "trian.csv", flag="--train_file")
    assert refusal.error.what == f"--train_file {tmp_path / 'trian.csv'} does not exist"
    assert refusal.fix == f"--train_file {tmp_path / 'train.csv'}"
    assert "there is no folder" in refused("data.file", tmp_path / "no_such_folder" / "x.csv")


def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    if os.getuid() == 0:
        # Nothing is forbidden to root; a broken link is as unreadable.
        (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere.csv")
        path = tmp_path / "link.csv"
    else:
        path = write(tmp_path / "secret.csv", "text,label\n")
        path.chmod(0)
    assert_refused("data.file", path)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "txt", "conll"])
def test_an_empty_file_is_refused(tmp_path, kind, content):
    assert_refused("data.empty", write(tmp_path / f"empty.{kind}", content))


@pytest.mark.parametrize(
    ("code", "name", "content", "seen"),
    [
        ("data.no_rows", "a.csv", "text,label\n", "text, label"),
        ("data.no_rows", "a.json", "[]", "[]"),
        ("data.no_rows", "b.json", '{"data": []}', "[]"),
        ("data.no_rows", "a.conll", "# only a comment\n", "only comments"),
        ("data.encoding", "cut.txt", "caf\u00e9".encode()[:-1], "line 1"),
        ("data.nul", "nul.csv", b"text,label\na,1\nb\0,0\n", "in line 3"),
        ("data.duplicate_column", "twice.csv", "text,label, text\na,1,b\n", "  'text' is the name of columns 1, 3\n"),
        ("data.ragged", "quote.csv", 'text,label\n"a,1\nb,0\nc",0,1\n', "is a quote left open?"),
        ("data.ragged", "a.conll", "EU B-ORG\nrejects O\n\nGerman\n", "line 4 has 1 fields where the first line has 2"),
        ("data.ragged", "b.conll", "EU\nrejects\n", "one field"),
        ("data.quote", "open.csv", 'text,label\na,1\n"b,0\nc,1\nd,0\n', "quote opened in line 3 is never closed"),
        ("data.quote", "stray.csv", 'text,label\n5" disk,1\nx,"b,0\nc,1\n', "line 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(tmp_path, code, name, content, seen):
    assert seen in refused(code, lambda: list(open_table(write(tmp_path / name, content))))


def test_a_character_over_the_border_of_two_chunks_is_fine(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 5)
    text = "\u00e9\u20ac\U0001f600" * 9
    assert open_table(write(tmp_path / "text.txt", text))[0] == {"text": text}


def test_ragged_rows_are_named_with_their_lines_and_counts(tmp_path):
    path = write(tmp_path / "ragged.csv", 'text,label\n"a\nb",1\nc,d,0\ne\n')
    with assert_refused("data.ragged") as refusal:
        list(open_table(path))
    assert "line 4: expected 2, found 3" in refusal and "line 5: expected 2, found 1" in refusal
    with assert_refused("data.ragged"):
        open_table(path)[1]
    assert_refused("data.ragged", CLASSIFY, path)


def test_an_open_quote_in_a_large_file_is_found_without_reading_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    seen = []
    refusal = assert_refused(
        "data.quote", write(tmp_path / "open.csv", 'text,label\na,1\n"b,0\n' + "c,1\n" * 5000), say=seen.append
    )
    assert "line 3" in refusal and 10 <= len(seen) <= 12


@pytest.mark.parametrize("name", ["long.csv", "long.jsonl", "long.txt"])
def test_a_row_of_ten_megabytes_is_refused(tmp_path, name):
    row = {"long.csv": "%s,1", "long.jsonl": '{"text": "%s"}', "long.txt": "%s"}[name]
    content = "\n".join(["text,label" if name == "long.csv" else row % "first", row % ("x" * 10_000_001), row % "last"])
    assert "line 2 is longer than 10 MB" in refused("data.long_row", write(tmp_path / name, content))
    shorter = content.replace("x" * 100, "")
    assert len(list(open_table(write(tmp_path / name, shorter)))) >= 2


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('[{"a": 1}, {"a": }]', "line 1, at byte 17"),
        ('[\n {"a": 1}\n {"a": 2}\n]', "line 3"),
        ('[{"a": 1}, 5]', "item 2 of the list is a number, not an object"),
        ('[{"a": 1}, ["b"]]', "item 2 of the list is a list, not an object"),
        ('{"version": 1,\n "articles": {"a": 1}}', "keys version, articles"),
        ('"text"', "is not a list of objects"),
        ('[{"a": 1}, {"b', "Unterminated string"),
        ('[{"a": 1}', "the file ends there"),
        ('{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ('{"a": 1}\n[1]\n', "line 2 is a list"),
        ('{"data" [{"a": 1}]}', "':' delimiter in line 1"),
        ('[{"a": ' + "[" * 100_000, "nested too deeply in line 1"),
        ('{"a": 1}\n{"a": ' + "[" * 100_000, "line 2 is not JSON: nested too deeply"),
        ('[{"a": ' + "1" * 5000 + "}]", "in line 1"),
    ],
    ids=[f"form{number}" for number in range(14)],
)
def test_json_that_is_no_list_of_objects_is_refused_with_its_place(tmp_path, content, place):
    with assert_refused("data.json") as refusal:
        list(open_table(write(tmp_path / "bad.json", content)))
    assert place in refusal


def test_folders_without_usable_files_are_refused(tmp_path):
    assert "the folder is empty" in refused("data.folder", split_files, tmp_path)
    write(tmp_path / "picture.png", "x")
    assert "picture.png" in refused("data.folder", CLASSIFY, tmp_path)
    for name in ("train.csv", "train.json"):
        write(tmp_path / name, "x")
    assert "several files for train" in refused("data.folder", split_files, tmp_path)
    assert_refused("data.folder", tmp_path)


def test_endings_that_say_nothing_are_refused_unless_the_kind_is_given(tmp_path):
    for name in ("rows.dat", "rows", "rows.gz"):
        path = write(tmp_path / name, b"text,label\na,1\n")
        assert_refused("data.ending", path, seen=".csv", fix="--file_kind")
    assert open_table(tmp_path / "rows", kind="csv")[0] == {"text": "a", "label": "1"}


def test_gz_files_that_are_damaged_or_too_large_are_refused(tmp_path, monkeypatch):
    packed = gzip.compress(b"text,label\n" + b"a,1\n" * 1000)
    assert_refused("data.gzip", write(tmp_path / "cut.csv.gz", packed[:-10]))
    assert_refused("data.gzip", write(tmp_path / "no.csv.gz", b"text,label\n"))
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1000)
    assert "gunzip" in refused("data.gzip", write(tmp_path / "large.csv.gz", packed)).fix


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\na,1\nb,0\n")
    table = pickle.loads(pickle.dumps(open_table(path)))
    write(path, "text,label\na,1\nb,0\nc,1\n")
    with assert_refused("data.changed"):
        table[0]
    table = open_table(path)
    os.truncate(path, 12)
    with assert_refused("data.changed"):
        table[2]


def test_a_missing_package_comes_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refusal = assert_refused("install.extra", write(tmp_path / "rows.parquet", b"PAR1"))
    assert refusal.fix == "pip install 'loopwright[arrow]'"
    assert assert_refused("install.extra", CLASSIFY, "somebody/reviews").fix == "pip install 'loopwright[data]'"


def test_a_hub_dataset_that_cannot_be_reached_is_refused(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    assert "ConnectionError: no network" in refused("data.hub", CLASSIFY, "somebody/reviews")


def test_a_file_that_is_no_parquet_is_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert_refused("data.value", write(tmp_path / "rows.parquet", b"text,label\n"))


def test_only_names_that_are_no_files_are_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("reviews.csv"), "text,label\n")
    assert [is_hub(name) for name in ("imdb", "user/name", "glue:mrpc")] == [True, True, True]
    Path("data").mkdir()
    assert [is_hub(name) for name in ("reviews.csv", "review.csv", "revews", "./x", "a/b/c", "data/x")] == [False] * 6


@pytest.mark.parametrize("wrong", [{"delimiter": "ab"}, {"delimiter": '"'}, {"quoting": "all"}, {"kind": "excel"}])
def test_settings_that_cannot_be_are_refused(tmp_path, wrong):
    assert_refused("args.value", write(tmp_path / "rows.csv", "text,label\na,1\n"), **wrong)


def test_options_that_cannot_be_are_refused(tmp_path):
    assert_refused("args.value", write(tmp_path / "rows.txt", "a\n"), text_unit="word")
    assert_refused("args.value", DataOptions, unknown_labels="keep")
    assert_refused("args.value", locate, None, {"train": None}, {})
    assert_refused("args.value", locate, "a.csv", {"train": "b.csv"}, {})


@pytest.mark.parametrize(
    ("kind", "alphabet"),
    [
        ("csv", 'ab,"\n\r\t\u00e9'),
        ("tsv", 'ab\t"\n\r'),
        ("json", '{}[]",:a1 \n\\'),
        ("jsonl", '{}[]":a1\n'),
        ("txt", "a \n\r"),
        ("conll", "a# \n\t"),
    ],
)
def test_whatever_is_in_a_file_it_is_read_or_refused(kind, alphabet, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / f"rows.{kind}"

    @given(st.text(st.sampled_from(alphabet), max_size=25) | st.binary(max_size=10), st.integers(1, 9))
    @settings(max_examples=300)
    def check(content, chunk_bytes):
        whole, files.CHUNK_BYTES = files.CHUNK_BYTES, chunk_bytes
        try:
            table = open_table(write(path, content))
            assert list(table) == [table[k] for k in range(len(table))] and len(table) >= 1
        except InputError as error:
            assert error.code.startswith("data.") and error.fix
        finally:
            files.CHUNK_BYTES = whole

    check()


def test_nothing_is_written_beside_a_file_that_is_refused(tmp_path):
    write(tmp_path / "bad.json", json.dumps({"a": 1}) + "\n[")
    write(tmp_path / "good.csv", "text,label\na,1\n")
    assert_refused("data.json", CLASSIFY, tmp_path / "bad.json")
    open_table(tmp_path / "good.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "good.csv"]
