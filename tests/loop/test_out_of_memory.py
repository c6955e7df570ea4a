"""Memory that runs out: the same update in smaller parts, evaluations in parts, and errors that say what would help.

The limit is a fake one: a model that raises torch's own error for batches of more rows than it has room for.
"""

import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from graphs.recorder import GraphedTrainer
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import ProgressBarCallback, TrainerCallback
from loopwright.checkpoint import read
from loopwright.data.batch_parts import bounds_of, cut_rows
from loopwright.engine.memory import SavedBytes, asked_bytes, is_out_of_memory
from loopwright.errors import ConfigError, DataError, MemoryLimitError
from loopwright.training.checkpoints import RunCheckpoints
from loopwright.training.run import run_of
from toys import weights

ROWS, WIDTH, CLASSES = 22, 6, 3
NO_ROOM = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB"


class Limited(nn.Module):
    """A small model with room for so many rows; `counts` holds the rows of every forward pass that fits."""

    def __init__(self, room: int = 1000, eval_room: int = 1000, *layers: nn.Module) -> None:
        super().__init__()
        self.room, self.eval_room = room, eval_room
        self.note = [].append  # not an attribute that is rolled back when an update is given up
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), *layers, nn.Linear(8, CLASSES))

    def forward(self, inputs):
        hidden = self.layers(inputs)  # what moves buffers has been done when memory runs out
        if len(inputs) > (self.room if self.training else self.eval_room):
            raise torch.OutOfMemoryError(NO_ROOM)
        if torch.is_grad_enabled():  # not where a few rows are compared
            self.note(len(inputs))
        return hidden

    @property
    def counts(self) -> list[int]:
        return self.note.__self__


def data(rows: int = ROWS) -> TensorDataset:
    return toys.labelled(rows, WIDTH, CLASSES, seed=3, dtype=torch.float64)


class Quiet(Trainer):
    def __init__(self, *args, **kwargs):
        self.said: list[str] = []
        super().__init__(*args, **{"callbacks": (), **kwargs})

    def print(self, *args, **kwargs):
        self.said.append(" ".join(map(str, args)))


class PerToken(Quiet):
    """Counts another number of items for each sample, and none at all for some, as losses per token do."""

    def _mask(self, batch):
        return (batch[0][:, 0] * 1000).abs().long() % 3

    def count_batch_items(self, batch):
        return float(self._mask(batch).sum())

    def calculate_train_batch_loss(self, batch):
        losses = nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        mask = self._mask(batch)
        return {"loss": (losses * mask).sum() / mask.sum(), "model_outputs": None, "batch_size": len(mask)}


class LateItems(PerToken):
    """The same, where the items are known after the forward pass only; a mean of nothing is nan."""

    count_batch_items = Trainer.count_batch_items

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": self._mask(batch).sum()}


class Uncounted(PerToken):
    count_batch_items = Trainer.count_batch_items


def make(room: int = 1000, eval_room: int = 1000, *layers: nn.Module, kind: type = Quiet, **kwargs) -> Trainer:
    torch.manual_seed(0)
    model = Limited(room, eval_room, *layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return kind(model, nn.CrossEntropyLoss(), optimizer, **kwargs)


def fit(trainer: Trainer, **kwargs) -> Trainer:
    options = {"num_epochs": 2, "per_device_batch_size": 6, "gradient_accumulation_steps": 2, "seed": 5, "log_every": 1}
    trainer.result = trainer.train(kwargs.pop("dataset", data()), **{**options, "oom": "split", **kwargs})
    return trainer


def assert_close(split: Trainer, whole: Trainer, atol: float = 1e-12) -> None:
    assert torch.allclose(weights(split), weights(whole), rtol=0, atol=atol)


@pytest.mark.parametrize("kind", [Quiet, PerToken, LateItems])
@pytest.mark.parametrize("room", [3, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_split_run_trains_the_same_weights_as_one_with_memory_enough(kind, room, accumulation):
    whole = fit(make(kind=kind), gradient_accumulation_steps=accumulation)
    split = fit(make(room, kind=kind), gradient_accumulation_steps=accumulation)
    assert max(split.model.counts) == room and max(whole.model.counts) == 6
    assert_close(split, whole)
    expected = whole.result.metrics["train_loss_epoch"]
    assert split.result.metrics["train_loss_epoch"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert (split.progress.batch, split.progress.total_batches) == (whole.progress.batch, whole.progress.total_batches)
    assert split.progress.update == whole.progress.update


def test_the_factor_is_kept_and_said_once(tmp_path):
    split = fit(make(3), checkpoints=Checkpointing(tmp_path))
    said = [line for line in split.said if "Out of memory" in line]
    assert len(said) == 1
    assert said[0].startswith("Out of memory in update 1 (batch 6; 2.7 GB more did not fit, ")
    assert "run again in 2 parts of up to 3" in said[0]
    assert split.model.counts == [3, 3, 3, 3, 3, 3, 2, 2] * 2
    events = toys.records(tmp_path, "oom_split", "tier")
    told = {"update": 1, "epoch": 1, "parts": 2, "rows": 3, "asked_bytes": int(2.5 * 2**30)}
    assert events[0].items() >= told.items() and events[0]["free_bytes"] > 0
    assert events[1].items() >= {"event": "tier", "update": 1, "tier": "T2"}.items()


def test_a_resumed_split_run_is_bit_for_bit_the_uninterrupted_one(tmp_path):
    folders = [Checkpointing(tmp_path / name, every_updates=1, allow_changed_model=True) for name in "ab"]
    straight = fit(make(2, 1000, nn.Dropout(0.3)), checkpoints=folders[0])
    broken = fit(make(2, 1000, nn.Dropout(0.3)), max_num_train_steps=2, checkpoints=folders[1])
    assert broken.progress.update == 2
    goes_on = fit(make(1000, 1000, nn.Dropout(0.3)), resume_from="auto", checkpoints=folders[1])
    assert max(goes_on.model.counts) == 2  # though it has room for all
    assert torch.equal(weights(straight), weights(goes_on))
    assert straight.result.metrics == goes_on.result.metrics
    assert "Resume guarantee T2" in " ".join(goes_on.said)
    first, second = (read(toys.step(tmp_path / name, 4)) for name in "ab")
    assert first.about["tier"] == second.about["tier"] == "T2"
    assert first.state["run"]["parts"] == second.state["run"]["parts"] == {"train": 4, "evaluation": 1}


def test_a_split_run_that_continues_with_exact_sums_continues_whole(tmp_path):
    fit(make(2), eval_dataset=data(6), max_num_train_steps=2, checkpoints=Checkpointing(tmp_path))
    checkpoints = Checkpointing(tmp_path, allow_changed_model=True)
    goes_on = fit(make(), resume_from="auto", reduction="exact", checkpoints=checkpoints)
    assert goes_on.num_parts == 1 and goes_on.model.counts == [6, 6, 6, 4]
    said = " ".join(goes_on.said)
    assert "Resuming with whole batches" in said and "Resume guarantee T2" in said
    assert goes_on.progress.update == 4


def test_a_state_that_is_saved_after_an_evaluation_has_the_parts_of_the_run(tmp_path):
    trainer = fit(make(2))
    trainer.evaluate(data(9))
    trainer.predict(data(9))
    trainer.save_training_state(tmp_path / "state")
    assert read(tmp_path / "state").state["run"]["parts"] == {"train": 4, "evaluation": 1}


def test_states_of_before_there_were_parts_are_resumed(tmp_path, monkeypatch):
    fit(make(), max_num_train_steps=2, checkpoints=Checkpointing(tmp_path))

    def without_parts(self, checkpoint, path):
        del checkpoint.state["run"]["parts"]
        restore(self, checkpoint, path)

    restore = RunCheckpoints.restore
    monkeypatch.setattr(RunCheckpoints, "restore", without_parts)
    assert fit(make(), resume_from="auto", checkpoints=Checkpointing(tmp_path)).progress.update == 4


def test_buffers_of_the_update_that_was_given_up_are_put_back():
    """Batch norm sees each part for itself: its means move once per part, and not for the attempt that failed."""
    split = fit(make(3, 1000, nn.BatchNorm1d(8)))
    assert int(split.model.layers[2].num_batches_tracked) == len(split.model.counts) == 16


def test_memory_that_runs_out_late_makes_the_parts_smaller_still():
    def shrink(trainer, **kwargs):
        trainer.model.room = 3 if trainer.progress.update < 3 else 1

    whole = fit(make())
    split = fit(make(1000, callbacks=[toys.callback(on_update_end=shrink)]))
    assert_close(split, whole)
    assert split.num_parts == 8 and split.model.counts[:2] == [6, 6]


def test_a_backward_pass_that_does_not_fit_is_run_again_too():
    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.rows = len(value)
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.rows > 2:
                raise torch.OutOfMemoryError(NO_ROOM)
            return gradient

    layer = nn.Identity()
    layer.forward = Hungry.apply
    whole, split = fit(make()), fit(make(1000, 1000, layer))
    assert_close(split, whole)
    assert split.num_parts == 4


def test_what_the_failed_attempt_kept_is_gone_before_the_next():
    kept: list[weakref.ref] = []

    class Watching(Limited):
        def forward(self, inputs):
            assert not any(each() is not None for each in kept), "activations of the failed attempt are still there"
            hidden = self.layers(inputs)
            if len(inputs) > self.room:
                kept.append(weakref.ref(hidden))
                raise torch.OutOfMemoryError(NO_ROOM)
            return hidden

    torch.manual_seed(0)
    model = Watching(3).double()
    fit(Quiet(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)))
    assert len(kept) == 2  # the update, and as many rows as are compared with their parts


def poisoned(kind: type) -> type:
    class Poisoned(kind):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * float("nan")} if self.progress.update == 2 else output

    return Poisoned


def test_a_loss_that_is_not_finite_is_found_at_its_update_also_in_parts():
    trainer = fit(make(2, kind=poisoned(Quiet)), num_epochs=3, log_every=100, gradient_accumulation_steps=1)
    assert "the loss of update 3 is not finite" in trainer.result.stop_reason


@pytest.mark.parametrize("kind", [Quiet, LateItems])
def test_updates_that_are_not_finite_are_left_out_of_a_split_run_too(kind):
    options = {"nan": "skip", "gradient_accumulation_steps": 1}
    whole, split = (fit(make(room, kind=poisoned(kind)), **options) for room in (1000, 1))
    assert split.num_parts == 8
    assert_close(split, whole)
    for trainer in (whole, split):  # a part without items, whose mean is nan, is no reason
        assert [line.split(":")[0] for line in trainer.said if "Skipping" in line] == ["Skipping update 3"]


def test_a_micro_batch_of_bad_samples_alone_has_no_say_in_a_split_run():
    class Torn(TensorDataset):
        def __getitem__(self, index):
            if 6 <= index < 12:
                raise ValueError("torn")
            return super().__getitem__(index)

    options = {"num_epochs": 1, "bad_samples": "skip", "train_dataloader_kwargs": {"shuffle": False}}
    whole, split = (fit(make(room), dataset=Torn(*data().tensors), **options) for room in (1000, 3))
    assert split.num_parts == 2
    assert_close(split, whole)


@pytest.mark.parametrize(("kind", "word"), [(Quiet, "samples"), (PerToken, "items"), (LateItems, "items")])
def test_what_parts_are_weighed_by_is_reported(kind, word):
    split = fit(make(3, kind=kind))
    assert f"each weighted by its {word}, like all later updates" in " ".join(split.said)
    assert not any("another loss" in line for line in split.said)


def test_a_loss_that_is_another_one_in_parts_is_reported_and_not_one_that_is_drawn_again():
    split = fit(make(3, kind=Uncounted), nan="skip", gradient_accumulation_steps=1)
    (told,) = [line for line in split.said if "another loss" in line]
    assert told.startswith("Warning: in parts the training loss is another loss: ") and "count_batch_items" in told
    assert all(module.training for module in split.model.modules())

    class Masked(Quiet):
        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss((batch[0] * (torch.rand_like(batch[0]) < 0.5), batch[1]))

    split = fit(make(3, kind=Masked))
    assert split.num_parts == 2 and not any("another loss" in line for line in split.said)


def test_the_same_maths_are_promised_only_where_parts_have_the_same_loss():
    for kind, keeps in ((PerToken, True), (LateItems, True), (Quiet, True), (Uncounted, False)):
        with pytest.raises(MemoryLimitError) as caught:
            fit(make(4, kind=kind), oom="stop")
        assert caught.value.fix.startswith('oom="split"   or   ')
        assert ('oom="split" keeps the maths' in caught.value.saw) == keeps


@pytest.mark.parametrize("event", ["on_train_step_start", "on_train_step_end", "on_eval_step_start"])
def test_memory_that_runs_out_in_a_callback_is_not_taken_for_a_batch_that_is_too_large(event):
    trainer = make(callbacks=[toys.raising(event, MemoryError("of the callback"))])
    with pytest.raises(MemoryError, match="^of the callback$"):
        fit(trainer, eval_dataset=data(6), num_epochs=1)
    assert trainer.num_parts == 1 and not any("Out of memory" in line for line in trainer.said)


def test_an_evaluation_batch_that_cannot_be_copied_to_the_device_is_copied_in_parts(monkeypatch):
    import loopwright.training.evaluation as evaluation

    def copied(batch, device):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError(NO_ROOM)
        return batch

    expected = make().evaluate(data(17), 6).metrics["evaluation_loss"]
    monkeypatch.setattr(evaluation, "to_device", copied)  # for a device that is full
    parts = make()
    assert parts.evaluate(data(17), 6).metrics["evaluation_loss"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert run_of(parts).memory.parts.evaluation == 2


def test_the_bar_counts_each_micro_batch_once():
    bar = ProgressBarCallback()
    fit(make(2, callbacks=[bar]), num_epochs=1)
    assert bar.pbar.n == 4


def test_by_default_it_stops_and_reports_what_would_help(tmp_path):
    trainer = make(4)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(trainer, oom="stop", checkpoints=Checkpointing(tmp_path))
    error = caught.value
    assert isinstance(error, MemoryLimitError) and error.code == "memory.train"
    assert error.what.startswith("out of memory in update 1 (batch 6; 2.7 GB more did not fit")
    assert error.saw[0] == NO_ROOM and error.saw[1] == "not run again in smaller parts: that was not asked for"
    # Of a row: its 6 inputs, the 8 tanh values, 3 log-probabilities and the label; and once the sum of class weights.
    assert error.saw[2].startswith(f"the activations of a micro-batch need about {6 * 8 * (6 + 8 + 3 + 1) + 8} bytes")
    assert 'oom="split"' in error.fix and "per_device_batch_size=3 with twice" in error.fix
    assert all(each.grad is None for each in trainer.model.parameters())
    assert toys.records(tmp_path, "oom_split") == []


def test_what_a_change_would_save_is_measured_on_a_few_rows():
    torch.manual_seed(0)
    model = Limited(8)
    trainer = Quiet(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    singles = TensorDataset(torch.randn(256, WIDTH), torch.randint(CLASSES, (256,)))
    with pytest.raises(MemoryLimitError) as caught:
        trainer.train(singles, 1, per_device_batch_size=256, seed=1, oom="stop")
    assert max(model.counts) == 4  # nothing larger was tried
    assert "need about 19.5 kB" in caught.value.saw[2]  # 256 rows of (6 + 8 + 3) * 4 + 8 bytes, and 4 more
    assert "per_device_batch_size=128 with twice the gradient_accumulation_steps (−9.7 kB)" in caught.value.fix
    # The inputs and the 8 values come in half as many bytes, the log-probabilities do not; the weights are cast too.
    assert 'mixed_precision="bf16" (−7.1 kB)' in caught.value.fix


def exact(name: str, folder) -> dict:
    """Two ways to ask for the same bits."""
    checkpoints = Checkpointing(folder, require_exact=True)
    return {"reduction": {"reduction": "exact"}, "require_exact": {"checkpoints": checkpoints}}[name]


@pytest.mark.parametrize("name", ["reduction", "require_exact"])
@pytest.mark.parametrize(("rooms", "code"), [((3,), "memory.train"), ((1000, 5), "memory.eval")])
def test_runs_that_promise_the_same_bits_are_not_split(name, rooms, code, tmp_path):
    reason = {"reduction": 'reduction="exact" guarantees', "require_exact": "require_exact guarantees"}[name]
    with pytest.raises(MemoryLimitError, match=f"{reason} the same") as caught:
        fit(make(*rooms), eval_dataset=data(17), **exact(name, tmp_path))
    assert caught.value.code == code


def test_a_single_sample_that_does_not_fit_ends_the_run():
    trainer = make(0)
    with pytest.raises(MemoryLimitError, match="a single sample does not fit"):
        fit(trainer)
    assert trainer.progress.update == 0


class Contrastive(Quiet):
    def why_not_cut(self):
        return "its loss compares the samples of a batch"


class Graphs(Quiet):
    def cut_batch(self, batch, rows, start, stop):
        raise DataError("graphs have no rows")


@pytest.mark.parametrize(
    ("kind", "reason"), [(Contrastive, "its loss compares the samples"), (Graphs, "graphs have no rows")]
)
def test_batches_that_cannot_be_cut_end_the_run_with_the_reason(kind, reason):
    with pytest.raises(MemoryLimitError, match=f"not run again in smaller parts: {reason}"):
        fit(make(3, kind=kind))


def test_memory_that_runs_out_in_the_optimizer_ends_the_run_and_saves_nothing_half_done(tmp_path):
    trainer = make()
    trainer.optimizer.register_step_pre_hook(Mock(side_effect=torch.OutOfMemoryError(NO_ROOM)))
    with pytest.raises(MemoryLimitError, match="the optimizer's step of update 1") as caught:
        fit(trainer, checkpoints=Checkpointing(tmp_path))
    assert "smaller batches would not help" in caught.value.what
    assert list(tmp_path.glob("step-*")) == []


def test_other_errors_are_not_taken_for_memory():
    trainer = make()
    trainer.calculate_train_batch_loss = Mock(side_effect=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match=r"^shapes do not match(\n|$)"):
        fit(trainer)


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(ConfigError, match='oom must be "stop" or "split", got \'halve\''):
        fit(make(), oom="halve")


class Seen(TrainerCallback):
    """Keeps the targets of every evaluation batch, and counts hits."""

    def __init__(self):
        self.targets: list[int] = []
        self.hits = 0

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        self.targets += batch[1].tolist()
        self.hits += int((batch_output["model_outputs"].argmax(-1) == batch[1]).sum())


@pytest.mark.parametrize("room", [5, 1])
def test_an_evaluation_in_parts_sees_each_sample_once(room, tmp_path):
    outcomes = []
    for limit, name in ((1000, "whole"), (room, "parts")):
        seen = Seen()
        trainer = make(1000, limit, callbacks=[seen])
        fit(trainer, eval_dataset=data(17), oom="stop", checkpoints=Checkpointing(tmp_path / name), num_epochs=1)
        outcomes.append((trainer, seen))
    (whole, all_seen), (parts, part_seen) = outcomes
    assert part_seen.targets == all_seen.targets and part_seen.hits == all_seen.hits
    assert torch.equal(weights(whole), weights(parts))
    expected = whole.result.metrics["eval_loss_epoch"]
    assert parts.result.metrics["eval_loss_epoch"] == pytest.approx(expected, rel=0, abs=1e-12)
    events = toys.records(tmp_path / "parts", "oom_eval_split")
    assert [event["parts"] for event in events] == {5: [2], 1: [2, 4, 8]}[room]
    assert "training is unaffected" in " ".join(parts.said)


def test_the_bar_of_an_evaluation_counts_batches_also_where_they_are_run_in_parts():
    class Bar(ProgressBarCallback):
        def on_eval_epoch_end(self, trainer, **kwargs):
            self.ended_at, self.total = self.eval_pbar.n, self.eval_pbar.total
            super().on_eval_epoch_end(trainer, **kwargs)

    bar, seen = Bar(), Seen()
    parts = make(1000, 2, callbacks=[bar, seen])
    parts.evaluate(data(17), 6)
    assert run_of(parts).memory.parts.evaluation == 4 and sorted(seen.targets) == sorted(data(17).tensors[1].tolist())
    assert (bar.ended_at, bar.total) == (3, 3)


def test_an_evaluation_batch_that_cannot_be_cut_stays_whole_where_others_were_cut():
    class Odd(Quiet):
        def cut_batch(self, batch, rows, start, stop):
            if rows == 5:
                raise DataError("graphs have no rows")
            return super().cut_batch(batch, rows, start, stop)

    whole, parts = make(), make(1000, 5, kind=Odd)
    expected = whole.evaluate(data(17), 6).metrics["evaluation_loss"]
    assert parts.evaluate(data(17), 6).metrics["evaluation_loss"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert run_of(parts).memory.parts.evaluation == 2


def test_an_evaluation_batch_that_fits_neither_whole_nor_in_parts_that_can_be_cut_is_an_error():
    class Halves(Quiet):
        def cut_batch(self, batch, rows, start, stop):
            if rows == 6 and stop - start < 3:
                raise DataError("only halves can be had")
            return super().cut_batch(batch, rows, start, stop)

    with pytest.raises(DataError, match="only halves can be had"):
        make(1000, 1, kind=Halves).evaluate(data(6), 6)


def test_an_evaluation_in_parts_leaves_buffers_and_modes_as_they_are():
    options = {"eval_dataset": data(17), "evaluate_every": 1}
    whole, parts = (fit(make(1000, room, nn.BatchNorm1d(8)), **options) for room in (1000, 5))
    assert run_of(parts).memory.parts.evaluation == 2
    toys.assert_same_weights(parts, whole)


def test_an_evaluation_in_parts_lowers_the_guarantee(tmp_path):
    trainer = fit(make(1000, 5), eval_dataset=data(17), checkpoints=Checkpointing(tmp_path))
    assert [(event["update"], event["tier"]) for event in toys.records(tmp_path, "tier")] == [(2, "T2")]
    assert read(tmp_path / "step-0000000004").about["tier"] == "T2"
    assert sum("Resume guarantee T2 from here on" in line for line in trainer.said) == 1


def test_an_evaluation_loss_that_is_another_one_in_parts_is_reported_and_none_of_a_prediction():
    some_labels = nn.CrossEntropyLoss(ignore_index=0)  # a mean over the samples of some classes alone
    for loss_func, num_told in ((some_labels, 1), (nn.CrossEntropyLoss(), 0)):
        trainer = make(1000, 5)
        trainer.loss_func = loss_func
        trainer.evaluate(data(17), 6)
        assert sum("another loss" in line for line in trainer.said) == num_told
        assert any("weighted by its samples" in line for line in trainer.said)
    trainer = make(1000, 5)
    trainer.loss_func = some_labels
    trainer.predict(data(17), 6)
    said = " ".join(trainer.said)
    assert "in parts of up to 3" in said and "weighed" not in said and "loss" not in said


def test_evaluate_and_predict_work_in_parts_by_themselves():
    whole, parts = make(), make(1000, 2)
    expected = whole.evaluate(data(9)).metrics["evaluation_loss"]
    assert parts.evaluate(data(9)).metrics["evaluation_loss"] == pytest.approx(expected, rel=0, abs=1e-12)
    first, second = (trainer.predict(data(9)).outputs for trainer in (whole, parts))
    assert torch.allclose(first, second, rtol=0, atol=1e-12) and len(second) == 9


def test_an_evaluation_sample_that_does_not_fit_is_an_error_of_its_own():
    with pytest.raises(MemoryLimitError, match="a single sample does not fit") as caught:
        make(1000, 0).evaluate(data(9))
    assert caught.value.code == "memory.eval" and "eval_dataloader_kwargs" in caught.value.fix


def test_batches_of_many_kinds_are_cut_by_rows():
    batch = {
        "input_ids": torch.arange(12).view(4, 3),
        "labels": [{"boxes": torch.zeros(4, 4)}, {"boxes": torch.zeros(2, 4)}, {}, {}],
        "texts": ["a", "b", "c", "d"],
        "pair": (torch.arange(4), torch.tensor(7.0)),
        "name": "train",
    }
    part = cut_rows(batch, 4, 1, 3)
    assert part["input_ids"].tolist() == [[3, 4, 5], [6, 7, 8]] and part["texts"] == ["b", "c"]
    assert len(part["labels"]) == 2 and part["labels"][0]["boxes"].shape == (2, 4)
    assert part["pair"][0].tolist() == [1, 2] and float(part["pair"][1]) == 7.0 and part["name"] == "train"
    inputs, targets = cut_rows([torch.arange(2), torch.arange(2)], 2, 1, 2)
    assert inputs.tolist() == targets.tolist() == [1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"4 samples and a tensor of shape \(3,\)"),
        ({"maps": [torch.zeros(2, 2), torch.zeros(2, 2)]}, "cut in two ways"),
        ({"graph": object()}, r"has an? object, which cannot be cut"),
    ],
    ids=["another length", "two ways", "an object"],
)
def test_batches_that_cannot_be_told_apart_are_not_cut(batch, message):
    with pytest.raises(DataError, match=message):
        cut_rows(batch, 2 if "maps" in batch else 4, 0, 1)


def test_parts_are_as_equal_as_they_can_be():
    assert bounds_of(7, 4) == [(0, 1), (1, 3), (3, 5), (5, 7)]
    assert bounds_of(2, 8) == [(0, 1), (1, 2)] and bounds_of(5, 1) == [(0, 5)] and bounds_of(0, 2) == []


def test_errors_for_want_of_memory_are_told_from_others():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value) and asked_bytes(caught.value) == 4 * 10**15
    assert is_out_of_memory(MemoryError()) and asked_bytes(MemoryError()) is None
    assert asked_bytes(torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")) == 20 * 2**20
    for text in (
        *("HIP out of memory. Tried to allocate 2.00 GiB", "CUDA error: out of memory", "XPU out of memory."),
        *("MPS backend out of memory", "Invalid buffer size: 9.00 GiB", "CUDNN_STATUS_ALLOC_FAILED"),
        *("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This", "hipErrorOutOfMemory", "RESOURCE_EXHAUSTED: "),
        *("DefaultCPUAllocator: can't allocate memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
        *("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed", "cudaErrorMemoryAllocation"),
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert not is_out_of_memory(RuntimeError("no")) and not is_out_of_memory(ValueError("not enough memory"))


def test_activations_are_counted_once_and_without_the_weights():
    layer = nn.Linear(4, 4)
    inputs = torch.randn(8, 4)
    saved = SavedBytes(layer.parameters())
    with saved.counting():
        torch.relu(layer(inputs)).square()  # the inputs; relu's result, which the square keeps too
    assert saved.num_bytes == 2 * 8 * 4 * 4


def test_graphs_are_given_up_for_good_when_memory_runs_out():
    class Graphed(Quiet, GraphedTrainer):
        pass

    shrinking = toys.callback(on_update_end=lambda trainer, **kwargs: setattr(trainer.model, "room", 3))
    options = {"gradient_accumulation_steps": 1, "num_epochs": 2}
    whole, split = fit(make(), **options), fit(make(kind=Graphed, callbacks=[shrinking]), **options)
    assert run_of(split).stepper.num_graphs == 0 and split.num_parts == 2
    assert any("not as CUDA graphs" in line for line in split.said)
    assert_close(split, whole, 1e-7)  # a graph's learning rate is float32
