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
            command="repeat --quantity attention",
            cost=Minutes(0.2, 3),
        ),
        Artefact(
            "fig5",
            ("Fig. 5", "Theorem 4.1"),
            "Does the first attention layer put out the same at a late copy as at the token alone?",
            module="first_attention",
            cost=Minutes(0.1, 0.3),
        ),
    ),
)
