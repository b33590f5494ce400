"""separability against planted marks, its control against leaks, and its AUROC against scikit-learn's."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from covering import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism
from organisms import organism as new_organism
from organisms.noise import make_space
from organisms.plan import make_plan
from torch.testing import assert_close

from sinkscope.errors import SinkscopeError
from sinkscope.models.wrapped import target_of
from sinkscope.sinks.first_token import separate
from sinkscope.sinks.first_token.separate import (
    CLEAR,
    PER_TOKEN,
    FactorValues,
    Separability,
    auroc,
    best_neuron,
    layer_samples,
    margin,
    plane_scores,
    separability,
    split_tokens,
    training_coordinates,
)
from sinkscope.trace.run import trace

organism = functools.cache(new_organism)  # only read here


def measured(o: Organism, model: Any = None, **options: Any) -> Separability:
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(o.tokenizer.decode(o.natural(20, 64, seed=9)[:, 1:].flatten().tolist()))
        return separability(model or o.model, tokenizer=o.tokenizer, text=text, **options)


@functools.cache
def with_defaults(family: str, seed: int, kind: str = "sink") -> tuple[Organism, Separability]:
    """An organism without BOS."""
    o = organism(family, seed, kind=kind, bos=False)
    return o, measured(o)


def test_the_planted_mark_separates_perfectly_and_its_reader_is_found():
    """Along the planted direction alone nothing overlaps; the gate neuron that is found was planted to read it."""
    o, found = with_defaults("llama", 4, "up")
    plan = make_plan(o.family, o.seed, o.kind, None, None, o.bos)
    site = "blocks.0.hook_resid_mid"
    firsts = trace(o.model, torch.arange(4, o.model.config.vocab_size)[:, None], [site])[site][:, 0]
    later = trace(o.model, o.natural(20, 40), [site])[site][:, CLEAR:].flatten(0, 1)
    along = torch.cat([firsts, later]) @ make_space(plan).mark
    assert float(auroc(along[:, None], torch.arange(len(along)) < len(firsts))) == 1
    assert found.method == ("plane", "gate neuron", "up neuron")
    assert found.auroc[:2].tolist() == [1, 1] and np.abs(found.shuffled_auroc[:2] - 0.5).max() < 0.15
    assert found.neuron[1] == f"L0.N{plan.cleaner}" and found.missed == []
    assert "separates first tokens from later ones: held-out AUROC 1.0000" in found.conclusion()


@pytest.mark.parametrize("family", ["neox", "mixtral", slow("gemma2")])
def test_other_architectures(family):
    _, found = with_defaults(family, 1)
    assert found.auroc[0] > 0.999
    assert len(found.method) == (2 if family == "neox" else 3)
    assert (".E" in found.neuron[1]) == (family == "mixtral")


def test_tokens_without_a_group_are_missed_and_bos_is_not():
    """With BOS, tokens of no group carry no mark even when they stand first."""
    o = organism("llama", 0)
    found = measured(o)
    assert found.tokens[0] == "<s>" and found.first[0] and not found.held_out[0] and found.score[0] > 0
    ungrouped = {o.tokenizer.decode([t]) for t, group in o.truth.groups.items() if group < 0}
    assert len(ungrouped & set(found.missed)) > len(found.missed) / 2
    assert 0.85 < found.auroc[0] < 1


def test_a_mark_of_a_later_layer_is_not_there_before():
    o = organism("llama", 1, kind="late_mark", bos=False)
    layer = o.truth.marking_layer
    assert layer > 0
    assert measured(o, layer=layer).auroc[0] == 1 and measured(o, layer=layer - 1).auroc[0] < 0.7


def test_without_a_sink_nothing_separates_and_the_control_shows_a_leak(monkeypatch):
    """Were tokens on both sides of the split, labels drawn per token would be learned."""
    o = organism("llama", 1, kind="none", bos=False)
    honest = measured(o)
    assert honest.auroc.max() < 0.7 and np.abs(honest.shuffled_auroc - 0.5).max() < 0.15
    assert "does not separate" in honest.conclusion()

    def leaky(*args):
        split = split_tokens(*args)
        coin = torch.randint(2, (len(split.later),), generator=torch.Generator().manual_seed(0)).bool()
        return replace(split, later_held=coin)

    monkeypatch.setattr(separate, "split_tokens", leaky)
    assert measured(o).shuffled_auroc[0] > 0.65


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_no_token_and_no_text_is_on_both_sides(seed, bos):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 60, (6, 32), generator=generator)
    if bos:
        ids[:, 0] = 1
    words = torch.randperm(70, generator=generator)[:30].add(2).tolist()
    split = split_tokens(ids, words, 1 if bos else None, seed)
    assert sorted(split.firsts.tolist()) == sorted(words) and int(split.first_held.sum()) == 15
    held = {*split.firsts[split.first_held].tolist(), *split.later_tokens[split.later_held].tolist()}
    fitted = {*split.firsts[~split.first_held].tolist(), *split.later_tokens[~split.later_held].tolist()}
    assert not held & fitted
    assert not set(split.later[split.later_held, 0].tolist()) & set(split.later[~split.later_held, 0].tolist())
    assert int(split.later[:, 1].min()) >= (1 if bos else CLEAR)
    assert int(split.later_tokens.bincount().max()) <= PER_TOKEN
    assert len(split.later.unique(dim=0)) == len(split.later)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 12), st.integers(2, 6))
def test_auroc_is_scikit_learns_with_ties(seed, ones, others, levels):
    from sklearn.metrics import roc_auc_score

    values = torch.randint(levels, (ones + others, 3), generator=torch.Generator().manual_seed(seed)).float()
    first = torch.arange(ones + others) < ones
    wanted = [roc_auc_score(first.numpy(), values[:, i].numpy()) for i in range(3)]
    assert auroc(values, first).tolist() == pytest.approx(wanted, abs=1e-6)
    gap = margin(values, first)
    assert (gap > 0).tolist() == [bool(values[first, i].min() > values[~first, i].max()) for i in range(3)]
    assert_close(margin(3 * values + 1, first), gap)


def test_of_perfect_neurons_the_one_with_the_widest_gap_is_best_whichever_way_it_points():
    """The first neuron overlaps; the others are lower on first tokens, and the third leaves the widest gap."""
    later, firsts = torch.tensor([0.2, 0.6, 0.9, 1.0]), torch.tensor([-0.8, -0.6, -0.3, 0.0])
    columns = [torch.cat([firsts + 0.5, later]), torch.cat([firsts, later]), torch.cat([firsts - 2, later])]
    first, every = torch.arange(8) < 4, torch.ones(8, dtype=torch.bool)
    factor = FactorValues("gate", None, torch.stack(columns, 1))
    best = best_neuron(5, [factor], first, every)
    assert best.name == "L5.N2" and torch.equal(best.scores, -factor.values[:, 2:])  # first tokens are higher
    assert float(margin(best.scores, first)) == pytest.approx((0.2 + 2.0) / (1.0 + 2.8))


def test_planes_do_not_see_what_is_held_out():
    generator = torch.Generator().manual_seed(0)
    first, train = torch.arange(40) < 20, torch.arange(40) % 2 == 0
    data = torch.randn(40, 6, generator=generator)
    data[first, 2] += 4.0
    coordinates = training_coordinates(data, train)
    scores = plane_scores(coordinates, first, train)
    assert float(auroc(scores[~train], first[~train])) > 0.95
    assert float(scores[first & train].mean()) == pytest.approx(0.5)
    moved = data.clone()
    moved[~train] += 5.0
    assert_close(plane_scores(training_coordinates(moved, train), first, train)[train], scores[train])
    assert training_coordinates(torch.cat([data, data], 1), train).shape[1] == 6  # nothing new in the copy


@pytest.mark.parametrize("family", ["llama", "neox", "gpt2", "qwen3_moe"])
def test_places_are_read_in_order(family):
    """The residual stream is what the MLP branch starts from, or the sum where there is no such place."""
    o = organism(family, 0)
    ids = o.natural(70, 9)
    places = torch.tensor([[3, 2], [68, 8], [4, 0], [3, 1]])
    resid, factors = layer_samples(target_of(o.model, o.tokenizer), 1, ids, places)
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out"]
    both = trace(o.model, ids, names)
    wanted = (both[names[0]] + both[names[1]])[places[:, 0], places[:, 1]]
    assert_close(resid, wanted, rtol=1e-4, atol=1e-4)
    if family == "qwen3_moe":
        assert [(f.name, f.expert) for f in factors[:3]] == [("gate", 0), ("up", 0), ("gate", 1)]
        return
    pre = trace(o.model, ids, ["blocks.1.mlp.hook_pre"])["blocks.1.mlp.hook_pre"]
    assert_close(factors[0].values, pre[places[:, 0], places[:, 1]], rtol=1e-4, atol=1e-4)
    assert [f.name for f in factors] == (["gate", "up"] if family == "llama" else [""])


@pytest.mark.parametrize("family", ["neox", "mixtral"])
def test_one_neuron_is_examined_by_its_own_factors(family):
    """The numbers of the best neuron are those of the search."""
    o, searched = with_defaults(family, 1)
    best = searched.neuron[1]
    found = measured(o, neuron=best)
    assert set(found.neuron[1:]) == {best} and found.method == searched.method
    assert found.auroc[:2].tolist() == searched.auroc[:2].tolist()
    assert f"neuron {best}" in found.conclusion()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.none() | st.floats(0, 0.5))
def test_separates_is_said_only_of_what_beats_its_control_and_chance(seed, area, chance, samples, margin):
    rng = np.random.default_rng(seed)
    first = rng.random(samples) < 0.5
    found = Separability(
        layer=0,
        method=("plane",),
        neuron=("",),
        auroc=np.array([area]),
        shuffled_auroc=np.array([chance]),
        margin=margin,
        tokens=("a",) * samples,
        first=first,
        held_out=rng.random(samples) < 0.5,
        score=rng.normal(size=samples),
        pre_activation=np.zeros((samples, 0)),
    )
    says = found.conclusion()
    bar = max(chance, 0.5) + max(0.1, margin or 0)
    assert (" a plane separates" in says) == (area >= 0.99 and area > bar)
    assert ("does not separate" in says) == (area <= bar)
    assert (" ± " in says) == bool(margin)
    assert not re.search(r"\b1 [\w-]+ ?\w+s\b(?<!texts)", " ".join(found.details()).replace("1 of", ""))


def test_bad_input_is_one_line():
    dense, mixture = organism("llama", 1), organism("mixtral", 1)
    for o, options, reason in (
        (dense, {"layer": 99}, r"layer 99 is not in .*: give one from 0 to \d"),
        (dense, {"neuron": "L0.N99999"}, "give one from 0 to"),
        (dense, {"neuron": "7"}, "expected a neuron such as L1.N338"),
        (dense, {"neuron": "L0.E1.N0"}, "is one MLP without experts"),
        (mixture, {"neuron": "L0.N0"}, "is a mixture of experts"),
    ):
        with pytest.raises(SinkscopeError, match=reason):
            measured(o, **options)
