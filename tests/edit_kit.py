"""Edits of every kind."""

from __future__ import annotations

import torch
from kv_kit import prompts

from sinkscope import Ablate, Add, LoopGuard, LoopServe, SinkPatch
from sinkscope.kv import H2O, TOVA, Observe, SnapKV, StreamingLLM

IDS, MASK = prompts([9, 6], 4)
PATCH = SinkPatch(sites=[(1, 3)], calibrated={(1, 3): 0.5})
EDITS = {
    "ablate": Ablate(layer=1, neurons=[3, 5]),
    "heads": Ablate(heads=[(0, 1)]),
    "add": Add(torch.ones(32), "blocks.0.hook_resid_post"),
    "patch": PATCH,
    "up": SinkPatch(sites=[(0, 2)], calibrated={(0, 2): 0.5}, site="up"),
    "observe": Observe(lambda rows: None, last=1),
    "streaming": StreamingLLM(budget=6, first=2),
    "h2o": H2O(budget=6),
    "tova": TOVA(budget=6),
    "snapkv": SnapKV(budget=6, window=2),
    "guard": LoopGuard(budget=64),
    "loopserve": LoopServe(budget=6, shortest=0, interval=2, first=0),
    "patch and h2o": PATCH | H2O(budget=6),
}
