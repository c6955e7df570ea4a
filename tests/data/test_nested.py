"""Walking batches and outputs: every kind of container keeps its kind."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from loopwright.engine.nested import iter_tensors, map_tensors, num_rows, remove_padding, to_device

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "a"
    total: torch.Tensor | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.total = self.x.sum()


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Outputs(OrderedDict):
    """As transformers' ModelOutput: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping that is no dict and has a `.to`."""

    def to(self, device):
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


class Graph:
    """An object that only itself knows how to move."""

    def __init__(self, device=CPU):
        self.device = device

    def to(self, device):
        return Graph(device)


def doubled(value):
    return map_tensors(value, lambda tensor: tensor * 2)


ONE = torch.tensor([1.0])


# map_tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, 5),
        lambda x: [x, None],
        lambda x: Pair(x, "text"),
        lambda x: {"x": x, "nested": {"x": [x, (x,)]}},
        lambda x: OrderedDict(b=x, a=x),
        lambda x: Outputs(loss=x),
        lambda x: Encoding({"ids": x}),
        lambda x: torch.return_types.max((x, x)),
    ],
)
def test_the_function_reaches_every_tensor_and_the_structure_stays(make):
    result, expected = doubled(make(ONE)), make(ONE * 2)
    assert type(result) is type(expected)
    assert repr(result) == repr(expected)


def test_dataclasses_keep_their_type_and_compute_again_what_they_derive():
    batch = Batch(ONE, name="b")
    result = doubled(batch)
    assert (type(result), result.name, result.x.item(), result.total.item()) == (Batch, "b", 2.0, 2.0)
    assert batch.x is ONE
    assert doubled([Frozen(ONE)])[0].x.item() == 2.0


def test_what_is_not_a_container_is_kept_as_it_is():
    for value in ("text", 5, None, Graph, Batch, Graph()):
        assert doubled(value) is value
    assert doubled(torch.Size([2, 3])) == torch.Size([2, 3])
    assert doubled(defaultdict(list, x=ONE)) == {"x": ONE * 2}, "a mapping that cannot be made from a dict"


NESTED = st.recursive(
    st.integers(0, 9).map(float) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def with_tensors(value):
    if isinstance(value, float):
        return torch.tensor(value)
    if isinstance(value, list):
        return [with_tensors(item) for item in value]
    if isinstance(value, dict):
        return {name: with_tensors(item) for name, item in value.items()}
    return value


@given(NESTED)
def test_mapping_back_and_forth_changes_nothing_and_has_the_order_in_which_tensors_are_found(value):
    batch, visited = with_tensors(value), []
    assert map_tensors(batch, lambda tensor: visited.append(tensor.item()) or tensor.item()) == value
    assert [tensor.item() for tensor in iter_tensors(batch)] == visited


def test_tensors_of_dataclasses_and_named_tuples_are_found():
    assert [tensor.item() for tensor in iter_tensors((Pair(ONE, Batch(ONE * 3)), {"z": ONE * 5}))] == [1, 3, 3, 5]


# to_device


def test_tensors_are_moved_wherever_they_are_unless_they_are_there():
    batch = (ONE, {"x": [ONE, "text"]}, Pair(ONE, 1), Frozen(ONE))
    assert to_device(batch, CPU) is batch
    moved = to_device(batch, META)
    assert [tensor.device.type for tensor in iter_tensors(moved)] == ["meta"] * 4
    assert (type(moved), type(moved[2]), moved[1]["x"][1]) == (tuple, Pair, "text")
    assert all(tensor.device.type == "cpu" for tensor in iter_tensors(batch))


def test_an_object_that_knows_how_to_move_is_asked_also_inside_a_container():
    moved = to_device([Graph(), {"graph": Graph()}, Encoding(ids=ONE), ONE], META)
    assert (moved[0].device, moved[1]["graph"].device) == (META, META)
    assert type(moved[2]) is Encoding
    assert [tensor.device.type for tensor in iter_tensors(moved)] == ["meta", "meta"]
    assert to_device(Graph(), META).device == META
    Edge = namedtuple("Edge", "from_ to")  # a field that happens to be called to is not a method
    assert to_device(Edge(ONE, ONE), META).to.device.type == "meta"


def test_a_packed_sequence_keeps_its_lengths_on_the_host():
    packed = to_device((pack_sequence([torch.ones(2), torch.ones(1)]), ONE), META)[0]
    assert isinstance(packed, PackedSequence)
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")


# num_rows


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ({"x": torch.zeros(5, 1)}, 5),
        (["text", torch.zeros(6)], 6),
        ((torch.tensor(1.0), torch.zeros(7)), 7),
        (Frozen(torch.zeros(2, 2)), 2),
        (Pair(torch.zeros(3), 1), 3),
        (torch.zeros(0, 4), 0),
        (["a", "b", "c"], 3),
        ([["a", "b"], [1, 2]], 2),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ([], 1),
        (None, 1),
    ],
)
def test_rows_are_the_first_dimension_of_the_first_tensor_that_has_one(batch, rows):
    assert num_rows(batch) == rows


# remove_padding


@pytest.mark.parametrize(
    ("padded", "value", "expected"),
    [
        (torch.tensor([[1.0, -1.0], [-1.0, -1.0], [2.0, 3.0]]), -1, [[1.0, -1.0], [2.0, 3.0]]),
        (torch.tensor([1, 0, 2, 0]), 0, [1, 2]),
        (torch.tensor([[[0, 0]] * 2, [[0, 1], [0, 0]], [[0, 0]] * 2]), 0, [[[0, 1], [0, 0]]]),
        *[(torch.zeros(shape), -1, []) for shape in [(0,), (0, 3), (0, 2, 2)]],
    ],
)
def test_rows_of_nothing_but_the_value_are_removed_in_any_number_of_dimensions(padded, value, expected):
    found = remove_padding(padded, value)
    assert found.tolist() == expected and found.shape[1:] == padded.shape[1:]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3))
def test_what_padding_added_removing_it_takes_away(rows, padding, columns):
    values = torch.arange(float(rows * columns)).reshape(rows, columns)
    padded = torch.cat([values, torch.full((padding, columns), -100.0)])
    assert torch.equal(remove_padding(padded, -100), values)
