"""Corner cases of scripts: optimizers with two sets of weights, factories, derived arguments."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed.launcher import launch
from loopwright.engine import Engine
from loopwright.errors import ConfigError
from loopwright.hf import Trainer
from loopwright.hf.files import align_special_tokens

from . import tiny
from .tiny import Classifier, arguments, assert_refused, fit, made, rows, weights


class TwoKinds(torch.optim.SGD):
    """Like a schedule-free optimizer, it has other weights outside training; here they are larger by one."""

    is_training = False

    def train(self):
        self._move(is_training=True)

    def eval(self):
        self._move(is_training=False)

    def step(self, closure=None):
        assert self.is_training
        return super().step(closure)

    @torch.no_grad()
    def _move(self, is_training):
        if is_training != self.is_training:
            self.is_training = is_training
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(-1.0 if is_training else 1.0)


def test_an_optimizer_with_two_sets_of_weights_is_switched_between_training_and_evaluation(tmp_path):
    seen = []

    class Looks(Trainer):
        def prediction_step(self, model, *args, **kwargs):
            seen.append(self.optimizer.is_training)
            return super().prediction_step(model, *args, **kwargs)

    torch.manual_seed(0)
    model = Classifier()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plan = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    optimizer = TwoKinds(model.parameters(), lr=0.0)
    options = {"model": model, "data": rows(12), "eval_dataset": rows(4), "optimizers": (optimizer, None), **plan}
    fit(tmp_path, kind=Looks, **options).evaluate()
    assert seen == [False] * 3
    # Nothing is learnt; the model has, and the checkpoint holds, the weights for evaluation.
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    for name, value in start.items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5)
        assert torch.allclose(saved[name], value, atol=1e-5)


def test_the_group_of_a_parameter_is_found_by_the_parameter_or_its_name(tmp_path):
    trainer = made(tmp_path, weight_decay=0.5)
    assert_refused("there is no optimizer yet", trainer.get_optimizer_group)
    trainer.create_optimizer()
    linear = trainer.model.linear
    assert trainer.get_optimizer_group(linear.weight)["weight_decay"] == 0.5
    assert trainer.get_optimizer_group("linear.bias")["weight_decay"] == 0.0
    assert [len(group) for group in trainer.get_optimizer_group()] == [1, 1]
    assert_refused("no group with 'linear.wait'", trainer.get_optimizer_group, "linear.wait")


def test_optimizers_must_be_a_pair_and_a_given_plateau_schedule_follows_the_loss(tmp_path):
    assert made(tmp_path, optimizers=None).optimizer is None
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for wrong, text in ((optimizer, "got a SGD"), ((optimizer,), "got 1 objects")):
        assert_refused(rf"{text}: write \(optimizer, None\)", made, tmp_path, optimizers=wrong)
    options = {"factor": 0.5, "patience": 0, "threshold": 10.0, "threshold_mode": "abs"}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    plan = {"data": rows(12), "eval_dataset": rows(4), "eval_strategy": "steps", "eval_steps": 1}
    fit(tmp_path, model=model, optimizers=(optimizer, plateau), **plan)
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5**2


def test_subclasses_of_transformers_arguments_keep_their_own_attributes(tmp_path):
    transformers = pytest.importorskip("transformers")

    @dataclass
    class WithField(transformers.TrainingArguments):
        alpha: float = field(default=1.0)

    class WithAttribute(transformers.TrainingArguments):
        def __init__(self, *args, alpha=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.alpha = alpha

    for kind in (WithField, WithAttribute):
        args = kind(str(tmp_path), alpha=2.0, learning_rate=0.5, use_cpu=True)
        trainer = Trainer(Classifier(), args, train_dataset=rows(4))
        assert (trainer.args.alpha, trainer.args.learning_rate) == (2.0, 0.5)


def test_an_image_processor_does_not_pad_samples_and_a_text_is_neither_a_collator_nor_data(tmp_path):
    class ImageProcessor:
        model_input_names = ("pixel_values",)

        def pad(self, image, padding):
            raise AssertionError("it pads images, not samples")

    assert fit(tmp_path, processing_class=ImageProcessor(), max_steps=1).output.global_step == 1
    assert_refused("data_collator must be .*, got a str", made, tmp_path, data_collator="padding", error=TypeError)
    assert_refused("a dataset must have .* got a str", fit, tmp_path, data="train.csv")
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=7, eos_token_id=[2, 5]))
    align_special_tokens(model, SimpleNamespace(tokenizer=tiny.CharacterTokenizer()))
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, [2, 5])


def test_gradient_checkpointing_may_recompute_every_second_layer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tiny.llama().config
    config.num_hidden_layers = 2
    config.layer_types = None
    options = {"every_n_layers": 2, "use_reentrant": False}
    trained = []
    for more in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}):
        torch.manual_seed(0)
        trained.append(fit(tmp_path, model=transformers.LlamaForCausalLM(config), data=tiny.token_rows(4), **more))
    layers = [layer.gradient_checkpointing for layer in trained[1].model.model.layers]
    assert sorted(layers) == [False, True]
    one, two = map(weights, trained)
    assert all(torch.allclose(value, two[name], atol=1e-6) for name, value in one.items())


def test_a_resumed_run_reports_that_it_keeps_its_accumulation(tmp_path, capsys):
    options = {"save_strategy": "epoch", "data": rows(12)}
    fit(tmp_path, **options)
    changed = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    assert fit(tmp_path, resume=True, **options, **changed).output.global_step == 6
    text = capsys.readouterr().out
    assert "gradient_accumulation_steps is 1 on 1 processes, not 2" in text
    assert "gradient_accumulation_steps: 1 -> 2" not in text and "num_train_epochs: 1 -> 2" in text


class PartlyUsed(Classifier):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


def with_unused_parameters():
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "model_init": PartlyUsed, "data": rows(12)}
    trainer = fit("unused", ddp_find_unused_parameters=True, **options)
    values = [float(value) for tensor in weights(trainer).values() for value in tensor.flatten()]
    try:
        fit("unused", **options)
    except ConfigError as error:
        return [values, str(error)]
    return [values, ""]


@pytest.mark.distributed
@pytest.mark.slow
def test_parameters_that_a_loss_does_not_use_are_found_or_named_in_an_error_on_two_processes(tmp_path):
    first, second = launch(with_unused_parameters, tmp_path, timeout_seconds=100)
    alone = fit(tmp_path, model_init=PartlyUsed, data=rows(12), max_steps=3)
    mine = [float(value) for tensor in weights(alone).values() for value in tensor.flatten()]
    assert first[0] == second[0] == pytest.approx(mine, abs=1e-6)
    for _, text in (first, second):
        assert "unused.weight, unused.bias. With several processes, set ddp_find_unused_parameters=True" in text


def test_the_arguments_set_the_options_of_ddp_and_a_configuration_that_would_not_share_gradients_is_refused(tmp_path):
    options = {"bucket_cap_mb": 5, "broadcast_buffers": False}
    args = arguments(tmp_path, **{f"ddp_{name}": value for name, value in options.items()})
    assert args.ddp_options == options == Trainer(Classifier(), args).accelerator.ddp_handler.to_kwargs()
    text = "ddp_bucket_cap_mb must be a whole number of at least 1, or None, got 0"
    assert_refused(text, arguments, tmp_path, ddp_bucket_cap_mb=0)
    kind = pytest.importorskip("accelerate.utils").DistributedType.DEEPSPEED
    one = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"), num_processes=2, process_index=0)
    assert_refused("configured for DEEPSPEED, which is not supported", Engine, one)
