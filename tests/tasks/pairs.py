"""Pairs of answers in every row format, and a tiny random Llama with a chat template to tune on them."""

import random
from pathlib import Path

COLOURS = ("red", "blue", "green", "pink")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_rows(count=40, seed=0):
    """Return texts: the colour of the prompt is the right answer, however long it is."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        right, wrong = chosen.sample(COLOURS, 2)
        more = [" indeed" * chosen.randrange(3) for _ in "ab"]
        made.append({"prompt": f"it is {right} {number}, so", "chosen": f" {right}{more[0]}"})
        made[-1]["rejected"] = f" {wrong}{more[1]}"
    return made


def chat_rows(count=40, seed=0):
    """Return the same as messages."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{side: [{"role": "assistant", "content": row[side].strip()}] for side in ("chosen", "rejected")},
        }
        for row in text_rows(count, seed)
    ]


def whole_rows(count=40, seed=0):
    """Return the same as whole conversations that begin alike."""
    rows = chat_rows(count, seed)
    return [{side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")} for row in rows]


def write_model(folder: Path, seed=0, template=CHATML, hidden_size=32) -> Path:
    """Write a tiny random Llama, whose tokenizer has special tokens for turns."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from loopwright.tasks.text.models import train_byte_pairs

    torch.manual_seed(seed)
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    texts = [f"{row['prompt']}{row['chosen']} user assistant" for row in text_rows()]
    trained = train_byte_pairs(texts, 320, special, prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=special[0], pad_token=special[1], chat_template=template
    )
    sizes = {"hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=0.3, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
