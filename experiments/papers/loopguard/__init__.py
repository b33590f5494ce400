"""Xu et al. 2026: LoopGuard."""

from experiments.papers.artefact import Paper

LOOPGUARD = Paper(
    "loopguard",
    "LoopGuard: Breaking Self-Reinforcing Attention Loops via Dynamic KV Cache Intervention",
    (),
)
