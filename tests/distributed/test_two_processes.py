"""Two real processes (gloo, CPU) train, evaluate, predict, save and stop as one process would.

Two launches serve all tests: "measure", and "resume", which goes on in new processes from what the first one saved.
"""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassF1Score

import toys
from distributed.launcher import Rank, Results, run
from loopwright import Trainer
from loopwright.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from loopwright.errors import DataError
from toys import Augmented

pytestmark = pytest.mark.distributed

SEED = 3

# name: (samples, accumulation on two processes). Micro-batches of 2, windows of 2 or 4 over both processes.
RUNS = {
    "short last sample": (23, 1),  # twelve micro-batches: the last holds one sample
    "lonely last window": (17, 1),  # nine: the second process has nothing to do in the last window
    "accumulation": (23, 2),
    "accumulation with a lonely tail": (17, 2),  # two full windows of four, and one with a single micro-batch
    "less than a window": (3, 2),
}
RESUMED_RUN = "accumulation with a lonely tail"
EVAL_SAMPLES = 9
PREDICT_SAMPLES = (1, 9, 16)
TOLERANCE = 1e-6


# What is trained


class Witness(TrainerCallback):
    """Notes which samples each update saw here, and every log."""

    def __init__(self):
        self.ids, self.logs = [], []

    def on_train_step_end(self, trainer, batch=None, **kwargs):
        if trainer.current_rows != 0:  # else a pad, run to keep step with the other process
            self.ids.append((trainer.progress.update + 1, batch[2].tolist()))

    def on_log(self, trainer, logs=None, **kwargs):
        self.logs.append(logs)


def fit(num_samples: int, accumulation: int, folder: Path, callbacks=(), seed: int | None = SEED, **kwargs) -> dict:
    """Two epochs with dropout, noise, clipping, evaluation and a moving average; return what came of it."""
    witness = Witness()
    ema = ModelEmaCallback(decay=0.8, save_path=folder / "ema.pt")
    early_stopping = EarlyStoppingCallback(100, early_stopping_threshold=100.0)
    model = toys.network(6, dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    often = {"eval_dataset": Augmented(EVAL_SAMPLES), "log_every": 2, "evaluate_every": 2}
    windows = {"per_device_batch_size": 2, "gradient_accumulation_steps": accumulation, "gradient_clip_norm": 0.5}
    kwargs = {"model": model, "optimizer": optimizer, "cls": Trainer, "seed": seed, **often, **windows, **kwargs}
    trainer = toys.trained([witness, ema, early_stopping, *callbacks], Augmented(num_samples), 2, **kwargs)
    history = trainer.run_history
    return {
        "updates": trainer.result.updates,
        "seed": trainer.result.seed,
        "weights": toys.weights(trainer).tolist(),
        "ema": toys.weights(ema.ema_model.module).tolist(),
        "moments": [trainer.optimizer.state[p]["exp_avg_sq"].reshape(-1).tolist() for p in model.parameters()],
        "patience": early_stopping.early_stopping_patience_counter,
        "history": {name: list(history.get_metric_values(name)) for name in sorted(history.get_metric_names())},
        "logs": witness.logs,
        "ids": witness.ids,
    }


# The tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("two_processes")


@pytest.fixture(scope="module")
def measured(folder) -> list[Rank]:
    return run(measure, folder)


@pytest.fixture(scope="module")
def resumed(folder, measured) -> list[Rank]:
    return run(resume, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda name: fit(RUNS[name][0], 2 * RUNS[name][1], folder))


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_and_report_losses_as_one_with_twice_the_accumulation(name, measured, alone):
    alone = alone(name)
    first, second = (rank[name] for rank in measured)
    assert first["updates"] == second["updates"] == alone["updates"]
    for quantity in ("weights", "ema"):
        assert first[quantity] == second[quantity], "the processes went apart"
        assert first[quantity] == pytest.approx(alone[quantity], rel=1e-5, abs=TOLERANCE)
    for found, expected in zip(first["moments"], alone["moments"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=TOLERANCE)
    assert first["history"] == second["history"]
    assert first["logs"] == second["logs"]
    assert set(first["history"]) == set(alone["history"])
    for metric, values in alone["history"].items():
        assert first["history"][metric] == pytest.approx(values, rel=1e-5), metric
    assert len(first["logs"]) == len(alone["logs"])
    for found, expected in zip(first["logs"], alone["logs"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_each_update_sees_the_same_samples_on_one_process_or_two(name, measured, alone):
    def by_update(*ids):
        samples = {}
        for entries in ids:
            for update, batch in entries:
                samples.setdefault(update, []).extend(batch)
        return samples

    # In order: the first process has the first micro-batches of each window.
    assert by_update(*(rank[name]["ids"] for rank in measured)) == by_update(alone(name)["ids"])
    seen = [sample for rank in measured for _, batch in rank[name]["ids"] for sample in batch]
    assert sorted(seen) == sorted(list(range(RUNS[name][0])) * 2)


@pytest.mark.parametrize("num_samples", PREDICT_SAMPLES)
def test_predictions_come_once_per_sample_and_in_order_on_both_processes(num_samples, measured):
    model = toys.network(6).eval()
    with torch.no_grad():
        expected = model(toys.data(num_samples).tensors[0]).flatten().tolist()
    for rank in measured:
        found = rank[f"predict {num_samples}"]
        assert found["outputs"] == pytest.approx(expected, rel=1e-5, abs=TOLERANCE)
        assert found["ids"] == list(range(num_samples))
        assert found["num_samples"] == num_samples


def test_an_evaluation_run_gives_the_loss_of_one_process_whatever_the_number_of_samples(measured):
    for num_samples in PREDICT_SAMPLES:
        trainer = toys.trainer_of(model=toys.network(6), cls=Trainer)
        alone = trainer.evaluate(toys.data(num_samples), 2, {"num_workers": 0}).metrics["evaluation_loss"]
        for rank in measured:
            assert rank[f"evaluate {num_samples}"] == pytest.approx(alone, rel=1e-6)


def test_rows_are_gathered_in_the_order_of_the_processes_however_uneven(measured):
    for rank in measured:
        assert rank["gather"] == {
            "uneven": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [100.0, 101.0]],
            "none on one": [7, 8],
            "scalars": [0, 1],
            "flags": [True, False, True, False],
            "nested": {"pair": [[1, 1, 1, 2], [[1], [1], [1], [2]]]},
            "padded": [[1, 1, -1], [2, 2, 2]],
            "refused": "DataError",
        }


def test_only_the_first_process_writes_also_a_state_that_another_one_asks_for(measured):
    first, second = (rank["files"] for rank in measured)
    assert second == []
    of_state = ("MANIFEST.json", "model.safetensors", "state.json", "state.safetensors")
    states = [f"states/{state}/{name}" for state in ("epoch_1", "final") for name in of_state]
    assert first == sorted([*states, "best.pt", "plain.pt", "plain.safetensors"])
    for rank in measured:
        assert rank["asked by one"] == {"exists": True, "saved_events": 1}


@pytest.mark.parametrize("update", [1, 2, 3, 4, 5, 6])
def test_a_state_of_two_processes_resumes_on_two_processes_bit_by_bit(update, measured, resumed):
    # Three updates per epoch: 3 is the last of the first one, 6 the last of all.
    for whole, again in zip(measured, resumed, strict=True):
        expected, found = whole[RESUMED_RUN], again[f"resumed at {update}"]
        for quantity in ("updates", "seed", "weights", "ema", "moments", "patience", "history"):
            assert found[quantity] == expected[quantity], quantity
        for quantity in ("logs", "ids"):
            assert found[quantity] == expected[quantity][len(expected[quantity]) - len(found[quantity]) :], quantity
        assert all(number > update for number, _ in found["ids"])


def test_a_state_of_two_processes_continues_in_one(measured, folder, tmp_path):
    """With twice the accumulation the windows are the same, so the numbers are too, up to rounding."""
    num_samples, accumulation = RUNS[RESUMED_RUN]
    expected = measured[0][RESUMED_RUN]
    for update in (2, 4):
        state = folder / "states" / f"update_{update}"
        found = fit(num_samples, 2 * accumulation, tmp_path, seed=None, resume_from=state)
        assert found["seed"] == SEED
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=TOLERANCE)
        for metric, values in expected["history"].items():
            assert found["history"][metric] == pytest.approx(values, rel=1e-5), metric


@pytest.mark.parametrize("way", ["error in a callback", "request", "nan", "error in an evaluation"])
def test_a_stop_on_one_process_ends_both_at_the_same_update(way, resumed):
    first, second = (rank[f"stop by {way}"] for rank in resumed)
    for stop in (first, second):
        assert stop["events"] == ["stop", "end"]
        assert stop["reason"]
    assert first["updates"] == second["updates"] < 20
    assert first["weights"] == second["weights"] or way == "nan"


# What the two processes do


def measure(results: Results) -> None:
    rank, folder = int(os.environ["RANK"]), results.path.parent
    for name, (num_samples, accumulation) in RUNS.items():
        callbacks = [toys.save_at_updates(folder / "states")] if name == RESUMED_RUN else []
        results[name] = fit(num_samples, accumulation, folder, callbacks)
    measure_prediction(results)
    measure_gathering(results, rank)
    measure_writing(results, rank, folder)


def measure_prediction(results: Results) -> None:
    class WithIds(Trainer):
        def calculate_prediction(self, batch):
            return {"outputs": super().calculate_prediction(batch), "ids": batch[2]}

    for num_samples in PREDICT_SAMPLES:
        trainer = toys.trainer_of(model=toys.network(6), cls=WithIds)
        result = trainer.predict(toys.data(num_samples), 2, {"num_workers": 0})
        results[f"predict {num_samples}"] = {
            "outputs": result.outputs["outputs"].flatten().tolist(),
            "ids": result.outputs["ids"].tolist(),
            "num_samples": result.metrics["num_samples"],
        }
        evaluation = trainer.evaluate(toys.data(num_samples), 2, {"num_workers": 0})
        results[f"evaluate {num_samples}"] = evaluation.metrics["evaluation_loss"]


def measure_gathering(results: Results, rank: int) -> None:
    trainer = toys.trainer_of(cls=Trainer)
    rows = torch.arange(6.0).reshape(3, 2) if rank == 0 else torch.tensor([[100.0, 101.0]])
    ones = torch.full((3 if rank == 0 else 1,), rank + 1)
    gathered = {
        "uneven": trainer.gather(rows).tolist(),
        "none on one": trainer.gather(torch.tensor([7, 8] if rank == 0 else [], dtype=torch.int64)).tolist(),
        "scalars": trainer.gather(torch.tensor(rank)).tolist(),
        "flags": trainer.gather(torch.tensor([True, False])).tolist(),
        "nested": {"pair": [part.tolist() for part in trainer.gather({"pair": (ones, ones[:, None])})["pair"]]},
        "padded": trainer.gather(torch.full((1, 2 + rank), rank + 1), padding_value=-1).tolist(),
    }
    try:
        trainer.gather(torch.zeros(1, 2 + rank))
        gathered["refused"] = "not"
    except DataError as error:
        gathered["refused"] = type(error).__name__
    results["gather"] = gathered


def measure_writing(results: Results, rank: int, folder: Path) -> None:
    """Each process in a folder of its own, with relative paths: what it writes stays there."""
    here = folder / f"rank{rank}"
    here.mkdir()
    os.chdir(here)
    best = SaveBestModelCallback("best.pt", load_saved_checkpoint=False)
    callbacks = [best, SaveTrainingStateCallback("states", save_every_n_epochs=1)]
    trainer = toys.trained(callbacks, toys.data(9), cls=Trainer, eval_dataset=toys.data(5))
    trainer.save_checkpoint("plain.pt", save_per_node=False)
    trainer.save_checkpoint("plain.safetensors")
    results["files"] = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())

    asking = toys.at_update(1, lambda trainer: rank == 1 and trainer.request_save(folder / "asked_by_one"))
    watch = toys.watch(on_checkpoint_saved=lambda trainer, **kwargs: "saved")
    toys.trained([asking, watch], cls=Trainer)
    exists = (folder / "asked_by_one" / "MANIFEST.json").exists()
    results["asked by one"] = {"exists": exists, "saved_events": len(watch.seen)}


def resume(results: Results) -> None:
    rank, folder = int(os.environ["RANK"]), results.path.parent
    num_samples, accumulation = RUNS[RESUMED_RUN]
    for update in range(1, 7):
        state = folder / "states" / f"update_{update}"
        # The processes even disagree about the seed: it comes from the state.
        results[f"resumed at {update}"] = fit(num_samples, accumulation, folder, seed=100 + rank, resume_from=state)
    measure_stops(results, rank)


def measure_stops(results: Results, rank: int) -> None:
    def raise_on_one(trainer, **kwargs):
        if rank == 1 and trainer.progress.update == 3:
            raise StopTrainingError("process 1 has had enough")

    x, y, ids = toys.data(40).tensors
    # In this order the second process has samples 2, 3, 6, 7, ..: sample 14 is in its fourth micro-batch.
    poisoned = TensorDataset(x, torch.where(ids.unsqueeze(1) == 14, torch.nan, y), ids)
    ways = {
        "error in a callback": (toys.callback(on_train_step_end=raise_on_one), toys.data(40)),
        "request": (toys.stop_at(3 if rank == 0 else None), toys.data(40)),
        "nan": (TerminateOnNaNCallback(), poisoned),
        "error in an evaluation": (toys.callback(on_eval_step_end=raise_on_one), toys.data(40)),
    }
    options = {"per_device_batch_size": 2, "train_dataloader_kwargs": {"shuffle": False}, "lr": 0.001, "cls": Trainer}
    often = {"eval_dataset": toys.data(4), "evaluate_every": 1, "log_every": 5}
    for way, (stopper, dataset) in ways.items():
        watch = toys.watch(
            on_stop_training_error=lambda trainer, **kwargs: "stop", on_training_run_end=lambda trainer, **kwargs: "end"
        )
        trainer = toys.trained([stopper, watch], dataset, num_epochs=2, **options, **often)
        results[f"stop by {way}"] = {
            "events": watch.seen,
            "reason": trainer.result.stop_reason,
            "updates": trainer.result.updates,
            "weights": toys.weights(trainer).tolist(),
        }


# Metrics of the trainer


def metric_history(folder: Path, **options):
    data = toys.labelled(17)
    model = toys.seeded(torch.nn.Linear, 4, 3)
    given = {"accuracy": "accuracy", "f1": "f1", "own": lambda outputs, targets: (outputs.argmax(1) == targets).sum()}
    given["tm"] = MulticlassF1Score(3)
    loss, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=2, save_at_end=False)
    trainer = Trainer(model, loss, optimizer, [saver], metrics=given)
    evaluation = toys.labelled(EVAL_SAMPLES, seed=1)
    trainer.train(data, 2, evaluation, 2, seed=SEED, train_dataloader_kwargs=toys.NO_WORKERS, **options)
    return {name: list(trainer.run_history.get_metric_values(name)) for name in trainer.run_history.get_metric_names()}


def measure_metrics(results: Results) -> None:
    folder = Path(os.environ["METRICS_FOLDER"])
    results["whole"] = metric_history(folder)
    results["resumed"] = metric_history(folder / "again", resume_from=folder / "step_2")


def test_metrics_of_two_processes_are_those_of_one_also_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("METRICS_FOLDER", str(tmp_path / "two"))
    first, second = run(measure_metrics, tmp_path)
    assert first["whole"] == second["whole"] == first["resumed"]
    alone = metric_history(tmp_path / "one", gradient_accumulation_steps=2)
    assert first["whole"].keys() == alone.keys() and len(alone) == 10
    for name, values in alone.items():
        assert first["whole"][name] == pytest.approx(values, abs=1e-6), name
