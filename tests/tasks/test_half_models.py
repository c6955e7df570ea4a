"""Models whose files hold weights of 16 bits are trained in 32 bits, but for the frozen ones below adapters."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from loopwright.runs.trained_model import load_run
from tasks.dialogues import FLAGS, tiny_decoder, write_dialogues
from tasks.pairs import chat_rows
from tasks.reviews import rows, write_csv, write_jsonl
from tasks.runs import assert_same_files, check_kill, train_in
from tasks.texts import save_bert, small_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with data, and with models saved in bfloat16 and, with the same values, in float32."""
    folder = tmp_path_factory.mktemp("half")
    write_dialogues(folder, 20)
    write_jsonl(folder / "pairs.jsonl", chat_rows(20))
    write_csv(folder / "reviews.csv", rows(32))
    tiny_decoder(folder / "llama-half")
    save_bert(folder / "bert-half", "BertForSequenceClassification", small_tokenizer(row["review"] for row in rows()))
    for kind, auto in (("llama", AutoModelForCausalLM), ("bert", AutoModelForSequenceClassification)):
        half, single = folder / f"{kind}-half", folder / f"{kind}-single"
        model = auto.from_pretrained(half, dtype=torch.bfloat16)
        model.save_pretrained(half)
        shutil.copytree(half, single)
        model.float().save_pretrained(single)
    return folder


def trained(folder, place, task, name, **flags):
    data = folder / {"chat": "chats.jsonl", "preference": "pairs.jsonl"}.get(task, "reviews.csv")
    given = {**FLAGS, "lr": 2e-5} if task == "chat" else {"batch": 8, "max_steps": 3, "threads": 1, "quiet": True}
    (folder / place).mkdir()
    given = {"rehearsal": False, **given, **flags}
    return train_in(folder / place, task, data=data, model=folder / name, **given)


@pytest.mark.parametrize(("task", "kind"), [("chat", "llama"), ("text-classification", "bert")])
def test_a_model_saved_in_16_bits_is_trained_like_one_in_32(folder, task, kind):
    half, single = (trained(folder, f"of {kind}-{name}", task, f"{kind}-{name}") for name in ("half", "single"))
    assert_same_files(half.path / "model", single.path / "model", "model.safetensors")
    weights = load_file(half.path / "model" / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.float32}


@pytest.mark.parametrize("flags", [{}, {"lora": "r=2", "bf16": True}], ids=["full", "adapters"])
def test_the_reference_of_a_preference_has_the_same_weights(folder, flags):
    run = trained(folder, f"pairs {len(flags)}", "preference", "llama-half", num_samples=0, **flags)
    (row,) = run.predict(chat_rows(1, seed=3))  # opens the model for its reference again
    assert {"preferred", "margin"} <= set(row) and "error" not in row


def test_it_resumes_in_32_bits(folder):
    words = ["train", "chat", "--data", folder / "chats.jsonl", "--model", folder / "llama-half", "--no_rehearsal"]
    check_kill(folder, [*words, "--max_steps", 3, "--save_steps", 1, "--max_length", 128, "--num_samples", 0], 2)


@pytest.mark.parametrize(("bf16", "base"), [(False, torch.float32), (True, torch.bfloat16)])
def test_frozen_weights_below_adapters_stay_in_16_bits_if_their_inputs_have_16(folder, bf16, base):
    run = trained(folder, f"adapters {bf16}", "text-classification", "bert-half", lora="r=2", bf16=bf16)
    parameters = list(load_run(run.folder, has_adapters=True).model.parameters())
    assert {each.dtype for each in parameters if each.requires_grad} == {torch.float32}
    assert {each.dtype for each in parameters if not each.requires_grad} == {base}
    whole = run.export(folder / f"merged {bf16}", merge=True)
    assert {each.dtype for each in load_file(whole / "model.safetensors").values()} == {torch.float32}
    assert (run.export(folder / f"alone {bf16}", adapters=True) / "adapter_model.safetensors").is_file()
