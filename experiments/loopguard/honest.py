"""Monitors of loops on texts whose form repeats and whose content does not: tables, data, code, refrains, lists, logs.

    python -m experiments.loopguard.honest [--model NAME]

A model reads each text token by token, and every variant of the monitor watches the tokens and the model's
probabilities; none of them should fire. The texts are in `experiments/loopbench/honest.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.script import run
from sinkscope.bench.tasks.loops import first_alarm
from sinkscope.files.records import read_records
from sinkscope.loops.text.signals import MAX_NEW
from sinkscope.opening.load import load

FILE = Path(__file__).parents[1] / "loopbench/honest.jsonl"
DETECTORS = ("repeats", "full", "p1", "ttr", "cr", "stall", "tail")
"""Variants of the monitor, see `MonitorSettings.variant`."""


@dataclass(frozen=True)
class HonestText:
    """A text that repeats legitimately.

    Attributes:
        id: Name of the text, such as "table-csv".
        kind: "table", "data", "code", "refrain", "list" or "log".
        prompt: The text.
    """

    id: str
    kind: str
    prompt: str


def honest_texts() -> list[HonestText]:
    """The texts, sorted by name; each has a few hundred words."""
    return read_records(FILE, HonestText, "the file of honest texts")


def alarms(model: Any, texts: Sequence[HonestText], detectors: Sequence[str] = DETECTORS) -> dict[str, list[str]]:
    """Names of the texts on which each variant of the monitor fires."""
    fired: dict[str, list[str]] = {name: [] for name in detectors}
    most = min(MAX_NEW, model.config.max_position_embeddings)
    for text in texts:
        ids = model.tokenizer(text.prompt, verbose=False)["input_ids"][:most]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float()
        top1 = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
        for name in detectors:
            if first_alarm(ids[1:], top1, name) is not None:
                fired[name].append(text.id)
    return fired


def main(*, model: str | None = None) -> None:
    texts = honest_texts()
    for name, fired in alarms(load(model), texts).items():
        print(f"{name}: {len(fired)} of {len(texts)} {', '.join(fired)}")


if __name__ == "__main__":
    run(main)
