"""Scan several models on a Ray cluster.

    python -m experiments.cluster.on_ray MODEL MODEL ... --out DIR [--quick]

Every node needs this package and sees DIR under the same name. Ray starts a scan again when its node is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sinkscope as ss
from experiments.script import run
from sinkscope.results.console import print_result


class OnRay:
    """Ray as an executor. A call is a task on one core, with one thread of torch."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        """Begin a call as soon as a core is free."""
        import ray

        task = ray.remote(num_cpus=1, max_retries=1)(function).remote(*arguments)
        return SimpleNamespace(result=partial(ray.get, task))


def main(models: Sequence[str], *, out: Path, quick: bool = False) -> None:
    """Make what the module describes."""
    import ray

    ray.init(log_to_driver=False)
    print_result(ss.scan_many(models, out.absolute(), OnRay(), quick=quick))


if __name__ == "__main__":
    run(main)
