"""Sharded models: weights, gradients and optimizer state split over the processes (FSDP2), through accelerate.

Each process holds a part of every weight (a DTensor, split along its first dimension). A layer's weights are gathered
when it runs, and freed afterwards. torch's modules for this are imported lazily: they take as long as the rest of the
package.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopwright.engine.buffers import put
from loopwright.engine.temporary import replaced
from loopwright.errors import ConfigError

_ORIGIN = "_loopwright_sharding"  # in a sharded model's __dict__
_USE_FSDP = "ACCELERATE_USE_FSDP"
_WORDS = ("full_shard", "shard_grad_op", "auto_wrap")
_REFUSED = {
    "offload": "keeping weights in host memory is not supported",
    "hybrid_shard": "shards within a machine and copies between machines are not supported",
    "hybrid_shard_zero2": "shards within a machine and copies between machines are not supported",
    "no_shard": "leave the argument out instead",
}
# Entries of hf's fsdp_config that change nothing in FSDP2.
_WITHOUT_EFFECT = frozenset(
    ("version", "fsdp_version", "use_orig_params", "sync_module_states", "state_dict_type", "auto_wrap_policy")
    + ("backward_prefetch", "limit_all_gathers", "cpu_ram_efficient_loading")
)
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """How a model is split; `train(sharding=...)` takes it, or "full_shard" for the defaults.

    Args:
        layers: class names of the modules that are gathered one at a time. The default is transformers' own list for
            its models, and every module of at least `min_num_params` parameters for others.
        min_num_params: see `layers`.
        reshard_after_forward: free a layer's weights after its forward pass and gather them again for backward. False
            uses more memory and less traffic.
    """

    layers: tuple[str, ...] = ()
    min_num_params: int = 1_000_000
    reshard_after_forward: bool = True

    @classmethod
    def parse(cls, value: Any, config: Any = None) -> Sharding | None:
        """Parse an argument in hf's format: True, "full_shard auto_wrap", or a list of such words.

        None, False and an empty one mean replicas instead of shards. `config` is hf's `fsdp_config`, a mapping.
        """
        if isinstance(value, cls) or value is None or value is False:
            return value or None
        words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else list(value)
        for word in words:
            if word not in _WORDS:
                reason = _REFUSED.get(word, f"the words are {', '.join(_WORDS)}")
                raise ConfigError(f"sharding {value!r}: {word!r} cannot be used: {reason}")
        if not words:
            return None
        if not {"full_shard", "shard_grad_op"} & set(words):
            raise ConfigError(f'sharding {value!r} is incomplete: pass "full_shard" or "shard_grad_op"')
        options = _options({name.removeprefix("fsdp_"): entry for name, entry in (config or {}).items()})
        return cls(**{"reshard_after_forward": "full_shard" in words, **options})


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    if int(config.get("version", 2)) != 2:
        raise ConfigError(f"fsdp_config: version {config['version']} is not supported, only 2")
    if config.get("activation_checkpointing"):
        raise ConfigError(
            "fsdp_config: activation_checkpointing forgets the dropout masks that it computes again. Let the model do "
            "it: gradient_checkpointing=True, or torch.utils.checkpoint in its forward."
        )
    chosen: dict[str, Any] = {}
    for name, value in config.items():
        if name == "reshard_after_forward":
            chosen[name] = str(value).lower() in ("true", "full_shard")
        elif name == "transformer_layer_cls_to_wrap" and value:
            chosen["layers"] = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
        elif name == "min_num_params" and value:
            chosen[name] = int(value)
        elif name not in _WITHOUT_EFFECT and value:
            raise ConfigError(f"fsdp_config: {name}={value!r} is not supported")
    return chosen


def create_sharding(make: Callable[..., Any], sharding: Any) -> Any:
    """Create an Accelerator by `make`; it shards if the argument of `train` or `accelerate launch` asks for it."""
    asked = Sharding.parse(sharding)
    is_launched = os.environ.get(_USE_FSDP, "false")
    if asked is None and is_launched.lower() != "true":
        return make()
    plugin = _plugin(asked)
    # accelerate changes it, which would affect the next trainer of this process.
    with replaced(os.environ, {_USE_FSDP: is_launched}):
        accelerator = make(fsdp_plugin=plugin)
    from accelerate import DistributedType

    if accelerator.distributed_type is DistributedType.MULTI_CPU:  # elsewhere accelerate shards by itself
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if accelerator.num_processes > 1 and accelerator.distributed_type is DistributedType.FSDP:
        plugin.loopwright_sharding = asked
        dtype = _PRECISIONS.get(str(accelerator.mixed_precision))
        if dtype is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            # accelerate would also reduce gradients in the low precision.
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return accelerator


def _plugin(asked: Sharding | None) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    if asked is not None:
        return FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=asked.reshard_after_forward, auto_wrap_policy="no_wrap"
        )
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise ConfigError("accelerate is configured for FSDP 1: set fsdp_version to 2 (FSDP_VERSION=2)")
    if str(os.environ.get("FSDP_OFFLOAD_PARAMS", "false")).lower() == "true":
        raise ConfigError("accelerate's FSDP_OFFLOAD_PARAMS keeps weights in host memory, which is not supported")
    if plugin.activation_checkpointing:
        raise ConfigError(
            "accelerate's FSDP activation checkpointing forgets the dropout masks that it computes again. Switch it "
            "off (FSDP_ACTIVATION_CHECKPOINTING=false) and let the model do it."
        )
    return plugin


@dataclass(frozen=True)
class _Origin:
    skeleton: nn.Module | str  # a copy of the original with weights on the meta device; or why there is none
    units: tuple[str, ...]  # names of the modules that are gathered one at a time, inner ones first
    options: dict[str, Any]  # of torch's `fully_shard`

    def copied(self, memory: dict[int, Any] | None = None) -> nn.Module:
        if isinstance(self.skeleton, str):
            raise ConfigError(f"this sharded model cannot be copied: {self.skeleton}")
        return copy.deepcopy(self.skeleton, memory)

    def split(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        for name in self.units:
            fully_shard(model.get_submodule(name), **self.options)
        # torch itself decides when to reshard the root: it is needed again at once.
        fully_shard(model, **{**self.options, "reshard_after_forward": None})
        if self.options["mp_policy"].param_dtype is not None:
            from accelerate.utils import convert_to_fp32

            # For the loss function, as accelerate does for models that are not sharded.
            model.register_forward_hook(lambda module, inputs, outputs: convert_to_fp32(outputs))
        _inner(model).__dict__[_ORIGIN] = self


def _inner(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper


def _origin_of(model: nn.Module) -> _Origin | None:
    return _inner(model).__dict__.get(_ORIGIN)


def is_sharded(model: Any) -> bool:
    return isinstance(model, nn.Module) and _origin_of(model) is not None


def shard(accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Split a model and its optimizer over the processes, in place, with rank 0's weights; it stays split."""
    if not is_sharded(model):
        inner, plugin = _inner(model), accelerator.state.fsdp_plugin
        places = _take_out(inner, optimizer)
        for tensor in (*inner.parameters(), *inner.buffers()):
            # Rank 0's values, as DDP does: models may have been initialised with different seeds.
            sent = tensor.detach().to(accelerator.device).contiguous()
            dist.broadcast(sent, 0)
            with torch.no_grad():
                tensor.copy_(sent)
        if accelerator.mixed_precision != "no":
            for parameter in inner.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()  # for the optimizer; layers compute with rounded copies
        _Origin(_skeleton(inner), _units(plugin, inner), _split_options(plugin, accelerator.device)).split(inner)
        inner.to(accelerator.device)  # buffers, which stay whole
        _put_back(inner, places)
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = accelerator.prepare_optimizer(optimizer)
    return model, optimizer


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model, split the same way if sharded; raise a ConfigError if it cannot be copied."""
    origin = _origin_of(model)
    if origin is None:
        return copy.deepcopy(model)
    reshard(model)
    twin = origin.copied()
    origin.split(twin)
    twin.to_empty(device=next(model.parameters()).device)
    twin.load_state_dict(_inner(model).state_dict())
    _copy_buffers(model, twin)
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    return twin.train(model.training)


def whole_model(model: nn.Module) -> nn.Module:
    """Return a sharded model as an ordinary one on rank 0's host, else the model itself; every process must call it."""
    origin = _origin_of(model)
    if origin is None:
        return model
    reshard(model)
    is_first = dist.get_rank() == 0
    empties = origin.skeleton.parameters() if isinstance(origin.skeleton, nn.Module) else model.parameters()
    memory: dict[int, Any] = {}
    for empty, parameter in zip(empties, model.parameters(), strict=True):
        value = whole(parameter.detach())
        if is_first:
            memory[id(empty)] = nn.Parameter(value.cpu(), parameter.requires_grad)
    if not is_first:
        return model
    twin = origin.copied(memory)
    _copy_buffers(model, twin)
    return twin.train(model.training)


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for own, other in zip(target.buffers(), source.buffers(), strict=True):
            own.copy_(other)


def _split_options(plugin: Any, device: torch.device) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)),
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
    }


def _units(plugin: Any, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that are gathered one at a time, inner ones before outer ones."""
    is_unit = _chosen(plugin, model)
    names = {id(module): name for name, module in model.named_modules()}
    inner = [
        (name, each) for name, each in model.named_modules() if not isinstance(each, nn.ModuleList | nn.ModuleDict)
    ]
    units = [name for name, module in reversed(inner) if name and is_unit(module)]
    # The embeddings of a language model are large, and needed only at its two ends; tied ones count as one.
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    if ends[0] is not None and getattr(ends[0], "weight", None) is not getattr(ends[1], "weight", None):
        for end in ends:
            name = names.get(id(end), "")
            if name and not any(f"{name}.".startswith(f"{unit}.") for unit in units):
                units.insert(0, name)
    return tuple(units)


def _chosen(plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a predicate for the modules gathered one at a time, from the argument or accelerate's configuration."""
    asked: Sharding | None = getattr(plugin, "loopwright_sharding", None)
    if asked is None:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

        plugin.set_auto_wrap_policy(model)
        return fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda module: False)
    present = {type(module).__name__ for module in model.modules()}
    missing = sorted(set(asked.layers) - present)
    if missing:
        raise ConfigError(f"sharding: the model has no modules of class {missing}; it has {sorted(present)}")
    # transformers' models list their blocks there, for accelerate's device maps.
    layers = asked.layers or [name for name in getattr(model, "_no_split_modules", None) or () if name in present]
    if layers:
        return lambda module: type(module).__name__ in layers
    return lambda module: sum(parameter.numel() for parameter in module.parameters()) >= asked.min_num_params


def _skeleton(model: nn.Module) -> nn.Module | str:
    memory: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad) for each in model.parameters()
    }
    try:
        return copy.deepcopy(model, memory)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _take_out(model: nn.Module, optimizer: Any) -> list[tuple[Any, list[Any], int, str, dict[str, Any]]]:
    """Remove a model's parameters from the optimizer, so that nothing keeps the whole ones in memory.

    Return for each parameter the optimizer, its list, its index there, its name, and its state.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = []
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in names:
                kept = optimizer.state.pop(parameter, {})
                places.append((optimizer, group["params"], index, names[id(parameter)], kept))
                group["params"][index] = torch.empty(0)
    return places


def _put_back(model: nn.Module, places: list[tuple[Any, list[Any], int, str, dict[str, Any]]]) -> None:
    parameters = dict(model.named_parameters())
    for optimizer, group, index, name, kept in places:
        parameter = parameters[name]
        group[index] = parameter
        if kept:
            optimizer.state[parameter] = {key: split_like(value, parameter) for key, value in kept.items()}


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor: all of it, if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every process must call it for a sharded one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own_offsets(tensor: Any) -> tuple[int, ...]:
    """Return where the local part of a tensor begins in it, by dimension."""
    offsets: tuple[int, ...] = (0,) * tensor.dim()
    if hasattr(tensor, "to_local"):
        # torch has no public function for it.
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets


def split_like(value: Any, sharded: Tensor) -> Any:
    """Return a whole tensor split like a sharded one of the same shape; anything else unchanged."""
    is_whole = isinstance(value, Tensor) and not hasattr(value, "to_local")
    if not is_whole or not hasattr(sharded, "to_local") or value.shape != sharded.shape:
        return value
    from torch.distributed.tensor import DTensor

    # distribute_tensor would communicate, and every process has the whole tensor already.
    mesh, placements = sharded.device_mesh, sharded.placements  # type: ignore[attr-defined]
    sides = zip(own_offsets(sharded), local(sharded).shape, strict=True)
    part = value[tuple(slice(first, first + size) for first, size in sides)]
    part = part.detach().to(sharded.device).contiguous()
    return DTensor.from_local(part.clone(), mesh, placements, shape=value.shape, stride=value.stride(), run_check=False)


def whole_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state with its non-persistent buffers, for `load_weights`."""
    return {**dict(module.named_buffers()), **module.state_dict()}


def buffer_shapes(module: Any) -> dict[str, list[int] | None]:
    """Return the shapes of all buffers by name; None for those that are None so far."""
    return {
        f"{path}.{name}" if path else name: None if each is None or is_lazy(each) else list(each.shape)
        for path, part in (module.named_modules() if isinstance(module, nn.Module) else ())
        for name, each in part._buffers.items()  # the public iterator leaves out those that are None
    }


def load_weights(module: nn.Module, weights: Mapping[str, Any], strict: bool = True, fixed: Iterable[str] = ()) -> None:
    """Load weights that may be whole where the module's own are split, or the reverse; also non-persistent buffers.

    Buffers take the saved shapes, unless they are `fixed`; the module's own loading code comes first.
    """
    own, parts, shapes = module.state_dict(), dict(module.named_modules()), buffer_shapes(module)
    buffers = weights.keys() & shapes.keys()
    fitting = [name for name in buffers & own.keys() if is_lazy(own[name]) or own[name].shape == weights[name].shape]
    if changed := buffers.difference(fitting, fixed):
        with suppress(RuntimeError):
            module.load_state_dict(dict(weights), strict=strict)
    for name in changed:
        path, _, last = name.rpartition(".")
        now, new = parts[path]._buffers[last], weights[name]  # not public while it is None
        device = getattr(now, "device", None) or next((each.device for each in module.parameters()), None)
        parts[path]._buffers[last] = put(now, new.detach().clone().to(device))
    own = module.state_dict()
    weights = {name: value for name, value in weights.items() if name in own or name not in shapes}
    split = {name: split_like(value, own[name]) if name in own else value for name, value in weights.items()}
    module.load_state_dict(split, strict=strict)


def mesh_of(model: Any) -> Any:
    """Return the torch DeviceMesh that a model is split over; None if it is not split."""
    parameters = model.parameters() if is_sharded(model) else ()
    return next((parameter.device_mesh for parameter in parameters if hasattr(parameter, "device_mesh")), None)


def reshard(model: Any) -> None:
    """Free weights that a forward pass without a backward pass has left gathered."""
    if is_sharded(model):
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def clip_norm(parameters: Iterable[nn.Parameter], norm: float) -> Tensor:
    """Clip the norm of all gradients together, split and whole ones; return the norm before clipping."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    kinds = [[each for each in gradients if hasattr(each, "to_local") is is_split] for is_split in (True, False)]
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in kinds if kind]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(norm / (total + 1e-6), max=1.0)
    torch._foreach_mul_([local(each) for each in gradients], scale)  # one kernel for all tensors
    return total
