"""Separability of the first token, against planted marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_kit import text_file
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, organism
from organisms.plan import make_plan
from sklearn.metrics import roc_auc_score

from experiments.repeated_token.separate import CLEAR, PER_TOKEN, auroc, best_column, sentence, separate, split_tokens
from sinkscope.measure import Setup


def separated(o: Organism, folder: Path, layer: int = 0, neuron: int | None = None) -> list[dict[str, Any]]:
    """The rows of the methods."""
    setup = Setup.open(o.model, tokenizer=o.tokenizer, text=text_file(o, folder, 20, seed=9), texts=64)
    return separate(setup, layer, 1024, neuron)["methods"]


def test_the_planted_mark_separates_perfectly_and_its_reader_is_found(tmp_path: Path) -> None:
    o = organism("llama", 4, kind="up", bos=False)
    plan = make_plan(o.family, o.seed, o.kind, None, None, o.bos)
    plane, gate, _ = separated(o, tmp_path)
    assert plane["auroc"] == gate["auroc"] == 1 and gate["neuron"] == f"L0.N{plan.cleaner}"
    assert max(abs(row["shuffled_auroc"] - 0.5) for row in (plane, gate)) < 0.15
    assert "a plane separates first tokens from later ones: held-out AUROC 1.0000" in sentence(plane, 0)
    chosen = separated(o, tmp_path, neuron=plan.cleaner)[1]
    assert (chosen["neuron"], chosen["auroc"]) == (gate["neuron"], 1)


@pytest.mark.parametrize(("family", "methods"), [("neox", 2), ("gemma2", 3), ("mixtral", 1)])
def test_a_plane_separates_in_other_architectures(family: str, methods: int, tmp_path: Path) -> None:
    rows = separated(organism(family, 1, bos=False), tmp_path)
    assert rows[0]["auroc"] > 0.999 and len(rows) == methods


@pytest.mark.slow
def test_where_there_is_no_mark_nothing_separates(tmp_path: Path) -> None:
    """There is none before the marking layer, and none in a model without a sink."""
    late = organism("llama", 1, kind="late_mark", bos=False)
    layer = late.truth.marking_layer
    assert layer and separated(late, tmp_path, layer)[0]["auroc"] == 1
    for rows in (
        separated(late, tmp_path, layer - 1),
        separated(organism("llama", 1, kind="none", bos=False), tmp_path),
    ):
        assert rows[0]["auroc"] < 0.7 and "does not separate" in sentence(rows[0], 0)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_no_token_and_no_text_is_on_both_sides(seed: int, bos: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 60, (6, 32), generator=generator)
    words = torch.randperm(70, generator=generator)[:30].add(2).tolist()
    split = split_tokens(ids, words, 1 if bos else None, seed)
    assert sorted(split.tokens[split.first]) == sorted(words) and int(split.held[split.first].sum()) == 15
    assert not {*split.tokens[split.held]} & {*split.tokens[~split.held]}
    later, held = split.places[1].numpy(), split.held[~split.first]
    assert not {*later[held, 0]} & {*later[~held, 0]}
    assert later[:, 1].min() >= (1 if bos else CLEAR) and len(np.unique(later, axis=0)) == len(later)
    assert np.bincount(split.tokens[~split.first]).max() <= PER_TOKEN
    assert (ids.numpy()[later[:, 0], later[:, 1]] == split.tokens[~split.first]).all()


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 12), st.integers(2, 6))
def test_auroc_is_scikit_learns_with_ties(seed: int, ones: int, others: int, levels: int) -> None:
    values = np.random.default_rng(seed).integers(levels, size=(ones + others, 3)).astype(float)
    first = np.arange(ones + others) < ones
    assert auroc(values, first).tolist() == pytest.approx([roc_auc_score(first, values[:, i]) for i in range(3)])


def test_of_perfect_neurons_the_one_with_the_widest_gap_is_best_whichever_way_it_points() -> None:
    """The first neuron overlaps; the others are lower on first tokens, and the third leaves the widest gap."""
    later, firsts = np.array([0.2, 0.6, 0.9, 1.0]), np.array([-0.8, -0.6, -0.3, 0.0])
    columns = [np.concatenate([firsts + shift, later]) for shift in (0.5, 0, -2)]
    assert best_column(np.stack(columns, 1), np.arange(8) < 4) == (2, -1.0)


@given(st.floats(0, 1), st.floats(0, 0.3), st.floats(0, 1))
def test_separates_is_said_only_of_what_exceeds_chance_by_more_than_its_margin(
    area: float, margin: float, chance: float
) -> None:
    says = sentence({"neuron": None, "auroc": area, "margin": margin, "shuffled_auroc": chance}, 0)
    above = area - margin > max(chance, 0.5) + 0.1
    assert (" a plane separates" in says, "partly separates" in says) == (above and area >= 0.99, above and area < 0.99)
