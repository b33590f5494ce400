"""No two commands contradict each other: claims about the same subject, outcome and place have no opposite verdicts."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
from attack_kit import setup_of, text_file
from conclusion_kit import contradictions
from covering import covering
from organisms import HARD, hard, organism
from sinkscope.sinks.circuit.circuit import circuit

from sinkscope.measure import Setup
from sinkscope.results.claims import Claim
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.patch.make import patch_make
from sinkscope.sinks.repetition.repeat import repeat

pytestmark = pytest.mark.few_texts

KINDS = [(name, families[0], 1) for name, families in HARD.items()]
CASES = [("organism", "llama", 3), ("organism", "mixtral", 1), *KINDS]
FAST = [("organism", "llama", 3), ("redundant_pair", "llama", 1), ("no_norm", "llama", 1)]


def claims_of(setup: Setup, **options: Any) -> list[Claim]:
    """What the commands claim of one open model."""
    claims = [*find_sinks.on(setup, **options).claims, *circuit.on(setup, **options).claims]
    claims += heads.on(setup, count=2).claims
    claims += repeat.on(setup, ablate=True, **options).claims
    claims += attack.on(setup, lengths=[2], sequences=2).claims
    claims += patch_make.on(setup, pieces=2, length=16, **options).claims
    return claims


@pytest.mark.parametrize(("name", "family", "seed"), covering(CASES, FAST))
def test_commands_agree(name, family, seed, tmp_path):
    o: Any = organism(family, seed) if name == "organism" else hard(name, family, seed)
    text = text_file(o, tmp_path, 16)
    setup = setup_of(o, text=text)
    claims = claims_of(setup, max_repeats=8)
    assert claims or name in ("learned_logits", "sharp")  # nothing to remove there
    assert contradictions(claims) == []
    for claim in claims:
        assert len(claim.contrasts) >= 2 and claim.draws >= 1 and claim.place
        assert all(isfinite(value) for value in (claim.value, *(contrast.value for contrast in claim.contrasts)))
