"""`--time` in words, what may stand beside it, and how many updates are planned for it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.config.durations import seconds_of
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, write_json
from loopwright.runs.auto import time_budget
from loopwright.runs.clock import RunLength
from loopwright.runs.settings import settle
from loopwright.tasks import get_task

TASK = get_task("text-classification")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1:30:00", 5400), ("1d12h", 129600), ("1.5h", 5400)],
)
def test_a_time_is_read_as_people_write_it(text, seconds):
    assert seconds_of(text) == seconds


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_every_sum_of_days_hours_minutes_and_seconds_is_read(days, hours, minutes, seconds):
    parts = {"d": days, "h": hours, "m": minutes, "s": seconds}
    text = "".join(f"{value}{unit}" for unit, value in parts.items() if value)
    whole = 86400 * days + 3600 * hours + 60 * minutes + seconds
    if whole:
        assert seconds_of(text) == seconds_of(f" {text.upper()}") == whole
    if minutes < 60 and seconds < 60 and hours + minutes + seconds:
        assert seconds_of(f"{hours}:{minutes:02d}:{seconds:02d}") == 3600 * hours + 60 * minutes + seconds


@given(st.floats(0.01, 1e6))
def test_a_proposed_time_can_be_given_and_is_long_enough(seconds):
    assert seconds <= seconds_of(time_budget.flag_text(seconds)) <= max(seconds + 1, 1.5 * seconds)


@pytest.mark.parametrize(
    ("text", "expected", "fix"),
    [
        ("90", "a length of time such as 90s, 30m, 2h", "--time 90s   or   --time 90m"),
        ("1:30", "a length of time", "--time 1h30m   or   --time 1m30s"),
        ("2 hours", "a length of time", "--time 2h"),
        ("1h 30min", "a length of time", "--time 1h30m"),
        ("30m2h", "a length of time", "--time 2h"),
        ("tomorrow", "a length of time", "--time 2h"),
        ("-5m", "a length of time", "--time 5m"),
        ("", "a length of time", "--time 2h"),
        ("0s", "a time above zero", "--time 30m"),
    ],
)
def test_what_is_not_a_time_is_refused_with_what_was_expected_and_the_nearest_one(text, expected, fix):
    with pytest.raises(InputError) as refused:
        seconds_of(text)
    assert refused.value.code == "args.value" and refused.value.fix == fix
    assert refused.value.what.startswith(f"--time {text}: expected {expected}")


def test_times_are_reported_in_the_unit_that_reads_best():
    told = [time_budget.seconds_text(seconds) for seconds in (0.4812, 9.96, 48.2, 99.6, 360, 3600, 7500)]
    assert told == ["0.48 s", "10 s", "48 s", "2 min", "6 min", "1 h", "2 h 5 min"]


def test_a_time_may_be_a_flag_an_argument_in_python_or_in_a_file(tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("time: 1:30:00\n")
    by_flag, in_file = settle(TASK, ["--time", "2h"]), settle(TASK, [], config)
    assert by_flag.args.time == settle(TASK, {"time": "2h"}).args.time == "2h"
    assert in_file.args.time == "1:30:00"
    assert by_flag.given == {"time"} and not in_file.given
    assert by_flag.is_planned_by_time(is_begun=False) and in_file.is_planned_by_time(is_begun=False)
    assert 'time: "2h"  # flag' in by_flag.lines()
    with pytest.raises(InputError, match="--time 90: expected a length of time"):
        settle(TASK, {"time": 90})


@pytest.mark.parametrize("name", ["epochs", "num_train_epochs", "max_steps", "max_train_steps"])
def test_a_time_beside_another_length_is_refused_on_the_command_line_and_in_a_file(name, tmp_path):
    told = "--epochs" if name.endswith("epochs") else "--max_steps"
    config = tmp_path / "settings.yaml"
    config.write_text(f"{name}: 3\ntime: 2h\n")
    for values, file in (({name: 3, "time": "2h"}, None), ({}, config)):
        with pytest.raises(InputError, match=f"--time 2h and {told} 3: ") as refused:
            settle(TASK, values, file)
        assert (refused.value.code, refused.value.flag) == ("args.value", told)
        assert refused.value.fix == f"leave out {told}   or   leave out --time"


def test_a_flag_wins_over_what_a_file_says_of_the_length(tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("epochs: 7\nmax_steps: 9\n")
    settings = settle(TASK, ["--time", "2h"], config)
    default = settle(TASK, [])
    assert settings.training.max_steps == -1
    assert settings.training.num_train_epochs == default.training.num_train_epochs
    assert settings.sources["num_train_epochs"] == default.sources["num_train_epochs"]

    config.write_text("time: 2h\n")
    for flags in ({"epochs": 4}, {"max_steps": 4}):
        settings = settle(TASK, flags, config)
        assert settings.args.time is None and not settings.is_planned_by_time(is_begun=False)


def test_the_number_that_was_planned_holds_for_a_run_that_continues(tmp_path):
    settings = settle(TASK, ["--time", "2h"])
    run = RunFolder(tmp_path)
    config = run.config
    settings.write(run)
    assert settle(TASK, [], config).is_planned_by_time(is_begun=True)  # it ended before the number was known

    settings.training.max_steps, settings.sources["max_steps"] = 200, "auto"
    settings.write(run)
    same = settle(TASK, [], config)
    assert same.training.max_steps == 200 and not same.is_planned_by_time(is_begun=True)
    assert same.is_planned_by_time(is_begun=False)  # another run of the same settings has a clock of its own
    assert settle(TASK, ["--config", str(config)]).sources == same.sources

    assert settle(TASK, ["--time", "2h"], config).is_planned_by_time(is_begun=True)
    longer = settle(TASK, ["--epochs", "5"], config)
    assert (longer.args.time, longer.training.max_steps, longer.training.num_train_epochs) == (None, -1, 5)
    longer = settle(TASK, ["--max_steps", "300"], config)
    assert (longer.args.time, longer.training.max_steps) == (None, 300)

    write_json(tmp_path / "run.json", {"id": "old"})  # of a version that recorded no sources
    assert not settle(TASK, [], config).is_planned_by_time(is_begun=True)
    assert settle(TASK, [], config).sources["learning_rate"] == "file"


def test_a_time_takes_the_place_of_the_length_of_a_demo():
    flags = {"epochs": 3, "max_steps": 700, "lr": 1e-3}
    by_time = settle(TASK, ["--time", "1m"], base=flags)
    assert (by_time.args.time, by_time.training.max_steps, by_time.training.learning_rate) == ("1m", -1, 1e-3)
    assert settle(TASK, ["--seed", "1"], base=flags).training.max_steps == 700


SECONDS = st.floats(0.0, 20.0)
OTHERS = ("start", "warm_up", "evaluation", "training_evaluation", "save", "end")
COSTS = st.builds(time_budget.Costs, update=st.floats(1e-3, 10.0), **dict.fromkeys(OTHERS, SECONDS))


def length_of(num_updates, per_epoch=7, every=None, save_every=None):
    """Return the course of a run with epochs of some updates; a fraction is one of all updates."""
    interval = None if every is None else max(1, math.ceil(every * num_updates) if every < 1 else int(every))
    saves = {"save_every": save_every, "saves_epochs": save_every is None}
    epochs = math.ceil(num_updates / per_epoch)
    return RunLength(num_updates, epochs, evaluate_every=interval, per_epoch=per_epoch, **saves)


@given(
    seconds=st.floats(1.0, 1e4),
    costs=COSTS,
    per_epoch=st.integers(1, 300),
    every=st.sampled_from([None, 0.1, 3, 50]),
    save_every=st.sampled_from([None, 1, 20]),
    position=st.integers(0, 500),
)
def test_the_plan_is_never_over_the_time_and_with_one_more_update_it_would_be(
    seconds, costs, per_epoch, every, save_every, position
):
    def of(num_updates):
        return length_of(num_updates, per_epoch, every, save_every)

    planned = time_budget.planned_updates(seconds, costs, of, position)
    assert planned >= position
    assert planned == position or time_budget.estimate(costs, of(planned), position).total <= seconds
    assert time_budget.estimate(costs, of(planned + 1), position).total > seconds


def test_the_plan_of_a_run_is_the_one_worked_out_by_hand():
    costs = time_budget.Costs(start=10, warm_up=2, update=0.5, evaluation=4, training_evaluation=3, save=1, end=3)
    # 21 updates are 3 epochs: 4 evaluations (one of the best model), 3 on the training data, 3 saves and the last one.
    found = time_budget.estimate(costs, length_of(21))
    assert (found.updates, found.evaluations, found.saves, found.others) == (10.5, 4 * 4 + 3 * 3, 4, 15)
    assert time_budget.planned_updates(found.total, costs, length_of) == 21
    assert time_budget.planned_updates(found.total + 8, costs, length_of) == 21  # the next epoch needs 8.5 s more
    assert time_budget.planned_updates(found.total + 8.5, costs, length_of) == 22
    # From update 14 on one epoch is left.
    rest = time_budget.estimate(costs, length_of(21), position=14)
    assert (rest.updates, rest.evaluations, rest.saves) == (3.5, 2 * 4 + 3, 2)


def test_the_plan_is_reported_on_one_line_and_a_time_too_short_for_one_update_refused_with_the_estimate():
    costs = time_budget.Costs(start=50, warm_up=2, update=0.48, evaluation=120, training_evaluation=0, save=15, end=8)
    line = "2h: 14,200 steps (2.8 epochs) at 0.48 s, evaluations 8 min, saves 60 s, start and end 60 s"
    assert time_budget.plan_text("2h", costs, length_of(14200, 5000), 0) == line
    assert time_budget.plan_text("2h", costs, length_of(14200, 5000), 200).startswith("2h: 14,000 more of 14,200 steps")
    costs = time_budget.Costs(start=6, warm_up=1, update=2, evaluation=5, training_evaluation=0, save=1, end=1)
    time_budget.check_fits("22s", costs, length_of(1), 0)
    with pytest.raises(InputError) as refused:
        time_budget.check_fits("21s", costs, length_of(1), 0)
    assert refused.value.what == "--time 21s is too short: with a single update the run takes about 22 s"
    saw = "6 s have passed before the first update; it takes 2 s", "2 evaluations take 10 s, saves 2 s"
    assert refused.value.saw == saw
    assert refused.value.fix == "--time 44s"
