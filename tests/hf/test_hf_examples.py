"""The examples of `loopwright.hf` run as their docstrings say, and reach what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output_of(name: str, folder: Path) -> str:
    """Run an example in a process of its own, in another folder, with one thread; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", EXAMPLES / name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [], "an example leaves no files behind"
    return done.stdout


@pytest.mark.slow
def test_pairs_of_texts_are_classified(tmp_path):
    output = output_of("hf_text_pair.py", tmp_path)
    assert float(re.search(r"eval_accuracy += ([\d.]+)", output)[1]) >= 0.75
    assert "eval_f1" in output


@pytest.mark.slow
def test_two_towers_learn_a_similarity(tmp_path):
    output = output_of("hf_two_tower.py", tmp_path)
    evaluations = [float(number) for number in re.findall(r"'eval_loss': '([\d.]+)'", output)]
    assert len(evaluations) == 6 and evaluations[-1] < 0.1


@pytest.mark.slow
def test_the_trainer_is_the_loop_by_hand_bit_for_bit(tmp_path):
    assert "losses are equal: True   weights are equal: True" in output_of("hf_manual_loop.py", tmp_path)
