"""Odd data: read without doubt, noted, or refused before training."""

import datetime
import errno
import gzip
import json
import os
import shlex
import unicodedata
from functools import partial
from pathlib import Path

import openpyxl
import pytest
from tests.sources.refusing import all_rows, assert_refused, plan_of, refused, write, write_csv, write_jsonl

from loopwright.sources import SCHEMAS, DataOptions, DataPlan, open_table
from loopwright.sources.arrow import ArrowTable
from loopwright.sources.locations import locate, split_files
from loopwright.sources.scan import scan_table

CLASSIFY = SCHEMAS["text-classification"]
TAG = SCHEMAS["token-classification"]
CHOOSE = SCHEMAS["multiple-choice"]
ANSWER = SCHEMAS["question-answering"]
EMBED = SCHEMAS["sentence-embedding"]


def csv_file(path, labels, names=("text", "label")):
    rows = "".join(f"text number {place},{label}\n" for place, label in enumerate(labels))
    return write(path, ",".join(names) + "\n" + rows)


def options_of(fix):
    """Return the options of DataOptions that a fix has as flags."""
    flag, *words = shlex.split(fix)
    value = dict(word.split("=") for word in words) if flag == "--label_map" else words
    return {flag[2:]: value[0] if flag == "--label_kind" else value}


def test_pipes_links_to_nowhere_and_names_that_are_no_utf8_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    assert_refused("data.file", tmp_path / "pipe.csv", seen="is a pipe", fix="write its content to a file")
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere.csv")
    refusal = assert_refused("data.file", tmp_path / "link.csv")
    assert f"is a link to {tmp_path / 'nowhere.csv'}, which does not exist" in refusal
    assert "--data" not in refusal.fix
    path = os.fsencode(csv_file(tmp_path / "rows.csv", "ab" * 20))
    os.rename(path, path.replace(b"rows", b"caf\xe9"))
    refusal = assert_refused("data.encoding", CLASSIFY, tmp_path / os.fsdecode(b"caf\xe9.csv"))
    assert r"caf\udce9.csv is not UTF-8" in refusal and refusal.fix == "rename it, in ASCII or UTF-8"


def test_a_file_of_another_kind_that_is_called_csv_is_told_what_it_is(tmp_path):
    for content, kind, fix in (
        (gzip.compress(b"text,label\n"), "gzip", "rows.csv.gz"),
        (b"PK\x03\x04" + bytes(30), "zip", "unzip -p /"),
        (b"PAR1" + bytes(30), "parquet", "--file_kind parquet"),
        (b"ARROW1\0\0" + bytes(30), "arrow", "--file_kind arrow"),
    ):
        assert_refused("data.ending", write(tmp_path / "rows.csv", content), seen=f"{kind} file", fix=fix)
    content = "".join(json.dumps({"text": f"a, {k}", "label": k % 2}) + "\n" for k in range(9))
    assert "--file_kind jsonl" in refused("data.ending", write(tmp_path / "rows.csv", content)).fix
    assert len(open_table(tmp_path / "rows.csv", kind="jsonl")) == 9
    assert "--file_kind csv" in refused("data.json", csv_file(tmp_path / "rows.jsonl", "ab")).fix


@pytest.mark.parametrize(
    ("name", "fix"),
    [("a.zip", "unzip"), ("a.ods", "save it as xlsx or csv"), ("a.tar.gz", "tar -xf")],
)
def test_files_of_other_programs_come_with_their_own_way_out(tmp_path, name, fix):
    refusal = assert_refused("data.ending", write(tmp_path / name, b"x"))
    assert fix in refusal.fix and "--file_kind" not in refusal.fix


def test_a_folder_that_datasets_has_saved_is_told_how_to_become_a_file(tmp_path):
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        write(tmp_path / name, "{}")
    assert_refused("data.folder", split_files, tmp_path, fix=["load_from_disk", "to_parquet"])


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    csv_file(tmp_path / "train.csv", "ab" * 20)
    for data, train_file in (("", None), (" ", None), (None, "")):
        assert "is empty" in refused("args.value", locate, data, {"train": train_file}, {})


@pytest.mark.parametrize("task", ["text-classification", "image-classification", "semantic-segmentation"])
def test_a_folder_that_may_not_be_looked_into_is_no_trouble_with_writing(tmp_path, monkeypatch, task):
    def forbidden(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    (tmp_path / "train").mkdir()
    monkeypatch.setattr(os, "scandir", forbidden)  # nothing is forbidden to root
    monkeypatch.setattr(os, "listdir", forbidden)
    assert_refused("data.file", SCHEMAS[task], tmp_path, seen="Permission denied", fix="chmod u+rX")


def test_a_line_above_the_header_names_the_delimiter_or_is_suspected(tmp_path):
    for content in ("sep=;\r\ntext;label\r\na, b;1\r\nc;2\r\n", '\ufeff"sep=|"\ntext|label\na, b|1\nc|2\n'):
        table = open_table(write(tmp_path / "rows.csv", content))
        assert list(table) == [{"text": "a, b", "label": "1"}, {"text": "c", "label": "2"}]
        assert table.place(0) == "line 3" and len(table.sha256) == 64
    path = write(tmp_path / "rows.csv", "# made by hand\ntext,label\na,1\nb,0\n")
    with assert_refused("data.ragged") as refusal:
        list(open_table(path))
    assert "line 1" in refusal.fix and "names of the columns" in refusal.fix


PAIRS = [("Go.", "Va !"), ("Hi there.", "Salut !"), ("I am home.", "Je suis là."), ("Run!", "Cours !")]
TEXTS = ("A good film", "pos"), ("dull", "neg"), ("fine plot, really", "pos"), ("poor", "neg")
REVIEWS = [(f"{TEXTS[k % 4][0]} {k}", TEXTS[k % 4][1]) for k in range(20)]
WITHOUT_HEADER = {
    "labels": ("text-classification", "csv", REVIEWS, "text,label"),
    "labels first": ("text-classification", "tsv", [row[::-1] for row in REVIEWS], "label,text"),
    "pairs": ("translation", "tsv", PAIRS, "source,target"),
    "ids": ("text-classification", "xlsx", [(k, *row) for k, row in enumerate(REVIEWS)], "column_1,text,label"),
    "images": ("image-classification", "csv", [(f"{k}.png", "ab"[k % 2]) for k in range(9)], "image,label"),
}


@pytest.mark.parametrize("name", WITHOUT_HEADER)
def test_a_first_line_that_is_a_row_is_refused_and_read_with_the_names_of_columns(tmp_path, name):
    task, kind, rows, names = WITHOUT_HEADER[name]
    path = tmp_path / f"rows.{kind}"
    if kind == "xlsx":
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        book.save(path)
    else:
        write_csv(path, rows[1:], rows[0], delimiter="\t" if kind == "tsv" else ",")
    refusal = refused("data.header", SCHEMAS[task], path)
    assert refusal.fix.split("   or   ")[0] == f"--column_names {names}"
    table = open_table(path, column_names=names.split(","))
    assert [tuple(row.values()) for row in table] == [*map(tuple, rows)] and table.columns == tuple(names.split(","))
    again = open_table(path, **table.settings())
    assert (len(again), again.columns) == (len(rows), table.columns)


HEADERS = [("text", "label"), ("Customer review in full", "mood"), ("a", "b"), ("", "pos or neg"), ("message", "pos")]


@pytest.mark.parametrize("header", HEADERS)
def test_a_first_line_with_names_is_a_header_and_given_names_that_it_has_too_change_nothing(tmp_path, header):
    path = write_csv(
        tmp_path / "rows.csv", [(f"the film number {k}", label) for k, (_, label) in enumerate(REVIEWS)], header
    )
    plan = plan_of(CLASSIFY, path)
    assert plan.files[0].num_rows == len(REVIEWS)
    names = open_table(path).columns
    assert len(open_table(path, column_names=names)) == len(REVIEWS)
    assert refused("args.value", path, column_names=["a", "b", "c"]).fix == "--column_names a,b"


ANSWERS = ["yes", "no", "yes", "no", "Y", "N", "1", "0"] * 3
MIXED_LABELS = {
    "a total": (["pos", "neg"] * 20 + ["40"], "--drop_labels 40", ["neg", "pos"]),
    "a word": (["1", "2", "3"] * 10 + ["none of them"], "--drop_labels 'none of them'", ["1", "2", "3"]),
    "answers": (ANSWERS, "--label_map N=no 0=no Y=yes 1=yes", ["no", "yes"]),
    "half": (["a", "1"] * 20, "--label_kind class", ["1", "a"]),
}


@pytest.mark.parametrize("name", MIXED_LABELS)
def test_numbers_among_words_are_dropped_if_rare_and_mapped_if_they_mean_the_same(tmp_path, name):
    labels, fix, names = MIXED_LABELS[name]
    path = csv_file(tmp_path / "rows.csv", labels)
    refusal = refused("data.label_type", CLASSIFY, path)
    assert refusal.fix.split("   or   ")[0] == fix
    plan = plan_of(CLASSIFY, path, **options_of(fix))
    assert [*plan.labels.names] == names


def test_a_class_of_renamed_labels_is_held_out_like_any_other(tmp_path):
    path = csv_file(tmp_path / "rows.csv", ["a", "b"] * 20 + ["c"])
    for ratio in (0.2, 0.5, 0.9):
        plan = plan_of(CLASSIFY, path, label_map={"c": "a"}, validation_ratio=ratio)
        assert not any("stay in training" in note for note in plan.warnings)


def test_thousands_and_decimals_that_look_alike_are_refused_with_both_ways(tmp_path):
    made = {",": [f'"1,{k:03}"' for k in range(60)], ";": [f"1.{k:03}" for k in range(60)]}
    for delimiter, values in made.items():
        rows = "".join(f"text number {k}{delimiter}{value}\n" for k, value in enumerate(values))
        path = write(tmp_path / "rows.csv", f"text{delimiter}label\n{rows}")
        code = "data.labels" if delimiter == "," else "data.label_type"
        ways = refused(code, CLASSIFY, path).fix.split("   or   ")
        assert sorted(ways) == ["--decimal comma", "--decimal point"] and (ways[0] == "--decimal point") == (
            delimiter == ","
        )
        ranges = [plan_of(CLASSIFY, path, decimal=way.split()[1]).label_range for way in sorted(ways)]
        assert sorted(ranges) == [(1.0, 1.059), (1000.0, 1059.0)]


def test_names_with_blanks_are_quoted_in_the_way_out(tmp_path):
    rows = [[f"a {k}", f"b {k}", k % 2] for k in range(9)]
    path = write_csv(tmp_path / "my rows.csv", rows, ["the text", "other text", "label"])
    assert refused("data.column", CLASSIFY, path).fix == "--text_column 'the text'"
    assert refused("data.file", tmp_path / "my row.csv").fix == f"--data '{path}'"


ROWS = [{"text": f"a {k}", "label": k % 2} for k in range(9)]
JSON = {
    "pandas": ({name: {str(k): row[name] for k, row in enumerate(ROWS)} for name in ROWS[0]}, "by column"),
    "lists": ({name: [row[name] for row in ROWS] for name in ROWS[0]}, "by column"),
    "ids": ({f"id{k}": row for k, row in enumerate(ROWS)}, "by id"),
    "deep": ({"status": "ok", "response": {"result": {"items": ROWS}, "took": 3}}, "response.result.items"),
    "named": ({"version": 1, "reviews": ROWS}, "reviews"),
    "data": ({"version": 1, "data": ROWS}, ""),
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", JSON)
def test_rows_are_found_in_json_of_any_shape(tmp_path, name, indent):
    content, where = JSON[name]
    table = open_table(write(tmp_path / "rows.json", json.dumps(content, indent=indent)))
    assert list(table) == ROWS and [where in note for note in table.notes] == [True] * bool(where)


def test_an_object_with_a_list_in_it_can_be_a_row(tmp_path):
    row = {"question": "who?", "context": "a long text about him and her", "answers": [{"text": "him"}]}
    assert list(open_table(write(tmp_path / "row.json", json.dumps(row)))) == [row]


def test_the_labels_of_label_studio_are_offered_by_their_path_and_no_id_is(tmp_path):
    made = [
        {
            "id": k % 4,
            "annotations": [{"id": k // 2, "completed_by": k % 2, "result": [{"value": {"choices": ["ab"[k % 2]]}}]}],
            "data": {"text": f"a text {k}"},
        }
        for k in range(20)
    ]
    path = write(tmp_path / "export.json", json.dumps(made))
    plan = plan_of(CLASSIFY, path, columns={"label": "annotations.0.result.0.value.choices.0"})
    assert plan.columns["text"] == "data.text" and plan.labels.names == ("a", "b")
    assert plan_of(CLASSIFY, path).columns == plan.columns
    for number, row in enumerate(made):
        row["annotations"][0]["effort"] = number % 3
    refusal = refused("data.column", CLASSIFY, write(path, json.dumps(made)))
    assert refusal.fix == "--label_column annotations.0.result.0.value.choices.0"


CHOICES = {
    "letters": "ABC",
    "numbers": ("option1", "option2", "option3"),
    "words": ("Choice A", "Choice B", "Choice C"),
}


@pytest.mark.parametrize("names", CHOICES.values(), ids=CHOICES)
def test_columns_of_letters_are_choices_and_letters_labels(tmp_path, names):
    rows = [[f"question {k}?", f"one {k}", f"two {k}", f"three {k}", "ABC"[k % 3]] for k in range(30)]
    path = write_csv(tmp_path / "rows.csv", rows, ["question", *names, "answer"])
    fix = refused("data.labels", CHOOSE, path).fix
    plan = plan_of(CHOOSE, path, **options_of(fix))
    assert plan.columns["choices"] == tuple(names) and plan.rows("train")[0]["label"] in (0, 1, 2)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_halves_of_characters_are_replaced_and_that_is_said(tmp_path, name):
    rows = [{"text": f"a {k}", "label": k % 2} for k in range(30)]
    rows[4]["text"] = "half \ud83d of \U0001f600"
    text = json.dumps(rows) if name == "rows.json" else "".join(json.dumps(row) + "\n" for row in rows)
    plan = plan_of(CLASSIFY, write(tmp_path / name, text))
    texts = [row["text"] for row in all_rows(plan)]
    assert "half \ufffd of \U0001f600" in texts and all(text.encode("utf-8") for text in texts)
    assert any("half of a character" in note for note in plan.warnings)


def test_nested_questions_of_another_form_are_refused(tmp_path):
    for questions in (None, ["not an object"], {"question": "who?"}):
        articles = [{"title": "t", "paragraphs": [{"context": "c", "qas": questions}]}]
        assert "qas" in refused("data.json", write(tmp_path / "squad.json", json.dumps({"data": articles})))


def test_blank_cells_and_nan_are_missing_values_and_infinity_is_no_number_to_predict(tmp_path, jsonl):
    path = csv_file(tmp_path / "rows.csv", [" " if k == 3 else f"{k % 2}.0" for k in range(30)])
    plan = plan_of(CLASSIFY, path, missing_values="drop")
    assert plan.dropped == {"missing_values": 1} and plan.labels.kind == "float"
    nan, rows = float("nan"), [{"text": f"a {k}", "label": k / 7} for k in range(30)]
    for changed in ({"label": nan}, {"text": nan}):
        assert_refused("data.missing", CLASSIFY, jsonl([*rows[:3], rows[3] | changed, *rows[4:]]), seen="line 4")
    for value in (float("inf"), 10**400):
        rows[3]["label"] = value
        assert "line 4" in refused("data.label_type", CLASSIFY, jsonl(rows))
    pairs = [{"sentence1": f"a {k}", "sentence2": f"b {k}", "score": nan if k == 2 else k / 9} for k in range(9)]
    assert_refused("data.missing", EMBED, jsonl(pairs))


@pytest.mark.parametrize("word", ["nan", "inf", "NA", "?"])
def test_a_word_for_nothing_among_numbers_is_named_with_its_line(tmp_path, word):
    path = csv_file(tmp_path / "rows.csv", [word if k == 3 else f"{k / 7:.2f}" for k in range(30)])
    refusal = assert_refused("data.label_type", CLASSIFY, path)
    assert f"{word!r}, first in line 5" in refusal
    assert refusal.fix.startswith("--label_kind float --bad_rows drop") and "--label_map" not in refusal.fix
    plan = plan_of(CLASSIFY, path, label_kind="float", bad_rows="drop")
    assert plan.dropped == {"bad_rows": 1} and plan.labels.kind == "float"


def _jsonl(bad):
    good = [json.dumps({"text": f"text number {k}", "label": "ab"[k % 2]}) for k in range(40)]
    return "".join(f"{bad.get(k, line)}\n" for k, line in enumerate(good))


SENTENCES = [[f"word{k}", "runs"] for k in range(40)]
BAD_ROWS = {
    "too many fields": (
        CLASSIFY,
        "rows.csv",
        "text,label\n" + "".join(f"text number {k},{'ab'[k % 2]}{',c' * (k == 3)}\n" for k in range(40)),
        "data.ragged",
    ),
    "too few fields": (
        CLASSIFY,
        "rows.tsv",
        "text\tlabel\n" + "".join(f"text {k}" + f"\t{'ab'[k % 2]}" * (k != 3) + "\n" for k in range(40)),
        "data.ragged",
    ),
    "a line cut off": (CLASSIFY, "rows.jsonl", _jsonl({3: '{"text": "cut'}), "data.json"),
    "a list in a line": (CLASSIFY, "rows.jsonl", _jsonl({3: "[1, 2]"}), "data.json"),
    "a text that is an object": (CLASSIFY, "rows.jsonl", _jsonl({3: '{"text": {"a": 1}, "label": "a"}'}), "data.value"),
    "an item that is a number": (
        CLASSIFY,
        "rows.json",
        f"[{','.join(_jsonl({3: '7'}).splitlines())}]",
        "data.json",
    ),
    "a token without its tag": (
        TAG,
        "rows.conll",
        "\n\n".join(
            "\n".join(f"{word} {'O' if word == 'runs' else 'B-X'}" if k != 3 else word for word in SENTENCES[k])
            for k in range(40)
        ),
        "data.ragged",
    ),
    "fewer tags than tokens": (
        TAG,
        "rows.json",
        json.dumps([{"tokens": words, "tags": ["B-X", "O"][k == 3 :]} for k, words in enumerate(SENTENCES)]),
        "data.tags",
    ),
    "an answer elsewhere": (
        ANSWER,
        "rows.json",
        json.dumps(
            [
                {
                    "id": str(k),
                    "question": f"Who is number {k}?",
                    "context": f"Ada {k} is.",
                    "answers": {"text": ["Bob" if k == 3 else "Ada"], "answer_start": [0]},
                }
                for k in range(40)
            ]
        ),
        "data.answers",
    ),
}


def test_equal_column_names_get_numbers_by_a_flag_and_keep_their_rows(tmp_path):
    rows = "".join(f"text number {k},{'ab'[k % 2]},note {k}\n" for k in range(40))
    path = write(tmp_path / "rows.csv", f"text,label,text\n{rows}")
    refusal = assert_refused("data.duplicate_column", CLASSIFY, path)
    assert refusal.fix.startswith("--column_names text,label,text_2   or   ")
    plan = plan_of(CLASSIFY, path, column_names=["text", "label", "text_2"], columns={"text": "text_2"})
    assert plan.files[0].num_rows == 40 and plan.columns == {"text": "text_2", "label": "label"}
    again = DataPlan.read(write(tmp_path / "data.json", plan.to_json()))
    assert all_rows(again) == all_rows(plan) and {row["text"][:4] for row in all_rows(again)} == {"note"}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_refused_or_dropped_and_every_other_row_is_read_again(tmp_path, kind):
    schema, name, content, code = BAD_ROWS[kind]
    path = write(tmp_path / name, content)
    assert assert_refused(code, schema, path).fix.startswith("--bad_rows drop   or   ")
    plan = plan_of(schema, path, bad_rows="drop")
    assert plan.dropped == {"bad_rows": 1} and plan.files[0].num_rows == 40
    assert any("1 row of" in warning and "left out" in warning for warning in plan.warnings)
    again = DataPlan.read(write(tmp_path / "data.json", plan.to_json()))
    for split in plan.splits:
        rows = all_rows(again, split)
        assert rows == all_rows(plan, split) and len(rows) == len(plan.splits[split])
    assert sum(map(len, plan.splits.values())) == 39


def test_classes_that_look_like_nothing_or_each_other_are_noted_and_one_for_each_row_refused(tmp_path):
    plan = plan_of(CLASSIFY, csv_file(tmp_path / "rows.csv", ["yes", "no", "Yes", "yes", "nan"] * 10))
    assert any("'nan'" in note and "no value" in note for note in plan.warnings)
    assert any("'Yes' (10) and 'yes' (20)" in note and "--label_map Yes=yes makes" in note for note in plan.warnings)
    refusal = assert_refused("data.labels", CLASSIFY, csv_file(tmp_path / "rows.csv", [f"label{k}" for k in range(30)]))
    assert "30 rows" in refusal and "30 classes" in refusal and "labels that repeat" in refusal.fix
    path = write(tmp_path / "comma.csv", "text,label\n" + "".join(f'a {k},"{k},5"\n' for k in range(30)))
    assert refused("data.labels", CLASSIFY, path).fix == "--decimal comma"
    assert plan_of(CLASSIFY, path, decimal="comma").label_range == (0.5, 29.5)


@pytest.mark.parametrize(("labels", "fix"), [((0.0, 1.0), "0.0=0 1.0=1"), ((False, True), "false=0 true=1")])
def test_the_same_numbers_in_another_form_are_what_was_meant(tmp_path, labels, fix):
    rows = [{"text": f"b {place}", "label": labels[place % 2]} for place in range(9)]
    train, other = csv_file(tmp_path / "train.csv", [0, 1] * 15), write_jsonl(tmp_path / "v.jsonl", rows)
    refusal = assert_refused("data.labels", CLASSIFY, train_file=train, validation_file=other)
    assert refusal.fix.startswith(f"--label_map {fix}   or")


def test_a_file_of_which_no_row_is_left_is_told_why(tmp_path):
    train, other = csv_file(tmp_path / "train.csv", "ab" * 15), csv_file(tmp_path / "other.csv", [" ", ""])
    refusal = assert_refused("data.split", CLASSIFY, train_file=train, validation_file=other, missing_values="drop")
    assert "2 rows of other.csv lack a value and are left out" in refusal


def test_a_row_may_have_no_class_and_a_class_no_row_in_training(jsonl, tmp_path):
    rows = [{"text": f"a {k}", "label": [["x"], ["x", "y"], []][k % 3]} for k in range(30)]
    plan = plan_of(CLASSIFY, jsonl(rows))
    assert plan.labels.kind == "multi" and plan.labels.names == ("x", "y")
    assert sum(row["label"] == [] for row in all_rows(plan)) == 10
    assert_refused("data.missing", CLASSIFY, jsonl([*rows, {"text": "b", "label": None}]))
    rows = [{"tokens": [f"a{k}"], "tags": ["O" if k % 2 else "B-PER"]} for k in range(30)]
    held_back = write_jsonl(tmp_path / "validation.jsonl", [{"tokens": ["z"], "tags": ["O"]}])
    names = ("O", "B-PER", "B-LOC")
    plan = plan_of(TAG, train_file=jsonl(rows), validation_file=held_back, label_names=names)
    assert any("never occurs in training: B-LOC" in note for note in plan.warnings)


@pytest.mark.parametrize("write_list", [repr, json.dumps])
def test_lists_that_a_csv_file_has_as_text_are_read_as_lists(tmp_path, write_list, jsonl):
    words = [["Anna", f"it's {k}", "here"] for k in range(30)]
    rows = [{"tokens": write_list(tokens), "ner_tags": write_list(["B-PER", "O", "O"])} for tokens in words]
    plan = plan_of(TAG, jsonl(rows))
    assert plan.labels.names == ("B-PER", "O")
    assert {"tokens": ["Anna", "it's 7", "here"], "tags": [0, 1, 1]} in all_rows(plan)
    rows = [{"text": f"a {k}", "label": write_list([["x"], ["x", "y"]][k % 2])} for k in range(30)]
    plan = plan_of(CLASSIFY, write_jsonl(tmp_path / "labels.jsonl", rows))
    assert (plan.labels.kind, plan.labels.names) == ("multi", ("x", "y"))
    rows = [{"context": f"c {k}", "choices": write_list([f"a {k}", f"b {k}"]), "label": k % 2} for k in range(30)]
    plan = plan_of(CHOOSE, write_jsonl(tmp_path / "choices.jsonl", rows))
    assert {"context": "c 7", "choices": ["a 7", "b 7"], "label": 1} in all_rows(plan)


def test_tags_in_one_text_are_a_list_and_an_empty_last_field_is_refused(jsonl, tmp_path):
    rows = [{"tokens": f"[ a{k} ]", "tags": "[0, 1, 0]"} for k in range(30)]
    plan = plan_of(TAG, jsonl(rows))
    assert {"tokens": ["[", "a7", "]"], "tags": [0, 1, 0]} in all_rows(plan)
    rows[4]["tokens"] = "['a', 'b' 'c"
    assert_refused("data.tags", TAG, jsonl(rows[:4] + [{"tokens": "['a', b]", "tags": "O"}]))
    content = "".join(f"Anna{k}\tB-PER\nlives\t{'' if k == 4 else 'O'}\n\n" for k in range(30))
    assert "'lives'" in refused("data.tags", TAG, write(tmp_path / "tags.conll", content))


@pytest.mark.parametrize(
    ("changed", "code", "seen"),
    [
        ({"tags": [None, "O"]}, "data.tags", "'a4' in line 5 has no tag"),
        ({"tags": ["", "O"]}, "data.tags", "'a4' in line 5 has no tag"),
        ({"tags": ["O", " "]}, "data.tags", "'b' in line 5 has no tag"),
        ({"tags": [-100, "O"]}, "data.tags", "'a4' in line 5 has no tag"),
        ({"tokens": ["a", None]}, "data.value", ["word 2", "line 5"]),
    ],
)
def test_a_token_without_a_tag_and_a_missing_token_are_refused(jsonl, changed, code, seen):
    rows = [{"tokens": [f"a{k}", "b"], "tags": ["B-PER", "O"]} for k in range(30)]
    rows[4] |= changed
    assert_refused(code, TAG, jsonl(rows), seen=seen)


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("a.txt", "Anna B-PER\nlives O\n\n" * 9, "--file_kind conll"),
        ("a.csv", "Sentence #,Word,Tag\n" + "1,Anna,B-PER\n,lives,O\n" * 9, "one row per sentence"),
        ("a.jsonl", '{"text": "Anna lives", "spans": [{"start": 0, "label": "PER"}]}\n' * 9, "with a list in each row"),
    ],
)
def test_other_forms_of_tagged_text_come_with_a_way_out_that_is_one(tmp_path, name, content, fix):
    assert fix in refused("data.column", TAG, write(tmp_path / name, content)).fix


def choice_rows(label=lambda k: k % 3):
    return [{"context": f"c {k}", "choices": [f"a {k}", f"b {k}", f"d {k}"], "label": label(k)} for k in range(30)]


@pytest.mark.parametrize(
    ("label", "fix"),
    [
        (lambda k: "ABC"[k % 3], "--label_map A=0 B=1 C=2"),
        (lambda k: k % 3 + 1, "--label_map 1=0 2=1 3=2"),
        (lambda k: float(k % 3), "--label_map 0.0=0 1.0=1 2.0=2"),
        (lambda k: f"a {k}", "write the position"),
        (lambda k: -1 if k == 4 else k % 3, "--unknown_labels drop"),
    ],
)
def test_positions_in_other_forms_come_with_the_map_that_reads_them(label, fix, jsonl):
    refusal = assert_refused("data.labels", CHOOSE, jsonl(choice_rows(label)))
    assert refusal.fix.startswith(fix) and "did you mean" not in refusal


def test_rows_may_have_more_choices_than_those_before_and_fewer_than_columns(jsonl, table):
    rows = choice_rows() * 20 + [{"context": "late", "choices": list("abcde"), "label": 4}]
    assert plan_of(CHOOSE, jsonl(rows)).labels.names == ("0", "1", "2", "3", "4")
    header = ["context", "choice0", "choice1", "choice2", "label"]
    rows = [[f"c {k}", f"a {k}", f"b {k}", "" if k % 2 else f"d {k}", k % 2] for k in range(30)]
    assert {len(row["choices"]) for row in all_rows(plan_of(CHOOSE, table(rows, header)))} == {2, 3}
    rows = [[f"c {k}", f"a {k}", "", f"d {k}", k % 2] for k in range(30)]
    assert_refused("data.missing", CHOOSE, table(rows, header))


@pytest.mark.parametrize(
    "form",
    [
        lambda text, start: {"text": [text]},
        lambda text, start: [text],
        lambda text, start: {"text": text, "answer_start": start},
        lambda text, start: str({"text": [text], "answer_start": [start]}),
    ],
)
def test_answers_in_other_forms_are_read(form, jsonl):
    starts = {f"The man {k} is Anna.": len(f"The man {k} is ") for k in range(30)}
    rows = [{"question": "who?", "context": text, "answers": form("Anna", start)} for text, start in starts.items()]
    found = {row["context"]: row["answers"] for row in all_rows(plan_of(ANSWER, jsonl(rows)))}
    assert found == {text: {"text": ["Anna"], "answer_start": [start]} for text, start in starts.items()}


def test_a_score_in_words_is_not_told_of_a_flag_that_pairs_do_not_have(jsonl):
    pairs = [{"sentence1": f"a {k}", "sentence2": f"b {k}", "label": "entailment"} for k in range(9)]
    refusal = assert_refused("data.label_type", EMBED, jsonl(pairs), seen="--score_column names another column")
    assert "--label_kind" not in refusal.fix


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """Return a function that writes a parquet file of some columns; what `datasets` keeps goes into a folder here."""
    datasets = pytest.importorskip("datasets")
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def save(names, *columns):
        content = arrow.Table.from_arrays(list(map(arrow.array, columns)), names=names)
        writer.write_table(content, tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    return save


def test_parquet_files_have_bytes_dates_and_no_rows_or_a_name_twice(parquet, capfd):
    days = [datetime.date(2024, 1, place % 2 + 1) for place in range(30)]
    plan = plan_of(CLASSIFY, parquet(["text", "label"], [b"text %d" % place for place in range(30)], days))
    assert plan.labels.names == ("2024-01-01", "2024-01-02") and all_rows(plan)[0]["text"].startswith("text ")
    plan = plan_of(CLASSIFY, parquet(["text", "label"], [f"a {k}" for k in range(30)], [b"yes", b"no"] * 15))
    assert plan.labels.names == ("no", "yes")
    assert_refused("data.no_rows", parquet(["text", "label"], [], []))
    assert_refused("data.duplicate_column", parquet(["text", "text"], ["a"], ["b"]))
    assert len(open_table(parquet(["text", "label"], ["a"], ["b"]))) == 1
    assert capfd.readouterr() == ("", "")


def test_a_number_below_zero_is_no_class_of_a_list_that_names_them(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = datasets.ClassLabel(names=["O", "B-PER"])
    features = datasets.Features({"tokens": [datasets.Value("string")], "ner_tags": [names]})
    for other in (None, -1):
        rows = [{"tokens": ["a", f"b{k}"], "ner_tags": [0, 1]} for k in range(30)]
        rows[4]["ner_tags"] = [0, other]
        made = datasets.Dataset.from_list(rows, features=features)
        with assert_refused("data.tags"):
            table = ArrowTable(lambda made=made: made.data.table, str(tmp_path / "a.parquet"), "parquet", "0" * 64, 1)
            scan_table(table, TAG, {"tokens": "tokens", "tags": "ner_tags"}, "tags", DataOptions(), {}, None)


def test_names_and_labels_are_found_in_either_normal_form_of_unicode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decomposed = partial(unicodedata.normalize, "NFD")
    rows = [f"영화 {index},{decomposed('péssimo') if index % 4 < 2 else 'péssimo'}" for index in range(40)]
    rows = [row if index % 2 else row.replace("p", "P") for index, row in enumerate(rows)]
    for name, form in (("리뷰.csv", decomposed), ("다른.csv", str)):
        lines = [f"{form('의견')},{form('étiquette')}", *(f"{name} {row}" for row in rows)]
        Path(form(name)).write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = {"text": "의견", "label": "étiquette"}
    for files in ({}, {"validation_file": "다른.csv"}):
        plan = plan_of(CLASSIFY, "리뷰.csv", columns=columns, **files)
        assert plan.label_names == ("Péssimo", "péssimo") and sum(plan.counts["train"].values()) >= 30
