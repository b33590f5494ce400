"""Xu et al. 2026: LoopGuard."""

from experiments.papers.artefact import Artefact, Minutes, Paper

RUNS = "--runs {out}/runs"
"""The artefacts that read the same outputs find them here; what one of them costs is what those before it left."""

LOOPGUARD = Paper(
    "loopguard",
    "LoopGuard: Breaking Self-Reinforcing Attention Loops via Dynamic KV Cache Intervention",
    (
        Artefact(
            "fig2",
            ("Fig. 2 a", "Fig. 2 b"),
            "Does diversity fall in two stages, and do larger models survive longer?",
            module="collapse",
            words=RUNS,
            cost=Minutes(0.7, 6.4),
        ),
        Artefact(
            "table1",
            ("Table 1", "Fig. 1 b", "Eq. 5", "Eq. 6", "Eq. 7"),
            "Which caches and guards leave loops, and does H2O amplify them?",
            module="methods",
            words=f"{RUNS} --methods whole,streaming,h2o,random,printed,default",
            cost=Minutes(1.3, 13.7),
        ),
        Artefact(
            "table2",
            ("Table 2",),
            "Does the guard harm answers to questions about long contexts?",
            module="two_wiki",
            cost=Minutes(0.5, 6.5),
        ),
        Artefact(
            "table3",
            ("Table 3", "Fig. 4 a", "Fig. 4 b", "Eq. 10", "Eq. 11"),
            "How often and when does each guard act, and which loops does it leave?",
            module="methods",
            words=f"{RUNS} --methods whole,always,p1,printed,default",
            cost=Minutes(0.7, 5.8),
        ),
        Artefact(
            "fig3",
            ("Fig. 3",),
            "How does the guard work?",
            reason="a diagram, nothing to measure: its parts are fig5, appb and table3",
        ),
        Artefact(
            "fig1",
            ("Fig. 1 a", "Fig. 1 c"),
            "Does a loop need its copies in the cache?",
            command="why-loop",
            cost=Minutes(0.2, 1.3),
        ),
        Artefact(
            "overhead",
            ("Section 5.4",),
            "What does a token cost under a guard that raises no alarm?",
            module="overhead",
            cost=Minutes(0.4, 6.2),
        ),
        Artefact(
            "lemma1",
            ("Lemma 1", "App. A", *(f"Eq. {number}" for number in (*range(1, 5), *range(12, 19)))),
            "Do scores repeat from period to period, and does the loop forget noise in its cache?",
            module="lemma",
            words=RUNS,
            cost=Minutes(0.1, 0.6),
        ),
        Artefact(
            "appb",
            ("App. B", "Eq. 8", "Eq. 9"),
            "Do the printed thresholds part loops from honest answers?",
            module="thresholds",
            words=RUNS,
            cost=Minutes(0.5, 5.1),
        ),
        Artefact(
            "appc",
            ("App. C",),
            "What are LoopBench's prompts?",
            reason="needs LongBench's MultiNews and NarrativeQA: `python -m experiments.loopbench.build` makes both "
            "sets of their files",
        ),
        Artefact(
            "appd",
            ("App. D",),
            "What does one loop look like under every method, beside the detector's values?",
            module="side_by_side",
            words=RUNS,
            cost=Minutes(0.1, 0.3),
        ),
        Artefact(
            "fig5",
            ("Fig. 5", "App. E"),
            "Do heads lock onto a loop?",
            command="barcode",
            cost=Minutes(0.2, 0.7),
        ),
    ),
)
