"""The verb launch: torchrun with the exit codes of the run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from loopwright.cli import exit_codes
from loopwright.config.parser import split_off
from loopwright.errors import InputError, nearest
from loopwright.run_folder import find_run, runs_root
from loopwright.run_folder.layout import new_run_id
from loopwright.run_folder.parent import BEGUN_VARIABLE, end_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_USAGE = """\
usage: lw launch [-n N] [torchrun options] -- VERB ...      a verb of loopwright, on N processes
       lw launch [-n N] [torchrun options] -- script.py ...   or a script

  -n N                      processes on this machine; one per GPU by default
  --max-restarts R          restart all processes, up to R times, when one is lost; the run resumes automatically
  --nnodes, --rdzv-endpoint, --rdzv-id, --rdzv-backend, ...
                            several machines: the same command on each (see torchrun --help)

  lw launch -n 2 -- train text-classification --data reviews.csv
  lw launch -n 8 --max-restarts 3 -- train text-classification --data reviews.csv
"""
_TRAINING = ("train", "demo")
# Verbs that run in a single process.
_ALONE = (
    *("predict", "export", "report", "watch", "compare"),
    *("runs", "stop", "verify", "tasks", "explain", "doctor", "launch"),
)
_WORKER = "loopwright.cli.launch"
_TOGETHER_SECONDS = 3.0
_LAUNCHER_VARIABLE = "LOOPWRIGHT_LAUNCHER"  # the launcher's process id; its processes end with it
_CODES_VARIABLE = "LOOPWRIGHT_LAUNCH_CODES"  # the folder in which processes leave their exit codes; set by the launcher
_PAUSE_SECONDS = 0.05


def launch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return exit_codes.DONE if argv else exit_codes.INPUT
    if "--" not in argv:
        what = "lw launch needs -- between its own options and the command"
        targets = (place for place, word in enumerate(argv) if word in (*_TRAINING, *_ALONE) or word.endswith(".py"))
        begin = next(targets, len(argv))
        command = argv[begin:] or ["demo", "text-classification"]
        raise InputError("args.value", what, fix=f"lw launch {shlex.join([*argv[:begin], '--', *command])}")
    place = argv.index("--")
    options, target = argv[:place], argv[place + 1 :]
    if not target:
        fix = f"lw launch {shlex.join([*options, '--', 'demo', 'text-classification'])}"
        raise InputError("args.value", "nothing to run after --", fix=fix)
    is_script = target[0].endswith(".py")
    if is_script and not Path(target[0]).is_file():
        beside = [path.name for path in Path(target[0]).parent.glob("*.py")]
        near = nearest(Path(target[0]).name, beside)
        named = shlex.quote(target[0])
        fix = f"{shlex.quote(str(Path(target[0]).parent / near))} instead of {named}" if near else f"create {named}"
        raise InputError("data.file", f"the script {target[0]} does not exist", fix=fix)
    if target[0] in _ALONE:
        fix = f"lw {shlex.join(target)}"
        raise InputError("args.value", f"lw {target[0]} runs in one process: several would do the same work", fix=fix)
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.add_argument("-n", dest="nproc_per_node", help=argparse.SUPPRESS)
    parser.error = _refuse  # type: ignore[method-assign]
    known = parser.parse_args([*options, "script"])
    if not is_script:
        target = _with_folder(target, known)
    is_ours = not is_script or (sys.platform == "linux" and not known.no_python and not known.run_path)
    settled = parser.parse_args([*_defaults(options), *options, *(["-m", _WORKER] if is_ours else []), *target])
    return _run(torchrun, settled, is_verb=not is_script)


def _refuse(message: str) -> NoReturn:
    raise InputError("args.unknown", f"lw launch: {message}", fix="lw launch --help")


def _defaults(options: Sequence[str]) -> list[str]:
    """Return torchrun's defaults: one process per GPU unless the options say otherwise."""
    names = {option.partition("=")[0] for option in options}
    if names & {"-n", "--nproc-per-node", "--nproc_per_node"}:
        return []
    import torch

    return ["--nproc-per-node", "gpu"] if torch.cuda.is_available() else []


def _with_folder(target: list[str], options: Any) -> list[str]:
    """Return the command of a run with an explicit folder, so that a restart finds it again."""
    if target[0] not in _TRAINING or int(options.max_restarts) == 0 or folder_in(target) is not None:
        return target
    if options.nnodes not in ("1", "1:1"):
        what = "a run on several machines that may be restarted needs an explicit folder"
        fix = f"--output_dir {runs_root() / new_run_id('launch')}"
        raise InputError("args.value", what, saw=["all machines must see the folder"], fix=fix)
    from loopwright.cli.train import folder_given

    given = folder_given(target[1:]) if target[0] == "train" else None
    return [*target, "--output_dir", str(given or runs_root() / new_run_id("launch"))]


def folder_in(argv: Sequence[str]) -> Path | None:
    folders = [folder for folder in split_off(argv, "--out", "--output_dir")[0] if folder is not None]
    return Path(folders[-1]) if folders else None


def _run(torchrun: Any, settled: Any, *, is_verb: bool) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        num_processes = torchrun.determine_local_world_size(settled.nproc_per_node)
        fewest, most = torchrun.parse_min_max_nnodes(settled.nnodes)
    except (ValueError, RuntimeError) as error:
        raise InputError("args.value", f"lw launch: {error}", fix="-n 2") from error
    if num_processes < 1:
        raise InputError("args.value", f"-n {num_processes} starts nothing", fix="-n 2")
    if num_processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, but without its warning
    if fewest != most:
        # When machines join or leave, workers restart without a new run number: they then need a separate store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[_LAUNCHER_VARIABLE], os.environ[BEGUN_VARIABLE] = str(os.getpid()), str(time.time())
    with _kept_codes(is_verb) as codes:
        try:
            torchrun.run(settled)
        except SignalException as error:
            return exit_codes.INTERRUPTED if error.sigval == signal.SIGINT else exit_codes.PREEMPTED
        except ChildFailedError as error:
            return _left_code(codes) or _code_of(error)
        return _left_code(codes) or exit_codes.DONE


@contextlib.contextmanager
def _kept_codes(is_verb: bool) -> Iterator[Path | None]:
    """Give the processes of a verb a folder for exit codes: torchrun restarts everything that does not exit with 0."""
    if not is_verb:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="loopwright-launch-") as folder:
        os.environ[_CODES_VARIABLE] = folder
        exit_codes.keep_search_path()
        try:
            yield Path(folder)
        finally:
            del os.environ[_CODES_VARIABLE]
            os.environ.pop("PYTHONSAFEPATH", None)


def _left_code(folder: Path | None) -> int | None:
    """Return the exit code left by the last start, preferably from rank 0."""
    left = {} if folder is None else {tuple(map(int, path.name.split("."))): path for path in folder.iterdir()}
    if not left:
        return None
    last = max(attempt for attempt, _ in left)
    return int(left[min(key for key in left if key[0] == last)].read_text())


def _code_of(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        sys.stderr.write(f"rank {rank} was ended by {name}; its output is above\n")
        return 128 - failure.exitcode
    if failure.exitcode not in (exit_codes.INPUT, exit_codes.PREEMPTED):
        sys.stderr.write(f"rank {rank} failed first, with exit code {failure.exitcode}; its output is above\n")
    return failure.exitcode or exit_codes.BUG


class _HeldBack:
    """Standard error of every local rank but the first: held back until the processes have met.

    Earlier errors hit every process, and the first reports them. The error that a verb ends with is always held back.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held: list[str] = []

    def write(self, text: str) -> int:
        self.hold(text)
        if "torch" in sys.modules:
            import torch.distributed

            if torch.distributed.is_initialized():
                self.release()
        return len(text)

    def hold(self, text: str) -> None:
        self._held.append(text)

    def release(self) -> None:
        for text in self._held:
            self._stream.write(text)
        self._held.clear()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def work(argv: list[str]) -> int:
    """Run a verb in one of the processes; after a restart, training resumes the run that the first start began."""
    from loopwright.cli import main

    held = _HeldBack(sys.stderr) if os.environ.get("LOCAL_RANK", "0") != "0" else None
    if held is not None:
        sys.stderr = held
    is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = folder_in(argv) if is_restarted and argv[0] in _TRAINING else None
    if folder is not None:
        with contextlib.suppress(InputError):  # lost before it had a folder
            argv = ["resume", str(find_run(folder.absolute()).path), *exit_codes.words_for_resuming(argv)]
    # Only rank 0 prints.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if exit_codes.is_first() else nowhere):
        code = main(argv)
    is_together = code in exit_codes.TOGETHER and _all_end_with(code)
    if held is not None and not is_together:  # otherwise the first process prints the same
        held.release()
    return exit_codes.DONE if is_together else code


def _all_end_with(code: int) -> bool:
    """Leave an exit code for the launcher; return whether all processes of this machine have: the run is over."""
    folder = os.environ.get(_CODES_VARIABLE)
    if folder is None:
        return False
    attempt, place = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["LOCAL_RANK"]
    Path(folder, f"{attempt}.{place}").write_text(str(code))
    everyone = [Path(folder, f"{attempt}.{each}") for each in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
    deadline = time.monotonic() + _TOGETHER_SECONDS
    while not (is_all := all(path.exists() for path in everyone)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return is_all


if __name__ == "__main__":
    if _LAUNCHER_VARIABLE in os.environ:
        end_with_parent(int(os.environ.pop(_LAUNCHER_VARIABLE)))
    if sys.argv[1].endswith(".py"):  # replaces this process, which still ends with the launcher
        os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
    sys.exit(work(sys.argv[1:]))
