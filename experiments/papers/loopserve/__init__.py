"""Li et al. 2025: LoopServe."""

from experiments.papers.artefact import Paper

LOOPSERVE = Paper(
    "loopserve",
    "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues",
    (),
)
