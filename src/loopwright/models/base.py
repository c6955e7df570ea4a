"""The shared parts of the small models: configuration, outputs, and saving.

A model is saved as `config.json` (its name under "loopwright_model", and its constructor arguments) and
`model.safetensors`. `loopwright.models.load` restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save
from torch import Tensor, nn

from loopwright.errors import ConfigError
from loopwright.models.losses import Loss
from loopwright.run_folder import write_atomically, write_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NAME_KEY = "loopwright_model"


@dataclass
class ModelOutput:
    """The output of a model.

    Attributes:
        loss: a mean over items; None without labels.
        num_items: the number of items of the loss, if they are not simply the samples of the batch.
        logits: the scores before softmax or sigmoid.
    """

    loss: Tensor | None = None
    num_items: Tensor | None = None
    logits: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor | None, loss: Loss) -> ModelOutput:
        """Return these logits, and with labels their loss and its number of items."""
        return cls(logits=logits) if labels is None else cls(*loss(logits, labels), logits)


class SmallModel(nn.Module):
    """A model small enough to read and to train on a CPU.

    A subclass passes its constructor arguments to this constructor, by name; they must be plain values.

    Attributes:
        sizes: the arguments that must be at least 1.
        labels: the class names, if known; saved with the model.
    """

    name: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ("num_labels", "num_channels", "width")

    def __init__(self, **config: Any) -> None:
        super().__init__()
        for key, value in config.items():
            if key in self.sizes and value < 1:
                raise ConfigError(f"{key} of the model {self.name!r} must be at least 1, got {value}")
        self.config = config
        self.labels: list[str] | None = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the configuration and the weights; the folder is created if needed."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in self.state_dict().items()}
        write_atomically(target / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_json(target / CONFIG_FILE, {NAME_KEY: self.name, "labels": self.labels, **self.config})

    def set_labels(self, labels: Sequence[str]) -> None:
        """Name the classes; raises a ConfigError if there are more or fewer names than classes."""
        expected = self.config.get("num_labels", 0)
        if len(labels) != expected:
            raise ConfigError(f"the model {self.name!r} has {expected} classes, got {len(labels)} names")
        self.labels = [str(label) for label in labels]
