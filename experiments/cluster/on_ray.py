"""Scan several models on a Ray cluster.

    python -m experiments.cluster.on_ray MODEL MODEL ... --out DIR [--quick]

Every node needs this package and sees DIR under the same name. Ray starts a scan again when its node is lost.
"""

from collections.abc import Sequence
from pathlib import Path

import sinkscope as ss
from experiments.script import run
from sinkscope.app.scan_table import scan_table
from sinkscope.results.console import print_result


def main(models: Sequence[str], *, out: Path, quick: bool = False) -> None:
    """Make what the module describes."""
    import ray

    ray.init(log_to_driver=False)
    scan = ray.remote(num_cpus=1, max_retries=1)(ss.scan)
    tasks = [scan.remote(model, out=out.absolute() / Path(model).name, quick=quick) for model in models]
    ray.wait(tasks, num_returns=len(tasks))
    print_result(scan_table(out))


if __name__ == "__main__":
    run(main)
