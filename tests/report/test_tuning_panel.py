"""The panel of the learning rate search and of the profile, from files that may be missing or damaged."""

import json

import pytest

from loopwright.report.panels.tuning import tuning_panel

RATES = {
    "chosen": 0.001,
    "suggestion": 0.00101,
    "steepest": 0.01,
    "lowest": 0.01,
    "stop_reason": "the loss is not finite",
    "rates": [0.001, 0.01, 0.1, 1.0],
    "losses": [2.0, 1.0, 90.0, None],
    "smoothed": [2.0, 1.5, 30.0, None],
}
PROFILE = {
    "num_updates": 2,
    "first_update": 4,
    "last_update": 5,
    "seconds": {"data": 0.01, "update (graph)": 0.03},
    "operators": [{"name": "aten::mm", "calls": 8, "seconds": 0.02, "share": 0.8}],
}


def test_a_run_without_either_has_no_panel(tmp_path):
    assert tuning_panel(tmp_path) is None


def test_both_are_shown_with_their_numbers(tmp_path):
    (tmp_path / "lr_find.json").write_text(json.dumps(RATES))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "summary.json").write_text(json.dumps(PROFILE))

    curve, facts, phases, operators = tuning_panel(tmp_path).blocks

    assert dict(curve.groups) == {"each update": [(-3, 2.0), (-2, 1.0)], "smoothed": [(-3, 2.0), (-2, 1.5)]}
    assert facts.items == [
        ("chosen", "0.001"),
        ("where the loss falls fastest", "0.01"),
        ("where the loss is lowest", "0.01"),
        ("stopped because", "the loss is not finite"),
    ]
    assert phases.rows == [["data", "5 ms", "25 %"], ["update (graph)", "15 ms", "75 %"]]
    assert operators.rows == [["aten::mm", "4", "10 ms", "80 %"]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2",
        "[]",
        "{}",
        '{"rates": [1], "losses": [1]}',
        '{"rates": ["x", 2], "losses": [null, NaN]}',
        '{"seconds": {}}',
    ],
    ids=["empty", "cut off", "a list", "nothing", "one point", "no numbers", "no seconds"],
)
def test_a_file_without_content_is_ignored(tmp_path, text):
    (tmp_path / "profile").mkdir()
    (tmp_path / "lr_find.json").write_text(text)
    (tmp_path / "profile" / "summary.json").write_text(text)
    assert tuning_panel(tmp_path) is None
