"""What every conclusion keeps to: at most 30 words, and one number with its control; and which claims contradict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sinkscope.results.claims import Claim

OPPOSITE = {"needed": "not shown", "not shown": "needed", "sufficient": "needed"}
CONDITIONS = r"heaviest [\d.]+%| in \d+% of (?:all )?texts|\([^()]*\)(?! take)"  # where something holds, and asides


def check_size(conclusion: str):
    """Conditions (the share of texts, asides in brackets) are no part of the finding."""
    assert conclusion.strip() and len(conclusion.split()) <= 30, (len(conclusion.split()), conclusion)
    shares = re.findall(r"-?\d[\d.]*%", re.sub(CONDITIONS, "", conclusion))
    assert len(shares) <= 2, (shares, conclusion)
    assert not re.search(
        r"\bnan\b|-0(\.0+)?%|  |(?<![\w.,])(?<!the )1 (tokens|repetitions|layers|neurons|heads|words)\b", conclusion
    ), conclusion


def key(claim: Claim) -> tuple[Any, ...]:
    """What two claims have in common that speak of the same thing."""
    return (frozenset(claim.subject), claim.outcome.kind, claim.place)


def contradictions(claims: Sequence[Claim]) -> list[tuple[Claim, Claim]]:
    """Pairs of claims about the same subject, outcome and place with opposite verdicts."""
    pairs: list[tuple[Claim, Claim]] = []
    for number, claim in enumerate(claims):
        for other in claims[:number]:
            if key(claim) == key(other) and OPPOSITE.get(claim.verdict) == other.verdict:
                pairs.append((other, claim))
    return pairs
