"""State as JSON and tensors: what goes in comes out, type by type, and what cannot be kept is refused by name."""

import enum
import json
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopwright.checkpoint import columns
from loopwright.checkpoint.encoding import decode, encode
from loopwright.errors import CheckpointError


def round_trip(value):
    """Through JSON text, as on disk; nan and infinity must not reach it."""
    tensors = {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def assert_same(found, expected):
    """Equal in value, in type, and in the types of everything inside."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (found, expected)))
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype.newbyteorder("=") and found.shape == expected.shape
        assert found.tobytes() == expected.astype(found.dtype).tobytes()
    elif isinstance(expected, float):
        assert found == expected and math.copysign(1, found) == math.copysign(1, expected) or math.isnan(expected)
    elif isinstance(expected, dict):
        assert len(found) == len(expected)
        for (found_name, found_item), (name, item) in zip(found.items(), expected.items(), strict=True):
            assert_same(found_name, name)
            assert_same(found_item, item)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected)
        for found_item, item in zip(found, expected, strict=True):
            assert_same(found_item, item)
    else:
        assert found == expected


# Anything, nested anyhow

TENSORS = [
    torch.tensor(1.5),
    torch.tensor(math.nan),
    torch.tensor([], dtype=torch.float64),
    torch.zeros(2, 0, 3, dtype=torch.int16),
    torch.tensor([1.0, -0.0, math.nan, math.inf, -math.inf]),
    torch.arange(6).reshape(2, 3),
    torch.tensor([[True], [False]]),
    torch.tensor([0.1, 1e30], dtype=torch.bfloat16),
    torch.tensor([0.1, 3.0], dtype=torch.float16),
    torch.tensor([255, 0], dtype=torch.uint8),
]

ARRAYS = [
    np.array(2.5),
    np.array([], dtype=np.float32),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array([True, False]),
    np.array([1.0, np.nan], dtype=np.float16),
    np.array([2**64 - 1], dtype=np.uint64),
]

floats = st.floats(allow_nan=True, allow_infinity=True)
hashable_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
hashables = st.recursive(
    hashable_scalars,
    lambda children: st.lists(children, max_size=3).map(tuple) | st.frozensets(children, max_size=3),
    max_leaves=5,
)
leaves = hashable_scalars | floats | st.sampled_from(TENSORS) | st.sampled_from(ARRAYS)


def containers(children):
    lists = st.lists(children, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | st.lists(children, max_size=4).map(lambda items: deque(items, maxlen=5))
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
        | st.dictionaries(st.text(), children, max_size=4)
        | st.dictionaries(hashables, children, max_size=4)
        | st.dictionaries(st.text(max_size=1) | st.sampled_from(["$", "v", "a.b", "a"]), children, max_size=4)
        | st.dictionaries(hashables, children, max_size=4).map(OrderedDict)
        | st.dictionaries(hashables, st.integers(), max_size=4).map(Counter)
    )


@settings(max_examples=400)
@given(st.recursive(leaves, containers, max_leaves=20), st.sampled_from([1, 1000]))
def test_whatever_goes_in_comes_out(value, most_items):
    with mock.patch.object(columns, "_MOST_ITEMS", most_items):  # of which more are kept as tensors
        assert_same(round_trip(value), value)


numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats
plain_values = st.recursive(
    st.none() | numbers | st.text() | st.binary(max_size=3),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["loss", "step", "$"]) | numbers, children, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(
    st.lists(plain_values, min_size=1, max_size=5),
    st.sampled_from(
        [list, tuple, deque, lambda items: dict(enumerate(items)), lambda items: OrderedDict(enumerate(items))]
    ),
)
def test_a_long_value_comes_back_as_it_was_and_takes_no_json(values, make):
    value, tensors = {"callback": [make(values * (2000 // len(values))), "x" * 9000]}, {}
    text = json.dumps(encode(value, tensors), allow_nan=False)
    assert len(text) < 5000
    assert_same(decode(json.loads(text), tensors), value)


def test_a_million_values_are_encoded_at_once_and_each_tensor_is_read_once():
    history = {"metrics": {"loss": [index * 0.1 for index in range(1_000_000)]}}
    tensors, begin = {}, time.thread_time()
    encoded = encode(history, tensors)
    assert time.thread_time() - begin < 0.5  # 0.04 on an idle machine
    assert decode(encoded, dict(tensors)) == history
    with pytest.raises(KeyError):  # otherwise a small file could name a large tensor again and again
        decode([encoded, encoded], dict(tensors))


# One by one


NUMBERS = [0, -(2**200), 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan]
SCALARS = [None, True, False, *NUMBERS, "", "ümläut \u2028 \ud800 \0", b"", bytes(range(256))]
EMPTY = [[], (), set(), frozenset(), deque(), {}, OrderedDict(), Counter()]
NESTED = [
    [None, [1, [2.5, ["x"]]]],
    (1, (2, (3,))),
    {1, 2, 3},
    {"a", b"a", 1, None, (1, 2)},
    frozenset({frozenset({1}), frozenset()}),
    deque([1, 2]),
    deque([1, 2], maxlen=2),
    {"a": {"b": {"c": 1}}},
    {1: "int", "1": "text", 1.5: "float", None: "none", (1, 2): "tuple", b"1": "bytes", True * 2: "two"},
    {"$": "tensor", "v": "not one"},
    {"$": {"$": {"v": 1}}},
    OrderedDict([("b", 1), ("a", 2)]),
    OrderedDict([(2, [1]), (1, [])]),
    Counter({3: 2, "x": -1}),
    {"nan": [math.nan, {"inf": math.inf}]},
    *({"x": [tensor]} for tensor in TENSORS),
    *({"x": (array,)} for array in ARRAYS),
]


@pytest.mark.parametrize("value", [*SCALARS, *EMPTY, *NESTED])
def test_values_come_back_as_they_were_bit_by_bit(value):
    assert_same(round_trip(value), value)


def test_tensors_that_are_not_contiguous_come_back_with_their_values():
    base = torch.arange(12.0).reshape(3, 4)
    values = [base.t(), base[:, ::2], base[1], base.expand(2, 3, 4), base[:, :0]]
    for found, expected in zip(round_trip(values), values, strict=True):
        assert torch.equal(found, expected)


def test_arrays_of_any_layout_and_byte_order_come_back_with_their_values():
    base = np.arange(12.0).reshape(3, 4)
    read_only = base.copy()
    read_only.flags.writeable = False
    values = [base.T, base[::-1], base[:, ::2], np.asfortranarray(base), base.astype(">f4"), read_only]
    for found, expected in zip(round_trip(values), values, strict=True):
        assert np.array_equal(found, expected) and found.shape == expected.shape


def test_parameters_come_back_as_tensors_without_gradient():
    found = round_trip({"weight": nn.Parameter(torch.ones(2))})["weight"]
    assert type(found) is torch.Tensor and not found.requires_grad


def test_a_dict_keeps_its_order_and_a_deque_its_bound():
    assert list(round_trip({name: index for index, name in enumerate("zebra")})) == list("zebra")
    assert list(round_trip({3: 0, 1: 0, 2: 0})) == [3, 1, 2]
    found = round_trip(deque([1, 2, 3], maxlen=3))
    found.append(4)
    assert found == deque([2, 3, 4])
    assert round_trip(deque([1])).maxlen is None


def test_numpy_scalars_become_python_ones():
    values = [
        np.float32(0.5),
        np.float64(0.1),
        np.int64(7),
        np.uint8(255),
        np.bool_(True),
        np.str_("a"),
        np.bytes_(b"a"),
    ]
    assert_same(round_trip(values), [0.5, 0.1, 7, 255, True, "a", b"a"])
    assert_same(round_trip(np.float64("nan")), math.nan)


def test_paths_enumerations_and_special_dicts_become_plain():
    class Colour(enum.IntEnum):
        RED = 1

    class Name(str, enum.Enum):
        A = "a"

    assert_same(round_trip(Path("a") / "b"), "a/b")
    assert_same(round_trip([Colour.RED, Name.A]), [1, "a"])
    assert_same(round_trip(namedtuple("Point", "x y")(1, 2)), (1, 2))
    assert_same(round_trip(defaultdict(int, {"a": 1})), {"a": 1})
    assert_same(round_trip(nn.Linear(1, 1, bias=False).state_dict())["weight"].shape, torch.Size([1, 1])[:])


def test_key_paths_that_read_the_same_keep_their_tensors_apart_and_one_tensor_may_be_in_two_places():
    one, two, three = (torch.full((1,), float(value)) for value in (1, 2, 3))
    for value in ({"a.b": one, "a": {"b": two}, 1: [one], "1": [two], "1.0": three}, {"a": one, "b": [one, one]}):
        assert_same(round_trip(value), value)


def test_tensors_are_stored_under_their_key_paths():
    tensors = {}
    encode({"a": [torch.ones(1), {"b": torch.zeros(1)}], 3: torch.ones(1)}, tensors)
    assert sorted(tensors) == ["state.3", "state.a.0", "state.a.1.b"]
    tensors = {}
    encode(torch.ones(1), tensors, "elsewhere")
    assert list(tensors) == ["elsewhere"]


# What is refused


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": Custom()}]}, r"state\.a\.1\.b is a .*\.Custom, which cannot be saved"),
        ({"callbacks": [{"state": {"f": print}}]}, r"state\.callbacks\.0\.state\.f is a builtins\.builtin_function"),
        ((lambda: None,), r"state\.0 is a builtins\.function"),
        ({"z": 1j}, r"state\.z is a builtins\.complex"),
        ({"z": bytearray(b"a")}, r"state\.z is a builtins\.bytearray"),
        ({"r": range(3)}, r"state\.r is a builtins\.range"),
        ({Custom(): 1}, r"state\.key is a .*\.Custom"),
        ({"when": np.datetime64("2020-01-01")}, r"state\.when is a datetime\.date"),
        ({"o": np.array([object()])}, r"state\.o is a numpy array of object"),
        ({"s": np.array(["text"])}, r"state\.s is a numpy array of <U4"),
        ({"c": np.array([1j])}, r"state\.c is a numpy array of complex128"),
        (Custom(), r"state is a .*\.Custom"),
        (Custom(), "tensors, arrays, numbers, strings, bytes, None, and lists, tuples"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_key_path(value, message):
    with pytest.raises(CheckpointError, match=message):
        encode(value, {})


def test_a_kind_of_a_newer_version_is_refused():
    with pytest.raises(CheckpointError, match="unknown kind 'hologram'; it was written by a newer version"):
        decode({"a": [{"$": "hologram", "v": 1}]}, {})
