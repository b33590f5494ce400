"""An executor whose every call runs in a spawned process of its own, so that one that is killed takes no other with it.

A fork after torch was used hangs, and a killed worker of `concurrent.futures.ProcessPoolExecutor` breaks its pool, so
each call has a pool of one worker.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from sinkscope.errors import SinkscopeError

TRIES = 2
"""How often a call is begun whose process ends without an answer."""


class Processes:
    """Spawned processes, one for each call. Use it in a `with`, whose end waits for those that still run.

    Args:
        workers: How many calls run at a time, each in a process with one thread of torch.
    """

    def __init__(self, workers: int) -> None:
        if multiprocessing.parent_process() is not None:
            raise SinkscopeError(
                "a worker began to scan as well, because it imports the script that started it: put what the script "
                "does under `if __name__ == '__main__':`"
            )
        self._threads = ThreadPoolExecutor(workers)  # each waits for one process at a time
        self._closing = threading.Event()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin a call as soon as a worker is free. If its process is killed, it is begun once more.

        Args:
            function: A function that the process can import.
            arguments: What it is called with; pickled.
        """
        return self._threads.submit(self._answer, function, arguments)

    def _answer(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What the function returns in a process of its own; at the end none is begun again."""
        for _ in range(TRIES):
            if self._closing.is_set():
                break
            context = multiprocessing.get_context("spawn")
            with suppress(BrokenProcessPool), ProcessPoolExecutor(1, context, _begin) as pool:
                return pool.submit(function, *arguments).result()
        raise RuntimeError(f"its process ended {TRIES} times before it had a result (killed, perhaps for its memory)")


def _begin() -> None:
    """What a process does first."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody waits for the result, and the folder is locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
