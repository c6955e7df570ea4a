"""Samples of like length together: a pure order, lengths to pad to, and what they save."""

import ast
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

import toys
from data.loaders import adopted
from graphs.recorder import GraphedTrainer
from loopwright import Trainer
from loopwright.checkpoint import Checkpointing
from loopwright.config import TrainingArguments
from loopwright.data import Permutation, Shuffled
from loopwright.data.buckets import (
    Bucketed,
    LengthGroupedSampler,
    bucket_length,
    chosen_lengths,
    default_lengths,
    sample_lengths,
    with_buckets,
)
from loopwright.data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)
from loopwright.errors import ConfigError, DataError
from loopwright.hf.loaders import ColumnCollator


class Pads:
    pad_token_id = 0
    mask_token_id = 1
    all_special_ids = (0, 1)
    model_input_names = ("input_ids", "attention_mask")

    def __len__(self):
        return 50


@st.composite
def orders(draw):
    size = draw(st.integers(1, 400))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(1, 60, size)
    return Bucketed(Shuffled(size, draw(st.integers(0, 2**32))), lengths, draw(st.integers(1, 40)))


@given(st.integers(0, 2**64 - 1), st.integers(1, 5000))
def test_the_positions_of_a_permutation_are_its_inverse(permutation_key, size):
    permutation = Permutation(permutation_key, size)
    everything = np.arange(size)
    assert np.array_equal(permutation.positions_of(permutation(everything)), everything)
    assert np.array_equal(permutation(permutation.positions_of(everything)), everything)


@given(orders(), st.integers(0, 3))
@settings(max_examples=25)
def test_an_epoch_has_every_sample_once(order, epoch):
    assert sorted(order.ids(epoch, 0, order.size).tolist()) == list(range(order.size))


@given(orders(), st.integers(0, 2), st.data())
@settings(max_examples=25)
def test_a_part_from_any_position_is_what_reading_in_order_gives(order, epoch, data):
    whole = order.ids(epoch, 0, order.size)
    start, count = data.draw(st.integers(0, order.size)), data.draw(st.integers(0, order.size))
    assert np.array_equal(order.ids(epoch, start, count), whole[start : start + count])


def test_every_sample_occurs_once_wherever_the_longest_one_is():
    for size, seed, batch_size in product(range(1, 14), range(6), range(1, 6)):
        lengths = np.random.default_rng(seed).integers(1, 60, size)
        assert sorted(Bucketed(Shuffled(size, seed), lengths, batch_size).ids(0, 0, size)) == list(range(size))


@given(orders())
@settings(max_examples=25)
def test_epochs_and_seeds_have_orders_of_their_own_which_begin_with_a_longest_sample_if_a_batch_is_full(order):
    again = Bucketed(Shuffled(order.size, order.order.seed), order.lengths.copy(), order.batch_size)
    other = Bucketed(Shuffled(order.size, order.order.seed + 1), order.lengths, order.batch_size)
    first, second = order.ids(0, 0, order.size), order.ids(1, 0, order.size)
    assert np.array_equal(first, again.ids(0, 0, order.size))
    if order.size > 50:
        assert not np.array_equal(first, second)
        assert not np.array_equal(second, other.ids(1, 0, order.size))
    if order.size >= order.batch_size:
        assert order.lengths[first[: order.batch_size]].max() == order.lengths.max()


def test_batches_hold_samples_of_like_length_and_come_in_a_random_order():
    lengths = np.random.default_rng(0).integers(1, 200, 4000)
    order = Bucketed(Shuffled(4000, 3), lengths, 8)
    batches = lengths[order.ids(1, 0, 4000)].reshape(-1, 8)
    spread = np.ptp(batches, axis=1).mean()
    assert spread < np.ptp(lengths[Shuffled(4000, 3).ids(1, 0, 4000)].reshape(-1, 8), axis=1).mean() / 15
    assert abs(np.corrcoef(batches[:-1, 0], batches[1:, 0])[0, 1]) < 0.15


def test_what_a_short_last_batch_holds_is_not_chosen_by_length():
    lengths = np.arange(23)
    lasts = np.concatenate([Bucketed(Shuffled(23, 0), lengths, 10).ids(epoch, 20, 3) for epoch in range(1, 200)])
    assert 9 < lengths[lasts].mean() < 13


def test_an_order_begins_as_it_always_did_and_finding_a_place_costs_a_window_and_not_the_epoch():
    order = Bucketed(Shuffled(20, 7), np.arange(20) % 6, 4)
    assert order.ids(0, 0, 20).tolist() == [15, 3, 10, 5, 12, 18, 1, 4, 19, 2, 14, 16, 0, 8, 9, 11, 6, 7, 13, 17]
    assert order.ids(5, 0, 20).tolist() == [0, 6, 14, 17, 7, 13, 15, 5, 18, 1, 8, 16, 12, 19, 2, 11, 9, 3, 4, 10]
    order = Bucketed(Shuffled(10**9, 0), np.broadcast_to(np.int64(1), 10**9), 8)
    assert len(set(order.ids(3, 10**9 - 12_345, 100).tolist())) == 100


def test_several_processes_share_the_batches_of_one():
    lengths = np.random.default_rng(1).integers(1, 60, 101)
    source = DataLoader(list(range(101)), batch_size=4, sampler=LengthGroupedSampler(lengths, 4))

    def windows(loader):
        return [[piece.batch.tolist() for piece in window.pieces if piece.rows] for window in loader.windows(2)]

    alone = adopted(source, seed=5, accumulation=6)
    parts = [windows(adopted(source, seed=5, rank=rank, processes=3, accumulation=2)) for rank in range(3)]
    assert [sum(each, []) for each in zip(*parts, strict=True)] == windows(alone)
    assert alone.guarantee.resume == "computed; nothing is read twice"


def test_the_loader_takes_the_seed_of_the_run_and_its_own_batch_size():
    source = DataLoader(list(range(40)), batch_size=5, sampler=LengthGroupedSampler(list(range(40)), 99))
    seen = [int(each) for window in adopted(source, seed=11).windows(1, 10) for each in window.pieces[0].batch]
    assert seen == Bucketed(Shuffled(40, 11), np.arange(40), 5).ids(1, 10, 30).tolist()
    source = DataLoader(list(range(5)), batch_size=2, sampler=SequentialSampler(range(5)))
    in_order = [window.pieces[0].batch.tolist() for window in adopted(source).windows()]
    assert in_order == [[0, 1], [2, 3], [4]], "another sampler stays what it was"


def test_iterated_by_anything_else_a_sampler_yields_the_epoch_that_it_was_told():
    sampler = LengthGroupedSampler(list(range(40)), 5, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert sorted(first) == sorted(sampler) == list(range(40)) and first != list(sampler)
    assert len(sampler) == 40


def sums():
    """A model whose loss depends on which samples come together."""

    def forward(self, input_ids, attention_mask, labels):
        summed = (self.embedding(input_ids) * attention_mask[..., None]).sum(1)
        return {"loss": (self.out(torch.tanh(summed))[:, 0] - labels.float()).square().mean()}

    return toys.net(forward, embedding=nn.Embedding(60, 4), out=nn.Linear(4, 1))


def texts(count=50):
    numbers = np.random.default_rng(4)
    return [
        {"input_ids": numbers.integers(2, 50, int(numbers.integers(3, 40))).tolist(), "label": index % 2}
        for index in range(count)
    ]


def fit(folder=None, stop_at=None, kind=Trainer, lengths=None):
    model, data = toys.seeded(sums), texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    options = {"collate_fn": with_buckets(DataCollatorWithPadding(Pads()), lengths)}
    if folder is not None:
        options |= {"checkpoints": Checkpointing(folder), "resume_from": "auto"}
    loading = {"sampler": LengthGroupedSampler(sample_lengths(data), 4)}
    options |= {"train_dataloader_kwargs": loading, "gradient_accumulation_steps": 2, "log_every": 3, "seed": 1}
    how = {"model": model, "loss_func": None, "optimizer": optimizer, "cls": kind}
    return toys.trained([toys.stop_at(stop_at)], data, 2, **how, **options)


@pytest.mark.parametrize("stop_at", [1, 5, 7, 9])
def test_a_run_in_this_order_is_resumed_with_the_same_bits(tmp_path, stop_at):
    fit(tmp_path, stop_at)
    toys.assert_same_weights(fit(tmp_path), fit())


class Counting(list):
    num_read = 0

    def __getitem__(self, index):
        type(self).num_read += 1
        return super().__getitem__(index)


def test_lengths_come_from_a_column_or_the_main_input_or_a_function():
    rows = [{"input_ids": [1] * (index + 1), "length": 7} for index in range(3)]
    assert sample_lengths(rows).tolist() == [7, 7, 7]
    assert sample_lengths(rows, column="tokens").tolist() == [1, 2, 3]
    assert sample_lengths(rows, function=lambda row: 10 * len(row["input_ids"])).tolist() == [10, 20, 30]
    assert sample_lengths([]).tolist() == []


def test_lengths_of_a_table_are_read_without_its_other_columns():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2, 3]], "length": [5, 6]})
    assert sample_lengths(table).tolist() == [5, 6]
    assert sample_lengths(table, column="none").tolist() == [1, 3]


def test_samples_without_a_length_are_refused_with_what_they_have():
    with pytest.raises(DataError, match="a column length or input_ids, and has text, label"):
        sample_lengths([{"text": "a", "label": 1}])
    with pytest.raises(DataError, match="has tuple"):
        sample_lengths([(1, 2)])


def test_lengths_in_a_file_are_used_again_only_for_the_same_data(tmp_path):
    cache = tmp_path / "lengths.bin"
    rows = Counting({"input_ids": [1] * (index % 9)} for index in range(200))
    expected = sample_lengths(rows, cache=cache).tolist()
    Counting.num_read = 0
    assert sample_lengths(rows, cache=cache).tolist() == expected == [index % 9 for index in range(200)]
    assert Counting.num_read < 20
    longer = Counting([*rows, {"input_ids": [1]}])
    assert sample_lengths(longer, cache=cache).tolist() == [*expected, 1]
    other = Counting({"input_ids": [1] * (index % 5)} for index in range(201))
    assert sample_lengths(other, cache=cache).tolist() == [index % 5 for index in range(201)]
    cache.write_bytes(b"no numbers")
    assert sample_lengths(rows, cache=cache).tolist() == expected


@given(st.integers(1, 200_000), st.integers(1, 20))
def test_default_lengths_ascend_to_the_longest_and_are_few(longest, most):
    lengths = default_lengths(longest, most)
    assert list(lengths) == sorted(set(lengths)) and lengths[-1] == min(longest, 1024)
    assert len(lengths) <= max(most, 2)


def test_default_lengths_are_close_together_where_most_texts_are_and_a_length_goes_to_the_next_one():
    assert default_lengths(128) == (16, 32, 48, 64, 80, 96, 112, 128)
    assert default_lengths(512) == (16, 32, 48, 64, 80, 96, 112, 128, 256, 384, 512)
    assert default_lengths(77) == (16, 32, 48, 64, 77)
    assert [bucket_length(length, (8, 16)) for length in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 17]


def test_the_setting_is_auto_off_or_lengths():
    assert chosen_lengths("auto", 64, may_graph=True) == (16, 32, 48, 64)
    assert chosen_lengths("auto", 64, may_graph=False) is None
    assert chosen_lengths("auto", None, may_graph=True) is None
    assert chosen_lengths("off", 64, may_graph=True) is None
    assert chosen_lengths([64, "32"], None, may_graph=False) == (32, 64)
    for wrong in ("on", [], [0], ["a"], 7):
        with pytest.raises(ConfigError, match="auto"):
            chosen_lengths(wrong, 64, may_graph=True)


def samples(*lengths, **others):
    return [{"input_ids": [7] * length, **{name: make(length) for name, make in others.items()}} for length in lengths]


def test_a_collator_pads_to_the_next_length_and_masks_what_it_adds():
    plain = DataCollatorWithPadding(Pads())
    padded = with_buckets(plain, (8, 16))
    batch = padded(samples(3, 5, label=lambda length: length))
    assert batch["input_ids"].shape == (2, 8) and batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"].tolist() == [3, 5]
    assert [padded(samples(length))["input_ids"].shape for length in (9, 17)] == [(1, 16), (1, 17)]
    assert plain.bucket_lengths is None and plain(samples(3, 5))["input_ids"].shape == (2, 5)
    # A multiple counts beyond the last length, and without a pad token there are batches that need none.
    padded = with_buckets(DataCollatorWithPadding(Pads(), pad_to_multiple_of=8), (10, 20))
    assert [padded(samples(length))["input_ids"].shape[1] for length in (3, 11, 21)] == [10, 20, 24]
    bare = Pads()
    bare.pad_token_id = None
    assert with_buckets(DataCollatorWithPadding(bare), (8, 16))(samples(5, 5))["input_ids"].shape == (2, 5)


def test_labels_of_tokens_targets_choices_and_masked_texts_are_padded_too():
    batch = with_buckets(DataCollatorForTokenClassification(Pads()), (8,))(samples(3, 5, labels=lambda num: [2] * num))
    assert batch["labels"].shape == (2, 8) and (batch["labels"] != -100).sum(1).tolist() == [3, 5]
    batch = with_buckets(DataCollatorForSeq2Seq(Pads()), (4, 8))(samples(7, labels=lambda num: [2, 3]))
    assert batch["input_ids"].shape == (1, 8) and batch["labels"].tolist() == [[2, 3, -100, -100]]
    choices = with_buckets(DataCollatorForMultipleChoice(Pads()), (8,))
    assert choices([{"input_ids": [[7] * 3, [7] * 5], "label": 0}])["input_ids"].shape == (1, 2, 8)
    masked = with_buckets(DataCollatorForLanguageModeling(Pads()), (16,))(samples(9, 12))
    assert masked["input_ids"].shape == masked["labels"].shape == (2, 16)
    assert (masked["labels"][:, 12:] == -100).all()


@pytest.fixture
def tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]")


def test_a_tokenizer_of_transformers_is_asked_for_the_bucket(tokenizer):
    batch = with_buckets(DataCollatorWithPadding(tokenizer), (8, 16))(samples(3, 9))
    assert batch["input_ids"].shape == (2, 16) and batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert type(batch).__name__ == "BatchEncoding"


def test_padding_to_lengths_changes_no_loss_beyond_rounding_and_every_update_but_the_first_is_a_graph():
    lengths = (8, 16, 24, 32, 40)
    plain, padded, graphed = fit(), fit(lengths=lengths), fit(kind=GraphedTrainer, lengths=lengths)
    losses = [each.run_history.get_metric_values("train_loss_epoch") for each in (plain, padded)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert graphed.capturer.num_captures <= 5 + 1 + 2  # the lengths, the optimizer, and the last updates of the epochs
    # All full windows but the first: two batches and a step. The last update of an epoch has one short batch.
    assert graphed.capturer.num_replays == (2 * (50 // 8) - 1) * 3 + 2


def bert_run(folder, **options):
    pytest.importorskip("transformers")
    from hf.tiny import arguments, bert
    from loopwright import hf

    class Watching(hf.Trainer):
        graph_safe = True

        def training_step(self, model, inputs, *args, **kwargs):
            widths.append((inputs["input_ids"].shape[1], int(inputs["attention_mask"].sum(1).max())))
            return super().training_step(model, inputs, *args, **kwargs)

    widths = []
    data = [{**each, "input_ids": [token % 30 for token in each["input_ids"][:30]]} for each in texts(40)]
    collator = options.pop("collator", DataCollatorWithPadding(Pads()))
    trainer = Watching(bert(2), arguments(folder, **options), collator, data)
    trainer.train()
    return trainer, widths


def test_group_by_length_of_the_arguments_is_this_order_and_keeps_the_lengths(tmp_path):
    _, random = bert_run(tmp_path / "random", max_steps=9)
    trainer, grouped = bert_run(tmp_path / "grouped", max_steps=9, train_sampling_strategy="group_by_length")
    assert isinstance(trainer.get_train_dataloader().sampler, LengthGroupedSampler)
    assert trainer.core.train_loader.guarantee.resume == "computed; nothing is read twice"
    assert sum(width for width, _ in grouped[1:]) < sum(width for width, _ in random[1:])
    assert (tmp_path / "grouped" / "lengths.bin").stat().st_size == 40 * 8 + 32  # and their sha256


def test_lengths_of_the_arguments_are_padded_to_in_training_alone(tmp_path):
    trainer, widths = bert_run(tmp_path, length_buckets=[20, 32])
    assert {width for width, _ in widths} == {20, 32} and all(longest <= width for width, longest in widths)
    assert trainer.get_train_dataloader().collate_fn.bucket_lengths == (20, 32)
    assert trainer.get_eval_dataloader(trainer.train_dataset).collate_fn.bucket_lengths is None


def test_lines_on_the_console_say_how_much_is_padding_and_the_history_does_not(tmp_path, capsys):
    trainer, widths = bert_run(tmp_path, length_buckets=[32], logging_steps=1, max_steps=3)
    lines = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{'loss'")]
    assert len(lines) == 3 and len(widths) == 3
    assert all(0 < float(line["padding_waste"]) < 1 for line in lines)
    assert lines[-1]["padding_waste"] == f"{trainer.core.speed['padding_waste']:.4g}"
    assert not any("padding_waste" in entry for entry in trainer.state.log_history)


def test_collators_of_transformers_are_replaced_by_ours_that_pad_to_lengths(tmp_path, tokenizer):
    theirs = pytest.importorskip("transformers").DataCollatorWithPadding(tokenizer)
    _, widths = bert_run(tmp_path, length_buckets=[20, 32], collator=theirs, max_steps=3)
    assert {width for width, _ in widths} <= {20, 32}


def test_the_columns_of_a_model_are_collated_to_lengths_only_by_a_collator_that_pads():
    pads, stacks = DataCollatorWithPadding(Pads()), default_data_collator
    assert ColumnCollator(with_buckets(pads, (8,)), [], [], keeps_others=False).bucket_lengths == (8,)
    assert not hasattr(ColumnCollator(stacks, [], [], keeps_others=False), "bucket_lengths")  # sizes that never change


def test_lengths_that_a_collator_cannot_pad_to_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs a collator that pads"):
        bert_run(tmp_path, length_buckets=[20], collator=DataCollatorWithPadding(Pads()).torch_call)


@pytest.mark.parametrize(
    ("given", "settled"),
    [("auto", "auto"), (["off"], "off"), (["64", "32"], [32, 64]), ([8, 8], [8]), ([], "off")],
    ids=["auto", "off in a list", "words", "twice", "nothing"],
)
def test_the_field_holds_a_word_or_ascending_numbers(given, settled):
    args = TrainingArguments(length_buckets=given)
    assert args.length_buckets == settled
    assert TrainingArguments.from_dict(args.to_dict()).length_buckets == settled


@pytest.mark.parametrize("wrong", ["on", ["a"], [0], [-3]])
def test_a_field_that_says_something_else_is_refused(wrong):
    with pytest.raises(ConfigError, match="length_buckets must be"):
        TrainingArguments(length_buckets=wrong)


@pytest.mark.slow
def test_a_task_trains_in_this_order_and_says_what_padding_costs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    from loopwright import api

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [f"{('good ' if index % 2 else 'bad ') * (index % 13 + 1)}{index},{index % 2}" for index in range(80)]
    (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    flags = {"epochs": 1, "batch": 4, "threads": 1, "rehearsal": False, "logging_steps": 2, "length_buckets": [16, 32]}
    places = {"data": tmp_path / "data.csv", "output_dir": tmp_path / "run"}
    run = api.train("text-classification", **places, train_sampling_strategy="group_by_length", **flags)
    assert (run.path / "lengths.bin").is_file()
    assert "padding " in capsys.readouterr().out
