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
from importlib.metadata import version

import torch
from kvpress import CriticalKVPress, ExpectedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers.utils import logging

from experiments.check_cache.verdicts import row_of


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
    rows = [row_of(name, factory) for name, factory in PRESSES.items()]
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"rows": rows, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
