"""Collators: equal to transformers' where those are right, without side effects, and repeatable in our loaders."""

import copy
import dataclasses
import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from loopwright.data import Share, adopt, collators
from loopwright.data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)
from loopwright.errors import DataError

from .tiny import PlainTokenizer, assert_refused

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["play", "##ing", "##ed", "un", "##believ", "##able", "the", "cat", "sat", "on", "mat", ".", ","]
VOCABULARY = {token: index for index, token in enumerate(NAMES + WORDS)}
TEXTS = ["the cat played", "unbelievable", "the playing cat sat on the unbelievable mat.", "cat, cat"]


def fast_tokenizer(side: str = "right", **changes):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    kwargs = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kwargs |= {"mask_token": "[MASK]", "padding_side": side}
    kwargs["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **(kwargs | changes))


def theirs(name: str):
    return getattr(pytest.importorskip("transformers"), name)


def encoded(tokenizer, **options):
    return [dict(tokenizer(text, "cat", **options)) for text in TEXTS]


def assert_same_batch(ours, other):
    assert sorted(ours.keys()) == sorted(other.keys())
    for name in list(ours):
        assert type(ours[name]) is type(other[name]), name
        assert getattr(ours[name], "dtype", int) == getattr(other[name], "dtype", int), name
        assert np.array_equal(ours[name], other[name]), name


def listed(batch):
    return {name: column.tolist() for name, column in batch.items()}


@pytest.mark.parametrize(
    "name", sorted(set(collators.__all__) - {"default_data_collator", "DataCollatorWithFlattening"})
)
def test_a_collator_has_the_fields_of_transformers_in_their_order_and_with_their_defaults(name):
    def described(kind):
        return [(field.name, field.default) for field in dataclasses.fields(kind)]

    assert len(collators.__all__) == 8
    assert not hasattr(collators, "DataCollatorForPermutationLanguageModeling")
    assert described(getattr(collators, name)) == described(theirs(name))


PLAIN_SAMPLES = {
    "integers as labels": [{"label": 1, "x": [1, 2], "y": 0.5}, {"label": 0, "x": [3, 4], "y": 1.5}],
    "floats as labels": [{"label": 0.5, "x": [1.0, 2.0]}, {"label": 2.0, "x": [3.0, 4.0]}],
    "booleans": [{"label": True, "x": True}, {"label": False, "x": False}],
    "a list as label": [{"label": [1, 0, 1]}, {"label": [0, 0, 1]}],
    "label ids": [{"label_ids": [1, 2], "x": 1}, {"label_ids": [3, 4], "x": 2}],
    "label ids that are floats": [{"label_ids": [1.5, 2.0]}, {"label_ids": [3.0, 4.0]}],
    "labels": [{"labels": [1, 2], "text": "a"}, {"labels": [3, 4], "text": "b"}],
    "tables": [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6], [7, 8]]}],
    "arrays": [{"x": np.float32([1, 2]), "label": np.int64(1)}, {"x": np.float32([3, 4]), "label": np.int64(2)}],
    "what is None": [{"x": 1, "y": None}, {"x": 2, "y": None}],
}


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("case", sorted(PLAIN_SAMPLES))
def test_samples_are_stacked_as_in_transformers(case, kind):
    samples = PLAIN_SAMPLES[case]
    expected = theirs("default_data_collator")(samples, kind)
    assert_same_batch(default_data_collator(samples, kind), expected)
    assert_same_batch(DefaultDataCollator(return_tensors=kind)(samples), expected)
    assert_same_batch(DefaultDataCollator()(samples, return_tensors=kind), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"x": torch.rand(2, 3), "label": torch.tensor(n), "z": torch.tensor([n], dtype=torch.int8)},
        lambda n: {"label": torch.tensor([n])},
        lambda n: {"label_ids": torch.tensor([n, 2])},
    ],
    ids=["several", "label", "label_ids"],
)
def test_tensors_are_stacked_as_in_transformers(make):
    samples = [make(0), make(1)]
    assert_same_batch(default_data_collator(samples), theirs("default_data_collator")(samples))


@dataclasses.dataclass
class Sample:
    x: list[int]
    label: int
    text: str = "left out"


@dataclasses.dataclass
class SlottedSample:
    __slots__ = ("x", "label")
    x: list[int]
    label: int


@pytest.mark.parametrize("make", [Sample, SlottedSample, SimpleNamespace, lambda **row: theirs("BatchEncoding")(row)])
def test_samples_may_be_dataclasses_objects_or_encodings(make):
    batch = default_data_collator([make(x=[1, 2], label=0), make(x=[3, 4], label=1)])
    assert listed(batch) == {"labels": [0, 1], "x": [[1, 2], [3, 4]]}


def test_text_is_removed_also_in_lists_and_labels_take_precedence_over_label():
    samples = [{"x": 1, "text": "a", "tokens": ["a", "b"], "pairs": [["a"], ["b"]]} for _ in range(2)]
    assert list(default_data_collator(samples)) == ["x"]
    samples = [{"input_ids": [1] * n, "text": "a", "tokens": ["a"] * n} for n in (1, 2)]
    assert sorted(DataCollatorWithPadding(PlainTokenizer())(samples)) == ["attention_mask", "input_ids"]
    samples = [{"label": 0, "labels": [0.9, 0.1]}, {"label": 1, "labels": [0.2, 0.8]}]
    assert default_data_collator(samples)["labels"].tolist() == torch.tensor([[0.9, 0.1], [0.2, 0.8]]).tolist()
    samples = [{**sample, "input_ids": [5]} for sample in samples]
    assert DataCollatorWithPadding(PlainTokenizer())(samples)["labels"].shape == (2, 2)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], r"'x' differ .* length 2, length 3\. Pad them .*DataCollatorWithPadding"),
        ([{"x": [[1], [1, 2]]}, {"x": [[1, 2], [1, 2]]}], r"'x' .* lengths \[1, 2\], lengths \[2, 2\]"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], r"'x' .* shape \(2,\), shape \(3,\)"),
        ([], "at least one sample"),
        ([{}, {}], "are empty"),
        ([(1, 2)], "got tuple"),
        ([torch.zeros(2)], "got Tensor"),
        ([{"x": 1, "y": 2}, {"x": 1}], r"sample 0 has \['x', 'y'\], sample 1 has \['x'\]"),
        ([{"x": 1}, {"x": 1, "y": 2}], r"sample 0 has \['x'\], sample 1 has \['x', 'y'\]"),
        ([{"x": 1}, {"x": None}], "'x' is None in sample 1"),
        ([{"x": {"a": 1}}, {"x": {"a": 2}}], r"'x' \(dict\) are not numbers"),
    ],
    ids=["uneven", "nested", "shapes", "none", "empty", "tuples", "tensors", "missing", "added", "None", "dicts"],
)
def test_samples_that_cannot_be_a_batch_are_explained(samples, text):
    assert_refused(text, default_data_collator, samples, error=DataError)


@pytest.mark.parametrize("kind", ["tf", "jax", None])
def test_other_kinds_of_tensors_are_refused(kind):
    assert_refused("must be 'pt'", default_data_collator, [{"x": 1}], kind)
    assert_refused("must be 'pt'", DataCollatorWithPadding, PlainTokenizer(), return_tensors=kind)
    collator = DataCollatorForSeq2Seq(PlainTokenizer())
    assert_refused("must be 'pt'", collator, [{"input_ids": [1]}], return_tensors="tf")


PADDINGS = {
    "longest": {},
    "a multiple": {"pad_to_multiple_of": 8},
    "max_length": {"padding": "max_length", "max_length": 17},
    "max_length to a multiple": {"padding": "max_length", "max_length": 17, "pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", sorted(PADDINGS))
def test_padding_is_the_same_as_in_transformers(case, side, kind):
    tokenizer, options = fast_tokenizer(side), {**PADDINGS[case], "return_tensors": kind}
    labels = {
        DataCollatorWithPadding: lambda index, sample: {"label": index},
        DataCollatorForTokenClassification: lambda index, sample: {"labels": sample["input_ids"][::-1]},
        DataCollatorForSeq2Seq: lambda index, sample: {"labels": [7] * (index + 2)},
    }
    for collator, label in labels.items():
        samples = [{**sample, **label(index, sample)} for index, sample in enumerate(encoded(tokenizer))]
        batch = collator(tokenizer, **options)(samples)
        assert_same_batch(batch, theirs(collator.__name__)(tokenizer, **options)(samples))
        assert 0 < batch["token_type_ids"].sum() < batch["attention_mask"].sum()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", sorted(PADDINGS))
def test_a_tokenizer_that_cannot_pad_gives_the_same_result(case, side):
    real, plain = fast_tokenizer(side), PlainTokenizer(side)
    samples = encoded(real, return_special_tokens_mask=True)
    ours = DataCollatorWithPadding(plain, **PADDINGS[case])(samples)
    assert_same_batch(ours, DataCollatorWithPadding(real, **PADDINGS[case])(samples))
    without_mask = [{"input_ids": sample["input_ids"]} for sample in samples]
    created = DataCollatorWithPadding(plain, **PADDINGS[case])(without_mask)
    assert created["attention_mask"].tolist() == ours["attention_mask"].tolist()


def test_padding_is_on_the_side_of_the_tokenizer_keeps_float_labels_and_may_be_of_a_feature_extractor():
    samples = [{"input_ids": [5], "labels": [1]}, {"input_ids": [6, 7, 8], "labels": [1, 2, 3]}]
    expected = {"input_ids": [[0, 0, 5], [6, 7, 8]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
    batch = DataCollatorForTokenClassification(PlainTokenizer("left"))(samples)
    assert listed(batch) == {**expected, "labels": [[-100, -100, 1], [1, 2, 3]]}
    samples = [{"input_ids": [5], "labels": [0.5]}, {"input_ids": [5, 6], "labels": [0.25, 1.0]}]
    labels = DataCollatorForTokenClassification(PlainTokenizer())(samples)["labels"]
    assert labels.tolist() == [[0.5, -100.0], [0.25, 1.0]]
    extractor = theirs("Wav2Vec2FeatureExtractor")(return_attention_mask=True)
    batch = DataCollatorWithPadding(extractor)([{"input_values": np.ones(n, np.float32), "label": n} for n in (2, 3)])
    padded = [[1, 1, 0], [1, 1, 1]]
    assert listed(batch) == {"input_values": padded, "attention_mask": padded, "labels": [2, 3]}


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor], ids=["arrays", "tensors"])
def test_padded_columns_may_be_arrays_or_tensors(convert):
    tokenizer = fast_tokenizer()
    samples = [{**sample, "labels": sample["input_ids"]} for sample in encoded(tokenizer)]
    converted = [{name: convert(value) for name, value in sample.items()} for sample in samples]
    for collator in (DataCollatorForTokenClassification(tokenizer), DataCollatorForSeq2Seq(tokenizer)):
        assert_same_batch(collator(converted), collator(samples))


def test_other_columns_are_stacked_label_ids_become_labels_and_a_batch_can_be_moved():
    arrays = {"vector": np.float16([1, 2]), "image": torch.zeros(2, 2)}
    samples = [{"input_ids": [5] * n, "score": 0.5, "labels": n, **arrays} for n in (1, 2)]
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        batch = DataCollatorWithPadding(tokenizer)(samples)
        assert (batch["score"].dtype, batch["vector"].dtype) == (torch.float32, torch.float16)
        assert batch["image"].shape == (2, 2, 2)
        assert batch["labels"].tolist() == [1, 2]
    moved = batch.to("cpu")
    assert isinstance(moved, theirs("BatchEncoding")) and moved.input_ids.shape[0] == 2
    samples = [{"input_ids": [5, 6], "label_ids": [1, 2]}, {"input_ids": [7, 8], "label_ids": [3, 4]}]
    for kind in (DataCollatorWithPadding, DataCollatorForTokenClassification, DataCollatorForSeq2Seq):
        assert kind(PlainTokenizer())(samples)["labels"].tolist() == [[1, 2], [3, 4]]


def test_a_missing_pad_token_is_refused_only_if_it_is_needed():
    for tokenizer in (fast_tokenizer(pad_token=None), PlainTokenizer()):
        tokenizer.pad_token_id = None
        collator = DataCollatorWithPadding(tokenizer)
        assert collator([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])["attention_mask"].tolist() == [[1, 1], [1, 1]]
        text = r"1 to 2 tokens .* to 2, .* tokenizer.pad_token = tokenizer.eos_token"
        assert_refused(text, collator, [{"input_ids": [5]}, {"input_ids": [7, 8]}])
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
        assert_refused("has no pad token", collator, [[5, 6], [7, 8]])


def test_without_padding_even_samples_are_stacked_and_others_refused():
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        collator = DataCollatorForSeq2Seq(tokenizer, padding=False)
        batch = collator([{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7, 8], "labels": [2]}])
        assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[5, 6], [7, 8]], [[1], [2]])
        uneven = [{"input_ids": [5]}, {"input_ids": [7, 8]}]
        assert_refused(r"'input_ids' .* length 1, length 2", collator, uneven, error=DataError)


def test_impossible_padding_is_refused_and_a_max_length_without_effect_reported_when_the_collator_is_created():
    plain, real = PlainTokenizer(), fast_tokenizer()
    assert_refused("padding must be", DataCollatorWithPadding, plain, padding="shortest")
    for tokenizer in (plain, real):
        collator = DataCollatorWithPadding(tokenizer, padding="max_length")
        assert_refused("pass max_length", collator, [{"input_ids": [1]}])
    collator = DataCollatorWithPadding(plain)
    assert_refused(r"no 'input_ids' .* names \['x'\]", collator, [{"x": 1}], error=DataError)
    uneven = [{"input_ids": [1] * n, "labels": [1] * n} for n in (1, 2)]
    assert_refused(r"'labels' .* length 1, length 2", collator, uneven, error=DataError)
    collator = DataCollatorWithPadding(plain, padding="max_length", max_length=4)
    long = [{"input_ids": [1]}, {"input_ids": [1] * 9}]
    assert_refused(r"'input_ids' .* length 4, length 9", collator, long, error=DataError)
    with pytest.warns(UserWarning, match="max_length=8 has no effect with padding=True") as caught:
        collator = DataCollatorWithPadding(real, max_length=8)
    assert [warning.filename for warning in caught] == [__file__]
    assert collator([{"input_ids": [5]}, {"input_ids": [5, 6]}])["input_ids"].shape == (2, 2)


def test_labels_that_are_not_per_token_are_refused():
    tokens, targets = DataCollatorForTokenClassification(PlainTokenizer()), DataCollatorForSeq2Seq(PlainTokenizer())
    words = [{"input_ids": [5], "labels": [1]}, {"input_ids": [5, 6, 7], "labels": [1, 2]}]
    for collator, samples, text in (
        (tokens, words, "sample 1 of the batch has 2 labels for 3 tokens"),
        (tokens, [{"input_ids": [5, 6], "label": 1}], "sample 0 of the batch has a single label for 2 tokens"),
        (targets, [{"input_ids": [5], "label": 1}], "lists of tokens"),
    ):
        assert_refused(text, collator, samples, error=DataError)


class ShiftingModel:
    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(labels[:, :1], 9), labels[:, :-1]], dim=1).masked_fill(labels == -100, 0)


def test_the_model_creates_the_inputs_of_the_decoder_and_labels_may_be_missing():
    tokenizer = fast_tokenizer()
    samples = [{**sample, "labels": [7] * (index + 2)} for index, sample in enumerate(encoded(tokenizer))]
    batch = DataCollatorForSeq2Seq(tokenizer, ShiftingModel())(samples)
    assert_same_batch(batch, theirs("DataCollatorForSeq2Seq")(tokenizer, ShiftingModel())(samples))
    assert batch["decoder_input_ids"][0].tolist() == [9, 7, 0, 0, 0]
    arrays = DataCollatorForSeq2Seq(tokenizer, ShiftingModel(), return_tensors="np")(samples)
    assert isinstance(arrays["decoder_input_ids"], np.ndarray)
    assert arrays["decoder_input_ids"].tolist() == batch["decoder_input_ids"].tolist()
    samples = [{"input_ids": [5], "labels": None}, {"input_ids": [6, 7], "labels": None}]
    for kind in (DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding):
        assert sorted(kind(PlainTokenizer())(samples)) == ["attention_mask", "input_ids"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["label", "labels"])
def test_choices_are_batched_as_in_transformers(name, side):
    tokenizer = fast_tokenizer(side)
    ids = [tokenizer([first] * 2, [second, "cat"])["input_ids"] for first, second in pairwise(TEXTS)]
    samples = [{"input_ids": pair, name: index % 2} for index, pair in enumerate(ids)]
    batch = DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=4)(samples)
    collator = theirs("DataCollatorForMultipleChoice")(tokenizer, pad_to_multiple_of=4)
    assert_same_batch(batch, collator(copy.deepcopy(samples)))
    assert batch["input_ids"].shape[:2] == (3, 2)
    plain = DataCollatorForMultipleChoice(PlainTokenizer(side), pad_to_multiple_of=4)
    assert_same_batch(plain(samples), batch)
    arrays = plain(samples, return_tensors="np")
    assert all(isinstance(value, np.ndarray) for value in arrays.values())
    assert arrays["input_ids"].tolist() == batch["input_ids"].tolist()


def test_choices_need_no_label_and_the_same_number_in_every_sample():
    collator = DataCollatorForMultipleChoice(PlainTokenizer())
    assert collator([{"input_ids": [[5], [6, 7]]}])["input_ids"].tolist() == [[[5, 0], [6, 7]]]
    for text, samples in (
        (r"'input_ids' has \[2, 1\], where 2 were expected", [{"input_ids": [[5], [6]]}, {"input_ids": [[5]]}]),
        (r"'id' has \[0, 0\]", [{"input_ids": [[5], [6]], "id": id} for id in (1, 2)]),
        ("there is no 'input_ids'", [{"x": [[5], [6]]}]),
    ):
        assert_refused(text, collator, samples, error=DataError)


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("has_labels", [True, False], ids=["labels", "no labels"])
def test_samples_are_joined_as_in_transformers(has_labels, kind):
    samples = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}, {"input_ids": [9, 10], "label": 1}]
    if has_labels:
        samples = [{**sample, "labels": [id + 1 for id in sample["input_ids"]]} for sample in samples]
    options = {"separator_id": -7, "return_flash_attn_kwargs": True, "return_seq_idx": True, "position_ids_start": 2}
    for given in ({}, options, {"return_position_ids": False}):
        ours = DataCollatorWithFlattening(return_tensors=kind, **given)
        other = theirs("DataCollatorWithFlattening")(return_tensors=kind, **given)
        assert_same_batch(ours(samples), other(samples))
        assert_same_batch(ours(samples, separator_id=3), other(samples, separator_id=3))
        assert_same_batch(ours(samples, return_tensors="np"), other(samples, return_tensors="np"))


def test_joining_keeps_ids_and_labels_aligned():
    collator = DataCollatorWithFlattening()
    batch = collator([{"input_ids": torch.tensor([5, 6])}, {"input_ids": torch.tensor([], dtype=torch.int64)}])
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[5, 6]], [[-100, 6]])
    text = "sample 0 of the batch has 1 labels for 2 tokens"
    assert_refused(text, collator, [{"input_ids": [5, 6], "labels": [5]}], error=DataError)
    assert_refused("no 'input_ids'", collator, [{"ids": [5, 6]}], error=DataError)


def every_collator():
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        yield DataCollatorWithPadding(tokenizer)
        yield DataCollatorForTokenClassification(tokenizer)
        yield DataCollatorForSeq2Seq(tokenizer, ShiftingModel())
        yield DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.9)
        yield DataCollatorForLanguageModeling(tokenizer, mlm=False)
    yield from (DataCollatorWithFlattening(), default_data_collator)


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("convert", [list, np.asarray, torch.tensor], ids=["lists", "arrays", "tensors"])
@pytest.mark.parametrize("size", [1, 2])
def test_no_collator_changes_or_aliases_its_samples(size, convert, kind):
    rows = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]][:size]
    samples = [{"input_ids": convert(row), "labels": convert(row), "special_tokens_mask": [0] * 5} for row in rows]
    before = repr(samples)
    for collator in every_collator():
        for value in collator(samples, return_tensors=kind).values():
            value += 1
        assert repr(samples) == before, collator
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        samples = [{"input_ids": [[5], [6, 7]], "attention_mask": [[1], [1, 1]], "label": 1} for _ in range(2)]
        before = copy.deepcopy(samples)
        assert DataCollatorForMultipleChoice(tokenizer)(samples)["labels"].tolist() == [1, 1]
        assert samples == before


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("seed", [None, 3], ids=["global generator", "own generator"])
def test_masks_are_the_same_as_in_transformers_with_the_same_seed(seed, kind):
    tokenizer = fast_tokenizer()
    options = {"mlm_probability": 0.5, "seed": seed, "return_tensors": kind, "pad_to_multiple_of": 8}
    ours = DataCollatorForLanguageModeling(tokenizer, **options)
    other = theirs("DataCollatorForLanguageModeling")(tokenizer, **options)
    for samples in (encoded(tokenizer), encoded(tokenizer, return_special_tokens_mask=True)):
        for repeat in range(3):
            batches = []
            for collator in (ours, other):
                torch.manual_seed(repeat)
                np.random.seed(repeat)
                batches.append(collator(samples))
            assert_same_batch(*batches)
            assert (np.asarray(batches[0]["labels"]) != -100).any()


def test_80_percent_are_masked_10_are_random_and_10_stay():
    tokenizer = PlainTokenizer(size=30_000)
    ids = torch.randint(5, 30_000, (200, 500))
    for kind in ("pt", "np"):
        batch = DataCollatorForLanguageModeling(tokenizer, return_tensors=kind)([{"input_ids": row} for row in ids])
        inputs, labels = (torch.as_tensor(batch[name]) for name in ("input_ids", "labels"))
        asked = labels != -100
        assert torch.equal(labels[asked], ids[asked])
        assert torch.equal(inputs[~asked], ids[~asked])
        assert asked.float().mean().item() == pytest.approx(0.15, abs=0.005)
        masked, same = inputs[asked] == 4, inputs[asked] == ids[asked]
        assert masked.float().mean().item() == pytest.approx(0.8, abs=0.01)
        assert same.float().mean().item() == pytest.approx(0.1, abs=0.01)
        assert (~masked & ~same).float().mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("mask", "random", "kept"), [(1, 0, 0), (0, 1, 0), (0.8, 0.2, 0), (0, 0, 1), (0.5, 0.25, 0.25)]
)
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_the_shares_of_replaced_tokens_can_be_set(mask, random, kept, kind):
    ids = torch.full((50, 200), 7)
    collator = DataCollatorForLanguageModeling(
        PlainTokenizer(size=30_000), mask_replace_prob=mask, random_replace_prob=random, return_tensors=kind
    )
    batch = collator([{"input_ids": row} for row in ids])
    replaced = torch.as_tensor(batch["input_ids"])[torch.as_tensor(batch["labels"]) != -100]
    assert (replaced == 4).float().mean().item() == pytest.approx(mask, abs=0.05)
    assert (replaced == 7).float().mean().item() == pytest.approx(kept, abs=0.05)


@pytest.mark.parametrize("side", ["right", "left"])
def test_special_tokens_and_padding_are_never_masked(side):
    for tokenizer in (PlainTokenizer(side), fast_tokenizer(side)):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
        batch = collator([{"input_ids": [2, 7, 8, 3]}, {"input_ids": [2, 7, 8, 9, 10, 3]}])
        expected, pad = [[-100, 7, 8, -100], [-100, 7, 8, 9, 10, -100]], [-100, -100]
        assert batch["labels"].tolist() == [expected[0] + pad if side == "right" else pad + expected[0], expected[1]]
        batch = collator([{"input_ids": [7, 8, 9], "special_tokens_mask": [0, 1, 0]}])  # as the sample declares
        assert batch["labels"].tolist() == [[7, -100, 9]]
        assert "special_tokens_mask" not in batch
        batch = collator([{"input_ids": [7, 8, 9], "attention_mask": [1, 1, 0]}])
        assert batch["labels"].tolist() == [[7, 8, -100]]


def test_samples_may_be_lists_of_ids():
    for first, second in ((list, list), (torch.tensor, torch.tensor), (np.array, list)):
        batch = DataCollatorForLanguageModeling(PlainTokenizer(), mlm=False)([first([7, 8]), second([7, 8, 9])])
        expected = {"input_ids": [[7, 8, 0], [7, 8, 9]], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
        assert listed(batch) == {**expected, "labels": [[7, 8, -100], [7, 8, 9]]}


def test_impossible_masking_is_refused_when_the_collator_is_created():
    tokenizer, kind = PlainTokenizer(), DataCollatorForLanguageModeling
    bare = SimpleNamespace(mask_token_id=4, pad_token_id=0)
    for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
        for value in (-0.1, 1.1, None):
            assert_refused(f"{name} must be between 0 and 1", kind, tokenizer, **{name: value})
    text = r"must not exceed 1 together, got 1\.2"
    assert_refused(text, kind, tokenizer, mask_replace_prob=0.9, random_replace_prob=0.3)
    assert_refused("pass mlm=True", kind, tokenizer, mlm=False, whole_word_mask=True)
    assert_refused(r"no mask token.* mlm=False", kind, fast_tokenizer(mask_token=None))
    assert_refused("has no length", kind, bare)
    assert_refused("no all_special_ids", kind(bare, random_replace_prob=0), [[5]])


def test_masking_and_calls_can_be_overridden_as_with_transformers():
    class EverySecond(DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs, special_tokens_mask=None):
            labels = inputs.clone()
            labels[:, ::2] = -100
            return inputs.masked_fill(labels != -100, self.tokenizer.mask_token_id), labels

        def torch_call(self, examples):
            return {**super().torch_call(examples), "rows": torch.tensor(len(examples))}

    batch = listed(EverySecond(PlainTokenizer())([[5, 6, 7, 8]]))
    assert batch.pop("attention_mask") == [[1] * 4]
    assert batch == {"input_ids": [[5, 4, 7, 4]], "labels": [[-100, 6, -100, 8]], "rows": 1}


WORD_SOURCES = {
    "##": lambda encoding: {},
    "offsets": lambda encoding: {"offset_mapping": encoding["offset_mapping"]},
    "word ids": lambda encoding: {"word_ids": encoding.word_ids()},
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("source", WORD_SOURCES)
def test_words_are_masked_as_a_whole_or_not_at_all(source, kind, side):
    tokenizer = fast_tokenizer(side)
    encodings = [tokenizer(text, "playing cat", return_offsets_mapping=True) for text in TEXTS]
    samples = [{"input_ids": encoding["input_ids"], **WORD_SOURCES[source](encoding)} for encoding in encodings]
    goes_on = [token.startswith("##") for token in VOCABULARY]
    options = {"whole_word_mask": True, "mlm_probability": 0.5, "return_tensors": kind}
    collator = DataCollatorForLanguageModeling(tokenizer, **options)
    plain = DataCollatorWithPadding(tokenizer)([{"input_ids": sample["input_ids"]} for sample in samples])
    num_asked, num_continued = 0, 0
    for _ in range(20):
        batch = collator(samples)
        assert sorted(batch.keys()) == ["attention_mask", "input_ids", "labels"]
        for ids, labels in zip(plain["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            for at in range(1, len(ids)):
                assert labels[at] in (-100, ids[at]) and labels[at] not in range(5)
                assert not goes_on[ids[at]] or (labels[at] == -100) == (labels[at - 1] == -100)
                num_continued += goes_on[ids[at]]
                num_asked += labels[at] != -100
    assert num_continued == 200 and num_asked > 0


def test_whole_words_are_the_same_as_in_transformers_if_gaps_separate_them():
    tokenizer = fast_tokenizer()
    samples = encoded(tokenizer, return_offsets_mapping=True, return_special_tokens_mask=True)
    options = {"whole_word_mask": True, "mlm_probability": 0.5, "mask_replace_prob": 1, "random_replace_prob": 0}
    ours = DataCollatorForLanguageModeling(tokenizer, seed=1, **options)
    other = theirs("DataCollatorForLanguageModeling")(tokenizer, seed=1, **options)
    same = [samples[2]] * 8  # transformers cannot pad offsets
    for _ in range(3):
        assert_same_batch(ours(same), other(same))


def test_the_tokens_of_a_word_are_replaced_separately():
    tokenizer = fast_tokenizer()
    collator = DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True, mlm_probability=1.0)
    word = [VOCABULARY[token] for token in ("un", "##believ", "##able")]
    batch = collator([{"input_ids": word}] * 500)
    is_mask = batch["input_ids"] == 4
    assert is_mask.float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (is_mask.any(dim=1) & ~is_mask.all(dim=1)).any()


def test_words_that_cannot_be_told_apart_are_refused():
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), whole_word_mask=True)
    assert_refused("return_offsets_mapping=True", collator, [[5, 6]])
    samples = [{"input_ids": [5, 6], "word_ids": [0, 1]}, {"input_ids": [5, 6], "word_ids": [0, 1, 2]}]
    assert_refused(r"'word_ids' .* length 2, length 3", collator, samples, error=DataError)
    samples = [{"input_ids": [5, 6], "offset_mapping": [(0, 1), (1, 2), (2, 3)]}]
    assert_refused("offset_mapping has the shape", collator, samples, error=DataError)


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_causal_labels_are_the_same_as_in_transformers_if_padding_has_its_own_token(kind):
    tokenizer = fast_tokenizer()
    options = {"mlm": False, "return_tensors": kind, "pad_to_multiple_of": 8}
    ours = DataCollatorForLanguageModeling(tokenizer, **options)
    other = theirs("DataCollatorForLanguageModeling")(tokenizer, **options)
    assert_same_batch(ours(encoded(tokenizer)), other(encoded(tokenizer)))


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_end_of_sequence_that_is_also_the_pad_token_counts(side):
    samples = [{"input_ids": [7, 3]}, {"input_ids": [7, 8, 9, 3]}]
    plain = PlainTokenizer(side)
    plain.pad_token_id = 3
    for tokenizer in (plain, fast_tokenizer(side, pad_token="[SEP]", eos_token="[SEP]")):
        labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)(samples)["labels"]
        padding = [-100, -100]
        assert labels.tolist() == [[7, 3] + padding if side == "right" else padding + [7, 3], [7, 8, 9, 3]]


def test_padding_in_the_samples_does_not_count_and_their_labels_are_replaced():
    tokenizer = PlainTokenizer()
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    assert collator([[7, 3, 0, 0]])["labels"].tolist() == [[7, 3, -100, -100]]
    assert collator([{"input_ids": [7] * n, "label": n} for n in (1, 2)])["labels"].tolist() == [[7, -100], [7, 7]]
    tokenizer.pad_token_id = 3
    batch = collator([{"input_ids": [7, 3, 3, 3], "attention_mask": [1, 1, 0, 0]}])
    assert batch["labels"].tolist() == [[7, 3, -100, -100]]


SENTENCES = [{"input_ids": list(range(5 + index, 45 + index))} for index in range(24)]


def masking(**options):
    return DataCollatorForLanguageModeling(PlainTokenizer(), mlm_probability=0.3, **options)


def loader(evaluation=False, num_workers=0, **options):
    source = DataLoader(SENTENCES, batch_size=4, num_workers=num_workers, collate_fn=masking(**options))
    return adopt(source, seed=1, share=Share(0, 1, 1), device=torch.device("cpu"), evaluation=evaluation)


def masks(source, epoch=0, position=0):
    windows = source.windows(epoch, position)
    return [np.asarray(piece.batch["labels"]).tolist() for window in windows for piece in window.pieces]


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_every_evaluation_every_number_of_workers_and_a_resumed_epoch_see_the_same_masks(kind):
    evaluation, training = (loader(each, return_tensors=kind) for each in (True, False))
    first = masks(evaluation)
    torch.rand(100)
    np.random.rand(100)
    assert masks(evaluation) == masks(loader(evaluation=True, return_tensors=kind)) == first
    assert len(first) == 6
    assert masks(loader(num_workers=2, return_tensors=kind)) == masks(loader(return_tensors=kind))
    whole, other = masks(training, epoch=3), masks(loader(return_tensors=kind), epoch=4)
    assert masks(loader(return_tensors=kind), epoch=3, position=8) == whole[2:]
    assert [a == b for a, b in zip(whole, other, strict=True)] == [False] * 6
    assert len({repr([[label != -100 for label in row] for row in batch]) for batch in whole}) == 6


def test_a_collator_with_its_own_seed_repeats_its_masks_and_can_be_pickled():
    collator, again = masking(seed=5), masking(seed=5)
    first, second = (collator(SENTENCES[:1])["labels"].tolist() for _ in range(2))
    assert first != second
    torch.manual_seed(99)
    assert [again(SENTENCES[:1])["labels"].tolist() for _ in range(2)] == [first, second]
    copied = pickle.loads(pickle.dumps(collator))
    assert copied(SENTENCES[:1])["labels"].tolist() == collator(SENTENCES[:1])["labels"].tolist()


def test_each_worker_has_its_own_generator_even_if_it_was_used_here():
    collator, same = masking(seed=5), SENTENCES[:1] * 2
    here = [collator([sample])["labels"].tolist() for sample in same]
    batches = DataLoader(same, batch_size=1, num_workers=2, collate_fn=collator)
    there = [batch["labels"].tolist() for batch in batches]
    assert there[0] == here[0] and there[1] not in here
