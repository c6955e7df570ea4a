"""Labels as people write them: separators, columns of 0 and 1, names, maps, misspelt and rare classes."""

import pytest
from tests.sources import dirty_labels as dirty
from tests.sources.drawing import class_folders
from tests.sources.refusing import all_rows, assert_refused, lengths, plan_of, refused, write_csv, write_jsonl

from loopwright.sources import SCHEMAS, DataOptions, DataPlan

CLASSIFY, TAG, CHOOSE = (SCHEMAS[name] for name in ("text-classification", "token-classification", "multiple-choice"))
SWITCHES = ("text", "toxic", "insult", "threat")


def notes(plan, *words):
    return [note for note in plan.warnings if all(word in note for word in words)]


def test_a_given_separator_means_several_labels_and_empty_cells_none(table):
    plan = plan_of(CLASSIFY, table(dirty.separated()), label_separator=";", validation_ratio=0)
    assert plan.labels.kind == "multi" and plan.labels.names == ("a", "b") and not plan.guesses[2:]
    assert [row["label"] for row in all_rows(plan)][:4] == [[0, 1], [1], [], [0]]
    assert notes(plan, "10 rows of rows.csv have no label")
    single = plan_of(CLASSIFY, table(dirty.labelled("ab" * 20)), label_separator="|")
    assert single.labels.kind == "multi" and notes(single, "no row of rows.csv has two labels", "'|'")
    assert_refused(
        "args.value", CLASSIFY, table(dirty.separated()), label_separator=";", label_kind="class", fix="multi"
    )
    assert DataPlan.from_json(plan.to_json()).labels == plan.labels
    both = {"label_separator": ";", "drop_labels": ["a", "b"]}
    assert_refused("data.one_class", CLASSIFY, table(dirty.separated()), **both, seen="no row of rows.csv has a label")
    assert_refused("args.value", DataOptions, label_separator="")


def test_columns_of_0_and_1_are_classes_in_their_order(table):
    path, columns = table(dirty.switches(), SWITCHES), {"label": ["toxic", "insult", "threat"]}
    assert refused("data.column", CLASSIFY, path).fix == "--label_columns toxic,insult,threat"
    plan = plan_of(CLASSIFY, path, columns=columns, validation_ratio=0)
    assert plan.labels.kind == "multi" and plan.labels.names == SWITCHES[1:]
    assert [row["label"] for row in all_rows(plan)][:4] == [[1, 2], [0], [], [0, 1]]
    assert DataPlan.from_json(plan.to_json()).columns == {"text": "text", "label": SWITCHES[1:]}
    assert plan_of(CLASSIFY, path, columns={"label": "toxic,insult,threat"}).labels == plan.labels
    merged = plan_of(CLASSIFY, path, columns=columns, label_map={"insult": "toxic"}, drop_labels=["threat"])
    assert merged.labels.names == ("toxic",)
    misspelt = {"label": ["toxic", "insults", "threat"]}
    assert refused("data.column", CLASSIFY, path, columns=misspelt).fix == "--label_columns toxic,insult,threat"
    assert_refused("args.value", CLASSIFY, path, columns=columns, label_kind="class", fix="--label_kind multi")
    odd = table(dirty.switches("maybe"), SWITCHES)
    assert_refused(
        "data.value", CLASSIFY, odd, columns=columns, seen=["line 9", "'maybe' in 'insult'"], fix="line 9 of"
    )
    blank = table(dirty.switches(""), SWITCHES)
    assert_refused("data.missing", CLASSIFY, blank, columns=columns, seen="line 9")
    assert plan_of(CLASSIFY, blank, columns=columns, missing_values="drop").dropped == {"missing_values": 1}


def test_label_names_fix_names_and_order_or_are_refused(table, tmp_path):
    path = table(dirty.labelled(["pos", "neg"] * 20))
    plan = plan_of(CLASSIFY, path, label_names=["pos", "mixed", "neg"])
    assert plan.labels.names == ("pos", "mixed", "neg") and notes(plan, "1 class never occurs in training: mixed")
    fix = "--label_map neg=nega   or   --label_names pos,nega,neg   or   --unknown_labels drop"
    assert refused("data.labels", CLASSIFY, path, label_names=["pos", "nega"], seen="not in --label_names").fix == fix
    for start, names, given in ((0, ["neg", "pos"], {}), (5, ["neg", "pos"], {"5": "0", "6": "1"})):
        path = table(dirty.numbered_from(start))
        named = plan_of(CLASSIFY, path, label_names=names, label_map=given, validation_ratio=0)
        assert named.counts == {"train": {"neg": 20, "pos": 20}} and named.rows("train")[0]["label"] == 0
        again = plan_of(CLASSIFY, validation_file=path, label_names=names, label_map=named.labels.label_map)
        assert again.counts == {"validation": {"neg": 20, "pos": 20}}
    for labels in (["0.0", "1.0"], ["FALSE", "TRUE"]):
        plan = plan_of(CLASSIFY, table(dirty.labelled(labels * 20)), label_names=["neg", "pos"], validation_ratio=0)
        assert plan.counts == {"train": {"neg": 20, "pos": 20}}
    swapped = table(dirty.labelled(["FALSE", "TRUE"] * 20))
    assert_refused("data.labels", CLASSIFY, swapped, label_names=["true", "false"], fix="FALSE=false")
    fix = refused("data.labels", CLASSIFY, table(dirty.numbered_from(1)), label_names=["neg", "pos"]).fix
    assert fix == "--label_map 1=neg 2=pos"
    numbers = write_csv(tmp_path / "numbers.csv", dirty.labelled([k / 7 for k in range(40)]))
    for option in ({"label_names": ["a", "b"]}, {"drop_labels": ["a"]}, {"label_map": {"a": "b"}}):
        assert_refused("args.value", CLASSIFY, numbers, **option, fix=f"leave out --{next(iter(option))}")
        assert_refused("args.value", SCHEMAS["causal-lm"], path, columns={"text": "text"}, **option, seen="no classes")


def test_labels_to_drop_leave_rows_out_or_are_removed_from_rows(tmp_path):
    train = write_csv(tmp_path / "train.csv", dirty.labelled(["pos", "neg", "spam", "Spam"] * 10))
    other = write_csv(tmp_path / "other.csv", [[f"other {k}", label] for k, label in enumerate(["pos", "spam"] * 5)])
    files = {"train_file": train, "validation_file": other, "test_file": other}
    plan = plan_of(CLASSIFY, **files, drop_labels=["spam"], label_map={"Spam": "spam"})
    assert plan.labels.names == ("neg", "pos") and plan.dropped == {"drop_labels": 30}
    assert lengths(plan) == {"train": 20, "validation": 5, "test": 5} and notes(plan, "5 rows of other.csv", "spam")
    assert_refused("data.labels", CLASSIFY, **files, drop_labels=["spma"], seen="'spam'", fix="--drop_labels spam")
    # A model that was trained so
    kept = {"label_names": plan.labels.names, "drop_labels": ["spam", "unseen"]}
    assert lengths(plan_of(CLASSIFY, validation_file=other, **kept)) == {"validation": 5}
    several = write_csv(tmp_path / "several.csv", dirty.separated())
    plan = plan_of(CLASSIFY, several, label_separator=";", drop_labels=["b"], validation_ratio=0)
    assert plan.labels.names == ("a",) and [row["label"] for row in all_rows(plan)][:3] == [[0], [], []]
    assert len(plan.splits["train"]) == 40 and notes(plan, "removes b from 20 rows")
    tags = write_jsonl(tmp_path / "tags.jsonl", dirty.tagged(*[["O", "B-X", "O", "O"]] * 9))
    assert refused("args.value", TAG, tags, drop_labels=["B-X"]).fix == "--label_map B-X=O"


@pytest.mark.parametrize(
    ("rows", "shown", "fix"),
    [
        (dirty.misspelt(), "'positve' (3) and 'positive' (224)", "--label_map positve=positive"),
        (dirty.other_forms(), "'Very Good' (1)", "--label_map 'Very Good=very good' 'very_good=very good'"),
        (dirty.alike_on_purpose(), "", ""),
    ],
)
def test_misspelt_classes_are_noted_with_both_counts_and_the_map(table, rows, shown, fix):
    path = table(rows)
    found = notes(plan_of(CLASSIFY, path), "did you mean")
    assert len(found) == bool(shown) and all(shown in note and fix in note for note in found)
    if fix == "--label_map positve=positive":
        merged = plan_of(CLASSIFY, path, label_map={"positve": "positive"})
        assert not notes(merged, "did you mean") and merged.labels.names == ("negative", "positive")


def test_rare_classes_and_those_of_one_split_are_shown(tmp_path):
    train = write_csv(tmp_path / "train.csv", dirty.labelled(["a", "b"] * 20 + ["c"] * 3))
    other = write_csv(tmp_path / "other.csv", [[f"other {k}", "ab"[k % 2]] for k in range(10)])
    plan = plan_of(CLASSIFY, train_file=train, validation_file=other)
    assert notes(plan, "1 class has fewer than 5 training rows: c (3)")
    assert notes(plan, "1 class has no validation rows: c")


def test_duplicates_are_shown_with_both_places(tmp_path):
    train = write_csv(tmp_path / "train.csv", rows := dirty.labelled("ab" * 20))
    other = write_csv(
        tmp_path / "other.csv", [["new", "a"], *rows[5:7], *[[f"new {k}", "ab"[k % 2]] for k in range(6)]]
    )
    (note,) = notes(plan_of(CLASSIFY, train_file=train, validation_file=other), "also in")
    assert "(line 3 of other.csv) and" in note and "(line 7 of train.csv)" in note and note.startswith("2 rows")


@pytest.mark.parametrize(
    ("tags", "shown"),
    [
        (
            ["B-X I-X O O"] * 4 + ["I-X I-X O B-X"],
            ["5 rows begin an entity with B- (first: line 1), 1 with I-", "line 5"],
        ),
        (["B-X E-X O S-X"] * 4 + ["B-X I-X O O"], ["4 rows end", "(BIOES)", "1 without (BIO) (first: line 5)"]),
        (["B-X I-X O O", "O B-X B-X I-X"] * 3, []),
        (["I-X I-X O O", "I-X I-X B-X I-X"] * 3, []),  # IOB1
        (["B-X E-X S-Y O", "O O B-X E-X"] * 3, []),
        (["B-X L-X U-Y O"] * 6, []),
        (["NOUN VERB NOUN X-Y"] * 6, []),
    ],
)
def test_mixed_tag_schemes_are_noted_with_counts_and_lines(tmp_path, tags, shown):
    path = write_jsonl(tmp_path / "tags.jsonl", dirty.tagged(*(row.split() for row in tags)))
    found = notes(plan_of(TAG, path, validation_ratio=0.5), "mixed tag schemes")
    assert len(found) == bool(shown) and all(text in found[0] for text in shown)


def test_a_folder_name_of_blanks_is_no_class(tmp_path):
    (class_folders(tmp_path / "photos") / "dog").rename(tmp_path / "photos" / " ")
    assert_refused("data.missing", SCHEMAS["image-classification"], tmp_path / "photos", seen="label")


def test_labels_joined_by_a_sign_are_noted_with_the_flag_that_separates_them(table):
    path = table(dirty.labelled(["a;b", "b", "a;c", "c"] * 10))
    assert notes(plan_of(CLASSIFY, path), "--label_separator ';'")
    assert not notes(plan_of(CLASSIFY, table(dirty.labelled(["a/b", "c"] * 20))), "--label_separator")


@pytest.mark.parametrize("digits", ["\u0660\u0661", "\uff10\uff11", "01"])
def test_whole_numbers_in_other_digits_are_classes(table, digits):
    assert plan_of(CLASSIFY, table(dirty.labelled([*digits] * 20))).labels.names == tuple(digits)


def test_rows_that_spell_a_key_differently_are_named(jsonl):
    path = jsonl([{"text": f"t {k}", "Label" if k % 5 == 0 else "label": "ab"[k % 2]} for k in range(20)])
    assert_refused("data.missing", CLASSIFY, path, columns={"label": "label"}, seen="'Label'")


def test_columns_of_marks_are_classes_and_nothing_means_no(table):
    path = table(
        [[f"good film {k}", "x" * (k % 2), "X" * (k % 3 == 0)] for k in range(40)], ["text", "toxic", "insult"]
    )
    assert refused("data.column", CLASSIFY, path).fix == "--label_columns toxic,insult"
    plan = plan_of(CLASSIFY, path, columns={"label": ["toxic", "insult"]}, validation_ratio=0)
    assert [row["label"] for row in all_rows(plan)][:4] == [[1], [0], [], [0, 1]]
