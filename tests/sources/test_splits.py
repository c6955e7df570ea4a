"""Splits: near-duplicates and groups stay on one side, in any order of the rows; what files share is reported."""

import hashlib
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.sources.refusing import all_rows, assert_refused, lengths, plan_of, write_csv, write_jsonl
from tests.sources.test_preflight import ANSWER, CHOOSE, CLASSIFY, TAG, question, reviews

from loopwright.sources import SCHEMAS
from loopwright.sources.scan import without_spelling

FILLING = [[f"filling {k}", ["neg", "pos"][k % 2], f"filling {k}"] for k in range(40)]
WORDS = st.lists(st.sampled_from(["a", "A", "ﬁ", "Fi", "b"]), min_size=1, max_size=3)
BLANKS, ENDS, LABELS = map(st.sampled_from, ([" ", "\u3000", "-", ""], ["", "!", "。"], ["neg", "pos"]))
TEXTS = st.builds(lambda words, blank, end: blank.join(words) + end, WORDS, BLANKS, ENDS)
GROUPED = st.lists(st.tuples(TEXTS, LABELS, st.sampled_from("uvwxyz")), min_size=1, max_size=30)


def plain(text):
    """Return a text without spelling, by another way: the letters and digits."""
    return "".join(filter(str.isalnum, text.replace("ﬁ", "fi").lower()))


def sides(plan, role="text"):
    return [sorted(str(row[role]) for row in all_rows(plan, split)) for split in ("train", "validation")]


@settings(max_examples=40, deadline=None)
@given(rows=GROUPED, seed=st.integers(0, 99))
def test_near_duplicates_and_groups_never_cross_an_automatic_split(rows, seed, tmp_path_factory):
    folder, rows = tmp_path_factory.mktemp("split"), [*map(list, rows), *FILLING]
    mixed = random.Random(seed).sample(rows, len(rows))
    files = [write_csv(folder / f"{k}.csv", each, ["text", "label", "patient"]) for k, each in enumerate((rows, mixed))]
    plan, other = (plan_of(CLASSIFY, file, columns={"text": "text", "label": "label"}) for file in files)
    assert sides(plan) == sides(other)
    train, held_out = sides(plan)
    assert not set(map(plain, train)) & set(map(plain, held_out)) and len(train) + len(held_out) == len(rows)
    for text in FILLING:  # without a near-duplicate a row is where it always was
        digest = hashlib.blake2b(text[0].encode(), digest_size=8).digest()
        assert (text[0] in held_out) == (int.from_bytes(digest, "little") < 0.2 * 2**64)
    columns = {"text": "text", "label": "label", "group": "patient"}
    plan, other = (plan_of(CLASSIFY, file, columns=columns) for file in files)
    assert sides(plan) == sides(other)
    for role, key in (("group", str), ("text", plain)):
        train, held_out = (set(map(key, side)) for side in sides(plan, role))
        assert train and held_out and not train & held_out
    left_out = plan.dropped.get("near_duplicates", 0)
    assert sum(lengths(plan).values()) + left_out == len(rows)
    assert abs(lengths(plan)["validation"] + left_out - 0.2 * len(rows)) <= max(6, len(rows) / 6)


def test_groups_that_cannot_be_kept_apart_are_refused(tmp_path):
    rows = [[*row, f"p{k % 6}", row[1], "same"] for k, row in enumerate(reviews(60))]
    header = ["text", "label", "patient", "kind", "one"]
    path = write_csv(tmp_path / "rows.csv", rows, header)
    assert_refused("data.column", CLASSIFY, path, columns={"group": "patien"}, fix="--group_column patient")
    assert_refused(
        "data.groups", CLASSIFY, path, columns={"group": "one"}, seen="all rows of rows.csv are in one group"
    )
    assert_refused(
        "data.groups", CLASSIFY, path, columns={"group": "kind"}, seen="no group of rows.csv can be held out"
    )
    other = [[f"other {k}", "pos", f"p{k}", "x", "same"] for k in range(4, 9)]
    val, columns = write_csv(tmp_path / "val.csv", other, header), {"group": "patient"}
    seen = ["2 of 5 groups of val.csv are also in rows.csv", "patient 'p5', first in line 3"]
    assert_refused("data.groups", CLASSIFY, train_file=path, validation_file=val, columns=columns, seen=seen)
    plan = plan_of(CLASSIFY, path, columns={"group": "patient"})
    numbers = [plan.rows("train").group(place) for place in range(len(plan.rows("train")))]
    named = {row["group"]: number for row, number in zip(all_rows(plan, "train"), numbers, strict=True)}
    assert len(set(named.values())) == len(named) == 5 and all(0 <= number < 2**53 for number in numbers)
    empty = write_csv(tmp_path / "empty.csv", [*rows, ["no group", "pos", "", "pos", "same"]], header)
    assert_refused("data.missing", CLASSIFY, empty, columns={"group": "patient"}, seen="group: 1 row")
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "1.png").write_bytes(b"")
    images = SCHEMAS["image-classification"]
    assert_refused("data.column", images, tmp_path / "pets", columns={"group": "patient"}, fix="a csv file")


def test_shared_near_duplicates_several_labels_and_poor_evaluation_data_are_reported(tmp_path):
    train = write_csv(tmp_path / "train.csv", [*reviews(20), ["Review, number 3!", "neg"]])
    val = [["REVIEW number 4", "neg"], ["review number 5.", "pos"], ["review number 6", "neg"], *reviews(2, start=30)]
    plan = plan_of(CLASSIFY, train_file=train, validation_file=write_csv(tmp_path / "v.csv", val))
    assert plan.duplicates == {"validation": 1} and lengths(plan) == {"train": 22, "validation": 4}
    near, moved, labels, few = plan.warnings
    assert near.startswith("near-duplicates of train.csv in v.csv: 2 rows, the same except for case, blanks and punct")
    assert "'REVIEW number 4' (line 2 of v.csv) and 'review number 4' (line 6 of train.csv); 'review number 5.'" in near
    assert "moved to train" in moved and few == "validation has 4 rows, too few for a reliable metric"
    shown = "'review number 3': 'pos' (line 5 of train.csv) and 'Review, number 3!': 'neg' (line 22 of train.csv)"
    assert labels == f"1 input has several labels: {shown}"
    same = write_csv(tmp_path / "same.csv", [[f"other {k}", "pos"] for k in range(5)])
    same_plan = plan_of(CLASSIFY, train_file=train, validation_file=same)
    assert same_plan.warnings == (labels, "all labels of validation are the same, so its metrics say little")


@pytest.mark.parametrize(
    ("schema", "row", "other", "again"),
    [
        (TAG, {"tokens": ["A", "."], "tags": ["O", "O"]}, {"tokens": "b", "tags": "B"}, {"tokens": "a", "tags": "B"}),
        (CHOOSE, {"sent1": "S", "choices": ["a b", "c"], "label": 0}, {"sent1": "T"}, {"sent1": "s.", "label": 1}),
        (ANSWER, question([], "A b."), {"context": "Another."}, {"context": "a  B", "question": "who sat"}),
        (SCHEMAS["causal-lm"], {"text": "One, two"}, {"text": "three"}, {"text": "one two."}),
        (SCHEMAS["sentence-embedding"], {"text": "A", "text_pair": "B"}, {"text": "c"}, {"text_pair": "b!"}),
        (SCHEMAS["summarization"], {"text": "A b", "summary": "A"}, {"text": "c"}, {"text": "a, b", "summary": "B"}),
    ],
    ids=lambda value: getattr(value, "task", ""),
)  # fmt: skip
def test_every_task_finds_near_duplicates_by_its_inputs(schema, row, other, again, tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [row, row | other])
    test = write_jsonl(tmp_path / "test.jsonl", [row | again])
    plan = plan_of(schema, train_file=train, test_file=test, validation_ratio=0)
    assert any("near-duplicates of train.jsonl in test.jsonl: 1 row" in warning for warning in plan.warnings), (
        plan.warnings
    )
    assert any("1 input has several labels" in warning for warning in plan.warnings) == (schema in (TAG, CHOOSE))


def test_spelling_is_case_blanks_and_punctuation_and_nothing_else():
    for one, other in (
        ("Straße 1", "STRASSE, 1."),
        ("ｆｕｌｌ　width", "full-width"),
        ("e\u0301", "É"),
        ("a\u00adb\u200b", "ab"),
    ):
        assert without_spelling(one) == without_spelling(other)
    for one, other in (("की", "का"), ("c+", "c"), ("👍", "👎"), ("!?", "?!"), (":)", ":("), ("1", "2"), ("", " ")):
        assert without_spelling(one) != without_spelling(other)
