"""Stop a model that takes too long to build, whatever the entries of its config are called."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

MOST_MODULES = 20_000  # five times as many as the largest default config of transformers has
_MOST_SECONDS = 3  # of CPU time; the slowest default config of transformers takes half a second


class BuildLimitError(BaseException):
    """A model was stopped while it was built. No `except Exception` on the way catches it."""

    def __init__(self, limit: str = f"{_MOST_SECONDS} seconds of CPU time to build") -> None:
        super().__init__(f"it describes a model of more than {limit}, which is the limit")


@contextmanager
def limited(most_modules: int = MOST_MODULES) -> Iterator[None]:
    """Raise a BuildLimitError in this thread if the block creates too many modules, or computes for too long."""
    from torch.nn.modules.module import register_module_module_registration_hook

    thread, ending, is_over, num_created = threading.get_ident(), threading.Event(), False, 0
    clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
    seconds = time.process_time if clock_of is None else partial(time.clock_gettime, clock_of(thread))

    def watch() -> None:
        spent, last = 0.0, seconds()
        while not ending.wait(0.1) and not is_over:
            now = seconds()
            # The first model of its kind is imported, which can take longer than the limit.
            spent, last = spent + (0.0 if _is_importing(thread) else now - last), now
            if spent > _MOST_SECONDS:  # again and again: a weak reference or `__del__` may have swallowed the last one
                error = ctypes.py_object(BuildLimitError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    def count(*created: Any) -> None:
        nonlocal num_created
        num_created += threading.get_ident() == thread
        if num_created > most_modules and not is_over:
            raise BuildLimitError(f"{most_modules:,} modules")

    watcher = threading.Thread(target=watch, daemon=True)
    hook = register_module_module_registration_hook(count)
    try:
        watcher.start()
        yield
    finally:
        while not is_over or watcher.is_alive():
            try:
                is_over = True  # before anything that the watcher can interrupt
                ending.set()
                watcher.join()
                for _ in range(100):  # if the watcher was late: Python raises its error at the end of a pass
                    pass
            except BuildLimitError:
                continue
        hook.remove()


def _is_importing(thread: int) -> bool:
    frame = sys._current_frames().get(thread)  # documented, in spite of its name
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
