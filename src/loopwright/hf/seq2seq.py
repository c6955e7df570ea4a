"""`Seq2SeqTrainer`: evaluation by generation, with predictions that a tokenizer can decode directly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.errors import CheckpointError, ConfigError
from loopwright.hf.files import pretrained_files
from loopwright.hf.outputs import EvalLoopOutput, PredictionOutput
from loopwright.hf.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluations generate if `predict_with_generate` is set.

    Generated tokens are padded with the pad token, never with -100, so they decode directly. Labels keep their -100,
    as in transformers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gen_kwargs: dict[str, Any] = {}
        self.is_evaluating_dict = False
        configuration = getattr(self.args, "generation_config", None)
        if isinstance(configuration, (str, os.PathLike)):
            configuration = type(self.model.generation_config).from_pretrained(configuration, trust_remote_code=False)
        if configuration is not None:
            try:
                pretrained_files(configuration)  # every checkpoint has it
            except CheckpointError as error:
                raise ConfigError(f"generation_config: {error}") from error
            self.model.generation_config = configuration

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate; extra keywords go to `generate`, and override `generation_max_length` and the like."""
        if gen_kwargs or not self.is_evaluating_dict:  # datasets of a dict inherit the outer call's
            self._gen_kwargs = _generation(self.args, gen_kwargs)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        outer, self.is_evaluating_dict = self.is_evaluating_dict, isinstance(dataset, Mapping)
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self.is_evaluating_dict = outer

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict; extra keywords go to `generate`."""
        self._gen_kwargs = _generation(self.args, gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run once over a loader; generated tokens of different lengths are padded with the pad token."""
        self.prediction_padding = _pad_token_id(self) if _generates(self, prediction_loss_only) else None
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, the generated tokens, and the labels."""
        if not _generates(self, prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        given = {name: value for name, value in inputs.items() if name != "labels"}
        if labels is not None and getattr(given.get("decoder_input_ids"), "shape", None) == labels.shape:
            # Created from the labels, which the model would only have to copy.
            given = {name: value for name, value in given.items() if not name.startswith("decoder_")}
        with torch.no_grad():
            # A subclass may set _gen_kwargs itself, with None for the model's own value.
            options = [each for each in {**self._gen_kwargs, **gen_kwargs}.items() if each[1] is not None]
            tokens = self.model.generate(**given, **dict(options))
        loss = None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, prediction_loss_only=True, ignore_keys=ignore_keys)
        return loss, tokens, labels


def _generates(trainer: Seq2SeqTrainer, prediction_loss_only: bool | None) -> bool:
    return bool(getattr(trainer.args, "predict_with_generate", False)) and not prediction_loss_only


def _generation(args: Any, given: dict[str, Any]) -> dict[str, Any]:
    options = dict(given)
    if options.get("max_length") is None and options.get("max_new_tokens") is None:
        options["max_length"] = getattr(args, "generation_max_length", None)
    if options.get("num_beams") is None:
        options["num_beams"] = getattr(args, "generation_num_beams", None)
    return options


def _pad_token_id(trainer: Seq2SeqTrainer) -> int:
    model = trainer.model
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(f"predict_with_generate=True needs a model with generate(): {type(model).__name__} has none")
    configurations = (getattr(model, name, None) for name in ("generation_config", "config"))
    for holder in (trainer.processing_class, *configurations):
        for name in ("pad_token_id", "eos_token_id"):
            found = getattr(holder, name, None)
            if isinstance(found, int):
                return found
    raise ConfigError("predict_with_generate=True needs a pad token: set pad_token_id of the tokenizer or the model")
