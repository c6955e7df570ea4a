"""The fingerprint of a run, what differs between two, and which guarantee that leaves."""

import json

import numpy as np
import pytest
import torch

from loopwright.checkpoint.fingerprint import TIERS, Change, differences, fingerprint, tier

CPU = torch.device("cpu")


def test_a_fingerprint_holds_versions_device_and_flags_and_what_it_is_given():
    mark = fingerprint(CPU, processes=2, precision="bf16")
    assert mark["torch"] == torch.__version__ and mark["numpy"] == np.__version__
    assert mark["device"].startswith("cpu ")
    assert mark["threads"] == 1 and mark["processes"] == 2 and mark["precision"] == "bf16"
    assert {"loopwright", "python", "deterministic", "tf32", "matmul_precision"} <= mark.keys()
    assert json.loads(json.dumps(mark)) == mark
    assert fingerprint(CPU) == fingerprint(CPU)
    assert differences(fingerprint(CPU), fingerprint(CPU)) == []


@pytest.fixture
def flags_put_back():
    precision, is_deterministic = torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic
    yield
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.deterministic = is_deterministic


CHANGES = {
    "threads": lambda: torch.set_num_threads(2),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
}


@pytest.mark.usefixtures("flags_put_back")
@pytest.mark.parametrize("name", CHANGES)
def test_a_flag_that_changes_the_rounding_is_named_and_lowers_the_guarantee(name):
    before = fingerprint(CPU)
    CHANGES[name]()
    after = fingerprint(CPU)
    assert Change(name, before[name], after[name]) in differences(before, after)
    assert tier(before, after, is_counted=False) == "T2"


ROUNDING = ["torch", "device", "tf32", "precision", "step_mode", "processes", "sharding", "augmentation"]


@pytest.mark.parametrize("name", [*ROUNDING, "python", "numpy", "loopwright"])
def test_whatever_differs_is_named_and_what_may_round_differently_lowers_the_guarantee(name):
    mark = fingerprint(CPU, precision="no", step_mode="auto", processes=2)
    assert tier(mark, {**mark, name: "another"}, is_counted=False) == ("T2" if name in ROUNDING else "T0")
    assert differences(mark, {**mark, name: "another"}) == [Change(name, mark.get(name), "another")]


def test_what_only_one_of_the_two_holds_is_a_difference():
    changes = differences({"a": 1}, {"b": 2})
    assert changes == [Change("a", 1, None), Change("b", None, 2)]
    assert list(map(str, changes)) == ["a: 1 -> None", "b: None -> 2"]


def test_a_source_that_is_read_again_is_counted_whatever_else_is_the_same():
    mark = fingerprint(CPU)
    assert tier(mark, mark, is_counted=True) == "T3"
    assert tier(mark, {**mark, "threads": 64}, is_counted=True) == "T3"


def test_an_exact_sum_stays_exact_on_another_number_of_processes_and_on_nothing_else():
    mark = fingerprint(CPU, processes=2, reduction="exact")
    assert tier(mark, mark, is_counted=False) == "T0"
    assert tier(mark, {**mark, "processes": 4}, is_counted=False) == "T1"
    assert tier(mark, {**mark, "processes": 4, "threads": 64}, is_counted=False) == "T2"
    assert tier(mark, {**mark, "processes": 4, "reduction": "fast"}, is_counted=False) == "T2"


def test_every_tier_says_what_it_means():
    assert sorted(TIERS) == ["T0", "T1", "T2", "T3"]
    assert all(": " in text for text in TIERS.values())
