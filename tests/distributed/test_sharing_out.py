"""Three processes share any data: each sample once and in order, with loaders, samplers and streams of the user's."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import toys
from distributed.launcher import Results, run
from loop.preparation import OwnPreparation
from loopwright import Trainer
from loopwright.errors import ConfigError, LoopwrightError
from loopwright.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only

pytestmark = pytest.mark.distributed

NUM_PROCESSES = 3
SIZES = (1, 2, 7, 20)


class Interleaved(DistributedSampler):
    """A way of sharing out of the user's own."""


def samples(trainer, batch, **kwargs):
    """The update and the samples of a micro-batch; none for a pad."""
    return [trainer.progress.update, batch[2].tolist() if trainer.current_rows else []]


class Ragged(Trainer):
    """Outputs as wide as the largest id of their batch."""

    def calculate_prediction(self, batch):
        ids = batch[2]
        return {"wide": ids.unsqueeze(1).expand(-1, int(ids.max()) + 1), "id": ids}


def share_out(results: Results) -> None:
    rank = int(os.environ["RANK"])
    dataset = toys.data(20)
    sharing = DistributedSampler(dataset, NUM_PROCESSES, rank, shuffle=True, seed=1)
    loaders = {
        "sampler": DataLoader(dataset, 2, sampler=sharing),
        "batch sampler": DataLoader(dataset, batch_sampler=BatchSampler(sharing, 2, False)),
        "stream": DataLoader(toys.Stream(list(dataset)), 2),
    }
    for name, loader in {**loaders, "own preparation": DataLoader(dataset, 2)}.items():
        watch = toys.watch(on_train_step_end=samples)
        trainer = toys.trainer_of([watch], cls=OwnPreparation if name == "own preparation" else Trainer)
        trainer.train(loader, 2, loader, seed=1, gradient_clip_value=0.01)
        results[name] = watch.seen
    with pytest.raises(ConfigError, match="Interleaved splits samples over 3 processes"):
        own = Interleaved(dataset, NUM_PROCESSES, rank)
        toys.trainer_of(cls=Trainer).train(DataLoader(dataset, 2, sampler=own), 1)

    for size in SIZES:
        trainer = toys.trainer_of(cls=Ragged)
        outputs = trainer.predict(toys.data(size), 2).outputs
        are_own = [set(row.tolist()) for row in outputs["wide"]] == [{index} for index in range(size)]
        results[f"predict {size}"] = {"ids": outputs["id"].tolist(), "are_own": are_own}
        results[f"evaluate {size}"] = trainer.evaluate(toys.data(size), 2).metrics["evaluation_loss"]

    watch = toys.watch(on_eval_step_end=lambda trainer, **kwargs: trainer.get_model()[1].running_mean.tolist())
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    trainer = toys.trainer_of([watch], model=model, cls=Trainer)
    trainer.train(dataset, 2, toys.data(7), per_device_batch_size=2, seed=1)
    results["running means"] = watch.seen

    results["gather"] = trainer.gather(torch.full((rank, 2), rank)).tolist()
    raise_in_helpers(results, rank)


def raise_in_helpers(results: Results, rank: int) -> None:
    for raising in (0, 2):

        def function(raising=raising):
            if rank == raising:
                raise KeyError("lost")
            return rank

        outcomes = []
        for helper in (local_process_zero_first, local_process_zero_only, world_process_zero_only):
            try:
                outcomes.append(helper(function)())
            except KeyError:
                outcomes.append("own")
            except LoopwrightError as error:
                outcomes.append(str(error))
        results[f"raised on {raising}"] = outcomes


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return run(share_out, tmp_path_factory.mktemp("sharing"), NUM_PROCESSES)


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream", "own preparation"])
def test_what_shares_out_itself_or_has_no_length_is_shared_out_once(kind, shared):
    ids = [entry for rank in shared for entry in rank[kind]]
    assert sorted(index for _, batch in ids for index in batch) == sorted(2 * list(range(20)))
    # Six samples an update, so four updates an epoch, of which the last has two samples.
    sizes = [sum(len(batch) for update, batch in ids if update == number) for number in range(8)]
    assert sizes == [6, 6, 6, 2] * 2


def test_a_sampler_that_shares_out_gives_its_updates_the_samples_that_it_would(shared):
    ids = [entry for rank in shared for entry in rank["sampler"]]
    for epoch in range(2):
        whole = DistributedSampler(toys.data(20), 1, 0, shuffle=True, seed=1)
        whole.set_epoch(epoch)
        order = list(whole)
        for index in range(4):
            found = {sample for update, batch in ids if update == 4 * epoch + index for sample in batch}
            assert found == set(order[6 * index : 6 * index + 6])


@pytest.mark.parametrize("size", SIZES)
def test_ragged_predictions_come_once_per_sample_and_in_order(size, shared):
    loss = nn.functional.mse_loss(toys.network()(toys.data(size).tensors[0]), toys.data(size).tensors[1])
    for rank in shared:
        assert rank[f"predict {size}"] == {"ids": list(range(size)), "are_own": True}
        assert rank[f"evaluate {size}"] == pytest.approx(loss.item(), rel=1e-5)


def test_all_processes_evaluate_with_the_running_means_of_the_first(shared):
    first, *others = (rank["running means"] for rank in shared)
    assert len(first) >= 2 and first[0] != first[-1]
    assert others == [first] * (NUM_PROCESSES - 1)


def test_rows_are_gathered_also_from_a_process_that_has_none(shared):
    assert [rank["gather"] for rank in shared] == [[[1, 1], [2, 2], [2, 2]]] * NUM_PROCESSES


def test_a_helper_that_raises_anywhere_raises_everywhere(shared):
    for number, rank in enumerate(shared):
        told = "function failed on rank 0: KeyError: 'lost'"
        assert rank["raised on 0"] == (["own"] * 3 if number == 0 else [told] * 3)
        first = "own" if number == 2 else "function failed on rank 2: KeyError: 'lost'"
        assert rank["raised on 2"] == [first, *([0, 0] if number == 0 else [None, None])]
