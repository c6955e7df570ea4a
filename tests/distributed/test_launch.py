"""`lw launch`: torchrun with our exit codes; nothing is spread over devices unasked."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import loopwright
import toys
from distributed.launcher import run as run_ranks
from distributed.test_failures import is_alive, wait_until
from loopwright import Trainer, utils
from loopwright.cli import launch as launching
from loopwright.cli import main
from loopwright.training.prepare import unused_devices
from tasks.reviews import rows, write_csv

SOURCE = Path(loopwright.__file__).parent
TRAINING = """
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from loopwright import Trainer

torch.manual_seed(0)
inputs, model = torch.randn(64, 4), nn.Linear(4, 1)
trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=[])
trainer.train(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 2, per_device_batch_size=4, seed=1)
trainer.print(trainer.num_processes, trainer.progress.update, model.weight.tolist())
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} got {sys.argv[1:]}\\n".encode())  # at once
sys.stdout.flush()
torch.distributed.barrier()  # a process that fails ends the others
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
    "loopwright": ["loopwright", "launch", "-n", "2", "--"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
}


def run(*words, cwd: Path) -> subprocess.CompletedProcess:
    return run_module("loopwright", "launch", *words, cwd=cwd)


def run_module(*words, cwd: Path) -> subprocess.CompletedProcess:
    return toys.python("-m", *words, cwd=cwd, CUDA_VISIBLE_DEVICES="")


@pytest.mark.distributed
@pytest.mark.slow
def test_torchrun_accelerate_and_launch_run_the_same_script_to_the_same_weights_and_its_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(TRAINING)
    told = {}
    for name, words in LAUNCHERS.items():
        code = 75 if name == "loopwright" else 0
        done = run_module(*words, "script.py", str(code), cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        ranks = [line for line in done.stdout.splitlines() if line.startswith("rank")]
        assert sorted(ranks) == [f"rank {rank} of 2 got ['{code}']" for rank in (0, 1)]
        told[name] = next(line for line in done.stdout.splitlines() if not line.startswith("rank"))
    assert told["torchrun"].startswith("2 16 [[")  # two processes; the samples of 16 updates over both
    assert len(set(told.values())) == 1, told


@pytest.mark.distributed
@pytest.mark.slow
def test_a_verb_runs_on_two_processes_and_what_is_wrong_with_its_input_is_reported_once(tmp_path):
    words = ["--", "train", "text-classification", "--data", "absent.csv", "--out", "run"]
    done = run("-n", "2", "--max-restarts", "2", *words, cwd=tmp_path)  # again would not help
    assert done.returncode == 2
    assert done.stderr.startswith("error[data.file]") and done.stderr.count("error") == 1, done.stderr
    assert done.stdout.count("loopwright") == 1


def refuse_once_they_have_met(results) -> None:
    os.chdir(os.environ["FOLDER"])
    words = ["train", "text-classification", "--data", "reviews.csv", "--batch", "auto", "--threads", "1"]
    results["code"] = launching.work(words)


@pytest.mark.distributed
@pytest.mark.slow
def test_what_all_processes_of_a_verb_refuse_is_reported_once_and_left_to_the_launcher(tmp_path):
    pytest.importorskip("transformers")
    write_csv(tmp_path / "reviews.csv", rows(16))
    codes = tmp_path / "codes"
    codes.mkdir()
    started = {"LOOPWRIGHT_LAUNCH_CODES": str(codes), "TORCHELASTIC_RESTART_COUNT": "0", "HF_HUB_OFFLINE": "1"}
    first, second = run_ranks(refuse_once_they_have_met, tmp_path, FOLDER=str(tmp_path), **started)
    assert first["code"] == second["code"] == 0  # torchrun has nothing to end or to start again
    assert {path.name: path.read_text() for path in codes.iterdir()} == {"0.0": "2", "0.1": "2"}
    assert "error[args.value]: --batch auto is for one process" in first.output and second.output == ""


def test_what_launch_cannot_start_is_refused_with_a_way_out(capsys):
    multi_node = "--nnodes 2 --max-restarts 1 -- train text-classification"
    for words, told in (
        ("-n 2 train", "fix: lw launch -n 2 -- train"),
        ("-n 2 --", "nothing to run"),
        ("-n 2 --unheard-of -- train", "--unheard-of"),
        (multi_node, "--output_dir"),
    ):
        assert main(["launch", *words.split()]) == 2
        assert told in capsys.readouterr().err
    for wrong in (["-n", "two"], ["-n", "0"], ["-n", "1", "--nnodes", "many"]):
        assert main(["launch", *wrong, "--", "train"]) == 2
        told = capsys.readouterr().err
        assert "error[args.value]" in told and "fix: lw launch -n 2" in told and "Traceback" not in told
    assert main(["launch", "-n", "2", "--", "predict", "last", "a text"]) == 2
    assert "fix: lw predict last 'a text'" in capsys.readouterr().err
    assert main(["launch", "--help"]) == 0
    assert "torchrun" in capsys.readouterr().out


def test_one_process_never_spreads_its_model_over_several_devices():
    watch = toys.watch(on_train_step_end=lambda trainer, **kwargs: type(trainer.model))
    toys.trained([watch], toys.data(8), cls=Trainer)
    assert set(watch.seen) == {nn.Linear}
    names = [
        f"{path.name}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if getattr(node, "attr", getattr(node, "id", None)) == "DataParallel"
    ]
    assert names == []


def test_a_run_on_one_of_several_devices_says_how_to_use_them_all():
    line = unused_devices(4)
    assert "1 of 4" in line and "lw launch -n 4 -- train" in line and "torchrun --nproc-per-node 4" in line


def test_the_launcher_for_notebooks_is_the_one_of_accelerate():
    from accelerate import notebook_launcher

    assert utils.notebook_launcher is loopwright.notebook_launcher is notebook_launcher
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        utils.absent  # noqa: B018
    assert not torch.distributed.is_initialized()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("target", "seconds"), [("script.py", 1.0), ("train text-classification --data a.csv", 0.0)])
def test_no_process_outlives_a_launcher_that_is_killed_before_the_first_update(tmp_path, target, seconds):
    (tmp_path / "script.py").write_text("import time\nend = time.time() + 30\nwhile time.time() < end: pass")
    write_csv(tmp_path / "a.csv", rows(16))
    command = [sys.executable, "-m", "loopwright", "launch", "-n", "2", "--", *target.split()]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    try:
        assert wait_until(lambda: len(listed.read_text().split()) == 2, 60)
        ranks = [int(word) for word in listed.read_text().split()]
        time.sleep(seconds)
        assert all(map(is_alive, ranks))
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_until(lambda: not any(map(is_alive, ranks)), 2), "orphans live on"
