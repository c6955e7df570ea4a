"""Tiny models and data for the tests of `loopwright.hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopwright.hf import TrainingArguments

VOCABULARY = 32

# Underscore names of transformers' Trainer that users override or call; hf.Trainer has no other private name.
HF_CONTRACT = {
    *("_gen_kwargs", "_get_collator_with_removed_columns", "_get_eval_sampler", "_get_train_sampler", "_save"),
    *("_move_model_to_device", "_prepare_input", "_prepare_inputs", "_remove_unused_columns", "_train_batch_size"),
}


class Classifier(nn.Module):
    """A plain module of HF's shape: takes the batch's keys, returns a dict with a loss."""

    def __init__(self, features: int = 4, classes: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.linear(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class GreedyKeywords(Classifier):
    """The same with `**kwargs` in its forward, which says nothing about how it divides its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


def rows(count: int = 24, features: int = 4, classes: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Return labelled samples."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(features, generator=generator),
            "labels": int(torch.randint(classes, (), generator=generator)),
        }
        for _ in range(count)
    ]


def token_rows(count: int = 24, length: int = 10, seed: int = 0, ragged: bool = True) -> list[dict[str, Any]]:
    """Return samples of tokens; labels of padding are -100."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        used = int(torch.randint(3, length + 1, (), generator=generator)) if ragged else length
        mask = (torch.arange(length) < used).long()
        samples.append({"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)})
    return samples


def bert(labels: int = 3, **options: Any) -> Any:
    """Return a tiny sequence classifier without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, num_labels=labels, max_position_embeddings=32, **sizes, **rates, **options)
    )


def llama() -> Any:
    """Return a tiny causal language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def gpt2() -> Any:
    """Return a tiny GPT-2, whose class transformers does not know to shift its labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def t5() -> Any:
    """Return a tiny encoder-decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


class CharacterTokenizer:
    """A tokenizer-like object: pads `input_ids` and `attention_mask`, and saves itself."""

    pad_token_id = 0
    eos_token_id = 2
    padding_side = "right"
    model_input_names = ("input_ids", "attention_mask")

    def __call__(self, text: str) -> dict[str, list[int]]:
        ids = [3 + ord(character) % (VOCABULARY - 3) for character in text]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def pad(self, features: Any, padding: Any = True, return_tensors: str | None = None, **_: Any) -> dict[str, Any]:
        columns = features if isinstance(features, dict) else {n: [f[n] for f in features] for n in features[0]}
        longest = max(len(ids) for ids in columns["input_ids"])
        fill = {"input_ids": self.pad_token_id, "attention_mask": 0}
        return {
            name: torch.tensor([list(v) + [fill[name]] * (longest - len(v)) for v in values])
            if name in fill
            else torch.tensor(values)
            for name, values in columns.items()
        }

    def save_pretrained(self, folder: str | Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return quiet arguments for a short run; `options` win."""
    quiet = {"save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    return TrainingArguments(str(folder), **{**quiet, "logging_steps": 1, "learning_rate": 1e-2, **options})


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of a trainer's weights."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def losses(trainer: Any) -> list[float]:
    """Return the training losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
