"""Attacks on planted groups: the clusters, and what sequences of their tokens do, against slower ways to the same."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import plain_hooks as plain
import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import Organism
from organisms import organism as new_organism

from sinkscope.hooks.edit.base import under
from sinkscope.sinks.attack import ClusterAttack, attack, draw_sequences, pools_of
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
    by_one, intact, unneeded, *heads = result.clusters
    assert intact.get("share") >= by_one.get("share") == served.mean()
    assert by_one.get("control") < 0.05 and not unneeded.get("share")
    assert sum(row.get("tokens") for row in heads) == served.sum()


def test_where_no_head_of_layer_0_marks_it_is_an_answer():
    o = organism(kind="late_mark")
    found = attack(o.model, tokenizer=o.tokenizer, n_tokens=40)
    share = found.clusters[2].numbers["share"]
    assert found.heads == [] and share.value > 0.8 and found.attempts == ()
    assert found.conclusion().startswith(f"No head of layer 0 marks one of 40 tokens by itself: {share} have ")


def test_tokens_of_one_cluster_have_the_spike_and_the_patch_ends_it_as_plain_hooks_say(tmp_path):
    o = organism(seed=1)
    found, layer = attack_on(o, tmp_path, sequences=6), o.truth.sink_layer
    setup = setup_of(o, text=text_file(o, tmp_path))
    everyone, *pools = pools_of(setup, found)
    drawn = {"share": draw_sequences(pools, 8, 6, 0), "control": draw_sequences([everyone], 8, 6, 0)}
    first = plain.norms(o.model, torch.tensor([[setup.bos]]))[layer, 0, 0]
    for row, edit in zip(found.attempts, (None, spike_of(setup).patch), strict=True):
        for source, ids in drawn.items():
            with under(edit, setup.target):
                hits = plain.norms(o.model, ids)[layer, :, 1:] / first >= 0.5
            assert row.get(source) == pytest.approx(float(hits.double().mean()))
    intact, patched = found.attempts
    assert intact.get("share") == 1 and patched.get("share") == 0 and 0 < intact.get("control") < 0.5
    beside = f"of their positions without BOS (random tokens: {intact.get('control'):.0%}; patched: 0%)."
    assert found.conclusion().endswith(f"at {intact.numbers['share']} {beside}")


def test_clusters_that_are_too_small_are_told(tmp_path):
    with pytest.warns(match=r"no cluster has 60 tokens \(the largest: "):
        found = attack_on(organism(seed=1, bos=False), tmp_path, length=60)
    assert found.conclusion().startswith("One head of layer 0 alone gives ") and found.attempts == ()
