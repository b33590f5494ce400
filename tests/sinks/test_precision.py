"""What rounding costs and what is worth keeping exact: planted neurons and later sinks, and models without a sink."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import hard, organism, tiny_model
from rounding_kit import ByHand, divergence, enlarge, logs_by_hand

from sinkscope.results.notation import read_neuron
from sinkscope.sinks.precision import KeptExact, Precision, precision, random_layers, random_places
from sinkscope.sinks.spikes.places import Place, PlaceWords

pytestmark = pytest.mark.few_texts

TENSOR = "a8-tensor"
FEW = {"pieces": 4, "length": 32}


def measured(o, folder: Path, **more) -> Precision:
    return precision(o.model, tokenizer=o.tokenizer, text=text_file(o, folder, 60), **FEW | more)


def by_name(result: Precision, scheme: str = TENSOR) -> dict[str, KeptExact]:
    return {one.name: one for one in result.kept if one.scheme == scheme}


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
    return measured(planted(2), folder, schemes=[TENSOR, "kv8"])


# --- what is measured ----------------------------------------------------------------------------------------------


def test_the_planted_neurons_are_the_answer(result):
    o = planted(2)
    kept = by_name(result)
    assert set(map(read_neuron, kept["sink neurons"].parts)) == set(o.truth.neurons)
    assert kept["costliest layer"].parts == (f"layer {o.truth.sink_layer}",)
    for one in kept.values():
        assert one.removed.stands and one.removed.value > 0.75 and one.removed.control[1] < 0.25, one.name
    assert [one.name for one in result.kept[:3]] == ["sink neurons", "sink places", "costliest layer"]
    assert "sink neurons" not in by_name(result, "kv8")


def test_the_numbers_are_those_by_hand(result, folder):
    from sinkscope.sinks.tokens import held_out

    o = planted(2)
    setup = setup_of(o, text=folder / "words.txt")
    ids = held_out(setup, *FEW.values())
    none, first = torch.zeros_like(ids).bool(), torch.arange(ids.shape[1]).eq(0).expand_as(ids)
    exact = logs_by_hand(o.model, ids, ByHand(tokens=none))
    how = ByHand(activations=8, scale="tensor", tokens=none)
    cost, left = (
        divergence(exact, logs_by_hand(o.model, ids, replace(how, tokens=one))).mean() for one in (none, first)
    )
    assert result.costs[TENSOR] == pytest.approx(float(cost), rel=1e-3)
    assert by_name(result)["sink places"].removed.value == pytest.approx(1 - float(left / cost), abs=1e-3)


def test_a_later_sink_is_the_answer(tmp_path):
    m = hard("two_delimiters", "llama")
    sites = sorted(set().union(*m.truth.sets))
    enlarge(m.model, sites)
    result = precision(m.model, tokenizer=m.tokenizer, text=text_file(m, tmp_path), schemes=[TENSOR], **FEW)
    kept = by_name(result)
    assert sorted(map(read_neuron, kept["sink neurons"].parts)) == sites
    for name in ("sink places", "sink neurons"):
        assert kept[name].removed.value > 0.75 and kept[name].removed.control[1] < 0.25


@pytest.mark.slow
def test_without_a_sink_nothing_is_called_worth_it(folder):
    o = organism("llama", 0, kind="none")
    result = measured(o, folder)
    assert {one.name for one in result.kept} == {"costliest layer"} and not result.kept[0].removed.stands


# --- few alternatives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "others"), [(1, 0), (3, 2)])
def test_all_other_layers_are_tried_where_they_are_few_and_none_is_reported_where_there_is_none(layers, others, folder):
    model, tokenizer = tiny_model("llama", num_hidden_layers=layers)
    found = precision(model, tokenizer=tokenizer, schemes=[TENSOR], pieces=3, length=16)
    if not others:
        assert "costliest layer" not in by_name(found) and found.alone == ("costliest layer",)
        assert "nothing else of the kind" in " ".join(found.details()) and "random layers" not in str(found)
        return
    setup = setup_of(SimpleNamespace(model=model, tokenizer=tokenizer))
    layer = int(by_name(found)["costliest layer"].parts[0].removeprefix("layer "))
    tried = [one for (one,) in random_layers(setup, layer).values]
    assert tried[0] == layer and len({*tried}) == others + 1 and found.alone == ()


def test_random_tokens_are_none_of_those_that_are_kept(folder):
    """Of texts whose tokens are almost all at the place, there are not as many others."""
    setup = setup_of(planted(2), text=text_file(planted(2), folder, 60))
    ids = setup.ids[:3, :8]
    few, many = (torch.zeros_like(ids, dtype=torch.bool) for _ in range(2))
    few[:, :2], many[:, :6] = True, True
    for there, draws in ((few, 3), (many, 0)):
        place = Place(there, PlaceWords("here", "", 1.0), there.view_as)
        kept = random_places(setup, [place], ids)
        assert len(kept.values) == 1 + draws
        for one in kept.values[1:]:
            assert not {*map(tuple, one)} & {*map(tuple, kept.values[0])} and len(one) == len(kept.values[0])
