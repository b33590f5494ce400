"""Li et al. 2025: LoopServe."""

from experiments.papers.artefact import Artefact, Minutes, Paper

LOOPSERVE = Paper(
    "loopserve",
    "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues",
    (
        Artefact(
            "fig4",
            ("Obs. 4", "Fig. 2 c", "Fig. 4 a", "Fig. 4 b"),
            "Which window of queries finds the tokens that the answer attends to?",
            module="answer_windows",
            cost=Minutes(1, 8),
        ),
    ),
)
