"""JSON, text and CoNLL files, folders, gz, parquet; and reading from other processes."""

import gzip
import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys

import hypothesis.strategies as st
import openpyxl
import pytest
from hypothesis import given, settings
from tests.sources.refusing import assert_refused, write

from loopwright.sources import files, json_files, open_table
from loopwright.sources.locations import split_files

ROWS = [{"text": f'row {k} \u00e9\u2028 "q" {{[', "label": k % 3, "more": [k, {"x": None}]} for k in range(50)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda v: st.lists(v, max_size=3)
)


def test_json_in_all_its_forms_gives_the_same_rows(tmp_path):
    forms = {
        "list.json": json.dumps(ROWS),
        "indented.json": json.dumps(ROWS, indent=2, ensure_ascii=False),
        "wrapped.json": json.dumps({"version": 2.0, "meta": {"data": []}, "data": ROWS, "end": 1}),
        "rows.json": "\ufeff" + json.dumps({"rows": ROWS}, indent=1, ensure_ascii=False),
        "lines.json": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
        "lines.jsonl": "\r\n".join(json.dumps(row) for row in ROWS) + "\r\n\r\n",
    }
    for name, text in forms.items():
        table = open_table(write(tmp_path / name, text))
        assert list(table) == [table[k] for k in range(len(table))] == ROWS, name
        assert table.columns == ("text", "label", "more")
        assert table.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


@given(rows=st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), min_size=1, max_size=6), data=st.data())
@settings(max_examples=100)
def test_a_json_list_cut_anywhere_is_what_json_reads(rows, data, tmp_path_factory):
    text = json.dumps(rows, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    chunk_bytes, files.CHUNK_BYTES = files.CHUNK_BYTES, data.draw(st.integers(1, 9))
    try:
        table = open_table(path)
    finally:
        files.CHUNK_BYTES = chunk_bytes
    assert [table[k] for k in range(len(table))] == list(table) == rows


@pytest.mark.parametrize("content", [ROWS, {"version": 1, "examples": ROWS}])
def test_a_json_list_that_is_too_large_comes_with_a_command_that_converts_it(tmp_path, monkeypatch, content):
    path = write(tmp_path / "large file.json", json.dumps(content))
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 1000)
    refusal = assert_refused("data.json", path)
    assert refusal.error.saw == (f"it has {path.stat().st_size:,} bytes",)
    command = refusal.fix.partition("   ")[0].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert list(open_table(tmp_path / "large file.jsonl")) == ROWS


def test_the_nested_form_of_squad_is_flattened_to_questions(tmp_path):
    answers = [{"text": "b", "answer_start": 2}]
    articles = [
        {"title": "T1", "paragraphs": [{"context": "a b", "qas": [{"id": "1", "question": "q1", "answers": answers}]}]},
        {
            "title": "T2",
            "paragraphs": [
                {"context": "c", "qas": [{"id": str(k), "question": f"q{k}", "answers": []} for k in (2, 3)]},
                {"context": "d", "qas": [{"id": "4", "question": "q4", "answers": [], "is_impossible": True}]},
            ],
        },
    ]
    table = open_table(write(tmp_path / "squad.json", json.dumps({"version": "2.0", "data": articles})))
    assert len(table) == 4
    assert table[0] == {"id": "1", "title": "T1", "question": "q1", "context": "a b", "answers": answers}
    assert [row["id"] for row in table] == [table[k]["id"] for k in range(4)] == ["1", "2", "3", "4"]
    assert [row["context"] for row in table] == ["a b", "c", "c", "d"]


def test_a_row_without_a_key_has_none_there_and_rows_outside_are_index_errors(tmp_path):
    table = open_table(write(tmp_path / "rows.jsonl", '{"a": 1}\n{"b": {"c": 2}}\n'))
    assert table.columns == ("a", "b")
    (block,) = table.blocks(["a", "b", "b.c"])
    assert block.values == {"a": [1, None], "b": [None, {"c": 2}], "b.c": [None, 2]}
    for name, content in {"a.csv": "text\nx\n", "a.json": '[{"text": "x"}]'}.items():
        table = open_table(write(tmp_path / name, content))
        assert len(table) == 1
        for index in (1, -1):
            with pytest.raises(IndexError):
                table[index]


def test_text_is_read_by_line_or_by_paragraph(tmp_path):
    path = write(tmp_path / "text.txt", "one\r\ntwo\r\n\r\n\r\nthree\r\n\r\nfour")
    lines, paragraphs = open_table(path), open_table(path, text_unit="paragraph")
    assert [row["text"] for row in lines] == ["one", "two", "three", "four"]
    assert [row["text"] for row in paragraphs] == ["one\ntwo", "three", "four"]
    assert [paragraphs[k] for k in range(3)] == list(paragraphs)
    assert [paragraphs.place(k) for k in range(3)] == ["line 1", "line 5", "line 7"]


def test_conll_files_become_sentences(tmp_path):
    content = (
        "-DOCSTART- -X- O\n\n# text = EU rejects\nEU NNP B-ORG\nrejects VBZ O\n\n\nPeter NNP B-PER\n# a comment\n\n"
    )
    table = open_table(write(tmp_path / "train.conll", content))
    expected = [
        {"tokens": ["EU", "rejects"], "field_2": ["NNP", "VBZ"], "tags": ["B-ORG", "O"]},
        {"tokens": ["Peter"], "field_2": ["NNP"], "tags": ["B-PER"]},
    ]
    assert list(table) == [table[0], table[1]] == expected
    with_tabs = open_table(write(tmp_path / "tabs.iob", "New York\tB-LOC\n.\tO\n"))
    assert list(with_tabs) == [{"tokens": ["New York", "."], "tags": ["B-LOC", "O"]}]


def test_gz_files_are_read_like_the_files_in_them(tmp_path):
    content = "text,label\na,1\nb,0\n"
    path = write(tmp_path / "rows.csv.gz", gzip.compress(content.encode()))
    table = open_table(path)
    assert list(table) == [table[0], table[1]] == list(open_table(write(tmp_path / "rows.csv", content)))
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert pickle.loads(pickle.dumps(table))[1] == {"text": "b", "label": "0"}


def test_a_folder_holds_its_splits(tmp_path):
    for name in ("train.csv", "dev.tsv", "test.jsonl.gz", "notes.md", "other.csv"):
        write(tmp_path / name, "x")
    found = {split: path.name for split, path in split_files(tmp_path).items()}
    assert found == {"train": "train.csv", "validation": "dev.tsv", "test": "test.jsonl.gz"}
    (tmp_path / "train.csv").rename(tmp_path / "train-00000-of-00001.parquet")
    assert split_files(tmp_path)["train"].name == "train-00000-of-00001.parquet"


def test_progress_is_told_and_ends_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    path = write(tmp_path / "rows.csv", "text,label\n" + "some text,1\n" * 100)
    seen = []
    open_table(path, say=seen.append)
    assert len(seen) == 13
    assert seen[0] == (str(path), "indexing", 100, path.stat().st_size)
    assert seen[-1].num_bytes_done == seen[-1].num_bytes


def read_rows(table, indices, results):
    results.put([table[index] for index in indices])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_rows_are_read_from_other_processes(tmp_path, kind, method):
    rows = [{"id": str(k), "text": f"text {k}"} for k in range(20)]
    content = {
        "csv": "id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows),
        "jsonl": "\n".join(map(json.dumps, rows)),
        "json": json.dumps(rows),
    }[kind]
    table = open_table(write(tmp_path / f"rows.{kind}", content))
    assert table[3] == rows[3]  # The file is open in this process before the others start.
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=read_rows, args=(table, range(20), results))
    process.start()
    assert results.get(timeout=60) == rows
    process.join()
    assert table[4] == rows[4]


def test_parquet_is_read_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": f"row {k}", "label": k % 2} for k in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    table = open_table(tmp_path / "train.parquet")
    assert table.columns == ("text", "label") and len(table) == 5
    assert list(table) == [table[k] for k in range(5)] == rows
    assert table.sha256 == hashlib.sha256((tmp_path / "train.parquet").read_bytes()).hexdigest()


def test_importing_the_readers_imports_no_heavy_package():
    code = (
        "import sys, loopwright.sources as s; heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)), len(s.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("[] ") and int(done.stdout.split()[-1]) >= 15


def workbook(path, *sheets):
    book = openpyxl.Workbook()
    book.remove(book.active)
    for number, rows in enumerate(sheets):
        sheet = book.create_sheet(f"s{number}")
        for row in rows:
            sheet.append(row)
    book.save(path)
    return book


def test_the_first_sheet_with_rows_is_read_and_cells_beyond_the_table_may_hold_blanks(tmp_path):
    path = tmp_path / "rows.xlsx"
    workbook(path, [["about this file"]], [["text", "label"], ["a", "x", "  "], ["b", "y"]], [["other"], [1]])
    table = open_table(path)
    assert list(table) == [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    assert table.settings()["sheet"] == "s1" and "'s1' is read" in table.notes[0]
    assert len(open_table(path, sheet="s2")) == 1 and open_table(path, sheet="s2").notes == ()
    assert_refused("data.no_rows", path, sheet="s0")


def test_merged_cells_are_filled_and_formulas_without_values_refused(tmp_path):
    path = tmp_path / "rows.xlsx"
    book = workbook(path, [["text", "label"], ["a", "x"], ["b"], ["c", "y"], ["d"]])
    book["s0"].merge_cells("B2:B3")
    book["s0"].merge_cells("B4:B5")
    book.save(path)
    table = open_table(path)
    assert [row["label"] for row in table] == ["x", "x", "y", "y"] and "B2:B3" in table.notes[0]
    book["s0"]["A3"] = '="film " & B2'
    book.save(path)
    assert_refused("data.value", path, seen="A3")
