"""Pairs of answers in each row format and kind of file, and rows that are refused."""

import json

import pytest

from loopwright.errors import InputError
from loopwright.runs.data import by_role, describe
from loopwright.sources import DataOptions, DataPlan, Role, Schema, preflight
from loopwright.sources.chats.pairs import Pair, read_pair
from sources.refusing import write_rows
from tasks.pairs import chat_rows, text_rows, whole_rows

SCHEMA = Schema("preference", (Role("pair", "pair"),))
ASKED = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello", "No"))
BRIEF = {"role": "system", "content": "Be brief"}
CHAT = Pair([ASKED], [GOOD], [BAD])
BRIEF_CHAT = Pair([BRIEF, ASKED], [GOOD], [BAD])
LONG_CHAT = Pair([ASKED, GOOD, ASKED], [GOOD], [BAD])
EMPTY = {"role": "assistant", "content": " "}
FORMATS = {
    "a prompt and two answers, as texts": text_rows,
    "a prompt and two answers, as messages": chat_rows,
    "whole conversations": whole_rows,
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_found_in_each_kind_of_file(tmp_path, name, ending):
    rows = [{"id": f"row {number}", **row} for number, row in enumerate(FORMATS[name](30))]
    plan = preflight(SCHEMA, data=write_rows(tmp_path / f"pairs.{ending}", rows), options=DataOptions())
    assert plan.chats["format"] == {name: 30} and f"format {name} (30)" in describe(plan)
    found = DataPlan.from_json(plan.to_json()).rows("train")
    expected = text_rows(30) if "texts" in name else chat_rows(30)
    wanted = [Pair(**row, format=name) for row in expected]
    assert len(found) > 20 and all(found[index]["pair"] in wanted for index in range(len(found)))


@pytest.mark.parametrize(
    "row, pair",
    [
        ({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}, CHAT),
        ({"prompt": [ASKED], "chosen": "Hello", "rejected": "No"}, CHAT),
        ({"prompt": "Hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, CHAT),  # as in UltraFeedback
        ({"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, CHAT),
        ({"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, CHAT),
        ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": GOOD, "rejected": BAD}, CHAT),
        ({"a": json.dumps([ASKED, GOOD]), "b": json.dumps([ASKED, BAD])}, CHAT),  # columns that the user named
        ({"prompt": "Hi ", "chosen": [ASKED, GOOD], "rejected": [{**ASKED, "id": 2}, BAD]}, CHAT),
        ({"prompt": "Hi", "chosen": [BRIEF, ASKED, GOOD], "rejected": [BRIEF, ASKED, BAD]}, BRIEF_CHAT),
        ({"prompt": [BRIEF], "chosen": [BRIEF, ASKED, GOOD], "rejected": [BRIEF, ASKED, BAD]}, BRIEF_CHAT),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No", "system": "Be brief"}, BRIEF_CHAT),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No", "system": ""}, CHAT),  # of a file with a column for it
        ({"instruction": "Hi", "input": "You", "chosen": "Hello", "rejected": "No"}, Pair("Hi\n\nYou", "Hello", "No")),
        ({"prompt": "List:", "chosen": '[{"a": 1}]', "rejected": "[]"}, Pair("List:", '[{"a": 1}]', "[]")),
        ({"chosen": "Q: Hi A: No", "rejected": "Q: Hi A: Not so"}, Pair("Q: Hi A:", " No", " Not so")),
        ({"chosen": "你好吗？好", "rejected": "你好吗？不好"}, Pair("你好吗？", "好", "不好")),
        ({"prompt": [ASKED], "chosen": [GOOD, ASKED, GOOD], "rejected": [GOOD, ASKED, BAD]}, LONG_CHAT),
        ({"prompt": "[1] is", "chosen": "[1]", "rejected": "[]"}, Pair("[1] is", "[1]", "[]")),
        ({"chosen": "Q: Hi A: Hello", "rejected": "Q: Hi A: No"}, Pair("Q: Hi A:", " Hello", " No")),
        (
            {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
            LONG_CHAT,
        ),
    ],
)
def test_prompts_and_answers_are_told_apart(row, pair):
    found = read_pair(row)
    assert (found.prompt, found.chosen, found.rejected) == (pair.prompt, pair.chosen, pair.rejected)


def test_system_and_tools_belong_to_the_prompt():
    tool = {"name": "weather", "parameters": {}}
    found = read_pair({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD], "system": "Be brief", "tools": [tool]})
    assert [turn["role"] for turn in found.prompt] == ["system", "user"] and found.chosen == [GOOD]
    assert found.tools == [{"type": "function", "function": tool}]


def refused(code: str, row: dict) -> InputError:
    with pytest.raises(InputError) as raised:
        read_pair(row, where="line 3 of pairs.jsonl")
    assert raised.value.code == code
    return raised.value


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "Hello"}, "the same"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": ""}, "no rejected answer"),
        ({"prompt": "Hi", "chosen": None, "rejected": "No"}, "no chosen answer"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": [BAD]}, "one answer is a text"),
        ({"chosen": "Hello", "rejected": "No"}, "no common beginning"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "do not begin with the same prompt"),
        ({"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, BAD, ASKED, GOOD]}, "last turns"),
        ({"chosen": [ASKED, GOOD, ASKED, BAD], "rejected": [ASKED, BAD]}, "the same"),
        ({"chosen": [ASKED, GOOD, ASKED, BAD], "rejected": [ASKED, BAD, ASKED, GOOD]}, "a turn of the user"),
        ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [BAD]}, "the chosen answer ends with a turn of the user"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "the rejected answer ends with a turn of the user"),
        ({"chosen": [ASKED, EMPTY], "rejected": [ASKED, BAD]}, "no chosen answer"),
        ({"chosen": [ASKED, {**BAD, "content": "No "}], "rejected": [ASKED, {**BAD, "score": 1}]}, "last turns"),
        ({"prompt": "Hi", "chosen": "No", "rejected": " No"}, "the same"),
        ({"prompt": " ", "chosen": "Hello", "rejected": "No"}, "the prompt is empty"),
        ({"prompt": None, "chosen": "I do", "rejected": "I do not"}, "the prompt is empty"),
        ({"prompt": "Hi A:", "chosen": "Hi A: Hello", "rejected": "Hi A: No"}, "there twice"),
        ({"prompt": "Hello", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "the prompt is not the beginning"),
        (
            {"prompt": "Hello", "chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
            "the prompt",
        ),
        ({"chosen": "The cat", "rejected": "This cat"}, "no common beginning"),
        ({"chosen": "Q A", "rejected": "Q B", "system": "Be brief"}, "whole texts"),
        ({"only": "Hi"}, "no chosen and rejected answers"),
        ({"prompt": "Bye", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "the prompt is not the beginning"),
    ],
)
def test_a_row_without_two_different_answers_to_one_prompt_is_refused(row, why):
    error = refused("data.pair", row)
    assert error.what.startswith("line 3 of pairs.jsonl") and why in error.what and error.saw


def test_bad_rows_are_refused_with_their_place_or_dropped_with_a_count(tmp_path):
    rows = text_rows(30)
    rows[7]["rejected"] = rows[7]["chosen"]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(InputError) as raised:
        preflight(SCHEMA, data=path)
    assert raised.value.code == "data.pair" and "line 8" in raised.value.what
    assert raised.value.fix.startswith("--bad_rows drop")
    plan = preflight(SCHEMA, data=path, options=DataOptions(bad_rows="drop"))
    why = "line 8 of pairs.jsonl: chosen and rejected are the same"
    assert plan.dropped == {"bad_rows": 1}
    assert f"1 row of pairs.jsonl cannot be used ({why}) and is left out" in plan.warnings


def test_columns_of_other_names_are_named_and_a_file_without_answers_is_refused(tmp_path):
    rows = [{"q": row["prompt"], "win": row["chosen"], "lose": row["rejected"]} for row in text_rows(30)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(InputError) as raised:
        preflight(SCHEMA, data=path)
    assert raised.value.code == "data.column" and "--chosen_column" in raised.value.fix
    plan = preflight(Schema("preference", (Role("pair", "pair", names=("q", "win", "lose")),)), data=path)
    assert plan.columns == {"pair": ("q", "win", "lose")}
    first = plan.rows("train")[0]["pair"]
    assert {"q": first.prompt, "win": first.chosen, "lose": first.rejected} in rows


@pytest.mark.parametrize("names", [("q", "", ""), ("", "rejected", "chosen")], ids=["one", "turned round"])
def test_each_column_that_is_named_has_that_meaning_in_files_and_in_python(names, tmp_path):
    rows = [{"rejected": row["rejected"], "q": row["prompt"], "chosen": row["chosen"]} for row in text_rows(30)]
    rows = rows if names[0] else [{"prompt": row.pop("q"), **row} for row in rows]
    prompt, chosen, rejected = names if names[0] == "" else ("q", "chosen", "rejected")
    plan = preflight(
        Schema("preference", (Role("pair", "pair", names=names),)), data=write_rows(tmp_path / "a.csv", rows)
    )
    meant = [{"prompt": row[prompt or "prompt"], "chosen": row[chosen], "rejected": row[rejected]} for row in rows]
    found = [plan.rows("train")[0]["pair"], read_pair(by_role(plan, rows[0])["pair"])]
    assert all({"prompt": each.prompt, "chosen": each.chosen, "rejected": each.rejected} in meant for each in found)


@pytest.mark.parametrize(
    "columns, names, fix",
    [
        (("id", "q", "win", "rejected"), ("q", "", ""), "--prompt_column q --chosen_column win"),
        (("prompt", "win", "lose"), ("", "", "lose"), "--chosen_column win --rejected_column lose"),
        (("prompt", "chosen", "rejected"), ("prmpt", "", ""), "--prompt_column prompt"),
        (("q", "chosen", "rejected"), ("", "winner", ""), "--chosen_column chosen"),
        (("prompt", "answer"), (), "name the columns of a.csv prompt, chosen and rejected"),
    ],
)
def test_a_missing_column_is_named_with_flags_that_work(columns, names, fix, tmp_path):
    rows = [{name: f"Q {number} {name}" for name in columns} for number in range(30)]
    path = write_rows(tmp_path / "a.csv", rows)
    with pytest.raises(InputError) as raised:
        preflight(Schema("preference", (Role("pair", "pair", names=names),)), data=path)
    assert raised.value.code == "data.column" and raised.value.fix == fix
    words = fix.split()
    flags = dict(zip(words[::2], words[1::2], strict=False)) if fix.startswith("--") else {}
    given = tuple(flags.get(f"--{name}_column", "") for name in ("prompt", "chosen", "rejected"))
    if flags:
        assert preflight(Schema("preference", (Role("pair", "pair", names=given),)), data=path).columns["pair"]


PLACES = {name: f"--{name}_column COLUMN" for name in ("prompt", "chosen", "rejected")}


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize("make", [lambda text: text, lambda text: [{"role": "assistant", "content": text}]])
@pytest.mark.parametrize(
    "columns, names, fix, left",
    [
        (("ask", "good", "bad"), (), PLACES, "'ask', 'good', 'bad'"),
        (("input", "accepted", "rejected"), (), {**PLACES, "rejected": ""}, "'input', 'accepted'"),
        (("prompt", "good", "bad"), (), {**PLACES, "prompt": ""}, "'good', 'bad'"),
        (("q", "good", "bad"), ("q", "", ""), {**PLACES, "prompt": "--prompt_column q"}, "'good', 'bad'"),
    ],
)
def test_no_fix_guesses_which_answer_is_the_better_one(columns, names, fix, left, make, ending, tmp_path):
    rows = [{name: make(f"The {name} {number}") for name in columns} for number in range(30)]
    path = write_rows(tmp_path / f"a.{ending}", rows)
    with pytest.raises(InputError) as raised:
        preflight(Schema("preference", (Role("pair", "pair", names=names),)), data=path)
    assert raised.value.code == "data.column" and all(name in " ".join(raised.value.saw) for name in columns)
    assert raised.value.fix == f"{' '.join(filter(None, fix.values()))}, where COLUMN is one of {left}"


@pytest.mark.parametrize("first", ["The", ""], ids=["one beginning", "no common beginning"])
def test_a_third_text_is_suggested_as_the_prompt(first, tmp_path):
    rows = [{"ask": f"Q {number}", "good": f"{first} {number}", "bad": f"{first} no"} for number in range(30)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    schemas = [Schema("preference", (Role("pair", "pair", names=(each, "good", "bad")),)) for each in ("", "ask")]
    if first:
        assert "--prompt_column ask" in preflight(schemas[0], data=path).warnings[0]
    else:
        with pytest.raises(InputError) as raised:
            preflight(schemas[0], data=path)
        assert raised.value.code == "data.pair" and raised.value.fix.startswith("--prompt_column ask   or   ")
    plan = preflight(schemas[1], data=path)
    assert plan.columns["pair"] == ("ask", "good", "bad") and "--prompt_column" not in " ".join(plan.warnings)
