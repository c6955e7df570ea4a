"""Old argument names of transformers: still accepted, with a warning that gives the new name.

An `OldName` is an attribute of the class that reads and sets the new field. `AcceptsOldNames` makes it an argument of
the constructor, also of derived dataclasses.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

from loopwright.config.choices import shown
from loopwright.errors import ConfigError, ConfigTypeError, nearest


class OldNameWarning(UserWarning):
    """The warning about an argument's old name."""


class OldName:
    """An argument that has another name today.

    Args:
        new: the field that replaced it; None if it is obsolete.
        forward: converts an old value to a new one; a result of None sets nothing.
        backward: converts a new value to an old one.
        does_new_win: whether the new name wins if both are given; otherwise different values raise.
        refusal: why every value but the harmless one is refused.
    """

    def __init__(
        self,
        new: str | None,
        hint: Any,
        forward: Callable[[Any], Any] = lambda value: value,
        backward: Callable[[Any], Any] = lambda value: value,
        *,
        does_new_win: bool = False,
        note: str = "",
        refusal: str = "",
    ) -> None:
        self.new = new
        self.hint = hint
        self.name = ""
        self._forward = forward
        self._backward = backward
        self._does_new_win = does_new_win
        self._note = note
        self._refusal = refusal

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            # A dataclass with a field of this name must not take this object as its default.
            raise AttributeError(self.name)
        return self._backward(getattr(instance, self.new) if self.new else None)

    def __set__(self, instance: Any, value: Any) -> None:
        for name, translated in self.translate(value, {}, stacklevel=3).items():
            setattr(instance, name, translated)

    def translate(self, value: Any, given: Mapping[str, Any], stacklevel: int) -> dict[str, Any]:
        """Return the new field and its value, or nothing if the old value has no effect; warn `stacklevel` calls up."""
        if value is None:
            return {}
        translated = self._forward(value)
        if self._refusal and translated is not None:
            raise ConfigError(f"{self.name}={shown(self.name, value)} is not supported: {self._refusal}")
        now = f"{self.new} is its name now" if self.new else "it is not needed any more"
        notice = f"{self.name} is an old name: {now}"
        result: dict[str, Any] = {}
        if self.new and translated is not None:
            if str(given.get(self.new)).endswith("/"):  # an owner: the name of a repository follows
                given, translated = {}, f"{given[self.new]}{translated}"
            notice = f"{self.name} is an old name: write {self.new}={shown(self.new, translated)}"
            if given.get(self.new) and given[self.new] != translated:
                if not self._does_new_win:
                    current = getattr(given[self.new], "value", given[self.new])
                    raise ConfigError(
                        f"{self.name}={shown(self.name, value)} and {self.new}={shown(self.new, current)} contradict "
                        f"each other, and the first is the old name of the second: give only {self.new}"
                    )
                current = shown(self.new, given[self.new])
                notice = f"{self.name} is an old name, and is not used since {self.new}={current} is given"
            else:
                result = {self.new: translated}
        warnings.warn(notice + (f" ({self._note})" if self._note else ""), OldNameWarning, stacklevel=stacklevel)
        return result


class AcceptsOldNames(type):
    """Makes the `OldName`s of a class arguments of its constructor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance from current and old argument names."""
        parameters = cls.__signature__.parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        translated = cls.translate_old_names(kwargs, stacklevel=4)
        unknown = [name for name in translated if name not in parameters]
        if unknown and not takes_any:
            known = [*parameters, *cls.old_names()]
            what = f"{cls.__name__} has no argument {unknown[0]!r}"
            raise ConfigTypeError(what, flag=unknown[0], nearest=nearest(unknown[0], known))
        return super().__call__(*args, **translated)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature for `help` and editors: the constructor's, rather than `__call__`'s."""
        signature = inspect.signature(cast("Any", cls).__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def old_names(cls) -> dict[str, OldName]:
        """Return the old names of this class that none of its fields reuses."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found |= vars(base)
        return {name: value for name, value in found.items() if isinstance(value, OldName)}

    def translate_old_names(cls, arguments: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
        """Return the arguments with current names only, warning about the others."""
        old_names = cls.old_names()
        result = {name: value for name, value in arguments.items() if name not in old_names}
        for name, old in old_names.items():
            if name in arguments:
                result |= old.translate(arguments[name], result, stacklevel)
        return result


def _ratio(value: float) -> float | None:
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"warmup_ratio must be at least 0 and below 1, got {value!r}", flag="warmup_ratio")
    return value or None


def _gone(hint: Any, usual: Any, refusal: str) -> OldName:
    """Return the old name of a removed argument, which accepts only its former default."""
    return OldName(
        None,
        hint,
        forward=lambda value: None if value in (usual, None) else value,
        backward=lambda _: usual,
        refusal=refusal,
    )


class TrainingOldNames(metaclass=AcceptsOldNames):
    """The old names of `TrainingArguments`, including those that transformers 5 removed."""

    evaluation_strategy = OldName("eval_strategy", str)
    warmup_ratio = OldName(
        "warmup_steps",
        float,
        forward=_ratio,
        backward=lambda steps: steps if steps < 1 else 0.0,
        does_new_win=True,
        note="below 1 it is a fraction of all updates",
    )
    no_cuda = OldName("use_cpu", bool)
    group_by_length = OldName(
        "train_sampling_strategy",
        bool,
        forward=lambda is_on: "group_by_length" if is_on else None,
        backward=lambda strategy: strategy == "group_by_length",
    )
    per_gpu_train_batch_size = OldName("per_device_train_batch_size", int)
    per_gpu_eval_batch_size = OldName("per_device_eval_batch_size", int)
    adafactor = OldName(
        "optim", bool, forward=lambda is_on: "adafactor" if is_on else None, backward=lambda optim: optim == "adafactor"
    )
    include_inputs_for_metrics = OldName(
        "include_for_metrics",
        bool,
        forward=lambda is_on: ["inputs"] if is_on else None,
        backward=lambda names: "inputs" in names,
    )
    use_mps_device = OldName(
        None, bool, backward=lambda _: False, note="a device that is there is used unless use_cpu=True"
    )
    save_safetensors = OldName(
        None,
        bool,
        forward=lambda is_on: None if is_on else False,
        backward=lambda _: True,
        refusal="weights are always written as safetensors",
    )
    half_precision_backend = OldName(None, str, lambda _: None, lambda _: "auto", note="autocast is torch's own")
    fp16_backend = OldName(None, str, lambda _: None, lambda _: "auto", note="autocast is torch's own")
    fp16_opt_level = OldName(None, str, lambda _: None, lambda _: "O1", note="it was for apex")
    ray_scope = OldName(None, str, lambda _: None, lambda _: "last", note="it was for hyperparameter_search")
    torchdynamo = OldName("torch_compile_backend", str)
    jit_mode_eval = _gone(bool, False, "torch_compile=True compiles the model, also for evaluations")
    use_ipex = _gone(bool, False, "optimize the model with the extension before it is given to the Trainer")
    use_legacy_prediction_loop = _gone(bool, False, "there is one evaluation loop; override evaluation_loop")
    include_tokens_per_second = OldName(
        "include_num_input_tokens_seen", bool, lambda is_on: "all" if is_on else None, lambda how: how != "no"
    )
    past_index = _gone(int, -1, "keep what a batch hands on to the next in an overridden compute_loss")
    mp_parameters = _gone(str, "", "SageMaker's model parallelism is not built in")
    tpu_num_cores = _gone(int, None, "TPUs are not supported")
    tpu_metrics_debug = _gone(bool, False, "TPUs are not supported")
    split_batches = _gone(bool, False, 'write accelerator_config={"split_batches": True}')
    dispatch_batches = _gone(bool, False, "each process reads its own share of the data")
    fsdp_min_num_params = _gone(int, 0, 'write fsdp_config={"min_num_params": ...}')
    fsdp_transformer_layer_cls_to_wrap = _gone(str, None, 'write fsdp_config={"transformer_layer_cls_to_wrap": [...]}')
    push_to_hub_token = OldName("hub_token", str, does_new_win=True)
    push_to_hub_organization = OldName("hub_model_id", str, lambda owner: f"{owner}/", does_new_win=True)
    push_to_hub_model_id = OldName("hub_model_id", str, does_new_win=True)
