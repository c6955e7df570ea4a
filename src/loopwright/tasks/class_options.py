"""Flags about classes: lists of names, `--label_map` and `--class_weights`. No torch."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.errors import InputError
from loopwright.sources import DataPlan
from loopwright.sources.label_checks import did_you_mean, imbalance, known_names
from loopwright.sources.labels import label_text

if TYPE_CHECKING:
    from loopwright.tasks.base import Job, Task

BALANCED = "balanced"


def listed_names(flag: str, words: Sequence[str]) -> list[str]:
    """Return the names in a flag: several words, one with commas, or a JSON list; refuse empty and repeated ones."""
    names = list(map(str, words))
    if len(names) == 1 and names[0].lstrip().startswith("["):
        names = list(map(label_text, _json(flag, names[0], list)))
    elif names:  # among several words a comma before a blank is part of a name
        is_one = len(names) == 1 or any(name.endswith(",") for name in names)
        names = re.split("," if is_one else r",(?!\s)", (" " if is_one else ",").join(names))
        names = names[:-1] if len(names) > 1 and not names[-1].strip() else names
    names = [name.strip() for name in names]
    for name in names:
        if not name or names.count(name) > 1:
            what = f"--{flag} names {f'{name!r} twice' if name else 'an empty class'}"
            good = ",".join(filter(None, dict.fromkeys(names)))
            raise InputError("args.value", what, fix=f"--{flag} {good}" if good else f"leave out --{flag}")
    return names


def label_map(words: Sequence[str]) -> dict[str, str]:
    """Parse `--label_map`: OLD=NEW words, with commas between them or not, JSON, or the name of a JSON file."""
    found = _pairs("label_map", words, "positive=pos")
    for old, new in found.items():
        if not old or not new:
            what = f"--label_map has an empty class name: {old!r} = {new!r}"
            fix = (
                f"--drop_labels {shlex.quote(old)} instead of --label_map {shlex.quote(f'{old}=')}"
                if old
                else "leave out --label_map"
            )
            raise InputError("args.value", what, fix=fix)
    return found


def _pairs(flag: str, words: Sequence[str], example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        if word.lstrip().startswith("{") or word.endswith(".json"):
            text = word
            if not word.lstrip().startswith("{"):
                if not Path(word).is_file():
                    raise InputError("data.file", f"--{flag} {word} does not exist", fix=f"--{flag} {example}")
                text = Path(word).read_text(encoding="utf-8-sig")
            pairs |= {old.strip(): label_text(new) for old, new in _json(flag, text, dict).items()}
            continue
        parts = [part for part in word.split(",") if part.strip()]
        for part in parts if all("=" in part for part in parts) else [word]:
            old, equals, new = part.partition("=")
            if not equals:
                raise InputError("args.value", f"--{flag} {part!r} has no equals sign", fix=f"--{flag} {example}")
            pairs[old.strip()] = new.strip()
    return pairs


def _json(flag: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        value, problem = None, str(error)
    else:
        problem = f"it is a {type(value).__name__}, and a {kind.__name__} of texts is needed"
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, kind) or any(part is None or isinstance(part, dict | list) for part in parts):
        example = {"dict": '{"old": "new"}', "list": '["one", "two"]'}[kind.__name__]
        raise InputError("args.value", f"--{flag} is not valid JSON", saw=[problem], fix=f"--{flag} '{example}'")
    return value


def settle_weights(args: Any, plan: DataPlan, task: Task) -> DataPlan:
    """Write the weight of each class into `args`, by id; without weights add a note if classes differ much in size."""
    labels = plan.labels
    if not args.class_weights:
        is_counted = labels is not None and labels.kind in ("class", "multi")
        note = imbalance(plan.counts["train"]) if is_counted else None
        return plan if note is None else replace(plan, warnings=(*plan.warnings, note))
    if labels is None or labels.kind == "float":
        what = "--class_weights cannot be followed: the labels are numbers to predict"
        raise InputError("args.value", what, fix="leave out --class_weights")
    names, given = labels.names, [str(word) for word in args.class_weights]
    if given == [BALANCED]:
        num_rows = min(len(plan.splits["train"]), args.max_train_samples or math.inf)
        given = [f"{weight:.6g}" for weight in _balanced(_counts(args, plan, task), labels.kind, num_rows)]
    args.class_weights = weights_by_class(given, names)
    return plan


def weights_by_class(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the weight of each class, of numbers in the order of the classes or of NAME=NUMBER; others are 1."""
    weights = ",".join(given).split(",")
    if not any(map(_is_weight, weights)):
        example = BALANCED if did_you_mean(given[0], [BALANCED]) else f"{names[0]}=2"
        pairs = _pairs("class_weights", given, example)
        for name in pairs.keys() - set(names):
            near = did_you_mean(name, names) or names[0]
            what, fix = f"--class_weights: there is no class {name!r}", f"--class_weights {near}={pairs[name]}"
            raise InputError("data.labels", what, saw=[known_names(names)], fix=fix)
        weights = [pairs.get(name, "1") for name in names]
    if len(weights) != len(names) or not all(map(_is_weight, weights)) or not any(map(float, weights)):
        what = f"--class_weights {' '.join(given)} is not a number, 0 or more, for each of the {len(names)} classes"
        raise InputError("args.value", what, saw=[known_names(names)], fix=f"--class_weights {BALANCED}")
    return weights


def _counts(args: Any, plan: DataPlan, task: Task) -> list[int]:
    """Return the number of training rows, or tokens, of each class among the rows that are used."""
    names, most = plan.label_names, args.max_train_samples
    if most is None or most >= len(plan.splits["train"]):
        return [plan.counts["train"].get(name, 0) for name in names]
    rows, (role,) = plan.rows("train"), [role.name for role in task.roles if role.is_label]
    found = (rows[index][role] for index in range(most))
    counts = Counter(chain.from_iterable(each if isinstance(each, list) else [each] for each in found))
    return [counts[number] for number in range(len(names))]


def _balanced(counts: Sequence[int], kind: str, num_rows: float) -> list[float]:
    """Return weights with which all classes count the same; of several per row, as much as their absence."""
    if kind == "multi":
        return [(num_rows - count) / count if 0 < count < num_rows else 1.0 for count in counts]
    present = [count for count in counts if count]
    return [sum(present) / (len(present) * count) if count else 1.0 for count in counts]


def _is_weight(word: str) -> bool:
    try:
        return 0 <= float(word) < math.inf
    except ValueError:
        return False


def numbers_of(weights: Sequence[str]) -> tuple[float, ...] | None:
    """Return settled class weights as numbers; None without any."""
    return tuple(map(float, weights)) or None


@dataclass(frozen=True)
class Weighed:
    """Adds to the features of a training row its number of items in the loss: the weights of its labels."""

    features: Callable[..., dict[str, Any]]
    weights: Sequence[float]
    is_multi: bool = False  # the weights are those of the classes that a row has; the row is one item

    @property
    def pixels(self) -> Any:
        """The function that converts many images at once, if the features have one."""
        return self.features.pixels  # type: ignore[attr-defined]

    def __call__(self, *row: Any) -> dict[str, Any]:
        """Return the features of a row, with "num_items"."""
        features = self.features(*row)
        labels = features["labels"] if isinstance(features["labels"], list) else [int(features["labels"])]
        number = 1.0 if self.is_multi else sum(self.weights[label] for label in labels if label >= 0)
        return {**features, "num_items": float(number)}


def weighed(job: Job, features: Callable[..., Any], is_training: bool) -> Callable[..., Any]:
    """Return the features with their number of items for training with `--class_weights`; else unchanged."""
    weights, labels = numbers_of(job.args.class_weights), job.plan.labels
    if weights is None or not is_training or labels is None:
        return features
    return Weighed(features, weights, is_multi=labels.kind == "multi")


def weighted_loss(job: Job, batch: Mapping[str, Any], logits: Any, name: str = "ce") -> Any:
    """Return the loss of a training batch with class weights, a mean over its items; None for other batches."""
    if "num_items" not in batch:
        return None
    from torch.nn import functional

    from loopwright.models import create_loss

    weights, labels = numbers_of(job.args.class_weights), batch["labels"]
    if job.plan.labels is not None and job.plan.labels.kind == "multi":
        positive = logits.new_tensor(weights).float()
        return functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), pos_weight=positive)
    return create_loss(name, class_weights=weights)(logits, labels).loss
