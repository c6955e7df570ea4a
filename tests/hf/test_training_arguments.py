"""TrainingArguments: transformers' fields and defaults, old names, no side effects, exact round trips."""

import copy
import dataclasses
import json
import logging
import pickle
import re
import socket
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toys
from loopwright.config import (
    IntervalStrategy,
    OldNameWarning,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from loopwright.config import fields as config_fields
from loopwright.errors import ConfigError, ConfigTypeError

from .tiny import assert_refused

# The same values in another form: transformers fills them in.
FILLED_IN = {"disable_tqdm", "hub_token", "accelerator_config"}
OWN_FIELDS = {"logging_dir", "overwrite_output_dir", "step_mode", "length_buckets", "nan", "bad_samples", "reduction"}
OWN_FIELDS |= {"padding"}

# A value that is not the default, for the refused fields whose type does not imply one.
OTHER_VALUES = {
    "parallelism_config": {"tp_size": 2},
    "ddp_backend": "gloo",
    "ddp_timeout": 60,
    "deepspeed": "zero3.json",
    "debug": "underflow_overflow",
}


def fields_of(kind):
    return {field.name: field for field in dataclasses.fields(kind)}


def kind_of(field):
    return field.metadata["help"].kind


REFUSED = sorted(name for name, field in fields_of(Seq2SeqTrainingArguments).items() if kind_of(field) == "refused")


def other_value(name):
    field = fields_of(Seq2SeqTrainingArguments)[name]
    usual = False if field.type == "bool | None" else field.default
    return not usual if isinstance(usual, bool) else OTHER_VALUES.get(name, "something")


def test_every_field_of_transformers_is_here_in_its_order_of_one_kind_and_with_its_default_except_one():
    transformers = pytest.importorskip("transformers")
    theirs, ours = fields_of(transformers.TrainingArguments), fields_of(TrainingArguments)
    assert len(theirs) >= 111
    assert list(ours)[: len(theirs)] == list(theirs) and set(ours) - set(theirs) == OWN_FIELDS
    assert {kind_of(field) for field in ours.values()} == {"honoured", "accepted", "refused"}
    assert [name for name, field in ours.items() if len(field.metadata["help"]) < 10] == []
    assert set(fields_of(transformers.Seq2SeqTrainingArguments)) <= set(fields_of(Seq2SeqTrainingArguments))
    theirs, ours = transformers.TrainingArguments().to_dict(), TrainingArguments().to_dict()
    assert {name for name in theirs if theirs[name] != ours[name]} == {"logging_nan_inf_filter", *FILLED_IN}
    assert ours["logging_nan_inf_filter"] is False


def test_derived_fields_have_the_values_of_transformers():
    transformers = pytest.importorskip("transformers")
    cases = [
        {"eval_strategy": "steps", "logging_steps": 7},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
        {"metric_for_best_model": "accuracy"},
        {"metric_for_best_model": "eval_loss"},
        {"torch_compile_mode": "reduce-overhead"},
        {"report_to": "tensorboard"},
        {"warmup_steps": 0.25},
        {"use_cpu": True, "debug": None},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {"lr_scheduler_kwargs": '{"num_cycles": 2}'},
    ]
    names = set(TrainingArguments().to_dict()) - OWN_FIELDS - FILLED_IN - {"logging_nan_inf_filter"}
    for case in cases:
        theirs, ours = transformers.TrainingArguments(**case), TrainingArguments(**case)
        assert {name: theirs.to_dict()[name] for name in names} == {name: ours.to_dict()[name] for name in names}
        assert theirs.get_warmup_steps(101) == ours.get_warmup_steps(101)


def test_arguments_of_transformers_are_converted():
    transformers = pytest.importorskip("transformers")
    values = {"learning_rate": 1e-3, "eval_strategy": "epoch", "report_to": "tensorboard"}
    ours = TrainingArguments.from_transformers(transformers.TrainingArguments("out", **values))
    assert ours == dataclasses.replace(TrainingArguments("out", **values), disable_tqdm=False)
    theirs = transformers.TrainingArguments("out", debug="underflow_overflow")
    assert_refused("debug", TrainingArguments.from_transformers, theirs)

    config = transformers.GenerationConfig(max_new_tokens=3)
    theirs = transformers.Seq2SeqTrainingArguments("out", predict_with_generate=True, generation_config=config)
    ours = TrainingArguments.from_transformers(theirs)
    assert type(ours) is Seq2SeqTrainingArguments
    assert ours.predict_with_generate and ours.generation_config is config
    assert ours.to_dict()["generation_config"]["max_new_tokens"] == 3


def test_enums_of_transformers_are_converted():
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    args = TrainingArguments(
        eval_strategy=trainer_utils.IntervalStrategy.STEPS, lr_scheduler_type=trainer_utils.SchedulerType.COSINE
    )
    assert type(args.eval_strategy) is IntervalStrategy and args.eval_strategy == trainer_utils.IntervalStrategy.STEPS
    assert args.lr_scheduler_type is SchedulerType.COSINE
    for kind in (IntervalStrategy, SaveStrategy, SchedulerType):
        assert [member.value for member in kind] == [member.value for member in getattr(trainer_utils, kind.__name__)]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_raises_with_its_name_and_the_alternative(name):
    assert len(REFUSED) == 10
    with pytest.raises(ConfigError) as caught:
        Seq2SeqTrainingArguments(**{name: other_value(name)})
    text = str(caught.value)
    assert text.startswith(name) and "is not supported: " in text
    instead = text.partition("is not supported: ")[2]
    assert len(instead) > 20
    assert instead == fields_of(Seq2SeqTrainingArguments)[name].metadata["help"]


def test_a_refused_field_accepts_equivalents_of_its_default_and_the_choices_are_those_of_the_core():
    for values in ({"debug": []}, {"include_num_input_tokens_seen": False}, {"accelerator_config": {}}):
        assert TrainingArguments(**values) == TrainingArguments()
    core = pytest.importorskip("loopwright.settings")
    for name in ("STEP_MODES", "NAN_POLICIES", "BAD_SAMPLE_POLICIES"):
        assert getattr(config_fields, name) == getattr(core, name)


def test_every_honoured_field_is_read_by_hf():
    source = Path(config_fields.__file__).parents[1] / "hf"
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    # Read through a property or method of the arguments, or by a name that is put together.
    ddp = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
    derived = {
        "per_device_train_batch_size": ".train_batch_size",
        "per_device_eval_batch_size": ".eval_batch_size",
        "warmup_steps": ".get_warmup_steps",
        "accelerator_config": ".train_batch_size",
        **dict.fromkeys(("bf16", "fp16"), ".mixed_precision"),
        **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), '{kind}_steps"'),
        **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), '{kind}_strategy"'),
        **dict.fromkeys(ddp, ".ddp_options"),
    }
    # For the loggers of scripts, which ask `get_process_log_level` and `should_log`.
    for_scripts = {"log_level", "log_level_replica", "log_on_each_node"}
    honoured = [name for name, field in fields_of(Seq2SeqTrainingArguments).items() if kind_of(field) == "honoured"]
    assert len(honoured) == 101
    unread = [
        name
        for name in honoured
        if name not in for_scripts
        and not re.search(rf"args\.{name}\b", text)
        and derived.get(name, f'args, "{name}"') not in text
    ]
    assert unread == []


def test_the_documentation_lists_every_field_with_its_default_and_text():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "training_arguments.md").read_text(encoding="utf-8")
    sections = dict(zip(("honoured", "accepted", "refused"), page.split("\n### ")[1:], strict=True))
    for kind, section in sections.items():
        expected = []
        for name, field in fields_of(Seq2SeqTrainingArguments).items():
            default = [] if field.default is dataclasses.MISSING else field.default
            shown = '""' if default == "" else default
            if kind_of(field) == kind:
                expected.append(f"| `{name}` | `{shown}` | {field.metadata['help']} |")
        assert [line for line in section.splitlines() if line.startswith("| `")] == expected
    old = page.partition("## Old names")[2].partition("\n## ")[0]
    assert [name for name in TrainingArguments.old_names() if f"`{name}`" not in old] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"evaluation_strategy": "steps"}, {"eval_strategy": "steps"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 500}, {"warmup_steps": 500}),
        ({"warmup_ratio": 0.0}, {}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"group_by_length": False}, {}),
        ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"per_gpu_eval_batch_size": 4}, {"per_device_eval_batch_size": 4}),
        ({"use_mps_device": True}, {}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"include_tokens_per_second": True}, {"include_num_input_tokens_seen": "all"}),
        ({"include_inputs_for_metrics": True}, {"include_for_metrics": ["inputs"]}),
        ({"save_safetensors": True}, {}),
        ({"torchdynamo": "eager"}, {"torch_compile_backend": "eager"}),
        ({"half_precision_backend": "auto"}, {}),
        ({"fp16_opt_level": "O1"}, {}),
        ({"past_index": -1}, {}),
        ({"jit_mode_eval": False}, {}),
        ({"fsdp_min_num_params": 0}, {}),
        ({"push_to_hub_model_id": "x"}, {"hub_model_id": "x"}),
        ({"push_to_hub_organization": "team"}, {"hub_model_id": "team/out"}),
        ({"push_to_hub_token": "x"}, {"hub_token": "x"}),
    ],
    ids=lambda case: "-".join(f"{name}={value}" for name, value in case.items()) or "default",
)
def test_an_old_name_still_works_and_gives_a_notice_of_one_line(old, new):
    with pytest.warns(OldNameWarning) as notices:
        args = TrainingArguments("out", **old)
    assert args == TrainingArguments("out", **new)
    assert len(notices) == 1 and "\n" not in str(notices[0].message)
    assert next(iter(old)) in str(notices[0].message)
    assert notices[0].filename == __file__


@pytest.mark.parametrize("case", [{"logging_dir": "logs"}, {"overwrite_output_dir": True}], ids=str)
def test_an_old_name_that_is_still_a_field_keeps_its_value_and_gives_notice(case):
    with pytest.warns(OldNameWarning, match="old name") as notices:
        args = TrainingArguments("out", **case)
    assert len(notices) == 1 and notices[0].filename == __file__
    assert {name: getattr(args, name) for name in case} == case


@pytest.mark.parametrize(
    ("name", "usual", "other", "instead"),
    [
        ("past_index", -1, 2, "compute_loss"),
        ("use_ipex", False, True, "before it is given to the Trainer"),
        ("tpu_num_cores", None, 8, "TPUs are not supported"),
        ("fsdp_min_num_params", 0, 100, "fsdp_config"),
    ],
)
def test_an_old_name_of_a_removed_feature_is_refused_unless_it_is_the_default(name, usual, other, instead):
    assert_refused(f"{name}={other} is not supported: .*{instead}", TrainingArguments, "out", **{name: other})
    assert getattr(TrainingArguments("out"), name) == usual


def test_old_names_can_be_read_and_set():
    args = TrainingArguments("out", eval_strategy="steps", warmup_steps=0.5, use_cpu=True)
    assert (args.evaluation_strategy, args.warmup_ratio, args.per_gpu_train_batch_size) == ("steps", 0.5, 8)
    assert [args.no_cuda, args.group_by_length, args.overwrite_output_dir] == [True, False, False]
    with pytest.warns(OldNameWarning, match="evaluation_strategy") as notices:
        args.evaluation_strategy = "epoch"
    assert args.eval_strategy == "epoch" and notices[0].filename == __file__


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"evaluation_strategy": "steps", "eval_strategy": "epoch"}, "give only eval_strategy"),
        ({"warmup_ratio": 1.5}, "warmup_ratio must be at least 0 and below 1, got 1.5"),
        ({"save_safetensors": False}, "safetensors"),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True exclude each other"),
        ({"eval_strategy": "step"}, "eval_strategy must be one of no, steps, epoch, got 'step': did you mean steps?"),
        ({"save_strategy": "bst"}, "did you mean best?"),
        ({"lr_scheduler_type": "cosin"}, "did you mean cosine?"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy must be one of random"),
        ({"log_level": "inof"}, "did you mean info?"),
        ({"step_mode": "compiled"}, "did you mean compile?"),
        ({"nan": "ignore"}, "nan must be one of stop, skip"),
        ({"bad_samples": "drop"}, "bad_samples must be one of raise, skip"),
        ({"reduction": "precise"}, "reduction must be one of fast, exact"),
        ({"include_for_metrics": ["input"]}, "did you mean inputs?"),
        ({"learning_rate": -1.0}, "learning_rate must be a number of at least 0, got -1.0"),
        ({"learning_rate": "3e-4"}, "learning_rate must be a number of at least 0, got '3e-4'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number"),
        ({"max_grad_norm": -1}, "max_grad_norm must be a number of at least 0"),
        ({"num_train_epochs": 0}, "num_train_epochs must be a number above 0"),
        ({"max_steps": 0}, "max_steps must be at least 1, or -1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a whole number of at least 1, got 0"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps must be a whole number"),
        ({"save_total_limit": -1}, "save_total_limit must be a whole number of at least 1, or None, got -1"),
        ({"seed": "42"}, "seed must be a whole number"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be at least 0 and below 1"),
        ({"label_smoothing_factor": 1.2}, "label_smoothing_factor must be at least 0 and below 1"),
        ({"save_steps": -1}, 'to do it never set save_strategy="no"'),
        ({"logging_steps": 0}, "logging_steps must be above 0"),
        ({"eval_steps": 1.5, "eval_strategy": "steps"}, "eval_steps must be a whole number from 1 on"),
        ({"warmup_steps": -5}, "warmup_steps must be a whole number of updates"),
        ({"dataloader_prefetch_factor": 2}, "set dataloader_num_workers to 1 or more"),
        ({"dataloader_persistent_workers": True}, "dataloader_num_workers is 0"),
        ({"dataloader_multiprocessing_context": "thread"}, "must be one of fork, spawn, forkserver"),
        ({"bf16": "yes"}, "bf16 must be True or False, got 'yes'"),
        ({"load_best_model_at_end": True}, 'eval_strategy is "no"'),
        ({"save_strategy": "best"}, 'save_strategy="best" needs evaluations'),
        ({"lr_scheduler_type": "greedy"}, 'lr_scheduler_type="greedy" needs evaluations'),
        ({"torch_compile": True, "step_mode": "eager"}, "exclude each other"),
        ({"lr_scheduler_kwargs": "num_cycles=2"}, "lr_scheduler_kwargs must be a dict, or one as JSON text"),
        ({"lr_scheduler_kwargs": "[2]"}, "lr_scheduler_kwargs must be a dict"),
        ({"ddp_static_graph": True, "gradient_accumulation_steps": 2}, "leave it out, or set gradient_accumulation_st"),
        ({"metric_for_best_model": 5}, "metric_for_best_model must be the name of a metric, got 5"),
        ({"accelerator_config": {"even_batch": True}}, "did you mean even_batches?"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_step": 2}}}, "did you mean num_steps?"),
        ({"accelerator_config": {"split_batches": "perhaps"}}, "split_batches: "),
        ({"accelerator_config": "none.yaml"}, "cannot read the configuration file none.yaml"),
        ({"accelerator_config": type("Config", (), {})}, "a JSON or YAML file, or an AcceleratorConfig"),
        ({"include_num_input_tokens_seen": "some"}, "must be one of no, all, non_padding"),
        ({"neftune_noise_alpha": "5"}, "neftune_noise_alpha must be a number of at least 0, or None"),
        ({"torch_empty_cache_steps": 0}, "torch_empty_cache_steps must be a whole number of at least 1"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "exclude each other"),
        ({"bf16_full_eval": True, "fsdp": "full_shard"}, "cannot cast the weights of a sharded model"),
        ({"optim": "apollo_adamw"}, "optim_target_modules names the layers"),
        ({"optim_target_modules": "all-linear"}, 'the layers of optim="apollo_adamw": set both'),
    ],
    ids=lambda value: "-".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused_when_the_arguments_are_created(values, text):
    assert_refused(re.escape(text), TrainingArguments, "out", **values)


def test_unknown_arguments_and_bad_values_of_generation_are_refused():
    text = "has no argument 'lerning_rate': did you mean learning_rate?"
    assert_refused(text, TrainingArguments, "out", lerning_rate=1e-4, error=ConfigTypeError)
    assert_refused("did you mean warmup_ratio?", TrainingArguments, "out", warmup_ratios=0.1, error=TypeError)
    text = "generation_num_beams must be a whole number of at least 1, or None, got 0"
    assert_refused(text, Seq2SeqTrainingArguments, "out", generation_num_beams=0)
    values = {"save_steps": 7, "eval_strategy": "epoch", "load_best_model_at_end": True}
    for save in SaveStrategy:  # it need not be the one of evaluation
        args = TrainingArguments("out", save_strategy=save, **values)
        assert (args.save_strategy, args.metric_for_best_model, args.greater_is_better) == (save, "loss", False)


def test_intervals_are_whole_numbers_or_fractions_and_values_become_plain():
    args = TrainingArguments("out", eval_strategy="steps", eval_steps=0.5, save_steps=10.0, logging_steps=1.0)
    assert (args.eval_steps, args.save_steps, args.logging_steps) == (0.5, 10, 1)
    assert type(args.save_steps) is int and type(args.logging_steps) is int
    assert TrainingArguments("out", logging_strategy="no", logging_steps=0).logging_steps == 0
    assert TrainingArguments("out", eval_strategy="steps", eval_steps=0, logging_steps=5).eval_steps == 5
    args = TrainingArguments("out", eval_strategy=IntervalStrategy.EPOCH)
    assert args.eval_strategy == "epoch" and f"{args.eval_strategy}" == str(args.eval_strategy) == "epoch"
    numpy = pytest.importorskip("numpy")
    args = TrainingArguments("out", seed=numpy.int64(3), learning_rate=numpy.float32(0.5), save_steps=numpy.int64(7))
    assert (type(args.seed), type(args.learning_rate), type(args.save_steps)) == (int, float, int)
    assert json.loads(args.to_json_string())["seed"] == 3
    args = TrainingArguments(None, max_grad_norm=None)
    assert args.output_dir == "trainer_output" and args.max_grad_norm == 0
    assert TrainingArguments("~/runs").output_dir == str(Path("~/runs").expanduser())


def test_creating_arguments_imports_no_torch_and_has_no_side_effects(tmp_path):
    code = """
import json, os, sys
before = dict(os.environ)
from loopwright.config import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
args = TrainingArguments("out", bf16=True, torch_compile=True, tf32=True, report_to="all")
HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--fp16"])
args.to_yaml(), args.world_size, args.should_save, args.get_process_log_level(), repr(args)
with args.main_process_first():
    pass
heavy = [name for name in ("torch", "numpy", "accelerate", "transformers") if name in sys.modules]
print(json.dumps({"heavy": heavy, "environment": before == dict(os.environ), "files": os.listdir(".")}))
"""
    done = toys.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"heavy": [], "environment": True, "files": []}


def test_the_process_is_read_from_the_environment_on_access(monkeypatch):
    args = TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_save and args.should_log
    assert (args.train_batch_size, args.eval_batch_size, args.n_gpu) == (4, 8, 0)
    assert str(args.device) == "cpu"

    for name, value in (("WORLD_SIZE", "4"), ("RANK", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert (args.world_size, args.process_index, args.local_process_index) == (4, 2, 0)
    assert args.parallel_mode == "distributed"
    assert args.should_log and not args.should_save
    assert not dataclasses.replace(args, log_on_each_node=False).should_log


def test_log_levels_and_precision_depend_on_the_environment(monkeypatch):
    args = TrainingArguments("out", log_level="debug", log_level_replica="error")
    assert args.get_process_log_level() == logging.DEBUG
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert args.get_process_log_level() == logging.ERROR
    passive = TrainingArguments("out", log_level_replica="passive")
    assert passive.get_process_log_level() == logging.getLogger("loopwright").getEffectiveLevel()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert TrainingArguments("out", bf16=True).mixed_precision == "bf16"
    assert TrainingArguments("out", fp16=True).mixed_precision == "fp16"
    assert TrainingArguments("out").mixed_precision == "fp8"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert TrainingArguments("out").mixed_precision == "no"


MAIN_FIRST = """
import os, sys, time
from pathlib import Path
from loopwright.config import TrainingArguments
args = TrainingArguments("out")
done = Path(sys.argv[1])
for turn in range(2):  # Before there is a process group.
    with args.main_process_first(local=False):
        if args.process_index == 0:
            time.sleep(0.2)
            (done / f"store-{turn}").touch()
        assert (done / f"store-{turn}").exists()
import torch.distributed as dist
dist.init_process_group("gloo")
with args.main_process_first():
    if args.process_index == 0:
        time.sleep(0.2)
        (done / "group").touch()
    assert (done / "group").exists()
(done / f"end-{args.process_index}").touch()
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_the_main_process_goes_first_before_and_after_there_is_a_process_group(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    started = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        command = [sys.executable, "-c", MAIN_FIRST, str(tmp_path)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end-0", "end-1", "group", "store-0", "store-1"]


def values_of(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any] | None:
    """Return a strategy for the values of a field, if it has many."""
    if field.metadata.get("choices"):
        return st.sampled_from(field.metadata["choices"])
    by_name = {
        "max_steps": st.integers(1, 10**9),
        "lr_scheduler_kwargs": st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2),
        "label_names": st.lists(st.text(max_size=5), max_size=3),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", SchedulerType.POLYNOMIAL]),
        "eval_strategy": st.sampled_from(IntervalStrategy),
        "save_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "logging_strategy": st.sampled_from(IntervalStrategy),
        "report_to": st.sampled_from(["none", "all", "tensorboard", ["wandb", "tensorboard"]]),
        "save_steps": st.integers(1, 1000) | st.floats(0.01, 0.99),
        "logging_steps": st.integers(1, 1000) | st.floats(0.01, 0.99),
        "warmup_steps": st.integers(0, 1000) | st.floats(0.01, 0.99),
    }
    fraction = st.floats(0, 0.99)
    by_type = {
        "float": fraction | st.floats(1e-30, 1e30) if field.name in ("learning_rate", "weight_decay") else None,
        "str | None": st.none() | st.text(max_size=8),
        "str": st.text(min_size=1, max_size=8),
    }
    return by_name[field.name] if field.name in by_name else by_type.get(str(field.type))


VARIED = {
    name: values
    for name, field in fields_of(TrainingArguments).items()
    if kind_of(field) != "refused"
    and name not in ("logging_dir", "dataloader_multiprocessing_context", "step_mode", "hub_token", "hub_strategy")
    and (values := values_of(field)) is not None
}


class Flavour(Enum):
    SWEET = "sweet"
    SOUR = "sour"


@dataclasses.dataclass
class WithOwnFields(TrainingArguments):
    cache: Path = Path("cache")
    flavour: Flavour = Flavour.SWEET
    sizes: tuple[int, ...] = (1, 2)
    learning_rate: float = 1e-3
    access_token: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_ready = True


@settings(max_examples=25)
@given(values=st.fixed_dictionaries({}, optional=VARIED))
def test_arguments_survive_dict_json_and_yaml_exactly(values, tmp_path_factory):
    assert len(VARIED) >= 25
    folder = tmp_path_factory.mktemp("round_trip", numbered=True)
    args = WithOwnFields(**values, cache=Path("a/b"), flavour=Flavour.SOUR, sizes=(3,))
    (folder / "args.json").write_text(args.to_json_string(), encoding="utf-8")
    (folder / "args.yaml").write_text(args.to_yaml(), encoding="utf-8")
    from_yaml = WithOwnFields.from_yaml(folder / "args.yaml")
    assert from_yaml == args and from_yaml.to_yaml() == args.to_yaml()
    assert WithOwnFields.from_dict(args.to_dict()) == args == WithOwnFields.from_json(folder / "args.json")
    assert copy.deepcopy(args) == args and pickle.loads(pickle.dumps(args)) == args


def test_files_are_read_by_the_types_of_the_fields_and_an_empty_one_means_all_defaults(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: out\nlearning_rate: 3e-4\nsave_strategy: no\nmax_steps: 1e3\nbf16: yes\nrun_name: 7\n")
    expected = TrainingArguments("out", learning_rate=3e-4, save_strategy="no", max_steps=1000, bf16=True, run_name="7")
    assert TrainingArguments.from_yaml(path) == expected
    assert WithOwnFields.from_dict({"sizes": ["4", 5], "flavour": "sour", "cache": "x"}).sizes == (4, 5)
    path.write_text("")
    assert TrainingArguments.from_yaml(path) == TrainingArguments()
    text = "cannot read the configuration file .*No such file"
    assert_refused(text, TrainingArguments.from_json, tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "has no field 'learning_rat': did you mean learning_rate?"),
        ("max_steps: many", "max_steps: expected a number, got 'many'"),
        ("max_steps: 1.5", "max_steps: expected a whole number, got 1.5"),
        ("bf16: maybe", "bf16: expected true or false, got 'maybe'"),
        ("optim: no", "optim: expected a text, got False"),
        ("- 1", "must hold names and values, not a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
    path = tmp_path / "args.yaml"
    path.write_text(text)
    assert_refused(re.escape(message), TrainingArguments.from_yaml, path)


def test_tokens_are_not_shown_or_written_and_trackers_get_plain_values():
    args = WithOwnFields("out", access_token="secret", hub_token="secret", label_names=["a"])
    assert args.to_dict()["access_token"] == "<ACCESS_TOKEN>"
    assert "secret" not in args.to_yaml() + args.to_json_string() + str(args.to_sanitized_dict())
    plain = args.to_sanitized_dict()
    assert plain["train_batch_size"] == 8 and plain["label_names"] == "['a']"
    assert {type(value) for value in plain.values()} <= {bool, int, float, str}


def test_a_subclass_has_its_own_fields_and_defaults_and_may_redefine_an_old_name_or_the_constructor():
    @dataclasses.dataclass
    class WithOldNameAsField(TrainingArguments):
        warmup_ratio: float = 0.5

    class WithOwnConstructor(TrainingArguments):
        def __init__(self, folder, **kwargs):
            super().__init__(output_dir=folder, **kwargs)

    args = WithOwnFields("out")
    assert args.is_ready and args.learning_rate == 1e-3 and args.cache == Path("cache")
    with pytest.warns(OldNameWarning, match="no_cuda"):
        assert WithOwnFields("out", no_cuda=True).use_cpu
    assert_refused("deepspeed", WithOwnFields, "out", deepspeed="x.json")
    args = WithOldNameAsField("out", warmup_ratio=0.25)
    assert (args.warmup_ratio, args.warmup_steps) == (0.25, 0)
    with pytest.warns(OldNameWarning):
        args = WithOwnConstructor("out", evaluation_strategy="epoch")
    assert (args.output_dir, args.eval_strategy) == ("out", "epoch")
    args = dataclasses.replace(TrainingArguments("out", seed=1), learning_rate=0.1)
    assert repr(args) == "TrainingArguments(output_dir='out', learning_rate=0.1, seed=1)"


def test_setters_match_transformers_and_check_their_values():
    transformers = pytest.importorskip("transformers")
    calls = {
        "set_training": {"learning_rate": 1e-4, "batch_size": 32, "num_epochs": 2, "seed": 3},
        "set_evaluate": {"strategy": "steps", "steps": 100, "delay": 2},
        "set_testing": {"batch_size": 16, "loss_only": True},
        "set_save": {"strategy": "epoch", "total_limit": 2},
        "set_logging": {"strategy": "steps", "steps": 5, "first_step": True},
        "set_optimizer": {"name": "sgd", "learning_rate": 0.1, "args": "momentum=0.9"},
        "set_lr_scheduler": {"name": "cosine", "warmup_steps": 0.1},
        "set_dataloader": {"train_batch_size": 4, "num_workers": 2, "sampler_seed": 9},
        "set_push_to_hub": {"model_id": "me/model", "strategy": "end", "revision": "trial"},
    }
    ours, theirs = TrainingArguments("out"), transformers.TrainingArguments("out")
    for name, values in calls.items():
        assert getattr(ours, name)(**values) is ours
        getattr(theirs, name)(**values)
    different = {name for name, value in theirs.to_dict().items() if value != ours.to_dict()[name]}
    # The setter of transformers leaves report_to="none"; the rest is filled in there.
    assert different == {*FILLED_IN, "report_to"}
    args = TrainingArguments("out")
    assert_refused("eval_steps must be above 0|eval_strategy must be one of", args.set_evaluate, strategy="stepps")
    assert_refused("logging_nan_inf_filter", args.set_logging, nan_inf_filter=True)


def test_a_dtype_is_json_by_its_name():
    @dataclasses.dataclass
    class Arguments(TrainingArguments):
        dtype: torch.dtype = torch.float32
        options: dict = dataclasses.field(default_factory=dict)

    args = Arguments("runs", dtype=torch.bfloat16, options={"model": {"dtype": torch.int8}})
    stored = json.loads(args.to_json_string())
    assert args.to_dict()["dtype"] == stored["dtype"] == "bfloat16" and stored["options"]["model"]["dtype"] == "int8"
