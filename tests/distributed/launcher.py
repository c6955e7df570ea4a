"""Start a function of a test module in several processes that form one group (gloo, CPU), and keep what they leave.

The processes are forked from one server that has imported everything, so that a start takes milliseconds. A process
writes each measurement as soon as it is made: what it saw before a crash or a hang is kept.

    def measure(results):            # results is a dict; what it holds must be something JSON can
        results["rank"] = int(os.environ["RANK"])

    first, second = run(measure, tmp_path)
    assert first["rank"] == 0 and first.exit_code == 0
"""

import faulthandler
import inspect
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
    + ["accelerate", "loopwright.trainer", "loopwright.callbacks", "loopwright.hf.trainer", "loopwright.runs.train"]
    # Where these are not installed, the server goes on without them.
    + ["peft", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "modernbert", "t5"))]
)
os.fsync = os.fstat  # in the processes that it starts too, as in conftest.py
GRACE_SECONDS = 10  # for a process to notice that its peer has died


@dataclass
class Rank:
    """What one process left behind.

    Attributes:
        seen: its measurements.
        exit_code: None if it hung and was killed; negative for a signal.
        output: what it printed.
        seconds: from the first start to its end.
    """

    seen: dict
    exit_code: int | None
    output: str
    seconds: float

    def __getitem__(self, measurement: str):
        if measurement not in self.seen:
            ending = "hung" if self.exit_code is None else f"ended with exit code {self.exit_code}"
            pytest.fail(f"a process {ending} before {measurement!r}; its output ends with\n{self.output[-4000:]}")
        return self.seen[measurement]


class Results(dict):
    """Measurements by name, on disk as soon as they are made."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        aside = self.path.with_suffix(".tmp")
        aside.write_text(json.dumps(self))
        aside.replace(self.path)


def launch(function, folder: Path, num_processes: int = 2, timeout_seconds: float = 60, **environment: str) -> list:
    """Run a function in several processes, all of which must succeed; return what it returned on each."""
    ranks = run(function, folder, num_processes, timeout_seconds, **environment)
    assert [rank.exit_code for rank in ranks] == [0] * num_processes, "\n".join(
        f"rank {number}, exit code {rank.exit_code}:\n{rank.output[-4000:]}" for number, rank in enumerate(ranks)
    )
    return [rank["returned"] for rank in ranks]


def run(
    function,
    folder: Path,
    num_processes: int = 2,
    timeout_seconds: float = 60,
    grace_seconds: float = GRACE_SECONDS,
    **environment: str,
) -> list[Rank]:
    """Run a function in several processes, in the folder; one that hangs, or long outlives a dead peer, is killed.

    The function may take the results, a dict that is written at once; what it returns is there as "returned".
    """
    folder = Path(folder)
    shared = {
        **os.environ,  # the server has those of its own start
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    names = [folder / f"{function.__name__}.rank{rank}" for rank in range(num_processes)]
    begin = time.monotonic()
    processes = []
    for rank, name in enumerate(names):
        process = SERVER.Process(target=_work, args=(function, name, {**shared, "RANK": str(rank)}, timeout_seconds))
        process.start()
        processes.append(process)

    ends: dict[int, float] = {}
    deadline, someone_failed = begin + timeout_seconds, False
    while len(ends) < num_processes and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.monotonic() - begin
        if not someone_failed and any(process.exitcode for process in processes):
            someone_failed = True
            deadline = min(deadline, time.monotonic() + grace_seconds)
        time.sleep(0.02)
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()

    ranks = []
    for rank, name in enumerate(names):
        result, log = name.with_suffix(name.suffix + ".json"), name.with_suffix(name.suffix + ".log")
        seen = json.loads(result.read_text()) if result.exists() else {}
        output = log.read_text(errors="replace") if log.exists() else ""
        ranks.append(Rank(seen, exit_codes[rank], output, ends.get(rank, timeout_seconds)))
    return ranks


def exit_code(function, *args, seconds: float = 60) -> int:
    """Run a function in one process and return its exit code: `EXIT_CODES` for errors, negative for a signal."""
    process = SERVER.Process(target=_coded, args=(function, args))
    process.start()
    process.join(seconds)
    code = process.exitcode
    if code is None:
        process.kill()
        raise AssertionError("the process hangs")
    return code


EXIT_CODES = {"Preempted": 75, "KeyboardInterrupt": 130, "CheckpointError": 74}


def _coded(function, args) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        function(*args)
        os._exit(0)
    except SystemExit as leaving:
        os._exit(leaving.code or 0)
    except BaseException as error:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_CODES.get(type(error).__name__, 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(function, name: Path, environment: dict[str, str], timeout_seconds: float) -> None:
    output = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(name.parent)
    os.environ.clear()
    os.environ.update(environment, LOCAL_RANK=environment["RANK"], CUDA_VISIBLE_DEVICES="")
    # Of loader workers, as in a script; and a hook of another's does not count here.
    multiprocessing.set_start_method("fork", force=True)
    faulthandler.enable(file=sys.__stderr__)
    faulthandler.dump_traceback_later(max(timeout_seconds - 5, 1), exit=True, file=sys.__stderr__)
    results = Results(Path(f"{name}.json"))
    try:
        takes_results = bool(inspect.signature(function).parameters)
        results["returned"] = function(results) if takes_results else function()
        _leave_group()
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _leave_group() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
