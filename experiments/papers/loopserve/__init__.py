"""Li et al. 2025: LoopServe."""

from experiments.papers.artefact import Artefact, Minutes, Paper

PUBLISHED = "needs published weights of 3B and more, and LongBench: docs/papers/loopserve.md has the commands"
WINDOW = "window=32"
"""Of SnapKV, as in its own runs on LongBench."""


def kept(methods: str, more: str = "") -> str:
    """Return the options of `kept_answers`, of a list of methods."""
    return f"--methods {','.join(methods.split())} {more}".strip()


LOOPSERVE = Paper(
    "loopserve",
    "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues",
    (
        Artefact(
            "fig1",
            ("Obs. 1", "Obs. 2", "Obs. 3", "Fig. 1 a", "Fig. 1 b", "Fig. 1 c", "Fig. 1 d", "Fig. 2 b", "Fig. 6"),
            "How much attention lies on a tenth of the lines, and do two texts or halves share these?",
            command="lines --etas 0.1,0.2,0.3",
            cost=Minutes(0.7, 0.7),
        ),
        Artefact(
            "fig2a",
            ("Fig. 2 a",),
            "What do the maps of two halves look like?",
            reason="a picture of one head: fig1 counts it over all heads",
        ),
        Artefact(
            "fig4",
            ("Obs. 4", "Fig. 2 c", "Fig. 4 a", "Fig. 4 b"),
            "Which window of queries finds the tokens that the answer attends to?",
            module="answer_windows",
            cost=Minutes(1, 16),
        ),
        Artefact(
            "fig2d",
            ("Fig. 2 d", "Fig. 8"),
            "Do methods that choose by the last window answer a question at the beginning, in the middle, at the end?",
            reason="for the recall model, which answers: python -m experiments.bench_figures loopserve_fig2d",
        ),
        Artefact(
            "fig3", ("Fig. 3",), "How do the parts of LoopServe go together?", reason="a diagram, nothing to measure"
        ),
        Artefact(
            "table1",
            ("Table 1", "Fig. 5 b", "Fig. 7"),
            "What do methods and both halves of LoopServe change of a model's answers, by place of the question?",
            module="kept_answers",
            words=kept(
                f"h2o snapkv:{WINDOW} adakv:{WINDOW} streaming a-shape:0.25 tri-shape:0.25 minference "
                "loopserve loopserve-p loopserve-d loopserve:paper"
            ),
            cost=Minutes(1),
        ),
        Artefact(
            "fig9a",
            ("Fig. 5 a", "Fig. 9 a", "Fig. 13"),
            "How long do methods take beside the full cache, and how many tokens do they hold?",
            module="kept_answers",
            words=kept(
                f"snapkv:{WINDOW} adakv:{WINDOW} minference loopserve loopserve-p loopserve-d",
                "--length 768 --dialogues 1 --new 40",
            ),
            cost=Minutes(0.8),
        ),
        Artefact(
            "fig9b",
            ("Fig. 9 b",),
            "Which part of the time do the sample, the search for lines and attention along them take?",
            reason="parts of kernels on a GPU, at up to 131,072 tokens: python -m experiments.gpu.bands",
        ),
        Artefact(
            "fig10a",
            ("Fig. 5 c", "Fig. 10 a"),
            "What does a smaller alpha change of a model's answers?",
            module="kept_answers",
            words=kept(" ".join(f"loopserve-p:alpha={alpha}" for alpha in (0.9, 0.955, 0.99))),
            cost=Minutes(0.7),
        ),
        Artefact(
            "fig10b",
            ("Fig. 5 d", "Fig. 10 b"),
            "What does a smaller budget change of a model's answers?",
            module="kept_answers",
            words=kept(" ".join(f"loopserve-d:{budget}" for budget in (0.0625, 0.125, 0.25, 0.5))),
            cost=Minutes(0.5),
        ),
        Artefact(
            "fig10c",
            ("Fig. 10 c", "Fig. 10 d"),
            "What does it change how often the tokens that are read are chosen again?",
            module="kept_answers",
            words=kept(" ".join(f"loopserve-d:interval={interval}" for interval in (4, 8, 16, 32))),
            cost=Minutes(0.6),
        ),
        Artefact(
            "fig11",
            ("Fig. 11",),
            "Does a larger window of the prompt help SnapKV?",
            module="kept_answers",
            words=kept(" ".join(f"snapkv:window={window}" for window in (6, 12, 24, 48)) + " loopserve-d"),
            cost=Minutes(0.6),
        ),
        Artefact(
            "fig12",
            ("Fig. 12",),
            "Do methods still answer after nine turns?",
            reason="for the recall model, which answers: python -m experiments.papers.loopserve.dialogues turns",
        ),
        Artefact(
            "algorithms",
            ("Algorithm 1", "Algorithm 2", "Algorithm 3"),
            "How are dialogues built from LongBench?",
            reason="programs, no measurement: python -m experiments.papers.loopserve.build SET FILE --out DIALOGUES",
        ),
        Artefact(
            "system",
            ("Algorithm 4", "Algorithm 5", "Algorithm 6"),
            "How are lines and tokens chosen?",
            reason="programs, checked by tests: docs/papers/loopserve.md has the function of each line",
        ),
        Artefact(
            "theorem1",
            ("Theorem 1",),
            "How much dearer are Algorithm 5's lines than the cheapest that hold as much, among all subsets?",
            module="cheapest",
            cost=Minutes(0.3, 0.4),
        ),
        Artefact(
            "table3",
            ("Table 3",),
            "What do methods of a fixed size compute of a prompt, read in a step and hold?",
            module="kept_answers",
            words=kept(
                "a-shape:local=96 tri-shape:local=96 minference:vertical=64:slash=64 streaming:96 snapkv:96 adakv:96 "
                "loopserve:96",
                "--length 640 --dialogues 1 --new 40",
            ),
            cost=Minutes(0.7),
        ),
        Artefact("table2", ("Table 2",), "What do symbols stand for?", reason="notation, nothing to measure"),
        Artefact(
            "table4",
            ("Table 4", "Table 6"),
            "How large are the data sets?",
            reason="counts of published data: experiments.papers.loopserve.build makes as many dialogues and turns",
        ),
        Artefact(
            "table5",
            ("Table 5",),
            "Where do users put questions?",
            reason="counts of LMSYS-Chat-1M, which its owner gives out on request alone, judged by hand",
        ),
        Artefact(
            "table7",
            ("Table 7",),
            "Which settings have the methods?",
            reason="settings: experiments.papers.loopserve.runs.TABLE7 has them as methods of sinkscope bench",
        ),
        Artefact(
            "table8", ("Table 8",), "Does it hold for Llama-3.2-3B?", reason=f"{PUBLISHED}; table1 measures any model"
        ),
    ),
)
