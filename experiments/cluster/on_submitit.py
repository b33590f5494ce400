"""Scan several models as jobs of Slurm, by submitit.

    python -m experiments.cluster.on_submitit MODEL MODEL ... --out DIR [--quick] [--cluster local]

The nodes need this package and see DIR under the same name; logs are beside it, in DIR-logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sinkscope as ss
from experiments.script import run
from sinkscope.app.scan_table import scan_table
from sinkscope.results.console import print_result


def main(models: Sequence[str], *, out: Path, quick: bool = False, cluster: str = "slurm") -> None:
    """Make what the module describes.

    Args:
        cluster: local: processes of this machine.
    """
    import submitit

    executor = submitit.AutoExecutor(f"{out}-logs", cluster=cluster)
    executor.update_parameters(cpus_per_task=1, mem_gb=16, timeout_min=240, name="sinkscope")
    jobs = [executor.submit(ss.scan, model, out=out.absolute() / Path(model).name, quick=quick) for model in models]
    for job in jobs:
        job.exception()  # waits for its end; a model that fails has no card
    print_result(scan_table(out))


if __name__ == "__main__":
    run(main)
