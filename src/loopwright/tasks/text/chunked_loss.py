"""The loss of a language model in training, some tokens at a time: the logits of a whole batch never exist.

What a model does after its output layer, such as soft-capping, would be left out: it is compared with the layer first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from loopwright.engine.alignment import aligned, is_slow
from loopwright.engine.modes import evaluating
from loopwright.engine.seeding import preserved_generators
from loopwright.engine.temporary import replaced

_MOST_LOGITS = 2**26  # of a micro-batch, or of the tokens computed at a time
# Bytes of a GPU's memory for each of the logits computed at a time, which in 16 bits take a 64th of it: more at a time
# are faster, since each time the gradient of all weights is read and written.
_BYTES_OF_GPU = 128
_PROBED = 8  # tokens of the comparison
_reasons: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()  # by model: why its loss cannot be chunked
_warned: WeakSet[Any] = WeakSet()


class LinearCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of a linear layer's outputs, `chunk` tokens at a time; gradients come with the loss."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, ignored: int
    ) -> Tensor:
        """Return the sum over all labels but the ignored ones, in 32 bits; `hidden` is (tokens, features)."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        with torch.autocast(device, enabled=False):
            inputs, matrix = hidden.to(dtype), weight.to(dtype)
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            of_hidden = torch.empty_like(inputs) if needs_hidden else None
            of_weight: Tensor | None = None
            of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
            rows, offsets = len(weight), None if bias is None else bias.to(dtype)
            if is_slow(rows) and hidden.is_cuda and _kernel() is not None:
                matrix, offsets = aligned(matrix, offsets)  # the kernel leaves the gradient of added rows at zero
            for start in range(0, len(labels), chunk):
                part = inputs[start : start + chunk]
                logits = functional.linear(part, matrix, offsets)
                losses, slope = _losses_and_slope(logits, rows, labels[start : start + chunk], ignored)
                total += losses.sum()
                if not any(ctx.needs_input_grad):
                    continue
                if of_bias is not None:
                    of_bias += slope.sum(0, dtype=torch.float32)[:rows]
                slope = slope.to(dtype)
                if of_hidden is not None:
                    of_hidden[start : start + chunk] = slope @ matrix
                if needs_weight:
                    more = (slope.T @ part)[:rows]
                    of_weight = more.float() if of_weight is None else of_weight.add_(more)
        ctx.gradients = [of_hidden, of_weight, of_bias]
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: they are as large as the weights."""
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked loss are gone after one backward pass: --loss_chunk off")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if each is None else each.mul_(outputs[0]) for each in gradients]
        fitted = [None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return (*fitted, None, None, None)


def _losses_and_slope(logits: Tensor, vocabulary: int, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in 32 bits, and the gradient of the logits, perhaps in their place."""
    if logits.is_cuda and (kernel := _kernel()) is not None:
        return kernel(logits[:, :vocabulary], labels, ignored)[0], logits
    is_asked, targets = (labels != ignored)[:, None], labels.clamp(min=0)[:, None]
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    losses = (log_probs.gather(-1, targets).neg_() * is_asked)[:, 0]
    # The softmax, less one where the target is.
    slope = log_probs.exp_().scatter_add_(-1, targets, torch.full_like(log_probs[:, :1], -1.0)).mul_(is_asked)
    return losses, slope


@cache
def _kernel() -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None:
    """Return the fused kernel; None without Triton, or where it cannot compile."""
    try:
        from loopwright.tasks.text.softmax_kernel import losses_and_slope

        losses_and_slope(torch.zeros(1, 8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), -100)
    except Exception as error:  # noqa: BLE001 - a missing package, compiler or driver, each with its own error
        warnings.warn(f"the loss is computed without its kernel: {type(error).__name__}: {error}", stacklevel=2)
        return None
    return losses_and_slope


def token_loss(
    model: Any,  # what is called: `inner`, perhaps wrapped for several processes
    inner: Any,
    inputs: Mapping[str, Any],
    labels: Tensor,  # of each position; they are not shifted here
    *,
    chunk: str,  # --loss_chunk
    ignored: int,
    why_not: str | None = None,
    reduction: str = "sum",
    **options: Any,
) -> Tensor:
    """Return the cross-entropy of a micro-batch; at once if `why_not` or the model itself is a reason.

    With the reduction "none" it is that of each token, and the backward pass computes the logits again.
    """
    tokens, flat = _settled_chunk(inner, labels, chunk, why_not, options), labels.flatten()
    if tokens is None:
        logits = model(**inputs, **options).logits.float().flatten(0, 1)
        found: Tensor = functional.cross_entropy(logits, flat, ignore_index=ignored, reduction=reduction)
    else:
        compute = _summed if reduction == "sum" else _single
        with _replaced_head(_head_of(inner), partial(compute, labels=flat, tokens=tokens, ignored=ignored)):
            found = model(**inputs, **options).logits
    return found if reduction == "sum" else found.view_as(labels)


def _settled_chunk(
    inner: Any, labels: Tensor, chunk: str, why_not: str | None, options: Mapping[str, Any]
) -> int | None:
    tokens = tokens_at_a_time(inner, labels.numel(), chunk, labels.device)
    if tokens is None or (reason := why_not or _why_not(inner, options)) is None:
        return tokens
    if inner not in _warned:
        _warned.add(inner)
        warnings.warn(f"the loss is computed at once, not in chunks: {reason}", stacklevel=2)
    return None


def tokens_at_a_time(model: Any, num_tokens: int, chunk: str, device: torch.device) -> int | None:
    """Return how many tokens' logits exist at a time, by `--loss_chunk`; None for all of them."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if chunk == "off" or (chunk == "auto" and num_tokens * vocabulary <= _MOST_LOGITS):
        return None
    most = _MOST_LOGITS
    if device.type == "cuda":
        most = torch.cuda.get_device_properties(device).total_memory // _BYTES_OF_GPU
    return max(1, most // vocabulary) if chunk == "auto" else int(chunk)


@contextmanager
def _replaced_head(head: Any, compute: Callable[..., Tensor]) -> Iterator[None]:
    """Let an output layer return losses instead of logits, inside of the model's own forward pass."""
    forward = lambda hidden: compute(hidden.flatten(0, -2), head.weight, head.bias)  # noqa: E731
    with replaced(vars(head), {"forward": forward}):
        yield


def _summed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, labels: Tensor, tokens: int, ignored: int
) -> Tensor:
    compute: Any = LinearCrossEntropy.apply
    found: Tensor = compute(hidden, weight, bias, labels, tokens, ignored)
    return found


def _single(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, labels: Tensor, tokens: int, ignored: int
) -> Tensor:
    def losses(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, weight, bias).float()
        return functional.cross_entropy(logits, labels, ignore_index=ignored, reduction="none")

    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    pieces = zip(hidden.split(tokens), labels.split(tokens), strict=True)
    return torch.cat([checkpoint(losses, *piece, **options) for piece in pieces])


def _why_not(model: Any, options: Mapping[str, Any]) -> str | None:
    """Return why the loss of a model is not that of its output layer; found out once, with a few tokens."""
    if model not in _reasons:
        head, reason = _head_of(model), None
        if type(head) is not nn.Linear:
            reason = f"the output layer is a {type(head).__name__}"
        elif not _is_linear(model, head, options):
            reason = "the model changes its logits after the layer"
        _reasons[model] = reason
    return _reasons[model]


def _head_of(model: Any) -> Any:
    head = model.get_output_embeddings()
    # peft wraps a layer that is trained fully.
    return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head


@torch.no_grad()
def _is_linear(model: Any, head: Any, options: Mapping[str, Any]) -> bool:
    rows = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(_PROBED, device=head.weight.device) * 7919 % rows)[None]
    with (
        evaluating(model),
        preserved_generators(head.weight.device),
        torch.autocast(head.weight.device.type, enabled=False),
        torch.compiler.set_stance("force_eager"),  # layers would be compiled for these few tokens
    ):
        logits = model(input_ids=ids, **options).logits.float()
        whole = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
        with _replaced_head(head, partial(_summed, labels=ids.flatten(), tokens=_PROBED, ignored=-100)):
            alone = model(input_ids=ids, **options).logits
    return alone.dim() == 0 and torch.allclose(whole, alone.float(), rtol=1e-3)
