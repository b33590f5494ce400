"""What the tests of LoopGuard share: guards that act soon, and tokens fed by hand."""

from __future__ import annotations

from typing import Any

import torch
from kv_kit import decode
from torch import Tensor
from transformers import DynamicCache

from experiments.papers.loopguard.variants import OneSignal
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard

EAGER = OneSignal(signal="tail", window=16, warmup=0, tail_shortest=6, cooldown=8)
"""Fires after two or three copies."""


def eager_guard(**fields: Any) -> LoopGuard:
    """A guard that finds three copies at once."""
    monitor = MonitorSettings(window=64, tail_shortest=12, tail_beyond=0, cooldown=20)
    return LoopGuard(**{"budget": 64, "anchors": 4, "monitor": monitor, **fields})


def feed(model, prompt: Tensor, mask: Tensor, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Prompt at once, then `tokens` `[row step]` one by one; logits at the end of the prompt and after each token."""
    whole = torch.cat([mask, torch.ones_like(tokens)], 1)
    return decode(model, torch.cat([prompt, tokens], 1), whole, prompt.shape[1], cache)
