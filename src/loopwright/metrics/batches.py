"""Metrics of a trainer: names, functions and objects that are fed with the (outputs, targets) of batches.

Named metrics reduce a batch on its device to small rows, which `flush` moves to the host. Torch is not imported.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loopwright import metrics
from loopwright.errors import ConfigError, ConfigTypeError, DataError, LoopwrightError, StopTrainingError, nearest
from loopwright.metrics.classification import AveragedMetric
from loopwright.metrics.regression import MeanError

Gather = Callable[[Any], list[Any]]
_HELD_BYTES = 2**26  # of rows on the device before they are moved to the host
_BLOCK_BYTES = 512  # the least that a tensor takes on CUDA
_IGNORED = -100
_VALUES = (MeanError, metrics.PearsonCorrelation, metrics.SpearmanCorrelation, metrics.R2)
_SCORES = (metrics.RocAuc, metrics.ExpectedCalibrationError, metrics.TopKAccuracy)
_AVERAGED = (metrics.F1, metrics.Precision, metrics.Recall)
_PLAIN = (metrics.Accuracy, *_AVERAGED, metrics.MatthewsCorrelation, metrics.RocAuc, metrics.MeanSquaredError)
_PLAIN += (metrics.MeanAbsoluteError, metrics.R2, metrics.PearsonCorrelation, metrics.SpearmanCorrelation)  # type: ignore[assignment]
_KNOWN: dict[str, Callable[..., metrics.Metric]] = {kind.name: kind for kind in _PLAIN}
NAMES = (*_KNOWN, "rmse", "top_5_accuracy", *(f"{kind.name}_{how}" for kind in _AVERAGED for how in ("macro", "micro")))
_OF_PROBABILITIES = ("BCELoss", "binary_cross_entropy")
_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
_OTHER_NAMES = {
    **{"acc": "accuracy", "auc": "auroc", "roc_auc": "auroc", "mcc": "matthews_correlation"},
    **{"matthews_corrcoef": "matthews_correlation", "f1score": "f1", "fscore": "f1", "f1_measure": "f1"},
    **{"mean_squared_error": "mse", "mean_absolute_error": "mae", "root_mean_squared_error": "rmse"},
}


class _Collecting:
    """Holds rows of batches on the device until they are flushed."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._num_bytes = 0

    def add(self, rows: Any) -> None:
        """Count a batch that was read."""
        self._held.append(rows)
        _mapped(rows, self._count)
        if self._num_bytes > _HELD_BYTES:
            self.flush()

    def _count(self, tensor: Any) -> None:
        self._num_bytes += max(tensor.numel() * tensor.element_size(), _BLOCK_BYTES)

    def _take(self) -> list[Any]:
        """Return the rows on the host; this waits for the device."""
        held, self._held, self._num_bytes = self._held, [], 0
        return [_mapped(rows, lambda tensor: tensor.cpu()) for rows in held]

    def flush(self) -> None:
        """Move what is held to the host."""


class NamedMetric(_Collecting):
    """A metric of this package. If it `adapts`, F1 and its like choose their average by the number of classes.

    Where the loss does not say whether outputs are logits or probabilities, both are counted. They are logits once an
    output is outside [0, 1]: then `seen`, which training and evaluation share, holds "logits".
    """

    def __init__(self, name: str, metric: Any, adapts: bool = False, k: int | None = None) -> None:
        super().__init__()
        self.name, self.greater_is_better = name, metric.greater_is_better
        self.seen: set[str] = set()
        self._metrics = [metric, copy.deepcopy(metric)]  # of logits, and of probabilities
        self._adapts, self._k = adapts, k
        self._num_classes = 0  # negative for several labels per sample
        # A running value is cheap where sums are kept, not samples.
        self.is_cheap = not isinstance(metric, (metrics.RocAuc, metrics.SpearmanCorrelation))

    def reset(self, device: Any) -> None:
        self._take()
        for metric in self._metrics:
            metric.reset()

    def read(self, outputs: Any, targets: Any, loss_func: Any) -> Any:
        """Return what the metric needs of a batch, on its device, for `add`."""
        outputs, metric = _tensor(outputs, self.name).detach(), self._metrics[0]
        targets = targets.detach().to(outputs.device, non_blocking=True)
        is_ours = type(metric).__module__.startswith("loopwright.")
        if isinstance(metric, _VALUES) or (not is_ours and outputs.numel() == targets.numel()):
            if outputs.numel() != targets.numel():
                raise _mismatch(self.name, outputs, targets)
            if isinstance(metric, metrics.R2) and outputs.numel() > len(outputs):
                raise DataError("r2 needs one number per sample; pass torchmetrics' R2Score for more")
            return {0: (outputs.float().reshape(-1).clone(), targets.reshape(-1).float())}, True
        kind, outputs, targets = _aligned(outputs, targets, loss_func, self.name)
        self._num_classes = {"classes": outputs.shape[-1], "labels": -outputs.shape[-1], "binary": 2}[kind]
        loss = _loss_name(loss_func)
        is_known = loss in _OF_CLASSES or (kind == "classes" and not isinstance(metric, _SCORES))
        which = [1] if loss in _OF_PROBABILITIES else [0, 1]
        if is_known or re.search("logits|margin", loss.lower()):
            which = [0]
        rows = {place: self._rows(kind, outputs, targets, bool(place)) for place in which}
        return rows, ((outputs >= 0) & (outputs <= 1)).all() if len(which) == 2 else True

    def flush(self) -> None:
        for rows, are_probabilities in self._take():
            self.seen |= set() if are_probabilities else {"logits"}
            for place in [0] if 0 in rows and "logits" in self.seen else rows:
                self._add(self._metrics[place], *rows[place])

    def _add(self, metric: Any, predictions: Any, references: Any) -> None:
        if references.dim() == 1:
            is_used = references != _IGNORED
            predictions, references = predictions[is_used], references[is_used]
        if self._num_classes and len(references):
            is_odd = (references != references.floor()) | (references < 0)
            if is_odd.any() or (self._num_classes == 2 and references.max() > 1):
                found = references.reshape(-1)[:5].tolist()
                raise DataError(f"{self.name} needs class indices as targets, got {found}")
            references = references.long()
        metric.add_batch(predictions=predictions, references=references)

    def compute(self, gather: Gather) -> dict[str, Any]:
        """Return the results over all processes."""
        states, whole = gather(self.state()), copy.deepcopy(self)  # `state` has emptied what is held
        whole.load(states)
        return whole.running() or {self.name: math.nan}

    def running(self) -> dict[str, Any]:
        """Return the results of this process so far."""
        self.flush()
        order = self._metrics if "logits" in self.seen else self._metrics[::-1]
        metric = next((each for each in order if each.num_samples), order[0])
        options = dict(metric.options)
        if self._adapts and isinstance(metric, AveragedMetric):
            if options["average"] == "binary" and self._num_classes != 2:
                options["average"] = "macro"
            if self._num_classes < 0:
                options["labels"] = list(range(-self._num_classes))
        found = metric.result(options) if metric.num_samples else {}
        one = [_numbers(self.name, value) for value in found.values()] if len(found) == 1 else []
        return one[0] if one else found

    def state(self) -> dict[str, Any]:
        self.flush()
        states = [metric.state_dict() for metric in self._metrics]
        return {"metrics": states, "num_classes": self._num_classes, "seen": sorted(self.seen)}

    def load(self, states: list[dict[str, Any]]) -> None:
        """Continue the sums of several processes."""
        for place, metric in enumerate(self._metrics):
            metric.reset()
            other = copy.deepcopy(metric)
            for state in states:
                other.load_state_dict(state["metrics"][place])
                metric.merge(other)
        for state in states:
            self.seen |= set(state["seen"])
            self._num_classes = self._num_classes or state["num_classes"]

    def _rows(self, kind: str, outputs: Any, targets: Any, is_probability: bool) -> tuple[Any, Any]:
        """Return predictions and references in the form that the metric takes, on the device."""
        metric = self._metrics[0]
        if isinstance(metric, _SCORES):
            scores = outputs.float().clone()
            if not is_probability:
                scores = scores.softmax(-1) if kind == "classes" else scores.sigmoid()
            return scores, targets
        if self._k is not None and kind == "classes":
            best = outputs.topk(min(self._k, outputs.shape[-1]), dim=-1).indices
            hits = (best == targets.unsqueeze(-1)).any(-1).long()
            return hits, (targets != _IGNORED).long() * (1 - _IGNORED) + _IGNORED
        if kind == "classes":
            return outputs.argmax(-1), targets
        decisions = (outputs > (0.5 if is_probability else 0.0)).long()
        if kind == "binary" or isinstance(metric, metrics.MultiLabel):
            return decisions.reshape(targets.shape), targets
        if not isinstance(metric, AveragedMetric):
            is_right = (decisions == targets).all(-1).long()
            return is_right, is_right * 0 + 1
        # Each decision is a sample: the number of its label, or that of no label.
        numbers, none = (decisions * 0 + 1).cumsum(-1) - 1, decisions.shape[-1]
        yes, is_yes = (numbers * decisions + none * (1 - decisions)), targets.long()
        return yes.reshape(-1), (numbers * is_yes + none * (1 - is_yes)).reshape(-1)


class FunctionMetric(_Collecting):
    """A function of all outputs and targets of an epoch, which are kept on the host."""

    greater_is_better: bool | None = None
    is_cheap = False

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.name, self._function = name, function
        self._kept: list[Any] = []
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigTypeError(f"metrics[{name!r}] must take (outputs, targets): {error}") from None
        except ValueError:  # a builtin without a signature
            pass

    def reset(self, device: Any) -> None:
        self._take()
        self._kept = []

    def read(self, outputs: Any, targets: Any, loss_func: Any) -> Any:
        return _mapped([_tensor(outputs), targets], lambda tensor: tensor.detach().clone())

    def flush(self) -> None:
        self._kept += self._take()

    def compute(self, gather: Gather) -> dict[str, Any]:
        kept = [batch for state in gather(self.state()) for batch in state["kept"]]
        return _numbers(self.name, _called(self.name, self._function, *_joined(kept)) if kept else math.nan)

    def state(self) -> dict[str, Any]:
        self.flush()
        return {"kept": self._kept}

    def load(self, states: list[dict[str, Any]]) -> None:
        self._kept = [batch for state in states for batch in state["kept"]]


class ForeignMetric:
    """A metric with `update`, `compute` and `reset`, as torchmetrics has; it talks to the other processes itself."""

    is_cheap = False

    def __init__(self, name: str | None, metric: Any) -> None:
        self.name, self._metric = name, copy.deepcopy(metric)
        self.greater_is_better = getattr(_parts(metric)[0], "higher_is_better", None)
        for part in _parts(self._metric):
            if hasattr(part, "persistent"):
                part.persistent(True)  # so that its state holds the sums

    def reset(self, device: Any) -> None:
        self._device = device
        self._metric.reset()
        self._move()

    def read(self, outputs: Any, targets: Any, loss_func: Any) -> Any:
        outputs = _tensor(outputs, self.name or "the metric").detach().clone()
        targets = targets.detach().to(outputs.device, non_blocking=True)
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            outputs = outputs.reshape(targets.shape)
        if targets.is_floating_point() and "torchmetrics.classification" in type(_parts(self._metric)[0]).__module__:
            targets = targets.long()
        return outputs, targets

    def add(self, rows: Any) -> None:
        _called(self.name or "the metric", self._metric.update, *rows)

    def _move(self) -> None:
        if hasattr(self._metric, "to"):
            self._metric.to(self._device)

    def compute(self, gather: Gather) -> dict[str, Any]:
        found, head = self._metric.compute(), "" if self.name is None else f"{self.name}_"
        named = {f"{head}{name}": value for name, value in found.items()} if isinstance(found, Mapping) else None
        named = {str(self.name): found} if named is None else named
        return {key: number for name, value in named.items() for key, number in _numbers(name, value).items()}

    def state(self) -> dict[str, Any]:
        return {name: _mapped(value, lambda each: each.cpu()) for name, value in self._metric.state_dict().items()}

    def load(self, states: list[dict[str, Any]]) -> None:
        empty = copy.deepcopy(self._metric)
        for index, state in enumerate(states):
            one = copy.deepcopy(empty) if index else self._metric
            one.load_state_dict(state)
            for part, other in zip(_parts(self._metric), _parts(one), strict=True) if index else ():
                part.merge_state(other)
        self._move()


BatchMetric = NamedMetric | FunctionMetric | ForeignMetric


def parse_metrics(given: Any) -> list[BatchMetric]:
    """Return the metrics of `Trainer(metrics=...)`: a name, a function or an object, or a list or a dict of them."""
    is_one = isinstance(given, str | metrics.Metric) or callable(given) or hasattr(given, "compute")
    if isinstance(given, Mapping) and not is_one:
        found = [_parse(name, each) for name, each in given.items()]
    else:
        found = [_parse(None, each) for each in (given if isinstance(given, Iterable) and not is_one else [given])]
    names = [each.name for each in found]
    if taken := [name for name in names if name in ("loss", "loss_epoch")]:
        raise ConfigError(f"metrics has the name {taken[0]!r}, which is that of the loss. Choose another one.")
    if twice := [name for name in names if name is not None and names.count(name) > 1]:
        raise ConfigError(f"metrics has two of the name {twice[0]!r}. Name them: metrics={{name: metric, ...}}.")
    return found


def _parse(name: str | None, given: Any) -> BatchMetric:
    if isinstance(given, str):
        return _by_name(name or given, given)
    if isinstance(given, metrics.Metric):
        return NamedMetric(name or given.name, copy.deepcopy(given))
    if isinstance(given, type):
        raise ConfigTypeError(
            f"metrics has the class {given.__name__} itself. Pass an instance: {given.__name__}(...)."
        )
    if all(hasattr(given, method) for method in ("update", "compute", "reset")):
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(given).__name__).lower()
        return ForeignMetric(name or (None if _parts(given)[0] is not given else kind), given)
    if callable(given):
        return FunctionMetric(name or str(getattr(given, "__name__", type(given).__name__)), given)
    raise ConfigTypeError(
        "metrics takes names, functions of (outputs, targets), and objects of torchmetrics or loopwright.metrics, "
        f"got {given!r:.80}"
    )


def _by_name(name: str, given: str) -> NamedMetric:
    base, _, average = given.rpartition("_")
    if given in _KNOWN:
        return NamedMetric(name, _KNOWN[given](), adapts=True)
    if given == "rmse":
        return NamedMetric(name, metrics.MeanSquaredError(squared=False))
    if top := re.fullmatch(r"top_([1-9]\d*)_accuracy", given):
        return NamedMetric(name, metrics.Accuracy(), k=int(top[1]))
    if base in [kind.name for kind in _AVERAGED] and average in ("macro", "micro", "weighted"):
        return NamedMetric(name, _KNOWN[base](average=average), adapts=True)
    plain = re.sub(r"_score$", "", given.lower().replace("-", "_").replace(" ", "_"))
    others = {**metrics.METRICS, **metrics.TASK_METRICS, **metrics.VISION_METRICS}
    loaded = f"; for this one pass metrics.load({given!r}) of loopwright.metrics" if given in others else ""
    raise ConfigError(
        f"there is no metric {given!r} (there are {', '.join(NAMES)}; or pass {{name: function(outputs, targets)}}, or "
        f"an object of torchmetrics or loopwright.metrics){loaded}",
        given=given,
        choices=NAMES,
        nearest=None if loaded else _OTHER_NAMES.get(plain) or nearest(plain, NAMES),
    )


def _aligned(outputs: Any, targets: Any, loss_func: Any, name: str) -> tuple[str, Any, Any]:
    """Return the kind of a classification, its outputs with the classes last, and its targets."""
    is_of_classes = _loss_name(loss_func) in _OF_CLASSES
    given = loss_func.keywords if isinstance(loss_func, functools.partial) else {}
    ignored = given.get("ignore_index", getattr(loss_func, "ignore_index", _IGNORED))
    targets = targets if targets.is_floating_point() else targets.long()
    targets = targets.masked_fill(targets == ignored, _IGNORED)
    if outputs.numel() == targets.numel():
        # Signs, as of SoftMarginLoss, are 0 and 1.
        targets = targets.masked_fill((targets == -1) & ~(targets == 0).any(), 0)
        if outputs.dim() != 2 or outputs.shape[1] == 1:
            return "binary", outputs.reshape(-1, 1), targets.reshape(-1)
        targets = targets.reshape(outputs.shape)
        return ("classes", outputs, targets.argmax(-1)) if is_of_classes else ("labels", outputs, targets)
    if targets.dim() == outputs.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if targets.dim() == outputs.dim() - 1:
        is_last = outputs.shape[:-1] == targets.shape
        is_second = outputs.shape[:1] + outputs.shape[2:] == targets.shape
        if is_second and (is_of_classes or not is_last):
            outputs = outputs.movedim(1, -1)
        if is_second or is_last:
            return "classes", outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    raise _mismatch(name, outputs, targets)


def _mismatch(name: str, outputs: Any, targets: Any) -> DataError:
    return DataError(
        f"{name} cannot be computed from outputs of shape {tuple(outputs.shape)} and targets of shape "
        f"{tuple(targets.shape)}. Pass metrics={{{name!r}: function(outputs, targets)}} for others."
    )


def _loss_name(loss_func: Any) -> str:
    loss_func = loss_func.func if isinstance(loss_func, functools.partial) else loss_func
    return str(getattr(loss_func, "__name__", type(loss_func).__name__))


def _tensor(outputs: Any, name: str | None = None) -> Any:
    """Return the logits of a mapping; for a metric with a name a tensor is needed, the first of a tuple."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    if name is not None and isinstance(outputs, (list, tuple)) and len(outputs):
        return outputs[0]
    if name is not None and not hasattr(outputs, "detach"):
        held = f" with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise DataError(
            f"{name} needs a tensor of outputs, or a mapping with logits; got a {type(outputs).__name__}{held}"
        )
    return outputs


def _parts(metric: Any) -> list[Any]:
    """Return the metrics of torchmetrics' MetricCollection, or the metric itself."""
    return list(metric.values()) if hasattr(metric, "add_metrics") else [metric]


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _mapped(each, function) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, function) for each in value]
    return function(value) if hasattr(value, "detach") else value


def _joined(batches: list[Any]) -> Any:
    """Concatenate the tensors of batches."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [_joined(list(column)) for column in zip(*batches, strict=True)]
    if not hasattr(first, "detach"):
        return batches
    from torch import cat

    try:
        return cat([each.reshape(1) if each.dim() == 0 else each for each in batches])
    except RuntimeError:  # of sequences of different lengths: a list with one entry per sample
        return [row for batch in batches for row in batch]


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """Return a result as floats: several for an array, such as one per class, and for a mapping."""
    if isinstance(value, Mapping):
        return {key: number for part, each in value.items() for key, number in _numbers(f"{name}_{part}", each).items()}
    listed = value.tolist() if hasattr(value, "tolist") else value
    try:
        if isinstance(listed, (list, tuple)):
            return {f"{name}_{index}": float(each) for index, each in enumerate(listed)}
        return {name: float(listed)}
    except (TypeError, ValueError) as error:
        text = f"metrics[{name!r}] must return a number, or a list or a dict of numbers, got {value!r:.80}"
        raise ConfigTypeError(text) from error


def _called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the user's metric; an error gets the metric's name."""
    try:
        return function(*args)
    except (LoopwrightError, StopTrainingError):
        raise
    except Exception as error:
        raise DataError(f"metrics[{name!r}] failed: {type(error).__name__}: {error}") from error
