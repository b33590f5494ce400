"""Jobs over processes: the same records however many there are, kept as they come; what goes wrong is one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sinkscope.errors import SinkscopeError
from sinkscope.files.jobs import Worker, Workers, check_workers, finish
from sinkscope.files.store import Folder, Keyed


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def keys(self) -> tuple[int, ...]:
        return (self.number,)


@dataclass(frozen=True)
class Squared(Keyed):
    number: int
    value: int
    process: int

    @property
    def key(self) -> int:
        return self.number


def square(job: Square) -> list[Squared]:
    if job.number < 0:
        raise SinkscopeError(f"{job.number} is negative: give another")
    if job.number > 1000:
        os._exit(1)
    return [Squared(job.number, job.number**2, os.getpid())]


def make() -> Callable[[Square], list[Squared]]:
    return square


def cannot_make() -> Callable[[Square], list[Squared]]:
    raise SinkscopeError("there is no such model: give another")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:  # workers import this file, to find what is pickled by its name
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        )
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


def _run(folder: Path | None, numbers: range, workers: Workers | None = None, work: Any = square) -> dict[int, Squared]:
    with Folder(folder, {"power": 2}, Squared) as kept:
        finish(work, [Square(n) for n in numbers], kept, "numbers", workers=workers)
    return {record.number: record for record in kept.records.values()}


def _values(records: dict[int, Squared]) -> dict[int, int]:
    return {number: record.value for number, record in records.items()}


@pytest.mark.slow  # Ray takes its time
def test_workers_make_the_same_records_and_what_goes_wrong_is_one_line(tmp_path: Path, cluster: None):
    one = _values(_run(None, range(9)))
    two = _run(tmp_path / "r", range(6), Workers(make, 2))
    assert _values(two) == {n: value for n, value in one.items() if n < 6}
    assert os.getpid() not in {record.process for record in two.values()}
    whole = _run(tmp_path / "r", range(9))  # goes on from those that are kept
    assert _values(whole) == one
    assert {number for number, record in whole.items() if record.process == os.getpid()} == {6, 7, 8}
    calls: list[Square] = []
    _run(tmp_path / "r", range(9), work=lambda job: calls.append(job) or square(job))
    assert calls == []
    for number, says in ((-1, "-1 is negative: give another"), (1001, "a Ray worker ended before its work was done")):
        with pytest.raises(SinkscopeError, match=says) as refused:
            _run(None, range(number, number + 1), Workers(make, 1))
        assert "\n" not in str(refused.value)


@pytest.mark.slow  # Ray takes its time
def test_workers_that_cannot_begin_are_an_error(cluster: None):
    with pytest.raises(SinkscopeError, match="there is no such model: give another") as refused:
        _run(None, range(1), Workers(cannot_make, 2))
    assert "\n" not in str(refused.value)


def _pickled(workers: Workers, jobs: Sequence[Any], store: Callable[[int, Any], None]) -> None:
    """What Ray does, in this process: all that reaches a worker or comes back is pickled; the last job ends first."""
    pickle = pytest.importorskip("ray.cloudpickle")

    def sent(thing: Any) -> Any:
        return pickle.loads(pickle.dumps(thing))

    actors = [Worker(sent(workers.open), threads=1) for _ in range(workers.count)]
    for i in reversed(range(len(jobs))):
        store(*sent(actors[i % len(actors)].run(i, sent(jobs[i]))))


@pytest.mark.parametrize("over_ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_workers_make_the_same_records_of_a_benchmark(
    over_ray: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Also where a part of the run was made in one process."""
    if over_ray:
        request.getfixturevalue("cluster")
    from bench_kit import task, tiny, untimed  # here, as the workers of the other tests import this file

    from sinkscope.bench.run import run_bench

    model, tokenizer = tiny()
    options: dict[str, Any] = {"batch_size": 2, "tokenizer": tokenizer}
    methods = ["full", "streaming:16", "sampling", "loopguard:64"]
    one = run_bench(model, task(), methods, **options)
    run_bench(model, task(), methods[:1], out=tmp_path / "two", **options)
    if not over_ray:
        monkeypatch.setattr(Workers, "run", _pickled)
    two = run_bench(model, task(), methods, out=tmp_path / "two", workers=2, **options)
    assert untimed(one) == untimed(two)


@pytest.mark.slow  # Ray takes its time
def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pytest.importorskip("ray").shutdown()
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SinkscopeError, match=rf"RAY_ADDRESS={address}: no Ray cluster can be joined there"):
        _run(None, range(2), Workers(make, 1))


def test_less_than_one_worker_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SinkscopeError, match="workers=0: at least one"):
        check_workers(0)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    check_workers(1)
    with pytest.raises(SinkscopeError, match=r"sinkscope\[ray\]"):
        check_workers(2)


def test_progress_counts_what_is_there_already(tmp_path: Path):
    seen: list[tuple[str, int, int]] = []
    for numbers in (range(3), range(5)):
        with Folder(tmp_path / "r", {}, Squared) as kept:
            finish(square, [Square(n) for n in numbers], kept, "n", lambda *p: seen.append(p))
    assert seen == [("n", 1, 3), ("n", 2, 3), ("n", 3, 3), *(("n", d, 5) for d in (3, 4, 5))]


def test_a_second_writer_of_a_folder_is_refused(tmp_path: Path):
    with Folder(tmp_path / "r", {}, Squared, option="--resume"):
        with pytest.raises(SinkscopeError, match=r"--resume .*r is being written by another run"):
            Folder(tmp_path / "r", {}, Squared, option="--resume").__enter__()
