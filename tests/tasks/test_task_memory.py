"""Too little memory in a task: updates and evaluations in parts, the error with its flags, and `--batch auto`."""

import pytest
import torch
from safetensors.torch import load_file

from loopwright import api
from loopwright.cli import main
from loopwright.config.files import read_mapping
from loopwright.errors import InputError, MemoryLimitError
from loopwright.tasks import get_task
from tasks.conftest import FLAGS
from tasks.reviews import read_lines, write_jsonl
from tasks.test_text_classification import tiny_bert

NO_ROOM = "CUDA out of memory. Tried to allocate 1.00 GiB."
SHORT = {**FLAGS, "epochs": 1, "rehearsal": False, "max_train_samples": 40, "model": "bert"}


@pytest.fixture
def limit(monkeypatch):
    """Return a function that leaves room for so many rows of a training batch and of an evaluation batch."""
    kind = type(get_task("text-classification"))
    whole = kind.compute_loss

    def set_limit(train=1000, evaluation=1000):
        seen = []

        def compute_loss(self, job, model, batch):
            rows = len(batch["position"])
            if rows > (train if torch.is_grad_enabled() else evaluation):
                raise torch.OutOfMemoryError(NO_ROOM)
            seen.append(rows)
            return whole(self, job, model, batch)

        monkeypatch.setattr(kind, "compute_loss", compute_loss)
        return seen

    return set_limit


@pytest.fixture(autouse=True)
def bert(tmp_path):
    """Make a model for each test, without dropout: with it a part would drop other values."""
    return tiny_bert(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def weights(run):
    return torch.cat([each.flatten() for each in load_file(run.path / "model" / "model.safetensors").values()])


def test_a_task_out_of_memory_continues_in_parts_with_the_same_result(limit, reviews):
    whole = api.train("text-classification", data=reviews, **SHORT)
    limit(train=4, evaluation=8)
    split = api.train("text-classification", data=reviews, **{**SHORT, "rehearsal": True}, oom="split")
    for name in ("oom_split", "oom_eval_split"):
        told = [event for event in read_lines(split.path / "metrics.jsonl") if event["event"] == name]
        assert [event["parts"] for event in told] == [2, 4]
    assert torch.allclose(weights(split), weights(whole), rtol=0, atol=1e-6)
    first, second = (read_lines(run.path / "eval" / "predictions.jsonl") for run in (whole, split))
    assert [each["position"] for each in first] == [each["position"] for each in second]
    assert [each["prediction"] for each in first] == [each["prediction"] for each in second]
    for name, value in whole.metrics.items():
        assert split.metrics[name] == (pytest.approx(value, abs=1e-6) if "loss" in name else value), name
    log = (split.path / "log.txt").read_text()
    assert "micro-batches of 16 do not fit: 4 parts each" in log and "run again in 2 parts of up to 8" in log


def test_stopping_names_the_flags_that_would_help_with_what_they_save(limit, reviews, capsys):
    limit(train=4)
    words = [f"--{name}={value}" for name, value in SHORT.items() if name not in ("quiet", "rehearsal")]
    code = main(["train", "text-classification", "--data", str(reviews), *words, "--no_rehearsal", "--oom", "stop"])
    told = capsys.readouterr().err
    assert code == 3
    assert told.startswith("error[memory.train]: out of memory in update 1 (batch 16 × length ")
    assert "not run again in smaller parts: that was not asked for" in told
    fix = told.splitlines()[-1]
    assert fix.startswith("  fix: --oom split")
    for flag in ("--batch 8 --gradient_accumulation_steps 2 (−", "--gradient_checkpointing (−", "--max_length "):
        assert flag in fix, fix


def test_in_python_what_does_not_fit_ends_a_search_a_run_or_an_evaluation(limit, reviews, tmp_path):
    limit(train=0)
    with pytest.raises(MemoryLimitError, match="that was not asked for"):
        api.train("text-classification", data=reviews, **{**SHORT, "batch": "auto"})
    assert not (tmp_path / "runs").exists()
    limit(train=4)
    with pytest.raises(MemoryLimitError, match="--oom split"):
        api.train("text-classification", data=reviews, **SHORT)
    limit(evaluation=0)
    with pytest.raises(MemoryLimitError, match="--per_device_eval_batch_size 16") as caught:
        api.train("text-classification", data=reviews, **SHORT)
    assert caught.value.code == "memory.eval"


def test_batch_auto_takes_the_largest_power_of_two_that_fits_and_keeps_the_update(limit, reviews):
    by_hand = api.train("text-classification", data=reviews, **{**SHORT, "batch": 4}, gradient_accumulation_steps=4)
    seen = limit(train=7)
    found = api.train("text-classification", data=reviews, **{**SHORT, "batch": "auto"}, effective_batch=16)
    assert seen[:12] == [1] * 4 + [2] * 4 + [4] * 4  # two updates of two micro-batches each
    assert torch.equal(weights(found), weights(by_hand)), "what was tried out has left a trace"
    config = read_mapping(found.path / "config.yaml")
    assert (config["per_device_train_batch_size"], config["gradient_accumulation_steps"]) == (4, 4)
    text = (found.path / "config.yaml").read_text()
    assert "per_device_train_batch_size: 4  # auto" in text and "gradient_accumulation_steps: 4  # auto" in text
    log = (found.path / "log.txt").read_text()
    assert "batch 4 × accum 4 = 16, the largest power of two that fits: 8 do not fit" in log
    assert "batch   4 × accum 4 × 1 device = 16" in log


def is_after_an_update(model, start):
    return not torch.equal(next(model.parameters()).detach(), start)


def holds_gradients(model, start):
    return any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("is_full", [is_after_an_update, holds_gradients], ids=["optimizer state", "held gradients"])
def test_batch_auto_leaves_room_for_what_a_run_holds_besides(reviews, monkeypatch, is_full):
    kind = type(get_task("text-classification"))
    whole, start = kind.compute_loss, []

    def compute_loss(self, job, model, batch):
        start[:] = start or [next(model.parameters()).detach().clone()]
        if torch.is_grad_enabled() and len(batch["position"]) > 4 and is_full(model, start[0]):
            raise torch.OutOfMemoryError(NO_ROOM)
        return whole(self, job, model, batch)

    monkeypatch.setattr(kind, "compute_loss", compute_loss)
    found = api.train("text-classification", data=reviews, **{**SHORT, "batch": "auto"}, effective_batch=16)
    config = read_mapping(found.path / "config.yaml")
    assert (config["per_device_train_batch_size"], config["gradient_accumulation_steps"]) == (4, 4)


def test_on_the_host_the_activations_of_one_micro_batch_are_told(reviews):
    def told(effective):
        flags = {**SHORT, "batch": "auto", "max_train_samples": 4}
        run = api.train("text-classification", data=reviews, **flags, effective_batch=effective)
        (line,) = [line for line in (run.path / "log.txt").read_text().splitlines() if "of activations" in line]
        return line.split(" · ")[1]

    assert told(4) == told(8)  # four rows in both, once with an accumulation of two


def test_batch_auto_goes_no_further_than_the_memory_of_the_host(reviews, monkeypatch):
    import loopwright.runs.auto.batch_size as batch_size

    monkeypatch.setattr(batch_size, "free_bytes", lambda device: 100_000)
    found = api.train("text-classification", data=reviews, **{**SHORT, "batch": "auto"}, effective_batch=16)
    assert read_mapping(found.path / "config.yaml")["per_device_train_batch_size"] < 16
    assert "would need about" in (found.path / "log.txt").read_text()


def test_effective_batch_sets_the_accumulation_of_a_batch_that_is_given(reviews):
    run = api.train("text-classification", data=reviews, **{**SHORT, "batch": 4}, effective_batch=20)
    assert read_mapping(run.path / "config.yaml")["gradient_accumulation_steps"] == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch": 16, "effective_batch": 20}, r"20 samples cannot be made of micro-batches of 16\n.*batch 16"),
        ({"batch": 16, "effective_batch": 8}, r"8 samples cannot be made of micro-batches of 16\n.*batch 16"),
        ({"batch": "auto", "effective_batch": 8, "gradient_accumulation_steps": 2}, "the accumulation follows"),
    ],
    ids=["no multiple", "too small", "both"],
)
def test_updates_that_cannot_be_made_are_refused(flags, message, reviews):
    with pytest.raises(InputError, match=message):
        api.train("text-classification", data=reviews, **{**SHORT, **flags})


def test_a_task_that_compares_the_samples_of_a_batch_is_not_cut(tmp_path):
    pairs = [{"anchor": f"good {number}", "positive": f"great {number}"} for number in range(24)]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    with pytest.raises(InputError, match="--batch auto: the loss compares each pair with all others"):
        api.train("sentence-embedding", data=data, epochs=1, batch="auto", rehearsal=False, quiet=True)
