"""What one process asks for, all of them do at the same update: by a shared page, by messages, or at its very end."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

import toys
from distributed.launcher import Results, run
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import DEFAULT_CALLBACKS, ModelEmaCallback, SaveTrainingStateCallback, TrainerCallback
from loopwright.checkpoint.store import read_manifest
from loopwright.engine import processes
from loopwright.engine.processes import Agreement, Board, create_page
from loopwright.errors import LoopwrightError, StopTrainingError
from loopwright.training.run import run_of

CHANNELS = ("page", "messages")


def test_a_board_tells_whether_anyone_has_something_to_say_also_when_one_is_a_turn_ahead():
    path = create_page(3)
    boards = [Board(path, rank, 3, timedelta(seconds=1)) for rank in range(3)]
    os.unlink(path)
    for asking in (None, 1, None, 0, 2):
        for rank, each in enumerate(boards):
            each.post(rank == asking)
        assert boards[0].read() is boards[1].read() is (asking is not None)
        # Two are in the next turn already, in which one asks; the third has still to read this one.
        boards[0].post(True)
        boards[1].post(False)
        assert boards[2].read() is (asking is not None)
        boards[2].post(False)
        assert [each.read() for each in boards] == [True] * 3


def test_a_board_gives_up_on_a_process_that_never_posts():
    path = create_page(2)
    waiting = Board(path, 0, 2, timedelta(seconds=0.05))
    os.unlink(path)
    waiting.post(False)
    with pytest.raises(LoopwrightError, match=r"rank 0 timed out: it has waited 0\.05 s for rank 1"):
        waiting.read()


def asks(event, ask, update=2):
    """A callback that asks for something on the second process at an event, once."""

    def act(trainer, **kwargs):
        nonlocal update
        if trainer.progress.update == update and os.environ["RANK"] == "1":
            update = -1
            ask(trainer)

    return toys.callback(**{event: act})


class AsksAlike(TrainerCallback):
    asks_alike = True

    def __init__(self, folder):
        self.folder = folder

    def on_update_end(self, trainer, **kwargs):
        if trainer.progress.update == 3:
            trainer.request_save(self.folder)


class StopsInLoss(Trainer):
    def calculate_train_batch_loss(self, batch):
        if self.progress.update == 2 and int(os.environ["RANK"]) == 1:
            raise StopTrainingError("in the loss")
        return super().calculate_train_batch_loss(batch)


def fit(*callbacks, cls=Trainer) -> dict:
    trainer = toys.trained(callbacks, toys.data(48), cls=cls, seed=1, log_every=4)
    result = trainer.result
    return {"updates": result.updates, "why": result.stop_reason, "weights": toys.weights(trainer).tolist()}


def saved_at(folder: Path) -> int:
    return int(read_manifest(folder)["identity"]["update"])


def agree(results: Results) -> None:
    folder, default = results.path.parent, processes._SHARED_MEMORY
    for channel in CHANNELS:
        processes._SHARED_MEMORY = default if channel == "page" else Path("/nowhere")
        stop = lambda trainer: trainer.request_stop("one has had enough")  # noqa: E731
        results[f"{channel}: stop in a step"] = fit(asks("on_train_step_end", stop))
        results[f"{channel}: stop after an update"] = fit(asks("on_update_end", stop))
        results[f"{channel}: stop in the loss"] = fit(cls=StopsInLoss)
        one, all_of_them = folder / f"{channel}-one", folder / f"{channel}-all"
        fit(asks("on_train_step_end", lambda trainer, path=one: trainer.request_save(path)), AsksAlike(all_of_them))
        results[f"{channel}: saves"] = [saved_at(one), saved_at(all_of_them)]
        results[f"{channel}: messages"] = count_messages()


def count_messages() -> list[int]:
    """How often the processes wait for each other to agree in a run of 6 updates, and in one that agrees at the end."""
    counts = []
    plain, largest = Agreement.largest, []
    Agreement.largest = lambda self, *values: largest.append(values) or plain(self, *values)
    for callbacks in (DEFAULT_CALLBACKS, (asks("on_update_end", None, update=-1),)):
        largest.clear()
        fit(*callbacks)
        counts.append(len(largest))
    Agreement.largest = plain
    return counts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(agree, tmp_path_factory.mktemp("agreement"))


@pytest.mark.distributed
@pytest.mark.parametrize("channel", CHANNELS)
def test_all_processes_stop_and_save_at_the_update_in_which_one_asks(channel, ranks):
    for when, updates, why in (
        ("in a step", 3, "one has had enough"),
        ("after an update", 2, "one has had enough"),
        ("in the loss", 3, "in the loss"),
    ):
        first, second = (rank[f"{channel}: stop {when}"] for rank in ranks)
        assert first["updates"] == second["updates"] == updates
        assert (first["why"], second["why"]) == ("Stopped by another process", why)
        assert first["weights"] == second["weights"]
    assert [rank[f"{channel}: saves"] for rank in ranks] == [[3, 3]] * 2
    for rank in ranks:  # an update costs no waiting unless somebody may ask at its end
        overlapped, at_the_end = rank[f"{channel}: messages"]
        assert at_the_end - overlapped >= 5, "six updates, less what it takes to make the page"


def test_who_may_ask_late_is_known_by_name(tmp_path):
    class Stepping(Trainer):
        def optimizer_step(self):
            super().optimizer_step()

    class OwnAverage(ModelEmaCallback):
        def on_update_end(self, trainer, **kwargs):
            super().on_update_end(trainer, **kwargs)

    def askers(*callbacks, cls=Trainer, **kwargs):
        trainer = toys.trainer_of([*callbacks], cls=cls)
        trainer.train(toys.data(4), 1, **kwargs)
        return run_of(trainer).boundary.late_requesters()

    assert askers(*DEFAULT_CALLBACKS) == []
    average = ModelEmaCallback(save_path=tmp_path / "average.pt", evaluate_during_training=False)
    assert askers(average, AsksAlike(tmp_path / "state")) == []
    own = OwnAverage(save_path=tmp_path / "average.pt", evaluate_during_training=False)
    saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=3)
    assert askers(own, saving) == ["OwnAverage.on_update_end", "SaveTrainingStateCallback.on_update_end"]
    assert askers(cls=Stepping) == ["optimizer_step"]
    assert askers(checkpoints=Checkpointing(tmp_path / "run", every_seconds=60)) == ["every_seconds"]
