"""Xu et al. 2026: LoopGuard."""

from experiments.papers.artefact import Artefact, Minutes, Paper

LOOPGUARD = Paper(
    "loopguard",
    "LoopGuard: Breaking Self-Reinforcing Attention Loops via Dynamic KV Cache Intervention",
    (
        Artefact(
            "fig2",
            ("Fig. 2 a", "Fig. 2 b"),
            "Does diversity fall in two stages?",
            module="collapse",
            words="--runs {out}/runs",
            cost=Minutes(1, 1),
        ),
        Artefact(
            "table1", ("Table 1", "Fig. 1 b"), "Does?", module="caches", words="--runs {out}/runs", cost=Minutes(1, 1)
        ),
        Artefact(
            "table3",
            ("Table 3", "Fig. 4 a", "Fig. 4 b"),
            "How often?",
            module="interventions",
            words="--runs {out}/runs",
            cost=Minutes(1, 1),
        ),
        Artefact("appb", ("App. B",), "x", module="thresholds", words="--runs {out}/runs", cost=Minutes(1, 1)),
        Artefact("appd", ("App. D",), "x", module="side_by_side", words="--runs {out}/runs", cost=Minutes(1, 1)),
        Artefact(
            "lemma1",
            ("Lemma 1",),
            "Do scores?",
            module="lemma",
            words="--runs {out}/runs",
            cost=Minutes(1, 1),
        ),
    ),
)
