"""The run history: what is recorded, what reading leaves alone, and what survives saving."""

import json

import pytest

from loopwright.tracking import InMemoryRunHistory, RunHistory


class ListRunHistory(RunHistory):
    """A history as a user may write one: a list of pairs, whose reset keeps the prefix."""

    def __init__(self):
        self.rows = []
        self.prefix = ""
        self.epoch = 1

    def get_metric_names(self):
        return {name for name, _ in self.rows} | {"tracked_without_values"}

    def get_metric_values(self, metric_name):
        return (value for name, value in self.rows if name == metric_name)

    def get_latest_metric(self, metric_name):
        return list(self.get_metric_values(metric_name))[-1]

    def update_metric(self, metric_name, metric_value):
        self.rows.append((self.prefix + metric_name, metric_value))

    def delete_metric(self, metric_name):
        self.rows = [row for row in self.rows if row[0] != metric_name]

    def set_metric_name_prefix(self, prefix=""):
        self.prefix = prefix

    @property
    def metric_name_prefix(self):
        return self.prefix

    @property
    def current_epoch(self):
        return self.epoch

    def _increment_epoch(self):
        self.epoch += 1

    def _set_epoch(self, epoch):
        self.epoch = epoch

    def reset(self):
        self.rows = []
        self.epoch = 1


@pytest.fixture
def history():
    history = InMemoryRunHistory()
    history.update_metric("loss", 2.0)
    history.update_metric("loss", 1.0)
    history.update_metric("accuracy", {"top1": 0.5})
    return history


def test_a_new_history_is_empty_and_in_epoch_1():
    history = InMemoryRunHistory()
    assert (history.current_epoch, history.metric_name_prefix) == (1, "")
    assert (history.get_metric_names(), history.latest()) == (set(), {})
    history._increment_epoch()
    assert history.current_epoch == 2
    history._set_epoch(7)
    assert history.current_epoch == 7


def test_values_are_kept_as_given_and_in_order_and_what_is_returned_belongs_to_the_caller(history):
    for _ in range(2):
        assert history.get_metric_values("loss") == [2.0, 1.0]
        assert history.get_metric_names() == {"loss", "accuracy"}
        history.get_metric_values("loss").append(99)
        history.get_metric_names().add("other")
    assert history.get_latest_metric("loss") == 1.0
    assert history.get_latest_metric("accuracy") == {"top1": 0.5}
    assert list(history.latest().items()) == [("accuracy", {"top1": 0.5}), ("loss", 1.0)], "in alphabetical order"


def test_the_error_for_an_unknown_metric_lists_the_recorded_ones(history):
    with pytest.raises(ValueError, match="No values have been recorded for the metric f1.*accuracy, loss"):
        history.get_latest_metric("f1")
    with pytest.raises(ValueError, match="the metric f1. Nothing has been recorded yet"):
        InMemoryRunHistory().get_latest_metric("f1")
    with pytest.raises(KeyError, match="f1.*accuracy, loss"):
        history.delete_metric("f1")


def test_a_metric_whose_latest_value_is_none_or_zero_is_still_recorded():
    history = InMemoryRunHistory()
    history.update_metric("none", None)
    history.update_metric("zero", 0)
    assert history.get_latest_metric("none") is None
    assert history.latest() == {"none": None, "zero": 0}


def test_the_prefix_goes_in_front_of_updates_only_until_none_is_set(history):
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 7.0)
    assert history.metric_name_prefix == "ema_"
    assert history.get_latest_metric("loss") == 1.0
    assert history.get_latest_metric("ema_loss") == 7.0
    history.set_metric_name_prefix()
    history.update_metric("loss", 0.5)
    assert history.get_metric_values("loss") == [2.0, 1.0, 0.5]
    history.set_metric_name_prefix("ema_")
    history.delete_metric("loss")
    assert history.get_metric_names() == {"ema_loss", "accuracy"}


def test_reset_goes_back_to_a_new_history_prefix_included(history):
    history.set_metric_name_prefix("ema_")
    history._increment_epoch()
    history.reset()
    assert history.state_dict() == InMemoryRunHistory().state_dict()


def test_a_run_history_cannot_be_made_without_its_abstract_methods():
    with pytest.raises(TypeError, match="abstract"):
        RunHistory()


@pytest.mark.parametrize("history_class", [InMemoryRunHistory, ListRunHistory])
def test_a_saved_history_is_restored_whole_by_any_implementation(history_class):
    history = history_class()
    history.update_metric("loss", 2.0)
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 1.5)
    history.update_metric("loss", 1.25)
    history._set_epoch(3)
    state = json.loads(json.dumps(history.state_dict()))

    restored = history_class()
    restored.set_metric_name_prefix("other_")
    restored.update_metric("left_over", 1)
    restored.load_state_dict(state)

    assert restored.state_dict() == history.state_dict()
    assert restored.current_epoch == 3
    assert restored.metric_name_prefix == "ema_"
    assert list(restored.get_metric_values("ema_loss")) == [1.5, 1.25]
    assert "left_over" not in restored.get_metric_names()
    restored.update_metric("loss", 1.0)
    assert restored.latest() == {"ema_loss": 1.0, "loss": 2.0}


def test_saved_state_is_sorted_and_shared_with_no_history(history):
    state, restored = history.state_dict(), InMemoryRunHistory()
    assert list(state["metrics"]) == ["accuracy", "loss"]
    restored.load_state_dict(state)
    for each in (history, restored):
        each.update_metric("loss", 0.0)
        assert state["metrics"]["loss"] == [2.0, 1.0]


def test_an_incomplete_state_is_refused_before_anything_is_lost(history):
    with pytest.raises(KeyError, match="prefix"):
        history.load_state_dict({"epoch": 2, "metrics": {}})
    assert history.get_metric_values("loss") == [2.0, 1.0]
