"""Predict the memory of a run before its weights are loaded: its model is built and run with tensors without data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but what torch itself measures memory with

from loopwright.engine.memory import MemorySaving, SavedBytes, free_bytes, list_savings
from loopwright.engine.nested import iter_tensors
from loopwright.errors import InputError, MemoryLimitError
from loopwright.quantities import size
from loopwright.runs.job import RunJob, build_job, given_origin, make_optimizer
from loopwright.runs.settings import Settings
from loopwright.runs.trainer import LENGTH_FLAGS
from loopwright.tasks.adapters import made_up_inputs
from loopwright.tasks.base import Job
from loopwright.tasks.text.chunked_loss import tokens_at_a_time
from loopwright.tasks.text.models import longest_allowed

_FOUR_BITS = 0.5 + (1 + 4 / 256) / 64  # bytes of a weight in nf4, with its share of the doubly quantized scales
_LONGEST = 1_024  # tokens of a row, if no flag says how many
_LOGIT_COPIES = 3  # in 32 bits: the logits, their softmax and the gradient
_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of a training update at its peak; activations are kept by forward, or recomputed by backward."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    tokens: int  # of the micro-batch that this is for

    @property
    def state(self) -> int:
        """The bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state + self.activations + self.logits


def print_expected(run: RunJob) -> MemoryEstimate | None:
    """Print what a run will need; raise MemoryLimitError if its state alone does not fit. None if it is not known."""
    found = estimate(run)
    if found is None:
        return None
    free, where = free_bytes(run.training.device), "GPU" if run.training.device.type == "cuda" else "host"
    parts = ", ".join(f"{name} {size(value)}" for name, value in asdict(found).items() if value and name != "tokens")
    text = f"about {size(found.total)} of {size(free)} free on the {where}: {parts}"
    run.screen.block("needs", text, f"predicted for micro-batches of {found.tokens:,} tokens")
    if found.total > free:
        what, remedies = "the model and its batch will probably not fit into memory", _remedies(run, found, free)
        if found.state > free:
            raise MemoryLimitError("memory.train", "the model does not fit into memory", saw=[text], fix=remedies)
        run.screen.remark("warning", f"{what}: {remedies}")
    return found


def _remedies(run: RunJob, found: MemoryEstimate, free: int) -> str:
    """Return the changes that make a run fit, each alone, or else all together."""
    args, training, rows = run.args, run.training, run.training.train_batch_size
    halved = f"--batch {rows // 2} --gradient_accumulation_steps {2 * training.gradient_accumulation_steps}"
    in_4_bits = "--load_in 4bit" if args.lora else "--lora --load_in 4bit"
    can_quantize = not args.load_in and find_spec("bitsandbytes") is not None
    possible: list[tuple[str, bool, dict[str, Any]]] = [
        (halved, rows > 1, {_BATCH: rows // 2}),
        ("--gradient_checkpointing", not training.gradient_checkpointing, {"gradient_checkpointing": True}),
        ("--lora", not args.lora, {"lora": True}),
        (in_4_bits, can_quantize, {"lora": args.lora or True, "load_in": "4bit"}),
    ]
    changes = {text: values for text, is_open, values in possible if is_open}
    needs = {text: each for text, values in changes.items() if (each := estimate(run, values)) is not None}
    savings = [MemorySaving(text, found.total - each.total) for text, each in needs.items() if each.total <= free]
    if savings:
        return list_savings({text: text for text in needs}, savings)
    together = estimate(run, {name: value for text in needs for name, value in changes[text].items()})
    if together is None or together.total > free:
        return "choose a smaller model"
    return " ".join(text for text in needs if text != "--lora" or in_4_bits not in needs)


def estimate(run: RunJob, changes: dict[str, Any] | None = None) -> MemoryEstimate | None:
    """Return what a run of a pretrained text model will need with some settings changed; None for any other run."""
    settings = run.settings
    settings = replace(settings, args=copy.deepcopy(settings.args), training=copy.copy(settings.training))
    for name, value in (changes or {}).items():
        setattr(settings.args if hasattr(settings.args, name) else settings.training, name, value)
    if settings.args.model is None or settings.module is not None:
        return None
    origin = replace(given_origin(run.task, settings), is_run=True, is_empty=True)
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                job = build_job(run.task, run.data, replace(settings, sources={}), origin)
            if getattr(job.model, "main_input_name", "") != "input_ids":
                return None
            with FakeTensorMode():
                _place_fakes(job.model, settings.training.device)
                return _estimated(job, settings)
    except Exception:  # noqa: BLE001 - a model that cannot be run so is built, and its errors reported, right after
        return None


def _estimated(job: Job, settings: Settings) -> MemoryEstimate:
    args, training = job.args, settings.training
    model = job.model.train()
    inner = model.get_base_model() if args.lora else model
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    quantized = _quantized(inner) if args.load_in else set()
    rows = training.train_batch_size
    asked = next((getattr(args, name) for name in LENGTH_FLAGS if getattr(args, name, None)), None)
    tokens = asked or min(longest_allowed(job.processor, inner.config) or _LONGEST, _LONGEST)
    kept = SavedBytes(parameters)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(training.mixed_precision))
    forward = partial(model, **made_up_inputs(inner, rows, tokens), **getattr(job.task, "forward_options", {}))
    with torch.autocast(training.device.type, precision, enabled=precision is not None):
        with kept.counting():
            outputs = forward()
        recomputed = _recomputed_bytes(inner, parameters, forward) if training.gradient_checkpointing else 0
    logits, head = 0, inner.get_output_embeddings()
    if head is not None and outputs[0].dim() == 3:  # a language model
        at_once = tokens_at_a_time(model, rows * tokens, getattr(args, "loss_chunk", "off"), training.device)
        is_in_place = at_once is not None and training.device.type == "cuda"  # by the kernel, in their own type
        size_of_one = outputs[0].element_size() if is_in_place else _LOGIT_COPIES * 4
        logits = size_of_one * min(at_once or rows * tokens, rows * tokens) * int(outputs[0].shape[-1])
    return MemoryEstimate(
        weights=int(sum(_FOUR_BITS * each.numel() if id(each) in quantized else each.nbytes for each in parameters)),
        gradients=sum(each.nbytes for each in trained),
        optimizer=_optimizer_bytes(job, trained),
        activations=kept.num_bytes + recomputed,
        logits=logits,
        tokens=rows * tokens,
    )


def _recomputed_bytes(model: Any, parameters: list[Any], forward: Callable[[], Any]) -> int:
    """Return the activation bytes of the largest checkpointed layer, counted without checkpointing."""
    model.gradient_checkpointing_disable()
    kept, before, found = SavedBytes(parameters), dict[nn.Module, int](), [0]
    for layer in model.modules():
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(layer).__mro__):  # transformers >= 4.53
            layer.register_forward_pre_hook(lambda layer, inputs: before.update({layer: kept.num_bytes}))
            layer.register_forward_hook(lambda layer, *values: found.append(kept.num_bytes - before[layer]))
    with kept.counting():
        forward()
    return max(found)


def _place_fakes(model: Any, device: torch.device) -> None:
    """Give a model on the meta device weights without data that pass for weights on a device."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for name, each in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(each) not in fakes:
                fake = torch.empty(each.shape, dtype=each.dtype, device=device)
                fakes[id(each)] = nn.Parameter(fake, each.requires_grad) if isinstance(each, nn.Parameter) else fake
            setattr(module, name, fakes[id(each)])


def _quantized(model: Any) -> set[int]:
    """Return the ids of the weights that --load_in 4bit quantizes: the frozen linear layers but the output layer."""
    head = model.get_output_embeddings()
    linear = [each for each in model.modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"]
    return {id(each.weight) for each in linear if each is not head and not each.weight.requires_grad}


def _optimizer_bytes(job: Job, trained: list[Any]) -> int:
    """Return the size of the optimizer's state after a first step, which is made without data where that works."""
    count = int(sum(each.numel() for each in trained))
    if "8bit" in job.training.optim:
        return 2 * count
    job.training.optim = job.training.optim.replace("_fused", "")  # a copy of the run's
    for each in trained:
        each.grad = torch.empty_like(each)
    try:
        optimizer = make_optimizer(job)
        optimizer.step()
        return int(sum(tensor.nbytes for tensor in iter_tensors(list(optimizer.state.values()))))
    except (InputError, RuntimeError):
        return 8 * count
