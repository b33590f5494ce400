"""What rounding costs and what is worth keeping exact: planted neurons and later sinks, and models without a sink."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import hard, organism
from rounding_kit import ByHand, divergence, enlarge, logs_by_hand

from sinkscope.results.parts import sites_of
from sinkscope.sinks.precision.precision import (
    Kept,
    Precision,
    precision,
)

pytestmark = pytest.mark.few_texts

TENSOR = "a8-tensor"
FEW = {"pieces": 4, "length": 48}


def measured(o, folder: Path, **more) -> Precision:
    return precision(o.model, tokenizer=o.tokenizer, text=text_file(o, folder, 60), **FEW | more)


def by_name(result: Precision, scheme: str = TENSOR) -> dict[str, Kept]:
    return {one.kept: one for one in result.rounded if one.scheme == scheme}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@cache
def planted(seed: int):
    """An organism whose sink neurons have large values and small columns."""
    o = organism("llama", seed)
    enlarge(o.model, o.truth.neurons)
    return o


@pytest.fixture(scope="module")
def result(folder):
    return measured(planted(2), folder, schemes=[TENSOR, "a8-token", "kv8"])


# --- what is measured ----------------------------------------------------------------------------------------------


def test_the_planted_neurons_are_the_answer(result):
    o = planted(2)
    kept = by_name(result)
    assert set(sites_of(result.neurons)) == set(o.truth.neurons) and result.layers == (o.truth.sink_layer,)
    assert result.costliest[TENSOR] == (o.truth.sink_layer,)
    for name in ("sink places", "first tokens", "sink neurons", "sink layers", "costliest layers"):
        assert kept[name].regained > 0.75 and kept[name].random < 0.25, name
    assert result.claims[0].place == "held-out text, with sink neurons exact"
    assert kept["sink neurons"].bits - 8 < 0.1 * (kept["sink layers"].bits - 8)
    assert by_name(result, "a8-token")["nothing"].kl < 0.25 * kept["nothing"].kl
    assert "sink neurons" not in by_name(result, "kv8")


def test_the_numbers_are_those_by_hand(result, folder):
    from sinkscope.sinks.held_out import held_out

    o = planted(2)
    setup = setup_of(o, text=folder / "words.txt")
    ids = held_out(setup, 4, 48)
    none, first = torch.zeros_like(ids).bool(), torch.arange(48).eq(0).expand_as(ids)
    exact = logs_by_hand(o.model, ids, ByHand(tokens=none))
    how = ByHand(activations=8, scale="tensor", tokens=none)
    cost, left = (
        divergence(exact, logs_by_hand(o.model, ids, replace(how, tokens=one))).mean() for one in (none, first)
    )
    kept = by_name(result)
    assert kept["nothing"].kl == pytest.approx(float(cost), rel=1e-3) and kept["nothing"].bits == 8
    assert kept["sink places"].regained == pytest.approx(1 - float(left / cost), abs=1e-3)
    assert kept["sink places"].bits == pytest.approx(8 + 8 / 48)
    config, layers = o.model.config, o.model.config.num_hidden_layers
    widths = 3 * config.hidden_size + config.num_attention_heads * config.head_dim
    widths += 2 * config.hidden_size + config.intermediate_size
    assert kept["sink neurons"].bits == pytest.approx(8 + 8 * len(result.neurons) / (widths * layers))
    assert kept["sink layers"].bits == pytest.approx(8 + 8 / layers)


def test_a_later_sink_is_the_answer_and_the_first_tokens_are_not(tmp_path):
    m = hard("two_delimiters", "llama")
    sites = sorted(set().union(*m.truth.sets))
    enlarge(m.model, sites)
    result = precision(m.model, tokenizer=m.tokenizer, text=text_file(m, tmp_path), schemes=[TENSOR], **FEW)
    kept = by_name(result)
    assert sorted(sites_of(result.neurons)) == sites
    assert kept["sink places"].regained > 0.75 and kept["first tokens"].regained < 0.25
    assert kept["sink neurons"].regained > 0.75 and kept["sink neurons"].random < 0.25


@pytest.mark.slow
def test_without_a_sink_nothing_is_called_worth_it(folder):
    o = organism("llama", 0, kind="none")
    result = measured(o, folder)
    assert {one.kept for one in result.rounded} == {"nothing", "first tokens", "costliest layers"}
    assert result.claims[0].verdict != "needed"


def test_claims_are_what_is_left_of_each_cost(result):
    claims = {claim.place: claim for claim in result.claims if claim.outcome.kind == f"the cost of {TENSOR}"}
    kept = by_name(result)
    assert len(result.claims) == len([one for one in result.rounded if one.kept != "nothing"])
    lonely = replace(result, rounded=tuple(replace(one, random=None) for one in result.rounded))
    assert lonely.claims == ()  # no control was measured, so none is stated
    for name in ("sink neurons", "sink places", "sink layers"):
        claim = claims[f"held-out text, with {name} exact"]
        assert (claim.value, claim.verdict) == (pytest.approx(1 - kept[name].regained), "needed")
        assert claim.control.value == pytest.approx(1 - kept[name].random)
    assert claims["held-out text, with sink neurons exact"].subject == result.neurons
