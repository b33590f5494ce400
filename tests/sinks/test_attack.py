"""Attacks on planted groups: the clusters, and what sequences of their tokens do, against slower ways to the same."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import plain_hooks as plain
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism
from organisms import organism as new_organism

from sinkscope.hooks.edit.base import under
from sinkscope.results.mean import Mean
from sinkscope.sinks.attack import ClusterAttack, attack, draw_sequences, pools_of
from sinkscope.sinks.attack_tables import AttemptKey, HeadsKept, Sequences
from sinkscope.sinks.spikes.find import spike_of

pytestmark = pytest.mark.few_texts

organism = functools.cache(new_organism)  # only read here
EVERY = 1 << 20  # more tokens than a vocabulary has


def attack_on(o: Organism, folder: Path, **options) -> ClusterAttack:
    options = {"length": 8, "sequences": 24, "n_tokens": EVERY, **options}
    return attack(o.model, tokenizer=o.tokenizer, text=text_file(o, folder), **options)


def test_planted_groups_are_recovered_token_by_token(tmp_path):
    o = organism(seed=1, bos=False)
    result = attack_on(o, tmp_path, sequences=0)
    groups = [o.truth.groups[token] for token in result.ids.tolist()]
    planted = np.array([np.nan if group < 0 else o.truth.group_heads[group][0] for group in groups])
    np.testing.assert_array_equal(result.head, planted)
    assert len(result.ids) == o.model.config.vocab_size
    served = np.isfinite(planted)
    share = {row.key: row.share.value for row in result.having}
    assert share[HeadsKept.ALL] >= share[HeadsKept.MARKING] == served.mean()
    assert share[HeadsKept.ANOTHER] < 0.05
    assert share[HeadsKept.NONE] == 0
    assert sum(row.tokens.value for row in result.clusters) == served.sum()


def test_where_no_head_of_layer_0_marks_it_is_an_answer():
    o = organism(kind="late_mark")
    found = attack(o.model, tokenizer=o.tokenizer, n_tokens=40)
    without = found.having_with(HeadsKept.NONE)
    assert found.heads == []
    assert without.share.value > 0.8
    assert found.attempts == ()
    assert found.conclusion().startswith("No head of layer 0 gives one of 40 tokens the norm spike")
    assert found.conclusion().endswith(f": {without.text('share')} have it without any of these heads.")


def test_tokens_of_one_cluster_have_the_spike_and_the_patch_ends_it_as_plain_hooks_say(tmp_path):
    o = organism(seed=1)
    found, layer = attack_on(o, tmp_path, sequences=6), o.truth.sink_layer
    setup = setup_of(o, text=text_file(o, tmp_path))
    everyone, *pools = pools_of(setup, found)
    drawn = {
        Sequences.ONE_CLUSTER: draw_sequences(pools, 8, 6, 0),
        Sequences.RANDOM: draw_sequences([everyone], 8, 6, 0),
    }
    share = {row.key: row.share.value for row in found.attempts}
    first = plain.norms(o.model, torch.tensor([[setup.bos]]))[layer, 0, 0]
    for edit in (None, spike_of(setup).patch):
        for sequences, ids in drawn.items():
            with under(edit, setup.target):
                hits = plain.norms(o.model, ids)[layer, :, 1:] / first >= 0.5
            key = AttemptKey(sequences, patched=edit is not None)
            assert share[key] == pytest.approx(float(hits.double().mean()))
    assert share[AttemptKey(Sequences.ONE_CLUSTER)] == 1
    assert share[AttemptKey(Sequences.ONE_CLUSTER, patched=True)] == 0
    assert 0 < share[AttemptKey(Sequences.RANDOM)] < 0.5
    control = found.attempt(Sequences.RANDOM).text("share")
    assert f"sequences of random tokens have it at {control}." in found.conclusion()
    assert "Not shown" not in found.conclusion()
    as_much = replace(found.attempt(Sequences.RANDOM), share=Mean(0.97))
    equal = replace(found, attempts=(replace(found.attempts[0], share=Mean(1.0, 0.1)), as_much))
    assert equal.conclusion().startswith("Not shown to matter which tokens stand there: sequences of 8 ")


def test_clusters_that_are_too_small_are_told(tmp_path):
    with pytest.warns(match=r"no cluster has 60 tokens \(the largest: "):
        found = attack_on(organism(seed=1, bos=False), tmp_path, length=60)
    assert found.conclusion().startswith("One head of layer 0 alone gives ") and found.attempts == ()
