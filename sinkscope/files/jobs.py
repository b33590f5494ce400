"""Run jobs in this process or on Ray workers of one or several machines; results are stored as they arrive."""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress
from sinkscope.files.store import Folder

PATIENCE = 600.0
"""Seconds after which all Ray workers must have started."""
CLUSTER_ANSWERS_WITHIN = 10.0
"""Seconds."""


@runtime_checkable
class Job(Protocol):
    """Records that are made together, all or none. Jobs are pickled for other processes."""

    @property
    def keys(self) -> Sequence[Hashable]:
        """Keys of its records."""
        ...

    @property
    def size(self) -> int:
        """How much of the progress it is."""
        ...


J = TypeVar("J", bound=Job)
J_ = TypeVar("J_")
R_ = TypeVar("R_", covariant=True)
P = TypeVar("P", bound="Pool[Any, Any]")  # typing.Self is refused by the shape checks of the tests


@dataclass
class Tally:
    """How much of the work is done.

    Attributes:
        what: Name of the work.
        total: Total amount of work.
        progress: Called as `progress(what, done, total)`.
        done: Amount of work finished.
    """

    what: str
    total: int
    progress: Progress | None = None
    done: int = 0

    def add(self, size: int) -> None:
        """Something was finished."""
        self.done += size
        self.show()

    def show(self, more: int = 0) -> None:
        """Report what is done, with `more` of a job that is not finished yet."""
        if self.progress is not None:
            self.progress(self.what, self.done + more, self.total)


def check_workers(workers: int, address: str | None = None) -> None:
    """Refuse an impossible number of workers before work begins.

    Raises:
        SinkscopeError: There is less than one worker, or Ray is not installed.
    """
    if workers < 1:
        raise SinkscopeError(f"--workers {workers}: at least one process is needed; give 1 or more")
    if workers > 1 or address is not None:
        _ray()


class Pool(Generic[J_, R_]):
    """Runs jobs in this process, or on Ray. Use it in a `with`; Ray workers start with the first jobs.

    The user's own Ray (`ray.init`, or the cluster named by `RAY_ADDRESS`) is used if there is one.

    Args:
        here: Runs a job in this process.
        elsewhere: Called once in each Ray worker (to open the model, say); returns the function that runs jobs
            there. It is pickled. None runs all jobs in this process.
        workers: Number of Ray workers.
        address: Address of a Ray cluster, as for `ray.init`. None: `RAY_ADDRESS`, or a cluster on this machine.
        gpu: Each worker needs a GPU, or a share of one.
        patience: Seconds within which all of them must have started.

    Raises:
        SinkscopeError: Ray is not installed, the cluster does not answer, or workers do not start in time.
    """

    def __init__(
        self,
        here: Callable[[J_], R_],
        elsewhere: Callable[[], Callable[[J_], R_]] | None = None,
        *,
        workers: int = 1,
        address: str | None = None,
        gpu: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self._here, self._elsewhere = here, elsewhere
        self._workers, self._address, self._gpu = workers, address, gpu
        self._patience = patience
        self._actors: list[Any] = []
        self._ours = False

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            _ray().kill(actor)
        if self._ours:
            _ray().shutdown()
        self._actors, self._ours = [], False

    def map(self, jobs: Sequence[J_]) -> Iterator[tuple[int, R_]]:
        """Yield the index and result of each job as jobs finish; in this process, in their order.

        Raises:
            SinkscopeError: Workers do not start, or one ends.
        """
        if self._elsewhere is None:
            for index, job in enumerate(jobs):
                yield index, self._here(job)
            return
        if not jobs:
            return
        ray = _ray()
        try:
            self._start(ray, min(self._workers, len(jobs)))
            pool = ray.util.ActorPool(self._actors)
            yield from pool.map_unordered(lambda actor, index: actor.run.remote(index, jobs[index]), range(len(jobs)))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SinkscopeError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise SinkscopeError(
                f"a Ray worker ended before its work was done ({str(error).splitlines()[0]:.80}): if memory ran out, "
                "give fewer workers; finished parts that are kept in a folder are not done again"
            ) from None

    def _start(self, ray: Any, count: int) -> None:
        """Have `count` workers that have opened what they work on."""
        missing = count - len(self._actors)
        if missing < 1:
            return
        if not self._actors:
            self._join(ray)
        gpus = ray.cluster_resources().get("GPU", 0)
        share_of_gpu = 0.0
        if self._gpu and gpus:
            share_of_gpu = 1 / math.ceil(count / gpus)
        worker = ray.remote(num_cpus=1, num_gpus=share_of_gpu)(_Worker)
        threads = _threads(ray, count, self._ours)
        actors = [worker.remote(threads) for _ in range(missing)]
        self._actors += actors
        opener = ray.put(self._elsewhere)
        try:
            ray.get([actor.open.remote(opener) for actor in actors], timeout=self._patience)
        except ray.exceptions.GetTimeoutError:
            free = ray.available_resources()
            raise SinkscopeError(
                f"{missing} of {count} Ray workers did not start within {self._patience:.0f} s (free: "
                f"{free.get('CPU', 0):.0f} CPUs, {free.get('GPU', 0):.2g} GPUs): give fewer workers, or wait until the "
                "machines are less busy"
            ) from None

    def _join(self, ray: Any) -> None:
        """Join a cluster, or start one on this machine."""
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        address = self._address or os.environ.get("RAY_ADDRESS")
        where: dict[str, Any] = {"num_cpus": self._workers, "include_dashboard": False}
        if address:
            where = {"address": address}
        try:
            _reach(address)
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
        except (OSError, ValueError, RuntimeError) as error:
            raise SinkscopeError(
                f"--ray {address}: no Ray cluster can be joined there ({str(error).splitlines()[0]:.80}); start one "
                "with `ray start --head`, or leave out --ray"
            ) from None
        self._ours = True


def finish(pool: Pool[J, Sequence[Any]], jobs: Sequence[J], kept: Folder[Any], tally: Tally) -> None:
    """Run the jobs that have missing records, and store their records as they arrive.

    Args:
        pool: Runs a job and returns its records.
        jobs: All jobs; finished ones are not run again.
        kept: Where records are found and stored.
        tally: How much is done.
    """
    left: list[J] = []
    finished = 0
    for job in jobs:
        if all(key in kept.records for key in job.keys):
            finished += job.size
        else:
            left.append(job)
    if len(left) < len(jobs):
        tally.add(finished)
    for index, records in pool.map(left):
        kept.append(records)
        tally.add(left[index].size)


class _Worker:
    """One Ray worker, with what it works on."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._run: Callable[[Any], Any] | None = None

    def open(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        """Prepare what the jobs work on. Errors here reach the caller, unlike errors in `__init__`."""
        self._run = make()
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(self._threads)

    def run(self, index: int, job: Any) -> tuple[int, Any]:
        assert self._run is not None
        return index, self._run(job)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SinkscopeError(
            'more than one worker needs Ray: pip install "sinkscope[ray]", or leave out --workers'
        ) from None


def _threads(ray: Any, count: int, ours: bool) -> int:
    """CPU threads of a worker: this machine's or the cluster's, divided equally."""
    torch = sys.modules.get("torch")
    if ours and torch:
        cpus = torch.get_num_threads()
    else:
        cpus = int(ray.cluster_resources().get("CPU", 1))
    return max(1, cpus // count)


def _reach(address: str | None) -> None:
    """Check that something listens there, because Ray itself would retry for many minutes.

    Raises:
        OSError: Nothing answers.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CLUSTER_ANSWERS_WITHIN).close()
