"""Tiny models and data for the tests of `loopwright.hf`."""

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.hf import Trainer, TrainerCallback, TrainingArguments
from toys import callback

VOCABULARY = 32
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

# Samples for a sequence classifier such as `bert`.
TOKENS = [{"input_ids": torch.arange(3, 9), "labels": index % 3} for index in range(8)]

# Underscore names of transformers' Trainer that users override or call; hf.Trainer has no other private name.
HF_CONTRACT = {
    *("_gen_kwargs", "_get_collator_with_removed_columns", "_get_eval_sampler", "_get_train_sampler", "_save"),
    *("_get_output_dir", "_hp_search_setup", "_report_to_hp_search"),
    *("_evaluate", "_finish_current_push", "_get_dataloader", "_get_learning_rate", "_get_num_items_in_batch"),
    *("_inner_training_loop", "_issue_warnings_after_load", "_load_best_model", "_load_callback_state"),
    *("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_push_from_checkpoint", "_save_checkpoint"),
    *("_globalstep_last_logged", "_maybe_log_save_evaluate", "_total_loss_scalar"),
    *("_set_signature_columns_if_needed", "_signature_columns"),
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
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, num_labels=labels, max_position_embeddings=32, **SIZES, **rates, **options
    )
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **tokens))


def gpt2() -> Any:
    """Return a tiny GPT-2, whose class transformers does not know to shift its labels."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0, **tokens))


class NoisyRows:
    """Labelled samples with noise from the generators of torch, numpy and Python."""

    def __init__(self) -> None:
        self.rows = rows(20)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn(4) * 0.1 + np.random.rand() * 0.1 + random.random() * 0.1
        return {"x": self.rows[index]["x"] + noise, "labels": self.rows[index]["labels"]}


class PlainTokenizer:
    """The attributes that a tokenizer from outside transformers must have."""

    pad_token_id = 0
    mask_token_id = 4
    eos_token_id = 3
    all_special_ids = (0, 1, 2, 3, 4)

    def __init__(self, side: str = "right", size: int = 1000) -> None:
        self.padding_side = side
        self._size = size

    def __len__(self) -> int:
        return self._size


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


_OF_TRAINER = inspect.signature(Trainer.__init__).parameters.keys() - {"model", "args", "train_dataset", "callbacks"}


def made(folder: Any, *callbacks: Any, kind: Any = Trainer, model: Any = None, data: Any = None, **options: Any) -> Any:
    """Return a trainer over 20 rows; `options` go to its constructor, or else to its arguments."""
    given = {name: options.pop(name) for name in _OF_TRAINER & options.keys()}
    torch.manual_seed(0)
    if "model_init" not in given:
        given["model"] = Classifier() if model is None else model
    data = rows(20) if data is None else data
    return kind(args=arguments(folder, **options), train_dataset=data, callbacks=list(callbacks), **given)


def fit(folder: Any, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    """Return a trainer of `made` after its training; `trainer.output` is what `train` returned."""
    trainer = made(folder, *callbacks, **options)
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def on(**events: Callable[..., Any]) -> Any:
    """Return a callback made of functions: on(step_end=lambda args, state, control, **kwargs: ...)."""
    return callback(TrainerCallback, **{f"on_{name}": function for name, function in events.items()})


def at_step(step: int, act: Callable[[Any], Any]) -> Any:
    """Return a callback that calls a function of the control at the end of a step."""
    return on(step_end=lambda args, state, control, **kwargs: state.global_step == step and act(control) or None)


def assert_refused(text: str, call: Callable[..., Any], *args: Any, error: Any = ConfigError, **kwargs: Any) -> None:
    """The call raises an error whose message matches the text."""
    with pytest.raises(error, match=text):
        call(*args, **kwargs)


def folders(path: Path) -> list[str]:
    return sorted((entry.name for entry in path.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def same(one: Any, other: Any) -> bool:
    return losses(one) == losses(other) and largest_difference(weights(one), weights(other)) == 0


def losses(trainer: Any) -> list[float]:
    return logged(trainer, "loss")


def logged(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]
