"""`separate` against planted marks, and its numbers by another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attack_kit import text_file
from covering import slow
from organisms import Organism, organism
from organisms.plan import make_plan
from refusals import refused
from scipy.stats import mannwhitneyu
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from sinkscope.sinks.separate import CLEAR, Separation, fitted, separate

pytestmark = pytest.mark.few_texts


def separated(o: Organism, folder: Path, **options) -> Separation:
    text = text_file(o, folder, 20, seed=9)
    return separate(o.model, tokenizer=o.tokenizer, text=text, pieces=16, **options)


def test_the_planted_mark_separates_perfectly_and_its_reader_is_found(tmp_path):
    o = organism("llama", 4, kind="up", bos=False)
    plan = make_plan(o.family, o.seed, o.kind, bos=o.bos)
    plane, neuron, _ = separated(o, tmp_path).probes
    assert plane.auroc == neuron.auroc == 1 and neuron.neuron == plan.cleaner
    assert max(abs(one.shuffled - 0.5) for one in (plane, neuron)) < 0.15
    chosen = separated(o, tmp_path, neuron=plan.cleaner)
    assert (chosen.probes[1].neuron, chosen.probes[1].auroc) == (plan.cleaner, 1)
    other = separated(o, tmp_path, neuron=plan.cleaner + 1).probes[1]
    assert other.neuron == plan.cleaner + 1 and other.auroc < 0.9
    with refused("neuron 100000 is not in "):
        separated(o, tmp_path, neuron=100_000)


@pytest.mark.parametrize(("family", "probes"), [("neox", 2), slow("gemma2", 3), slow("mixtral", 1)])
def test_a_plane_separates_in_other_architectures(family, probes, tmp_path):
    found = separated(organism(family, 1, bos=False), tmp_path).probes
    assert found[0].auroc > 0.999 and len(found) == probes


@pytest.mark.slow
def test_where_there_is_no_mark_nothing_separates(tmp_path):
    """There is none before the marking layer, and none in a model without a sink."""
    late = organism("llama", 1, kind="late_mark", bos=False)
    layer = late.truth.marking_layer
    assert layer and separated(late, tmp_path, layer=layer).probes[0].auroc == 1
    for found in (
        separated(late, tmp_path, layer=layer - 1),
        separated(organism("llama", 1, kind="none", bos=False), tmp_path),
    ):
        assert found.probes[0].auroc < 0.7


def test_each_token_is_once_alone_and_once_in_text_and_no_text_is_in_two_folds(tmp_path, monkeypatch):
    seen: list[tuple[Tensor, np.ndarray]] = []

    def values(_setup, ids, places, *_sites):
        row, pos = places
        assert pos.min() >= CLEAR and len(np.unique(ids[places])) == len(row) == len({*zip(row, pos, strict=True)})
        seen.append((ids, row))
        return np.zeros((2 * len(row), 1))

    def fit(name, neuron, inputs, texts, seed):
        assert (texts == np.tile(seen[-1][1], 2)).all()
        return fitted(name, neuron, np.random.default_rng(0).random(inputs.shape), texts, seed)

    monkeypatch.setattr("sinkscope.sinks.separate.samples", values)
    monkeypatch.setattr("sinkscope.sinks.separate.fitted", fit)
    separated(organism("llama", 1), tmp_path)
    assert len(seen) == 3


def test_auroc_is_the_rank_statistic_of_each_fold():
    generator = torch.Generator().manual_seed(1)
    texts = np.tile(np.repeat(np.arange(5), 12), 2)
    first = np.arange(120) < 60
    inputs = (torch.randn(120, 3, generator=generator) + torch.tensor(first)[:, None] * 0.7).numpy()
    found = fitted("plane", None, inputs, texts, 0)
    areas = []
    for text in range(5):
        here = texts == text
        mean, spread = inputs[~here].mean(0), inputs[~here].std(0)
        plane = LogisticRegression(max_iter=1000).fit((inputs[~here] - mean) / spread, first[~here])
        score = plane.decision_function((inputs[here] - mean) / spread)
        areas.append(mannwhitneyu(score[first[here]], score[~first[here]]).statistic / 144)
    assert found.auroc == pytest.approx(np.mean(areas))
    assert found.error == pytest.approx(np.std(areas, ddof=1) / 5**0.5)
    assert found.auroc > 0.6 > found.shuffled
