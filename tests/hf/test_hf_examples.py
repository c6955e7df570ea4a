"""The examples of `loopwright.hf` run as their docstrings say, and reach what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def output_of(tmp_path, monkeypatch, capsys):
    """Return a function that runs an example as a script in another folder, and returns its output."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"
        return capsys.readouterr().out

    return run


def test_pairs_of_texts_are_classified(output_of):
    output = output_of("hf_text_pair.py")
    assert float(re.search(r"eval_accuracy += +([\d.]+)", output)[1]) >= 0.75
    assert "eval_f1" in output


def test_two_towers_learn_a_similarity(output_of):
    output = output_of("hf_two_tower.py")
    evaluations = [float(number) for number in re.findall(r"'eval_loss': '([\d.]+)'", output)]
    assert len(evaluations) == 6 and evaluations[-1] < 0.1


def test_the_trainer_is_the_loop_by_hand_bit_for_bit(output_of):
    assert "losses are equal: True   weights are equal: True" in output_of("hf_manual_loop.py")
