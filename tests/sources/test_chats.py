"""Conversations in each row format, and rows that are refused."""

import json

import numpy as np
import pytest

from loopwright.errors import InputError
from loopwright.sources.chats import Chat, chat_format, read_chat

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
PAIR = [HI, HELLO]
SCHEMA = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}


def refused(code: str, row: dict) -> InputError:
    with pytest.raises(InputError) as raised:
        read_chat(row, where="line 3 of chats.jsonl")
    assert raised.value.code == code and raised.value.what.startswith("line 3 of chats.jsonl")
    return raised.value


@pytest.mark.parametrize(
    "name, row",
    [
        ("messages", {"messages": PAIR}),
        ("messages", {"messages": json.dumps(PAIR)}),
        ("messages", {"messages": str(PAIR)}),  # as pandas writes a csv
        ("messages", {"messages": np.array(PAIR, dtype=object)}),  # as parquet is read
        ("messages", {"messages": [{**HI, "tool_calls": None}, {**HELLO, "name": None}]}),
        ("messages", {"messages": [{**HI, "tool_calls": np.array([]), "weight": float("nan")}, HELLO]}),
        ("messages", {"messages": [{"role": "Human", "content": "Hi"}, {"role": "model", "content": "Hello"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HELLO]}),
        ("conversations", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
        ("conversations", {"conversations": PAIR}),
        ("prompt/completion", {"prompt": "Hi", "completion": "Hello"}),
        ("prompt/completion", {"prompt": [HI], "completion": [HELLO]}),
        ("prompt/completion", {"prompt": json.dumps([HI]), "completion": "Hello", "messages": None}),
        ("prompt/completion", {"prompt": HI, "completion": HELLO, "messages": [], "conversations": ""}),
        ("prompt/completion", {"prompt": [HI], "completion": PAIR, "messages": float("nan")}),  # repeats the prompt
        ("instruction/output", {"instruction": "Hi", "output": "Hello"}),
        ("instruction/output", {"instruction": "Hi", "input": "", "output": "Hello", "history": []}),
    ],
)
def test_each_format_is_found_and_read(name, row):
    chat = read_chat(row)
    assert chat_format(row) == name and chat.messages == PAIR and chat.tools is None
    assert chat.completion == (1 if name == "prompt/completion" else 0)


def test_system_input_and_history_become_messages():
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be brief", "history": [["Hi", "Hello"]]}
    roles, contents = zip(*((each["role"], each["content"]) for each in read_chat(row).messages), strict=True)
    assert roles == ("system", "user", "assistant", "user", "assistant")
    assert contents == ("Be brief", "Hi", "Hello", "Add\n\n1 2", "3")
    assert read_chat({"prompt": "Hi", "completion": "Hello", "system": "Be brief"}).completion == 2
    spoken = [{"role": "developer", "content": "x"}, *PAIR]
    assert read_chat({"messages": spoken, "system": "Be brief"}).messages == spoken


@pytest.mark.parametrize("text", ["[1, 2] is", "[]", '{"a": 1}', '[{"a": 1}]', '[{"role": "admin"}]'])
def test_a_text_in_json_is_not_a_list_of_messages(text):
    assert [each["content"] for each in read_chat({"prompt": text, "completion": text}).messages] == [text, text]


def test_numbers_and_lists_of_texts_are_texts_and_nothing_is_left_out():
    row = {"instruction": "Add", "input": 3, "output": 5, "system": ["Be ", "brief"], "history": PAIR}
    assert [each["content"] for each in read_chat(row).messages] == ["Be brief", "Hi", "Hello", "Add\n\n3", "5"]
    row = {"prompt": 1, "completion": 2.5, "system": float("nan"), "tools": np.array([], dtype=object)}
    assert [each["content"] for each in read_chat(row).messages] == ["1", "2.5"]


def test_a_weight_says_whether_a_turn_is_trained():
    for field, skipped in (("weight", 0), ("weight", 0.0), ("weight", "0"), ("train", False), ("loss", False)):
        messages = read_chat({"messages": [HI, {**HELLO, field: skipped}, HI, {**HELLO, "weight": 1}]}).messages
        assert [each.get("weight") for each in messages] == [None, 0, None, None]
    assert "weight" not in read_chat({"messages": [{**HI, "weight": 0}, HELLO], "weight": 1.0}).messages[0]
    for row in ({"messages": [HI, {**HELLO, "weight": 0}]}, {"messages": PAIR, "weight": 0}):
        assert "nothing to train on" in refused("data.chat", row).what
    prompt = {"prompt": [HI, HELLO, HI], "completion": [{**HELLO, "weight": 0}]}
    assert "nothing to train on" in refused("data.chat", prompt).what
    for row in ({"messages": [HI, {**HELLO, "weight": 0.5}]}, {"messages": PAIR, "weight": [2]}):
        assert refused("data.chat", row).fix.startswith("write 0 (not trained) or 1")


def test_what_a_tool_returns_may_be_anything():
    for given, written in (({"t": 4}, '{"t": 4}'), ([{"t": 4}], '[{"t": 4}]'), ([{"type": "text", "text": "4"}], "4")):
        row = {"messages": [HI, {"role": "tool", "content": given}, HELLO]}
        assert read_chat(row).messages[1]["content"] == written


def test_tool_calls_have_objects_as_arguments_and_tools_are_schemas():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    row = {"messages": [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}, HELLO]}
    chat = read_chat({**row, "tools": json.dumps([SCHEMA])})
    assert chat.messages[1]["content"] is None
    assert chat.messages[1]["tool_calls"][0] == {
        "type": "function",
        "id": "c1",
        "function": {"name": "weather", "arguments": {"city": "Zürich"}},
    }
    assert chat.tools == [{"type": "function", "function": SCHEMA}]
    share = [
        ("human", "Hi"),
        ("function_call", '{"name": "weather", "arguments": {}}'),
        ("observation", "4"),
        ("gpt", "x"),
    ]
    chat = read_chat({"conversations": [{"from": role, "value": value} for role, value in share]})
    assert [each["role"] for each in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}


def test_a_call_may_be_single_json_or_of_the_former_api():
    call = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    nested = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    for given in (call, nested, [nested], [json.dumps(call)], json.dumps(call), json.dumps([call])):
        for field in ("tool_calls", "function_call"):
            found = read_chat({"messages": [HI, {"role": "assistant", "content": None, field: given}]}).messages[1]
            assert found == {"role": "assistant", "content": None, "tool_calls": [called]}
        if isinstance(given, str):
            for role in ("function_call", "tool_call", "tool calls"):
                turns = [("human", "Hi"), (role, given), ("tool-result", "4"), ("ai", "Cold.")]
                found = read_chat({"conversations": [{"from": each, "value": value} for each, value in turns]})
                assert [each["role"] for each in found.messages] == ["user", "assistant", "tool", "assistant"]
                assert found.messages[1]["tool_calls"] == [called]


def test_an_empty_answer_is_a_turn():
    assert isinstance(read_chat({"prompt": "Hi", "completion": ""}), Chat)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"text": "Hi"}, ["none of the formats", "columns: text"]),
        ({"messages": []}, ["empty conversation"]),
        ({"messages": "Hi"}, ["not a list"]),
        ({"messages": 3}, ["not a list"]),
        ("Hi", ["not a list"]),
        ([HI], ["no turn of the assistant"]),
        ({"messages": [HI, {**HELLO, "content": float("nan")}]}, ["neither content nor tool calls"]),
        ({"messages": [HI]}, ["no turn of the assistant", "roles: user"]),
        ({"prompt": PAIR, "completion": [HI]}, ["completion has no turn"]),
        ({"messages": [HI, "Hello"]}, ["message 2", "not an object"]),
        (
            {"messages": [HI, {"role": "asistant", "content": "x"}]},
            ["'asistant'", "in this conversation: user, asistant", "nearest role: assistant"],
        ),
        ({"messages": [HI, {"content": "x"}]}, ["message 2", "no role", "known roles: system, developer, user"]),
        ({"messages": [HI, {"role": "assistant"}]}, ["message 2 (assistant)", "neither content nor tool calls"]),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}]}, ["not text", "image"]),
        ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}]}, ["has no name"]),
        ({"conversations": [{"from": "function_call", "value": "weather now"}]}, ["has no name", "weather now"]),
        ({"messages": [HI, {**HELLO, "tool_calls": {"name": "f", "arguments": "{city: Z"}}]}, ["not a JSON object"]),
        ({"messages": [HI, {**HELLO, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, ["not a JSON object"]),
        ({"messages": [HI, {**HELLO, "content": "a\ud800"}]}, ["half of a surrogate pair", "'\\ud800'"]),
        ({"instruction": "x", "output": "y", "history": [3]}, ["history has neither messages nor pairs"]),
        ({"instruction": "x", "output": "y", "history": ["q", "a"]}, ["history has neither messages nor pairs"]),
        ({"instruction": "x", "input": {"a": 1}, "output": "y"}, ["input: the content is not text"]),
        ({"prompt": "Hi", "completion": None}, ["no value for completion"]),
        ({"messages": PAIR, "tools": "weather"}, ["tools is not a list"]),
        ({"messages": PAIR, "tools": ["weather"]}, ["JSON schemas"]),
    ],
)
def test_a_row_that_is_not_a_conversation_is_refused(row, words):
    error = refused("data.chat", row)
    assert [word for word in words if word not in str(error)] == []
