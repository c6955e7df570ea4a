"""Methods of `hf.Trainer` for a hyperparameter search with optuna: each trial is a run that can be resumed."""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loopwright.checkpoint import store
from loopwright.config.conversion import convert_named, field_types
from loopwright.errors import ConfigError, Preempted, nearest
from loopwright.progress import StopKind
from loopwright.run_folder import LeaseError
from loopwright.training.run import run_of

if TYPE_CHECKING:
    from loopwright.hf.trainer import Trainer

UNSET: Any = None  # before the first search
_SAMPLER, _PRUNED = "loopwright:sampler", "loopwright:pruned"  # user attributes of a study and of a trial


class BestRun(NamedTuple):
    """The number, the objective (or a list of them) and the values of the best trial of a search."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Return the values of transformers' default ranges."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def default_compute_objective(metrics: Mapping[str, Any]) -> Any:
    """Return the sum of all metrics but the loss, or the loss if there are no others."""
    others = {name: value for name, value in metrics.items() if not name.endswith(("_runtime", "_per_second"))}
    loss, _ = others.pop("eval_loss", None), others.pop("epoch", None)
    return sum(others.values()) if others else loss


def hyperparameter_search(
    trainer: Trainer,
    hp_space: Callable[[Any], Mapping[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], Any] | None = None,
    n_trials: int | None = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Search for the best arguments with optuna; each trial is a run in `output_dir/run-<number>`.

    With `storage`, `study_name` and `load_if_exists=True`, the same call continues an interrupted search.

    Args:
        hp_space: returns values of arguments by name, drawn from a trial; set during the trial only.
        compute_objective: returns the objective from the metrics of an evaluation; a trial's last one counts.
        n_trials: total number of trials, including those that the study already has; None for no limit.
        direction: "minimize" or "maximize", or a list with one per objective, which returns all Pareto-optimal runs.
        hp_name: returns the name of a trial's folder.
        kwargs: `timeout` and `catch` of optuna's `optimize`; others are for its `create_study`.
    """
    optuna = _checked(trainer, backend, kwargs)
    trainer.hp_space, trainer.hp_name = hp_space or default_hp_space, hp_name
    trainer.compute_objective = compute_objective or default_compute_objective
    timeout, catch, _ = (kwargs.pop(name, None) for name in ("timeout", "catch", "gc_after_trial"))
    catch = catch if isinstance(catch, type) else tuple(catch or ())
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    study, interrupted = _open_study(optuna, trainer, direction, kwargs)
    started = [state for state in optuna.trial.TrialState if state.name != "WAITING"]
    trainer.hp_search_backend = "optuna"
    try:
        while time.monotonic() < deadline:
            is_new = not interrupted
            if is_new and n_trials is not None and len(study.get_trials(False, started)) >= n_trials:
                break
            _run_trial(optuna, trainer, study.ask() if is_new else interrupted.pop(0), not is_new, catch)
            trainer.accelerator.clear()  # or it keeps the model; it also collects garbage
    finally:
        trainer.hp_search_backend = None
    if len(study.directions) > 1:
        return [BestRun(str(each.number), each.values, each.params) for each in study.best_trials]
    if not study.get_trials(False, [optuna.trial.TrialState.COMPLETE]):
        raise ConfigError("no trial of the search has an objective: all were pruned or failed, for the reasons printed")
    return BestRun(str(study.best_trial.number), study.best_value, study.best_params)


def _checked(trainer: Trainer, backend: Any, options: dict[str, Any]) -> Any:
    """Return the module optuna, if a search can start."""
    name = getattr(backend, "value", backend) or "optuna"
    if name != "optuna":
        raise ConfigError(f'hyperparameter_search with backend={name!r} is not supported: use backend="optuna"')
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError("hyperparameter_search needs the package optuna: pip install optuna") from error
    if trainer.model_init is None:
        raise ConfigError("hyperparameter_search needs a new model for each trial: pass model_init instead of model")
    if trainer.eval_dataset is None and all(map(trainer.uses_default, ("evaluate", "get_eval_dataloader"))):
        raise ConfigError("the objective of a search is computed from an evaluation: pass eval_dataset to the Trainer")
    if options.pop("n_jobs", 1) != 1:
        raise ConfigError("n_jobs must be 1: all trials use this trainer, so they run one after another")
    if trainer.args.world_size > 1:
        raise ConfigError("hyperparameter_search runs in a single process: start the script without torchrun")
    if options.get("load_if_exists") and None in (options.get("storage"), options.get("study_name")):
        raise ConfigError("load_if_exists=True needs storage and study_name, to find the search to continue")
    return optuna


def _open_study(optuna: Any, trainer: Trainer, direction: Any, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the study and its interrupted trials; its sampler continues where it was."""
    is_single = isinstance(direction, str)
    if options.get("sampler") is None:
        kind = optuna.samplers.TPESampler if is_single else optuna.samplers.NSGAIISampler
        options["sampler"] = kind(seed=trainer.args.seed)
    storage = optuna.storages.get_storage(options.pop("storage", None))
    study = optuna.create_study(storage=storage, **options, **{"direction" if is_single else "directions": direction})
    place = storage.get_study_id_from_name(study.study_name)
    numbers = [each.number for each in study.get_trials(False, [optuna.trial.TrialState.RUNNING])]
    ids = [storage.get_trial_id_from_study_id_trial_number(place, number) for number in numbers]
    interrupted = [optuna.Trial(study, each) for each in ids]
    for generator, state in zip(_generators(study.sampler), study.user_attrs.get(_SAMPLER, []), strict=False):
        generator.set_state(tuple(state))
    return study, interrupted


def _generators(part: Any) -> list[np.random.RandomState]:
    """Return the random generators of a sampler, whose state optuna does not store."""
    if isinstance(part, np.random.RandomState):
        return [part]
    parts = getattr(part, "__dict__", {}).values() if type(part).__module__.startswith("optuna.samplers") else ()
    return [generator for each in parts for generator in _generators(each)]


def _run_trial(optuna: Any, trainer: Trainer, trial: Any, resumes: bool, catch: Any) -> None:
    """Run a trial and store its result; if an error ends the search, the next call continues the trial."""
    states, problem, trainer.objective = optuna.trial.TrialState, "", None
    try:
        if trial.user_attrs.get(_PRUNED):
            raise optuna.TrialPruned
        resumes = resumes and store.has_checkpoints(trainer._get_output_dir(trial))
        trainer.train(resume_from_checkpoint=resumes, trial=trial)
        kind = getattr(run_of(trainer.core).stop_reason, "kind", None)
        if kind is StopKind.FILE:
            raise Preempted(f"the search was stopped in trial {trial.number}; the same call continues it")
        if kind is StopKind.NOT_FINITE:
            trainer.objective = math.nan
        elif trainer.objective is None:
            trainer.objective = trainer.compute_objective(trainer.evaluate())
        is_nan = bool(np.any(np.asarray(trainer.objective) != np.asarray(trainer.objective)))
        state = states.FAIL if is_nan else states.COMPLETE
    except optuna.TrialPruned:
        state = states.PRUNED
    except Exception as error:
        if isinstance(error, (Preempted, LeaseError)) or not isinstance(error, catch):
            raise
        state, problem = states.FAIL, f" ({type(error).__name__}: {error})"
    trial.study.tell(trial, trainer.objective if state is states.COMPLETE else None, state)
    text = f"Trial {trial.number}: {state.name.lower()}{problem}, objective {trainer.objective}, {trial.params}"
    trainer.core.notify("search.trial", text, number=trial.number, state=state.name, objective=trainer.objective)


@contextmanager
def applied(trainer: Trainer, trial: Any) -> Iterator[None]:
    """Run a block with a trial's values on the arguments; afterwards raise optuna's TrialPruned if it was pruned."""
    args, before = trainer.args, dict(vars(trainer.args))
    try:
        trainer._hp_search_setup(trial)
        yield
    finally:
        if trial is not None:
            trainer.args = args
            vars(args).clear()
            vars(args).update(before)
    if getattr(trial, "user_attrs", {}).get(_PRUNED):
        raise importlib.import_module("optuna").TrialPruned


def set_up(trainer: Trainer, trial: Any) -> None:
    """Set the values of a trial, or of a dict, on the arguments; called by `train`, which restores them."""
    args, is_dict = trainer.args, isinstance(trial, Mapping)
    if trial is None or (trainer.hp_search_backend is None and not is_dict):
        return
    values = trial if is_dict else trainer.hp_space(trial)
    kinds, known = field_types(type(args)), {*vars(args), *type(args).old_names()}
    for name, value in values.items():
        if name not in known:
            what = f"{name!r} is not a training argument (for a value of the model, call trial.suggest_* in model_init)"
            raise ConfigError(what, flag=name, nearest=nearest(name, known))
        setattr(args, name, convert_named(name, value, kinds[name]) if name in kinds else value)
    args.validate()


def output_dir(trainer: Trainer, trial: Any) -> str:
    """Return the folder of a run: `output_dir`, or in a search the trial's folder in it."""
    folder, number = str(trainer.args.output_dir), getattr(trial, "number", None)
    if trainer.hp_search_backend is None or number is None:
        return folder
    return os.path.join(folder, f"run-{number}" if trainer.hp_name is None else trainer.hp_name(trial))


def begun(trainer: Trainer, trial: Any) -> dict[str, Any]:
    """Return a trial's fields of the state, and store the sampler's state: by now all values are drawn."""
    if trial is None:
        return {}
    if trainer.hp_search_backend is not None and hasattr(trial, "study"):
        states: list[Any] = [generator.get_state() for generator in _generators(trial.study.sampler)]
        trial.study.set_user_attr(_SAMPLER, [[kind, keys.tolist(), *rest] for kind, keys, *rest in states])
    name = None if trainer.hp_name is None else trainer.hp_name(trial)
    params = dict(getattr(trial, "params", trial))
    return {"is_hyper_param_search": True, "trial_name": name, "trial_params": params}


def report(trainer: Trainer, trial: Any, step: int, metrics: dict[str, float]) -> None:
    """Report an evaluation to the search, and end the run if optuna prunes the trial; called after each evaluation."""
    if trainer.hp_search_backend is None or trial is None:
        return
    trainer.objective, study = trainer.compute_objective(dict(metrics)), getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return
    if step in study.get_trials(False)[trial.number].intermediate_values:
        return  # reported before an interruption, and not pruned
    trial.report(trainer.objective, step)
    if trial.should_prune():
        trial.set_user_attr(_PRUNED, True)
        trainer.control.should_training_stop = True
