"""Streams that give every process a part of their own: each sample once, whatever the lengths of the parts."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import toys
from distributed.launcher import Results, run
from loopwright import Checkpointing, Trainer
from loopwright.data import Share, adopt
from loopwright.errors import ConfigError

pytestmark = pytest.mark.distributed

NUM_PROCESSES = 3
SAMPLES = 20
PARTS = {"uneven": (13, 2, 5), "one is empty": (9, 0, 11), "all in one": (0, 20, 0)}
CPU = torch.device("cpu")


class Part(IterableDataset):
    is_split_by_process = True

    def __init__(self, sizes: tuple[int, ...], rank: int):
        first = sum(sizes[:rank])
        self.ids = range(first, first + sizes[rank])
        self.num_read = 0

    def __iter__(self):
        worker = get_worker_info()
        ids = self.ids if worker is None else self.ids[worker.id :: worker.num_workers]
        tensors = toys.data(SAMPLES).tensors
        for index in ids:
            self.num_read += 1
            yield tuple(tensor[index] for tensor in tensors)


class Identities(Trainer):
    def calculate_prediction(self, batch):
        return batch[2]


def fit(loader, **kwargs) -> tuple[list, list]:
    watch = toys.watch(
        on_train_step_end=lambda trainer, batch, **kwargs: (
            [trainer.progress.update, batch[2].tolist()] if trainer.current_rows else None
        )
    )
    trainer = toys.trainer_of([watch], cls=Trainer)
    trainer.train(loader, 2, seed=1, gradient_accumulation_steps=2, **kwargs)
    return [entry for entry in watch.seen if entry], toys.weights(trainer).tolist()


def read_parts(results: Results) -> None:
    rank = int(os.environ["RANK"])
    for name, sizes in PARTS.items():
        part = Part(sizes, rank)
        results[name] = fit(DataLoader(part, 2))[0]
        results[f"{name}: read"] = part.num_read
        predicted = toys.trainer_of(cls=Identities).predict(DataLoader(Part(sizes, rank), 2)).outputs
        results[f"{name}: predicted"] = predicted.tolist()
        evaluated = toys.trainer_of(cls=Trainer).evaluate(DataLoader(Part(sizes, rank), 2))
        results[f"{name}: evaluated"] = evaluated.metrics["evaluation_loss"]
    results["workers"] = fit(DataLoader(Part(PARTS["uneven"], rank), 2, num_workers=2))[0]

    whole = fit(DataLoader(Part(PARTS["uneven"], rank), 2))[1]
    checkpoints = Checkpointing(results.path.parent / "run", every_updates=1)
    fit(DataLoader(Part(PARTS["uneven"], rank), 2), checkpoints=checkpoints, max_num_train_steps=3)
    resumed = fit(DataLoader(Part(PARTS["uneven"], rank), 2), checkpoints=checkpoints, resume_from="auto")[1]
    results["resumed"] = resumed == whole

    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    columns = {"x": [[float(index)] * 4 for index in range(SAMPLES)], "id": list(range(SAMPLES))}
    rows = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
    node = split_dataset_by_node(rows, rank=rank, world_size=NUM_PROCESSES)
    share = Share(rank, NUM_PROCESSES, 2)
    loader = adopt(DataLoader(node, 2), seed=1, share=share, device=CPU)
    results["datasets"] = [
        piece.batch["id"].tolist() for window in loader.windows() for piece in window.pieces if piece.rows
    ]
    with pytest.raises(ConfigError, match="split among 2 processes, and there are 3"):
        adopt(DataLoader(split_dataset_by_node(rows, rank % 2, 2), 2), seed=1, share=share, device=CPU)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(read_parts, tmp_path_factory.mktemp("parts"), NUM_PROCESSES)


@pytest.mark.parametrize("name", [*PARTS, "workers"])
def test_no_sample_of_any_part_is_lost_or_doubled(name, ranks):
    ids = [entry for rank in ranks for entry in rank[name]]
    assert sorted(index for _, batch in ids for index in batch) == sorted(2 * list(range(SAMPLES)))
    # An epoch is as long as the longest part: two micro-batches of two samples an update.
    sizes = PARTS["uneven" if name == "workers" else name]
    assert max(update for update, _ in ids) == 2 * -(-max(sizes) // 4) - 1
    for number, rank in enumerate(ranks):
        own = set(range(sum(sizes[:number]), sum(sizes[: number + 1])))
        assert {index for _, batch in rank[name] for index in batch} == own


@pytest.mark.parametrize("name", PARTS)
def test_a_process_reads_its_own_part_alone_and_evaluations_and_predictions_have_each_sample_once(name, ranks):
    assert [rank[f"{name}: read"] for rank in ranks] == [2 * size for size in PARTS[name]]
    x, y, _ = toys.data(SAMPLES).tensors
    loss = torch.nn.functional.mse_loss(toys.network()(x), y).item()
    for rank in ranks:
        assert sorted(rank[f"{name}: predicted"]) == list(range(SAMPLES))
        assert rank[f"{name}: evaluated"] == pytest.approx(loss, rel=1e-5)


def test_a_run_on_parts_is_resumed_with_the_same_bits(ranks):
    assert [rank["resumed"] for rank in ranks] == [True] * NUM_PROCESSES


def test_a_dataset_that_was_split_by_node_is_not_shared_out_again(ranks):
    assert sorted(index for rank in ranks for batch in rank["datasets"] for index in batch) == list(range(SAMPLES))
