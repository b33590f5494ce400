"""Marking heads against planted heads, and its sets against edited passes of single tokens with hooks of our own."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
from attack_kit import measured_spikes, setup_of, text_file
from organisms import FAMILIES, Organism, organism
from raw_kit import inputs_edited, residuals

from sinkscope.results.notation import Head, read_head
from sinkscope.results.row import Row
from sinkscope.sinks.spikes.edited import means_of, share_left
from sinkscope.sinks.spikes.find import find_sinks, spike_of
from sinkscope.sinks.spikes.marks import along_first, heads_that_mark, heads_up_to, marking_heads

pytestmark = pytest.mark.few_texts

KINDS = ("sink", "late_mark", "spread")
BY_HEADS = [family for family in FAMILIES if family != "gpt2"]


def measured(o: Organism, folder: Path) -> dict[str, Row]:
    setup = setup_of(o, text=text_file(o, folder, 8, seed=9))
    return {row.name: row for row in heads_that_mark(setup, spike_of(setup), count=12)}


def heads_of(found: dict[str, Row]) -> set[Head]:
    """The heads that take half of the spike from a token."""
    return {Head(*read_head(name)) for name in found if name.startswith("L")}


def groups_of(o: Organism, tokens: tuple[str, ...]) -> list[int]:
    ids = [o.tokenizer.convert_tokens_to_ids(o.tokenizer.tokenize(token))[0] for token in tokens]
    return [o.truth.groups[token] for token in ids]


def check(o: Organism, found: dict[str, Row]):
    """What was planted: the heads of the groups of these tokens as one set, and of each token exactly its own."""
    truth, fewest, every = o.truth, found["fewest heads"], found["all heads"]
    groups = groups_of(o, every.texts)
    planted = {head for group in groups for head in truth.group_heads[group]}
    named = {read_head(name) for name in fewest.note.replace(" and ", ", ").split(", ")}
    marking = {head for _, head in named}
    assert marking <= planted and {layer for layer, _ in named} == {truth.marking_layer}
    for group in groups:  # a tenth of all may be kept by heads that are not named
        assert marking & set(truth.group_heads[group]) or groups.count(group) <= 0.1 * len(groups) + 1
    assert every.get("left") <= 0.01 and fewest.get("left") <= 0.1 + every.get("left")
    random = found["random heads"].get("left")
    assert random >= 0.3 + fewest.get("left")  # the worst of a dozen sets, which may hold heads of other groups
    assert "heads of equal attention" in found
    assert {(head.layer, head.head) for head in heads_of(found)} == {(truth.marking_layer, head) for head in planted}
    for head in heads_of(found):
        for group, left in zip(groups, found[str(head)].numbers["left"].by_text, strict=True):
            serves = head.head in truth.group_heads[group]
            assert left < 0.5 if serves else left > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_planted_heads_are_recovered(kind, tmp_path):
    """One head per group, two per group of which neither suffices, and heads that are not in layer 0."""
    seed = secrets.randbits(32)
    o = organism(BY_HEADS[seed % len(BY_HEADS)], seed, kind=kind, bos=seed % 2 == 0)
    print(f"seed {seed}")  # seen where this fails
    check(o, measured(o, tmp_path))


def states_by_hand(o: Organism, setup, token: int, replaced: tuple[Head, ...], layer: int) -> torch.Tensor:
    """The state of a token that stands alone, with heads of layer 0 at their mean over ordinary positions."""
    ordinary, seen = spike_of(setup).spike.ordinary, []
    o_proj, n_heads = o.model.model.layers[0].self_attn.o_proj, o.model.config.num_attention_heads
    with inputs_edited(o_proj, lambda z: seen.append(z.clone()) or z), torch.no_grad():
        o.model(spike_of(setup).spike.survey.ids)
    means = seen[0][ordinary].mean(0).unflatten(0, (n_heads, -1))

    def swap(z):
        for head in replaced:
            z.unflatten(-1, (n_heads, -1))[:, :, head.head] = means[head.head]
        return z

    with inputs_edited(o_proj, swap):
        return residuals(o.model, torch.tensor([[token]]))[layer, 0, 0]


def test_what_is_left_without_a_set_is_that_of_hooks_of_our_own(tmp_path):
    o = organism("llama", 3)
    setup = setup_of(o, text=text_file(o, tmp_path, 8))
    spike = spike_of(setup).spike
    every = heads_up_to(setup.target, 0)
    tokens = torch.tensor([o.tokenizer.bos_token_id, *(o.tokens_of(group)[0] for group in (0, 1))])
    sets = [(head,) for head in every] + [every, every[:2]]
    along = along_first(spike, tokens, sets, means_of(spike, every))
    expected = torch.tensor(
        [
            [float(spike.along(states_by_hand(o, setup, int(token), edit, spike.peak))) for token in tokens]
            for edit in [(), *sets]
        ]
    )
    torch.testing.assert_close(along, expected, rtol=1e-3, atol=1e-3)
    left = share_left(along[1:], along[:1]).mean(1)
    torch.testing.assert_close(left, expected[1:].mean(1) / expected[0].mean(), rtol=1e-3, atol=1e-3)


def judged_by(left_without):
    """A judge of sets of heads, from a function of the set."""

    def judge(sets):
        return torch.stack([torch.full((4,), float(left_without({one.head for one in some}))) for some in sets])

    heads = [Head(0, number) for number in range(6)]
    return marking_heads(heads, judge([(head,) for head in heads]), judge)


@pytest.mark.parametrize(
    ("left_without", "marking"),
    [
        (lambda gone: 0.05 if 3 in gone else 1.0, {3}),  # one head
        (lambda gone: 0.0 if {1, 4} <= gone else 1.0, {1, 4}),  # a pair of which either one is enough
        (lambda gone: 1 - 0.5 * len(gone & {0, 5}), {0, 5}),  # two halves
        (lambda gone: 1 - 0.1 * len(gone & {0, 5}), None),  # all of them leave most of it
        (lambda gone: 1 - len(gone) / 6, {0, 1, 2, 3, 4, 5}),  # a sixth each
    ],
)
def test_a_set_is_judged_as_one(left_without, marking):
    _, found = judged_by(left_without)
    assert {head.head for head in found} == (marking or set())


def test_layers_without_attention_have_no_heads():
    setup = measured_spikes(find_sinks, "hybrid", "lfm2")[1]
    found = heads_that_mark(setup, spike_of(setup), count=4)
    rows = {row.name: row for row in found}
    assert rows["all heads"].get("heads") and {head.layer for head in heads_of(rows)} == {0}
