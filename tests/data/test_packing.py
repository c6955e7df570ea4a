"""Several sequences in one row: which ones, and that each gets what it would get alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwright.data.buckets import sample_lengths
from loopwright.data.collators import DataCollatorWithFlattening
from loopwright.data.packing import (
    PackedDataset,
    PackingCollator,
    block_diagonal_mask,
    joined,
    most_bounds,
    packed_groups,
    row_bounds,
)
from loopwright.errors import ConfigError, DataError

LENGTHS = (3, 9, 12, 5, 7, 1, 20)


def sequences():
    numbers = np.random.default_rng(0)
    return [{"input_ids": numbers.integers(3, 50, length).tolist()} for length in LENGTHS]


@given(st.lists(st.integers(0, 40), max_size=80), st.integers(1, 32))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths, capacity):
    groups = packed_groups(lengths, capacity)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    clipped = np.minimum(lengths, capacity)
    assert all(clipped[group].sum() <= capacity for group in groups)
    assert groups == packed_groups(np.array(lengths, np.int64), capacity)
    # No two rows could have been one.
    fills = sorted(int(clipped[group].sum()) for group in groups)
    assert len(fills) < 2 or fills[0] + fills[1] > capacity or min(lengths) == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 32))
def test_the_bounds_of_rows_are_as_many_and_hold_every_token(lengths, capacity):
    clipped = np.minimum(lengths, capacity)
    rows = [clipped[group] for group in packed_groups(lengths, capacity)]
    longest = int(clipped.max())
    number = most_bounds(rows, capacity, longest)
    for row in rows:
        bounds = row_bounds(row.tolist(), capacity, longest, number)
        assert len(bounds) == number and bounds[0] == 0 and bounds[-1] == capacity
        assert ((np.diff(bounds) >= 0) & (np.diff(bounds) <= longest)).all()
        assert bounds[: len(row) + 1].tolist() == [0, *np.cumsum(row)]


def test_little_room_is_left_in_rows_of_short_sequences():
    lengths = np.random.default_rng(0).integers(5, 60, 2000)
    assert lengths.sum() / (len(packed_groups(lengths, 128)) * 128) > 0.99


def test_rows_without_room_and_lengths_of_other_data_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        packed_groups([1], 0)
    with pytest.raises(DataError, match="2 lengths for 7 samples"):
        PackedDataset(sequences(), [1, 2], 8)
    with pytest.raises(DataError, match="12 tokens, and it has room for 8"):
        joined([{"input_ids": [1] * 6}, {"input_ids": [2] * 6}], 8)


def test_a_row_has_positions_that_begin_again_and_no_label_for_a_first_token():
    row = joined([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [1, 2]}], 8)
    assert {name: row[name].tolist() for name in ("input_ids", "labels", "position_ids", "sequence_ids")} == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [-100, 6, 7, -100, 2],
        "position_ids": [0, 1, 2, 0, 1],
        "sequence_ids": [0, 0, 0, 1, 1],
    }
    # Labels that are shifted already stay, and long sequences are cut.
    row = joined([{"input_ids": [5, 6, 7], "labels": [6, 7, 8]}], 2, is_shifted=True)
    assert row["input_ids"].tolist() == [5, 6] and row["labels"].tolist() == [6, 7]


def test_every_batch_has_the_same_shapes():
    collate = PackingCollator(24, pad_id=2, makes_mask=False)
    packed = PackedDataset(sequences(), LENGTHS, 24)
    batch = collate([packed[0], packed[2]])
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids", "sequence_ids"), (2, 24)
    )
    is_empty = batch["sequence_ids"] == -1
    assert (batch["input_ids"][is_empty] == 2).all() and (batch["labels"][is_empty] == -100).all()


def test_the_mask_lets_a_token_see_itself_and_earlier_ones_of_its_sequence():
    mask = block_diagonal_mask(torch.tensor([[0, 0, 1, 1, -1]]))
    assert mask.shape == (1, 1, 5, 5) and mask.dtype == torch.float32
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert (mask[0, 0] == 0).int().tolist() == expected
    assert block_diagonal_mask(torch.zeros(1, 2, dtype=torch.long), torch.bfloat16).dtype == torch.bfloat16


def model(name, attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": attention}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **sizes)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_packed_row_gives_each_sequence_its_own_logits_and_the_same_loss(name, attention):
    network, data = model(name, attention), sequences()
    packed = PackedDataset(data, sample_lengths(data), 24)
    batch = PackingCollator(24)([packed[index] for index in range(len(packed))])
    total, count, largest = 0.0, 0, 0.0
    with torch.no_grad():
        together = network(**batch, use_cache=False)
        for row, group in enumerate(packed.groups):
            start = 0
            for index in group:
                ids = torch.tensor([data[index]["input_ids"]])
                alone = network(input_ids=ids, use_cache=False).logits[0]
                stop = start + ids.shape[1]
                largest = max(largest, float((together.logits[row, start:stop] - alone).abs().max()))
                losses = torch.nn.functional.cross_entropy(alone[:-1], ids[0, 1:], reduction="sum")
                total, count, start = total + float(losses), count + ids.shape[1] - 1, stop
    assert largest < 1e-5
    assert float(together.loss) == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_of_a_neighbour_reaches_a_sequence(name):
    network = model(name, "sdpa")
    collate = PackingCollator(16)
    with torch.no_grad():
        logits = [
            network(**collate([[{"input_ids": first}, {"input_ids": [9, 8, 7, 6]}]]), use_cache=False).logits[0, 4:8]
            for first in ([3, 4, 5, 6], [40, 41, 42, 43])
        ]
    assert torch.equal(*logits)


def test_flattened_rows_have_the_positions_and_labels_of_packed_ones():
    data = sequences()[:3]
    flat, packed = DataCollatorWithFlattening()(data), joined(data, 64)
    for name in ("input_ids", "labels", "position_ids"):
        assert flat[name][0].tolist() == packed[name].tolist()


@pytest.mark.slow
def test_the_task_trains_on_packed_lines_and_refuses_to_pack_blocks(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tests.tasks.texts import FLAGS, lines, write_text

    from loopwright import api

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = write_text(tmp_path / "lines.txt", [line[: 20 + index % 30] for index, line in enumerate(lines(200))])
    options = {**FLAGS, "block_size": 64, "vocab_size": 320, "line_by_line": True, "max_steps": 1}
    runs = [
        api.train("causal-lm", data=data, output_dir=tmp_path / str(packing), **options, packing=packing)
        for packing in (False, True)
    ]
    assert all(run.metrics["bits_per_byte"] > 0 for run in runs)
    with pytest.raises(ConfigError, match="add --line_by_line"):
        api.train("causal-lm", data=data, **{**options, "line_by_line": False}, packing=True)


def job_of(network):
    """Return as much of a job as a loss asks for."""
    training = SimpleNamespace(fsdp="", torch_compile=False, step_mode="eager", fp16=False, mixed_precision="no")
    return SimpleNamespace(model=network, args=SimpleNamespace(loss_chunk="auto"), training=training)


def test_packed_lines_are_the_lines_and_their_loss_is_theirs():
    pytest.importorskip("transformers")
    from loopwright.tasks.data import RowDataset
    from loopwright.tasks.text.causal_lm import CausalLanguageModel, PackedLines
    from loopwright.tasks.text.language_model import PaddingCollator

    network = model("gpt2", "sdpa")
    data = [{"text": str(index), **each} for index, each in enumerate(sequences()[:6])]

    def encode(row):
        ids = np.array(row["input_ids"])
        return {"input_ids": ids[:-1], "labels": ids[1:], "num_bytes": len(ids)}

    rows = RowDataset(data, encode)
    packed = PackedLines(rows, 16)
    collate, job = PaddingCollator(pad_id=0), job_of(network)
    plain = collate([rows[index] for index in range(6)])
    dense = collate([packed[index] for index in range(len(packed))])
    assert len(packed) < 6 and sum(dense["num_bytes"].tolist()) == sum(plain["num_bytes"].tolist())
    assert sorted(packed.rows[0]["text"].split("\n")) == sorted(str(each) for each in packed._packed.groups[0])
    losses = [CausalLanguageModel().compute_loss(job, network, batch)[0].item() for batch in (plain, dense)]  # type: ignore[arg-type]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
