"""Fields of the arguments that change a run: noise, counters, casts, partial checkpoints, accelerate's settings."""

import copy
import inspect
import json
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import loopwright.hf.run
from loopwright.checkpoint.store import verify
from loopwright.config import HfArgumentParser, TrainingArguments
from loopwright.config.accelerator import AcceleratorConfig
from loopwright.errors import CheckpointError
from loopwright.hf import Trainer
from loopwright.hf.loss import LabelSmoother
from loopwright.hf.model_setup import noisy_embeddings

from . import tiny
from .tiny import TOKENS, Classifier, arguments, assert_refused, bert, fit, gpt2, logged, losses, made, on, rows, same

BY_STEPS = {"save_strategy": "steps", "save_steps": 2}
AGAIN = {"num_train_epochs": 2, **BY_STEPS}
TEXTS = tiny.token_rows(20)
COUNT = "include_num_input_tokens_seen"
LABELS = [each["labels"] for each in rows(8)]


def stored(folder, name="trainer_state.json"):
    return json.loads((folder / name).read_text())


def install(monkeypatch, name, **values):
    """Put a stand-in for a module, and for its package, among the imported ones."""
    package, _, inner = name.partition(".")
    for each, held in ((package, {"__path__": []}), (name, values)):
        module = ModuleType(each)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, each, module)


def test_neftune_adds_the_noise_of_transformers_in_training_only_and_resumes_exactly(tmp_path):
    neftune = pytest.importorskip("transformers.integrations.neftune")
    plain = fit(tmp_path / "plain", model=gpt2(), data=TEXTS)
    options = {"data": TEXTS, "neftune_noise_alpha": 5.0}
    noisy = fit(tmp_path, model=gpt2(), **options, **BY_STEPS)
    again = fit(tmp_path, model=gpt2(), **options, resume=str(tmp_path / "checkpoint-2"))
    assert same(noisy, again) and losses(noisy)[0] != losses(plain)[0]
    switched = made(tmp_path / "off", model=gpt2(), **options)
    switched.neftune_noise_alpha = None  # as a library sets it
    switched.train()
    assert losses(switched) == losses(plain)

    ids, other, embeddings = torch.arange(6)[None], copy.deepcopy(noisy.model), noisy.model.get_input_embeddings()
    assert not embeddings._forward_hooks
    neftune.activate_neftune(other.train(), 5.0)
    with noisy_embeddings(noisy.model.train(), 5.0):
        torch.manual_seed(0)
        ours = embeddings(ids)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, other.get_input_embeddings()(ids))
        noisy.model.eval()
        assert torch.equal(embeddings(ids), embeddings.weight[ids])
    assert_refused("get_input_embeddings", fit, tmp_path / "none", neftune_noise_alpha=5.0)


def test_neftune_works_for_peft_models(tmp_path):
    peft = pytest.importorskip("peft")
    found = []
    for alpha in (None, 5.0):
        model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        found += losses(fit(tmp_path / str(alpha), model=model, data=TEXTS, neftune_noise_alpha=alpha))[:1]
    assert found[0] != found[1]


@pytest.mark.parametrize("how", ["all", "non_padding", True])
def test_tokens_and_operations_are_those_of_transformers_and_survive_a_resume(how, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {COUNT: how, "gradient_accumulation_steps": 2}
    whole = fit(tmp_path, model=gpt2(), data=TEXTS, **options, **AGAIN)
    again = fit(tmp_path, model=gpt2(), data=TEXTS, **options, **AGAIN, resume=str(tmp_path / "checkpoint-4"))
    names = {"disable_tqdm": True, "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), **options, **names, num_train_epochs=2)
    theirs = transformers.Trainer(gpt2(), args, train_dataset=TEXTS)
    theirs.train()
    for trainer in (whole, again):
        assert trainer.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen > 0
        assert trainer.state.total_flos == theirs.state.total_flos > 0
        assert trainer.output.metrics["total_flos"] == theirs.state.total_flos
        assert trainer.output.metrics["train_tokens_per_second"] > 0
    assert logged(whole, "num_input_tokens_seen") == logged(again, "num_input_tokens_seen")
    assert all(logged(whole, "train_tokens_per_second"))
    saved = stored(tmp_path / "checkpoint-4")
    assert 0 < saved["num_input_tokens_seen"] < whole.state.num_input_tokens_seen and saved["total_flos"] > 0
    (parsed,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([f"--{COUNT}", str(how)])
    assert parsed == TrainingArguments(**{COUNT: how})
    loader = whole.get_train_dataloader()
    assert (whole.num_tokens(loader), whole.num_tokens(loader, max_steps=3)) == (200, 120)


def test_operations_are_counted_by_overrides_and_by_the_model_itself_once_per_shape(tmp_path):
    class Counting(Trainer):
        stored = 0

        def floating_point_ops(self, inputs):
            return len(inputs["labels"])

        def store_flos(self):
            Counting.stored += 1
            super().store_flos()

    assert fit(tmp_path, kind=Counting).state.total_flos == 20 and Counting.stored >= 6
    assert fit(tmp_path).output.metrics["total_flos"] == 0  # a plain module says nothing about its parameters
    model, calls = Classifier(), []
    model.floating_point_ops = lambda inputs: calls.append(1) or 7
    assert fit(tmp_path, model=model, data=rows(18)).state.total_flos == 35 and len(calls) == 2


def test_tokens_that_cannot_be_counted_are_reported_once(tmp_path):
    with pytest.warns(UserWarning, match="no tokens are counted: a batch has no input_ids"):
        assert fit(tmp_path, include_num_input_tokens_seen="all").state.num_input_tokens_seen == 0
    with pytest.warns(UserWarning, match="padding is counted too"):
        trainer = fit(tmp_path, model=bert(), data=TOKENS, include_num_input_tokens_seen="non_padding")
    assert trainer.state.num_input_tokens_seen == 48


def test_the_cache_of_the_device_is_released_every_few_updates(tmp_path, monkeypatch):
    devices = []
    monkeypatch.setattr(loopwright.hf.run, "release_memory", devices.append)
    fit(tmp_path, torch_empty_cache_steps=2)
    assert len(devices) == 2


def test_full_evaluation_casts_the_weights_for_the_pass_outside_training_only(tmp_path):
    class Watching(Classifier):
        seen: list[torch.dtype] = []

        def forward(self, x, labels=None):
            self.seen.append(self.linear.weight.dtype)
            return super().forward(x.to(self.linear.weight.dtype), labels)

    for name, dtype in (("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)):
        options = {"eval_dataset": rows(8), "eval_strategy": "epoch", name: True}
        trainer = made(tmp_path / name, model=Watching(), **options)
        before, Watching.seen = tiny.weights(trainer), []
        predictions = trainer.predict(rows(8)).predictions
        assert set(Watching.seen) == {dtype}
        after = tiny.weights(trainer)
        assert all(torch.equal(before[each], after[each]) and after[each].dtype == torch.float32 for each in before)
        expected = copy.deepcopy(trainer.model).to(dtype)(torch.stack([each["x"] for each in rows(8)]))["logits"]
        assert torch.equal(torch.from_numpy(predictions).float(), expected.float())
        Watching.seen = []
        trainer.train()
        assert set(Watching.seen) == {torch.float32}


def test_labels_that_are_objects_are_joined_as_lists(tmp_path):
    class Named(Trainer):
        def prediction_step(self, *given, **options):
            loss, logits, labels = super().prediction_step(*given, **options)
            return loss, logits, [{"box": torch.ones(int(label) + 1), "name": str(int(label))} for label in labels]

    seen = []
    options = {"eval_use_gather_object": True, "per_device_eval_batch_size": 3, "eval_dataset": rows(8)}
    options |= {"compute_metrics": lambda prediction: seen.append(prediction.label_ids) or {}}
    made(tmp_path, kind=Named, **options).evaluate()
    assert [(each["name"], len(each["box"]) - 1) for each in seen[0]] == [(str(n), n) for n in LABELS]


def test_label_smoothing_of_several_labels_moves_each_towards_one_half(tmp_path):
    logits, labels = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 0.0]])
    yes, no = nn.functional.logsigmoid(logits), nn.functional.logsigmoid(-logits)
    by_hand = -(torch.tensor([0.9, 0.1]) * yes + torch.tensor([0.1, 0.9]) * no).mean()
    torch.testing.assert_close(LabelSmoother(0.2)({"logits": logits}, labels), by_hand)
    data, found = [{**each, "labels": torch.tensor([1.0, 0.0, 1.0])} for each in TOKENS], []
    for factor in (0.0, 0.2):
        model = bert(problem_type="multi_label_classification")
        found.append(losses(fit(tmp_path, model=model, data=data, label_smoothing_factor=factor)))
    assert found[0] != found[1]


def test_checkpoints_of_the_model_alone_are_whole_load_the_best_and_are_not_resumed(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    options = {"save_only_model": True, "save_total_limit": 1, "load_best_model_at_end": True, **AGAIN}
    options |= {"eval_dataset": TOKENS, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    trainer = fit(tmp_path, model=bert(), data=TOKENS, metric_for_best_model="loss", **options)
    assert "Resume guarantee T3, save_only_model: a checkpoint holds the model alone" in capsys.readouterr().out
    best = trainer.state.best_model_checkpoint
    assert {best.rpartition("/")[2]} <= set(tiny.folders(tmp_path)) and len(tiny.folders(tmp_path)) <= 2
    manifest = verify(best)
    assert manifest["about"]["model_only"] and {"model.safetensors", "config.json"} <= manifest["files"].keys()
    assert "optimizer" not in (tmp_path / tiny.folders(tmp_path)[-1] / "state.json").read_text()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(best).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in tiny.weights(trainer).items())
    fresh = made(tmp_path, model=bert(), data=TOKENS, **{**options, "save_only_model": False})
    text = "cannot be resumed: save_only_model=True saved it without optimizer.*Load its weights"
    assert_refused(text, fresh.train, resume_from_checkpoint=True, error=CheckpointError)
    assert tiny.folders(tmp_path)  # nothing was set aside


def test_ignore_data_skip_begins_the_epoch_again_and_says_so(tmp_path, capsys):
    seen = []

    class Watching(Trainer):
        def training_step(self, model, inputs, *items):
            seen.append(inputs["x"])
            return super().training_step(model, inputs, *items)

    options = {"kind": Watching, **AGAIN}
    fit(tmp_path, **options)
    first = seen[:]
    seen.clear()
    capsys.readouterr()
    again = fit(tmp_path, ignore_data_skip=True, resume=str(tmp_path / "checkpoint-2"), **options)
    assert "Resume guarantee T3, ignore_data_skip: a resumed run begins its epoch again" in capsys.readouterr().out
    assert len(first) == 10 and again.state.global_step == 10 and len(seen) == 8
    assert all(torch.equal(one, other) for one, other in zip(seen, first[:8], strict=True))
    assert stored(tmp_path / "checkpoint-10", "MANIFEST.json")["about"]["tier"] == "T3"


def test_liger_kernels_are_applied_to_the_bare_model_if_they_are_installed(tmp_path, monkeypatch):
    options = {"model": bert(), "data": TOKENS, "use_liger_kernel": True, "liger_kernel_config": '{"rope": false}'}
    assert_refused("pip install -U liger-kernel", fit, tmp_path, **options)
    install(monkeypatch, "liger_kernel.transformers", _apply_liger_kernel_to_instance=(apply := mock.Mock()))
    apply.assert_called_once_with(model=fit(tmp_path, **options).model, rope=False)
    assert_refused("needs a model of transformers, got a Classifier", fit, tmp_path, use_liger_kernel=True)


def stand_in_optimizer(**usual):
    """Return a class of optimizers with these options."""

    class StandIn(torch.optim.SGD):
        __module__ = "bitsandbytes.optim.stand_in"

        def __init__(self, params, lr=1.0, **options):
            super().__init__(params, lr=lr)
            self.given = {**usual, **options}

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("params", "lr")]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual[name]) for name in usual]
    StandIn.__signature__ = inspect.Signature(parameters)
    return StandIn


ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OF_BNB = {"optim_bits": 32, "is_paged": False}
GROKKING = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0}
AO = {"block_size": 128, "bf16_stochastic_round": False}
# The real signatures of the packages, as far as options reach them.
PACKAGES = {
    "bitsandbytes.optim": {
        "AdamW": {**ADAM, **OF_BNB},
        "Lion": {"betas": (0.9, 0.99), "weight_decay": 0, **OF_BNB},
        "RMSprop": {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False, "optim_bits": 32},
        "AdEMAMix": {**ADAM, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha": None, "t_beta3": None, **OF_BNB},
    },
    "torchao.optim": {"AdamW4bit": {**ADAM, **AO}, "AdamW8bit": {**ADAM, **AO}},
    "apollo_torch": {"APOLLOAdamW": {**ADAM, "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True}},
    "grokadamw": {"GrokAdamW": {**ADAM, **GROKKING}},
    "optimi": {"StableAdamW": {**ADAM, "eps": 1e-6, "decouple_lr": False, "max_lr": None, "kahan_sum": None}},
}


@pytest.fixture
def packages(monkeypatch):
    """Install stand-ins for all packages; return the function by which a module keeps 32 bits."""
    theirs = pytest.importorskip("transformers.trainer_optimizer")
    manager = mock.Mock()
    for name, classes in PACKAGES.items():
        kinds = {kind: stand_in_optimizer(**usual) for kind, usual in classes.items()}
        install(monkeypatch, name, **kinds, GlobalOptimManager=mock.Mock(get_instance=lambda: manager))
    for name in vars(theirs).copy():
        if name.startswith("is_") and name.endswith("_available"):
            monkeypatch.setattr(theirs, name, lambda *_: True)
    monkeypatch.setattr(theirs.importlib.metadata, "version", lambda name: "99.0")
    return manager.register_module_override


@pytest.mark.parametrize(
    ("optim_args", "names"),
    [
        (None, "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit lion_32bit lion_8bit paged_lion_32bit"),
        (None, "paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit adamw_torch_4bit adamw_torch_8bit"),
        ("beta3=0.99,t_alpha=4", "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit"),
        (None, "grokadamw stable_adamw schedule_free_adamw schedule_free_radam schedule_free_sgd"),
        ("r=0.5", "schedule_free_adamw schedule_free_radam schedule_free_sgd"),
    ],
)
def test_optimizers_of_other_packages_get_the_options_of_transformers(optim_args, names, packages):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("schedulefree")
    for name in names.split():
        options = {"optim": name, "optim_args": optim_args, "warmup_steps": 3, "adam_beta2": 0.99}
        if name == "grokadamw":
            del options["adam_beta2"]  # which transformers ignores for it
        found = []
        for kind, args in ((Trainer, TrainingArguments), (transformers.Trainer, transformers.TrainingArguments)):
            optimizer, given = kind.get_optimizer_cls_and_kwargs(args("out", **options), Classifier())
            bound = inspect.signature(optimizer).bind([], **given)
            bound.apply_defaults()
            found.append((optimizer, {**bound.arguments, "weight_decay": None}))  # which the groups have
        assert found[0] == found[1], name


def test_8_bit_optimizers_keep_embeddings_in_32_bits_and_apollo_projects_its_targets(packages, tmp_path):
    trainer = made(tmp_path, model=bert(), data=TOKENS, optim="adamw_8bit")
    trainer.create_optimizer()
    embeddings = [each for each in trainer.model.modules() if isinstance(each, nn.Embedding)]
    calls = [mock.call(each, "weight", {"optim_bits": 32}) for each in embeddings]
    assert packages.mock_calls == calls and len(calls) == 3

    options = {"optim": "apollo_adamw", "optim_args": "rank=4,correct_bias=false", "weight_decay": 0.1}
    for targets, num_layers in (("all-linear", 8), (r".*\.query", 1), (["attention", "classifier"], 5)):
        trainer = made(tmp_path, model=bert(), data=TOKENS, optim_target_modules=targets, **options)
        groups = trainer.create_optimizer().param_groups
        projected = [group for group in groups if "rank" in group]
        assert sum(len(group["params"]) for group in projected) == num_layers
        assert sum(len(group["params"]) for group in groups) == len(list(trainer.model.parameters()))
        assert (projected[0]["rank"], projected[0]["update_proj_gap"], projected[0]["weight_decay"]) == (4, 200, 0.1)
        assert trainer.optimizer.given["correct_bias"] is False
    trainer = made(tmp_path, optim_target_modules=["nothing"], **options)
    assert_refused("names no linear layer", trainer.create_optimizer)


@pytest.mark.parametrize("name", ["schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"])
def test_schedule_free_optimizers_train_and_resume_exactly(name, tmp_path):
    pytest.importorskip("schedulefree")
    options = {"optim": name, "lr_scheduler_type": "constant", "warmup_steps": 0.2, **AGAIN}
    whole = fit(tmp_path, **options)
    again = fit(tmp_path, resume=str(tmp_path / "checkpoint-4"), **options)
    assert same(whole, again) and losses(whole)[-1] < losses(whole)[0]
    assert whole.optimizer.param_groups[0].get("warmup_steps", 2) == 2
    assert not whole.optimizer.param_groups[0]["train_mode"]  # the weights to use


def test_a_schedule_free_optimizer_trains_on_after_an_evaluation_within_an_update(tmp_path):
    pytest.importorskip("schedulefree")
    trainer = made(tmp_path, optim="schedule_free_adamw", gradient_accumulation_steps=2, eval_dataset=rows(4))
    trainer.add_callback(on(substep_end=lambda *args, **kwargs: trainer.evaluate() and None))
    assert trainer.train().global_step == 3


def test_an_optimizer_whose_state_cannot_be_saved_is_refused_unless_only_the_model_is(tmp_path):
    class Projecting(torch.optim.SGD):
        __module__ = "apollo_torch.apollo"

    options = {"optimizer_cls_and_kwargs": (Projecting, {"lr": 0.1}), **BY_STEPS}
    text = "the state of an optimizer of apollo_torch cannot be saved.*save_only_model=True"
    assert_refused(text, fit, tmp_path, error=CheckpointError, **options)
    fit(tmp_path / "model", save_only_model=True, **options)


def test_groups_among_the_options_of_an_optimizer_replace_the_trainers(tmp_path):
    class Groups(torch.optim.SGD):
        def __init__(self, held, lr):
            self.held = held
            super().__init__(held.parameters() if isinstance(held, nn.Module) else held, lr=lr)

    for name in ("params", "model", "optimizer_dict"):
        model = Classifier()
        held = model if name == "model" else [{"params": [model.linear.weight]}]
        options = {name: held, "lr": 0.1}
        trainer = made(tmp_path, model=model, optimizer_cls_and_kwargs=(Groups, options))
        assert trainer.create_optimizer().held is held and name in options


def test_settings_of_accelerate_are_read_in_every_form_and_can_be_read_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    values = {"even_batches": False, "use_configured_state": True, "dispatch_batches": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "config.yaml").write_text("even_batches: false\nuse_configured_state: true\ndispatch_batches: false\n")
    theirs = transformers.trainer_pt_utils.AcceleratorConfig(**values)
    like = SimpleNamespace(to_dict=lambda: values)
    forms = (values, json.dumps(values), str(tmp_path / "config.json"), str(tmp_path / "config.yaml"), theirs, like)
    for given in (*forms, AcceleratorConfig(**values)):
        args = TrainingArguments("out", accelerator_config=given)
        args.validate()
        assert args.accelerator_config == AcceleratorConfig(**values), given
        assert args.accelerator_config.to_dict() == {**AcceleratorConfig().to_dict(), **values}
        assert TrainingArguments.from_dict(args.to_dict()) == args
    assert TrainingArguments("out").accelerator_config.split_batches is False


def test_accumulation_and_split_batches_of_accelerate_take_effect(tmp_path, monkeypatch):
    num_steps = {"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}}
    trainer = fit(tmp_path, accelerator_config=num_steps)
    assert trainer.args.gradient_accumulation_steps == 2 and trainer.state.global_step == 3
    text = "num_steps=2 in accelerator_config contradicts gradient_accumulation_steps=4"
    assert_refused(text, arguments, tmp_path, accelerator_config=num_steps, gradient_accumulation_steps=4)

    args = arguments(tmp_path, accelerator_config={"split_batches": True}, per_device_eval_batch_size=6)
    assert (args.train_batch_size, args.eval_batch_size) == (4, 6)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert args.train_batch_size == 1
    assert_refused("divides a batch of 6 by 4 processes", lambda: args.eval_batch_size)


def test_the_order_of_the_data_never_depends_on_workers(tmp_path):
    workers = {"dataloader_num_workers": 2, "dataloader_in_order": False}
    assert same(fit(tmp_path, **workers), fit(tmp_path))


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw", "galore_adafactor_layerwise"])
def test_optimizers_whose_state_no_checkpoint_can_hold_are_refused_before_the_first_update(name, tmp_path):
    steps = []
    callback = on(step_begin=lambda *args, **kwargs: steps.append(1))
    assert_refused("adafactor.*optimizers=", fit, tmp_path, callback, optim=name)
    assert steps == []
