"""Planted places, readers and marking heads: what is measured is what was planted."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from attack_kit import text_file
from covering import slow
from organisms import HardModel, hard
from organisms.build import FIRST
from raw_kit import attention
from sinkscope.sinks.circuit.circuit import MARKS, circuit

from sinkscope.results.parts import Neuron
from sinkscope.sinks.find.find import find_sinks

pytestmark = pytest.mark.few_texts


def options(m: HardModel, folder) -> dict[str, Any]:
    return {"tokenizer": m.tokenizer, "text": text_file(m, folder)}


def names_of(heads) -> frozenset[str]:
    return frozenset(f"L{layer}.H{head}" for layer, head in heads)


GROUPS = [
    ("decoy_spike", "neox"),
    slow("hybrid", "lfm2"),
    ("key_bias", "neox"),
    slow("key_bias", "qwen2"),
    ("two_sinks", "llama"),
    slow("two_sinks", "gemma2"),
    slow("two_sinks", "gpt2"),
    slow("two_sinks", "neox"),
    slow("two_sinks", "mixtral"),
    ("decorative_head", "neox"),
    slow("decorative_head", "mixtral"),
    slow("second_special", "llama"),
    slow("all_specials", "qwen3"),
    slow("two_delimiters", "llama"),
    slow("two_delimiters", "gpt2"),
]


@pytest.mark.parametrize(("name", "family"), GROUPS)
def test_heads_are_grouped_by_what_they_need_and_marks_and_neurons_are_named(name, family, tmp_path):
    m = hard(name, family)
    found = circuit(m.model, max_repeats=8, **options(m, tmp_path))
    said = []
    for sink in found.sinks:
        for one in sink.groups:
            if one.claim is not None and one.claim.verdict == "needed":
                needs = ("spike",) if one.by_spike else tuple(map(str, one.claim.subject))
                said.append((needs, frozenset(map(str, one.heads))))
    for group in m.truth.groups:
        assert (group.needs, names_of(group.heads)) in said, said
    marks = {claim.place: tuple(map(str, claim.subject)) for claim in found.of(MARKS)}
    for place, planted in m.truth.marks.items():
        words = "the first token" if place == FIRST else f"{m.tokenizer.decode([place])!r} wherever it stands"
        assert marks[words] == planted
    named = set(re.findall(r"L\d+\.H\d+|key bias|(?:token|position) embedding", found.conclusion()))
    assert not named & set(m.truth.decoys)
    if m.truth.marks:
        made = {part.site for claim in found.of("makes") for part in claim.subject if isinstance(part, Neuron)}
        assert made >= m.truth.sets[0]


@pytest.mark.parametrize(("name", "same", "makers"), [("two_delimiters", True, 1), ("two_sinks", False, 2)])
def test_it_is_said_which_sinks_have_the_same_heads_and_makers(name, same, makers, tmp_path):
    m = hard(name, "llama")
    found = find_sinks(m.model, max_repeats=8, **options(m, tmp_path))
    if same:  # each planted head attends to both tokens, by the model itself
        ids = m.natural(40, 48)
        rows = attention(m.model, ids)
        for token, group in product(m.truth.sink, m.truth.groups):
            there = ids == token
            for layer, head in group.heads:
                given = rows[layer, :, head] * there[:, None] * ~there[:, :, None]
                assert float(given.sum(-1).max()) > 0.3
    first, second = [{head for group in sink.groups for head in group.heads} for sink in found.sinks[:2]]
    assert (first == second) is same
    assert len({claim.subject for sink in found.sinks for claim in sink.claims}) == makers
