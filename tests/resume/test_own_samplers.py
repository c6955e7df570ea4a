"""A sampler class of the user's own keeps its own order, and a resumed run continues it."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

import toys
from hf.tiny import Classifier, rows
from loopwright import hf
from loopwright.data.streams import set_epoch_of
from loopwright.engine.seeding import preserved_generators, seed_generators
from loopwright.errors import CheckpointError
from loopwright.keys import key

SIZE, EPOCHS, SEED = 10, 3, 7


class Own(Sampler):
    """Yields every id once, in the order that the class's function `shuffle` gives to a list of them."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        ids = list(range(SIZE))
        self.shuffle(ids)
        yield from ids


def own(shuffle, **attributes):
    sampler = type("Own", (Own,), {"shuffle": shuffle})()
    vars(sampler).update(attributes)
    return sampler


def by_count(self, ids):
    self.calls += 1
    random.Random(self.calls).shuffle(ids)


class Stateful(Own):
    """Has its state in its class, where only its `state_dict` finds it."""

    def shuffle(self, ids):
        type(self).calls += 1
        random.Random(self.calls).shuffle(ids)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        type(self).calls = state["calls"]


class Positioned(Own):
    """Its order follows from `set_epoch`, and its state is the position in an epoch, as in torchdata's samplers."""

    done, start = 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.done, self.start = self.start, 0
        for index in random.Random(self.epoch).sample(range(SIZE), SIZE)[self.done :]:
            self.done += 1
            yield index

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.start = state["done"]


class Reversed(BatchSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def random_sampler(kind="Own"):
    cls = RandomSampler if kind == "torch" else type(kind, (RandomSampler,), {})
    return cls(range(SIZE), generator=torch.Generator().manual_seed(3))


SAMPLERS = {
    "python": lambda: own(lambda self, ids: self.rng.shuffle(ids), rng=random.Random(3)),
    "numpy": lambda: own(lambda self, ids: self.rng.shuffle(ids), rng=np.random.default_rng(3)),
    "count": lambda: own(by_count, calls=0),
    "global": lambda: own(lambda self, ids: random.shuffle(ids)),
    "state_dict": lambda: type("OwnStateful", (Stateful,), {"calls": 0})(),
    "position": Positioned,
    "wrapping": lambda: own(lambda self, ids: ids.sort(key=list(self.inner[0]).index), inner=[random_sampler()]),
    "random": random_sampler,
    "batches": lambda: Reversed(random_sampler("torch"), 4, False),
    "batches of torch": lambda: BatchSampler(own(by_count, calls=0), 4, False),
}


def alone(sampler):
    """Return the batches of a sampler without a trainer; the epoch also seeds the global draws."""
    batches = sampler if isinstance(sampler, BatchSampler) else BatchSampler(sampler, 4, False)
    found = []
    for epoch in range(EPOCHS):
        set_epoch_of(epoch, sampler)
        with preserved_generators():
            seed_generators(key(SEED, "sampler", epoch))
            found += map(list, batches)
    return found


def run(sampler, callbacks=(), **kwargs):
    loading = {"batch_sampler" if isinstance(sampler, BatchSampler) else "sampler": sampler}
    kwargs = {"seed": SEED, "model": toys.network(6, dropout=0.3), **kwargs}
    return toys.trained(callbacks, toys.data(SIZE), EPOCHS, train_dataloader_kwargs=loading, **kwargs)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_its_order_is_that_of_the_class_alone_and_continues_from_every_update(kind, tmp_path):
    whole = run(SAMPLERS[kind](), checkpoints=toys.saving(tmp_path))
    assert whole.seen == alone(SAMPLERS[kind]()) and len(whole.seen) == 9
    for update in range(1, 9):
        toys.assert_resumed(run(SAMPLERS[kind](), resume_from=toys.step(tmp_path, update)), whole, update)
    assert toys.records(tmp_path, "tier") == []


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_eval_epoch_end", "on_training_run_epoch_end"])
def test_a_save_between_epochs_has_the_state_of_the_next_one(event, tmp_path):
    def save(trainer, **kwargs):
        trainer.request_save(tmp_path / str(trainer.run_history.current_epoch))

    whole = run(own(by_count, calls=0), [toys.callback(**{event: save})], eval_dataset=toys.data(4))
    for epoch in (1, 2):
        resumed = run(own(by_count, calls=0), resume_from=tmp_path / str(epoch), eval_dataset=toys.data(4))
        assert resumed.seen == whole.seen[3 * epoch :]


def test_neither_an_interrupted_epoch_nor_a_search_for_a_rate_moves_the_order(tmp_path):
    def interrupt(trainer, **kwargs):
        if trainer.progress.update == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SAMPLERS["python"](), [toys.callback(on_train_step_start=interrupt)], checkpoints=toys.saving(tmp_path))
    resumed = run(SAMPLERS["python"](), resume_from="auto", checkpoints=toys.saving(tmp_path))
    assert resumed.seen == alone(SAMPLERS["python"]())[3:]

    sampler, trainer = SAMPLERS["random"](), toys.trainer_of()
    trainer.find_lr(toys.data(SIZE), 4, num_updates=5, seed=SEED, train_dataloader_kwargs={"sampler": sampler})
    assert run(sampler).seen == alone(SAMPLERS["random"]())


@pytest.mark.parametrize(("seeds", "update"), [((number for number in range(9)), 0), (itertools.count(), 3)])
def test_a_state_that_cannot_be_saved_lowers_the_guarantee_as_soon_as_it_is_known(seeds, update, tmp_path, capsys):
    sampler = own(lambda self, ids: random.Random(next(self.seeds)).shuffle(ids), seeds=seeds)
    run(sampler, checkpoints=toys.saving(tmp_path))
    (lowered,) = toys.records(tmp_path, "tier")
    assert (lowered["tier"], lowered["update"]) == ("T3", update)
    assert "Resume guarantee T3 from here on: Own.seeds has changed and cannot be saved" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"Own\.seeds has changed"):
        run(sampler, checkpoints=toys.saving(tmp_path, require_exact=True), resume_from="auto")


def test_hf_keeps_the_order_of_a_sampler_of_its_subclass(tmp_path):
    class Recording(hf.Trainer):
        def _get_train_sampler(self, *args):
            self.seen = []
            return own(by_count, calls=0)

        def compute_loss(self, model, inputs, *args, **kwargs):
            self.seen += inputs["x"][:, 0].tolist()
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 4, "save_steps": 1, "use_cpu": True}
    runs = []
    for resume in (None, tmp_path / "0" / "checkpoint-5"):
        args = hf.TrainingArguments(tmp_path / str(len(runs)), report_to="none", disable_tqdm=True, **options)
        runs.append(Recording(toys.seeded(Classifier, dropout=0.3), args, train_dataset=rows(SIZE)))
        runs[-1].train(resume_from_checkpoint=resume)
    expected = [rows(SIZE)[index]["x"][0].item() for ids in alone(own(by_count, calls=0)) for index in ids]
    assert runs[0].seen == runs[1].seen == expected  # what the trainer has seen before is state of the run
    toys.assert_same_weights(*runs)
