"""`fsdp="full_shard"` in hf's arguments and on the command line: train, resume, load the best, save a folder."""

import json
from pathlib import Path

import pytest
import torch

from distributed.launcher import run
from loopwright.checkpoint import read
from loopwright.engine.sharding import is_sharded, whole
from loopwright.errors import ConfigError

pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def weights_of(model) -> dict[str, list]:
    return {name: whole(tensor.detach()).flatten().tolist() for name, tensor in model.state_dict().items()}


def train_hf(results) -> None:
    from hf import tiny
    from loopwright.hf import Trainer

    folder = Path.cwd()

    def trainer(name: str, **options):
        model = tiny.gpt2()  # its embedding is its head
        often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        how = {"fsdp": "full_shard", "max_steps": 6, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
        args = tiny.arguments(folder / name, **how, **often, **options)
        return Trainer(model, args, train_dataset=tiny.token_rows(24), eval_dataset=tiny.token_rows(6, seed=1))

    through = trainer("whole", load_best_model_at_end=True)
    through.train()
    results["is sharded"] = is_sharded(through.model)
    results["best"] = through.state.best_model_checkpoint
    results["weights"] = weights_of(through.model)
    through.save_model(folder / "model")
    results["evaluated"] = through.evaluate()["eval_loss"]

    trainer("parts").train()
    resumed = trainer("parts")
    resumed.train(resume_from_checkpoint=str(folder / "parts" / "checkpoint-2"))
    again = trainer("again")
    again.train()
    results["resumed"] = weights_of(resumed.model) == weights_of(again.model)


def test_an_hf_trainer_shards_resumes_loads_the_best_and_saves_a_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    one, other = run(train_hf, tmp_path, 2, 100)
    assert one.exit_code == other.exit_code == 0, one.output[-4000:]
    assert one["is sharded"] and one["resumed"]
    assert one["weights"] == other["weights"] and one["evaluated"] == other["evaluated"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()} == one["weights"]
    best = read(one["best"])
    assert all(torch.equal(tensor, best.model[name]) for name, tensor in model.state_dict().items())
    config = json.loads((Path(one["best"]) / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert not (Path(one["best"]) / "model.safetensors").exists()


def train_task(results) -> None:
    from loopwright.cli import main

    words = ["train", "text-classification", "--data", "reviews.csv", "--epochs", "1", "--lr", "2e-3", "--batch", "16"]
    results["code"] = main([*words, "--threads", "1", "--fsdp", "full_shard", "--out", "run"])


def test_the_command_line_shards_and_leaves_a_whole_model(tmp_path):
    from transformers import AutoModelForSequenceClassification

    from tasks.reviews import rows, write_csv

    write_csv(tmp_path / "reviews.csv", rows())
    one, other = run(train_task, tmp_path, 2, 100)
    assert one["code"] == other["code"] == 0, one.output[-4000:]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    named = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["checkpoint"]
    saved = tmp_path / "run" / "checkpoints" / named
    assert len(list(saved.glob("shard-*"))) == 2
    best = read(saved)
    assert all(torch.equal(tensor, best.model[name]) for name, tensor in model.state_dict().items())


def test_what_fsdp_cannot_do_here_is_refused(tmp_path):
    from hf import tiny
    from loopwright.hf import Trainer

    with pytest.raises(ConfigError, match="offload"):
        Trainer(tiny.Classifier(), tiny.arguments(tmp_path, fsdp="full_shard offload"))
    with pytest.raises(ConfigError, match="gradient_checkpointing=True"):
        recomputing = {"activation_checkpointing": True}
        Trainer(tiny.Classifier(), tiny.arguments(tmp_path, fsdp="full_shard", fsdp_config=recomputing))
