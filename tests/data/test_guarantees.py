"""Every row of the table in docs/concepts/data_order.md holds for real runs that are saved, resumed and compared."""

import itertools
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import toys
from data import loaders
from loopwright import Trainer
from loopwright.data import Shuffled

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "data_order.md").read_text(encoding="utf-8")
SIZE, BATCH_SIZE, ACCUMULATION, EPOCHS = 22, 4, 2, 3
UPDATES_PER_EPOCH = 3  # 6 micro-batches, 2 to an update


def table():
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"\| *input *\|", line))
    found = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


# What is trained


Augmented = partial(toys.Augmented, SIZE)


class AugmentedStream(loaders.NoisyStream):
    """The same as a stream, shuffled in a buffer, divided among workers, with another start in every epoch."""

    def __init__(self):
        self.samples = Augmented()
        self.epoch = 0

    def __iter__(self):
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        yield from buffer


class OwnLoader(DataLoader):
    def __iter__(self):
        for x, *rest in super().__iter__():
            yield x + torch.rand(4), *rest


class OwnBatches:
    """Ready batches, augmented when they are read."""

    def __iter__(self):
        x, y, _ = toys.data(SIZE).tensors
        for ids in torch.randperm(SIZE).split(BATCH_SIZE):
            yield x[ids] + torch.rand(4), y[ids] + random.random()


LazySampler = partial(loaders.LazySampler, SIZE, SIZE)


class BucketSampler(Sampler):
    """Batches of neighbours, in a drawn order."""

    def __len__(self):
        return -(-SIZE // BATCH_SIZE)

    def __iter__(self):
        starts = list(range(0, SIZE, BATCH_SIZE))
        random.shuffle(starts)
        for start in starts:
            yield list(range(start, min(start + BATCH_SIZE, SIZE)))


class SampleTrainer(Trainer):
    """Takes any iterable of batches, and has a hook that draws in the training process."""

    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        if isinstance(self.train_dataset, OwnBatches):
            return self.train_dataset
        return super().create_train_dataloader(batch_size=batch_size, train_dl_kwargs=train_dl_kwargs)

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        output["loss"] = output["loss"] * (1 + random.random() + np.random.rand())
        return output


def given(dataset, **kwargs):
    return {"train_dataset": dataset, "train_dataloader_kwargs": {"num_workers": 0, **kwargs}}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


# Every row of the table has one input at least; each call makes everything anew, as a new process would.
INPUTS = {
    "dataset with shuffle": [
        lambda: given(Augmented()),
        lambda: given(Augmented(), drop_last=True),
        lambda: given(Augmented(), generator=generator()),
        lambda: given(Augmented(), num_workers=2),
    ],
    "dataset without shuffle": [lambda: given(Augmented(), shuffle=False)],
    "own sampler": [
        lambda: given(Augmented(), sampler=WeightedRandomSampler(torch.arange(1.0, SIZE + 1), SIZE)),
        lambda: given(Augmented(), sampler=RandomSampler(range(SIZE), True, SIZE, generator=generator())),
        lambda: given(Augmented(), sampler=LazySampler()),
        lambda: given(Augmented(), sampler=LazySampler(), num_workers=2),
    ],
    "batch_sampler": [
        lambda: given(Augmented(), batch_sampler=BucketSampler()),
        lambda: given(
            Augmented(), batch_sampler=BatchSampler(RandomSampler(range(SIZE), generator=generator()), 4, False)
        ),
    ],
    "ready DataLoader": [
        lambda: given(DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True)),
        lambda: given(DataLoader(Augmented(), batch_size=BATCH_SIZE)),
    ],
    "DataLoader subclass / any iterable of batches": [
        lambda: given(OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True)),
        lambda: given(OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, generator=generator())),
        lambda: given(OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2)),
        lambda: given(OwnBatches()),
    ],
    "iterable dataset": [
        lambda: given(AugmentedStream()),
        lambda: given(AugmentedStream(), num_workers=2),
    ],
}
CASES = [
    pytest.param(row, make, id=f"{row} {index}") for row, makes in INPUTS.items() for index, make in enumerate(makes)
]


def trained(make, start_seed: int = 0, callbacks=(), **kwargs) -> Trainer:
    """A trainer after a run, begun from weights and generators of this seed."""
    random.seed(start_seed)
    np.random.seed(start_seed)
    torch.manual_seed(start_seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    trainer = SampleTrainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.05), callbacks=callbacks)
    kwargs = {"per_device_batch_size": BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION, **kwargs}
    trainer.train(num_epochs=EPOCHS, **make(), **kwargs)
    return trainer


def bits(trainer: Trainer) -> dict[str, list[float]]:
    return toys.plain(toys.state_of(trainer))


def resumed(make, update: int, folder: Path, resumed_make=None) -> Trainer:
    """A trainer that continued, from other weights and another seed, a run that was saved at this update."""
    save = toys.at_update(update, lambda trainer: trainer.request_save(folder))
    stopped = trained(make, callbacks=[save, toys.stop_at(update)])
    assert stopped.progress.update == update
    return trained(resumed_make or make, start_seed=99, resume_from=folder)


# The table


def test_the_table_has_a_row_for_every_kind_of_input_and_no_other():
    rows = table()
    assert list(rows) == list(INPUTS)
    assert all(list(row) == ["input", "order", "what a resume costs", "exact?"] for row in rows.values())


@pytest.mark.parametrize(("row", "make"), CASES)
def test_a_loader_promises_what_its_row_says(row, make):
    guarantee = trained(make).train_loader.guarantee
    assert (guarantee.order, guarantee.resume) == (table()[row]["order"], table()[row]["what a resume costs"])


@pytest.mark.parametrize(("row", "make"), CASES)
def test_a_run_that_was_saved_in_the_middle_of_an_epoch_and_resumed_is_exact_where_its_row_says_so(row, make, tmp_path):
    assert re.fullmatch(r"yes( \(\d\))?", table()[row]["exact?"])
    whole = trained(make)
    assert whole.progress.epoch == EPOCHS
    again = resumed(make, UPDATES_PER_EPOCH + 2, tmp_path / "state")
    assert bits(again) == bits(whole)
    assert again.progress == whole.progress
    assert again.run_history.latest() == whole.run_history.latest()


@pytest.mark.parametrize("update", [1, UPDATES_PER_EPOCH - 1, UPDATES_PER_EPOCH, UPDATES_PER_EPOCH + 1])
@pytest.mark.parametrize("row", ["dataset with shuffle", "own sampler", "iterable dataset"])
def test_it_does_not_matter_where_a_run_is_saved(row, update, tmp_path):
    make = INPUTS[row][0]
    assert bits(resumed(make, update, tmp_path / "state")) == bits(trained(make))


class PlainTrainer(SampleTrainer):
    """Without the hook that draws from python's and numpy's generators, which depends on the workers."""

    calculate_train_batch_loss = Trainer.calculate_train_batch_loss


@pytest.mark.parametrize(
    "make",
    [
        partial(given, Augmented()),
        partial(given, Augmented(), shuffle=False),
        partial(given, Augmented(), sampler=LazySampler()),
        partial(given, Augmented(), batch_sampler=BucketSampler()),
        lambda num_workers: given(
            DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers)
        ),
    ],
    ids=list(INPUTS)[:5],
)
def test_a_run_may_be_resumed_with_another_number_of_workers(make, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SampleTrainer", PlainTrainer)
    without, with_two = partial(make, num_workers=0), partial(make, num_workers=2)
    expected = bits(trained(without))
    assert bits(trained(with_two)) == expected
    assert bits(resumed(without, 4, tmp_path / "state", with_two)) == expected


def test_another_seed_gives_another_run():
    make = INPUTS["dataset with shuffle"][0]
    assert bits(trained(make, seed=1)) == bits(trained(make, seed=1)) != bits(trained(make, seed=2))


# The rest of the page


def test_the_example_of_the_page_trains_and_can_be_stopped_and_continued_by_its_two_integers():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    whole, halfway = {}, {}
    torch.manual_seed(0)
    exec(example, whole)
    assert (whole["epoch"], whole["position"]) == (2, 0)
    x, y = whole["dataset"].tensors
    assert nn.functional.mse_loss(whole["model"].eval()(x), y) < 2 * y.var()

    torch.manual_seed(0)
    advance = "        position += window.samples\n"
    stop = "        if (epoch, position) == (1, 32):\n            raise KeyboardInterrupt\n"
    with pytest.raises(KeyboardInterrupt):
        exec(example.replace(advance, advance + stop), halfway)
    torch.manual_seed(99)
    _, loop = example.split("epoch, position = 0, 0")
    assert (halfway["epoch"], halfway["position"]) == (1, 32)
    exec(loop.split("\n", 1)[1], halfway)
    toys.assert_same_weights(halfway["model"], whole["model"])


def test_the_order_alone_is_what_the_page_says():
    expression, names = re.search(r"`(Shuffled\(.*?\))` from `(.*?)` gives", PAGE).groups()
    assert names == "loopwright.data"
    loader = loaders.adopted(DataLoader(list(range(100)), batch_size=8, shuffle=True), seed=0)
    window = next(loader.windows(3, 40))
    assert eval(expression, {"Shuffled": Shuffled}).tolist() == window.pieces[0].batch.tolist()
