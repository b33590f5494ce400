"""One thread steers a model at a time.

A block belongs to the thread that entered it, and acts on calls of that thread and of threads that have entered no
block on the same decoder, such as streamers and workers. Blocks of one thread nest. A second thread that enters a block
is refused at once, or waits if it asked to. What sinkscope enters for itself (a measurement, `ss.generate`) acts on its
own thread alone and waits for others of its kind. A thread that has ended holds nothing. A block may be left in another
thread than it was entered in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from sinkscope.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Hold:
    """A thread's hold on a model, from entry to exit of a block.

    Attributes:
        thread: The thread.
        what: What it entered, in words.
        confined: Whether it acts on calls of this thread alone.
        number: Number of the block that acts; None if nothing does.
    """

    thread: threading.Thread
    what: str
    confined: bool
    number: int | None


def this_thread(what: str) -> Hold:
    """Return the hold of what measures in this thread, and acts on nothing itself."""
    return Hold(threading.current_thread(), what, True, None)


_HOLDS: WeakKeyDictionary[nn.Module, list[Hold]] = WeakKeyDictionary()
_CHANGED = threading.Condition()
"""Guards the holds, and tells those who wait that one has ended or that a call has."""
_DEAD = 0.5  # seconds after which whoever waits looks whether the thread that holds the model still lives


@contextmanager
def held(decoder: nn.Module, hold: Hold, name: str, *, wait: bool = False) -> Iterator[None]:
    """Context manager in which a thread steers a model.

    Args:
        decoder: The model's decoder: the same whatever is around it.
        hold: Who steers it.
        name: The model's name.
        wait: Whether to wait while another thread does.

    Raises:
        UnsupportedError: Another thread steers it.
    """
    with _CHANGED:
        while (other := _other(decoder, hold.thread)) is not None:
            if not wait and not (hold.confined and other.confined):
                raise UnsupportedError(
                    f"{name} is inside a `with` ({other.what}) of thread {other.thread.name!r}, and one thread steers "
                    "a model at a time: leave it there first, enter one block around both, or wait for it with "
                    ".on(model, wait=True)"
                )
            _CHANGED.wait(_DEAD)
        _HOLDS[decoder] = [*holds_on(decoder), hold]  # a new list: others read it without the lock
    try:
        yield
    finally:
        with _CHANGED:
            _HOLDS[decoder] = [other for other in _HOLDS[decoder] if other is not hold]
        tell_waiting()


def holds_on(decoder: nn.Module) -> list[Hold]:
    """Return the holds on a model's decoder."""
    return _HOLDS.get(decoder, [])


def acts(decoder: nn.Module, hold: Hold) -> bool:
    """Return whether what a hold stands for acts on calls that begin now in this thread."""
    me = threading.current_thread()
    if me is hold.thread:
        return True
    if hold.confined:
        return False
    for other in holds_on(decoder):
        if other.thread is me:
            return False
    return True


def blocks_here(decoder: nn.Module) -> list[int]:
    """Return the numbers of the blocks that act on calls of a decoder which begin now in this thread."""
    numbers: list[int] = []
    for hold in holds_on(decoder):
        if hold.number is not None and acts(decoder, hold):
            numbers.append(hold.number)
    return numbers


def _other(decoder: nn.Module, thread: threading.Thread) -> Hold | None:
    """A hold of another thread that still lives."""
    for hold in holds_on(decoder):
        if hold.thread is not thread and hold.thread.is_alive():
            return hold
    return None


def wait_for_calls(threads: Mapping[int, threading.Thread]) -> None:
    """Wait until the calls of other threads have ended; each is taken out of the mapping, by its number, as it ends."""
    me = threading.current_thread()
    with _CHANGED:
        while any(thread is not me and thread.is_alive() for thread in list(threads.values())):
            _CHANGED.wait(_DEAD)


def tell_waiting() -> None:
    """Let whoever waits look again."""
    with _CHANGED:
        _CHANGED.notify_all()
