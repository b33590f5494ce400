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

from sinkscope.results.claims import Claim
from sinkscope.results.parts import Component, sites_of
from sinkscope.sinks.precision.precision import Precision, precision

pytestmark = pytest.mark.few_texts

TENSOR = "a8-tensor"
FEW = {"pieces": 4, "length": 48}


def measured(o, folder: Path, **more) -> Precision:
    return precision(o.model, tokenizer=o.tokenizer, text=text_file(o, folder, 60), **FEW | more)


def by_name(result: Precision, scheme: str = TENSOR) -> dict[str, Claim]:
    return {claim.place: claim for claim in result.claims if claim.outcome.kind == scheme}


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
    assert set(sites_of(kept["sink neurons"].subject)) == set(o.truth.neurons)
    assert kept["costliest layer"].subject == (Component("layer", o.truth.sink_layer),)
    for claim in kept.values():
        assert claim.verdict == "needed" and claim.value < 0.25 and claim.control.value > 0.75, claim.place
    assert [claim.place for claim in result.claims[:3]] == ["sink neurons", "sink places", "costliest layer"]
    assert result.costs["a8-token"] < 0.25 * result.costs[TENSOR]
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
    assert result.costs[TENSOR] == pytest.approx(float(cost), rel=1e-3)
    assert by_name(result)["sink places"].value == pytest.approx(float(left / cost), abs=1e-3)


def test_a_later_sink_is_the_answer(tmp_path):
    m = hard("two_delimiters", "llama")
    sites = sorted(set().union(*m.truth.sets))
    enlarge(m.model, sites)
    result = precision(m.model, tokenizer=m.tokenizer, text=text_file(m, tmp_path), schemes=[TENSOR], **FEW)
    kept = by_name(result)
    assert sorted(sites_of(kept["sink neurons"].subject)) == sites
    for name in ("sink places", "sink neurons"):
        assert kept[name].value < 0.25 and kept[name].control.value > 0.75


@pytest.mark.slow
def test_without_a_sink_nothing_is_called_worth_it(folder):
    o = organism("llama", 0, kind="none")
    result = measured(o, folder)
    assert {claim.place for claim in result.claims} == {"costliest layer"}
    assert result.claims[0].verdict != "needed"
