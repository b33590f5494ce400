"""How long a thread waits for a model that another thread holds: not without a word, and not for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from datetime import datetime
from types import FrameType

from sinkscope.errors import SinkscopeError, warn

LIMIT = "SINKSCOPE_WAIT"
"""Variable of the environment: the most seconds that a thread waits for a model."""
DEFAULT_LIMIT = 3600.0
SILENT = 10.0  # seconds without a word
_WAITING: dict[threading.Thread, threading.Thread] = {}
"""The threads that wait for a model, each with the thread that holds it."""


class Wait:
    """One thread's wait for a model that other threads hold; made when it begins."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.begun = time.monotonic()
        self.limit = _limit()
        self.has_warned = False
        self.circles = 0

    def check(self, holder: threading.Thread, since: float) -> None:
        """Say who holds the model, or refuse to wait longer. It is called again and again while the thread waits.

        Args:
            holder: The thread that holds the model.
            since: `time.time()` when it began to.

        Raises:
            SinkscopeError: The holder waits for this thread, or the time is up.
        """
        _WAITING[threading.current_thread()] = holder
        seconds = time.monotonic() - self.begun
        clock = datetime.fromtimestamp(since).strftime("%H:%M:%S")
        holds = f"thread {holder.name!r} has held {self.model} since {clock}"
        if _waits_for_this_thread(holder):
            self.circles += 1
        else:
            self.circles = 0
        if self.circles > 1:  # seen twice: a join that had just ended would be gone
            raise SinkscopeError(
                f"{holds}, and waits for this thread, which waits for the model: leave the `with` there before it "
                "joins this thread, or do the work in that thread"
            )
        if seconds >= self.limit:
            raise SinkscopeError(
                f"{holds}, and this thread has waited {self.limit:g} s for it: leave the `with` there, or set {LIMIT} "
                "to more seconds"
            )
        if seconds >= SILENT and not self.has_warned:
            self.has_warned = True
            warn(f"{holds}; this thread waits until it leaves the model, at most {self.limit:g} s ({LIMIT})")

    def end(self) -> None:
        """Note that the thread no longer waits."""
        _WAITING.pop(threading.current_thread(), None)


def _limit() -> float:
    """The most seconds to wait."""
    value = os.environ.get(LIMIT, "")
    if not value:
        return DEFAULT_LIMIT
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise SinkscopeError(f"{LIMIT}={value!r}: expected a number of seconds")
    return limit


def _waits_for_this_thread(thread: threading.Thread) -> bool:
    """Whether a thread waits for this one without an end, or for a thread that does."""
    waiter: threading.Thread | None = thread
    passed = set[threading.Thread]()
    while waiter is not None and waiter not in passed:
        if waiter is threading.current_thread():
            return True
        passed.add(waiter)
        waiter = _WAITING.get(waiter) or _joined_by(waiter)
    return False


def _joined_by(thread: threading.Thread) -> threading.Thread | None:
    """The thread for whose end, or whose result in a pool, a thread waits without an end; None if it does not."""
    frame = _frame_of(thread)
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        waits = values.get("timeout", 0) is None
        if waits and code is threading.Thread.join.__code__:
            return values.get("self")
        if waits and code is Future.result.__code__:
            return _thread_of(values.get("self"))
        frame = frame.f_back
    return None


def _thread_of(future: object) -> threading.Thread | None:
    """The thread of a pool that works on a future."""
    for thread in threading.enumerate():
        frame = _frame_of(thread)
        while frame is not None:
            is_work = frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("thread.py")
            if is_work and getattr(frame.f_locals.get("self"), "future", None) is future:
                return thread
            frame = frame.f_back
    return None


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """What a thread executes."""
    return sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
