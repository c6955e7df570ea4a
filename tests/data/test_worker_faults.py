"""Workers that die or hang are replaced where they stood, and nobody can tell from the batches."""

import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, _utils, get_worker_info

import toys
from data import loaders
from data.loaders import Noisy, NoisyStream, OwnLoader, seen
from loopwright import Trainer
from loopwright.data import workers
from loopwright.errors import DataError

pytestmark = pytest.mark.usefixtures("no_worker_is_left_behind")


class Large(Noisy):
    """Samples that are sent through the pipe, many times what fits into it."""

    def __getitem__(self, index):
        return bytes([index]) * 300_000


def undisturbed(dataset=None, epoch=0, **kwargs):
    return seen(adopted(Noisy() if dataset is None else dataset, 0, **kwargs).windows(epoch))


def adopted(dataset, num_workers: int, evaluation: bool = False, loader=DataLoader, **kwargs):
    kwargs = kwargs if num_workers else {name: kwargs[name] for name in kwargs if name in ("shuffle", "collate_fn")}
    source = loader(dataset, batch_size=4, num_workers=num_workers, **kwargs)
    return loaders.adopted(source, accumulation=2, evaluation=evaluation)


def pids():
    return sorted(process.pid for process in multiprocessing.active_children())


def send(number: signal.Signals, only_first: bool = True):
    """Return a function that sends a signal to the first worker, or to all of them."""

    def disturb() -> None:
        assert pids()
        for pid in pids()[: 1 if only_first else None]:
            os.kill(pid, number)

    return disturb


kill = send(signal.SIGKILL)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(workers, "_POLL_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def warnings_of_loopwright(caplog):
    caplog.set_level(logging.WARNING, logger="loopwright")
    return caplog


# Dead workers


@pytest.mark.parametrize(("num_workers", "persistent"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_killed_worker_is_replaced_and_the_batches_are_those_of_an_undisturbed_loader(
    quick, caplog, num_workers, persistent
):
    loader = adopted(Noisy(), num_workers, shuffle=True, persistent_workers=persistent)
    for epoch in range(2):
        assert seen(loader.windows(epoch), kill) == undisturbed(epoch=epoch, shuffle=True)
    loader.close()
    assert pids() == []
    assert [record.name for record in caplog.records] == ["loopwright", "loopwright"]
    assert "was killed by SIGKILL: the workers of a data loader are replaced" in caplog.text


def test_a_death_is_noticed_in_about_a_second():
    loader = adopted(Large(), 2, collate_fn=list)
    windows = loader.windows()
    next(windows)
    kill()
    begun = time.monotonic()
    assert len(list(windows)) == 5
    assert time.monotonic() - begun < 4


def test_a_worker_that_is_killed_or_hangs_while_it_sends_is_replaced(quick, caplog):
    expected = undisturbed(Large(), collate_fn=list)
    for disturb in (kill, send(signal.SIGKILL, only_first=False)):
        assert seen(adopted(Large(), 2, collate_fn=list).windows(), disturb) == expected
    assert len(caplog.records) == 2
    assert seen(adopted(Large(), 1, collate_fn=list, timeout=1).windows(), send(signal.SIGSTOP)) == expected


def test_the_pipes_of_workers_are_closed_without_the_garbage_collector():
    loader, seconds = adopted(Noisy(), 2), time.monotonic
    seen(loader.windows())
    gc.collect()
    before, limit = len(os.listdir("/proc/self/fd")), seconds() + 2
    gc.disable()
    seen(loader.windows(1))
    while (left := len(os.listdir("/proc/self/fd"))) > before and seconds() < limit:
        time.sleep(0.05)  # a thread that waits for the workers ends a little later
    gc.enable()
    assert left <= before


def test_workers_that_are_killed_between_epochs_are_replaced(quick, caplog):
    loader = adopted(Noisy(), 2, shuffle=True, persistent_workers=True)
    seen(loader.windows())
    send(signal.SIGKILL, only_first=False)()
    assert seen(loader.windows(1)) == undisturbed(epoch=1, shuffle=True)
    assert len(caplog.records) == 1
    loader.close()


def test_a_killed_worker_of_an_evaluation_is_replaced(quick):
    loader = adopted(Noisy(), 2, evaluation=True, prefetch_factor=3)
    assert seen(loader.windows(), kill) == undisturbed(evaluation=True)


class Leaves(Noisy):
    """Makes its worker process end when a sample is read for the first time."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def __getitem__(self, index):
        if index == 20 and not self.file.exists():
            self.file.touch()
            os._exit(3)
        return super().__getitem__(index)


def test_a_worker_that_ends_by_itself_is_replaced_too(quick, tmp_path, caplog):
    assert seen(adopted(Leaves(tmp_path / "left"), 2).windows()) == undisturbed()
    assert "ended with exit code 3" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_replaced_as_well(context):
    loader = adopted(Noisy(), 1, shuffle=True, multiprocessing_context=context)
    assert seen(loader.windows(), kill) == undisturbed(shuffle=True)


def test_after_three_replacements_within_an_hour_a_death_is_an_error(quick, caplog):
    windows = adopted(Noisy(64), 1).windows()
    with pytest.raises(DataError, match="lost 4 times within an hour.* killed by SIGKILL.* fewer workers or smaller"):
        for _ in range(5):
            next(windows)
            send(signal.SIGKILL, only_first=False)()
    assert len(caplog.records) == 3


def test_a_worker_that_cannot_send_its_batches_ends_instead_of_hanging(quick):
    loader = adopted(Noisy(), 2, collate_fn=lambda samples: threading.Lock(), timeout=20)
    with pytest.raises(DataError, match="4 times within an hour.*ended with exit code 1"):
        seen(loader.windows())


def test_workers_that_cannot_all_be_started_are_ended_without_a_second_error(monkeypatch):
    errors: list = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    start = multiprocessing.process.BaseProcess.start

    def start_one(self) -> None:
        if pids():
            raise OSError("Too many open files")
        start(self)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start_one)
    with pytest.raises(OSError, match="Too many open files"):
        seen(adopted(Noisy(), 2).windows())
    gc.collect()
    assert pids() == [] and errors == []


def test_replacements_of_more_than_an_hour_ago_do_not_count(quick, monkeypatch):
    monkeypatch.setattr(workers, "_REPLACEMENTS_SECONDS", 0.0)
    loader = adopted(Noisy(), 1, persistent_workers=True)
    for epoch in range(5):
        assert seen(loader.windows(epoch), kill) == undisturbed(epoch=epoch)
    loader.close()


# Where the main process is


def die_and_work():
    kill()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        pass


def test_a_death_raises_nothing_in_the_middle_of_other_work(quick):
    before = signal.getsignal(signal.SIGCHLD)
    assert seen(adopted(Noisy(), 2).windows(), die_and_work) == undisturbed()
    assert signal.getsignal(signal.SIGCHLD) is before


def test_nor_does_it_where_a_loader_of_somebody_else_has_set_its_handler(quick, monkeypatch):
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # another test may have set it
    monkeypatch.setattr(_utils.signal_handling, "_SIGCHLD_handler_set", False)
    try:
        windows = adopted(Noisy(), 1).windows()
        first = next(windows)
        list(DataLoader(Noisy(), num_workers=1))
        assert signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
        die_and_work()
        assert seen([first, *windows]) == undisturbed()
        assert seen(adopted(Noisy(), 1).windows(), die_and_work) == undisturbed()
    finally:
        signal.signal(signal.SIGCHLD, before)


# Hung workers


def test_hung_workers_are_replaced_after_the_timeout_of_the_loader(quick, caplog):
    loader = adopted(Noisy(), 2, shuffle=True, timeout=1)
    begun = time.monotonic()
    found = seen(loader.windows(), send(signal.SIGSTOP, only_first=False))
    assert 1 <= time.monotonic() - begun < 6
    assert found == undisturbed(shuffle=True)
    assert "for 1 s" in caplog.text


def test_workers_that_hang_again_and_again_are_an_error_that_names_the_timeout(quick):
    class Stuck(Noisy):
        def __getitem__(self, index):
            time.sleep(60)

    with pytest.raises(DataError, match=r"no batch came from the workers \d+ for 0.2 s.* a longer timeout"):
        list(adopted(Stuck(), 1, timeout=0.2).windows())
    assert pids() == []


@pytest.mark.parametrize("has_lock", [False, True])
def test_closing_a_loader_ends_workers_that_hang_in_an_epoch_that_was_left(has_lock, monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 0.3)
    loader = adopted(Noisy(), 2)
    windows = loader.windows()
    next(windows)
    send(signal.SIGSTOP, only_first=False)()
    if has_lock:  # as if a worker had been stopped while it asked whether to end
        loader._workers._newest()._workers_done_event._cond.acquire(timeout=1)
    begun = time.monotonic()
    loader.close()
    assert pids() == []
    assert time.monotonic() - begun < 5


# Replayed loaders


@pytest.mark.parametrize(
    "make",
    [
        lambda: adopted(NoisyStream(), 2),
        lambda: adopted(NoisyStream(), 1, persistent_workers=True),
        lambda: adopted(Noisy(), 2, loader=OwnLoader, shuffle=True),
        lambda: adopted(Noisy(), 2, loader=OwnLoader, shuffle=True, generator=torch.Generator()),
    ],
    ids=["stream", "stream with living workers", "own loader", "own loader with a generator"],
)
def test_killed_workers_of_a_replayed_loader_are_replaced_and_what_was_used_is_skipped(quick, make, caplog):
    undisturbed = make()
    expected = seen(undisturbed.windows(1))
    undisturbed.close()
    loader = make()
    before = dict(vars(loader.source))
    random.seed(99)
    assert seen(loader.windows(1), kill) == expected
    assert len(caplog.records) == 1
    loader.close()
    assert vars(loader.source) == before


def test_a_data_loader_is_the_users_own_while_an_epoch_is_read():
    loader = adopted(NoisyStream(), 1, worker_init_fn=print)
    before = dict(vars(loader.source))
    for _ in loader.windows():
        assert vars(loader.source) == before


# What a worker does first


class Witness(Noisy):
    """Samples that tell how the process that reads them handles signals, and what its init function did."""

    initialized_as = -1

    def __getitem__(self, index):
        ignored = [signal.getsignal(number) is signal.SIG_IGN for number in self.signals]
        death_signal = ctypes.c_int()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))
        return torch.tensor([*ignored, death_signal.value, self.initialized_as])

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2)


def note_id(worker_id: int) -> None:
    get_worker_info().dataset.initialized_as = worker_id


@pytest.mark.parametrize("loader", [DataLoader, OwnLoader])
def test_a_worker_leaves_signals_to_the_main_process_and_ends_with_it(loader):
    source = loader(Witness(4), batch_size=2, num_workers=2, worker_init_fn=note_id, collate_fn=list)
    if loader is OwnLoader:
        source.collate_fn = torch.stack
    windows = loaders.adopted(source, seed=0).windows()
    death_signal = signal.SIGKILL if sys.platform == "linux" else 0
    for worker_id, window in enumerate(windows):
        for sample in window.pieces[0].batch:
            assert sample.long().tolist() == [1, 1, 1, 1, 0, death_signal, worker_id]


def test_workers_outlive_the_signals_that_end_a_run(caplog):
    def disturb():
        before = pids()
        for number in Witness.signals[:4]:
            send(number, only_first=False)()
        time.sleep(0.1)
        assert pids() == before

    assert seen(adopted(Noisy(), 2).windows(), disturb) == undisturbed()
    assert caplog.records == []


def test_what_a_worker_does_first_can_be_sent_to_one_that_is_not_forked():
    first = pickle.loads(pickle.dumps(partial(workers.init_worker, note_id, True)))
    assert first.args == (note_id, True)


# A main process that ends; it is this module, run as a program


def wait_until_gone(all_pids, seconds):
    """Return those of these processes that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in all_pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Sleepy(Noisy):
    def __getitem__(self, index):
        if index == 40:
            time.sleep(1000)
        return super().__getitem__(index)


def end_by_an_exception():
    """Have the process group signalled, then raise while a worker hangs."""
    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    loader = adopted(Sleepy(), 2)
    windows = loader.windows()
    next(windows)
    before = pids()
    os.killpg(os.getpgid(0), signal.SIGTERM)
    for _ in range(4):  # the next window holds the sample that hangs
        next(windows)
    print(*before, flush=True)
    assert received == [signal.SIGTERM]
    assert pids() == before
    raise RuntimeError("something else went wrong")


def end_by_a_kill():
    """Be killed while workers of each kind run."""
    windows = [adopted(Sleepy(), 1, multiprocessing_context=kind).windows() for kind in ("fork", "forkserver")]
    for each in windows:
        next(each)
    print(*pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def run_as_program(name):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, start_new_session=True)
    return done, [int(pid) for pid in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_script_whose_worker_hangs_ends_at_once_by_an_exception_and_its_workers_with_it():
    begun = time.monotonic()
    done, worker_pids = run_as_program("end_by_an_exception")
    assert "RuntimeError: something else went wrong" in done.stderr
    assert (done.returncode, len(worker_pids)) == (1, 2)
    assert wait_until_gone(worker_pids, 0) == []
    assert time.monotonic() - begun < 15  # most of it is importing torch


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.slow
def test_workers_end_with_a_main_process_that_is_killed():
    done, worker_pids = run_as_program("end_by_a_kill")
    assert (done.returncode, len(worker_pids)) == (-signal.SIGKILL, 2)
    assert wait_until_gone(worker_pids, 3) == []


# A whole run


class Augmented(Noisy):
    def __getitem__(self, index):
        return torch.full((4,), index / self.size) + 0.1 * torch.rand(4), torch.tensor([index % 3 + random.random()])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_whose_workers_are_killed_ends_with_the_weights_of_an_undisturbed_one(quick, persistent):
    def kill_one():
        os.kill(pids()[-1], signal.SIGKILL)
        killed.append(True)

    def after_update(trainer, **kwargs):
        if trainer.progress.update in (3, 8):
            kill_one()

    def in_evaluation(trainer, **kwargs):
        if trainer.progress.update == 6 and len(killed) == 1:
            kill_one()

    def run(*callbacks):
        loading = {"num_workers": 2, "persistent_workers": persistent}
        options = {"train_dataloader_kwargs": loading, "eval_dataloader_kwargs": loading, "cls": Trainer}
        options |= {"eval_dataset": Augmented(24), "gradient_accumulation_steps": 2}
        return toys.trained(callbacks, Augmented(48), 2, model=toys.network(8, dropout=0.5), **options)

    killed = []
    disturbed, whole = run(toys.callback(on_update_end=after_update, on_eval_step_end=in_evaluation)), run()
    toys.assert_same_weights(disturbed, whole)
    assert disturbed.result.metrics == whole.result.metrics
    assert len(killed) == 3
    assert pids() == []


if __name__ == "__main__":
    {"end_by_an_exception": end_by_an_exception, "end_by_a_kill": end_by_a_kill}[sys.argv[1]]()
