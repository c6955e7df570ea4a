"""Experiment trackers (TensorBoard, trackio, wandb and others) behind accelerate's classes for them.

A tracker is a guest: its errors are reported, and the run continues. Only trackers that were asked for by name are
imported and opened.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from loopwright.errors import ConfigError, nearest

# By name: the packages of which one must be installed; the first is the one to suggest.
PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    **{name: (name,) for name in ("trackio", "wandb", "swanlab", "mlflow", "aim", "comet_ml", "clearml", "dvclive")},
}
_PRINTS: Final = frozenset({"trackio"})  # `where_to_look` replaces the output of these at start and end by one line
_MOST_LETTERS: Final = 300  # of a tracker's error
_MOST_FAILURES: Final = 3  # in a row: each may have cost the run a timeout


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it when they are opened."""

    project: str
    name: str
    folder: Path  # for the files of trackers that accept a folder
    id: str  # of the run, the same when it is resumed
    config: Mapping[str, Any]  # its settings; numbers, strings, booleans and None
    is_resumed: bool = False  # whether the trackers know this run already
    replaces: bool = False  # whether this run replaces another one in the folder
    identities: Mapping[str, str] = field(default_factory=dict)  # the results of `Trackers.start` for this run so far


def resolve_trackers(report_to: str | Iterable[str] | None) -> list[str]:
    """Return the requested trackers, each once: "all" means every installed one, "none" or nothing means none."""
    named = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if named in ([], ["none"]):
        return []
    for name in named:
        if name == "all":
            continue
        if name == "none":
            raise ConfigError(f"report_to={named}: 'none' cannot be combined with other trackers")
        if name not in PACKAGES:
            near = nearest(str(name), (*PACKAGES, "all"))
            hint = f". Did you mean {near!r}?" if near else ""
            raise ConfigError(f"report_to: there is no tracker {name!r}; there are {', '.join(PACKAGES)}, all{hint}")
        check_installed(name)
    installed = [name for name in PACKAGES if is_installed(name)] if "all" in named else []
    return list(dict.fromkeys([*(name for name in named if name != "all"), *installed]))


def is_installed(name: str) -> bool:
    """Whether a package of this tracker can be imported; a bare folder such as ./wandb does not count."""
    specs = (importlib.util.find_spec(package) for package in PACKAGES[name])
    return any(spec is not None and spec.origin is not None for spec in specs)


def check_installed(name: str) -> None:
    if name in PACKAGES and not is_installed(name):
        package = PACKAGES[name][0]
        raise ConfigError(f"report_to={name!r} needs the package {package}, not installed: pip install {package}")


def plain_config(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings as every tracker accepts them: mappings flattened, numbers unchanged, anything else as text."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            plain |= plain_config(value, f"{prefix}{name}.")
        else:
            is_plain = value is None or type(value) in (bool, int, float, str)
            plain[f"{prefix}{name}"] = value if is_plain else str(value)
    return plain


def where_to_look(name: str, run: TrackedRun) -> str:
    """Return a tracker's name, with the command that shows the run if one works without an account."""
    options = {"tensorboard": f"--logdir {run.folder}", "trackio": f"show --project {run.project}"}
    return f"{name} ({name} {options[name]})" if name in options else name


class Trackers:
    """The trackers of one run; created, started and finished by one process.

    `report` is called with tracker, action and message on the first failure of each pair, and once more when the
    tracker is disabled.
    """

    def __init__(self, names: Iterable[str], report: Callable[[str, str, str], None]) -> None:
        self._names = list(names)
        self._report = report
        self._open: dict[str, Any] = {}
        self._failures: dict[str, int] = {}
        self._reported: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        return list(self._open)

    def start(self, run: TrackedRun) -> dict[str, str]:
        """Open all trackers, and log the run's settings; return some trackers' own ids, needed to resume."""
        identities: dict[str, str] = {}
        for name in self._names:
            given, named = _arguments(name, run)
            if not self._try(name, "start", partial(self._start, name, given, named, identities)):
                if name in self._open:  # it has started, but could not return its id
                    self._finish(name)
            elif "config" not in named and not run.is_resumed:
                self._try(name, "config", partial(self._open[name].store_init_configuration, dict(run.config)))
        return identities

    def log(self, values: Mapping[str, float], update: int) -> None:
        for name, tracker in list(self._open.items()):
            if self._try(name, "log", partial(tracker.log, dict(values), step=update)):
                self._failures[name] = 0
                continue
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] == _MOST_FAILURES:
                self._report(name, "log", f"{name} has failed {_MOST_FAILURES} times in a row and is disabled")
                self._finish(name)

    def finish(self) -> None:
        for name in list(self._open):
            self._finish(name)

    def _start(self, name: str, given: tuple[Any, ...], named: dict[str, Any], identities: dict[str, str]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker = LOGGER_TYPE_TO_CLASS[name](*given, **named)
        if hasattr(tracker, "start"):  # older versions of accelerate start in the constructor
            tracker.start()
        self._open[name] = tracker
        identities |= _identity(name, tracker.tracker)

    def _finish(self, name: str) -> None:
        tracker = self._open.pop(name)
        # accelerate's call leaves a trackio run open, which would end and report it again at process exit.
        end = importlib.import_module("trackio").finish if name == "trackio" else tracker.finish
        self._try(name, "finish", end)

    def _try(self, name: str, what: str, action: Callable[[], Any]) -> bool:
        try:
            is_quiet = name in _PRINTS and what != "log"
            with contextlib.redirect_stdout(io.StringIO()) if is_quiet else contextlib.nullcontext():
                action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run continues
            if (name, what) not in self._reported:
                self._reported.add((name, what))
                text = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())[:_MOST_LETTERS]
                self._report(name, what, f"the tracker {name} failed at {what} ({text}): the run continues")
            return False
        return True


def _arguments(name: str, run: TrackedRun) -> tuple[tuple[Any, ...], dict[str, Any]]:
    known, folder, config = run.identities.get(name), str(run.folder), dict(run.config)
    resume = "allow" if run.is_resumed else "never"
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        # purge_step hides the files of the run that this one replaces.
        "tensorboard": (("tensorboard", folder), {"purge_step": 0} if run.replaces else {}),
        "trackio": ((run.project,), {"name": run.name, "resume": resume, "config": config, "embed": False}),
        "wandb": ((run.project,), {"name": run.name, "id": run.id, "resume": "allow", "dir": folder, "config": config}),
        "swanlab": (
            (run.project,),
            {"experiment_name": run.name, "logdir": str(run.folder / "swanlab"), "config": config},
        ),
        "mlflow": ((run.project,), {"run_name": run.name, "run_id": known}),
        "aim": ((run.name, folder), {"experiment": run.project, "run_hash": known}),
        "comet_ml": ((run.project,), {} if known is None else {"experiment_key": known}),
        "clearml": ((run.name,), {"project_name": run.project, "task_name": run.name}),
        "dvclive": ((run.name,), {"dir": str(run.folder / "dvclive"), "resume": run.is_resumed}),
    }
    return arguments[name]


def _identity(name: str, inner: Any) -> dict[str, str]:
    """Return a tracker's own id of the run, if it needs one to resume; `inner` is the tracker's own object."""
    ids = {"mlflow": lambda: inner.info.run_id, "aim": lambda: inner.hash, "comet_ml": lambda: inner.get_key()}
    return {name: str(ids[name]())} if name in ids else {}
