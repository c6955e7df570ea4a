"""preference gives trl's numbers: losses of each update and rewards of each evaluation, on the same rows."""

import pytest

from loopwright import api
from tasks.pairs import chat_rows, text_rows, whole_rows, write_model
from tasks.reviews import read_lines, write_jsonl

pytest.importorskip("trl")
pytest.importorskip("datasets")
UPDATES = 4
TRAINING = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_steps": UPDATES}
TRAINING |= {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
TRAINING |= {"per_device_eval_batch_size": 4, "train_sampling_strategy": "sequential", "save_strategy": "no"}
NAMES = {"loss": "loss", "chosen_reward": "rewards/chosen", "rejected_reward": "rewards/rejected"}
NAMES |= {"reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies"}


def ours(folder, rows, **flags):
    data = [write_jsonl(folder / f"{name}.jsonl", part) for name, part in (("train", rows[:16]), ("eval", rows[16:]))]
    flags = {**TRAINING, "save_strategy": "steps", "save_steps": 9, **flags}
    run = api.train(
        "preference", train_file=data[0], validation_file=data[1], model=folder / "model", rehearsal=False,
        threads=1, quiet=True, keep_duplicates=True, output_dir=folder / "run", **flags,
    )  # fmt: skip
    records = read_lines(run.path / "metrics.jsonl")
    logged = [record["loss"] for record in records if record["event"] == "log"]
    evaluated = [record for record in records if record["event"] == "evaluation"]
    return logged, [{name: record[f"eval_{name}"] for name in NAMES} for record in evaluated]


def theirs(folder, rows, kind, config):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parts = {"train_dataset": Dataset.from_list(rows[:16]), "eval_dataset": Dataset.from_list(rows[16:])}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = kind(model=model, args=config, processing_class=tokenizer, **parts)
    trainer.train()
    history = trainer.state.log_history
    logged = [each["loss"] for each in history if "loss" in each]
    evaluated = [each for each in history if "eval_loss" in each]
    return logged, [{name: each[f"eval_{other}"] for name, other in NAMES.items()} for each in evaluated]


def assert_equal(mine, other, updates=UPDATES):
    assert len(mine[0]) == updates and len(mine[1]) == updates
    assert mine[0] == pytest.approx(other[0], rel=2e-6, abs=1e-6)
    for one, two in zip(mine[1], other[1], strict=True):
        assert one == pytest.approx(two, rel=2e-6, abs=2e-6)
    assert abs(mine[1][-1]["reward_margin"] - mine[1][0]["reward_margin"]) > 0.01  # it learns


def settings(folder, config, **more):
    return config(
        output_dir=str(folder / "trl"), max_length=None, report_to=[], use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, **TRAINING, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "loss, beta, make", [("dpo", 0.3, text_rows), ("dpo", 0.1, whole_rows), ("ipo", 0.2, chat_rows)]
)
def test_losses_and_rewards_are_those_of_dpo_trainer(loss, beta, make, tmp_path):
    from trl import DPOConfig, DPOTrainer

    write_model(tmp_path / "model")
    rows = make(24)
    mine = ours(tmp_path, rows, loss=loss, beta=beta)
    config = settings(tmp_path, DPOConfig, beta=beta, loss_type={"dpo": "sigmoid"}.get(loss, loss))
    assert_equal(mine, theirs(tmp_path, rows, DPOTrainer, config))


def test_losses_and_rewards_of_simpo_are_those_of_cpo_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    cpo = pytest.importorskip("trl.experimental.cpo")
    write_model(tmp_path / "model")
    rows = text_rows(24)
    mine = ours(tmp_path, rows, loss="simpo", beta=1.5, gamma=0.8, label_smoothing=0.1)
    more = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 1.5, "simpo_gamma": 0.8, "label_smoothing": 0.1}
    config = settings(tmp_path, cpo.CPOConfig, remove_unused_columns=False, **more)
    config.max_length = 128
    assert_equal(mine, theirs(tmp_path, rows, cpo.CPOTrainer, config))
