"""Libraries that subclass transformers' Trainer run on loopwright after `hf.install()`, with the same numbers.

What they do is in clients.py; `benchmarks/clients.py` prints the table.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from distributed.launcher import run
from loopwright import hf
from loopwright.hf import TrainerCallback

from .clients import CASES, RESUMED, STEPS, outcome, sft_packing
from .tiny import fit

CLIENTS = Path(__file__).with_name("clients.py")
# Written by transformers' own Trainer; loopwright keeps its state in files without pickle.
CAPTURED = {"capture_output": True, "text": True}
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}


def outcomes(libraries, folder):
    """Run the programs of some libraries on both sides at once, and return what each printed."""
    options = {"stdout": -1, "stderr": -1, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    command = [sys.executable, CLIENTS, ",".join(libraries)]
    running = {side: subprocess.Popen([*command, side, folder / side], **options) for side in ("theirs", "ours")}
    found = {}
    for side, process in running.items():
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        found[side] = {line["case"]: line for line in lines}
    return found


@pytest.mark.slow
# Each process imports for seconds, so peft shares those of trl. setfit is run by benchmarks/clients.py only.
@pytest.mark.parametrize("libraries", [("peft", "trl"), ("sentence-transformers",)], ids=" and ".join)
def test_a_library_trains_as_with_transformers(libraries, tmp_path):
    libraries = [each for each in libraries if find_spec(each.replace("-", "_")) is not None]
    if not libraries:
        pytest.skip("not installed")
    found = outcomes(libraries, tmp_path)
    cases = {case.__name__ for library in libraries for case in CASES[library]}
    assert set(found["theirs"]) == set(found["ours"]) == cases
    for name, theirs in found["theirs"].items():
        here = found["ours"][name]
        assert "error" not in theirs and "error" not in here, (name, theirs.get("error"), here.get("error"))
        assert (theirs["by"], here["by"]) == ("transformers", "loopwright")
        assert len(here["logs"]) >= 4 and here["keys"] == theirs["keys"], name
        for ours, other in zip(here["logs"], theirs["logs"], strict=True):
            assert ours == pytest.approx(other, rel=1e-6, abs=1e-6), name
        assert here["checkpoints"] == theirs["checkpoints"]
        assert set(theirs["files"]) - STATE <= set(here["files"]), name
        assert name not in RESUMED or here["resumed"], name


@pytest.mark.slow
@pytest.mark.distributed
def test_a_library_that_counts_the_tokens_of_all_processes_trains_on_two_as_on_one(tmp_path):
    """Its loss is multiplied by the processes, and its data was prepared before the trainer existed."""
    pytest.importorskip("trl")
    (alone,), two = (run(train_packed, tmp_path, number) for number in (1, 2))
    for rank in two:
        assert len(alone["returned"]) >= 4
        for one, other in zip(alone["returned"], rank["returned"], strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6)


def train_packed():
    hf.install()
    num_processes = int(os.environ["WORLD_SIZE"])
    STEPS["per_device_train_batch_size"] = 4 // num_processes
    found = outcome(sft_packing, Path(f"on_{num_processes}"), resumes=False)
    assert "error" not in found, found
    return found["logs"]


def run_script(script):
    return subprocess.run([sys.executable, "-c", script], **CAPTURED)


def test_install_replaces_every_export_and_can_be_undone():
    done = run_script("""
import transformers, transformers.trainer, transformers.training_args, transformers.trainer_callback
from loopwright import hf
before = transformers.trainer.Trainer, transformers.trainer_callback.TrainerCallback
hf.install()
hf.install()
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.training_args import TrainingArguments
assert Trainer is transformers.trainer.Trainer is transformers.trainer_seq2seq.Trainer is hf.Trainer
assert TrainingArguments is transformers.TrainingArguments is hf.TrainingArguments
assert TrainerCallback is hf.TrainerCallback and EarlyStoppingCallback is hf.EarlyStoppingCallback
assert transformers.trainer_utils.EvalPrediction is transformers.EvalPrediction is hf.EvalPrediction
class Own(Trainer): pass
hf.uninstall()
assert (transformers.trainer.Trainer, transformers.trainer_callback.TrainerCallback) == before
assert transformers.Trainer is before[0] and issubclass(Own, hf.Trainer)
hf.uninstall()
""")
    assert done.returncode == 0, done.stderr


def test_install_refuses_when_a_class_is_already_in_use():
    attempt = """
from loopwright import hf
from loopwright.errors import ConfigError
try:
    hf.install()
except ConfigError as error:
    print(error.code, error.what, error.fix)
import transformers
print(transformers.Trainer is hf.Trainer)
"""
    imported, derived = "from transformers import Trainer", "class Own(transformers.TrainingArguments): pass"
    done = run_script(f"{imported}\n{attempt}\ndel Trainer\n{derived}\n{attempt}")
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 4 and told[1::2] == ["False", "False"]
    for line, named in zip(told[::2], ("__main__.Trainer", "__main__.Own"), strict=True):
        assert line.startswith("install.late ") and named in line
        assert "before the first import from transformers" in line


def test_callbacks_that_subclass_transformers_own_class_are_accepted(tmp_path):
    base = pytest.importorskip("transformers").TrainerCallback

    class Own(base):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    steps = []
    fit(tmp_path, Own())
    assert steps == [1, 2, 3, 4, 5] and not issubclass(Own, TrainerCallback)


def test_install_reaches_a_package_that_was_imported_before_and_leaves_trackers_quiet(tmp_path):
    """Importing its trainer puts another object in place of the package, and trackers derive from its own callback."""
    pytest.importorskip("tensorboard")
    done = run_script(f"""
import transformers
from loopwright import hf
from loopwright.hf.files import reporting_callbacks
hf.install()
assert transformers.Trainer is hf.Trainer
callback, = reporting_callbacks(["tensorboard"], {str(tmp_path)!r})
assert "on_log" in vars(callback) and "on_step_end" not in vars(callback)
hf.uninstall()
assert transformers.Trainer.__module__ == "transformers.trainer"
""")
    assert done.returncode == 0, done.stderr
