"""Heads that mark the first token: those that were planted, and sets that are judged as one."""

from __future__ import annotations

import secrets

import pytest
import torch
from attack_kit import setup_of, text_file
from organisms import organism

from sinkscope.results.notation import Head, read_head
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.marks import heads_that_mark, marking_heads

pytestmark = pytest.mark.few_texts


@pytest.mark.parametrize("kind", ["sink", "late_mark"])
def test_planted_heads_are_recovered(kind, tmp_path):
    """Also heads that are not in layer 0."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # seen where this fails
    o = organism(seed=seed, kind=kind, bos=seed % 2 == 0)
    setup, truth = setup_of(o, text=text_file(o, tmp_path, 8, seed=9)), o.truth
    found = {row.name: row for row in heads_that_mark(setup, spike_of(setup))}
    fewest, every = found["fewest heads"], found["all heads"]
    ids = [o.tokenizer.convert_tokens_to_ids(o.tokenizer.tokenize(token))[0] for token in every.texts]
    groups = [truth.groups[token] for token in ids]
    planted = {head for group in groups for head in truth.group_heads[group]}
    named = {read_head(name) for name in fewest.note.replace(" and ", ", ").split(", ")}
    marking = {head for _, head in named}
    assert marking <= planted and {layer for layer, _ in named} == {truth.marking_layer}
    for group in groups:  # a tenth of all may be kept by heads that are not named
        assert marking & set(truth.group_heads[group]) or groups.count(group) <= 0.1 * len(groups) + 1
    assert every.get("left") <= 0.01 and fewest.get("left") <= 0.1 + every.get("left")
    random = found["random heads"].get("left")
    assert random >= 0.3 + fewest.get("left")  # the worst of a dozen sets, which may hold heads of other groups
    single = {Head(*read_head(name)): row for name, row in found.items() if name.startswith("L")}
    assert {(head.layer, head.head) for head in single} == {(truth.marking_layer, head) for head in planted}
    for head, row in single.items():
        for group, left in zip(groups, row.numbers["left"].by_text, strict=True):
            assert left < 0.5 if head.head in truth.group_heads[group] else left > 0.85


@pytest.mark.parametrize(
    ("left_without", "marking"),
    [
        (lambda gone: 0.05 if 3 in gone else 1.0, {3}),  # one head
        (lambda gone: 0.0 if {1, 4} <= gone else 1.0, {1, 4}),  # a pair of which either one is enough
        (lambda gone: 1 - 0.5 * len(gone & {0, 5}), {0, 5}),  # two halves
        (lambda gone: 1 - 0.1 * len(gone & {0, 5}), set()),  # all of them leave most of it
        (lambda gone: 1 - len(gone) / 6, {0, 1, 2, 3, 4, 5}),  # a sixth each
    ],
)
def test_a_set_is_judged_as_one(left_without, marking):
    heads = [Head(0, number) for number in range(6)]

    def judge(sets):
        return torch.stack([torch.full((4,), float(left_without({one.head for one in some}))) for some in sets])

    _, found = marking_heads(heads, judge([(head,) for head in heads]), judge)
    assert {head.head for head in found} == marking
