"""An executor whose every call runs in a spawned process of its own, so that one that is killed takes no other with it.

A fork after torch was used hangs, and a killed worker of `concurrent.futures.ProcessPoolExecutor` breaks the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from sinkscope.errors import SinkscopeError

TRIES = 2
"""How often a call is begun whose process ends without an answer."""


class Processes:
    """A pool of spawned processes. Use it in a `with`, whose end stops what still runs.

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
        self._running: set[SpawnProcess] = set()
        self._closing = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        for process in list(self._running):
            process.kill()
        self._threads.shutdown(cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin a call as soon as a worker is free. If its process is killed, it is begun once more.

        Args:
            function: A function that the process can import.
            arguments: What it is called with; pickled.
        """
        return self._threads.submit(self._answer, function, arguments)

    def _answer(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What the function returns in a process of its own."""
        code: int | None = None
        for _ in range(TRIES):
            if self._closing:
                break
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, function, arguments))
            process.start()
            self._running.add(process)
            theirs.close()  # the end of the process is then the end of the pipe
            try:
                return ours.recv()
            except EOFError:
                process.join()
                code = process.exitcode
            finally:
                process.join()
                self._running.discard(process)
                ours.close()
        raise RuntimeError(f"its process ended {TRIES} times with code {code}, before it had a result")


def _work(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """What a process does: it calls the function, and sends what that returns."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started it, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send(function(*arguments))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody waits for the result, and the folder is locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
