"""End this process with its parent, also if the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_LOOK_SECONDS = 0.5
SUPERVISED_VARIABLE = "LOOPWRIGHT_SUPERVISED"  # set in a process that is restarted when it dies
BEGUN_VARIABLE = "LOOPWRIGHT_BEGUN"  # when the process that restarts this one began, in seconds since 1970


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends: at once on Linux, by a thread that looks twice a second elsewhere.

    The kernel sends its signal when the parent's *thread* ends that started this process, so that has to be the main
    one. The request outlives an `exec`, and a forked child does not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    elif sys.platform != "win32":
        threading.Thread(target=_watch, args=(parent,), name="loopwright-parent", daemon=True).start()
    if sys.platform != "win32" and os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
