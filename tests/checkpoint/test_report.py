"""Listing what a folder of checkpoints holds."""

from pathlib import Path

import torch

import toys
from loopwright.checkpoint import verify_all, write
from loopwright.checkpoint.__main__ import main


def folder_of_three(folder: Path) -> Path:
    for update in (10, 2, 30):
        write(folder / f"step-{update}", {"weight": torch.ones(2)}, {"n": update}, update)
    with open(folder / "step-2" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    return folder


def test_every_checkpoint_is_listed_in_order_of_updates_with_what_is_wrong_and_one_may_be_named(tmp_path):
    findings = verify_all(folder_of_three(tmp_path))
    found = [(finding.path.name, finding.update) for finding in findings]
    assert found == [("step-2", 2), ("step-10", 10), ("step-30", 30)]
    assert "model.safetensors is damaged" in findings[0].problem
    assert findings[1].problem is None and findings[2].problem is None
    assert all(finding.num_bytes > 500 for finding in findings)
    (finding,) = verify_all(tmp_path / "step-30")
    assert finding.update == 30 and finding.problem is None


def test_the_command_says_valid_or_what_is_wrong_and_its_exit_code_tells(tmp_path, capsys):
    listed = toys.python("-m", "loopwright.checkpoint", "verify", folder_of_three(tmp_path))
    assert listed.returncode == 65
    first, *others = listed.stdout.splitlines()
    assert first.startswith("step-2  update 2  ") and "model.safetensors is damaged" in first
    assert [line.split()[-1] for line in others] == ["valid", "valid"]
    assert main(["verify", str(tmp_path / "step-10")]) == 0
    assert main(["verify", str(tmp_path / "nowhere")]) == main(["look"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("usage: python -m loopwright.checkpoint verify DIR")
