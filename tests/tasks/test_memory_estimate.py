"""`lw check` predicts the memory of a run before its weights are loaded."""

import json

import pytest
import torch

from loopwright.cli import main
from loopwright.engine.memory import SavedBytes
from loopwright.engine.nested import iter_tensors
from loopwright.runs.auto import memory
from loopwright.runs.console.screen import Screen
from loopwright.runs.job import RunJob, build_job, given_origin, make_optimizer, prepare_torch
from loopwright.runs.settings import settle
from loopwright.runs.start import check_files
from loopwright.tasks import pretrained
from loopwright.tasks.data import RunData
from loopwright.tasks.registry import get_task
from tasks.test_adapters import small_llama
from tasks.texts import lines, tiny_gpt2, write_text


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with two models of different kinds, one of them in 16 bits."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gpt2(folder / "gpt2")
    small_llama().to(torch.bfloat16).save_pretrained(folder / "llama")
    for file in (folder / "gpt2").glob("tokenizer*"):
        (folder / "llama" / file.name).write_bytes(file.read_bytes())
    write_text(folder / "lines.txt", lines(60))
    return folder


def measured(run: RunJob) -> memory.MemoryEstimate:
    """Return what the model, its gradients, its optimizer and its activations take up after an update."""
    prepare_torch(run.settings)
    job = build_job(run.task, run.data, run.settings, given_origin(run.task, run.settings))
    job.model.train()
    optimizer, parameters = make_optimizer(job), list(job.model.parameters())
    ids, kept = torch.zeros((4, 32), dtype=torch.long), SavedBytes(parameters)
    with kept.counting(), torch.autocast("cpu", torch.bfloat16, enabled=run.training.bf16):
        logits = job.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    logits.float().sum().backward()
    optimizer.step()
    gradients = sum(each.grad.nbytes for each in parameters if each.grad is not None)
    state = sum(each.nbytes for each in iter_tensors(list(optimizer.state.values())))
    return memory.MemoryEstimate(sum(each.nbytes for each in parameters), gradients, state, kept.num_bytes, 0, 4 * 32)


@pytest.mark.parametrize(
    "words", ["", "--lora r=4", "--gradient_checkpointing", "--bf16 --optim adafactor", "--optim sgd"]
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_prediction_holds_for_what_an_update_takes_up(models, name, words):
    task = get_task("causal-lm")
    given = ["--data", models / "lines.txt", "--model", models / name, "--block_size", 32, "--batch", 4, "--threads", 1]
    settings, screen = settle(task, [*map(str, given), *words.split()]), Screen(is_quiet=True)
    run = RunJob(task, settings, RunData(check_files(task, settings, screen)), screen)
    expected, found = memory.estimate(run), measured(run)
    assert expected.weights == found.weights and expected.gradients == found.gradients
    if "adafactor" not in words:  # its step reads values
        assert expected.optimizer == pytest.approx(found.optimizer, rel=0.01)
    if "checkpointing" in words:  # backward recomputes one of the two layers at a time
        whole = memory.estimate(run, {"gradient_checkpointing": False}).activations
        assert found.activations + 0.3 * whole < expected.activations < whole
    else:
        assert 0.8 < expected.activations / found.activations < 1.25
    assert expected.logits == 3 * 4 * 4 * 32 * 300


def test_4_bits_and_8_bit_optimizers_are_predicted_smaller(models):
    def estimate(*words: str) -> memory.MemoryEstimate:
        task, screen = get_task("causal-lm"), Screen(is_quiet=True)
        given = ["--data", str(models / "lines.txt"), "--model", str(models / "llama"), "--block_size", "32", *words]
        settings = settle(task, given)
        return memory.estimate(RunJob(task, settings, RunData(check_files(task, settings, screen)), screen))

    assert estimate("--lora", "--load_in", "4bit").weights < estimate("--lora").weights
    trained = estimate().gradients // 4
    assert estimate("--optim", "adamw_8bit").optimizer == 2 * trained


def test_lw_check_says_what_to_change_before_it_loads_what_will_not_fit(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["check", "causal-lm", "--data", str(models / "lines.txt"), "--model", str(models / "gpt2"), "--batch", "4"]
    words += ["--block_size", "32"]
    assert main([*words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    need = next(event["expected_memory"] for event in events if event["event"] == "check")
    assert set(need) == {"weights", "gradients", "optimizer", "activations", "logits", "tokens"}
    assert need.pop("tokens") == 4 * 32
    total, most = sum(need.values()), need["activations"] + need["logits"]

    def said(free: float) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda device: int(free))
        main(words)
        printed = capsys.readouterr()
        return printed.out + printed.err

    assert "will not" not in said(total)
    warned = said(total - 1)
    assert "will probably not fit" in warned and "check   1 step" in warned
    assert "--batch 2 --gradient_accumulation_steps 2 (−" in warned and "--gradient_checkpointing (−" in warned
    alone = said(total - 0.45 * most)  # half a batch is just enough, adapters are not
    assert "--batch 2 --gradient_accumulation_steps 2 (−" in alone and "--lora" not in alone
    all_together = said(total - 0.65 * most)
    assert "--batch 2 --gradient_accumulation_steps 2 --gradient_checkpointing --lora" in all_together, all_together
    monkeypatch.delattr(pretrained, "open_weights")
    refused = said(need["weights"])
    assert "error[memory.train]: the model does not fit into memory" in refused
