"""The probes of Fig. 4 against planted marks, and their numbers by another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attack_kit import setup_of, text_file
from organisms import Organism, organism
from organisms.plan import make_plan
from scipy.stats import mannwhitneyu
from sklearn.linear_model import LogisticRegression

from experiments.record import Row
from experiments.repeated_token.separate import measure, probe

pytestmark = pytest.mark.few_texts


def probes_of(o: Organism, folder: Path, layer: int = 0) -> list[Row]:
    return measure(setup_of(o, text=text_file(o, folder, 20, seed=9)), layer, 16)


def test_plane_and_neuron_separate_a_planted_mark(tmp_path):
    o = organism("llama", 4, kind="up", bos=False)
    plan = make_plan(o.family, o.seed, o.kind, bos=o.bos)
    plane, neuron, _ = probes_of(o, tmp_path)
    assert plane["auroc"] == neuron["auroc"] == 1 and neuron["neuron"] == plan.cleaner
    assert max(abs(one["shuffled"] - 0.5) for one in (plane, neuron)) < 0.15


@pytest.mark.slow
def test_no_probe_separates_before_the_marking_layer(tmp_path):
    late = organism("llama", 1, kind="late_mark", bos=False)
    layer = late.truth.marking_layer
    assert layer and probes_of(late, tmp_path, layer=layer)[0]["auroc"] == 1
    assert probes_of(late, tmp_path, layer=layer - 1)[0]["auroc"] < 0.7


def test_auroc_is_the_rank_statistic_of_each_fold():
    """Of five folds of whole texts, by planes that are fitted here."""
    texts = np.tile(np.repeat(np.arange(5), 12), 2)
    first = np.arange(120) < 60
    inputs = np.random.default_rng(1).standard_normal((120, 3)) + first[:, None] * 0.7
    found = probe("plane", inputs, texts, 0)
    areas = []
    for text in range(5):
        here = texts == text
        mean, spread = inputs[~here].mean(0), inputs[~here].std(0)
        plane = LogisticRegression(max_iter=1000).fit((inputs[~here] - mean) / spread, first[~here])
        score = plane.decision_function((inputs[here] - mean) / spread)
        areas.append(mannwhitneyu(score[first[here]], score[~first[here]]).statistic / 144)
    assert found["auroc"] == pytest.approx(np.mean(areas))
    assert found["auroc"] > 0.6 > found["shuffled"]
