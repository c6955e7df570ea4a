"""A process that raises, hangs, is killed or is asked to end: what becomes of the others, and of the run."""

import hashlib
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import toys
from distributed.launcher import SERVER, Results, run
from loopwright import Checkpointing, Trainer
from loopwright.callbacks import TrainerCallback
from loopwright.checkpoint import verify_all
from loopwright.config import processes
from loopwright.engine.processes import world_process_zero_only
from loopwright.errors import Preempted, StopTrainingError
from tasks.forked import run_lines

pytestmark = pytest.mark.distributed

UPDATES = 48
KILLED_AT = 37


class Interrupted(Trainer):
    def __init__(self, *args, at: int, function, **kwargs):
        self.at, self.function = at, function
        super().__init__(*args, **kwargs)

    def calculate_train_batch_loss(self, batch):
        if self.progress.update == self.at:
            self.function()
        return super().calculate_train_batch_loss(batch)


def fit(function=lambda: None, at: int = 3, **kwargs) -> Interrupted:
    model = toys.network(8, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = toys.trainer_of((), model, cls=Interrupted, optimizer=optimizer, at=at, function=function)
    toys.fit(trainer, toys.data(8 * UPDATES // 2), 2, seed=2, **kwargs)
    return trainer


def fit_on(number: int, function, **kwargs) -> Interrupted:
    """Call the function in the middle of an update of one process."""
    return fit(lambda: rank() == number and function(), **kwargs)


def raise_(error: BaseException) -> None:
    raise error


def rank() -> int:
    return int(os.environ["RANK"])


def raise_on_one(results: Results) -> None:
    def boom():
        results["raised at"] = time.time()
        raise ValueError("boom on one\nwith a second line")

    try:
        fit_on(1, boom)
    finally:
        results["left at"] = time.time()


def test_an_exception_on_one_process_is_reported_first_and_ends_both_within_seconds(tmp_path):
    first, second = run(raise_on_one, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert second.output.startswith("Rank 1 of 2 failed: ValueError: boom on one\n")
    assert "with a second line" in second.output  # its own traceback follows
    told = "AnotherProcessError: rank 1 of 2 failed: ValueError: boom on one (this is rank 0)"
    assert told in first.output
    assert first["left at"] - second["raised at"] < 5


def raise_beside_a_loop_without_end(results: Results) -> None:
    def one_raises_one_hangs():
        if rank() == 1:
            results["raised at"] = time.time()
            raise ValueError("boom")
        while True:
            results["alive at"] = time.time()
            time.sleep(0.05)

    fit(one_raises_one_hangs)


def test_a_process_that_does_not_even_wait_for_the_others_is_ended_and_reports_where_it_was(tmp_path):
    first, second = run(raise_beside_a_loop_without_end, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "Rank 0 of 2 exits, since rank 1 of 2 failed: ValueError: boom. It was here:" in first.output
    assert "in one_raises_one_hangs" in first.output
    assert first["alive at"] - second["raised at"] < 5


class Unsavable(TrainerCallback):
    """Raises on one process where the other waits for it, however long it takes."""

    def state_dict(self) -> dict:
        if rank() == 1:
            raise ValueError("boom in a save")
        return {}


def fail_and_live_on(results: Results) -> None:
    trainer = toys.trainer_of([Unsavable()], cls=Trainer)
    try:
        trainer.train(toys.data(16), 1, checkpoints=Checkpointing(results.path.parent / "run"))
    finally:
        results["left"] = True
        other = results.path.parent / f"fail_and_live_on.rank{1 - rank()}.json"
        wait_until(lambda: other.exists() and "left" in other.read_text(), 10)


def test_the_others_leave_a_process_that_has_failed_and_lives_on(tmp_path):
    first, second = run(fail_and_live_on, tmp_path)
    assert first["left"] and second["left"]
    assert "AnotherProcessError: rank 1 of 2 failed: ValueError: boom in a save (this is rank 0)" in first.output


class Unreadable(torch.utils.data.Dataset):
    """Cannot be read on the first process, by whose store the processes hear of each other."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index):
        if rank() == 0:
            raise ValueError("boom in a worker")
        return torch.zeros(4), torch.zeros(1)


def raise_in_a_worker() -> None:
    toys.trained((), Unreadable(), cls=Trainer, train_dataloader_kwargs={"num_workers": 1})


def test_what_a_worker_of_the_first_process_raised_is_reported_by_all(tmp_path):
    first, second = run(raise_in_a_worker, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert first.output.startswith("Rank 0 of 2 failed: DataError: sample ")
    told = r"AnotherProcessError: rank 0 of 2 failed: DataError: sample .* ValueError: boom in a worker"
    assert re.search(told, second.output)


def interrupt_one() -> None:
    fit_on(1, lambda: raise_(KeyboardInterrupt()))  # of a handler of the user's own


def test_an_interruption_of_one_process_alone_does_not_leave_the_others_waiting(tmp_path):
    first, second = run(interrupt_one, tmp_path, timeout_seconds=20)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "AnotherProcessError: rank 1 of 2 failed: KeyboardInterrupt (this is rank 0)" in first.output
    assert not second.output.startswith("Rank 1")  # whoever interrupts knows it


def lose_one() -> None:
    fit_on(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_was_killed_is_reported_as_lost(tmp_path):
    first, second = run(lose_one, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, -signal.SIGKILL]
    told = "ank 0 of 2 lost another process, which was killed or exited without an error message"
    assert f"R{told}\n" in first.output and f"AnotherProcessError: r{told} (this is rank 0)" in first.output


def fill_the_disk() -> None:
    def fill():  # also what its standard error is written to
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        raise OSError("no space left")

    fit_on(0, fill)


def test_a_failure_is_reported_to_the_others_where_it_cannot_be_printed(tmp_path):
    first, second = run(fill_the_disk, tmp_path)
    assert [first.exit_code, second.exit_code] == [1, 1]
    assert "AnotherProcessError: rank 0 of 2 failed: OSError: no space left (this is rank 1)" in second.output


def stop_in_a_function_of_one(results: Results) -> None:
    @world_process_zero_only
    def look():
        raise StopTrainingError("seen by the first")

    witness = toys.callback(on_train_epoch_end=lambda trainer, **kwargs: look())
    result = toys.trainer_of([witness]).train(toys.data(16), 3, per_device_batch_size=4, seed=1)
    results["stopped"] = [result.updates, result.stop_reason]


def test_a_stop_in_a_function_that_one_process_runs_is_not_a_failure_of_the_others(tmp_path):
    for process in run(stop_in_a_function_of_one, tmp_path):
        assert process["stopped"] == [2, "seen by the first"]


def signal_to_one(results: Results) -> None:
    folder = results.path.parent / "run"
    with pytest.raises(Preempted, match="SIGTERM"):
        fit_on(1, lambda: os.kill(os.getpid(), signal.SIGTERM), at=5, checkpoints=Checkpointing(folder))
    results["checkpoints"] = [finding.update for finding in verify_all(folder)]
    results["updates"] = fit(checkpoints=Checkpointing(folder), resume_from="auto").progress.update
    results["bits"] = bits(folder)


def whole(results: Results) -> None:
    fit(checkpoints=Checkpointing(results.path.parent / "whole"))
    results["bits"] = bits(results.path.parent / "whole")


def bits(folder: Path) -> str:
    newest = verify_all(folder)[-1]
    assert newest.problem is None and newest.update == UPDATES
    return hashlib.sha256((newest.path / "model.safetensors").read_bytes()).hexdigest()


def weights_of(folder: Path) -> str:
    from safetensors.torch import load_file

    tensors = load_file(verify_all(folder)[-1].path / "model.safetensors")
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def test_a_signal_to_one_process_ends_all_of_them_saved_and_as_preempted(tmp_path):
    for process in run(signal_to_one, tmp_path):
        assert process["checkpoints"] == [6]
        assert process["updates"] == UPDATES


class EndedInEvaluation(Trainer):
    """Is asked to end on one process at the second batch of its first evaluation."""

    num_evaluated = 0

    def calculate_eval_batch_loss(self, batch):
        self.num_evaluated += 1
        if self.num_evaluated == 2 and rank() == 1 and self.progress.epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().calculate_eval_batch_loss(batch)


def signal_in_an_evaluation(results: Results) -> None:
    for name, cls in (("asked", EndedInEvaluation), ("resumed", Trainer), ("whole", Trainer)):
        trainer = toys.trainer_of(cls=cls)
        folder = results.path.parent / ("whole" if name == "whole" else "asked")
        saved = {"checkpoints": Checkpointing(folder), "resume_from": "auto"}
        try:
            result = trainer.train(toys.data(16), 2, toys.data(60), per_device_batch_size=2, seed=1, **saved)
            results[name] = [result.metrics, toys.weights(trainer).tolist()]
        except Preempted:
            results[name] = [trainer.num_evaluated, [finding.update for finding in verify_all(folder)]]


def test_a_signal_to_one_process_in_an_evaluation_ends_all_at_the_same_batch_and_it_is_repeated(tmp_path):
    first, second = run(signal_in_an_evaluation, tmp_path)
    for process in (first, second):
        assert process["asked"] == [3, [4]]  # the others hear of it a batch later
        assert process["resumed"] == process["whole"] == first["whole"]


def stop_one(results: Results) -> None:
    def stop():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        results["waits since"] = time.time()

    try:
        fit(stop)
    finally:
        results["left at"] = time.time()


def test_a_process_that_waits_for_a_stopped_one_gives_up_after_the_timeout(tmp_path):
    first, second = run(stop_one, tmp_path, grace_seconds=0.5, LOOPWRIGHT_TIMEOUT_SECONDS="2")
    assert first.exit_code == 1 and second.exit_code is None
    assert "Rank 0 of 2 failed: RuntimeError" in first.output and "imed out" in first.output
    assert 1 < first["left at"] - first["waits since"] < 7


def agent(folder: str) -> None:
    """torchrun in a process of its own, with workers that run on and on."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    config = LaunchConfig(1, 1, 2, run_id="agent", start_method="fork", **meeting)
    elastic_launch(config, work_on)(folder)


def work_on(folder: str) -> None:
    def note():
        (Path(folder) / f"{os.getpid()}.pid").touch()
        time.sleep(60)

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    fit(note)


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_no_process_outlives_a_killed_launcher(tmp_path):
    launcher = SERVER.Process(target=agent, args=(str(tmp_path),))
    launcher.start()
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 40)
        workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert all(map(is_alive, workers))
        launcher.kill()
        launcher.join()
        assert wait_until(lambda: not any(map(is_alive, workers)), 3), "orphans train on"
    finally:
        launcher.kill()
        launcher.join()


def meet(results: Results) -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(2):
        with processes.first(rank() == 0):
            results[f"meeting {number}"] = time.monotonic()


def test_processes_that_are_started_again_do_not_count_those_that_came_before(tmp_path):
    # As torchrun does it: one store for all starts, served by the launcher.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    offered = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    lost = run(meet, tmp_path, grace_seconds=0.5, **offered, TORCHELASTIC_RESTART_COUNT="0")
    assert [process.exit_code for process in lost] == [None, -signal.SIGKILL]
    first, second = run(meet, tmp_path, timeout_seconds=20, **offered, TORCHELASTIC_RESTART_COUNT="1")
    assert [first.exit_code, second.exit_code] == [0, 0]
    for number in range(2):
        assert first[f"meeting {number}"] <= second[f"meeting {number}"]


SCRIPT = """
import os, signal, sys
from pathlib import Path

from distributed.test_failures import KILLED_AT, fit, rank
from loopwright import Checkpointing

def kill():
    if rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

fit(kill, at=KILLED_AT, checkpoints=Checkpointing(Path(sys.argv[1]), every_updates=5), resume_from="auto")
"""


@pytest.mark.slow
def test_a_killed_process_is_replaced_by_the_launcher_and_the_run_ends_with_the_same_bits(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    line = ["launch", "-n", "2", "--max-restarts", "3", "--", tmp_path / "script.py", tmp_path / "killed"]
    path = os.pathsep.join(filter(None, sys.path))
    code, said = run_lines(line, folder=tmp_path, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert code == 0, said
    assert said.count(f"killed/step-{35:010d} (epoch 2)") == 1, said  # told once, by one of the two processes
    assert run(whole, tmp_path)[0].exit_code == 0
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
