"""Batches copied ahead: what is ahead when, with a stand-in for the stream, and how fast a run says it is."""

import dataclasses
import itertools
from collections import namedtuple

import pytest
import torch

import toys
from loopwright import Trainer
from loopwright.checkpoint import Checkpointing
from loopwright.data import MicroBatch, Window
from loopwright.data.prefetch import _moves_itself, prefetched
from loopwright.engine.nested import map_tensors
from loopwright.errors import DataError
from loopwright.tracking.throughput import Throughput, count_tokens, peak_of
from loopwright.training.logbook import Logbook

CPU = torch.device("cpu")


class FakeCopier:
    """Copies on the CPU, and writes down in which order it was asked."""

    def __init__(self, journal):
        self.journal = journal
        self.tickets = itertools.count()

    def start(self, batches):
        ticket = next(self.tickets)
        self.journal.append(("copy", ticket))
        return [map_tensors(batch, torch.clone) for batch in batches], ticket

    def await_copies(self, moved, ticket):
        self.journal.append(("wait", ticket))


def windows(count, journal, fails_at=None):
    for index in range(count):
        journal.append(("read", index))
        if index == fails_at:
            raise DataError(f"window {index} cannot be read")
        pieces = [MicroBatch({"x": torch.full((2,), index), "text": ["a"]}, key=index, rows=2) for _ in range(2)]
        yield Window(pieces, samples=4)


def ahead(count, journal=None, kind=None, **kwargs):
    """Windows that a copier of the CPU copies ahead, noting in the journal what happens when."""
    journal = [] if journal is None else journal
    return prefetched(windows(count, journal, **kwargs), CPU, lambda device: (kind or FakeCopier)(journal))


def test_the_next_window_is_read_and_on_its_way_before_a_window_is_used():
    journal = []
    for window in ahead(4, journal):
        journal.append(("use", int(window.pieces[0].batch["x"][0])))
    steps = [
        [("read", 0), ("copy", 0), ("wait", 0), ("use", 0)],  # the first one does not wait for the second
        [("read", 1), ("copy", 1), ("read", 2), ("copy", 2), ("wait", 1), ("use", 1)],
        [("read", 3), ("copy", 3), ("wait", 2), ("use", 2)],
        [("wait", 3), ("use", 3)],
    ]
    assert journal == sum(steps, [])


def test_a_piece_keeps_its_batch_beside_the_one_that_was_moved():
    (window,) = ahead(1)
    for piece in window.pieces:
        assert piece.moved is not piece.batch and torch.equal(piece.moved["x"], piece.batch["x"])
        assert piece.on(CPU) is piece.moved and piece.rows == 2
    assert window.samples == 4
    assert MicroBatch([torch.ones(1)], 0, 1).on(CPU)[0].tolist() == [1.0]
    assert list(ahead(0)) == []
    given = windows(2, [])
    assert prefetched(given, CPU) is given, "nothing is copied on a CPU"


def test_an_error_comes_when_its_window_is_due_and_not_before():
    seen = []
    with pytest.raises(DataError, match="window 2"):
        for window in ahead(5, fails_at=2):
            seen.append(window.pieces[0].key)
    assert seen == [0, 1]


def test_a_window_of_which_nothing_is_copied_ahead_stays_the_one_that_was_read():
    class Small(FakeCopier):
        def start(self, batches):
            return [None] * len(batches), None

    journal, found = [], list(windows(3, []))
    seen = list(prefetched(iter(found), CPU, lambda device: Small(journal)))
    assert all(one is other for one, other in zip(seen, found, strict=True)) and journal == []


def test_a_window_that_does_not_fit_beside_the_one_in_use_is_copied_when_its_turn_comes():
    journal = []

    class Full(FakeCopier):
        def start(self, batches):
            found = super().start(batches)
            if found[1] == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return found

    seen = list(ahead(3, journal, Full))
    waits = [[piece.moved is None for piece in window.pieces] for window in seen]
    assert waits == [[False] * 2, [True] * 2, [False] * 2]
    assert [int(window.pieces[0].on(CPU)["x"][0]) for window in seen] == [0, 1, 2]
    assert [entry for entry in journal if entry[0] == "wait"] == [("wait", 0), ("wait", 2)]


def test_batches_that_move_themselves_are_left_to_do_so():
    class Graph:
        def to(self, device):
            return self

    pair = namedtuple("pair", "x y")

    @dataclasses.dataclass
    class Fields:
        x: object

    assert _moves_itself(Graph())
    for batch in (torch.ones(1), [torch.ones(1)], {"x": torch.ones(1)}, pair(1, 2), Fields(torch.ones(1))):
        assert not _moves_itself(batch)
    transformers = pytest.importorskip("transformers")
    assert not _moves_itself(transformers.BatchEncoding({"x": torch.ones(1)}))


class CopyingAhead(Logbook):
    def timed(self, windows):
        copier = FakeCopier([])
        self.run.trainer.copiers.append(copier)
        return super().timed(prefetched(windows, self.run.engine.device, lambda device: copier))


class Prefetching(Trainer):
    def create_logbook(self, run):
        self.copiers = []
        return CopyingAhead(run)


def fit(kind, folder=None, stop_at=None):
    saved = {} if folder is None else {"checkpoints": Checkpointing(folder), "resume_from": "auto"}
    options = {"model": toys.network(8, dropout=0.3), "cls": kind, "gradient_accumulation_steps": 2, "log_every": 2}
    return toys.trained([toys.stop_at(stop_at)], toys.data(37), 2, seed=3, **options, **saved)


def test_a_run_with_batches_ahead_has_the_bits_of_one_without():
    ahead = fit(Prefetching)
    assert torch.equal(toys.weights(fit(Trainer)), toys.weights(ahead))
    assert len([one for copier in ahead.copiers for one in copier.journal if one[0] == "copy"]) == 10


@pytest.mark.parametrize("stop_at", [1, 4, 5, 7])
def test_a_run_with_batches_ahead_is_resumed_exactly(tmp_path, stop_at):
    fit(Prefetching, tmp_path, stop_at)
    assert torch.equal(toys.weights(fit(Prefetching, tmp_path)), toys.weights(fit(Trainer)))


def test_tokens_are_counted_without_padding():
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert count_tokens({"input_ids": ids, "attention_mask": mask}) == (4, 8)
    assert count_tokens({"input_ids": ids}) == (8, 8)
    assert count_tokens({"input_ids": ids, "sequence_ids": torch.tensor([[0, 0, 1, -1]] * 2)}) == (6, 8)
    assert count_tokens({"x": ids}) == count_tokens({"input_ids": [1, 2]}) == (0, 0)
    there = ids.to("meta")
    assert count_tokens({"input_ids": there, "attention_mask": there}) == (0, 0)


def test_padding_waste_is_the_share_of_pad_tokens_since_the_last_log():
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    counted = Window([MicroBatch({"input_ids": ids, "attention_mask": mask}, 0, 2)], 2)
    pad = Window([MicroBatch({"input_ids": ids, "attention_mask": mask * 0}, 0, 0)], 0)
    throughput = Throughput(CPU, num_parameters=10, peak_flops=1e3)
    assert throughput.take() == {}
    assert len(list(throughput.watch(iter([counted, pad, counted])))) == 3
    found = throughput.take()
    assert found["padding_waste"] == 0.5
    assert found["tokens_per_second"] / found["samples_per_second"] == pytest.approx(2)
    assert found["flops_utilisation"] == pytest.approx(6 * 10 * found["tokens_per_second"] / 1e3)
    assert throughput.take() == {}


def test_the_watts_of_a_gpu_are_read_at_logs_until_that_fails(monkeypatch):
    answers = [312_500]

    def power_draw(device):
        return answers.pop()  # the second time there is none

    def taken():
        list(throughput.watch(iter([Window([], 5)])))
        return throughput.take()

    monkeypatch.setattr(torch.cuda, "power_draw", power_draw)
    throughput = Throughput(CPU)
    assert "gpu_watts" not in taken() and answers
    throughput = Throughput(torch.device("cuda", 0))
    assert taken()["gpu_watts"] == 312.5
    assert taken()["gpu_watts"] == 312.5  # within a second it is not asked again
    monkeypatch.setattr("loopwright.tracking.throughput._SECONDS_BETWEEN_WATTS", 0.0)
    assert "gpu_watts" not in taken()
    answers.append(100_000)
    assert "gpu_watts" not in taken() and answers


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "no", 156e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Something else", "bf16", None),
    ],
)
def test_the_peak_of_a_device_follows_from_its_name(name, precision, peak):
    assert peak_of(name, precision) == peak
