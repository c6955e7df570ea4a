"""The fixtures of the tasks, for the command line."""

from __future__ import annotations

from tasks.conftest import finished, own_folder, reviews

__all__ = ["finished", "own_folder", "reviews"]
