"""Data: the pure order of samples, and loaders that can start anywhere in it."""

from loopwright.data.loader import Guarantee, Loader, MicroBatch, OrderedLoader, ReplayLoader, Window, adopt
from loopwright.data.order import Permutation, Plan, Sequential, Share, Shuffled

__all__ = [
    "Guarantee",
    "Loader",
    "OrderedLoader",
    "Permutation",
    "MicroBatch",
    "Plan",
    "ReplayLoader",
    "Sequential",
    "Share",
    "Shuffled",
    "Window",
    "adopt",
]
