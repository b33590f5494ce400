"""Yona, Shumailov, Hayes and Gandelsman, ICML 2025: Interpreting the Repeated Token Phenomenon in LLMs."""

from experiments.papers.artefact import Artefact, Minutes, Paper

REPEATED_TOKEN = Paper(
    "repeated-token",
    "Interpreting the Repeated Token Phenomenon in Large Language Models",
    (
        Artefact(
            "fig1",
            ("Fig. 1", "Fig. 8"),
            "How much attention do copies of a token get, layer by layer?",
            module="attention",
            cost=Minutes(0.4, 3),
        ),
        Artefact(
            "fig2",
            ("Fig. 2", "Fig. 9", "App. A"),
            "Do copies of a token get the norm of BOS?",
            command="repeat",
            cost=Minutes(0.5, 2.1),
        ),
        Artefact(
            "fig3",
            ("Fig. 3", "Fig. 7"),
            "What is left of the norm of BOS and of copies without the sink neurons?",
            module="ablation",
            cost=Minutes(0.3, 1.4),
        ),
        Artefact(
            "fig4",
            ("Fig. 4",),
            "Does a plane, or one neuron, tell first tokens from later ones after the first attention?",
            module="separability",
            cost=Minutes(0.3, 0.4),
        ),
        Artefact(
            "fig5",
            ("Fig. 5", "Theorem 4.1"),
            "Does the first attention layer put out the same at a late copy as at the token alone?",
            module="first_attention",
            cost=Minutes(0.4, 0.4),
        ),
        Artefact(
            "theorem",
            ("Theorem D.2", "Lemma D.1", "App. D"),
            "Does the residual stream after every layer converge as the proof says, with 1 over the number of copies?",
            module="all_layers",
            cost=Minutes(0.5, 0.8),
        ),
        Artefact(
            "fig6",
            ("Fig. 6",),
            "How many copies does each token of the vocabulary need to become a sink?",
            module="vocabulary",
            cost=Minutes(1.3, 7.5),
        ),
        Artefact(
            "circuit",
            ("Sec. 4.3",),
            "Which heads mark the first token, and what makes a position the sink?",
            command="why-sink",
            cost=Minutes(0.5, 4.5),
        ),
        Artefact(
            "table1",
            ("Table 1",),
            "Which layer and neurons make the norm of BOS, and how many copies does a sink take?",
            module="sink_neurons",
            cost=Minutes(1, 1.4),
        ),
        Artefact(
            "divergence",
            ("Sec. 5",),
            "After how many copies does a model stop repeating?",
            command="repeat --quantity probability",
            cost=Minutes(0.4, 2.4),
        ),
        Artefact(
            "clusters",
            ("Sec. 5.2", "App. B"),
            "Do different tokens of one cluster become sinks without BOS?",
            command="attack",
            cost=Minutes(0.5, 0.9),
        ),
        Artefact(
            "patch",
            ("Sec. 5.3", "Table 2"),
            "Does a patch of the sink neurons repair copies, and what does it cost ordinary text?",
            command="patch --out {stem}.patch",
            cost=Minutes(0.5, 1),
        ),
        Artefact(
            "listing1",
            ("Listing 1",),
            "Does the listing as printed do what the patch with calibrated values does?",
            module="listing",
            cost=Minutes(0.4, 1.9),
        ),
        Artefact(
            "table3",
            ("Table 3", "Sec. 5.1", "App. C"),
            "What does a model answer after many copies, with and without the patch, and is it training text?",
            module="answers",
            cost=Minutes(0.8, 5.6),
        ),
        Artefact(
            "benchmarks",
            ("Table 2, benchmarks",),
            "Does the patch change MMLU, HellaSwag, TruthfulQA, WinoGrande and ARC?",
            reason="needs the data sets: docs/measure/patch.md has the command of lm-evaluation-harness",
        ),
    ),
)
