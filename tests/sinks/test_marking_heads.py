"""Heads that mark the first token: those that were planted, and sets that are judged as one."""

from __future__ import annotations

import secrets

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import organism

from sinkscope.results.notation import Head
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.marks import heads_that_mark, marking_heads
from sinkscope.sinks.spikes.why_tables import MarkingKind

pytestmark = pytest.mark.few_texts


@pytest.mark.parametrize("kind", ["sink", "late_mark"])
def test_planted_heads_are_recovered(kind, tmp_path):
    """Also heads that are not in layer 0."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # seen where this fails
    o = organism(seed=seed, kind=kind, bos=seed % 2 == 0)
    setup, truth = setup_of(o, text=text_file(o, tmp_path, 8, seed=9)), o.truth
    rows, tokens = heads_that_mark(setup, spike_of(setup))
    sets = {row.key.kind: row for row in rows if row.key.head is None}
    left = {kind: row["left"].value for kind, row in sets.items() if kind is not MarkingKind.NONE}
    ids = o.tokenizer.convert_tokens_to_ids([o.tokenizer.tokenize(token)[0] for token in tokens])
    groups = [truth.groups[token] for token in ids]
    planted = {(truth.marking_layer, head) for group in groups for head in truth.group_heads[group]}
    marking = {(head.layer, head.head) for head in sets[MarkingKind.FEWEST].marking}
    assert marking <= planted
    for group in groups:  # a tenth of all may be kept by heads that are not named
        own = {(truth.marking_layer, head) for head in truth.group_heads[group]}
        assert marking & own or groups.count(group) <= 0.1 * len(groups) + 1
    assert left[MarkingKind.ALL] <= 0.01
    assert left[MarkingKind.FEWEST] <= 0.1 + left[MarkingKind.ALL]
    # the worst of a dozen, with heads of other groups
    assert left[MarkingKind.RANDOM] >= 0.3 + left[MarkingKind.FEWEST]
    single = {(row.key.head.layer, row.key.head.head): row["left"].by_text for row in rows if row.key.head is not None}
    assert single.keys() == planted
    for (_, head), by_text in single.items():
        for group, share in zip(groups, by_text, strict=True):
            assert share < 0.5 if head in truth.group_heads[group] else share > 0.85


@pytest.mark.parametrize(
    ("left_without", "marking"),
    [
        (lambda gone: 0.0 if {1, 4} <= gone else 1.0, {1, 4}),  # a pair of which either one is enough
        (lambda gone: 1 - 0.1 * len(gone & {0, 5}), set()),  # all of them leave most of it
        (lambda gone: 1 - len(gone) / 6, {0, 1, 2, 3, 4, 5}),  # a sixth each
    ],
)
def test_a_set_is_judged_as_one(left_without, marking):
    heads = [Head(0, number) for number in range(6)]

    def judge(sets):
        return torch.tensor([[float(left_without({one.head for one in some}))] * 4 for some in sets])

    _, found = marking_heads(heads, judge([(head,) for head in heads]), judge)
    assert {head.head for head in found} == marking
