"""Image models for the tasks: this library's small ones, transformers models, and any PyTorch module.

`load_vision_model` gives all three the same interface: called with `pixel_values` and `labels` they return an object
with `loss` and `logits`, they have `save_pretrained`, and a processor defines the format of their images.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from loopwright import models
from loopwright.data.images import Resize, Transform, classification_eval
from loopwright.errors import ConfigError, InputError
from loopwright.models.base import CONFIG_FILE, NAME_KEY, WEIGHTS_FILE, ModelOutput, SmallModel
from loopwright.run_folder import read_json, write_atomically, write_json
from loopwright.run_folder.files import give_usual_mode
from loopwright.sources import DataPlan
from loopwright.sources.files import open_data
from loopwright.tasks import pretrained
from loopwright.tasks.adapters import backbone_parameters
from loopwright.tasks.base import Origin
from loopwright.tasks.optional_imports import import_object, is_object_name
from loopwright.tasks.text.models import Loaded, label_config, load_model, quiet
from loopwright.tasks.vision.base import HANDED_OVER, choose_workers, handed_over, image_side

MODULE_KEY = "loopwright_module"
_FORM_KEY = "loopwright_image_form"
_PROCESSOR_FILE = "preprocessor_config.json"
_MOST_SIDE = 128  # of images for a small model, unless more is requested
_USUAL_SIDE = 224
_LEAST_WHOLE_SIDE = 384  # ConvNeXt's processor squeezes larger images instead of cropping them

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ImageForm:
    """The format of a model's images; saved beside a model without a transformers processor."""

    height: int
    width: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # subtracted from pixels between 0 and 1
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    crop_share: float | None = 1.0  # of the shorter side, kept by the centre crop; None squeezes the whole image

    def eval_transform(self) -> Transform:
        size = (self.height, self.width)
        return Resize(exact=size) if self.crop_share is None else classification_eval(size, self.crop_share)

    def with_side(self, side: int | None) -> ImageForm:
        return self if side is None else replace(self, height=side, width=side)

    def save_pretrained(self, folder: str | Path) -> None:
        write_json(Path(folder) / _PROCESSOR_FILE, {_FORM_KEY: asdict(self)})

    @classmethod
    def load(cls, folder: str | Path) -> ImageForm:
        found = read_json(Path(folder) / _PROCESSOR_FILE, {}).get(_FORM_KEY)
        if found is None:
            what = f"{folder} has no {_PROCESSOR_FILE} written by loopwright, so the format of its images is unknown"
            raise InputError("model.folder", what, fix="leave out --model")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return cls(**values)


def form_of(processor: Any) -> ImageForm:
    if isinstance(processor, ImageForm):
        return processor
    size = {name: int(side) for name, side in dict(processor.size).items() if side}
    crop = dict(getattr(processor, "crop_size", None) or {}) if getattr(processor, "do_center_crop", False) else {}
    height, width = size.get("height"), size.get("width")
    share: float | None = None
    if crop:
        height, width = int(crop["height"]), int(crop["width"])
        share = min(1.0, min(height, width) / size["shortest_edge"]) if "shortest_edge" in size else None
    elif height is None or width is None:
        height = width = size.get("shortest_edge") or size.get("longest_edge") or _USUAL_SIDE
        share = getattr(processor, "crop_pct", 1.0) if height < _LEAST_WHOLE_SIDE else None
    mean, std = (tuple(map(float, getattr(processor, name))) for name in ("image_mean", "image_std"))
    if not getattr(processor, "do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return ImageForm(height, width, mean, std, share)  # type: ignore[arg-type]


def load_processor(path: str, config: Any, side: int | None = None) -> Any:
    """Return the image processor of a transformers model, on Pillow; a default one for its kind if it has none."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor

    with quiet():
        try:
            # Some versions of transformers have stand-ins for them at their top level if there is no torchvision.
            processor = pretrained.open_pretrained(AutoImageProcessor, path, _PROCESSOR_FILE, backend="pil")
        except InputError:
            if (Path(path) / _PROCESSOR_FILE).is_file():
                raise
            is_known = type(config) in IMAGE_PROCESSOR_MAPPING
            kind = IMAGE_PROCESSOR_MAPPING[type(config)]["pil"] if is_known else transformers.ViTImageProcessorPil
            processor, own = kind(), getattr(config, "image_size", None)
            side = side or (own if isinstance(own, int) else None)
    if side is None:
        return processor
    values = processor.to_dict()
    share = form_of(processor).crop_share or 1.0
    shorter = round(side / share) if values.get("crop_size") else side
    sides = {"shortest_edge": shorter}
    for name in ("size", "crop_size"):
        if values.get(name):
            values[name] = {key: sides.get(key, side) for key, value in dict(values[name]).items() if value}
    return type(processor).from_dict(values)


def load_vision_model(
    origin: Origin,
    args: Any,
    training: Any,
    plan: DataPlan,
    *,
    auto_class: str,
    small: str,  # the name of the model in `loopwright.models` to build if none is given
    small_config: Callable[[int], Mapping[str, Any]] = lambda side: {},  # its arguments, by the side of the images
    labels: Sequence[str] | None = None,  # the names of the classes; None for a task without
    criterion: Criterion | None = None,  # the loss of a module that has none: from logits and labels to a mean
    **changes: Any,  # of the config of a transformers model, besides the labels
) -> Loaded:
    """Return the model of an origin; called once, by a task's `build`.

    It writes `image_size`, `workers` and `channels_last` into the settings, if unset.
    """
    path = origin.path
    if origin.module is not None or (path is not None and (is_object_name(path) or _holds(path, MODULE_KEY))):
        found = _load_module(origin, args, plan, labels, criterion)
    elif path is None:
        side = args.image_size or min(_MOST_SIDE, image_side(plan))
        made = models.create(small, labels, **small_config(side))
        side = made.config.get("image_size", side)
        found = Loaded(made, processor=ImageForm(side, side))
    elif _holds(path, NAME_KEY):
        with pretrained.opening(path, CONFIG_FILE):
            found = _load_small(path, origin.is_run, args.image_size, small, labels)
    else:
        if labels is not None:
            changes = {**label_config(labels), **changes}
        found = load_model(origin, auto_class, **changes)
        with pretrained.opening(path, _PROCESSOR_FILE):
            found.processor = load_processor(path, found.model.config, args.image_size)
            form_of(found.processor)
    if not origin.is_run:
        args.image_size = form_of(found.processor).height
        choose_workers(args, training, plan)
        if args.channels_last is None:
            args.channels_last = training.device.type == "cuda"
    training.dataloader_num_workers = args.workers
    if args.channels_last:
        found.model.to(memory_format=torch.channels_last)
    return found


def is_ours(path: str) -> bool:
    """Whether a folder holds a model from outside transformers."""
    return _holds(path, NAME_KEY) or _holds(path, MODULE_KEY)


def _holds(path: str, key: str) -> bool:
    file = Path(path) / CONFIG_FILE
    try:
        return file.is_file() and key in dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        return False


def _load_small(path: str, is_run: bool, side: int | None, small: str, labels: Sequence[str] | None) -> Loaded:
    folder = Path(path)
    values = read_json(folder / CONFIG_FILE, {})
    name, known = values.pop(NAME_KEY), values.pop("labels", None)
    if name != small:
        fix = "leave out --model"
        raise InputError("model.task", f"{folder} contains a {name}, but this task needs a {small}", fix=fix)
    form = ImageForm.load(folder).with_side(side)
    if "image_size" in values:
        values["image_size"] = form.height
    if labels is not None:
        values["num_labels"] = len(labels)
    pretrained.check_size(path, lambda: models.create(name, labels, **values))
    made = models.create(name, labels, **values)
    if is_run and not (folder / WEIGHTS_FILE).is_file():
        return Loaded(made, processor=form)
    # Different classes need a new head.
    new = _load_fitting(made, folder, keeps_head=labels is None or list(labels) == known)
    return Loaded(made, new, processor=form)


def _load_fitting(model: nn.Module, folder: Path, keeps_head: bool = True) -> list[str]:
    with pretrained.opening(str(folder), WEIGHTS_FILE):
        os.close(open_data(folder / WEIGHTS_FILE))  # load_file would wait for a pipe
        tensors = load_file(folder / WEIGHTS_FILE)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    if not keeps_head:
        heads = [name for name in fitting if "head" in name.split(".")[0]]
        fitting = {name: tensor for name, tensor in fitting.items() if name not in heads}
    model.load_state_dict(fitting, strict=False)
    return sorted(set(own) - set(fitting))


class ModuleAdapter(nn.Module):
    """Any PyTorch module with the interface of the other models.

    The module is called with the images, and with `labels` if it takes them. It returns logits, or an object, dict or
    tuple with "logits" (or first) and perhaps "loss"; the `criterion` is the loss if it returns none.
    """

    def __init__(
        self, module: nn.Module, criterion: Criterion | None, name: str | None, labels: Sequence[str] | None
    ) -> None:
        super().__init__()
        self.module = module
        self.config = {MODULE_KEY: name, "labels": None if labels is None else list(labels)}
        self._criterion = criterion
        self._takes_labels = "labels" in inspect.signature(module.forward).parameters

    def forward(self, pixel_values: Tensor, labels: Any = None, **others: Any) -> Any:
        if labels is not None and self._takes_labels:
            others["labels"] = labels
        answer = self.module(pixel_values, **others)
        if isinstance(answer, Tensor):
            output: Any = ModelOutput(logits=answer)
        elif isinstance(answer, Mapping):
            output = SimpleNamespace(**{"loss": None, "logits": None, **answer})
        elif isinstance(answer, tuple):
            output = ModelOutput(logits=answer[0])
        else:
            output = answer
        if labels is not None and output.loss is None:
            if self._criterion is None:
                raise ConfigError(
                    f"{type(self.module).__name__} returned no loss: for this task a module takes pixel_values and "
                    "labels and returns an object with loss"
                )
            output.loss = self._criterion(output.logits, labels)
        return output

    def save_pretrained(self, folder: str | Path) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.module.state_dict().items()}
        write_atomically(Path(folder) / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_json(Path(folder) / CONFIG_FILE, self.config)


def _load_module(
    origin: Origin, args: Any, plan: DataPlan, labels: Sequence[str] | None, criterion: Criterion | None
) -> Loaded:
    folder = Path(origin.path) if origin.path is not None and not is_object_name(origin.path) else None
    name = origin.path if folder is None else read_json(folder / CONFIG_FILE, {})[MODULE_KEY]
    module = origin.module
    if module is None:
        if name is None:
            raise handed_over(str(args.model))
        module = import_object(name, "model", args)
        if not isinstance(module, nn.Module):  # a function: it gets what its signature asks for
            number = len(labels or ())
            known = {} if labels is None else {"num_labels": number, "num_classes": number, "labels": list(labels)}
            wanted = inspect.signature(module).parameters
            module = module(**{key: value for key, value in known.items() if key in wanted})
    else:
        args.model = f"{HANDED_OVER}{type(module).__name__}"
    if not isinstance(module, nn.Module):
        what = f"--model {name or type(module).__name__} is a {type(module).__name__}, expected a torch.nn.Module"
        raise InputError("model.task", what, fix="name a function that returns a module, or a class of modules")
    adapter = ModuleAdapter(module, criterion, name, labels)
    if folder is None:
        side = args.image_size or min(_USUAL_SIDE, image_side(plan))
        return Loaded(adapter, processor=ImageForm(side, side))
    new = _load_fitting(module, folder) if (folder / WEIGHTS_FILE).is_file() else []
    return Loaded(adapter, new, processor=ImageForm.load(folder).with_side(args.image_size))


def forward_options(model: Any, form: ImageForm) -> dict[str, Any]:
    """Return extra arguments of a model's forward: to interpolate its positions for another image size."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = getattr(inner.config, "image_size", None)
    is_own = own is None or not isinstance(own, int) or own == form.height
    if is_own or "interpolate_pos_encoding" not in inspect.signature(inner.forward).parameters:
        return {}
    return {"interpolate_pos_encoding": True}


def backbone_groups(
    model: nn.Module, groups: Sequence[Mapping[str, Any]], lr: float, factor: float
) -> list[dict[str, Any]]:
    """Split parameter groups into the head's, which come first, and the rest with a lower rate."""
    backbone = {id(parameter) for parameter in backbone_parameters(model)}
    split: list[dict[str, Any]] = []
    for is_below in (False, True):
        for group in groups:
            chosen = [parameter for parameter in group["params"] if (id(parameter) in backbone) == is_below]
            if chosen:
                split.append({**group, "params": chosen, **({"lr": lr * factor} if is_below else {})})
    if not backbone or not any(id(one) not in backbone for group in groups for one in group["params"]):
        what = f"--backbone_lr_factor {factor:g}: the model has no head besides its backbone"
        raise InputError("args.value", what, fix="leave out --backbone_lr_factor")
    return split


def save_model(model: Any, folder: Path) -> None:
    if isinstance(model, (SmallModel, ModuleAdapter)):
        model.save_pretrained(folder)
        return
    model.to(memory_format=torch.contiguous_format)
    with quiet():
        model.save_pretrained(folder)
    give_usual_mode(folder)


def save_config(model: Any, folder: Path) -> None:
    """Write everything needed to rebuild a model, except its weights."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(inner, SmallModel):
        write_json(folder / CONFIG_FILE, {NAME_KEY: inner.name, "labels": inner.labels, **inner.config})
    elif isinstance(inner, ModuleAdapter):
        write_json(folder / CONFIG_FILE, inner.config)
    else:
        inner.config.architectures = [type(inner).__name__]
        inner.config.save_pretrained(folder)
