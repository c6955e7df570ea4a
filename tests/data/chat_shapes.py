"""Chat templates in the shapes of public models, and what each should train on, said independently of the encoder.

« and » are generation marks: each shape is tested with them, and without. `turn` is what is trained of a turn of the
assistant, with {} for its text; `last` of the last one, if it differs.
"""

# ruff: noqa: E501
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

CONTROL_TOKEN = re.compile(
    r"<[|｜][^<>'\"{}\s+]+?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<end_of_utterance>"
)


@cache
def byte_level_tokenizer(templates: tuple[str, ...]) -> Any:
    """Return a small tokenizer that knows the control tokens of these templates."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    control = sorted({token for text in templates for token in CONTROL_TOKEN.findall(text)})
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>", *control],
        show_progress=False,
    )
    made.train_from_iterator(
        ["Hello, how are you? The weather in Zürich is fine, thank you. user assistant\n\n"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@dataclass(frozen=True)
class Shape:
    """A template and the texts that it trains on.

    `thinking` is "keep", "drop" or "last" (kept after the last question alone); `calls` is what a call of
    weather(city="Zürich") becomes; `empty` is what is trained of a turn without text, if it is not `turn` alone.
    """

    template: str
    turn: str
    last: str | None = None
    trims: bool = False
    thinking: str = "keep"
    has_system: bool = True
    calls: str | None = None
    empty: str | None = None
    end: str | None = None


SHAPES = {
    "chatml": Shape(
        r"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}«{{ m.content + "
        r"'<|im_end|>\n' }}»{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{}<|im_end|>\n",
        end="<|im_end|>",
    ),
    "chatml without a generation prompt": Shape(
        r"{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}",
        "{}<|im_end|>\n",
        end="<|im_end|>",
    ),
    "llama 2": Shape(
        r"{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        r"{% set ms = messages[1:] %}{% else %}{% set s = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}"
        r"{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        r"{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (s if loop.first else '') + m.content.strip() + ' [/INST]' }}"
        r"{% else %}«{{ ' ' + m.content.strip() + ' ' + eos_token }}»{% endif %}{% endfor %}",
        " {} </s>",
        trims=True,
        end="</s>",
    ),
    "llama 3": Shape(
        r"{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m.role + "
        r"'<|end_header_id|>\n\n' }}{% if m.role == 'assistant' %}«{{ m.content | trim + '<|eot_id|>' }}»{% else %}"
        r"{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "{}<|eot_id|>",
        trims=True,
        end="<|eot_id|>",
    ),
    "llama 3.1 with tools": Shape(
        r"{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' + tools | tojson + '<|eot_id|>' }}"
        r"{% endif %}{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + "
        r"'<|end_header_id|>\n\n' }}{% if m.role == 'assistant' %}«{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
        r"""{{ '{"name": "' + c.name + '", "parameters": ' }}{{ c.arguments | tojson }}{{ '}' }}<|eom_id|>{% else %}"""
        r"{{ m.content | trim + '<|eot_id|>' }}{% endif %}»{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "{}<|eot_id|>",
        trims=True,
        calls='{"name": "weather", "parameters": {"city": "Zürich"}}<|eom_id|>',
        end="<|eot_id|>",
    ),
    "mistral v1": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        r"{% elif m.role == 'assistant' %}«{{ m.content + eos_token }}»{{ ' ' }}"
        r"{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
        "{}</s>",
        has_system=False,
        end="</s>",
    ),
    "mistral v3": Shape(
        r"{{ bos_token }}{% set u = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set u.i = loop.index0 %}"
        r"{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == u.i %}"
        r"{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        r"{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + "
        r"'[/TOOL_RESULTS]' }}{% elif m.role == 'assistant' %}«{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in "
        r"""m.tool_calls %}{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}"""
        r"{{ '}' }}{% endfor %}{{ ']' + eos_token }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}»"
        r"{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}",
        " {}</s>",
        trims=True,
        calls='[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich"}}]</s>',
        end="</s>",
    ),
    "mistral tekken": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + "
        r"'[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
        r"«{{ m.content + eos_token }}»{% endif %}{% endfor %}",
        "{}</s>",
        end="</s>",
    ),
    "gemma": Shape(
        r"{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        r"{% for m in messages %}{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}«{{ m.content | trim + "
        r"'<end_of_turn>\n' }}»{% else %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        r"{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "{}<end_of_turn>\n",
        trims=True,
        has_system=False,
        end="<end_of_turn>",
    ),
    "gemma 3": Shape(
        r"{{ bos_token }}{% set p = '' %}{% set ms = messages %}{% if messages[0].role == 'system' %}{% set p = "
        r"messages[0].content + '\n\n' %}{% set ms = messages[1:] %}{% endif %}{% for m in ms %}{% set r = 'model' if "
        r"m.role == 'assistant' else m.role %}{{ '<start_of_turn>' + r + '\n' + (p if loop.first else '') }}"
        r"{% if r == 'model' %}«{{ m.content | trim + '<end_of_turn>\n' }}»{% else %}{{ m.content | trim + "
        r"'<end_of_turn>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "{}<end_of_turn>\n",
        trims=True,
        end="<end_of_turn>",
    ),
    "phi 3": Shape(
        r"{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}«{{ m.content + '<|end|>\n' }}»"
        r"{% else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}«{{ eos_token }}»{% endif %}",
        "{}<|end|>\n",
        last="{}<|end|>\n</s>",
        end="<|end|>",
    ),
    "phi 4": Shape(
        r"{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}{% if m.role == 'assistant' %}«{{ m.content "
        r"+ '<|im_end|>' }}»{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        "{}<|im_end|>",
        end="<|im_end|>",
    ),
    "qwen 2.5": Shape(
        r"{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.' }}{% else %}"
        r"{{ '<|im_start|>system\n' + messages[0].content }}{% endif %}{% if tools %}{{ '\n# Tools' }}{% for t in tools %}"
        r"{{ '\n' + t | tojson }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}{% if m.role == "
        r"'assistant' %}{{ '<|im_start|>assistant\n' }}«{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        r"""{{ '\n' if m.content else '' }}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}"""
        r"{{ c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}»{% elif m.role == 'tool' "
        r"%}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        r"{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% if loop.last or messages[loop.index0 + 1].role "
        r"!= 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% elif not loop.first or m.role == 'user' %}{{ '<|im_start|>' + "
        r"m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{}<|im_end|>\n",
        calls='<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>\n',
        end="<|im_end|>",
    ),
    "qwen 3 thinking": Shape(
        r"{% set q = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}{% set q.last = loop.index %}"
        r"{% endfor %}{% set n = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.user = n.user "
        r"+ 1 %}{% endif %}{% if m.role == 'assistant' %}{% set c = m.content %}{% set t = '' %}{% if '</think>' in c %}"
        r"{% set t = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set c = c.split('</think>')[-1]."
        r"lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}«{% if n.user == q.last %}{{ '<think>\n' + t + "
        r"'\n</think>\n\n' }}{% endif %}{{ c + '<|im_end|>\n' }}»{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        r"'<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{}<|im_end|>\n",
        last="<think>\n\n</think>\n\n{}<|im_end|>\n",
        thinking="last",
        end="<|im_end|>",
    ),
    "deepseek v2": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}{% elif m.role "
        r"== 'assistant' %}{{ 'Assistant:' }}«{{ ' ' + m.content + eos_token }}»{% else %}{{ m.content + '\n\n' }}{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        " {}</s>",
        end="</s>",
    ),
    "deepseek v3": Shape(
        r"{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}"
        r"{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + "
        r"m.content + '<｜tool▁output▁end｜>' }}{% elif m.role == 'assistant' and m.content is none %}{{ '<｜Assistant｜>' }}"
        r"«{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '\n```json\n' + c.function.arguments + "
        r"'\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜end▁of▁sentence｜>»{% elif m.role == 'assistant' %}{% set c = m.content "
        r"%}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{% if messages[loop.index0 - 1].role != "
        r"'tool' %}{{ '<｜Assistant｜>' }}{% endif %}«{{ c + '<｜end▁of▁sentence｜>' }}»{% endif %}{% endfor %}"
        r"{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}",
        "{}<｜end▁of▁sentence｜>",
        thinking="drop",
        calls='<｜tool▁call▁begin｜>weather\n```json\n{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜end▁of▁sentence｜>',
        end="<｜end▁of▁sentence｜>",
    ),
    "deepseek r1": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' }}«{{ "
        r"m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}»{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        r"{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        "{}<｜end▁of▁sentence｜>",
        thinking="drop",
        end="<｜end▁of▁sentence｜>",
    ),
    "zephyr": Shape(
        r"{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}«{{ m.content + eos_token }}{{ '\n' }}»"
        r"{% else %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endif %}{% if loop.last and "
        r"add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "{}</s>\n",
        end="</s>",
    ),
    "vicuna": Shape(
        r"{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}{{ 'USER: ' + "
        r"m.content.strip() + ' ' }}{% else %}{{ 'ASSISTANT:' }}«{{ ' ' + m.content.strip() + eos_token }}»{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        " {}</s>",
        trims=True,
        end="</s>",
    ),
    "alpaca": Shape(
        r"{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
        r"{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}{{ '### Response:\n' }}«{{ m.content + '\n\n' }}»{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
        "{}\n\n",
        empty="\n",  # the first newline is one token together with the last one of the header
    ),
    "command-r": Shape(
        r"{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
        r"«{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}»{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content.strip() + "
        r"'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        "{}<|END_OF_TURN_TOKEN|>",
        trims=True,
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "granite": Shape(
        r"{% if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson + eos_token + '\n' }}{% endif %}"
        r"{% for m in messages %}{% if m.role == 'assistant' %}<|start_of_role|>assistant<|end_of_role|>«{% if m.tool_calls %}"
        r"{{ '<|tool_call|>' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% else %}{{ m.content }}"
        r"{% endif %}{{ eos_token + '\n' }}»{% else %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
        r"eos_token + '\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        "{}</s>\n",
        calls='<|tool_call|>{"name": "weather", "arguments": {"city": "Zürich"}}</s>\n',
        end="</s>",
    ),
    "olmo": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}«{{ m.content + eos_token }}»"
        r"{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        r"{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "{}</s>",
        end="</s>",
    ),
    "falcon": Shape(
        r"{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{% if m.role == 'system' %}{{ m.content.strip() }}"
        r"{% elif m.role == 'user' %}{{ 'User: ' + m.content.strip() }}{% else %}{{ 'Falcon:' }}«{{ ' ' + m.content.strip() }}»"
        r"{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\nFalcon:' }}{% endif %}",
        " {}",
        trims=True,
    ),
    "stablelm": Shape(
        r"{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + '\n' }}«{{ m.content + eos_token + '\n' }}»"
        r"{% else %}{{ '<|' + m.role + '|>' + '\n' + m.content.lstrip() + eos_token + '\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "{}</s>\n",
        end="</s>",
    ),
    "smollm": Shape(
        r"{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}"
        r"{% endif %}{% if m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}«{{ m.content }}<|im_end|>{{ '\n' }}»"
        r"{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{}<|im_end|>\n",
        end="<|im_end|>",
    ),
    "yi": Shape(
        r"{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% for m in messages %}"
        r"{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + "
        r"'<|im_end|>\n<|im_start|>assistant\n' }}{% else %}«{{ m.content + '<|im_end|>' }}{{ '\n' }}»{% endif %}{% endfor %}",
        "{}<|im_end|>\n",
        end="<|im_end|>",
    ),
    "internlm": Shape(
        r"{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "{}<|im_end|>\n",
        end="<|im_end|>",
    ),
    "openchat": Shape(
        r"{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'GPT4 Correct Assistant:' }}«{{ ' ' + "
        r"m.content + '<|end_of_turn|>' }}»{% else %}{{ 'GPT4 Correct ' + m.role.title() + ': ' + m.content + "
        r"'<|end_of_turn|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
        " {}<|end_of_turn|>",
        end="<|end_of_turn|>",
    ),
    "glm": Shape(
        r"[gMASK]<sop>{% set q = namespace(n=0, last=0) %}{% for m in messages if m.role == 'user' %}{% set q.last = loop.index %}"
        r"{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{% set q.n = q.n + 1 %}{{ '<|user|>\n' + m.content }}"
        r"{% elif m.role == 'assistant' %}<|assistant|>«{% set c = m.content or '' %}{% set t = '' %}{% if '</think>' in c %}"
        r"{% set t = c.split('</think>')[0].split('<think>')[-1].strip() %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        r"{{ '\n<think>' + (t if q.n == q.last else '') + '</think>' }}{% if c.strip() %}{{ '\n' + c.strip() }}{% endif %}"
        r"{% for f in m.tool_calls or [] %}{{ '\n<tool_call>' + f.function.name }}{% for k, v in f.function.arguments.items() %}"
        r"{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
        r"»{% elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{% else %}{{ '<|system|>\n' + m.content }}{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "\n<think></think>\n{}",
        trims=True,
        thinking="last",
        calls="\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        empty="",  # the template leaves out what is around a text, so that nothing shows where it would be
    ),
    "nemotron": Shape(
        r"{{ '<extra_id_0>System\n' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content.strip() + '\n' }}"
        r"{% elif m.role == 'user' %}{{ '<extra_id_1>User\n' + m.content.strip() + '\n<extra_id_1>Assistant\n' }}{% else %}"
        r"«{{ m.content.strip() + '\n' }}»{% endif %}{% endfor %}",
        "{}\n",
        trims=True,
    ),
    "human and assistant": Shape(
        r"{% for m in messages %}{% if m.role == 'user' %}{{ '\n\nHuman: ' + m.content }}{% elif m.role == 'assistant' %}"
        r"{{ '\n\nAssistant:' }}«{{ ' ' + m.content }}»{% else %}{{ m.content }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}",
        " {}",
    ),
    "harmony": Shape(
        r"{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant«<|channel|>final<|message|>{{ m.content }}"
        r"{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}»{% else %}<|start|>"
        r"{{ m.role + '<|message|>' + m.content }}<|end|>{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|channel|>final<|message|>{}<|end|>",
        last="<|channel|>final<|message|>{}<|return|>",
        end="<|return|>",
    ),
}
