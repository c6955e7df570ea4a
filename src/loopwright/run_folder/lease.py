"""Who owns a run folder: a lock that dies with its process, and a lease.json that says who holds it.

The lock is a POSIX record lock on `.lock` (`fcntl.lockf`). It ends with its process at once, also under SIGKILL, and
forked children do not have it: with `flock` they would, and a killed run would stay locked until its last worker is
gone. Two properties of such locks shape this module:

* They belong to a process, so they do not keep out a second owner in the same process: a registry does. It is keyed
  by the process id, so that a forked child does not mistake its parent's lease for its own.
* Closing *any* descriptor of the file, in the process that has the lock, gives the lock up. So nothing but this module
  may open `.lock`, and here it is opened only after the registry was asked. A child that exits or closes its copy
  gives up only what the child has, which is nothing.

The lock may not reach other hosts, and some file systems have none: lease.json covers these. It names an incarnation
(one holding of the lease) and carries a heartbeat, which a thread writes while the owner is busy with one long thing:
an evaluation, a save, a batch. A commit asks `still_ours` first, so that an owner that was wrongly given up for dead
cannot spoil what its successor writes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import platform
import shlex
import threading
import time
import uuid
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from loopwright.errors import ConfigError, LoopwrightError
from loopwright.run_folder.files import fsync_folder, make_folder, open_regular, read_bytes, read_json, write_json

LEASE: Final = "lease.json"
LOCK: Final = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT
_SETTLE_SECONDS = 1.0  # how long the process with the lock may take to write its name into lease.json
_STALE_SECONDS = 60.0
_HEARTBEATS_PER_STALE = 6
_LOOKS_PER_STALE = 3  # how often the thread catches up on a missed heartbeat
_SHORTEST_LOOK_SECONDS = 0.05

_logger = logging.getLogger("loopwright")

# (device, inode, process) of each held folder. dict.setdefault is atomic: no lock that a fork could leave taken.
_held: dict[tuple[int, int, int], Lease] = {}


class LeaseError(LoopwrightError):
    """The run folder belongs to another process (`owner`, if known), or no longer to this one."""

    def __init__(self, message: str, owner: Owner | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """The content of lease.json."""

    incarnation: str  # differs each time a lease is held
    host: str  # the machine's name
    pid: int  # the process on it
    boot_id: str  # the machine's start, so that a process id from before a reboot means nothing; empty if unknown
    # When the process started, in clock ticks since the boot, so that a process id that was given out again means
    # nothing; 0 if unknown.
    process_start: int
    started_at: float  # when the lease was taken, in seconds since 1970
    heartbeat: float  # when the owner was last known to be alive, in seconds since 1970
    phase: str = ""  # outside the training loop, what the owner does
    namespace: str = ""  # in which the process id is valid; empty if unknown

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


class Lease:
    """Ownership of a run folder, which is created if missing; acquired by the main process before anything is written.

    As a context manager it acquires and releases itself. An owner on another host is presumed dead if its heartbeat is
    `stale_seconds` old. `problem` is the error of the last heartbeat, None if it was written. A lease with `yields`
    gives way to the next one of the same process, which `is_continued` then. `last_saved` is for the error.
    """

    def __init__(
        self, folder: str | Path, *, stale_seconds: float = _STALE_SECONDS, yields: bool = False, phase: str = ""
    ) -> None:
        self.problem: OSError | None = None
        self.yields = yields
        self.last_saved: str | None = None
        self._folder = Path(folder)
        self._path = self._folder / LEASE
        self._stale_seconds = stale_seconds
        self._owner: Owner | None = None
        self._key = (0, 0, 0)
        self._descriptor = -1
        self._next_heartbeat = math.inf
        self.is_continued = False
        self._phase = phase
        self._previous: Owner | None = None
        self.loss: LeaseError | None = None  # a heartbeat found the folder moved, deleted or taken over
        self._writing = threading.RLock()  # never acquired in a forked child, where nobody would release it
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()

    def acquire(self) -> Owner | None:
        """Take the folder at the start of a run; return the dead previous owner, None if the last one released it.

        Raises:
            LeaseError: a live process owns it, maybe this one; the message has its pid and host.
            ConfigError: it is a file.
        """
        try:
            import fcntl  # noqa: F401 - here, so that everything but a lease works where it does not exist
        except ImportError as error:
            raise LeaseError(
                f"{self._folder} cannot be locked: {platform.system()} has no POSIX record locks, which the "
                "checkpoints of a run need. Train without checkpoints, or on Linux, macOS or WSL."
            ) from error
        try:
            make_folder(self._folder)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"{self._folder} cannot be a run folder: it, or one of its parents, is a file. Choose another one."
            ) from None
        found = os.stat(self._folder)
        key = found.st_dev, found.st_ino, os.getpid()
        earlier = _held.get(key)
        self.is_continued = earlier is not None and earlier.yields
        if earlier is not None and self.is_continued:
            earlier.release()
        # Before .lock is opened: closing it again would release the lock that this process already holds.
        if key in _held or _held.setdefault(key, self) is not self:
            raise LeaseError(f"{self._folder} is in use by this process, pid {os.getpid()} on host {platform.node()}.")
        try:
            self._descriptor = open_regular(self._folder / LOCK, _LOCK_FLAGS)
            is_locked = self._take_lock()
            stale_seconds = self._stale_seconds if is_locked else math.inf
            previous = earlier._previous if earlier is not None else _read_owner(self._path, stale_seconds)
            if previous is not None and earlier is None and self._may_be_alive(previous, is_locked):
                raise LeaseError(
                    f"{self._folder} is in use by {_describe(previous)}. Wait for it to end, or stop it. If you are "
                    f"sure that it has ended, delete {self._path} and try again.",
                    previous,
                )
            now = time.time()
            me = (platform.node(), os.getpid(), _boot_id(), _process_start(os.getpid()))
            self._owner = Owner(uuid.uuid4().hex, *me, now, now, self._phase, _namespace())
            write_json(self._path, asdict(self._owner))
        except BaseException:
            self._owner = None
            self._close()
            del _held[key]
            raise
        self._key, self._previous = key, previous
        self.loss = None
        self._next_heartbeat = time.monotonic() + self._stale_seconds / _HEARTBEATS_PER_STALE
        self._has_ended.clear()
        self._thread = threading.Thread(target=self._keep_alive, name="loopwright lease", daemon=True)
        self._thread.start()
        return previous

    def heartbeat(self) -> None:
        """Show other hosts that the owner is alive; called at every update, and cheap unless due.

        Between calls, a thread of the lease does the same. A write error does not stop the run: see `problem`. After a
        LeaseError, the run must end without writing anything: another process owns the folder.
        """
        if self._owner is None or self._key[2] != os.getpid():
            return
        if self.loss is None:
            if time.monotonic() < self._next_heartbeat:
                return
            with self._writing:
                self._beat()
        if self.loss is not None:
            raise self.loss

    def _beat(self) -> None:
        if self._owner is None or time.monotonic() < self._next_heartbeat:  # the other thread was faster
            return
        self._next_heartbeat = time.monotonic() + self._stale_seconds / _HEARTBEATS_PER_STALE
        try:
            if not self.still_ours():
                text = f"{self._folder} no longer belongs to this process: another run took it over"
                self.loss = LeaseError(text)
                return
            self._owner = replace(self._owner, heartbeat=time.time())
            write_json(self._path, asdict(self._owner))
        except LeaseError as error:
            self.loss = error
        except OSError as error:
            if self.problem is None:
                _logger.warning("cannot write %s: %s; training continues", self._path, error)
            self.problem = error
        else:
            self.problem = None

    def _keep_alive(self) -> None:
        """Write heartbeats while the owner is too busy, until the lease is released or lost."""
        period = max(self._stale_seconds / _LOOKS_PER_STALE, _SHORTEST_LOOK_SECONDS)
        while self.loss is None and not self._has_ended.wait(period):
            with self._writing:
                self._beat()

    def still_ours(self) -> bool:
        """Return whether this process owns the folder; required before each commit.

        False before `acquire`, after `release`, in a forked child, and once another process took the folder over.

        Raises:
            LeaseError: the folder was moved, deleted or replaced; the message has its new path if there is one.
        """
        if self._owner is None or self._key[2] != os.getpid():
            return False
        try:
            owner = _read_owner(self._path)
        except NotADirectoryError:
            owner = None
        except LeaseError:  # damaged; nobody writes that, and the next heartbeat replaces it
            owner = self._owner
        mine = self._owner.incarnation, self._owner.started_at  # damage may have changed one of them
        is_named = owner is not None and bool({owner.incarnation, owner.started_at}.intersection(mine))
        try:
            is_in_place = os.path.samestat(os.lstat(self._folder / LOCK), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            is_in_place = is_named and self._folder.is_dir()  # only .lock was deleted
        # A process that takes over a folder leaves .lock in place, even when it is done.
        if is_in_place or self._current_path() == Path(os.path.realpath(self._folder)):
            return is_named
        raise self._moved_error()

    def _current_path(self) -> Path | None:
        """Return where the owned folder is now; None if it was deleted, or the system does not report it."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))  # of .lock
        except OSError:
            return None
        return path.parent if path.exists() else None

    def _moved_error(self) -> LeaseError:
        moved, saved = self._current_path(), self.last_saved
        what = "deleted, replaced, or moved to another disk" if moved is None else f"moved to {moved}"
        lost = "no checkpoint was saved in it" if saved is None else f"its last checkpoint is {saved}"
        fix = (
            f"lw resume {shlex.quote(str(moved))}"
            if moved is not None and saved
            else "put the folder back, or start the run again"
        )
        text = f"{self._folder} was {what} while a run wrote to it; {lost}, and the updates since then are lost"
        return LeaseError(text, code="disk.write", fix=fix)

    def release(self) -> None:
        """Release the folder; called at the end of a run. Idempotent, and a no-op in a forked child."""
        if self._owner is None or self._key[2] != os.getpid():
            return
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()  # a heartbeat about to be written would bring lease.json back
            self._thread = None
        try:
            if self.still_ours():
                self._path.unlink(missing_ok=True)
                fsync_folder(self._folder)
        except LeaseError:
            if (moved := self._current_path()) is not None:
                with contextlib.suppress(OSError):
                    (moved / LEASE).unlink()  # this process no longer writes there
        except OSError as error:  # the end of this process frees it as well
            _logger.warning("cannot remove %s: %s", self._path, error)
        finally:
            self._owner = None
            self._close()
            _held.pop(self._key, None)

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _take_lock(self) -> bool:
        """Lock the file; return False if the file system has no locks. Raise if another process holds it."""
        import fcntl

        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    _logger.warning("%s has no file locks: only %s guards it", self._folder, LEASE)
                    return False
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            owner = _read_owner(self._path)
            # lease.json may still name the previous owner: the process with the lock is about to write it.
            if (owner is not None and _runs(owner)) or time.monotonic() > deadline:
                text = f"{self._folder} is in use by {_describe(owner)}."
                raise LeaseError(f"{text} Wait for it to end, stop it, or use another folder.", owner)
            time.sleep(0.02)

    def _may_be_alive(self, owner: Owner, is_locked: bool) -> bool:
        """Return whether the owner in lease.json must be presumed alive, though nobody else has the lock."""
        if _runs(owner):
            return True
        boot_id = _boot_id()
        is_fresh = time.time() - owner.heartbeat < self._stale_seconds
        is_same_host = owner.host == platform.node()
        if owner.boot_id == boot_id if owner.boot_id and boot_id else is_same_host:
            # This machine. Its processes would have been seen, except those of another container, which has another
            # host name or namespace: there the lock decides.
            return is_fresh and not (is_locked or _is_visible(owner))
        return is_fresh and not is_same_host

    def _close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def live_owner(folder: Path) -> Owner | None:
    """Return the live process that trains in a folder, according to its lease; for observers."""
    try:
        owner = _read_owner(folder / LEASE)
    except (LeaseError, OSError):
        return None
    if owner is None:
        return None
    if _is_visible(owner):
        return owner if owner.pid == os.getpid() or _runs(owner) else None
    return owner if time.time() - owner.heartbeat < _STALE_SECONDS else None


def _read_owner(path: Path, stale_seconds: float = math.inf) -> Owner | None:
    """Return the owner in lease.json; None for a damaged file that is stale, or of this machine, if any may be."""
    try:
        content = read_json(path)
        if content is None:
            return None
        kinds = {"str": str, "int": int, "float": float}
        named = [field for field in fields(Owner) if field.name in content or field.default is MISSING]
        return Owner(**{field.name: kinds[str(field.type)](content[field.name]) for field in named})
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        is_old = time.time() - os.lstat(path).st_mtime >= stale_seconds
        # On this machine the lock decides.
        if is_old or (stale_seconds < math.inf and (_boot_id() or LEASE).encode() in read_bytes(path)):
            return None
        raise LeaseError(
            f"{path} does not name the owner of the folder: {error!r}. If it has none, delete the file."
        ) from None


def _describe(owner: Owner | None) -> str:
    return f"{owner} (last heartbeat {time.time() - owner.heartbeat:.0f} s ago)" if owner else "an unknown process"


def _runs(owner: Owner) -> bool:
    """Return whether the owner is certainly another live process of this machine."""
    is_here = owner.boot_id == _boot_id() and owner.pid != os.getpid()
    return is_here and owner.process_start > 0 and _process_start(owner.pid) == owner.process_start


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _is_visible(owner: Owner) -> bool:
    """Return whether this process sees the processes where the owner is."""
    return owner.host == platform.node() and owner.namespace in ("", _namespace()) and owner.process_start > 0


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _process_start(pid: int) -> int:
    """Return the start time of a live process; 0 if there is none, or the system does not report it."""
    try:
        # The name is in parentheses and may contain anything; the state is the first field after it.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A killed process is a zombie until its parent reaps it.
    return 0 if values[0] in "ZX" else int(values[19])
