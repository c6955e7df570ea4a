"""Small conversations and small decoders for the tests of chat."""

from pathlib import Path
from typing import Any

from loopwright.demos.dialogue_rows import dialogue_rows
from tasks.reviews import write_jsonl

FLAGS: dict[str, Any] = {
    "lr": 3e-3,
    "batch": 4,
    "max_steps": 4,
    "threads": 1,
    "quiet": True,
    "rehearsal": False,
    "max_new_tokens": 6,
    "num_samples": 2,
    "max_length": 128,
    "packing": True,
}


def dialogues(count: int = 60) -> list[dict[str, Any]]:
    """Return conversations of at most eight turns."""
    return [row for row in dialogue_rows().train if len(row["messages"]) <= 8][:count]


def write_dialogues(folder: Path, count: int = 60) -> Path:
    return write_jsonl(folder / "chats.jsonl", dialogues(count))


def tiny_decoder(folder: Path, kind: str = "llama", template: str | None = "chatml", **options: Any) -> Path:
    """Write a decoder of a few thousand weights whose tokenizer pads with its end token, and return its folder."""
    import transformers

    from loopwright.data.chats import BUILT_IN
    from loopwright.tasks.text.causal_lm import train_tokenizer

    texts = [turn["content"] for row in dialogues() for turn in row["messages"]]
    tokenizer = train_tokenizer([*texts, *["user", "assistant", "system"] * 100], 340)
    tokenizer.model_max_length = 128
    tokenizer.chat_template = None if template is None else BUILT_IN[template]
    if template == "chatml":
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if kind == "gpt2":
        sizes = {"n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes, **dropout, **ends)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        sizes |= {"max_position_embeddings": 128, **options}
        config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)
        model = transformers.LlamaModel(config) if kind == "headless" else transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
