"""The fixtures of the tasks, for the command line."""

from tasks.conftest import finished, own_folder, reviews

__all__ = ["finished", "own_folder", "reviews"]
