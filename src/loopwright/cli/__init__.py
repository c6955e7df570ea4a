"""The command `loopwright` and its alias `lw`: one verb, then its arguments. Importing this does not import torch."""

from __future__ import annotations

from loopwright.cli.main import VERBS, main

__all__ = ["VERBS", "main"]
