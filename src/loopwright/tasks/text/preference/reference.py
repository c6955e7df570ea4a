"""The reference model of preference tuning: its log-probabilities of all rows, computed once and kept in a file.

Training then needs no second model in memory, and a resumed run reads the same numbers. They are keyed by the tokens
of the rows, so by tokenizer, template and data, and by the weights of the model; the file has its own sha256.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loopwright.config.processes import gather_bytes
from loopwright.errors import InputError
from loopwright.run_folder.files import DamagedFileError, read_json, write_json

FILE: Final = "reference.json"
_MOST_BYTES = 1 << 30
_STORED = np.dtype("<f4")

LogProbs = npt.NDArray[np.float32]  # (pairs, 2), the chosen answer first


@dataclass
class Reference:
    """The model that a run began with.

    Attributes:
        create: loads or builds it again, its weights quantized or not, and left in 16 bits or not.
        weights: the sha256 of its weights; None until it is known.
        is_quantized: whether they were in 4 bits; those of a finished run no longer are.
        keeps_half: whether they stayed in 16 bits, if their file has them so.
        found: its log-probabilities, by the sha256 of the rows' tokens.
    """

    create: Callable[[bool, bool], Any]
    weights: str | None = None
    is_quantized: bool = False
    keeps_half: bool = False
    found: dict[str, LogProbs] = field(default_factory=dict)
    _model: Any = None
    _notes: list[str] = field(default_factory=list)

    def log_probs(self, dataset: Any, compute: Callable[[Any, Any], LogProbs], model: Any, folder: Path | None) -> Any:
        """Return the log-probabilities of a dataset's pairs: known ones, those in the folder, or computed ones.

        Args:
            compute: of a model and a dataset.
            model: the model of the run while it has the weights it began with; None afterwards.
        """
        key = digest_of_rows(dataset)
        if key not in self.found and folder is not None:
            self.read(folder)
        if not all(gather_bytes(b"known" if key in self.found else b"")):  # the processes compute together
            self.found[key] = compute(self.model if model is None else model, dataset)
            if folder is not None and model is None:
                self.write(folder)
        return self.found[key]

    @property
    def model(self) -> Any:
        """The model, loaded again: for rows that came later, or if the file is lost."""
        if self._model is None:
            made = self.create(self.is_quantized, self.keeps_half)
            weights = digest_of_weights(made)
            if self.weights not in (None, weights):
                what = "the model that the run began with has changed, and its reference log-probabilities are needed"
                saw = [f"sha256 of its weights then: {self.weights}", f"now: {weights}"]
                raise InputError("resume.model", what, saw=saw, fix="put the model of --model back as it was")
            self.weights, self._model = weights, made.eval()
        return self._model

    def read(self, folder: Path) -> None:
        """Take over what a file holds, unless it is damaged or of another model."""
        try:
            content = read_json(folder / FILE, {}, _MOST_BYTES)
            weights = content.get("weights")
            if weights is None or self.weights not in (None, weights):
                return
            for key, text in content["log_probs"].items():
                values = np.frombuffer(base64.b64decode(text), _STORED).astype(np.float32)
                self.found.setdefault(key, values.reshape(-1, 2))
            self.weights, self.is_quantized = weights, content.get("is_quantized", False)
            self.keeps_half = content.get("keeps_half", True)  # as all weights did in older runs
        except (DamagedFileError, KeyError, ValueError, AttributeError):
            self._notes = [f"{FILE} is damaged: the log-probabilities of the reference model are computed again"]

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def write(self, folder: Path) -> None:
        texts = {key: base64.b64encode(each.astype(_STORED).tobytes()).decode() for key, each in self.found.items()}
        kinds = {"is_quantized": self.is_quantized, "keeps_half": self.keeps_half}
        write_json(folder / FILE, {"weights": self.weights, **kinds, "log_probs": texts}, is_sealed=True)


def digest_of_rows(dataset: Any) -> str:
    digest = hashlib.sha256()
    for position in range(len(dataset)):
        sample = dataset.features(position)
        sizes = [sample["start"], *map(len, sample["input_ids"])]
        for part in (sizes, *sample["input_ids"]):
            digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()


def digest_of_weights(model: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
