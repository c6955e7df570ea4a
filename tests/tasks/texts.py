"""Small texts and small language models for the tests of causal-lm and masked-lm."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ANIMALS = ["cat", "dog", "cow", "hen"]
PLACES = ["mat", "bed", "roof", "wall"]
FLAGS = {"lr": 5e-3, "epochs": 1, "batch": 8, "threads": 1, "quiet": True, "rehearsal": False}


def lines(count: int = 160, seed: int = 0) -> list[str]:
    """Return sentences of a few words, some with characters of several bytes."""
    chosen = random.Random(seed)
    return [
        f"the {chosen.choice(ANIMALS)} sat on the {chosen.choice(PLACES)} and said naïve {number} €"
        for number in range(count)
    ]


def write_text(path: Path, made: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in made), encoding="utf-8")
    return path


def tiny_gpt2(folder: Path, vocabulary: int = 0, dropout: float = 0.1, **special: str | None) -> Path:
    """Write a GPT-2 of a few thousand weights with its tokenizer, and return its folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from loopwright.tasks.text.causal_lm import train_tokenizer

    tokenizer = train_tokenizer(lines(), 300)
    tokenizer.model_max_length = 64
    for name, value in special.items():
        setattr(tokenizer, name, value)
    sizes = {"vocab_size": max(vocabulary, len(tokenizer)), "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **sizes, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_tokenizer(texts: Iterable[str], vocabulary: int = 400, **options: Any) -> Any:
    """Return a tokenizer for texts of at most 64 tokens."""
    from loopwright.tasks.text.models import train_tokenizer

    tokenizer = train_tokenizer(texts, vocabulary, **options)
    tokenizer.model_max_length = 64
    return tokenizer


def save_bert(folder: Path, kind: str, tokenizer: Any, **options: Any) -> Path:
    """Write a BERT of a few thousand weights, such as "BertForMaskedLM", with its tokenizer, and return its folder."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, **options}
    getattr(transformers, kind)(transformers.BertConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_bert(folder: Path) -> Path:
    from loopwright.tasks.text.masked_lm import train_tokenizer

    tokenizer = train_tokenizer(lines(), 320)
    tokenizer.model_max_length = 64
    return save_bert(folder, "BertForMaskedLM", tokenizer, num_hidden_layers=2)
