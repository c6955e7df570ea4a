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
        read_chat(row, where="chats.jsonl, line 3")
    assert raised.value.code == code and raised.value.what.startswith("chats.jsonl, line 3")
    return raised.value


@pytest.mark.parametrize(
    "name, row",
    [
        ("messages", {"messages": PAIR}),
        ("messages", {"messages": json.dumps(PAIR)}),
        ("messages", {"messages": str(PAIR)}),  # as pandas writes a csv
        ("messages", {"messages": np.array(PAIR, dtype=object)}),  # as parquet is read
        ("messages", {"messages": [{**HI, "tool_calls": None}, {**HELLO, "name": None}]}),
        ("messages", {"messages": [{"role": "Human", "content": "Hi"}, {"role": "model", "content": "Hello"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HELLO]}),
        ("conversations", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
        ("conversations", {"conversations": PAIR}),
        ("prompt/completion", {"prompt": "Hi", "completion": "Hello"}),
        ("prompt/completion", {"prompt": [HI], "completion": [HELLO]}),
        ("prompt/completion", {"prompt": json.dumps([HI]), "completion": "Hello", "messages": None}),
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


def test_a_prompt_that_begins_like_a_list_stays_a_text():
    assert read_chat({"prompt": "[1, 2] is", "completion": "[]"}).messages[0]["content"] == "[1, 2] is"


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


def test_an_empty_answer_is_a_turn():
    assert isinstance(read_chat({"prompt": "Hi", "completion": ""}), Chat)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"text": "Hi"}, ["none of the formats", "columns: text"]),
        ({"messages": []}, ["empty conversation"]),
        ({"messages": "Hi"}, ["not a list"]),
        ({"messages": 3}, ["not a list"]),
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
        ({"messages": PAIR, "tools": "weather"}, ["tools is not a list"]),
        ({"messages": PAIR, "tools": ["weather"]}, ["JSON schemas"]),
    ],
)
def test_a_row_that_is_not_a_conversation_is_refused(row, words):
    error = refused("data.chat", row)
    assert [word for word in words if word not in str(error)] == []
