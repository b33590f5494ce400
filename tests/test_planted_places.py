"""Planted places, readers and marking heads: first the plain model is shown to be as planted, then it is measured."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from covering import covering, slow
from organisms.places import (
    FIRST,
    Group,
    Places,
    PlacesModel,
    attention_of,
    mask_of,
    read,
    untrue,
    views,
    without,
)
from organisms.placing import PLACES
from organisms.planted_places import places
from organisms.readers import marking_lost

from sinkscope.results.notation import neuron_name
from sinkscope.results.parts import Neuron
from sinkscope.sinks.circuit.circuit import MARKS, Circuit, circuit
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.repetition.repeat import repeat

FAST = (
    ("alibi", "falcon"),
    ("convolution_marks", "lfm2"),
    ("silent_twin", "neox"),
    ("two_sinks", "llama"),
    ("idle_key_bias", "gpt2"),
)
CASES = covering([(name, family) for name, families in PLACES.items() for family in families], FAST)


def options(m: PlacesModel, folder) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text(m.text(), encoding="utf-8")
    return {"tokenizer": m.tokenizer, "text": text, "bos": None if m.truth.has_bos else False}


def traced(m: PlacesModel, folder) -> Circuit:
    return circuit(m.model, max_repeats=8, **options(m, folder))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_planted_model_is_what_it_is_said_to_be(name, family):
    assert untrue(places(name, family)) == []


def needed(group: Group, truth: Places) -> tuple[str, ...]:
    """Names of the parts that a planted group needs, as a circuit gives them."""
    names = []
    for part in group.needs:
        if isinstance(part, tuple) and truth.makers:
            names.append(neuron_name(*part))
        elif isinstance(part, tuple):
            names.append(f"MLP of layer {part[0]}")
        elif isinstance(part, int):
            names.append("token embedding")
        elif not (part == "position embedding" and "spike" in group.needs):
            names.append(part)
    makes_all = set(names) == {neuron_name(*site) for sites in truth.makers for site in sites}
    makes_its_own = bool(group.at) and frozenset(group.needs) in truth.makers
    if (truth.makers and makes_all) or makes_its_own or set(group.needs) & set(truth.marks.get(FIRST, ())):
        return ("spike",)
    return tuple(sorted(names))


GROUPS = [
    ("decoy_spike", "neox"),
    slow("hybrid", "lfm2"),
    slow("alibi", "falcon"),
    ("farthest_key", "neox"),
    slow("farthest_key", "qwen2"),
    slow("idle_key_bias", "gpt2"),
    ("two_sinks", "llama"),
    slow("two_sinks", "gemma2"),
    slow("two_sinks", "gpt2"),
    slow("decorative_head", "neox"),
    slow("decorative_head", "mixtral"),
]


@pytest.mark.parametrize(("name", "family"), GROUPS)
def test_heads_are_grouped_by_what_they_need_and_marks_and_neurons_are_named(name, family, tmp_path):
    m = places(name, family)
    found = traced(m, tmp_path)
    said = []
    for sink in found.sinks:
        for one in sink.groups:
            if one.claim is not None and one.claim.verdict == "needed":
                said.append((tuple(sorted(map(str, one.needs))), set(one.heads)))
                said.append((("spike",) if one.by_spike else (), set(one.heads)))
    for group in m.truth.groups:
        heads = {f"L{layer}.H{head}" for layer, head in group.heads}
        needs = needed(group, m.truth)
        assert (needs, heads) in said, (needs, heads, said)
    marks = {claim.place: tuple(map(str, claim.subject)) for claim in found.of(MARKS)}
    for place, planted in m.truth.marks.items():
        words = "the first token" if place == FIRST else f"{m.tokenizer.decode([place])!r} wherever it stands"
        assert marks[words] == planted
    named = set(re.findall(r"L\d+\.H\d+|key bias|(?:token|position) embedding", found.conclusion()))
    assert not named & set(m.truth.decoys)
    if m.truth.marks:
        makers = m.truth.makers[0] if m.truth.makers else ()
        made = {str(part) for claim in found.of("makes") for part in claim.subject if isinstance(part, Neuron)}
        assert made >= {neuron_name(*site) for site in makers}


def test_the_heads_that_mark_a_token_suffice_and_none_of_them_is_idle(tmp_path):
    m = places("silent_twin", "neox")
    found = heads(m.model, count=6, **options(m, tmp_path))
    sites = tuple(site for makers in m.truth.makers for site in makers if neuron_name(*site) in found.neurons)
    everyone = set(range(len(views(m.model).layers[0].q)))
    for word, serves in zip(found.tokens, found.serves, strict=True):
        serving = set(np.flatnonzero(serves).tolist())
        token = m.tokenizer.convert_tokens_to_ids(word)
        for left_out in [set(), *({head} for head in serving)] if serving else []:
            replaced = tuple(everyone - serving | left_out)
            assert (marking_lost(m, 0, replaced, token, sites) <= 0.5) == (not left_out), (word, serving, left_out)


def test_what_stays_of_attention_is_that_of_plain_hooks(tmp_path):
    m = places("all_specials", "neox")
    found = find_sinks(m.model, max_repeats=8, **options(m, tmp_path))
    (group,), (truth,) = found.sinks[0].groups, m.truth.groups
    ids = m.ids(length=48)
    with without(m, ("spike",)):
        left = attention_of(read(m.model, ids)[0], truth.heads, mask_of((FIRST,), ids))
    intact = attention_of(read(m.model, ids)[0], truth.heads, mask_of((FIRST,), ids))
    assert group.claim is not None
    assert group.claim.value == pytest.approx(sum(left) / sum(intact), abs=0.03)


def test_attention_says_where_the_spike_is_that_it_does_not_look_at(tmp_path):
    m = places("second_special", "llama")
    found = repeat(m.model, read="attention", max_repeats=4, **options(m, tmp_path))
    said = str(found)
    assert "no position has a high norm" not in said
    said = repeat(m.model, read="probability", max_repeats=4, answer_after=[2], new_tokens=2, **options(m, tmp_path))
    assert "no causal neuron of a spike at the first token to patch" in said.conclusion()
