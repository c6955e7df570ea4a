"""The fields of errors: how they are rendered, and what each part of loopwright fills in."""

import pickle

import pytest

from loopwright.config import HfArgumentParser, TrainingArguments
from loopwright.errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    InputError,
    LoopwrightError,
    MemoryLimitError,
)
from loopwright.runs.settings import settle
from loopwright.tasks import get_task

TASK = get_task("text-classification")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("seed is odd"), "seed is odd"),
        (ConfigError("seed is odd", flag="seed", nearest="even"), "seed is odd: did you mean even?"),
        (CheckpointError("it is damaged", code="checkpoint.none"), "error[checkpoint.none]: it is damaged"),
        (InputError("data.file", "no x", saw=["y"], fix="--data y"), "error[data.file]: no x\n  y\n  fix: --data y"),
        (MemoryLimitError("memory.train", "full", fix="--batch 1"), "error[memory.train]: full\n  fix: --batch 1"),
    ],
)
def test_an_error_is_rendered_from_its_fields_and_survives_another_process(error, text):
    again = pickle.loads(pickle.dumps(error))
    assert str(error) == str(again) == text
    assert type(again) is type(error) and vars(again) == vars(error)


def test_an_argument_that_cannot_be_names_its_field_the_value_and_the_choices():
    with pytest.raises(ConfigError) as refused:
        TrainingArguments("x", eval_strategy="stepz")
    error = refused.value
    assert (error.flag, error.given, error.nearest) == ("eval_strategy", "stepz", "steps")
    assert error.choices == ("no", "steps", "epoch") and error.code is None
    with pytest.raises(ConfigTypeError) as refused:
        TrainingArguments("x", lerning_rate=1)
    assert (refused.value.flag, refused.value.nearest) == ("lerning_rate", "learning_rate")
    with pytest.raises(ConfigError) as refused:
        HfArgumentParser(TrainingArguments).parse_dict({"lerning_rate": 1})
    assert (refused.value.flag, refused.value.nearest) == ("lerning_rate", "learning_rate")


@pytest.mark.parametrize(
    ("given", "code", "flag", "fix"),
    [
        (["--lr", "fast"], "args.value", "--lr", "leave out --lr"),
        (["--oom", "splt"], "args.value", "--oom", "--oom split"),
        (["--eval_strategy", "stepz"], "args.value", "--eval_strategy", "--eval_strategy steps"),
        (["--epocs", "1"], "args.unknown", "--epocs", "--epochs instead of --epocs"),
        ({"epocs": 1}, "args.unknown", "epocs", "epochs instead of epocs"),
        ({"lr": "fast"}, "args.value", "lr", "lw explain text-classification"),
        ({"oom": "splt"}, "args.value", "oom", "lw explain text-classification"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, (list, dict)) else None,
)
def test_flags_and_keywords_are_refused_with_a_code_the_flag_and_a_fix(given, code, flag, fix):
    with pytest.raises(LoopwrightError) as refused:
        settle(TASK, given)
    assert (refused.value.code, refused.value.flag, refused.value.fix) == (code, flag, fix)


def test_keywords_become_settings_with_the_types_of_their_fields(tmp_path):
    given = {"lr": "1e-3", "label_map": ("a=b",), "data": tmp_path, "bf16": "yes", "seed": None}
    settings = settle(TASK, {**given, "lr_scheduler_kwargs": {"power": 2}})
    assert settings.training.learning_rate == 1e-3 and settings.training.bf16 is True
    assert settings.args.label_map == ["a=b"] and settings.args.data == str(tmp_path)
    assert settings.training.lr_scheduler_kwargs == {"power": 2} and settings.sources["seed"] == "default"
    assert settings.given == {"learning_rate", "label_map", "data", "bf16", "lr_scheduler_kwargs"}
