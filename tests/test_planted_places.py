"""Planted places: first the plain model is shown to be as planted, then the circuit is held against that."""

from __future__ import annotations

import pytest
from covering import covering, slow
from organisms.places import untrue
from organisms.planted_places import PLACES, places

from sinkscope.display.notation import neuron_name
from sinkscope.sinks.first_token.circuit import circuit

FAST = (("alibi", "falcon"), ("half_of_the_heads_each", "gpt2"), ("convolution_marks", "lfm2"))
CASES = covering([(name, family) for name, families in PLACES.items() for family in families], FAST)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_planted_model_is_what_it_is_said_to_be(name, family):
    assert untrue(places(name, family)) == []


def needed(parts, makers) -> tuple[str, ...]:
    """Names of the parts of a planted group, as a circuit gives them."""
    names = []
    for part in parts:
        if isinstance(part, tuple):
            names.append(neuron_name(*part))
        elif not (part == "position embedding" and "spike" in parts):
            names.append(part)
    if set(names) == {neuron_name(*site) for sites in makers for site in sites}:
        return ("spike",)
    return tuple(sorted(names))


GROUPS = [
    ("half_of_the_heads_each", "gpt2"),
    slow("half_of_the_heads_each", "llama"),
    slow("position_or_spike", "gpt2"),
    slow("embedding_half_position_half", "opt"),
    slow("embedding_or_position", "gpt2"),
    slow("key_bias_and_spike", "qwen2"),
    slow("rises_again", "neox"),
    slow("decoy_delimiter", "neox"),
    slow("hybrid_bos", "lfm2"),
    slow("alibi", "bloom"),
    slow("silent_heads", "llama"),
]


@pytest.mark.parametrize(("name", "family"), GROUPS)
def test_heads_are_grouped_by_what_they_need(name, family, tmp_path):
    m = places(name, family)
    text = tmp_path / "text.txt"
    text.write_text(m.text(), encoding="utf-8")
    bos = None if m.truth.has_bos else False
    found = circuit(m.model, tokenizer=m.tokenizer, text=text, bos=bos, max_repeats=8)
    said = [one for sink in (found, *found.later) for one in sink.readers if one.evidence.holds]
    for group in m.truth.groups:
        heads = {f"L{layer}.H{head}" for layer, head in group.heads}
        needs = needed(group.needs, m.truth.makers)
        assert (needs, heads) in [(tuple(sorted(one.needs)), set(one.heads)) for one in said], (needs, heads, said)
