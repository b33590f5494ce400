"""Scan several models as jobs of Slurm, by submitit.

    python -m experiments.cluster.on_submitit MODEL MODEL ... --out DIR [--quick] [--cluster local]

The nodes need this package and see DIR under the same name; logs are beside it, in DIR-logs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import submitit

import sinkscope as ss
from sinkscope.results.console import print_result

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cluster", default="slurm", help="local: processes of this machine")
    given = parser.parse_args()
    executor = submitit.AutoExecutor(f"{given.out}-logs", cluster=given.cluster)
    executor.update_parameters(cpus_per_task=1, mem_gb=16, timeout_min=240, name="sinkscope")
    print_result(ss.scan_many(given.models, given.out.absolute(), executor, quick=given.quick))
