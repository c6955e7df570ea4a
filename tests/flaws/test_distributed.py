"""Flaws 30 to 34: two real processes, gloo on the CPU. One test per flaw, named after the right behaviour.

Three launches serve the five tests.
"""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from distributed.launcher import Rank, Results, run

from . import subject

NUM_RANKS = 2
ANSWER_SECONDS = 10  # for a process to get as far as its peer

BASE_LR = 0.1
EVAL_BATCH_SIZE = 4
# 3: less than one total batch; 13: an uneven last batch; 9: a last batch with nothing for one process.
EVAL_SIZES = (3, 13, 9)
STOP_AFTER_UPDATES = 5
UPDATES_PER_EPOCH = 2000
DECORATORS = ("world_process_zero_only", "local_process_zero_only", "local_process_zero_first")


# The tests


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[Rank]:
    """One launch for all that can be measured side by side."""
    return launch(measure, tmp_path_factory.mktemp("measure"))


@pytest.mark.distributed
def test_flaw_30_schedulers_reach_their_end_on_two_processes(measured):
    for rank in measured:
        cosine = rank["cosine"]
        assert cosine["updates"] == 16
        assert cosine["first_lr"] == pytest.approx(BASE_LR)
        assert cosine["final_lr"] == pytest.approx(1e-6), "the minimum of the default CosineLrScheduler"

        one_cycle = rank["one_cycle"]
        assert one_cycle["updates"] == 16
        assert one_cycle["highest_lr"] == pytest.approx(BASE_LR, rel=0.05)
        assert one_cycle["last_lr"] == pytest.approx(BASE_LR / 25 / 1e4), "the minimum of OneCycleLR"


@pytest.mark.distributed
def test_flaw_31_evaluation_takes_any_number_of_samples(measured):
    model = subject.network()
    for num_samples in EVAL_SIZES:
        x, y, ids = subject.data(num_samples).tensors
        with torch.no_grad():
            outputs = model(x)
        for rank in measured:
            evaluation = rank[f"evaluate {num_samples}"]
            assert "error" not in evaluation, f"{num_samples} samples: {evaluation['error']}"
            assert evaluation["ids"] == ids.tolist()
            assert evaluation["outputs"] == pytest.approx(outputs.flatten().tolist(), rel=1e-5)
            assert evaluation["loss"] == pytest.approx(nn.functional.mse_loss(outputs, y).item(), rel=1e-5)


@pytest.mark.distributed
def test_flaw_32_a_stop_on_one_process_ends_all_of_them(tmp_path):
    ranks = launch(stop_on_one_rank, tmp_path)
    stops = [rank["stop"] for rank in ranks]
    assert [rank.exit_code for rank in ranks] == [0] * NUM_RANKS
    for stop in stops:
        assert stop["events"] == ["stop", "end"]
        assert STOP_AFTER_UPDATES <= stop["updates"] < UPDATES_PER_EPOCH // 2
        assert stop["seconds"] < 30
    assert stops[0]["updates"] == stops[1]["updates"]
    assert stops[0]["weights"] == stops[1]["weights"]


@pytest.mark.distributed
def test_flaw_33_gather_with_padding_takes_containers_and_keeps_genuine_rows(measured):
    # Process 0 gives three rows, process 1 one; some genuine rows equal the padding value.
    for rank in measured:
        assert rank["gather tensor"] == [[1, 2], [0, 0], [3, 4], [0, 0]]
        assert rank["gather vector"] == [0, 5, 0, 7]
        assert rank["gather nested"] == {
            "scores": [[-1.0, -1.0], [0.5, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
            "pair": [[-1, 5, -1, -1], [[[-1]], [[5]], [[-1]], [[-1]]]],
        }


@pytest.mark.distributed
def test_flaw_34_a_decorated_function_that_raises_on_one_process_raises_on_all(tmp_path):
    main, other = launch(raise_in_decorated, tmp_path)
    for name in DECORATORS:
        assert main[name] == f"ValueError: boom in {name}", f"{name}: the other process waits for ever"
        assert other[name] != "returned"
    # The processes are still in step.
    assert main["healthy"] == ["rank 0"] * 3
    assert other["healthy"] == [None, None, "rank 1"]


def launch(function, folder: Path) -> list[Rank]:
    return run(function, folder, NUM_RANKS, ACCELERATE_USE_CPU="true")


# What the two processes do


def measure(results: Results) -> None:
    """Flaws 30, 33 and 31: first what leaves the processes in step even where it fails."""
    measure_schedulers(results)
    measure_padding(results, int(os.environ["RANK"]))
    for num_samples in EVAL_SIZES:
        try:
            results[f"evaluate {num_samples}"] = evaluate(num_samples)
        except ValueError as error:  # refused by all processes alike
            results[f"evaluate {num_samples}"] = {"error": repr(error)}


def measure_schedulers(results: Results) -> None:
    placeholders = subject.module("trainer").TrainerPlaceholderValues
    factories = {
        "cosine": subject.schedulers.CosineLrScheduler.create_scheduler_fn(),
        "one_cycle": partial(
            OneCycleLR,
            max_lr=BASE_LR,
            epochs=placeholders.NUM_EPOCHS,
            steps_per_epoch=placeholders.NUM_UPDATE_STEPS_PER_EPOCH,
        ),
    }
    for name, create_scheduler_fn in factories.items():
        trainer = subject.trainer(lr=BASE_LR)
        subject.fit(trainer, subject.data(64), num_epochs=2, create_scheduler_fn=create_scheduler_fn)
        results[name] = {
            "updates": len(trainer.lrs),
            "first_lr": trainer.lrs[0],
            "highest_lr": max(trainer.lrs),
            "last_lr": trainer.lrs[-1],
            "final_lr": trainer.optimizer.param_groups[0]["lr"],
        }


def measure_padding(results: Results, rank: int) -> None:
    trainer = subject.trainer()

    def here(rows):
        """The first three rows on process 0, the last one on process 1."""
        return torch.tensor(rows[:3] if rank == 0 else rows[3:])

    def gather(value, padding_value):
        try:
            return as_lists(trainer.gather(value, padding_value=padding_value))
        except (AttributeError, TypeError, ValueError) as error:  # refused by all processes alike
            return repr(error)

    def as_lists(value):
        if isinstance(value, dict):
            return {key: as_lists(item) for key, item in value.items()}
        return [as_lists(item) for item in value] if isinstance(value, list | tuple) else value.tolist()

    results["gather tensor"] = gather(here([[1, 2], [0, 0], [3, 4], [0, 0]]), 0)
    results["gather vector"] = gather(here([0, 5, 0, 7]), 0)
    pair = (here([-1, 5, -1, -1]), here([[[-1]], [[5]], [[-1]], [[-1]]]))
    scores = here([[-1.0, -1.0], [0.5, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    results["gather nested"] = gather({"scores": scores, "pair": pair}, -1)


def evaluate(num_samples: int) -> dict:
    """Evaluate with a callback that gathers every batch, as one that computes a metric does."""
    ids, outputs = [], []

    def collect(trainer, batch, batch_output, **kwargs):
        ids.extend(trainer.gather(batch[2]).tolist())
        outputs.extend(trainer.gather(batch_output["model_outputs"]).flatten().tolist())

    trainer = subject.trainer([subject.callback(on_eval_step_end=collect)])
    trainer.evaluate(subject.data(num_samples), EVAL_BATCH_SIZE, dataloader_kwargs={"num_workers": 0})
    loss = trainer.run_history.get_latest_metric("evaluation_loss")
    return {"ids": ids, "outputs": outputs, "loss": loss}


def stop_on_one_rank(results: Results) -> None:
    """Flaw 32: StopTrainingError on process 1 alone, in the middle of an epoch."""
    rank = int(os.environ["RANK"])
    events = []

    def stop(trainer, **kwargs):
        if rank == 1 and len(trainer.lrs) == STOP_AFTER_UPDATES:
            raise subject.callbacks.StopTrainingError("process 1 has had enough")

    witness = subject.callback(
        on_train_step_end=stop,
        on_stop_training_error=lambda trainer, **kwargs: events.append("stop"),
        on_training_run_end=lambda trainer, **kwargs: events.append("end"),
    )
    trainer = subject.trainer([witness], lr=0.001)
    dataset = subject.data(NUM_RANKS * UPDATES_PER_EPOCH)
    start = time.monotonic()
    subject.fit(trainer, dataset, num_epochs=2, per_device_batch_size=1)
    results["stop"] = {
        "events": events,
        "updates": len(trainer.lrs),
        "weights": subject.weights(trainer).tolist(),
        "seconds": time.monotonic() - start,
    }


def raise_in_decorated(results: Results) -> None:
    """Flaw 34: each decorator around a function that raises on process 0."""
    rank, folder = int(os.environ["RANK"]), results.path.parent
    evaluate(NUM_RANKS * EVAL_BATCH_SIZE)  # the processes know each other once a trainer has run

    def function(name):
        if rank == 0:
            raise ValueError(f"boom in {name}")

    for name in DECORATORS:
        try:
            getattr(subject.utils, name)(function)(name)
            outcome = "returned"
        except Exception as error:  # noqa: BLE001 - which one is for the package to choose
            outcome = f"{type(error).__name__}: {error}"
        # They meet through the disk, so that a process which waits in a collective is seen to be missing.
        (folder / f"{name}.rank{rank}").touch()
        if not appears(folder / f"{name}.rank{1 - rank}"):
            results[name] = "the other process did not answer"
            os._exit(1)
        results[name] = outcome

    results["healthy"] = [getattr(subject.utils, name)(lambda: f"rank {rank}")() for name in DECORATORS]


def appears(path: Path) -> bool:
    """Whether the file appears while we wait."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
