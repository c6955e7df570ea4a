"""Hyperparameter search: the same trials as transformers, each a run of its own, exact after a kill."""

import contextlib
import functools
import math
import os
import signal
import sys

import pytest

from distributed.launcher import exit_code
from hf.tiny import Classifier, assert_refused, folders, made, on, rows
from loopwright import hf
from loopwright.errors import ConfigError, Preempted
from loopwright.hf import BestRun, TrainerState

optuna = pytest.importorskip("optuna")

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {**EVALUATED, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}


def model_of(trial):
    return Classifier(dropout=0.1 if trial is None else trial.suggest_float("dropout", 0.0, 0.5))


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 3),
        "seed": trial.suggest_int("seed", 1, 9),
    }


def searcher(folder, *callbacks, **options):
    given = {"model_init": model_of, "eval_dataset": rows(8, seed=1), **EVALUATED, **options}
    return made(folder, *callbacks, **given)


def in_memory():
    return {"storage": optuna.storages.InMemoryStorage(), "study_name": "s"}


def results(study):
    found = optuna.load_study(study_name=study["study_name"], storage=study["storage"]).trials
    return [(each.number, each.state.name, each.values, each.params, each.intermediate_values) for each in found]


def test_trials_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")

    def trial_values(trial):
        rate = trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)
        return {"learning_rate": rate, "max_steps": trial.suggest_int("max_steps", 2, 8)}

    def search(module, folder, **options):
        # One batch holds all rows, so that the order of the data does not matter.
        each = {"per_device_train_batch_size": 20, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        args = module.TrainingArguments(str(folder), **each, **EVALUATED)
        data = {"train_dataset": rows(20), "eval_dataset": rows(8, seed=1)}
        trainer = module.Trainer(args=args, model_init=lambda: Classifier(), **data)
        sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=2)
        return trainer.hyperparameter_search(trial_values, n_trials=5, sampler=sampler, **options)

    ours, theirs = search(hf, tmp_path / "a"), search(transformers, tmp_path / "b")
    assert isinstance(ours, BestRun) and (ours.run_id, ours.run_summary) == (theirs.run_id, None)
    assert ours.objective == pytest.approx(theirs.objective, rel=1e-6)
    assert ours.hyperparameters == pytest.approx(theirs.hyperparameters, rel=1e-6)
    two = {"compute_objective": lambda metrics: [metrics["eval_loss"], -metrics["eval_loss"]]}
    pareto = search(hf, tmp_path / "c", direction=["minimize", "maximize"], **two)
    assert pareto and all(run.objective[0] == -run.objective[1] for run in pareto)


def test_a_trial_is_a_run_with_its_values_and_folder(tmp_path):
    seen = []

    def note(args, state, control, **kwargs):
        seen.append((args.learning_rate, args.num_train_epochs, state.trial_name, state.trial_params["seed"]))

    trainer = searcher(tmp_path, on(train_begin=note), **SAVED)
    before = trainer.args.to_dict()
    study = in_memory()
    best = trainer.hyperparameter_search(space, n_trials=2, hp_name=lambda trial: f"number-{trial.number}", **study)
    trials = optuna.load_study(**study).trials
    params = [each.params for each in trials]
    for number, (each, row) in enumerate(zip(params, seen, strict=True)):
        assert row == (each["learning_rate"], float(each["num_train_epochs"]), f"number-{number}", each["seed"])
    assert trainer.args.to_dict() == before and trainer.hp_search_backend is None
    assert best.hyperparameters == params[int(best.run_id)] and best.objective == trials[int(best.run_id)].value
    last = folders(tmp_path / "number-1")[-1]
    state = TrainerState.load_from_json(tmp_path / "number-1" / last / "trainer_state.json")
    assert state.is_hyper_param_search and state.trial_params == params[1]
    assert not list(tmp_path.glob("checkpoint-*"))
    # A single run repeats the trial.
    again = searcher(tmp_path / "again", model_init=lambda: Classifier(dropout=params[1]["dropout"]))
    values = {name: params[1][name] for name in ("learning_rate", "num_train_epochs", "seed")}
    again.train(trial={**values, "seed": str(values["seed"])})
    evaluated = [entry["eval_loss"] for entry in again.state.log_history if "eval_loss" in entry]
    assert evaluated[-1] == trials[1].value and again.args.seed == 42


def journal(folder):
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "journal")))


def search_in(folder, event, step):
    """Search, and kill this process at an event of the third trial, from a step on; 0 is never."""

    def kill(args, state, control, **kwargs):
        if state.trial_name == "t2" and state.global_step >= step > 0:
            os._exit(9)

    trainer = searcher(folder, on(**{event: kill}), **SAVED)
    sampler = optuna.samplers.TPESampler(seed=3, n_startup_trials=2) if event == "step_end" else None
    study = {"study_name": "s", "storage": journal(folder), "load_if_exists": True, "sampler": sampler}
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    search = functools.partial(trainer.hyperparameter_search, hp_name=lambda trial: f"t{trial.number}", pruner=pruner)
    with open(folder / "said", "w") as said, contextlib.redirect_stdout(said):
        print(search(space, n_trials=5, **study))


def start(folder, event, step):
    """Search in a process; return its exit code."""
    folder.mkdir(exist_ok=True)
    return exit_code(search_in, folder, event, step, seconds=100)


# Killed within the third trial, or after its last checkpoint but before its result is stored.
@pytest.mark.slow
@pytest.mark.parametrize("event", ["step_end", "train_end"])
def test_a_killed_search_continues_exactly(tmp_path, event):
    def stored(name):
        return results({"study_name": "s", "storage": journal(tmp_path / name)})

    assert start(tmp_path / "whole", event, 0) == 0
    assert start(tmp_path / "killed", event, 5) == 9
    assert [each[1] for each in stored("killed")] == ["COMPLETE", "COMPLETE", "RUNNING"]
    assert start(tmp_path / "killed", event, 0) == 0
    whole, continued = ((tmp_path / name / "said").read_text() for name in ("whole", "killed"))
    assert "Resumed training state" in continued
    assert "Trial 1:" not in continued and "Trial 4:" in continued
    assert continued.splitlines()[-1] == whole.splitlines()[-1]
    assert stored("killed") == stored("whole")


def test_a_pruned_trial_ends_in_order_and_a_diverged_one_fails(tmp_path, capsys):
    rates, study = iter([1e-2, 1e2, 1e38, 1e-2]), in_memory()
    trainer, pruner = searcher(tmp_path, max_steps=6, **SAVED), optuna.pruners.ThresholdPruner(upper=5.0)
    search = functools.partial(trainer.hyperparameter_search, n_trials=4, pruner=pruner, **study)
    assert search(lambda trial: {"learning_rate": next(rates)}).run_id in "03"
    found = results(study)
    assert [each[1] for each in found] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert list(found[1][-1]) == [2]
    assert '"state": "done"' in (tmp_path / "run-1" / "status.json").read_text()
    assert "Trial 2: fail, objective nan" in capsys.readouterr().out


def test_a_signal_ends_the_search_and_the_same_call_continues_it(tmp_path):
    signals = iter([signal.SIGTERM])

    def stop(args, state, control, **kwargs):
        if state.global_step == 2:
            for number in signals:
                os.kill(os.getpid(), number)

    study, other = in_memory(), in_memory()
    call = {"n_trials": 2, "catch": (Exception,), "load_if_exists": True, **study}
    trainer = searcher(tmp_path, on(step_end=stop), **SAVED)
    with pytest.raises(Preempted):
        trainer.hyperparameter_search(space, **call)
    assert trainer.args.learning_rate == 1e-2
    trainer.hyperparameter_search(space, **call)
    searcher(tmp_path / "other", **SAVED).hyperparameter_search(space, n_trials=2, **other)
    assert results(study) == results(other)


def test_errors_come_before_the_first_trial(tmp_path, monkeypatch):
    trainer = searcher(tmp_path)
    search = trainer.hyperparameter_search
    for backend in ("ray", "wandb", "sigopt"):
        assert_refused(f"backend='{backend}' is not supported: use backend=\"optuna\"", search, backend=backend)
    assert_refused("pass model_init", made(tmp_path, eval_dataset=rows(4)).hyperparameter_search)
    assert_refused("pass eval_dataset", made(tmp_path, model_init=Classifier).hyperparameter_search)
    assert_refused("n_jobs must be 1", search, n_jobs=2)
    assert_refused("needs storage and study_name", search, load_if_exists=True)
    with pytest.raises(ConfigError, match="not a training argument.* did you mean learning_rate") as raised:
        search(lambda trial: {"learning_rat": 1e-3})
    assert raised.value.flag == "learning_rat" and trainer.state.global_step == 0
    assert_refused("expected a whole number", trainer.train, trial={"seed": 0.5})
    assert_refused("no trial of the search", search, space, lambda metrics: math.nan, n_trials=1)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert_refused("in a single process", search)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert_refused("pip install optuna", search)
