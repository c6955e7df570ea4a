"""A hand-written loop's objects are saved together and restored together, or not at all."""

import json
import logging
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import toys
from loopwright import Trainer
from loopwright.checkpoint import Checkpointing, ResumableState, find_newest, read, write
from loopwright.errors import CheckpointError, ConfigError
from loopwright.failpoints import arm
from loopwright.progress import Progress
from loopwright.run_folder import Lease, LeaseError
from loopwright.schedulers import WSDLrScheduler


class Net(nn.Module):
    """Tied weights, a buffer, dropout, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(nn.functional.dropout(self.norm(self.first(inputs)), 0.2))

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


class Loop:
    """A model, an optimizer with two groups, a schedule and a second model, trained on random numbers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.average = nn.Linear(4, 4)
        groups = [{"params": self.model.parameters()}, {"params": self.average.parameters(), "lr": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.progress = Progress()
        self.draws: list[float] = []

    def update(self) -> None:
        loss = self.average(self.model(torch.randn(8, 4))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.progress.advance(1, 8)
        self.draws.append(random.random() + float(np.random.rand()))

    def state(self, folder: Path, **policy) -> ResumableState:
        parts = {"schedule": self.schedule, "average": self.average, "progress": self.progress}
        return ResumableState(Checkpointing(folder, **policy), self.model, optimizer=self.optimizer, **parts)

    def everything(self):
        """All state in a form that is equal only if every bit is."""
        parts = (self.model, self.average, self.optimizer, self.schedule, self.progress)
        return toys.plain([part.state_dict() for part in parts])


def started(loop: Loop, folder: Path, **policy) -> ResumableState:
    state = loop.state(folder, **policy)
    state.restore()
    return state


def test_a_loop_resumes_bit_for_bit(tmp_path):
    whole = Loop()
    with started(whole, tmp_path / "whole") as state:
        for _ in range(3):
            whole.update()
        state.save(3, {"note": "three", "tensor": torch.arange(3)}, wait=True)
        for _ in range(3):
            whole.update()

    resumed = Loop(seed=99)
    random.seed(99)
    with resumed.state(tmp_path / "whole") as state:
        values = state.restore()
        assert values["note"] == "three" and torch.equal(values["tensor"], torch.arange(3))
        assert resumed.progress.update == 3
        for _ in range(3):
            resumed.update()
    assert resumed.everything() == whole.everything()
    assert resumed.draws == whole.draws[3:]
    assert resumed.model.second.weight is resumed.model.first.weight
    assert resumed.model.calls == 6


def test_without_a_checkpoint_nothing_is_restored_and_nothing_changes(tmp_path):
    loop, untouched = Loop(), Loop()
    with loop.state(tmp_path) as state:
        assert state.restore() is None
    assert loop.everything() == untouched.everything()


def test_a_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    loop = Loop()
    with started(loop, tmp_path, every_updates=1) as state:
        arm("writer_start:1:sleep:0.2")
        loop.update()
        assert state.is_due(1)
        state.save(1, {"update": 1})
        expected = loop.everything()
        loop.update()
        assert expected != loop.everything()
    other = Loop(seed=1)
    assert other.state(tmp_path).restore() == {"update": 1}
    assert other.everything() == expected


def test_the_policy_says_when_a_save_is_due_and_how_many_are_kept(tmp_path):
    loop = Loop()
    with started(loop, tmp_path, every_updates=3, keep_last=2, keep_best=None) as state:
        due = [update for update in range(1, 13) if state.is_due(update)]
        assert due == [3, 6, 9, 12]
        for update in due:
            state.save(update, {}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000009", "step-0000000012"]


def test_the_best_checkpoint_is_kept_by_a_metric_among_the_values(tmp_path):
    with started(Loop(), tmp_path, keep_last=1, keep_best=("loss", "min")) as state:
        for update, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            state.save(update, {"loss": loss}, wait=True)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000000002", "step-0000000004"]
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 1.0


@pytest.mark.parametrize(("losses", "best"), [((), 1), (("loss",), 3)])
def test_a_loss_decides_between_equal_metrics_if_it_is_named(tmp_path, losses, best):
    for damage in (False, True):
        with started(Loop(), tmp_path, keep_last=9, keep_best=("accuracy", "max", *losses)) as state:
            for update, loss in enumerate([0.6, math.nan, 0.1, 0.1, 0.2], start=1) if not damage else ():
                state.save(update, {"accuracy": 1.0, "loss": loss}, wait=True)
        assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == f"step-{best:010}"
        (tmp_path / "best.json").write_text("")


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog):
    with started(Loop(), tmp_path) as state:
        state.save(1, {"update": 1}, wait=True)
        state.save(2, {"update": 2}, wait=True)
    (tmp_path / "step-0000000002" / "state.json").write_text("{}")
    with caplog.at_level(logging.WARNING, logger="loopwright"):
        assert Loop().state(tmp_path).restore() == {"update": 1}
    assert "skipping a damaged checkpoint" in caplog.text and "step-0000000002" in caplog.text
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]


def test_the_weights_can_be_read_without_the_loop_and_another_loop_is_refused_by_its_parts(tmp_path):
    loop = Loop()
    with started(loop, tmp_path) as state:
        state.save(5, {"x": 1}, wait=True)
    checkpoint = read(find_newest(tmp_path)[0])
    assert checkpoint.update == 5
    assert torch.equal(checkpoint.model["second.weight"], loop.model.first.weight)
    sgd = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    fewer = ResumableState(Checkpointing(tmp_path), loop.model, optimizer=sgd)
    with pytest.raises(CheckpointError, match=r"optimizer \(AdamW\).*schedule \(StepLR\).*has optimizer \(SGD\)"):
        fewer.restore()


def test_another_model_is_refused_by_its_parameters_and_so_is_another_kind_of_checkpoint(tmp_path):
    with ResumableState(Checkpointing(tmp_path), nn.Linear(2, 2)) as state:
        state.restore()
        state.save(1, {}, wait=True)
    with pytest.raises(CheckpointError, match=r"from another model.*size mismatch for weight"):
        ResumableState(Checkpointing(tmp_path), nn.Linear(3, 2)).restore()
    with pytest.raises(CheckpointError, match=r"from another model.*Missing key.*0\.weight"):
        ResumableState(Checkpointing(tmp_path), nn.Sequential(nn.Linear(2, 2))).restore()
    write(tmp_path / "other", {"weight": torch.ones(2)}, {"anything": 1}, update=2)
    with pytest.raises(CheckpointError, match="was not saved by a ResumableState"):
        Loop().state(tmp_path).restore()


def test_a_weight_that_is_not_finite_is_never_saved(tmp_path):
    loop = Loop()
    with started(loop, tmp_path) as state:
        state.save(1, {}, wait=True)
        with torch.no_grad():
            loop.model.second.bias[2] = float("nan")
        with pytest.raises(CheckpointError, match=r"not saving update 2: second\.bias is not finite"):
            state.save(2, {})
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]


def test_a_mask_of_infinities_is_saved_and_a_buffer_that_becomes_one_is_an_error(tmp_path, caplog):
    loop = Loop()
    loop.model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    loop.model.register_buffer("mean", torch.zeros(2))
    with started(loop, tmp_path) as state:
        state.save(1, {}, wait=True)
        loop.model.mean[1] = float("nan")
        with pytest.raises(CheckpointError, match=r"step-0000000002: a weight is not finite \(mean\)"):
            state.save(2, {}, wait=True)
        state.save(3, {})
        state.close()
        with caplog.at_level(logging.WARNING, logger="loopwright"):
            state.is_due(4)
        assert "step-0000000003: a weight is not finite (mean)" in caplog.text
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000001"]


def test_one_failed_save_is_reported_and_two_in_a_row_end_the_loop(tmp_path, caplog):
    with started(Loop(), tmp_path, every_updates=1, asynchronous=False) as state:
        arm("pre_rename:1:raise:ENOSPC,pre_rename:3:raise:ENOSPC,pre_rename:4:raise:ENOSPC")
        state.save(1, {})
        with caplog.at_level(logging.WARNING, logger="loopwright"):
            assert state.is_due(2)
        assert "retried at the next save" in caplog.text and "No space left" in caplog.text
        state.save(2, {})
        state.save(3, {})
        state.save(4, {})
        with pytest.raises(CheckpointError, match="twice in a row"):
            state.is_due(5)
        state.save(5, {}, wait=True)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-0000000002", "step-0000000005"]


def test_a_loop_that_fails_still_waits_for_the_save_in_flight(tmp_path):
    arm("writer_start:1:sleep:0.2")
    with pytest.raises(ZeroDivisionError), started(Loop(), tmp_path) as state:
        state.save(1, {"update": 1})
        _ = 1 / 0
    assert Loop().state(tmp_path).restore() == {"update": 1}


def test_what_ended_the_loop_is_not_hidden_by_a_save_that_fails_too(tmp_path, caplog):
    arm("writer_start:1:sleep:0.1,pre_rename:1:raise:ENOSPC")
    with pytest.raises(ZeroDivisionError), started(Loop(), tmp_path) as state:
        state.save(1, {})
        _ = 1 / 0
    assert "the last save failed" in caplog.text


def test_a_failed_save_is_an_error_at_once_if_it_is_waited_for_and_else_of_the_block(tmp_path):
    arm("pre_rename:1:raise:ENOSPC")
    with pytest.raises(CheckpointError, match="No space left"):
        started(Loop(), tmp_path / "waited").save(1, {}, wait=True)
    arm("pre_rename:1:raise:ENOSPC")
    with pytest.raises(CheckpointError, match="No space left"), started(Loop(), tmp_path) as state:
        state.save(1, {})


def test_a_process_that_lost_its_folder_commits_nothing(tmp_path):
    loop = Loop()
    with Lease(tmp_path, stale_seconds=0.0) as lease:
        state = ResumableState(Checkpointing(tmp_path / "checkpoints"), loop.model, lease=lease)
        state.restore()
        assert not state.is_due(1)
        content = json.loads((tmp_path / "lease.json").read_text())
        (tmp_path / "lease.json").write_text(json.dumps({**content, "incarnation": "another", "started_at": 1.0}))
        with pytest.raises(LeaseError, match="another process has taken over the run folder"):
            state.save(1, {}, wait=True)
        with pytest.raises(LeaseError, match="no longer belongs to this process"):
            state.is_due(2)
    assert list((tmp_path / "checkpoints").glob("step-*")) == []


def test_continuing_where_sums_may_round_differently_is_reported(tmp_path, caplog):
    with started(Loop(), tmp_path) as state:
        state.save(1, {}, wait=True)
    with caplog.at_level(logging.WARNING, logger="loopwright"):
        started(Loop(), tmp_path)
        assert caplog.text == ""
        torch.set_num_threads(2)
        started(Loop(), tmp_path)
    assert "round differently" in caplog.text and "threads: 1 -> 2" in caplog.text


def test_a_resumed_schedule_continues_and_does_not_begin_again(tmp_path):
    def create():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, WSDLrScheduler(optimizer, total_steps=20, is_continuation_from_checkpoint=True)

    model, optimizer, schedule = create()
    toys.stepped(schedule, 20)
    with ResumableState(Checkpointing(tmp_path), model, optimizer=optimizer, schedule=schedule) as state:
        state.restore()
        state.save(19, {}, wait=True)
    other, other_optimizer, other_schedule = create()
    ResumableState(Checkpointing(tmp_path), other, optimizer=other_optimizer, schedule=other_schedule).restore()
    assert other_schedule.get_current_step() == schedule.get_current_step() == 19
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1


def test_calls_in_the_wrong_order_and_wrong_arguments_are_reported(tmp_path):
    loop = Loop()
    with pytest.raises(ConfigError, match=r"every_epochs=1\) is for Trainer\.train.*call save\(\) there"):
        loop.state(tmp_path, every_epochs=1)
    with pytest.raises(ConfigError, match=r"cannot save count: a int has no state_dict"):
        ResumableState(Checkpointing(tmp_path), loop.model, count=3)
    state = loop.state(tmp_path)
    state.close()
    for call in (lambda: state.is_due(1), lambda: state.save(1, {})):
        with pytest.raises(ConfigError, match="call restore.. before"):
            call()
    state.restore()
    with pytest.raises(ConfigError, match="called twice"):
        state.restore()
    with pytest.raises(CheckpointError, match=r"state\.values\.trainer is a .*Trainer, which cannot be saved"):
        state.save(1, {"trainer": Trainer(loop.model, None, loop.optimizer)})
