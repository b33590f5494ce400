"""Edits of several kinds."""

from __future__ import annotations

from kv_kit import prompts

from sinkscope import Ablate, LoopGuard, LoopServe, SinkPatch
from sinkscope.kv import H2O, Observe, SnapKV

IDS, MASK = prompts([9, 6], 4)
EDITS = {
    "ablate": Ablate(layer=1, neurons=[3, 5]),
    "observe": Observe(lambda rows: None, last=1),
    "snapkv": SnapKV(budget=6, window=2),
    "guard": LoopGuard(budget=64),
    "loopserve": LoopServe(budget=6, shortest=0, interval=2, first=0),
    "patch and h2o": SinkPatch(sites=[(1, 3)], calibrated={(1, 3): 0.5}) | H2O(budget=6),
}
