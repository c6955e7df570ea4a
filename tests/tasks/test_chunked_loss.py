"""The chunked loss equals the full one: loss and all gradients, whatever the labels, sizes and precision."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from loopwright import api
from loopwright.engine.compilation import CompiledModel
from loopwright.errors import ConfigError
from loopwright.tasks.text.chunked_loss import LinearCrossEntropy, token_loss
from tasks.test_adapters import adapted, small_llama
from tasks.texts import lines, tiny_gpt2, write_text


def both(hidden, weight, bias, labels, chunk):
    """Return the loss and the gradients, in full and in chunks."""
    found = []
    for is_chunked in (False, True):
        given = [None if each is None else each.clone().requires_grad_() for each in (hidden, weight, bias)]
        if is_chunked:
            loss = LinearCrossEntropy.apply(*given, labels, chunk, -100)
        else:
            logits = functional.linear(*given).float()
            loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        (loss / 7).backward()
        found.append([loss.detach(), *(each.grad for each in given if each is not None)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("chunk", [1, 3, 16, 37, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])  # of the labels that are ignored
def test_loss_and_gradients_equal_the_full_ones(chunk, has_bias, share):
    torch.manual_seed(chunk)
    hidden, weight = torch.randn(37, 24), torch.randn(101, 24) / 5
    labels = torch.randint(101, (37,)).masked_fill(torch.rand(37) < share, -100)
    for full, chunked in both(hidden, weight, torch.randn(101) if has_bias else None, labels, chunk):
        assert (full - chunked).abs().max() <= 1e-6 * max(1.0, float(full.abs().max()))


def losses(model, chunk, *, is_bf16=False, **inputs):
    model.zero_grad()
    inputs = {"input_ids": torch.arange(60).reshape(3, 20) * 7 % 300, **inputs}
    labels = torch.where(inputs["input_ids"] % 3 == 0, -100, inputs["input_ids"].roll(-1, 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        loss = token_loss(model, model, inputs, labels, chunk=chunk, ignored=-100, use_cache=False)
    (loss / 40).backward()
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("kind", ["plain", "tied", "checkpointed", "lora", "head saved", "bf16"])
def test_a_model_trains_alike_in_chunks(kind):
    model = adapted("--lora", "r=2") if kind == "lora" else small_llama(tie_word_embeddings=kind == "tied")
    if kind == "head saved":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    if kind == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    (full, of_full), (chunked, of_chunked) = (losses(model, each, is_bf16=kind == "bf16") for each in ("off", "7"))
    tolerance = 3e-2 if kind == "bf16" else 1e-6
    assert chunked == pytest.approx(full, rel=tolerance) and of_full.keys() == of_chunked.keys()
    assert any("lm_head" in name for name in of_full) == (kind not in ("tied", "lora"))
    for name, gradient in of_full.items():
        assert (gradient - of_chunked[name]).abs().max() <= tolerance * max(1.0, float(gradient.abs().max())), name
    assert "forward" not in vars(model.get_output_embeddings())


def test_the_comparison_with_the_output_layer_compiles_nothing():
    model, sizes = small_llama().train(), []
    compiled = CompiledModel(model, backend=lambda module, inputs: sizes.append(inputs) or module.forward)
    compiled.compile(is_dynamic=False)
    with compiled.active():
        losses(model, "7")
    widths = {each.shape[1] for inputs in sizes for each in inputs if each.dim() == 3}
    assert widths == {20}


def test_small_logits_are_not_chunked_and_large_ones_are(monkeypatch):
    from loopwright.tasks.text import chunked_loss

    model, calls = small_llama(), []
    apply = LinearCrossEntropy.apply
    monkeypatch.setattr(LinearCrossEntropy, "apply", lambda *args: calls.append(args[4]) or apply(*args))
    losses(model, "auto")
    assert calls == []
    monkeypatch.setattr(chunked_loss, "_MOST_LOGITS", 60 * 300 - 1)
    losses(model, "auto")
    assert calls[-1] == 59


def test_a_model_that_caps_its_logits_falls_back_and_says_so_once():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=0.5)
    model = Gemma2ForCausalLM(config)
    with pytest.warns(UserWarning, match="the model changes its logits after the layer"):
        chunked = losses(model, "7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert losses(model, "7")[0] == chunked[0] == losses(model, "off")[0]
    with pytest.warns(UserWarning, match="the output layer is a Linear"):  # of peft
        losses(adapted("--lora", "r=2,targets=lm_head"), "7")


def test_a_run_learns_alike_in_chunks_with_everything_else_that_saves_memory(tmp_path):
    data = write_text(tmp_path / "lines.txt", lines(120))
    flags = {"model": tiny_gpt2(tmp_path / "gpt2"), "lora": "r=4", "gradient_checkpointing": True, "block_size": 32}
    flags |= {"batch": 2, "gradient_accumulation_steps": 2, "lr": 1e-2, "max_steps": 4, "rehearsal": False}
    runs = [
        api.train("causal-lm", data=data, output_dir=tmp_path / each, loss_chunk=each, quiet=True, threads=1, **flags)
        for each in ("off", "9")
    ]
    assert runs[1].metrics["loss"] == pytest.approx(runs[0].metrics["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="a number of tokens, 'auto' or 'off'"):
        api.train("causal-lm", data=data, loss_chunk="none")
