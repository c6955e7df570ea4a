"""The word "auto" for the learning rate and the batch: in flags, files and Python."""

import pytest

from loopwright.config import TrainingArguments
from loopwright.errors import ConfigError, InputError
from loopwright.run_folder import RunFolder
from loopwright.runs.settings import settle
from loopwright.tasks import get_task

TASK = get_task("text-classification")


@pytest.mark.parametrize(
    "words",
    ["--lr auto", "--lr=auto", "--learning_rate auto", "--learning-rate=auto", {"learning_rate": "auto"}],
    ids=["short", "short with =", "full", "full with -", "python"],
)
def test_the_learning_rate_may_be_auto_by_any_of_its_names(words):
    others = {"data": "x.csv", "epochs": 2}
    is_python = isinstance(words, dict)
    settings = settle(TASK, {**others, **words}) if is_python else settle(TASK, words.split(), base=others)
    assert settings.args.auto == ["learning_rate"]
    assert settings.values()["learning_rate"] == "auto"
    assert settings.sources["learning_rate"] == "flag"
    assert settings.training.learning_rate == settle(TASK, ["--data", "x.csv"]).training.learning_rate
    assert settings.training.num_train_epochs == 2


def test_both_values_may_be_auto_in_a_file_and_a_flag_wins_over_it(tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("lr: auto\nper_device_train_batch_size: auto\nseed: 3\n")

    settings = settle(TASK, [], config)
    assert settings.args.auto == ["learning_rate", "per_device_train_batch_size"]
    assert settings.sources["learning_rate"] == "file"
    assert settings.training.seed == 3

    settings = settle(TASK, ["--batch", "4"], config)
    assert settings.args.auto == ["learning_rate"]
    assert settings.training.per_device_train_batch_size == 4

    config.write_text("lr: 0.1\n")
    settings = settle(TASK, ["--lr", "auto"], config)
    assert settings.args.auto == ["learning_rate"]
    assert settings.training.learning_rate == 0.1


def test_a_value_that_was_chosen_is_kept_with_its_origin_and_read_as_a_number(tmp_path):
    settings = settle(TASK, ["--lr", "auto", "--batch", "auto"])
    settings.choose("learning_rate", 0.02)

    assert settings.args.auto == ["per_device_train_batch_size"]
    assert 'per_device_train_batch_size: "auto"  # flag' in settings.lines()
    assert "learning_rate: 0.02  # auto" in settings.lines()

    settings.choose("per_device_train_batch_size", 16)
    settings.write(RunFolder(tmp_path))
    again = settle(TASK, [], tmp_path / "config.yaml")
    assert again.args.auto == []
    assert (again.training.learning_rate, again.training.per_device_train_batch_size) == (0.02, 16)
    assert again.sources["learning_rate"] == again.sources["per_device_train_batch_size"] == "auto"


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ("--lr auto --learning_rate 0.1", ConfigError, "learning_rate is given as 'auto' and as 0.1"),
        ("--weight_decay auto", InputError, "expected a number, got 'auto'"),
        ("--lr automatic", InputError, "expected a number, got 'automatic'"),
    ],
)
def test_auto_beside_a_number_and_for_other_settings_is_refused(flags, error, text):
    with pytest.raises(error, match=text):
        settle(TASK, flags.split())


@pytest.mark.parametrize(
    ("name", "fix"),
    [("learning_rate", "loopwright.Trainer has find_lr"), ("per_device_train_batch_size", "auto_find_batch_size=True")],
)
def test_the_python_class_of_transformers_names_refuses_auto_and_says_what_there_is_instead(name, fix):
    with pytest.raises(ConfigError, match=f"{name} must be a .*number .*got 'auto': .*{fix}"):
        TrainingArguments(**{name: "auto"})
