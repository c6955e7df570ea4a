"""The outputs of a micro-batch end before its backward pass, and so before the next forward pass."""

import weakref

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import loopwright
import toys
from hf import tiny
from loopwright import Trainer, hf, trainer
from loopwright.callbacks import TrainerCallback
from loopwright.engine.nested import iter_tensors
from tasks.reviews import rows, write_csv


class Watch:
    """Counts which outputs of a model's calls are alive at its next call, and which in their own backward pass."""

    def __init__(self):
        self.references, self.alive, self.held = [], [], []

    def before(self, module, args):
        if self.is_root(module):
            self.alive.append(sum(reference() is not None for reference in self.references))

    def after(self, module, args, output):
        if self.is_root(module):
            tensors = list(iter_tensors(output if not isinstance(output, dict) else dict(output)))
            self.references = [weakref.ref(tensor) for tensor in tensors]
            for tensor, reference in zip(tensors, self.references, strict=True):
                if tensor.requires_grad and tensor.dim():
                    tensor.register_hook(lambda _, ends=reference: self.held.append(ends() is not None))

    @staticmethod
    def is_root(module):
        return isinstance(module, tiny.Classifier) or type(module).__name__.endswith("ForSequenceClassification")


@pytest.fixture
def watch():
    watch = Watch()
    hooks = [register_module_forward_pre_hook(watch.before), register_module_forward_hook(watch.after)]
    yield watch
    for hook in hooks:
        hook.remove()


class Listener(TrainerCallback):
    """Hears of every micro-batch, and keeps nothing."""

    def on_train_step_end(self, trainer, batch=None, batch_output=None, **kwargs):
        assert batch_output["model_outputs"]["logits"].dim() == 2


def core(**kwargs):
    model = tiny.Classifier()
    made = Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), callbacks=[Listener])
    toys.fit(made, tiny.rows(), eval_dataset=tiny.rows(), **kwargs)
    return made


def hf_trainer(tmp_path, **kwargs):
    args = hf.TrainingArguments(
        str(tmp_path / "hf"),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **kwargs,
    )
    return hf.Trainer(tiny.Classifier(), args, train_dataset=tiny.rows(), eval_dataset=tiny.rows())


def train_hf(tmp_path):
    hf_trainer(tmp_path, num_train_epochs=1, gradient_accumulation_steps=2, eval_strategy="epoch").train()


def predict_hf(tmp_path):
    made = hf_trainer(tmp_path, batch_eval_metrics=True)
    made.compute_metrics = lambda batch, compute_result: {"rows": len(batch.label_ids)}
    made.evaluate()
    made.predict(tiny.rows())


def train_task(tmp_path):
    data = write_csv(tmp_path / "data.csv", rows(32))
    options = {"max_steps": 3, "batch": 8, "quiet": True, "rehearsal": False, "use_cpu": True, "threads": 1}
    loopwright.train("text-classification", data=data, output_dir=tmp_path / "run", **options)


@pytest.mark.parametrize(
    "run",
    [
        lambda _: core(),
        lambda _: core(gradient_accumulation_steps=4),
        lambda _: core(step_mode="compile"),
        lambda _: core().evaluate(tiny.rows(), 4, toys.NO_WORKERS),
        lambda _: core().predict(tiny.rows(), 4, toys.NO_WORKERS),
        train_hf,
        predict_hf,
        train_task,
    ],
    ids=["core", "accumulation", "compile", "evaluate", "predict", "hf", "hf_predict", "task"],
)
def test_no_output_is_alive_in_its_backward_pass_or_when_the_next_forward_begins(run, watch, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "compile_model", lambda model, _: model.compile(backend="eager"))
    run(tmp_path)
    assert len(watch.alive) >= 5 and not any(watch.alive), watch.alive
    assert not any(watch.held) and (watch.held or run is predict_hf), watch.held
