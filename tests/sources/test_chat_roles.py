"""Conversations as a role of a row: found in every kind of file and format, counted, hashed and refused."""

import json

import pytest

from loopwright.errors import InputError
from loopwright.runs.data import describe
from loopwright.sources import DataOptions, DataPlan, Role, Schema, preflight
from loopwright.sources.chats import Chat
from loopwright.sources.chats.roles import as_chat
from loopwright.sources.preflight import plan_unchecked
from sources.refusing import write_rows

SCHEMA = Schema("chat", (Role("chat", "chat"),))
TURNS = [{"role": "user", "content": "2 + {}?"}, {"role": "assistant", "content": "It is {}."}]


def messages(number):
    return [{**turn, "content": turn["content"].format(number)} for turn in TURNS]


ROWS = {
    "messages": lambda number: {"messages": messages(number), "id": f"row {number}"},
    "conversations": lambda number: {
        "conversations": [{"from": "human", "value": f"2 + {number}?"}, {"from": "gpt", "value": f"It is {number}."}]
    },
    "prompt/completion": lambda number: {"prompt": f"2 + {number}?", "completion": f"It is {number}."},
    "instruction/output": lambda number: {"instruction": f"2 + {number}?", "input": "", "output": f"It is {number}."},
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_found_in_each_kind_of_file(tmp_path, name, ending):
    path = write_rows(tmp_path / f"chats.{ending}", [ROWS[name](number) for number in range(30)])
    plan = preflight(SCHEMA, data=path, options=DataOptions(validation_ratio=0.2))
    assert plan.chats == {"format": {name: 30}, "turns": {"user": 30, "assistant": 30}}
    assert plan.lengths["chat"]["turns"] == {"p50": 2, "p95": 2, "max": 2}
    rows = DataPlan.from_json(plan.to_json()).rows("train")
    assert len(rows) + len(plan.rows("validation")) == 30
    assert all(
        row["chat"].messages in [messages(number) for number in range(30)] for row in map(rows.__getitem__, range(9))
    )
    told = " | ".join(describe(plan))
    assert f"format {name} (30)" in told and "turns user 30 · assistant 30" in told


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_tools_and_a_column_of_another_name_are_taken(ending, tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{"dialog": messages(number), "tools": tools if number % 2 else "", "lang": "en"} for number in range(20)]
    path = write_rows(tmp_path / f"chats.{ending}", rows)
    for columns in ({}, {"chat": "dialog"}):
        plan = preflight(SCHEMA, data=path, columns=columns)
        assert plan.chats["tools"] == {"conversations": 10} and plan.columns["chat"] == ("dialog", "tools")
    assert {row["chat"].tools is None for row in map(plan.rows("train").__getitem__, range(8))} == {True, False}


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_file_may_have_rows_of_several_formats_and_a_weight(tmp_path, ending):
    names = dict.fromkeys(name for make in ROWS.values() for name in make(0))
    rows = [{**dict.fromkeys(names), **ROWS[list(ROWS)[number % 4]](number), "weight": 1} for number in range(40)]
    if ending == "csv":
        rows = [{name: "" if value is None else value for name, value in row.items()} for row in rows]
    path = write_rows(tmp_path / f"chats.{ending}", rows)
    plan = preflight(SCHEMA, data=path)
    assert plan.chats["format"] == dict.fromkeys(ROWS, 10) and plan.chats["turns"] == {"user": 40, "assistant": 40}
    assert "weight" in plan.columns["chat"]
    prompts = plan_unchecked(SCHEMA.for_prediction(), test_file=path, columns={}, options=DataOptions())
    assert [prompts.rows("test")[number]["chat"].messages for number in range(8)] == [
        messages(number)[:1] for number in range(8)
    ]


def rows_with_calls():
    given = [{"city": "Rome"}, {"unit": {"a": 1}}]
    return [
        {
            "messages": [
                {"role": "user", "content": f"Hi {number}"},
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": given[number % 2]}]},
            ],
            "tools": [{"name": "f", "parameters": {"properties": given[number % 2]}}],
        }
        for number in range(20)
    ]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_calls_have_no_arguments_of_other_rows(tmp_path, ending):
    path = write_rows(tmp_path / f"chats.{ending}", rows_with_calls())
    chats = [row["chat"] for row in preflight(SCHEMA, data=path).rows("train")]
    functions = [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in chats]
    assert (
        {len(each) for each in functions} == {1} and {"city": "Rome"} in functions and {"unit": {"a": 1}} in functions
    )
    assert {len(chat.tools[0]["function"]["parameters"]["properties"]) for chat in chats} == {1}


def test_a_bad_row_is_refused_with_its_place_or_dropped(tmp_path):
    rows = [ROWS["messages"](number) for number in range(20)]
    rows[4]["messages"][1]["role"] = "asistant"
    path = write_rows(tmp_path / "chats.jsonl", rows)
    with pytest.raises(InputError) as caught:
        preflight(SCHEMA, data=path)
    assert caught.value.code == "data.chat" and "line 5 of chats.jsonl" in caught.value.what
    assert caught.value.fix.startswith("--bad_rows drop")
    plan = preflight(SCHEMA, data=path, options=DataOptions(bad_rows="drop"))
    assert plan.dropped == {"bad_rows": 1} and plan.chats["turns"]["user"] == 19
    assert plan.chats["format"] == {"messages": 19}


def test_dropping_bad_rows_is_proposed_only_if_it_leaves_rows_to_train_on(tmp_path):
    bad = {"messages": messages(1)[:1]}
    good = [ROWS["messages"](number) for number in range(9)]
    for rows, may_drop in (([bad], 0), ([bad] * 3, 0), ([good[0], bad], 0), ([bad, *good], 1), ([*good, bad], 1)):
        with pytest.raises(InputError) as caught:
            preflight(SCHEMA, data=write_rows(tmp_path / "chats.jsonl", rows))
        assert caught.value.code == "data.chat" and ("--bad_rows" in caught.value.fix) == may_drop


def test_equal_conversations_are_duplicates_and_a_file_without_any_is_refused(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", [ROWS["messages"](number) for number in range(20)])
    validation = write_rows(tmp_path / "validation.jsonl", [ROWS["messages"](number) for number in range(15, 30)])
    plan = preflight(SCHEMA, train_file=train, validation_file=validation)
    assert plan.duplicates == {"validation": 5} and len(plan.splits["validation"]) == 10
    other = write_rows(tmp_path / "other.jsonl", [{"title": f"a text {number}", "body": "more"} for number in range(9)])
    with pytest.raises(InputError) as caught:
        preflight(SCHEMA, data=other)
    assert caught.value.code == "data.column" and "prompt and completion" in caught.value.fix


@pytest.mark.parametrize(
    "row",
    [
        {"messages": messages(3)},
        {"messages": messages(3)[:1]},
        {"messages": json.dumps(messages(3)[:1])},
        {"messages": str(messages(3)[:1])},
        {"prompt": messages(3)[0], "completion": {"not": "read"}},
        {"messages": "2 + 3?"},
        {"question": "2 + 3?"},
        {"prompt": "2 + 3?"},
        {"instruction": "2 + 3?", "output": None},
        {"conversations": [{"from": "human", "value": "2 + 3?"}]},
    ],
)
def test_a_prompt_needs_no_answer_and_ends_before_it(row):
    assert as_chat("prompt", row) == Chat(messages(3)[:1])


def test_a_prompt_without_messages_is_refused():
    with pytest.raises(InputError) as caught:
        as_chat("prompt", {"messages": []})
    assert caught.value.code == "data.chat" and "empty" in caught.value.what


def test_a_file_of_prompts_keeps_all_its_rows(tmp_path):
    rows = [{"prompt": "2 + 3?"}, {"prompt": "2 + 4?"}, {"prompt": None}]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    plan = plan_unchecked(SCHEMA.for_prediction(), test_file=path, columns={}, options=DataOptions())
    found = plan.rows("test")
    assert [found[index]["chat"].messages for index in (0, 1)] == [messages(3)[:1], messages(4)[:1]]
    with pytest.raises(InputError):
        found[2]
