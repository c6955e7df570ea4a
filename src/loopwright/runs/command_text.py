"""The content of command.txt: how a run was started, where, and with which versions. No torch."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = ("loopwright", "torch", "accelerate", "transformers", "tokenizers", "numpy", "peft", "datasets")


def command_text(command: Sequence[str] | None) -> str:
    """Return the content of command.txt; called when a run is created.

    Args:
        command: the words of the command line; None for a user's script.
    """
    lines = [
        f"command: {shlex.join(command if command is not None else sys.argv)}",
        f"folder: {Path.cwd()}",
        f"python: {platform.python_version()} on {platform.platform()}",
    ]
    for name in _PACKAGES:
        try:
            lines.append(f"{name}: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    git = shutil.which("git")
    if git is not None:
        done = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
        changed = subprocess.run([git, "diff", "HEAD"], capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            lines += [f"git commit: {done.stdout.strip()}", *(["", changed.stdout] if changed.stdout else [])]
    return "\n".join(lines) + "\n"
