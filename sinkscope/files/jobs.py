"""Run jobs in this process or on Ray workers of one or several machines; results are stored as they arrive."""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sinkscope.errors import SinkscopeError
from sinkscope.files.progress import Progress, silent
from sinkscope.files.store import Folder

CLUSTER_ANSWERS_WITHIN = 10.0
"""Seconds."""


class Job(Protocol):
    """Records that are made together, all or none. Jobs are pickled for other processes."""

    @property
    def keys(self) -> Sequence[Hashable]:
        """Keys of its records."""
        ...


def check_workers(workers: int) -> None:
    """Refuse an impossible number of workers before work begins.

    Raises:
        SinkscopeError: There is less than one worker, or Ray is not installed.
    """
    if workers < 1:
        raise SinkscopeError(f"workers={workers}: at least one process is needed; give 1 or more")
    if workers > 1:
        _ray()


@dataclass(frozen=True)
class Workers:
    """Ray workers that run jobs. The user's own Ray (`ray.init`, or `RAY_ADDRESS`) is used if there is one.

    Attributes:
        open: Called once in each worker (to open the model, say); returns the function that runs jobs there. It is
            pickled.
        count: Number of workers.
        gpu: Each worker needs a GPU, or a share of one.
    """

    open: Callable[[], Callable[[Any], Any]]
    count: int
    gpu: bool = False

    def run(self, jobs: Sequence[Any], store: Callable[[int, Any], None]) -> None:
        """Run the jobs, and call `store` with the index and result of each as it finishes.

        Raises:
            SinkscopeError: The cluster does not answer, or a worker ends.
        """
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            self._join(ray)
        actors: list[Any] = []
        count = min(self.count, len(jobs))
        try:
            there = ray.cluster_resources()
            share_of_gpu = 0.0
            if self.gpu and there.get("GPU"):
                share_of_gpu = 1 / math.ceil(count / there["GPU"])
            worker = ray.remote(num_cpus=1, num_gpus=share_of_gpu)(Worker)
            actors += [worker.remote(self.open, max(1, int(there["CPU"]) // count)) for _ in range(count)]
            pool = ray.util.ActorPool(actors)
            for index, result in pool.map_unordered(
                lambda actor, index: actor.run.remote(index, jobs[index]), range(len(jobs))
            ):
                store(index, result)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SinkscopeError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise SinkscopeError(
                f"a Ray worker ended before its work was done ({str(error).splitlines()[0]:.80}): if memory ran out, "
                "give fewer workers; finished parts that are kept in a folder are not done again"
            ) from None
        finally:
            for actor in actors:
                ray.kill(actor)
            if ours:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        """Join a cluster, or start one on this machine."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        address = os.environ.get("RAY_ADDRESS", "")
        where: dict[str, Any] = {"address": address}
        if not address:
            where = {"num_cpus": max(self.count, os.cpu_count() or 1), "include_dashboard": False}
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # Ray itself would retry for many minutes
                socket.create_connection((host, int(port)), timeout=CLUSTER_ANSWERS_WITHIN).close()
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
        except (OSError, ValueError, RuntimeError) as error:
            raise SinkscopeError(
                f"RAY_ADDRESS={address}: no Ray cluster can be joined there ({str(error).splitlines()[0]:.80}); start "
                "one with `ray start --head`, or unset RAY_ADDRESS"
            ) from None


class Worker:
    """One Ray worker; it opens what it works on for its first job, because errors in `__init__` reach nobody."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        self._make, self._threads = make, threads
        self._run: Callable[[Any], Any] | None = None

    def run(self, index: int, job: Any) -> tuple[int, Any]:
        """The index of a job, and its records."""
        if self._run is None:
            self._run = self._make()
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(self._threads)
        return index, self._run(job)


def finish(
    work: Callable[[Any], Sequence[Any]],
    jobs: Sequence[Job],
    kept: Folder[Any],
    what: str,
    progress: Progress | None = None,
    workers: Workers | None = None,
) -> None:
    """Run the jobs that have missing records, and store their records as they arrive.

    Args:
        work: Runs a job in this process and returns its records.
        jobs: All jobs; finished ones are not run again.
        kept: Where records are found and stored.
        what: Name of the work, for the progress.
        progress: Called as `progress(what, done, total)`.
        workers: Run the jobs elsewhere, instead of `work`.
    """
    report = progress or silent
    total = sum(len(job.keys) for job in jobs)
    left = [job for job in jobs if not all(key in kept.records for key in job.keys)]
    done = total - sum(len(job.keys) for job in left)
    if done:
        report(what, done, total)

    def store(index: int, records: Sequence[Any]) -> None:
        nonlocal done
        kept.append(records)
        done += len(left[index].keys)
        report(what, done, total)

    if workers is not None and left:
        workers.run(left, store)
        return
    for index, job in enumerate(left):
        store(index, work(job))


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SinkscopeError('more than one worker needs Ray: pip install "sinkscope[ray]", or give one') from None
