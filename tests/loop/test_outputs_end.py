"""The outputs of a micro-batch end before its backward pass, and so before the next forward pass."""

import weakref
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import loopwright
import toys
from hf import tiny
from loopwright import Trainer, hooks
from loopwright.engine.compilation import CompiledModel
from loopwright.engine.nested import iter_tensors, num_rows
from tasks.reviews import rows, write_csv
from tasks.texts import lines, tiny_gpt2, write_text

HAS_LOGITS = toys.callback(on_train_step_end=lambda *_, batch_output, **__: batch_output["model_outputs"]["logits"])


def core(_=None, **kwargs):
    model = tiny.Classifier()
    made = Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), callbacks=[HAS_LOGITS])
    toys.fit(made, tiny.rows(), eval_dataset=tiny.rows(), **kwargs)
    return made


def hf(folder):
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "batch_eval_metrics": True}
    made = tiny.fit(folder, eval_dataset=tiny.rows(), per_device_eval_batch_size=4, **options)
    made.compute_metrics = lambda batch, compute_result: {"rows": len(batch.label_ids)}
    assert made.evaluate() and made.predict(tiny.rows())


def task(folder):
    options = {"max_steps": 3, "batch": 8, "quiet": True, "rehearsal": False, "use_cpu": True, "threads": 1}
    data = write_csv(folder / "data.csv", rows(32))
    loopwright.train("text-classification", data=data, output_dir=folder / "run", **options)


def language_model(folder):
    """Train a language model of transformers in bf16, whose outputs accelerate converts to float32."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2(folder / "gpt2"))
    ids = torch.arange(16) % 7
    made = Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), callbacks=[])
    toys.fit(made, [{"input_ids": ids, "labels": ids}] * 24, mixed_precision="bf16", gradient_accumulation_steps=2)


def language_task(folder):
    options = {"max_steps": 5, "batch": 4, "quiet": True, "rehearsal": False, "use_cpu": True, "threads": 1}
    data, model = write_text(folder / "lines.txt", lines(100)), tiny_gpt2(folder / "gpt2")
    options |= {"gradient_accumulation_steps": 2, "block_size": 16}
    loopwright.train("causal-lm", data=data, model=model, output_dir=folder / "run", **options)


@pytest.mark.parametrize(
    "run",
    [
        core,
        lambda _: core(gradient_accumulation_steps=4),
        lambda _: core(step_mode="compile"),
        lambda _: core().evaluate(tiny.rows(), 4, toys.NO_WORKERS),
        lambda _: core().predict(tiny.rows(), 4, toys.NO_WORKERS),
        *(hf, task, language_model, language_task),
    ],
)
def test_no_output_is_alive_in_its_backward_pass_or_when_the_next_forward_begins(run, tmp_path, monkeypatch):
    references, alive, held = [], [], []

    def is_model(module):
        return isinstance(module, tiny.Classifier) or type(module).__name__.endswith(
            ("ForSequenceClassification", "LMHeadModel")
        )

    def before(module, _):
        if is_model(module):
            alive.append(sum(reference() is not None for reference in references))

    def after(module, _, output):
        if is_model(module):
            references.clear()
            named = dict(output)
            if num_rows(named["logits"]) > 1:  # the probe of a language model compares the outputs of one row
                references.extend(map(weakref.ref, iter_tensors(named)))
            ends = [reference for reference in references if reference().dim()]
            for tensor in iter_tensors(named):  # accelerate's copies of the logits in float32 have no gradient
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, ends=ends: held.extend(end() is not None for end in ends))

    monkeypatch.setattr(hooks, "CompiledModel", partial(CompiledModel, backend="eager"))
    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        run(tmp_path)
    finally:
        for handle in handles:
            handle.remove()
    assert len(alive) >= 5 and not any(alive) and held and not any(held), (alive, held)
