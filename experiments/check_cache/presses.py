"""Five presses of kvpress under the checks, in the environment of kvpress, which needs another release of transformers.

    python -m venv KVPRESS
    KVPRESS/bin/pip install kvpress==0.5.5 torch==2.13.0 jaxtyping lazy-loader pydantic rich click
    KVPRESS/bin/python -m experiments.check_cache.presses

The presses are used as kvpress uses them: on models with full attention that it lists as tested. `table` runs this
script and puts its lines beside the other caches.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import torch
from kvpress import CriticalKVPress, ExpectedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers.utils import logging

from sinkscope.conformance.checks import CHECKS
from sinkscope.conformance.kit import Kit


def serves(model) -> None:
    if model.config.model_type != "llama":
        raise NotImplementedError("kvpress is tested on other architectures")


def press(make):
    """A factory of a press, by the share that it throws away."""

    def factory(model, share):
        serves(model)
        return make(1 - share)(model)

    return factory


PRESSES = {
    "kvpress StreamingLLMPress": press(lambda ratio: StreamingLLMPress(ratio, n_sink=4)),
    "kvpress SnapKVPress": press(lambda ratio: SnapKVPress(ratio, window_size=4, kernel_size=3)),
    "kvpress TOVAPress": press(lambda ratio: TOVAPress(ratio)),
    "kvpress ExpectedAttentionPress": press(lambda ratio: ExpectedAttentionPress(ratio, n_future_positions=32)),
    "kvpress CriticalKVPress": press(lambda ratio: CriticalKVPress(SnapKVPress(ratio, window_size=4, kernel_size=3))),
}


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = []
    for name, factory in PRESSES.items():
        started = time.process_time()
        kit = Kit(name, factory)
        checks = []
        for check, one in CHECKS.items():
            found = kit.checked(one)
            checks.append({"check": check, "verdict": found.verdict, "seen": found.seen})
        rows.append({"cache": name, "checks": checks, "seconds": time.process_time() - started})
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"rows": rows, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
