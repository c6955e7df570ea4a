"""Graphs for batches of any shape: which updates are graphs, and that a resumed run takes the same ones."""

import os
import signal

import pytest
import torch
from torch import nn

import toys
from distributed.launcher import exit_code
from graphs.recorder import FakeCapturer, GraphedTrainer
from loopwright.checkpoint import read
from loopwright.engine.graphs import NotCapturableError, shape_key, signature
from loopwright.training.run import run_of

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Tagger(nn.Module):
    """Classes of sequences of any length; a graph has other bits than an eager update, as on a GPU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs):
        failure = Failing.while_recording.get(inputs.shape[1]) if FakeCapturer.is_active else None
        if failure is not None:
            Failing.num_failures += 1
            raise failure
        return self.layer(self.dropout(inputs)).mean(1) * (1.0 + 2.0**-12 if FakeCapturer.is_active else 1.0)


class Failing:
    while_recording: dict[int, Exception] = {}  # by the length of the batch
    num_failures = 0


@pytest.fixture(autouse=True)
def no_failures():
    Failing.while_recording, Failing.num_failures = {}, 0


def sequences(lengths):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(length, 4, generator=generator), index % 3) for index, length in enumerate(lengths)]


def pad(samples):
    """A user's own collate function: it knows nothing of graphs."""
    sequences, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), torch.tensor(labels)


LENGTHS = [2, 3, 9, 5, 5, 2, 7, 7, 2, 3, 4, 9, 4, 4, 6, 2, 3, 3, 5, 1, 2]  # by 2: lengths 3 9 5 7 3 9 4 6 3 5 and a row


def trained(lengths=LENGTHS, callbacks=(), optimizer=None, kind=GraphedTrainer, **options):
    """Train on sequences in their order; `trainer.modes` has a letter for each update: g for a graph, e for eager."""
    model = toys.seeded(Tagger, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if optimizer is None else optimizer(model)
    counts = toys.watch(on_update_end=lambda trainer, **kwargs: trainer.num_graphed_updates)
    trainer = kind(model, nn.CrossEntropyLoss(), optimizer, callbacks=[counts, *callbacks])
    settings = {"num_epochs": 2, "per_device_batch_size": 2, "collate_fn": pad, "seed": 5, **options}
    trainer.train(sequences(lengths), train_dataloader_kwargs={"shuffle": False, "num_workers": 0}, **settings)
    trainer.modes = "".join("eg"[now - before] for before, now in zip([0, *counts.seen], counts.seen, strict=False))
    return trainer


def listed(checkpoint):
    return read(checkpoint).state["run"]["graphs"]


def assert_resumes_alike(folder, updates=(1, 2, 3, 6), **options):
    """A run that is resumed after some of its updates has the weights, the modes and the list of the whole run."""
    whole = trained(checkpoints=toys.saving(folder / "whole"), **options)
    last = len(whole.modes)
    for update in updates:
        resumed = trained(resume_from=toys.step(folder / "whole", update), **options)
        assert resumed.modes == whole.modes[update:], update
        toys.assert_same_weights(resumed, whole)
        assert run_of(resumed).recordings == run_of(whole).recordings
    saved = listed(toys.step(folder / "whole", last))
    assert saved == run_of(whole).recordings.state_dict()
    return whole, saved


def test_every_shape_of_an_own_collate_function_is_recorded_once_and_runs_resume_alike(tmp_path):
    whole, saved = assert_resumes_alike(tmp_path, range(1, 22))
    assert whole.modes == trained(step_mode="graph").modes == "e" + "g" * 21
    assert whole.capturer.num_captures == len(saved["recorded"]) == 7  # six lengths of two rows, and the short batch
    assert saved["failed"] == {} and saved["ended"] is None


@pytest.mark.parametrize("accumulation", [2, 3])
def test_windows_of_several_shapes_are_graphs_and_resume_alike(tmp_path, accumulation):
    whole, saved = assert_resumes_alike(tmp_path, gradient_accumulation_steps=accumulation)
    assert set(whole.modes[1:]) == {"g"}
    assert len(saved["recorded"]) == 7 and whole.capturer.num_captures == 8  # and one for the optimizer


def test_a_partial_window_of_one_micro_batch_is_another_graph():
    whole = trained([3] * 10, gradient_accumulation_steps=2)  # windows of 2, 2 and 1 micro-batches
    assert whole.modes == "eggggg"
    assert whole.capturer.num_captures == 3  # a micro-batch, the optimizer, and a whole update


def test_a_later_shape_that_cannot_be_recorded_is_eager_alone(tmp_path, capsys):
    Failing.while_recording = {7: RuntimeError("operation not permitted when stream is capturing")}
    whole, saved = assert_resumes_alike(tmp_path)
    said = capsys.readouterr().out
    assert whole.modes == ("egg" + "e" + "ggggggg") + "ggg" + "e" + "ggggggg"
    assert list(saved["failed"].values()) == ["operation not permitted when stream is capturing"]
    assert said.count("updates of some shapes eagerly, not as CUDA graphs: operation not permitted") == 5
    # Twice, the second time without garbage, in the whole run and those resumed before update 4; the last one had none.
    assert Failing.num_failures == 2 + 2 + 2 + 1


def test_memory_that_runs_out_while_recording_leaves_that_shape_eager(tmp_path, capsys):
    Failing.while_recording = {9: OUT_OF_MEMORY}  # the first shape to be recorded
    whole, saved = assert_resumes_alike(tmp_path)
    assert whole.modes == "e" + "egggeggggg" + "gegggeggggg"
    assert list(saved["failed"].values()) == ["CUDA out of memory. Tried to allocate 2.00 GiB"]
    assert "T2 from here on: memory does not run out at the same point everywhere" in capsys.readouterr().out


def test_after_many_failures_no_new_shape_is_tried_and_recorded_ones_stay_graphs(capsys):
    Failing.while_recording = dict.fromkeys(range(10, 18), OUT_OF_MEMORY)
    trainer = trained([3, 3, *range(10, 30)], per_device_batch_size=1)
    assert trainer.modes == "eg" + "e" * 20 + "gg" + "e" * 20
    assert Failing.num_failures == 8
    assert "8 shapes of batches could not be recorded, and no others are tried" in capsys.readouterr().out


def test_a_failure_that_is_not_due_to_a_shape_ends_graphs_for_the_resumed_run_too(tmp_path, capsys):
    Failing.while_recording = {9: RuntimeError("cudaErrorStreamCaptureInvalidated")}
    whole = trained(checkpoints=toys.saving(tmp_path / "whole"))
    assert set(whole.modes) == {"e"}
    Failing.while_recording = {}
    resumed = trained(resume_from=toys.step(tmp_path / "whole", 5))
    assert set(resumed.modes) == {"e"}
    toys.assert_same_weights(resumed, whole)
    assert capsys.readouterr().out.count("eagerly, not as CUDA graphs: cudaErrorStreamCaptureInvalidated\n") == 2


def test_a_listed_shape_that_can_no_longer_be_recorded_lowers_the_guarantee(tmp_path, capsys):
    trained(checkpoints=toys.saving(tmp_path / "whole"))
    Failing.while_recording = {7: RuntimeError("operation not permitted when stream is capturing")}
    resumed = trained(resume_from=toys.step(tmp_path / "whole", 11))
    assert resumed.modes == "gggegggggggg"[:11]
    assert "a shape that was a CUDA graph can no longer be recorded" in capsys.readouterr().out


def test_a_run_records_128_shapes_and_no_more(tmp_path, capsys):
    options = {"lengths": range(1, 132), "per_device_batch_size": 1}
    policy = toys.saving(tmp_path / "run", every_updates=140)
    whole = trained(checkpoints=policy, **options)
    assert whole.modes == ("e" + "g" * 128 + "ee") * 2
    assert whole.capturer.num_captures == 128
    said = capsys.readouterr().out
    assert said.count("updates of some shapes eagerly, not as CUDA graphs: a run records 128 shapes") == 1
    assert said.count("Recording updates as CUDA graphs") == 1
    resumed = trained(resume_from=toys.step(tmp_path / "run", 140), **options)
    assert resumed.modes == whole.modes[140:]
    toys.assert_same_weights(resumed, whole)


def test_texts_that_change_from_batch_to_batch_are_not_recorded_over_and_over(capsys):
    class Named(GraphedTrainer):
        graph_safe = True

        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch[:2])

    names = iter(range(100))
    whole = trained([3] * 20, kind=Named, collate_fn=lambda samples: (*pad(samples), f"batch {next(names)}"))
    assert whole.modes == "e" + "gggg" + "e" * 15
    assert "the texts or whole numbers in a batch change" in capsys.readouterr().out


def test_settings_of_the_optimizer_that_change_at_every_update_end_graphs(tmp_path, capsys):
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)

    whole, saved = assert_resumes_alike(tmp_path, create_scheduler_fn=cycle)
    assert whole.modes == "e" + "gggg" + "e" * 17
    assert "OneCycleLR" in saved["ended"] and saved["ended"] in capsys.readouterr().out


def test_a_checkpoint_of_a_version_without_a_list_is_continued_without_its_guarantee(tmp_path):
    class Older(GraphedTrainer):
        def create_checkpoints(self, run):
            checkpoints = super().create_checkpoints(run)
            capture, describe = checkpoints.capture, checkpoints.describe

            def without_list(metadata):
                model, state, files = capture(metadata)
                del state["run"]["graphs"]
                return model, state, files

            def without_mark():
                describe()
                del checkpoints.metadata["fingerprint"]["graphs"]

            checkpoints.capture, checkpoints.describe = without_list, without_mark
            return checkpoints

    trained(kind=Older, checkpoints=toys.saving(tmp_path / "older"))
    resumed = trained(resume_from=toys.step(tmp_path / "older", 8))
    assert resumed.modes == "g" * 14
    assert run_of(resumed).checkpoints.metadata["tier"] == "T2"
    assert run_of(trained(resume_from=toys.step(tmp_path / "older", 8), step_mode="eager")).recordings.recorded == []


def test_a_killed_run_takes_the_same_graphs_when_it_is_resumed_in_another_process(tmp_path):
    assert exit_code(killed, tmp_path / "run", 9) == -signal.SIGKILL
    resumed = trained(checkpoints=toys.saving(tmp_path / "run"), resume_from="auto")
    whole = trained()
    assert resumed.modes == whole.modes[-len(resumed.modes) :] and len(resumed.modes) < 22
    toys.assert_same_weights(resumed, whole)
    assert run_of(resumed).recordings == run_of(whole).recordings


def killed(folder, update):
    """Train until an update, and die."""
    kill = toys.at_update(update, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
    trained(callbacks=[kill], checkpoints=toys.saving(folder), resume_from="auto")


def test_graphs_are_dropped_for_an_eager_update_that_does_not_fit_beside_them(capsys):
    class Tight(GraphedTrainer):
        graph_safe = True

        def calculate_train_batch_loss(self, batch):
            num_graphs = run_of(self).stepper.num_graphs
            if batch[0].shape[1] == 9 and num_graphs and not FakeCapturer.is_active:
                raise OUT_OF_MEMORY
            return super().calculate_train_batch_loss(batch)

    whole = trained([3] * 6 + [9] * 2 + [3] * 2, kind=Tight, num_epochs=1)
    assert whole.modes == "egg" + "ee" and run_of(whole).memory.parts.train == 1
    said = capsys.readouterr().out
    assert "Running updates eagerly, not as CUDA graphs: memory ran out, and graphs keep some of it" in said


def test_an_evaluation_is_not_a_graph_and_keeps_the_list(tmp_path):
    trainer = trained(eval_dataset=sequences([3, 8, 2, 5]))
    recorded = run_of(trainer).recordings
    trainer.evaluate(sequences([11, 12]), 2, collate_fn=pad)
    trainer.save_training_state(tmp_path / "state")
    assert listed(tmp_path / "state") == recorded.state_dict() and len(recorded.recorded) == 7


def test_batches_fit_one_graph_only_if_everything_but_the_values_is_alike():
    ones = torch.ones(2, 3)
    alike = [{"a": ones, "b": [ones, 0.5]}, {"a": ones * 2, "b": [ones, 0.25]}]
    others = [
        {"b": ones, "a": [ones, 0.5]},  # names
        {"a": ones, "b": (ones, 0.5)},
        {"a": ones, "b": [ones, 1]},
        {"a": ones, "b": [ones, True]},
        {"a": ones, "b": [ones, None]},
        {"a": ones.double(), "b": [ones, 0.5]},
        {"a": torch.ones(3, 2).T, "b": [ones, 0.5]},  # strides
        {"a": ones, "b": [ones], "c": 0.5},
    ]
    keys = [shape_key(batch, is_alone=True) for batch in (*alike, *others)]
    assert keys[0] == keys[1] and len(set(keys)) == 1 + len(others)
    assert shape_key(alike[0], is_alone=False) != keys[0]
    for odd in (object(), torch.ones(2, 2).to_sparse()):
        with pytest.raises(NotCapturableError, match="cannot become a buffer"):
            signature({"a": odd})
