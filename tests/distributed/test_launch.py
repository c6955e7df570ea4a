"""`lw launch`: torchrun with our exit codes; nothing is spread over devices unasked."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import loopwright
import toys
from distributed.launcher import exit_code
from distributed.launcher import run as run_ranks
from distributed.test_failures import is_alive, wait_until
from loopwright import Trainer, utils
from loopwright.cli import launch as launching
from loopwright.cli import main
from loopwright.training.prepare import unused_devices
from source_trees import nodes
from tasks.reviews import rows, write_csv

SCRIPT = """
import json, os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"{rank}.json").write_text(json.dumps([dict(os.environ), sys.argv[2:]]))
while rank == 1 and not (folder / "0.json").exists():  # a process that fails ends the others
    time.sleep(0.01)
sys.exit(int(sys.argv[2]) if rank == 1 else 0)
"""
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
    "loopwright": ["loopwright", "launch", "-n", "2", "--"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
}


def start_module(folder: str, words: list[str]) -> None:
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def train_as_launched(results) -> None:
    environment, _ = json.loads(Path(f"{os.environ['RANK']}.json").read_text())
    store = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ.clear()
    os.environ.update({**environment, **store, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    inputs, model = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), nn.Linear(4, 1)
    nn.init.ones_(model.weight)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=[])
    trainer.train(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 2, per_device_batch_size=4, seed=1)
    results["told"] = [trainer.num_processes, trainer.progress.update, model.weight.tolist()]


@pytest.mark.distributed
@pytest.mark.slow
def test_torchrun_accelerate_and_launch_run_the_same_script_to_the_same_weights_and_its_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    told = {}
    for name, words in LAUNCHERS.items():
        folder, code = tmp_path / name, 75 if name == "loopwright" else 0
        folder.mkdir()
        line = [*words, "script.py", str(folder), str(code)]
        assert exit_code(start_module, str(tmp_path), line) == code
        assert [json.loads((folder / f"{rank}.json").read_text())[1] for rank in (0, 1)] == [[str(code)]] * 2
        ranks = run_ranks(train_as_launched, folder)
        assert ranks[0]["told"] == ranks[1]["told"]
        told[name] = ranks[0]["told"]
    assert told["torchrun"][:2] == [2, 16]  # two processes; the samples of 16 updates over both
    assert told["torchrun"] == told["loopwright"] == told["accelerate"]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_verb_runs_on_two_processes_and_what_is_wrong_with_its_input_is_reported_once(tmp_path):
    words = ["--", "train", "text-classification", "--data", "absent.csv", "--out", "run"]
    line = ["-m", "loopwright", "launch", "-n", "2", "--max-restarts", "2", *words]  # again would not help
    done = toys.python(*line, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("error[data.file]") and done.stderr.count("error") == 1, done.stderr
    assert done.stdout.count("loopwright") == 1


def refuse_once_they_have_met(results) -> None:
    words = ["train", "text-classification", "--data", "reviews.csv", "--batch", "auto", "--threads", "1"]
    results["code"] = launching.work(words)


@pytest.mark.distributed
@pytest.mark.slow
def test_what_all_processes_of_a_verb_refuse_is_reported_once_and_left_to_the_launcher(tmp_path):
    pytest.importorskip("transformers")
    write_csv(tmp_path / "reviews.csv", rows(16))
    codes = tmp_path / "codes"
    codes.mkdir()
    started = {"LOOPWRIGHT_LAUNCH_CODES": str(codes), "TORCHELASTIC_RESTART_COUNT": "0"}
    first, second = run_ranks(refuse_once_they_have_met, tmp_path, **started)
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
        assert "error[args.value]" in told and "fix: " in told and "-n 2" in told and "Traceback" not in told
    assert main(["launch", "-n", "2", "--", "predict", "last", "a text"]) == 2
    assert "fix: lw predict last 'a text'" in capsys.readouterr().err
    assert main(["launch", "--help"]) == 0
    assert "torchrun" in capsys.readouterr().out


def test_one_process_never_spreads_its_model_over_several_devices():
    watch = toys.watch(on_train_step_end=lambda trainer, **kwargs: type(trainer.model))
    toys.trained([watch], toys.data(8), cls=Trainer)
    assert set(watch.seen) == {nn.Linear}
    assert not [place for place, node in nodes() if getattr(node, "attr", getattr(node, "id", "")) == "DataParallel"]


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
