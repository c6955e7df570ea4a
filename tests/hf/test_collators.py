"""Collators: equal to transformers' own where those are right, kind to their inputs, and repeatable in our loaders."""

from __future__ import annotations

import copy
import dataclasses
import pickle
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
from loopwright.errors import ConfigError, DataError

CPU = torch.device("cpu")
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["play", "##ing", "##ed", "un", "##believ", "##able", "the", "cat", "sat", "on", "mat", ".", ","]
VOCABULARY = {token: index for index, token in enumerate(NAMES + WORDS)}
TEXTS = ["the cat played", "unbelievable", "the playing cat sat on the unbelievable mat.", "cat, cat"]


class PlainTokenizer:
    """What a tokenizer that is none of transformers' must have."""

    pad_token_id = 0
    mask_token_id = 4
    eos_token_id = 3
    all_special_ids = (0, 1, 2, 3, 4)

    def __init__(self, side: str = "right", size: int = 1000) -> None:
        self.padding_side = side
        self._size = size

    def __len__(self) -> int:
        return self._size


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
        if isinstance(ours[name], int):
            assert ours[name] == other[name], name
        else:
            assert ours[name].dtype == other[name].dtype, name
            assert ours[name].tolist() == other[name].tolist(), name


# ---------------------------------------------------------------------------------------------- names and fields


@pytest.mark.parametrize(
    "name", sorted(set(collators.__all__) - {"default_data_collator", "DataCollatorWithFlattening"})
)
def test_a_collator_has_the_fields_of_transformers_in_their_order_and_with_their_defaults(name):
    def described(kind):
        return [(field.name, field.default) for field in dataclasses.fields(kind)]

    assert len(collators.__all__) == 8
    assert described(getattr(collators, name)) == described(theirs(name))


def test_the_permutation_language_modeling_collator_is_not_there():
    assert not hasattr(collators, "DataCollatorForPermutationLanguageModeling")


# ---------------------------------------------------------------------------------------------- stacking

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
def test_samples_are_stacked_as_transformers_does_it(case, kind):
    samples = PLAIN_SAMPLES[case]
    expected = theirs("default_data_collator")(samples, kind)
    assert_same_batch(default_data_collator(samples, kind), expected)
    assert_same_batch(DefaultDataCollator(return_tensors=kind)(samples), expected)
    assert_same_batch(DefaultDataCollator()(samples, return_tensors=kind), expected)


def test_tensors_are_stacked_as_transformers_does_it():
    samples = [
        {"x": torch.rand(2, 3), "label": torch.tensor(n), "z": torch.tensor([n], dtype=torch.int8)} for n in (0, 1)
    ]
    assert_same_batch(default_data_collator(samples), theirs("default_data_collator")(samples))
    samples = [{"label": torch.tensor([n])} for n in (0, 1)]
    assert_same_batch(default_data_collator(samples), theirs("default_data_collator")(samples))
    samples = [{"label_ids": torch.tensor([n, 2])} for n in (0, 1)]
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


@pytest.mark.parametrize(
    "make",
    [Sample, SlottedSample, lambda x, label: SimpleNamespace(x=x, label=label)],
    ids=["dataclass", "slots", "object"],
)
def test_samples_may_be_dataclasses_or_objects(make):
    batch = default_data_collator([make([1, 2], 0), make([3, 4], 1)])
    assert sorted(batch) == ["labels", "x"]
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch["labels"].tolist() == [0, 1]


def test_samples_may_be_batch_encodings():
    encoding = pytest.importorskip("transformers").BatchEncoding
    batch = default_data_collator([encoding({"input_ids": [1, 2]}), encoding({"input_ids": [3, 4]})])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]


def test_text_is_left_out_also_in_lists():
    samples = [{"x": 1, "text": "a", "tokens": ["a", "b"], "pairs": [["a"], ["b"]]} for _ in range(2)]
    assert list(default_data_collator(samples)) == ["x"]
    samples = [{"input_ids": [1] * n, "text": "a", "tokens": ["a"] * n} for n in (1, 2)]
    assert sorted(DataCollatorWithPadding(PlainTokenizer())(samples)) == ["attention_mask", "input_ids"]


def test_of_label_and_labels_the_latter_counts():
    samples = [{"label": 0, "labels": [0.9, 0.1]}, {"label": 1, "labels": [0.2, 0.8]}]
    assert default_data_collator(samples)["labels"].tolist() == torch.tensor([[0.9, 0.1], [0.2, 0.8]]).tolist()
    samples = [{**sample, "input_ids": [5]} for sample in samples]
    assert DataCollatorWithPadding(PlainTokenizer())(samples)["labels"].shape == (2, 2)


def test_uneven_lists_are_an_error_that_names_the_key_and_the_lengths():
    with pytest.raises(DataError, match=r"'x' differ .* length 2, length 3\. Pad them .*DataCollatorWithPadding"):
        default_data_collator([{"x": [1, 2]}, {"x": [1, 2, 3]}])
    with pytest.raises(DataError, match=r"'x' .* lengths \[1, 2\], lengths \[2, 2\]"):
        default_data_collator([{"x": [[1], [1, 2]]}, {"x": [[1, 2], [1, 2]]}])
    with pytest.raises(DataError, match=r"'x' .* shape \(2,\), shape \(3,\)"):
        default_data_collator([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(DataError, match=r"'labels' .* length 1, length 2"):
        DataCollatorWithPadding(PlainTokenizer())([{"input_ids": [1] * n, "labels": [1] * n} for n in (1, 2)])


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([], "at least one sample"),
        ([{}, {}], "are empty"),
        ([(1, 2)], "got tuple"),
        ([torch.zeros(2)], "got Tensor"),
        ([{"x": 1, "y": 2}, {"x": 1}], r"sample 0 has \['x', 'y'\], sample 1 has \['x'\]"),
        ([{"x": 1}, {"x": 1, "y": 2}], r"sample 0 has \['x'\], sample 1 has \['x', 'y'\]"),
        ([{"x": 1}, {"x": None}], "'x' is None in sample 1"),
        ([{"x": {"a": 1}}, {"x": {"a": 2}}], r"'x' \(dict\) are not numbers"),
    ],
    ids=["none", "empty", "tuples", "tensors", "missing", "added", "None", "dicts"],
)
def test_samples_that_are_no_batch_are_an_error_that_says_why(samples, text):
    with pytest.raises(DataError, match=text):
        default_data_collator(samples)


@pytest.mark.parametrize("kind", ["tf", "jax", None])
def test_other_kinds_of_tensors_are_refused(kind):
    with pytest.raises(ConfigError, match="must be 'pt'"):
        default_data_collator([{"x": 1}], kind)
    with pytest.raises(ConfigError, match="must be 'pt'"):
        DataCollatorWithPadding(PlainTokenizer(), return_tensors=kind)
    with pytest.raises(ConfigError, match="must be 'pt'"):
        DataCollatorForSeq2Seq(PlainTokenizer())([{"input_ids": [1]}], return_tensors="tf")


# ---------------------------------------------------------------------------------------------- padding

PADDINGS = {
    "longest": {},
    "a multiple": {"pad_to_multiple_of": 8},
    "max_length": {"padding": "max_length", "max_length": 17},
    "max_length to a multiple": {"padding": "max_length", "max_length": 17, "pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", sorted(PADDINGS))
def test_padding_is_that_of_transformers(case, side, kind):
    tokenizer = fast_tokenizer(side)
    samples = [{**sample, "label": index} for index, sample in enumerate(encoded(tokenizer))]
    options = {**PADDINGS[case], "return_tensors": kind}
    batch = DataCollatorWithPadding(tokenizer, **options)(samples)
    assert_same_batch(batch, theirs("DataCollatorWithPadding")(tokenizer, **options)(samples))
    assert 0 < batch["token_type_ids"].sum() < batch["attention_mask"].sum()

    samples = [{**sample, "labels": sample["input_ids"][::-1]} for sample in encoded(tokenizer)]
    batch = DataCollatorForTokenClassification(tokenizer, **options)(samples)
    assert_same_batch(batch, theirs("DataCollatorForTokenClassification")(tokenizer, **options)(samples))

    samples = [{**sample, "labels": [7] * (index + 2)} for index, sample in enumerate(encoded(tokenizer))]
    batch = DataCollatorForSeq2Seq(tokenizer, **options)(samples)
    assert_same_batch(batch, theirs("DataCollatorForSeq2Seq")(tokenizer, **options)(samples))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", sorted(PADDINGS))
def test_a_tokenizer_that_cannot_pad_is_padded_for_with_the_same_result(case, side):
    real, plain = fast_tokenizer(side), PlainTokenizer(side)
    samples = encoded(real, return_special_tokens_mask=True)
    ours = DataCollatorWithPadding(plain, **PADDINGS[case])(samples)
    assert_same_batch(ours, DataCollatorWithPadding(real, **PADDINGS[case])(samples))
    without_mask = [{"input_ids": sample["input_ids"]} for sample in samples]
    made = DataCollatorWithPadding(plain, **PADDINGS[case])(without_mask)
    assert made["attention_mask"].tolist() == ours["attention_mask"].tolist()


def test_padding_is_on_the_side_of_the_tokenizer():
    samples = [{"input_ids": [5], "labels": [1]}, {"input_ids": [6, 7, 8], "labels": [1, 2, 3]}]
    batch = DataCollatorForTokenClassification(PlainTokenizer("left"))(samples)
    assert batch["input_ids"].tolist() == [[0, 0, 5], [6, 7, 8]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 1], [1, 2, 3]]


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor], ids=["arrays", "tensors"])
def test_what_is_padded_may_be_arrays_or_tensors(convert):
    tokenizer = fast_tokenizer()
    samples = [{**sample, "labels": sample["input_ids"]} for sample in encoded(tokenizer)]
    converted = [{name: convert(value) for name, value in sample.items()} for sample in samples]
    for collator in (DataCollatorForTokenClassification(tokenizer), DataCollatorForSeq2Seq(tokenizer)):
        assert_same_batch(collator(converted), collator(samples))


def test_what_is_not_of_the_tokenizer_is_stacked_as_it_is():
    samples = [
        {"input_ids": [5] * n, "score": 0.5, "vector": np.float16([1, 2]), "image": torch.zeros(2, 2), "labels": n}
        for n in (1, 2)
    ]
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        batch = DataCollatorWithPadding(tokenizer)(samples)
        assert batch["score"].dtype == torch.float32
        assert batch["vector"].dtype == torch.float16
        assert batch["image"].shape == (2, 2, 2)
        assert batch["labels"].tolist() == [1, 2]


def test_the_label_ids_of_a_sample_become_labels_in_every_collator():
    samples = [{"input_ids": [5, 6], "label_ids": [1, 2]}, {"input_ids": [7, 8], "label_ids": [3, 4]}]
    for kind in (DataCollatorWithPadding, DataCollatorForTokenClassification, DataCollatorForSeq2Seq):
        assert kind(PlainTokenizer())(samples)["labels"].tolist() == [[1, 2], [3, 4]]


def test_the_batch_of_a_tokenizer_of_transformers_can_still_be_moved():
    tokenizer = fast_tokenizer()
    batch = DataCollatorWithPadding(tokenizer)(encoded(tokenizer)).to("cpu")
    assert isinstance(batch, pytest.importorskip("transformers").BatchEncoding)
    assert batch.input_ids.shape[0] == len(TEXTS)


def test_a_tokenizer_without_a_pad_token_is_an_error_with_the_fix_only_where_it_is_needed():
    for tokenizer in (fast_tokenizer(pad_token=None), PlainTokenizer()):
        tokenizer.pad_token_id = None
        collator = DataCollatorWithPadding(tokenizer)
        assert collator([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])["attention_mask"].tolist() == [[1, 1], [1, 1]]
        with pytest.raises(ConfigError, match=r"1 to 2 tokens .* to 2, .* tokenizer.pad_token = tokenizer.eos_token"):
            collator([{"input_ids": [5]}, {"input_ids": [7, 8]}])
        with pytest.raises(ConfigError, match="has no pad token"):
            DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)([[5, 6], [7, 8]])


def test_not_padding_stacks_what_is_even_and_refuses_the_rest():
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        collator = DataCollatorForSeq2Seq(tokenizer, padding=False)
        batch = collator([{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7, 8], "labels": [2]}])
        assert batch["input_ids"].tolist() == [[5, 6], [7, 8]]
        assert batch["labels"].tolist() == [[1], [2]]
        with pytest.raises(DataError, match=r"'input_ids' .* length 1, length 2"):
            collator([{"input_ids": [5]}, {"input_ids": [7, 8]}])


def test_what_cannot_be_padded_so_is_refused():
    with pytest.raises(ConfigError, match="padding must be"):
        DataCollatorWithPadding(PlainTokenizer(), padding="shortest")
    with pytest.raises(ConfigError, match="pass max_length"):
        DataCollatorWithPadding(PlainTokenizer(), padding="max_length")([{"input_ids": [1]}])
    with pytest.raises(ConfigError, match="pass max_length"):
        DataCollatorWithPadding(fast_tokenizer(), padding="max_length")([{"input_ids": [1]}])
    with pytest.raises(DataError, match=r"no 'input_ids' .* names \['x'\]"):
        DataCollatorWithPadding(PlainTokenizer())([{"x": 1}])
    with pytest.raises(DataError, match=r"'input_ids' .* length 4, length 9"):
        collator = DataCollatorWithPadding(PlainTokenizer(), padding="max_length", max_length=4)
        collator([{"input_ids": [1]}, {"input_ids": [1] * 9}])


def test_a_max_length_without_effect_is_told_when_the_collator_is_made():
    with pytest.warns(UserWarning, match="max_length=8 has no effect with padding=True") as told:
        collator = DataCollatorWithPadding(fast_tokenizer(), max_length=8)
    assert [warning.filename for warning in told] == [__file__]
    assert collator([{"input_ids": [5]}, {"input_ids": [5, 6]}])["input_ids"].shape == (2, 2)


def test_labels_of_words_instead_of_tokens_are_refused():
    collator = DataCollatorForTokenClassification(PlainTokenizer())
    with pytest.raises(DataError, match="sample 1 of the batch has 2 labels for 3 tokens"):
        collator([{"input_ids": [5], "labels": [1]}, {"input_ids": [5, 6, 7], "labels": [1, 2]}])
    with pytest.raises(DataError, match="sample 0 of the batch has a single label for 2 tokens"):
        collator([{"input_ids": [5, 6], "label": 1}])
    with pytest.raises(DataError, match="lists of tokens"):
        DataCollatorForSeq2Seq(PlainTokenizer())([{"input_ids": [5], "label": 1}])


def test_token_labels_that_are_floats_stay_floats():
    samples = [{"input_ids": [5], "labels": [0.5]}, {"input_ids": [5, 6], "labels": [0.25, 1.0]}]
    labels = DataCollatorForTokenClassification(PlainTokenizer())(samples)["labels"]
    assert labels.tolist() == [[0.5, -100.0], [0.25, 1.0]]


def test_a_feature_extractor_pads_what_it_makes():
    extractor = theirs("Wav2Vec2FeatureExtractor")(return_attention_mask=True)
    samples = [{"input_values": np.ones(n, dtype=np.float32), "label": n} for n in (2, 3)]
    batch = DataCollatorWithPadding(extractor)(samples)
    assert batch["input_values"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [2, 3]


# ---------------------------------------------------------------------------------------------- sequence to sequence


class ShiftingModel:
    """A model that makes its decoder's inputs from labels."""

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(labels[:, :1], 9), labels[:, :-1]], dim=1).masked_fill(labels == -100, 0)


def test_the_inputs_of_the_decoder_are_made_by_the_model():
    tokenizer = fast_tokenizer()
    samples = [{**sample, "labels": [7] * (index + 2)} for index, sample in enumerate(encoded(tokenizer))]
    batch = DataCollatorForSeq2Seq(tokenizer, ShiftingModel())(samples)
    assert_same_batch(batch, theirs("DataCollatorForSeq2Seq")(tokenizer, ShiftingModel())(samples))
    assert batch["decoder_input_ids"][0].tolist() == [9, 7, 0, 0, 0]
    arrays = DataCollatorForSeq2Seq(tokenizer, ShiftingModel(), return_tensors="np")(samples)
    assert isinstance(arrays["decoder_input_ids"], np.ndarray)
    assert arrays["decoder_input_ids"].tolist() == batch["decoder_input_ids"].tolist()


def test_samples_without_labels_give_a_batch_without_labels():
    samples = [{"input_ids": [5], "labels": None}, {"input_ids": [6, 7], "labels": None}]
    for kind in (DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding):
        assert sorted(kind(PlainTokenizer())(samples)) == ["attention_mask", "input_ids"]


# ---------------------------------------------------------------------------------------------- multiple choice


def choices(tokenizer):
    pairs = [dict(tokenizer([first, first], [second, "cat"])) for first, second in zip(TEXTS, TEXTS[1:], strict=False)]
    return [{**pair, "label": index % 2} for index, pair in enumerate(pairs)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["label", "labels"])
def test_choices_are_batched_as_transformers_does_it(name, side):
    tokenizer = fast_tokenizer(side)
    samples = [{**sample, name: sample["label"]} for sample in choices(tokenizer)]
    samples = [{key: value for key, value in sample.items() if key in (name, "input_ids")} for sample in samples]
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
    with pytest.raises(DataError, match=r"'input_ids' has \[2, 1\], where 2 were expected"):
        collator([{"input_ids": [[5], [6]]}, {"input_ids": [[5]]}])
    with pytest.raises(DataError, match=r"'id' has \[0, 0\]"):
        collator([{"input_ids": [[5], [6]], "id": 1}, {"input_ids": [[5], [6]], "id": 2}])
    with pytest.raises(DataError, match="there is no 'input_ids'"):
        collator([{"x": [[5], [6]]}])


# ---------------------------------------------------------------------------------------------- flattening


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("has_labels", [True, False], ids=["labels", "no labels"])
def test_samples_are_joined_as_transformers_does_it(has_labels, kind):
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
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["labels"].tolist() == [[-100, 6]]
    with pytest.raises(DataError, match="sample 0 of the batch has 1 labels for 2 tokens"):
        collator([{"input_ids": [5, 6], "labels": [5]}])
    with pytest.raises(DataError, match="no 'input_ids'"):
        collator([{"ids": [5, 6]}])


# ---------------------------------------------------------------------------------------------- inputs are not changed


def every_collator():
    plain, real = PlainTokenizer(), fast_tokenizer()
    for tokenizer in (plain, real):
        yield DataCollatorWithPadding(tokenizer)
        yield DataCollatorForTokenClassification(tokenizer)
        yield DataCollatorForSeq2Seq(tokenizer, ShiftingModel())
        yield DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.9)
        yield DataCollatorForLanguageModeling(tokenizer, mlm=False)
    yield DataCollatorWithFlattening()


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("convert", [list, np.asarray, torch.tensor], ids=["lists", "arrays", "tensors"])
def test_no_collator_changes_its_samples_nor_hands_out_their_memory(convert, kind):
    num_checked = 0
    for size in (1, 2):
        rows = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]][:size]
        samples = [{"input_ids": convert(row), "labels": convert(row), "special_tokens_mask": [0] * 5} for row in rows]
        before = copy.deepcopy(samples)
        for collator in [*every_collator(), default_data_collator]:
            batch = collator(samples, return_tensors=kind)
            for value in batch.values():
                value += 1
            assert repr(samples) == repr(before), collator
            num_checked += 1
    assert num_checked == 24


def test_choices_are_not_changed_either():
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        samples = [{"input_ids": [[5], [6, 7]], "attention_mask": [[1], [1, 1]], "label": 1} for _ in range(2)]
        before = copy.deepcopy(samples)
        batch = DataCollatorForMultipleChoice(tokenizer)(samples)
        assert samples == before
        assert batch["labels"].tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------- masked language models


@pytest.mark.parametrize("kind", ["pt", "np"])
@pytest.mark.parametrize("seed", [None, 3], ids=["global generator", "own generator"])
def test_masks_are_those_of_transformers_under_the_same_seed(seed, kind):
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
def test_the_shares_are_those_that_were_asked_for(mask, random, kept, kind):
    ids = torch.full((50, 200), 7)
    collator = DataCollatorForLanguageModeling(
        PlainTokenizer(size=30_000), mask_replace_prob=mask, random_replace_prob=random, return_tensors=kind
    )
    batch = collator([{"input_ids": row} for row in ids])
    replaced = torch.as_tensor(batch["input_ids"])[torch.as_tensor(batch["labels"]) != -100]
    assert (replaced == 4).float().mean().item() == pytest.approx(mask, abs=0.05)
    assert (replaced == 7).float().mean().item() == pytest.approx(kept, abs=0.05)


@pytest.mark.parametrize("side", ["right", "left"])
def test_special_tokens_and_padding_are_never_asked_for(side):
    for tokenizer in (PlainTokenizer(side), fast_tokenizer(side)):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
        batch = collator([{"input_ids": [2, 7, 8, 3]}, {"input_ids": [2, 7, 8, 9, 10, 3]}])
        expected = [[-100, 7, 8, -100], [-100, 7, 8, 9, 10, -100]]
        pad = [-100, -100]
        assert batch["labels"].tolist() == [expected[0] + pad if side == "right" else pad + expected[0], expected[1]]


def test_what_a_sample_says_is_special_is_never_asked_for():
    for tokenizer in (PlainTokenizer(), fast_tokenizer()):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=1.0)
        batch = collator([{"input_ids": [7, 8, 9], "special_tokens_mask": [0, 1, 0]}])
        assert batch["labels"].tolist() == [[7, -100, 9]]
        assert "special_tokens_mask" not in batch
        batch = collator([{"input_ids": [7, 8, 9], "attention_mask": [1, 1, 0]}])
        assert batch["labels"].tolist() == [[7, 8, -100]]


def test_samples_may_be_lists_of_ids():
    for samples in (
        [[7, 8], [7, 8, 9]],
        [torch.tensor([7, 8]), torch.tensor([7, 8, 9])],
        [np.array([7, 8]), [7, 8, 9]],
    ):
        batch = DataCollatorForLanguageModeling(PlainTokenizer(), mlm=False)(samples)
        assert batch["input_ids"].tolist() == [[7, 8, 0], [7, 8, 9]]
        assert batch["labels"].tolist() == [[7, 8, -100], [7, 8, 9]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_masking_that_cannot_work_is_refused_when_the_collator_is_made():
    tokenizer = PlainTokenizer()
    for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
        for value in (-0.1, 1.1, None):
            with pytest.raises(ConfigError, match=f"{name} must be between 0 and 1"):
                DataCollatorForLanguageModeling(tokenizer, **{name: value})
    with pytest.raises(ConfigError, match=r"must not exceed 1 together, got 1\.2"):
        DataCollatorForLanguageModeling(tokenizer, mask_replace_prob=0.9, random_replace_prob=0.3)
    with pytest.raises(ConfigError, match="pass mlm=True"):
        DataCollatorForLanguageModeling(tokenizer, mlm=False, whole_word_mask=True)
    with pytest.raises(ConfigError, match=r"no mask token.* mlm=False"):
        DataCollatorForLanguageModeling(fast_tokenizer(mask_token=None))
    with pytest.raises(ConfigError, match="has no length"):
        DataCollatorForLanguageModeling(SimpleNamespace(mask_token_id=4, pad_token_id=0))
    with pytest.raises(ConfigError, match="no all_special_ids"):
        DataCollatorForLanguageModeling(SimpleNamespace(mask_token_id=4, pad_token_id=0), random_replace_prob=0)([[5]])


class EverySecond(DataCollatorForLanguageModeling):
    """Masks by a rule of its own, as users of transformers write it."""

    def torch_mask_tokens(self, inputs, special_tokens_mask=None):
        labels = inputs.clone()
        labels[:, ::2] = -100
        return inputs.masked_fill(labels != -100, self.tokenizer.mask_token_id), labels

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        batch["rows"] = len(examples)
        return batch


def test_masking_and_calls_can_be_overridden_as_with_transformers():
    batch = EverySecond(PlainTokenizer())([[5, 6, 7, 8]])
    assert batch["input_ids"].tolist() == [[5, 4, 7, 4]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8]]
    assert batch["rows"] == 1


# ---------------------------------------------------------------------------------------------- whole words


def word_sources(tokenizer):
    """Yield the samples of all texts with each of the ways to tell words, and what the words are."""
    encodings = [tokenizer(text, "playing cat", return_offsets_mapping=True) for text in TEXTS]
    bare = [{"input_ids": encoding["input_ids"]} for encoding in encodings]
    yield "##", bare
    yield (
        "offsets",
        [{**one, "offset_mapping": enc["offset_mapping"]} for one, enc in zip(bare, encodings, strict=True)],
    )
    yield "word ids", [{**one, "word_ids": enc.word_ids()} for one, enc in zip(bare, encodings, strict=True)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_words_are_asked_for_whole_or_not_at_all(kind, side):
    tokenizer = fast_tokenizer(side)
    goes_on = [token.startswith("##") for token in VOCABULARY]
    for source, samples in word_sources(tokenizer):
        collator = DataCollatorForLanguageModeling(
            tokenizer, whole_word_mask=True, mlm_probability=0.5, return_tensors=kind
        )
        plain = DataCollatorWithPadding(tokenizer)([{"input_ids": sample["input_ids"]} for sample in samples])
        num_split, num_asked, num_continued = 0, 0, 0
        for _ in range(20):
            batch = collator(samples)
            assert sorted(batch.keys()) == ["attention_mask", "input_ids", "labels"], source
            for ids, labels in zip(plain["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
                for at in range(1, len(ids)):
                    if goes_on[ids[at]]:
                        num_split += (labels[at] == -100) != (labels[at - 1] == -100)
                        num_continued += 1
                    num_asked += labels[at] != -100
                    assert labels[at] in (-100, ids[at])
                    assert labels[at] not in range(5)
        assert num_split == 0, source
        assert num_continued == 200, source
        assert num_asked > 0, source


def test_whole_words_are_those_of_transformers_where_words_are_separated_by_gaps():
    tokenizer = fast_tokenizer()
    samples = encoded(tokenizer, return_offsets_mapping=True, return_special_tokens_mask=True)
    options = {"whole_word_mask": True, "mlm_probability": 0.5, "mask_replace_prob": 1, "random_replace_prob": 0}
    ours = DataCollatorForLanguageModeling(tokenizer, seed=1, **options)
    other = theirs("DataCollatorForLanguageModeling")(tokenizer, seed=1, **options)
    same = [samples[2]] * 8  # transformers cannot pad offsets
    for _ in range(3):
        assert_same_batch(ours(same), other(same))


def test_the_tokens_of_a_word_are_replaced_each_on_its_own():
    tokenizer = fast_tokenizer()
    collator = DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True, mlm_probability=1.0)
    word = [VOCABULARY[token] for token in ("un", "##believ", "##able")]
    batch = collator([{"input_ids": word}] * 500)
    is_mask = batch["input_ids"] == 4
    assert is_mask.float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (is_mask.any(dim=1) & ~is_mask.all(dim=1)).any()


def test_words_that_nothing_tells_apart_are_an_error_with_the_fix():
    with pytest.raises(ConfigError, match="return_offsets_mapping=True"):
        DataCollatorForLanguageModeling(PlainTokenizer(), whole_word_mask=True)([[5, 6]])
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), whole_word_mask=True)
    with pytest.raises(DataError, match=r"'word_ids' .* length 2, length 3"):
        collator([{"input_ids": [5, 6], "word_ids": [0, 1]}, {"input_ids": [5, 6], "word_ids": [0, 1, 2]}])
    with pytest.raises(DataError, match="offset_mapping has the shape"):
        collator([{"input_ids": [5, 6], "offset_mapping": [(0, 1), (1, 2), (2, 3)]}])


# ---------------------------------------------------------------------------------------------- causal language models


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_causal_labels_are_those_of_transformers_where_padding_is_a_token_of_its_own(kind):
    tokenizer = fast_tokenizer()
    ours = DataCollatorForLanguageModeling(tokenizer, mlm=False, return_tensors=kind, pad_to_multiple_of=8)
    other = theirs("DataCollatorForLanguageModeling")(tokenizer, mlm=False, return_tensors=kind, pad_to_multiple_of=8)
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


def test_padding_of_samples_that_came_padded_does_not_count():
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), mlm=False)
    assert collator([[7, 3, 0, 0]])["labels"].tolist() == [[7, 3, -100, -100]]
    tokenizer = PlainTokenizer()
    tokenizer.pad_token_id = 3
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collator([{"input_ids": [7, 3, 3, 3], "attention_mask": [1, 1, 0, 0]}])
    assert batch["labels"].tolist() == [[7, 3, -100, -100]]


def test_labels_of_the_samples_are_replaced():
    samples = [{"input_ids": [7] * n, "label": n} for n in (1, 2)]
    batch = DataCollatorForLanguageModeling(PlainTokenizer(), mlm=False)(samples)
    assert batch["labels"].tolist() == [[7, -100], [7, 7]]


# ---------------------------------------------------------------------------------------------- in loaders


class Sentences:
    """A dataset of sentences of one length, each its own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(range(5 + index, 45 + index))}


def loader(evaluation: bool = False, num_workers: int = 0, **options):
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), mlm_probability=0.3, **options)
    source = DataLoader(Sentences(), batch_size=4, num_workers=num_workers, collate_fn=collator)
    return adopt(source, seed=1, share=Share(0, 1, 1), device=CPU, evaluation=evaluation)


def masks(source, epoch: int = 0, position: int = 0) -> list[list[list[int]]]:
    windows = source.windows(epoch, position)
    return [np.asarray(piece.batch["labels"]).tolist() for window in windows for piece in window.pieces]


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_every_evaluation_sees_the_same_masks_whatever_was_drawn_before(kind):
    source = loader(evaluation=True, return_tensors=kind)
    first = masks(source)
    torch.rand(100)
    np.random.rand(100)
    assert masks(source) == first
    assert masks(loader(evaluation=True, return_tensors=kind)) == first
    assert len(first) == 6


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_a_resumed_epoch_sees_the_masks_of_the_uninterrupted_one_and_epochs_differ(kind):
    whole = masks(loader(return_tensors=kind), epoch=3)
    assert masks(loader(return_tensors=kind), epoch=3, position=8) == whole[2:]
    other = masks(loader(return_tensors=kind), epoch=4)
    assert [a == b for a, b in zip(whole, other, strict=True)] == [False] * 6
    assert len({repr([[label != -100 for label in row] for row in batch]) for batch in whole}) == 6


def test_masks_do_not_depend_on_the_workers():
    assert masks(loader(num_workers=2)) == masks(loader())


def test_with_a_seed_of_its_own_masks_follow_from_the_batches_made_before():
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), mlm_probability=0.3, seed=5)
    samples = [Sentences()[0]]
    first, second = (collator(samples)["labels"].tolist() for _ in range(2))
    assert first != second
    torch.manual_seed(99)
    again = DataCollatorForLanguageModeling(PlainTokenizer(), mlm_probability=0.3, seed=5)
    assert [again(samples)["labels"].tolist() for _ in range(2)] == [first, second]


def test_each_worker_has_a_generator_of_its_own_also_after_one_was_used_here():
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), mlm_probability=0.3, seed=5)
    same = [Sentences()[0]] * 2
    here = [collator([sample])["labels"].tolist() for sample in same]
    batches = DataLoader(same, batch_size=1, num_workers=2, collate_fn=collator)
    there = [batch["labels"].tolist() for batch in batches]
    assert there[0] == here[0]
    assert there[1] not in here


def test_collators_can_be_sent_to_other_processes():
    collator = DataCollatorForLanguageModeling(PlainTokenizer(), seed=5)
    samples = [Sentences()[0]]
    collator(samples)
    copied = pickle.loads(pickle.dumps(collator))
    assert copied(samples)["labels"].tolist() == collator(samples)["labels"].tolist()
