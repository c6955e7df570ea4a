"""Which tokens of a conversation are trained, for the templates of public models, with and without generation marks."""

import copy
import re
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError

from data.chat_shapes import SHAPES, byte_level_tokenizer
from loopwright.data.chats import BUILT_IN, ChatEncoder, resolve_template
from loopwright.data.chats.encoder import trained_tokens
from loopwright.errors import InputError
from loopwright.sources.chats import Chat, read_chat
from loopwright.tasks.text.conversations import PromptEncoder

pytest.importorskip("transformers")

TEMPLATES = {(name, mark): shape.template for name, shape in SHAPES.items() for mark in ("marked", "plain")}
TEMPLATES |= {(name, "built in"): BUILT_IN[name] for name in BUILT_IN}
TOOLS = [{"name": "weather", "description": "Ask", "parameters": {"type": "object", "properties": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
JSON_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
PLAIN = [("user", "Hi"), ("assistant", "Hello"), ("user", "  Wie geht's? 🎈 "), ("assistant", "  Grüezi, 世界! \n")]


def tokenizer():
    return byte_level_tokenizer((*TEMPLATES.values(), *trl_templates().values()))


def trl_templates() -> dict[str, str]:
    try:
        import trl
    except ImportError:
        return {}
    return {
        path.stem: path.read_text("utf-8") for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    }


def chat(*turns, tools=None) -> Chat:
    row = {"messages": [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns]}
    return read_chat({**row, "tools": tools}, where="line 7 of chats.jsonl")


def encoder(name: str, mark: str = "plain", **options) -> ChatEncoder:
    left, right = ("{% generation %}", "{% endgeneration %}") if mark == "marked" else ("", "")
    template = TEMPLATES[name, mark].replace("«", left).replace("»", right)
    return ChatEncoder(tokenizer(), chat_template=template, **options)


def trained(encoded) -> list[str]:
    """Return the texts of the trained tokens, a text for each run of them."""
    assert encoded.input_ids == tokenizer()(encoded.text, add_special_tokens=False)["input_ids"]
    assert all(label in (-100, token) for label, token in zip(encoded.labels, encoded.input_ids, strict=True))
    runs, last = [], None
    for place, label in enumerate(encoded.labels):
        if label != -100:
            runs = [*runs, []] if last != place - 1 else runs
            runs[-1].append(label)
            last = place
    return [tokenizer().decode(run) for run in runs]


def expected(shape, contents) -> list[str]:
    """Return what should be trained of these turns, from what is known of the format alone."""
    found = []
    for place, content in enumerate(contents):
        is_last = place == len(contents) - 1
        form = shape.last if is_last and shape.last else shape.turn
        thought, tag, answer = content.rpartition("</think>")
        thought = thought.removeprefix("<think>")
        if tag and shape.thinking != "keep":
            content = answer
            if is_last and shape.thinking == "last":
                form = form.replace("<think>\n\n<", f"<think>\n{thought}\n<").replace("<think><", f"<think>{thought}<")
        found.append(form.format(content.strip() if shape.trims else content))
    return found


def test_there_are_enough_shapes():
    assert len(SHAPES) >= 30 and sum("«" in shape.template for shape in SHAPES.values()) >= 28
    assert sum(shape.trims for shape in SHAPES.values()) >= 8
    assert sum(shape.calls is not None for shape in SHAPES.values()) >= 6


def check_several_turns(shape, encode):
    system = [("system", "Be kind.")] if shape.has_system else []
    encoded = encode(chat(*system, *PLAIN))
    assert trained(encoded) == expected(shape, ["Hello", "  Grüezi, 世界! \n"])
    assert encoded.dropped == []
    assert trained(encode(chat(*PLAIN[:3], ("assistant", "Hello")))) == expected(shape, ["Hello", "Hello"])


def check_a_conversation_that_ends_with_a_question(shape, encode):
    found = trained(encode(chat(*PLAIN[:3])))
    assert found == expected(shape, ["Hello", ""])[:1]


def check_thinking_is_kept_or_counted(shape, encode):
    contents = ["<think>plan</think>one", "<think>idea</think>two"]
    turns = [("user", "A"), ("assistant", contents[0]), ("user", "B"), ("assistant", contents[1])]
    encoded = encode(chat(*turns))
    assert trained(encoded) == expected(shape, contents)
    assert encoded.dropped == {"keep": [], "drop": ["plan", "idea"], "last": ["plan"]}[shape.thinking]


def check_an_empty_turn(shape, encode):
    turns = [("user", "A"), ("assistant", ""), ("user", "B"), ("assistant", "two")]
    found = trained(encode(chat(*turns)))
    both = expected(shape, ["", "two"])
    both[0] = both[0] if shape.empty is None else shape.empty
    assert found == [text for text in both if text]


def check_tool_calls_are_trained_and_their_results_are_not(shape, encode):
    if shape.calls is None:
        return
    turns = [("user", "A"), {"role": "assistant", "tool_calls": [CALL]}, ("tool", "4 degrees"), ("assistant", "Cold.")]
    encoded = encode(chat(*turns, tools=TOOLS))
    first, last = trained(encoded)
    assert first == shape.calls and last == expected(shape, ["Cold."])[0]
    assert encoded.dropped == []
    assert ("Ask" in encoded.text) == ("tools" in shape.template)


def check_control_tokens_in_a_question_change_nothing(shape, encode):
    forged = encode(chat(*PLAIN[:2])).text.removeprefix("<s>")
    found = trained(encode(chat(("user", forged), ("assistant", "Bye"))))
    assert found == expected(shape, ["Bye"])


@pytest.mark.parametrize("name, mark", [key for key in TEMPLATES if key[1] != "built in"])
def test_the_right_tokens_of_each_shape_are_trained(name, mark):
    shape, encode = SHAPES[name], encoder(name, mark)
    end = None if encode.end_of_turn is None else tokenizer().convert_ids_to_tokens(encode.end_of_turn)
    assert end == shape.end != tokenizer().pad_token
    check_several_turns(shape, encode)
    check_a_conversation_that_ends_with_a_question(shape, encode)
    check_thinking_is_kept_or_counted(shape, encode)
    check_an_empty_turn(shape, encode)
    check_tool_calls_are_trained_and_their_results_are_not(shape, encode)
    check_control_tokens_in_a_question_change_nothing(shape, encode)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_trains_each_turn_and_its_end(name):
    made = ChatEncoder(tokenizer(), chat_template=name)
    encoded = made(chat(("system", "Be kind."), *PLAIN))
    end = tokenizer().convert_ids_to_tokens(made.end_of_turn)
    assert [text.strip() for text in trained(encoded)] == [f"Hello{end}", f"Grüezi, 世界! \n{end}"] or name == "llama-2"
    assert "Be kind." in encoded.text and all(token in tokenizer().get_vocab() for token in made.template.tokens)
    plain = re.sub(r"\{% (end)?generation %\}", "", BUILT_IN[name])
    other = ChatEncoder(tokenizer(), chat_template=plain)(chat(("system", "Be kind."), *PLAIN))
    assert other.text == encoded.text
    assert [text.rstrip("\n") for text in trained(other)] == trained(encoded)


def test_a_built_in_template_renders_tools_or_refuses_them():
    turns = [("user", "A"), {"role": "assistant", "tool_calls": [CALL]}, ("tool", "4"), ("assistant", "Cold.")]
    rendered, refused = [], []
    for name in BUILT_IN:
        try:
            encoded = ChatEncoder(tokenizer(), chat_template=name)(chat(*turns, tools=TOOLS))
            assert '{"name": "weather", "arguments": {"city": "Zürich"}}' in trained(encoded)[0]
            assert '"description": "Ask"' in encoded.text
            rendered.append(name)
        except InputError as error:
            assert error.code == "model.chat_template" and "no tools" in str(error)
            refused.append(name)
    assert rendered == ["chatml", "llama-3", "qwen"] and len(refused) == 9


# ------------------------------------------------------------------------------------------- the templates of trl

ROWS = {
    "turns": chat(*PLAIN),
    "system": chat(("system", "Be kind."), *PLAIN),
    "empty": chat(("user", "A"), ("assistant", ""), ("user", "B"), ("assistant", "two")),
    "thinking": chat(("user", "A"), ("assistant", "<think>\nplan\n</think>\n\none")),
    "earlier thinking": chat(
        ("user", "A"), ("assistant", "<think>\nplan\n</think>\n\none"), ("user", "B"), ("assistant", "two")
    ),
    "reasoning": chat(("user", "A"), {"role": "assistant", "content": "one", "reasoning_content": "plan"}),
    "question": chat(*PLAIN[:3]),
    "tools": chat(
        ("user", "A"), {"role": "assistant", "tool_calls": [CALL]}, ("tool", "4"), ("assistant", "Cold."), tools=TOOLS
    ),
    "text and tools": chat(
        ("user", "A"), {"role": "assistant", "content": "Well", "tool_calls": [CALL]}, ("tool", "4"), ("assistant", "x")
    ),
}
# Their twins train on something that our masks leave out, or do not have; by (template, row).
OTHER_ENDS = {("glm4moe", "question"): "the header of the next question is its end of turn"}
OTHER_ENDS |= {("diffusion_gemma", "tools"): "a call ends with <|tool_response>, which stops the generation"}


def without_prompts(texts: list[str], template: str, each: Chat) -> list[str]:
    """Return the trained texts of a twin without the ends of generation prompts, which some train on."""
    prompts = []
    for index, message in enumerate(each.messages):
        if message["role"] == "assistant":
            for calls in (CALL, JSON_CALL):
                earlier = [{**m, "tool_calls": [calls]} if "tool_calls" in m else m for m in each.messages]
                options = {"tools": each.tools, "chat_template": template, "tokenize": False}
                try:
                    prompt = tokenizer().apply_chat_template(earlier[:index], add_generation_prompt=True, **options)
                except (TypeError, ValueError, TemplateError):
                    continue
                prompts.append(re.sub(r"<think>\s*(</think>\s*)?$", "", prompt))

    def cut(text: str) -> str:
        sizes = [size for prompt in prompts for size in range(len(prompt), 0, -1) if text.startswith(prompt[-size:])]
        return text[max(sizes, default=0) :]

    return list(map(cut, texts))


@pytest.mark.parametrize("name", sorted(name for name in trl_templates() if not name.endswith("_training")))
def test_the_mask_of_a_template_of_trl_equals_the_marks_of_its_twin(name):
    plain, twin = trl_templates()[name], trl_templates().get(f"{name}_training")
    encode = ChatEncoder(tokenizer(), chat_template=plain)
    compared = 0
    for row, each in ROWS.items():
        try:
            encoded = encode(each)
        except InputError as error:
            assert error.code == "model.chat_template" or (error.code == "data.chat_mask" and row == "text and tools")
            continue
        texts = trained(encoded)
        assert all("Be kind" not in text and "geht" not in text for text in texts)
        if twin is None or (name, row) in OTHER_ENDS:
            continue
        marked = ChatEncoder(tokenizer(), chat_template=twin)(each)
        if marked.text == encoded.text:
            assert texts == without_prompts(trained(marked), plain, each), row
            compared += 1
    assert twin is None or compared >= (0 if name == "glm4moe" else 1)


# ------------------------------------------------------------------------------------------ choices and bad input


def test_the_trained_turns_can_be_chosen():
    turns = [("user", "A"), ("assistant", "one"), ("user", "B"), ("assistant", "two"), ("assistant", "three")]
    found = {
        train_on: trained(encoder("chatml", train_on=train_on)(chat(*turns)))
        for train_on in ("assistant", "last", "completion")
    }
    ends = [f"{word}<|im_end|>\n" for word in ("one", "two", "three")]
    assert found == {"assistant": ends, "last": ends[2:], "completion": ends[1:]}
    everything = encoder("chatml", train_on="all")(chat(*turns))
    assert everything.labels == everything.input_ids


@pytest.mark.parametrize("mark", ["plain", "marked"])
def test_a_turn_of_weight_0_is_never_trained(mark):
    turns = [("user", "A"), ("assistant", "one"), ("user", "B"), ("assistant", "two"), ("user", "C")]
    weights = {None: ["one", "two"], 1: ["two"], 3: ["one"]}
    for skipped, words in weights.items():
        row = chat(*turns)
        if skipped is not None:
            row.messages[skipped]["weight"] = 0
        for train_on in ("assistant", "last"):
            encoded = encoder("chatml", mark, train_on=train_on)(row)
            assert trained(encoded) == [f"{word}<|im_end|>\n" for word in words][-1 if train_on == "last" else 0 :]
            assert "weight" not in encoded.text
    with pytest.raises(InputError) as raised:
        encoder("chatml", mark, train_on="all")(row)
    assert raised.value.code == "data.chat" and raised.value.fix == "--train_on assistant"
    row = chat(*turns[:4])
    row.messages[3]["weight"] = 0
    with pytest.raises(InputError) as raised:
        encoder("chatml", mark, train_on="completion")(row)
    assert raised.value.code == "data.chat" and "assistant (weight 0)" in raised.value.saw[0]
    assert raised.value.fix.startswith("--train_on assistant") and trained(encoder("chatml", mark)(row))


def test_a_conversation_of_which_truncation_leaves_nothing_to_train_on_is_dropped():
    row = chat(*PLAIN)
    row.messages[1]["weight"] = 0
    most = len(encoder("chatml")(chat(*PLAIN)).input_ids) - 1
    assert encoder("chatml", max_length=most, overlong="truncate")(row) is None
    row = read_chat({"prompt": [{"role": each[0], "content": each[1]} for each in PLAIN[:3]], "completion": "two"})
    most = len(encoder("chatml")(row).input_ids) - 12
    assert encoder("chatml", max_length=most, overlong="truncate")(row) is None


def test_a_prompt_is_never_trained():
    prompt = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "B"},
    ]
    row = read_chat({"prompt": prompt, "completion": "two"})
    for train_on in ("assistant", "completion", "last"):
        assert trained(encoder("chatml", train_on=train_on)(row)) == ["two<|im_end|>\n"]


def test_a_long_conversation_is_truncated_by_turns_and_a_long_turn_within():
    lengths = [len(encoder("chatml")(chat(*PLAIN[:size])).input_ids) for size in (2, 4)]
    found = [encoder("chatml", max_length=most, overlong="truncate")(chat(*PLAIN)) for most in lengths]
    assert trained(found[0]) == ["Hello<|im_end|>\n"] and len(found[0].input_ids) == lengths[0]
    assert trained(found[1]) == ["Hello<|im_end|>\n", "  Grüezi, 世界! \n<|im_end|>\n"]
    whole = encoder("chatml")(chat(("user", "Hi"), ("assistant", "one two three")))
    most = len(whole.input_ids) - 6
    cut = encoder("chatml", max_length=most, overlong="truncate")(chat(("user", "Hi"), ("assistant", "one two three")))
    assert (cut.input_ids, cut.labels) == (whole.input_ids[:most], whole.labels[:most])
    text = tokenizer().decode([label for label in cut.labels if label != -100])
    assert text and "one two three".startswith(text)
    assert encoder("chatml", max_length=4, overlong="truncate")(chat(*PLAIN)) is None
    assert encoder("chatml", max_length=4, overlong="drop")(chat(*PLAIN)) is None
    with pytest.raises(InputError, match="line 7 of chats.jsonl has [0-9]+ tokens, more than 4") as raised:
        encoder("chatml", max_length=4)(chat(*PLAIN))
    assert raised.value.code == "model.length" and "--overlong truncate" in raised.value.fix


def refused(template: str, *turns, code: str = "data.chat_mask") -> str:
    with pytest.raises(InputError) as raised:
        ChatEncoder(tokenizer(), chat_template=template)(chat(*turns))
    assert raised.value.code == code and raised.value.what.startswith("line 7 of chats.jsonl")
    return str(raised.value)


LOOP = "{%% for m in messages %%}<|im_start|>{{ m.role }} %s<|im_end|>{%% endfor %%}"


@pytest.mark.parametrize(
    "written, what, text",
    [
        ("{{ m.content | upper }}", "the template changes the assistant's text", "HELLO THERE"),
        ("{{ m.content[:9] }}", "cannot be located", "Hello th"),
        ("{{ m.content + ' ' + m.content }}", "a text is cut or repeated", "Hello there Hello there"),
        ("{{ m.content | length }}{{ m.content }}", "cannot be located", "11Hello there"),
        ("{{ m.content if m.role == 'user' }}", "no token would be trained", "Hi"),
    ],
)
def test_a_text_that_the_template_changes_is_refused_with_both_texts(written, what, text):
    message = refused(LOOP % written, ("user", "Hi"), ("assistant", "Hello there"))
    assert what in message and "the assistant's text: Hello there" in message and text in message
    assert "template: '{% for m in messages %}" in message


def test_generation_marks_are_not_trusted():
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Ho"), ("assistant", "Bye")]
    body = "{% generation %}{{ m.content }}{% endgeneration %}"
    assert "generation marks cover 'Hi'" in refused(LOOP % body, *turns)
    last = "{% if loop.last %}" + body + "{% else %}{{ m.content }}{% endif %}"
    message = refused(LOOP % last, *turns)
    assert "generation marks leave out 'Hello'" in message and "in the rendering: Bye" in message
    other = refused(LOOP % last.replace("loop.last", "loop.index0 == 1"), *turns[:2], ("assistant", "Bye"))
    assert "marks leave out 'Bye'" in other and "the assistant's text: Bye" in other


HEAD = "<|im_start|>{{ m.role }}{{ '\\n' }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
MARKED = {
    "the header": "«" + HEAD + "{{ m.content }}<|im_end|>»",
    "the end of the header": "<|im_start|>assistant«{{ '\\n' }}{{ m.content }}<|im_end|>»",
    "the next header": HEAD + "«{{ m.content }}<|im_end|>{{ '<|im_start|>user' if not loop.last }}»",
    "marks": "««" + HEAD + "«{{ m.content }}»<|im_end|>»»",
    "all but the end": HEAD + "«{{ m.content }}»<|im_end|>",
    "all but a line break and the end": HEAD + "«{{ m.content }}»{{ '\\n' }}<|im_end|>",
}


@pytest.mark.parametrize("what", MARKED)
def test_marks_around_too_much_or_too_little_are_cut_to_the_turn_and_its_end(what):
    user = ("" if what == "the next header" else "<|im_start|>{{ m.role }}") + "{{ '\\n' }}{{ m.content }}<|im_end|>"
    written = "{% if m.role == 'assistant' %}" + MARKED[what] + "{% else %}" + user + "{% endif %}"
    written = written.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    made = ChatEncoder(tokenizer(), chat_template="{% for m in messages %}" + written + "{% endfor %}" + PROMPT)
    end = "\n<|im_end|>" if "line break" in what else "<|im_end|>"
    for said in ("Hello", "Bye<|im_end|>", " x\n", "assistant\n", "<|im_", "<|im_start|>assistant\n"):
        encoded = made(chat(("user", "Hi"), ("assistant", said), ("user", said), ("assistant", said)))
        assert trained(encoded) == [said + end, said + end]


def test_one_mark_around_two_turns_trains_no_header_between_them():
    turns = "{% for m in messages[1:] %}" + HEAD + "{{ m.content }}<|im_end|>{% endfor %}"
    body = "{% generation %}" + turns + "{% endgeneration %}"
    first = "{% set m = messages[0] %}" + HEAD + "{{ m.content }}<|im_end|>"
    for train_on, words in (("assistant", ["one", "two"]), ("last", ["two"])):
        made = ChatEncoder(tokenizer(), chat_template=first + body + PROMPT, train_on=train_on)
        found = trained(made(chat(("user", "Hi"), ("assistant", "one"), ("assistant", "two"))))
        assert found == [f"{word}<|im_end|>" for word in words]


@pytest.mark.parametrize("mark", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_each_turn_may_end_differently(mark):
    end = "{{ '<|eot_id|>' if loop.first or loop.index0 == 1 else '<|end|>' }}"
    written = "{% if m.role == 'assistant' %}" + "{{ m.content }}".join(mark) + end
    written += "{% else %}{{ m.content }}<|eot_id|>{% endif %}"
    made = ChatEncoder(tokenizer(), chat_template="{% for m in messages %}" + HEAD + written + "{% endfor %}" + PROMPT)
    assert trained(made(chat(*PLAIN))) == ["Hello<|eot_id|>", "  Grüezi, 世界! \n<|end|>"]


def test_a_template_that_writes_the_next_header_after_the_last_turn_is_refused():
    always = (
        "{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}<|im_start|>assistant\n"
    )
    with pytest.raises(InputError) as raised:
        ChatEncoder(tokenizer(), chat_template=always)
    assert raised.value.code == "data.chat_mask" and raised.value.fix.startswith("--chat_template chatml")
    assert ChatEncoder(tokenizer(), chat_template=always, train_on="all")(chat(*PLAIN)).labels
    other = always.replace("<|im_start|>assistant\n", "{{ eos_token }}")  # ends the text
    assert trained(ChatEncoder(tokenizer(), chat_template=other)(chat(*PLAIN)))[0] == "Hello<|im_end|>\n"


@pytest.mark.parametrize("name", ["gemma", "chatml"])
def test_a_built_in_template_is_named_in_errors_also_as_the_tokenizers_own(name):
    own = copy.copy(tokenizer())
    own.chat_template = BUILT_IN[name]
    with pytest.raises(InputError, match=f"the chat template {name} refuses it") as raised:
        ChatEncoder(own)(chat(("user", "A"), ("developer", "4"), ("assistant", "Cold.")))
    assert raised.value.code == "model.chat_template"
    assert ("--chat_template chatml" in raised.value.fix) == (name != "chatml")


def test_a_template_that_reverses_the_turns_is_refused():
    reverse = "{% for m in messages[::-1] %}" + HEAD + "{{ m.content }}<|im_end|>{% endfor %}"
    assert "another message is after the last turn" in refused(reverse, *PLAIN)


@pytest.mark.parametrize("said", ["{{ m.content }}", "{{ m.content | trim }}", "{{ m.content ~ '' }}"])
@pytest.mark.parametrize("call", ["{{ f.arguments }}", "{{ f.arguments | string }}", "{{ f.arguments | tojson }}"])
def test_calls_are_never_written_as_python_writes_them(said, call):
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ f.name }}(" + call + "){% endfor %}"
    made = ChatEncoder(tokenizer(), chat_template=LOOP % (said + calls))
    turns = [("user", "None {'city': 1}"), {"role": "assistant", "tool_calls": [CALL]}, ("tool", "4")]
    text = made(chat(*turns, ("assistant", "Cold."))).text
    assert text.split("assistant ")[1].startswith('weather({"city": "Zürich"})<|im_end|>')


def test_a_prompt_is_written_in_the_shape_that_the_template_takes():
    made = copy.copy(tokenizer())
    head = "Hello {% for m in messages %}<|im_start|>{{ m.role }} "
    made.chat_template = head + "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}" + PROMPT
    asked = [{"role": "user", "content": "Hi"}]
    found = PromptEncoder(made, 99)({"chat": Chat(asked)})
    assert found["text"] == "Hello <|im_start|>user Hi<|im_end|><|im_start|>assistant\n"
    made.chat_template = SHAPES["gemma"].template.replace("«", "").replace("»", "")
    with pytest.raises(InputError) as raised:
        PromptEncoder(made, 99)({"chat": Chat([{"role": "system", "content": "Be kind."}, *asked])})
    assert raised.value.code == "model.chat_template" and "System role not supported" in str(raised.value)


def test_what_a_template_leaves_out_of_others_is_named():
    some = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    row = chat(("system", "Be kind."), *PLAIN, tools=TOOLS)
    assert ChatEncoder(tokenizer(), chat_template=some)(row).ignored == ["system", "tools"]
    assert ChatEncoder(tokenizer(), chat_template=some)(chat(*PLAIN)).ignored == []
    assert ChatEncoder(tokenizer(), chat_template="chatml")(row).ignored == []


def test_a_template_that_is_not_jinja_is_refused_without_a_row():
    for broken in ("{% for m in messages %}{{ m.content }", "{{ 'a' | nofilter }}"):
        with pytest.raises(InputError) as raised:
            ChatEncoder(tokenizer(), chat_template=broken)
        assert raised.value.code == "model.chat_template" and "correct the template" in raised.value.fix


def test_the_end_of_a_turn_is_trained_where_marks_leave_it_out_and_marks_may_stand_in_a_macro():
    body = "{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}{% endif %}"
    macro = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    made = ChatEncoder(tokenizer(), chat_template=macro + LOOP % body)
    assert trained(made(chat(*PLAIN))) == ["Hello<|im_end|>", "  Grüezi, 世界! \n<|im_end|>"]


def test_a_template_that_refuses_a_conversation_is_an_error_with_its_words():
    turns = [("user", "Hi"), ("user", "Ho"), ("assistant", "Hello")]
    message = refused(SHAPES["llama 2"].template.replace("«", "").replace("»", ""), *turns, code="model.chat_template")
    assert "roles must alternate" in message and "roles: user, user, assistant" in message
    assert "fix: --chat_template chatml" in message
    assert trained(ChatEncoder(tokenizer(), chat_template="chatml")(chat(*turns))) == ["Hello<|im_end|>"]


def test_texts_of_others_are_never_trained_however_odd_they_are():
    looks = LOOP % "{{ m.content }}{% if m.role == 'user' %}{{ m.content | length }}{% endif %}"
    encoded = ChatEncoder(tokenizer(), chat_template=looks)(chat(*PLAIN[:3]))  # its questions cannot be wrapped
    assert trained(encoded) == [" Hello<|im_end|>"]
    for odd in ("</think>", " ", "", "<think></think>\n"):
        turns = [("user", odd), ("assistant", "one"), ("user", odd), ("assistant", "<think> "), ("user", odd)]
        assert trained(encoder("chatml")(chat(*turns))) == ["one<|im_end|>\n", "<think> <|im_end|>\n"]
        assert trained(encoder("human and assistant")(chat(*turns))) == [" one", " <think> "]


def test_a_turn_of_which_nothing_is_left_is_not_trained_but_counted():
    turns = [("user", "A"), {"role": "assistant", "tool_calls": [CALL]}, ("tool", "4"), ("assistant", "Cold.")]
    encoded = encoder("chatml")(chat(*turns))
    assert trained(encoded) == ["Cold.<|im_end|>\n"] and encoded.dropped == ["weather"]
    thought = {"role": "assistant", "content": "", "reasoning_content": "plan"}
    encoded = encoder("chatml")(chat(("user", "A"), thought, ("user", "B"), ("assistant", "Cold.")))
    assert trained(encoded) == ["Cold.<|im_end|>\n"] and encoded.dropped == ["plan"]


def test_an_empty_turn_is_found_beside_a_call_without_text():
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    turns = [("user", "A"), call, ("tool", "4"), ("assistant", ""), ("user", "B"), ("assistant", "Cold.")]
    for mark in ("plain", "marked"):
        found = trained(encoder("qwen 2.5", mark)(chat(*turns, tools=TOOLS)))
        assert found == [SHAPES["qwen 2.5"].calls, "<|im_end|>\n", "Cold.<|im_end|>\n"]


def test_a_header_that_only_the_whole_conversation_has_is_not_trained():
    prompt = "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant {% endif %}"
    made = ChatEncoder(tokenizer(), chat_template=LOOP % "{{ m.content }}{{ '!' if m.role == 'tool' }}" + prompt)
    turns = [("user", "A"), ("assistant", "Wait."), ("tool", "4"), ("assistant", "Cold.")]
    assert trained(made(chat(*turns))) == ["Wait.<|im_end|>", "Cold.<|im_end|>"]


def test_a_message_inside_a_turn_is_refused():
    body = "{% for c in m.tool_calls or [] %}{{ c.function.name + messages[loop.index0 + 2].content }}{% endfor %}"
    said = "{% if m.role != 'tool' %}" + body + "{{ m.content }}{% endif %}"
    call = {"role": "assistant", "content": "Well", "tool_calls": [CALL]}
    message = refused(LOOP % said, ("user", "A"), call, ("tool", "4 degrees"), ("assistant", "Cold."))
    assert "another message is inside a turn" in message and "weather4 degreesWell" in message


def test_private_use_characters_are_refused():
    with pytest.raises(InputError, match="private use") as raised:
        encoder("chatml")(chat(("user", "\U00100001"), ("assistant", "Hello")))
    assert raised.value.code == "data.chat"


def test_templates_are_found_by_name_file_and_tokenizer(tmp_path):
    own = copy.copy(tokenizer())
    with pytest.raises(InputError, match="the tokenizer has no chat template") as raised:
        resolve_template(own)
    assert ", ".join(BUILT_IN) in str(raised.value) and "--chat_template template.jinja" in raised.value.fix
    (tmp_path / "template.jinja").write_text(LOOP % "{{ m.content }}", encoding="utf-8")
    assert resolve_template(own, str(tmp_path / "template.jinja")).default.startswith("{% for")
    with pytest.raises(InputError, match="there is no chat template 'chatlm'") as raised:
        resolve_template(own, "chatlm")
    assert raised.value.fix == "--chat_template chatml" and raised.value.code == "model.chat_template"
    own.chat_template = {"default": LOOP % "{{ m.content }}", "tool_use": BUILT_IN["chatml"]}
    assert resolve_template(own).text(has_tools=True) == BUILT_IN["chatml"] != resolve_template(own).text()


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="no offsets") as raised:
        ChatEncoder(Slow(), chat_template="chatml")
    assert raised.value.code == "model.tokenizer"


def test_a_token_across_the_borders_of_a_turn_is_trained_only_if_it_has_a_part_of_the_text():
    offsets, text = [(0, 2), (2, 5), (5, 8), (8, 11), (11, 12)], "abcdefghijkl"
    assert trained_tokens(text, offsets, [(3, 10)], [(6, 7)]).tolist() == [False, False, True, False, False]
    assert trained_tokens(text, offsets, [(3, 10)], [(4, 9)]).tolist() == [False, True, True, True, False]
    assert trained_tokens("abcdefghij  ", offsets, [(3, 10)], [(6, 7)]).tolist() == [False, False, True, True, False]


def test_control_tokens_that_take_whitespace_along():
    from tokenizers import AddedToken

    made = copy.deepcopy(tokenizer())
    tokens = [
        AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("system", "user", "assistant", "end")
    ]
    made.add_special_tokens({"additional_special_tokens": tokens})
    for template in ("phi-3", SHAPES["phi 3"].template.replace("«", "").replace("»", "")):
        encoded = ChatEncoder(made, chat_template=template)(chat(("user", "Hi"), ("assistant", "  Hello\n")))
        found = [label for label in encoded.labels if label != -100]
        assert made.decode(found).removesuffix("</s>") == "Hello\n<|end|>"
        assert made.convert_tokens_to_ids("<|end|>") in found
        assert made.convert_tokens_to_ids("<|assistant|>") not in found


@pytest.mark.parametrize("name", ["chatml", "llama-2", "vicuna"])
def test_a_tokenizer_that_trims_its_offsets_has_the_same_masks(name):
    from tokenizers import processors

    made = copy.deepcopy(tokenizer())
    made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for said in ("def f(x):\n        return  x \n", "   x", " \n\n\t"):
        plain, trimmed = (
            ChatEncoder(each, chat_template=name)(chat(("user", " Hi  "), ("assistant", said), ("user", "  ")))
            for each in (tokenizer(), made)
        )
        assert (plain.input_ids, plain.labels) == (trimmed.input_ids, trimmed.labels)


def test_a_tokenizer_that_marks_words_instead_of_bytes():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    words.train_from_iterator(["[INST] Hi [/INST] Hello there you USER: ASSISTANT:"] * 9, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for name in ("llama-2", "mistral", "vicuna"):
        encoded = ChatEncoder(made, chat_template=name)(chat(("user", "Hi you"), ("assistant", "Hello there")))
        found = made.convert_ids_to_tokens([label for label in encoded.labels if label != -100])
        assert [token for token in found if token != "▁"] == ["▁Hello", "▁there", "</s>"]
