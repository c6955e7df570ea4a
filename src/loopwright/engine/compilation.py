"""Models compiled by torch.compile in parts: each repeated layer, the modules next to the layers, and the loss.

The output layer of a language model is compiled too if its kernels are slow for the size of the vocabulary.

Layers of one class are compiled once, however many there are, so a large model takes no longer to compile than a small
one. Modules with embeddings are left out: the compiled gradient of an embedding is a sum in no fixed order. A model
without repeated layers is compiled as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from loopwright.engine.alignment import aligned, is_slow
from loopwright.engine.host_state import HOOKS
from loopwright.engine.layers import layer_stacks
from loopwright.engine.temporary import replaced


class CompiledModel:
    """The compiled parts of a model; `active` makes calls take them.

    Args:
        model: without its distributed wrapper.
        options: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._options = options
        self._calls: list[tuple[Any, str, Callable[..., Any]]] = []
        parts = compiled_parts(model)
        self._parts: list[tuple[Any, str, Any]] = [(part, "forward", part.forward) for part in parts]
        # A model of transformers computes the loss of each token, with a function that may have been replaced.
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None and hasattr(type(model), "loss_function") and "_loss_function" not in vars(model):
            self._parts.append((model, "_loss_function", model.loss_function))
        known = {id(each) for part in parts for each in part.modules()}
        is_alone = head is not None and "forward" not in vars(head) and id(head) not in known
        if is_alone and type(head) is nn.Linear and is_slow(head.out_features):
            self._parts.append((head, "forward", MethodType(_aligned_linear, head)))
        self._hooks: list[Any] = []
        self._known: list[Any] = []

    @property
    def records_graphs(self) -> bool:
        """Whether this mode of torch.compile records CUDA graphs of its own."""
        return self._options.get("mode") in ("reduce-overhead", "max-autotune")

    def __len__(self) -> int:
        return len(self._parts)

    def compile(self, *, is_dynamic: bool) -> None:
        """Compile for all sizes, or for the first ones that come; nothing happens before the first call."""
        functions = {_function_of(call) for _, _, call in self._parts}
        compiled = {each: torch.compile(each, dynamic=is_dynamic, **self._options) for each in functions}
        self._calls = []
        for owner, name, call in self._parts:
            function = compiled[_function_of(call)]
            function = partial(function, call.__self__) if isinstance(call, MethodType) else function
            self._calls.append((owner, name, _without_empty_caches(function, call)))

    def note_hooks(self) -> None:
        """Note which hooks are compiled: dynamo does not look whether there are others."""
        whole = [owner for owner, name, _ in self._parts if name == "forward"]
        inner = [each for part in whole for each in part.modules() if each is not part]
        self._hooks = [getattr(each, name) for each in inner for name in HOOKS]
        self._known = self._noted()

    def why_stale(self) -> str | None:
        """Return why the compiled parts are not the model any more, or None."""
        return None if self._noted() == self._known else "hooks or methods of compiled parts were replaced"

    def _noted(self) -> list[Any]:
        return [*map(len, self._hooks), *(vars(owner).get(name) for owner, name, _ in self._parts)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run a block in which calls of the model take its compiled parts."""
        # For all sizes, floats would be inputs too, and half of the compilation would run before they are constants.
        # torch.compile has no public option for it.
        with ExitStack() as stack, torch._dynamo.config.patch(specialize_float=True):
            for owner, name, call in self._calls:
                stack.enter_context(replaced(vars(owner), {name: call}))
            yield


def _aligned_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return the logits of an output layer, as a view of a larger matrix. Compiled, only the weight is copied."""
    return functional.linear(hidden, *aligned(head.weight, head.bias))[..., : head.out_features]


def _without_empty_caches(compiled: Any, call: Any) -> Any:
    """Return a call that hands on no empty cache of past keys: each layer would be compiled for its place in it."""
    signature = inspect.signature(call)
    if "past_key_values" not in signature.parameters:
        return compiled

    def without(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        cache = given.arguments.get("past_key_values")
        if cache is not None and not cache.get_seq_length():
            given.arguments["past_key_values"] = None
        return compiled(*given.args, **given.kwargs)

    return without


def _function_of(call: Any) -> Any:
    return call.__func__ if isinstance(call, MethodType) else call


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model and the modules beside them, or the model itself if it has no repeated layers."""
    layers = {id(layer) for stack in layer_stacks(model) for layer in stack}
    return list(_parts(model, layers)) if layers else [model]


def _parts(module: nn.Module, layers: set[int]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if id(child) in layers:
            yield child
        elif name == "pooler":  # of one token per row: compiling takes seconds, and saves microseconds
            continue
        elif any(id(each) in layers for each in child.modules()):
            yield from _parts(child, layers)
        elif _is_worth_compiling(child):
            yield child


def has_compiled_modules(model: Any) -> bool:
    """Whether a module was compiled by `nn.Module.compile` or `torch.compile`."""
    # There is no public sign of it.
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in model.modules())


def _is_worth_compiling(module: nn.Module) -> bool:
    # A module of torch's own is one kernel or a few, which compiling it alone does not change.
    is_own = not type(module).__module__.startswith("torch.") and any(True for _ in module.parameters())
    return is_own and not any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) for each in module.modules())
