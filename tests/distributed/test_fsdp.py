"""Models that are split over processes (FSDP2 on gloo): training, sharded checkpoints, other splits, whole files.

Three launches serve most tests: "two" trains and saves on two processes, "four" and "two_again" go on from what was
saved on another number of them.
"""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

import toys
from distributed.launcher import run
from loopwright import Checkpointing, Trainer, failpoints
from loopwright.callbacks import ModelEmaCallback, SaveBestModelCallback, TrainerCallback
from loopwright.checkpoint import read, verify
from loopwright.checkpoint.whole_weights import export_weights
from loopwright.engine.nested import iter_tensors
from loopwright.engine.sharding import Sharding, is_sharded, local, whole
from loopwright.errors import CheckpointError, ConfigError
from loopwright.training.run import run_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SAMPLES, EPOCHS = 22, 4
SAVED = 4  # updates, in the middle of an epoch


class Block(nn.Module):
    def __init__(self, is_recomputed: bool = False):
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.dropout = nn.Dropout(0.2)
        self.is_recomputed = is_recomputed

    def forward(self, x):
        return recomputed(self.run, x, use_reentrant=False) if self.is_recomputed else self.run(x)

    def run(self, x):
        return x + self.dropout(torch.tanh(self.inner(x)))


class Network(nn.Module):
    """Uneven shapes (7 rows, and 1), a buffer that training moves, a frozen weight and two tied ones."""

    def __init__(self, is_recomputed: bool = False, norm: type[nn.Module] = nn.BatchNorm1d):
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = norm(7)
        self.blocks = nn.Sequential(Block(is_recomputed), Block(is_recomputed))
        self.blocks[1].inner.weight = self.blocks[0].inner.weight
        self.last = nn.Linear(7, 1)
        self.frozen = nn.Parameter(torch.linspace(0, 1, 3), requires_grad=False)

    def forward(self, x):
        return self.last(self.blocks(self.norm(self.first(x)))) + self.frozen.mean()


network = partial(toys.seeded, Network)


class Witness(TrainerCallback):
    """Notes the whole state right after it was restored, and what was saved."""

    def __init__(self):
        self.restored, self.saved = None, []

    def on_training_run_start(self, trainer, **kwargs):
        self.restored = digest(trainer)

    def on_checkpoint_saved(self, trainer, path=None, **kwargs):
        self.saved.append(path.name)


def digest(trainer) -> str:
    """A hash of all weights, buffers and moments of a trainer, whole; every process must ask for it."""
    entries = {f"model {name}": tensor for name, tensor in trainer.get_model().state_dict().items()}
    names = {id(parameter): name for name, parameter in trainer.get_model().named_parameters()}
    for parameter, moments in run_of(trainer).bare_optimizer().state.items():
        entries |= {f"{names[id(parameter)]} {name}": tensor for name, tensor in moments.items()}
    return hash_of({name: whole(tensor.detach()) for name, tensor in entries.items()})


def digest_of_checkpoint(folder: Path) -> str:
    """The same hash from a checkpoint, read whole by one process."""
    saved = read(folder)
    entries = {f"model {name}": tensor for name, tensor in saved.model.items()}
    for parameter, moments in saved.state["optimizer"]["state"].items():
        entries |= {f"{parameter} {name}": tensor for name, tensor in moments.items()}
    return hash_of(entries)


def hash_of(tensors: dict) -> str:
    told = hashlib.sha256()
    for name in sorted(tensors):
        told.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        told.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def fit(folder=None, num_epochs=EPOCHS, callbacks=(), accumulation=2, model=None, sharding="full_shard", **kwargs):
    """Train with clipping and a moving average; return the trainer and its result."""
    model = network() if model is None else model
    ema = ModelEmaCallback(decay=0.5, save_path="ema.pt")
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=[ema, *callbacks])
    checkpoints = None if folder is None else Checkpointing(folder, every_updates=3)
    options = {"gradient_accumulation_steps": accumulation, "gradient_clip_norm": 0.5, "seed": 3, "sharding": sharding}
    options |= {"checkpoints": checkpoints, "resume_from": None if folder is None else "auto", **kwargs}
    result = trainer.train(toys.data(SAMPLES), num_epochs, toys.data(6), 4, log_every=1, **options)
    trainer.average = ema.ema_model.module
    return trainer, result


def outcome(trainer, result) -> dict:
    average = {name: whole(tensor) for name, tensor in trainer.average.state_dict().items()}
    history = trainer.run_history
    return {
        "state": digest(trainer),
        "average": hash_of(average),
        "updates": result.updates,
        "history": {name: list(history.get_metric_values(name)) for name in sorted(history.get_metric_names())},
        "norm": float(trainer.gradient_norm),
    }


# What the processes do


def two(results) -> None:
    folder = Path()
    trainer, result = fit("whole")
    results["whole"] = outcome(trainer, result)
    parameters = list(trainer.model.parameters())
    results["parts"] = [list(local(parameter).shape) for parameter in parameters]
    results["is sharded"] = is_sharded(trainer.model) and is_sharded(trainer.average)

    witness = Witness()
    fit("parts", callbacks=[witness, toys.stop_at(SAVED)])
    results["saved"] = witness.saved
    if os.environ["RANK"] == "0":
        shutil.copytree(folder / "parts", folder / "halted")
    again = Witness()
    results["resumed"] = outcome(*fit("parts", callbacks=[again]))
    results["restored"] = again.restored

    results["copies"] = outcome(*fit(sharding=None))
    results["evaluated"] = trainer.evaluate(toys.data(6)).metrics["evaluation_loss"]
    results["predicted"] = trainer.predict(toys.data(5)).outputs.flatten().tolist()
    trainer.train(toys.data(SAMPLES), 1, toys.data(6), per_device_batch_size=4, seed=4)
    results["trained again"] = bool(torch.isfinite(whole(parameters[0])).all())

    trainer.save_checkpoint(folder / "model.safetensors", {"note": "split"})
    trainer.save_checkpoint(folder / "model.pt")
    trainer.save_training_state(folder / "state")
    results["saved as"] = digest(trainer)
    for file in ("model.safetensors", "model.pt"):
        other, _ = fit(num_epochs=1)
        other.load_checkpoint(folder / file)
        pairs = zip(other.model.parameters(), parameters, strict=True)
        results[f"from {file}"] = all(torch.equal(local(one), local(two)) for one, two in pairs)
        if file == "model.pt":
            results["moments from model.pt"] = digest(other)
    results["whole weights"] = sorted(trainer.whole_weights())
    best = SaveBestModelCallback(folder / "best.pt", watch_metric="train_loss_epoch")
    fit(callbacks=[best], num_epochs=2)
    results["best"] = best.best_metric_epoch


def go_on(results) -> None:
    """Continue what other processes have left in these folders."""
    for source in os.environ["SOURCES"].split(","):
        witness = Witness()
        trainer, result = fit(source, callbacks=[witness], accumulation=int(os.environ["ACCUMULATION"]))
        results[source] = {"restored": witness.restored, **outcome(trainer, result)}


# The tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def first(folder):
    ranks = run(two, folder, 2, 100)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].output[-3000:] + ranks[1].output[-3000:]
    assert ranks[0].seen.keys() == ranks[1].seen.keys()
    return ranks


def continued(folder: Path, *sources: str, num_processes: int, accumulation: int) -> dict:
    environment = {"SOURCES": ",".join(sources), "ACCUMULATION": str(accumulation)}
    ranks = run(go_on, folder, num_processes, 90, **environment)
    assert {rank.exit_code for rank in ranks} == {0}, ranks[0].output[-4000:]
    assert all(rank.seen == ranks[0].seen for rank in ranks)
    return ranks[0].seen


def test_every_process_holds_its_part_of_every_weight(first):
    assert first[0]["is sharded"] and first[1]["is sharded"]
    shapes = [list(parameter.shape) for parameter in network().parameters()]
    rows = [[parts[index][0] for index in range(len(shapes))] for parts in (first[0]["parts"], first[1]["parts"])]
    assert [sum(of_weight) for of_weight in zip(*rows, strict=True)] == [shape[0] for shape in shapes]
    assert max(rows[0]) == 4 and max(rows[1]) == 3


def test_a_run_that_was_stopped_ends_with_the_same_bits(first):
    for rank in first:
        assert rank["resumed"] == rank["whole"]
    assert first[0]["whole"] == first[1]["whole"]
    assert f"step-{SAVED:010d}" in first[0]["saved"]


def test_shards_train_as_copies_do_but_for_rounding(first):
    shards, copies = first[0]["whole"], first[0]["copies"]
    assert shards["updates"] == copies["updates"] == 2 * EPOCHS
    assert shards["history"].keys() == copies["history"].keys()
    # Not the evaluation: there each copy has running means of its own.
    losses = shards["history"]["train_loss_epoch"]
    assert len(losses) == EPOCHS and losses == pytest.approx(copies["history"]["train_loss_epoch"], rel=1e-5)
    assert shards["norm"] == pytest.approx(copies["norm"], rel=1e-5)


def test_a_sharded_model_evaluates_predicts_and_trains_again(first):
    assert first[0]["evaluated"] == first[1]["evaluated"]
    assert len(first[0]["predicted"]) == 5 and first[0]["predicted"] == first[1]["predicted"]
    assert first[0]["trained again"]


def test_model_files_hold_the_whole_and_are_read_by_shards(first, folder):
    weights = load_file(folder / "model.safetensors")
    model = network()
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["blocks.1.inner.weight"] and not missing.unexpected_keys
    stored = torch.load(folder / "model.pt", weights_only=True)
    assert all(torch.equal(stored["model_state_dict"][name], tensor) for name, tensor in weights.items())
    assert first[0]["from model.safetensors"] and first[1]["from model.safetensors"]
    assert first[0]["from model.pt"] and first[0]["moments from model.pt"] == first[0]["saved as"]
    assert first[0]["whole weights"] == sorted(model.state_dict()) and first[1]["whole weights"] == []
    average = torch.load(folder / "ema.pt", weights_only=True)["model_state_dict"]
    shapes = [{name: tensor.shape for name, tensor in state.items()} for state in (average, model.state_dict())]
    assert shapes[0] == shapes[1]
    assert first[0]["best"] == first[1]["best"] and (folder / "best.pt").exists()


def test_each_process_wrote_its_share_and_nothing_is_pickled(first, folder):
    saved = folder / "halted" / f"step-{SAVED:010d}"
    assert sorted(path.name for path in saved.iterdir()) == [
        "MANIFEST.json", "shard-00000.safetensors", "shard-00001.safetensors",
        "shards.json", "state.json", "state.safetensors",
    ]  # fmt: skip
    manifest = verify(saved)
    assert manifest["format"] == 2 and manifest["about"]["fingerprint"]["sharding"] == "fsdp2"
    parts = [load_file(saved / f"shard-0000{rank}.safetensors") for rank in range(2)]
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    state = read(saved)
    parts_of_state = [state.model, state.state["optimizer"], state.state["callbacks"]]
    split = [tensor for tensor in iter_tensors(parts_of_state) if tensor.dim()]
    # The tied weight is in the model twice, and stored once; buffers are not split.
    assert 0.9 * sum(sizes) <= sum(tensor.nbytes for tensor in split) <= 1.4 * sum(sizes)
    assert max(sizes) <= 0.62 * sum(sizes)
    assert not any(name.startswith("model/") and "running" in name for part in parts for name in part)


@pytest.mark.parametrize("damage", ["removed", "swapped", "cut", "emptied", "table"])
def test_a_shard_that_is_not_what_was_written_is_refused(first, folder, damage, tmp_path):
    saved = tmp_path / "step-4"
    shutil.copytree(folder / "halted" / f"step-{SAVED:010d}", saved)
    one, other = saved / "shard-00000.safetensors", saved / "shard-00001.safetensors"
    if damage == "removed":
        other.unlink()
    elif damage == "swapped":
        shutil.copy(one, other)
    elif damage == "cut":
        other.write_bytes(other.read_bytes()[:-4])
    elif damage == "emptied":
        other.write_bytes(b"")
    else:
        table = json.loads((saved / "shards.json").read_text())
        table["tensors"].popitem()
        (saved / "shards.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError):
        read(saved)


def test_one_process_reads_what_two_wrote_and_continues(first, folder, monkeypatch):
    monkeypatch.chdir(folder)
    saved = folder / "halted" / f"step-{SAVED:010d}"
    witness = Witness()
    trainer, result = fit(callbacks=[witness], accumulation=4, folder=copy_of(folder, "halted", "on_one"))
    assert witness.restored == digest_of_checkpoint(saved)
    assert result.updates == first[0]["whole"]["updates"] and not is_sharded(trainer.model)
    expected = first[0]["whole"]["history"]["train_loss_epoch"][-1]
    assert result.metrics["train_loss_epoch"] == pytest.approx(expected, rel=2e-3)


def copy_of(folder: Path, source: str, name: str) -> str:
    shutil.copytree(folder / source, folder / name)
    return name


def test_other_numbers_of_processes_read_the_same_bits(first, folder, monkeypatch):
    saved = digest_of_checkpoint(folder / "halted" / f"step-{SAVED:010d}")
    assert first[0]["restored"] == first[1]["restored"] == saved
    on_four = continued(folder, copy_of(folder, "halted", "on_four"), num_processes=4, accumulation=1)["on_four"]
    assert on_four["restored"] == saved
    newest = sorted((folder / "on_four").glob("step-*"))[-1]
    assert len(list(newest.glob("shard-*"))) == 4
    assert digest_of_checkpoint(newest) == on_four["state"]

    monkeypatch.chdir(folder)
    fit("of_one", accumulation=4, callbacks=[toys.stop_at(SAVED)], sharding=None)
    back_on_two = continued(folder, "on_four", "of_one", num_processes=2, accumulation=2)
    assert back_on_two["on_four"]["restored"] == on_four["state"]
    assert back_on_two["of_one"]["restored"] == digest_of_checkpoint(folder / "of_one" / f"step-{SAVED:010d}")


def test_a_sharded_checkpoint_is_exported_as_one_file(first, folder, tmp_path):
    saved = read(folder / "state")
    path = export_weights(folder / "state", tmp_path / "model.safetensors")
    weights = load_file(path)
    assert weights.keys() | {"blocks.1.inner.weight"} == saved.model.keys()
    assert all(torch.equal(tensor, saved.model[name]) for name, tensor in weights.items())
    whole_file = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole_file.items())


# Precision, recomputing, losses that are not finite


class PoisonedTrainer(toys.PoisonedOnOne):
    poisoned_update = 3


def precisions(results) -> None:
    plain, _ = fit(num_epochs=2, model=network(norm=nn.LayerNorm))
    recomputing, _ = fit(num_epochs=2, model=network(norm=nn.LayerNorm, is_recomputed=True))
    results["recomputed"] = digest(plain) == digest(recomputing)
    half, result = fit("half", 2, model=network(norm=nn.LayerNorm), mixed_precision="bf16", callbacks=[toys.stop_at(2)])
    resumed, _ = fit("half", 2, model=network(norm=nn.LayerNorm), mixed_precision="bf16")
    through, _ = fit(num_epochs=2, model=network(norm=nn.LayerNorm), mixed_precision="bf16")
    results["half"] = digest(resumed) == digest(through)
    results["is float32"] = {local(parameter).dtype for parameter in through.model.parameters()} == {torch.float32}
    results["differs"] = digest(through) != digest(plain)
    pairs = zip(through.model.parameters(), plain.model.parameters(), strict=True)
    results["distance"] = max(float((whole(one) - whole(two)).abs().max()) for one, two in pairs)

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")  # as accelerate launch does
    launched, _ = fit(num_epochs=2, model=network(norm=nn.LayerNorm), sharding=None)
    results["launched"] = is_sharded(launched.model) and digest(launched) == digest(plain)
    os.environ["FSDP_VERSION"] = "1"
    try:
        fit(num_epochs=1, sharding=None)
    except ConfigError as error:
        results["version 1"] = str(error)
    del os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_VERSION"]

    layers = Sharding(layers=("Block",), reshard_after_forward=False)
    by_layer, _ = fit(num_epochs=2, model=untied_network(), sharding=layers)
    together, _ = fit(num_epochs=2, model=untied_network())
    results["by layer"] = digest(by_layer) == digest(together)

    results["scaled"] = scaled("scaled", 2)
    scaled("scaled in parts", 1)
    results["scaled in parts"] = scaled("scaled in parts", 2)
    results["scaled copies"] = scaled("scaled copies", 2, sharding=None)

    model = network()
    trainer = PoisonedTrainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=[])
    settings = {"per_device_batch_size": 4, "seed": 3, "gradient_clip_norm": 0.5, "sharding": "full_shard"}
    result = trainer.train(toys.data(SAMPLES), 2, nan="skip", **settings)
    results["skipped"] = [result.updates, all(local(p).isfinite().all().item() for p in model.parameters())]
    result = trainer.train(toys.data(SAMPLES), 2, **settings)
    results["stopped"] = result.stop_reason
    with torch.no_grad():
        local(next(model.parameters())).fill_(float("nan") if os.environ["RANK"] == "1" else 0.0)
    try:
        trainer.save_training_state("not finite")
    except CheckpointError as error:
        results["refused"] = str(error)


class ScaledLoss(nn.Module):
    """A loss with a weight of its own, which only the optimizer knows of."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, outputs, targets):
        return (self.scale * outputs - targets).square().mean()


def scaled(folder: str, num_epochs: int, sharding: str | None = "full_shard") -> list:
    model, loss = network(norm=nn.LayerNorm), ScaledLoss()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], 0.01)
    checkpoints = Checkpointing(folder)
    settings = {"per_device_batch_size": 4, "seed": 3, "gradient_clip_norm": 0.5, "gradient_clip_value": 0.1}
    trainer = Trainer(model, loss, optimizer, callbacks=[])
    data = toys.data(SAMPLES)
    trainer.train(data, num_epochs, checkpoints=checkpoints, resume_from="auto", sharding=sharding, **settings)
    return [float(loss.scale), float(trainer.gradient_norm), float(whole(model.last.bias))]


def untied_network() -> nn.Module:
    model = network(norm=nn.LayerNorm)
    model.blocks[1].inner.weight = nn.Parameter(model.blocks[0].inner.weight.detach().clone())
    return model


def test_precision_recomputing_layers_and_losses_that_are_not_finite(tmp_path):
    one, other = run(precisions, tmp_path, 2, 60)
    assert one["recomputed"] and one["half"] and one["is float32"] and one["differs"] and one["by layer"]
    assert one["distance"] < 0.05
    assert one["launched"] and "set fsdp_version to 2" in one["version 1"]
    assert one["scaled"] == other["scaled"] == one["scaled in parts"] and one["scaled"][0] != 1.0
    assert one["scaled"] == pytest.approx(one["scaled copies"], rel=1e-4)
    assert one["skipped"] == other["skipped"] == [6, True]
    assert "loss of update 3 is not finite" in one["stopped"]
    assert "a weight is not finite" in one["refused"] and "a weight is not finite" in other["refused"]
    assert not (tmp_path / "not finite").exists()
    assert one.exit_code == other.exit_code == 0


# Faults

FAULTS = {
    "part": ("1", "mid_write:2:kill"),
    "manifest": ("0", "pre_manifest:2:kill"),
    "full": ("1", "pre_fsync:2:raise:ENOSPC"),
}


def faulty(results) -> None:
    victim, fault = FAULTS[os.environ["FAULT"]]
    if os.environ["RANK"] == victim:
        failpoints.arm(fault)
    fit(os.environ["FAULT"])


def test_a_save_that_one_process_cannot_finish_leaves_the_one_before(first, tmp_path):
    for name in ("part", "manifest"):
        ranks = run(faulty, tmp_path, 2, 60, FAULT=name)
        victim, _ = FAULTS[name]
        assert ranks[int(victim)].exit_code == -9
        assert ranks[1 - int(victim)].exit_code not in (0, None)
        saved = [path for path in (tmp_path / name).iterdir() if path.name.startswith("step-")]
        assert [path.name for path in saved] == [f"step-{2:010d}"]
        assert verify(saved[0])
    resumed = continued(tmp_path, "part", "manifest", num_processes=2, accumulation=2)
    for name in ("part", "manifest"):
        del resumed[name]["restored"]
        assert resumed[name] == first[0]["whole"]
        assert not list((tmp_path / name).glob(".tmp-*"))


def test_a_full_disk_of_one_process_is_reported_and_the_next_save_makes_up_for_it(tmp_path):
    ranks = run(faulty, tmp_path, 2, 60, FAULT="full")
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].output[-3000:]
    assert "trying again at the next save" in ranks[0].output and "No space left" in ranks[0].output
    saved = sorted(path for path in (tmp_path / "full").iterdir() if path.name.startswith("step-"))
    assert len(saved) > 1 and all(verify(path) for path in saved)
    assert not list((tmp_path / "full").glob(".tmp-*"))
