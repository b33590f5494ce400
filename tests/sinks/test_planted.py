"""Spikes of planted models: what is said is what was planted, and no more."""

from __future__ import annotations

import plain_hooks as plain
import pytest
import torch
from attack_kit import measured_spikes, words_of
from organisms import KINDS
from organisms.planted import PlantedSpike

from sinkscope.sinks.spikes.find import sinks_of, why_sink
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.sentences import sufficient
from sinkscope.sinks.spikes.tables import Role
from sinkscope.sinks.spikes.why_tables import Cause

few_texts = pytest.mark.few_texts
PLANTED = [(kind, "llama") for kind in KINDS if kind not in ("late_mark", "some_first_tokens")]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(pytest.param(*case, marks=few_texts) for case in [*PLANTED, ("sink", "mixtral")]),
        ("some_first_tokens", "llama"),  # a part of the texts has them
    ],
)
def test_what_was_planted_is_said(kind, family):
    o, setup, found = measured_spikes(why_sink, kind, family)
    assert len(found.spikes) == len(o.truth.spikes)
    for planted in o.truth.spikes:
        words, layers = words_of(o, planted.place), (planted.first, planted.last)
        (spike,) = [one for one in found.spikes if words in one.place.words and one.layers == layers]
        check(planted, spike)
    assert " 0 of 0 " not in found.text() and "-0%" not in found.text()
    given = plain.attention(o.model, sinks_of(setup).report.ids)[..., 1:, 0].mean((1, 3))
    torch.testing.assert_close(torch.tensor(found.heads).float(), given, atol=1e-3, rtol=1e-3)
    assert bool(found.readers["heads"].value) == (kind != "none")


def check(planted: PlantedSpike, spike: SpikeResult) -> None:
    needed = {str(part) for part in spike.needed}
    assert spike.held_out and needed and frozenset(needed) in planted.needs
    assert spike.size["left"].value == pytest.approx(0, abs=0.25)
    written = {row.key for row in spike.components if abs(row.share.value) >= 0.1}
    before = {part for part in written if part.layer is not None and part.layer < spike.layers[0]}
    if spike.layers[0]:  # the embedding writes what is there before the first layer
        before |= {part for part in written if part.kind == "embedding"}
    assert {str(part) for part in written - before} == set(planted.writers)
    assert {str(row.key) for row in spike.erasers} == set(planted.erasers)
    assert sum(row.share.value for row in spike.components) == pytest.approx(1, abs=0.05)
    writers = {str(row.key) for row in spike.writers if row.role in (Role.NEEDED, Role.BACKUP)}
    assert planted.backups <= writers
    assert bool(spike.effects) == (spike.like is None) == any(row.is_control for row in spike.effects)
    marks = [" and ".join(map(str, row.key)) for row in spike.marks]
    if "embedding" in needed:  # what has the spike itself marks nothing
        assert not marks
    else:
        assert marks[0] in (planted.marks or {"attention 0 and embedding", "embedding and attention 0"})


CASES = [
    ("sink", [(Cause.ALONE,)], [Cause.ALONE]),  # heads mark a token that sees none but its own group
    ("embedding_spike", [(Cause.TOKEN,)], [Cause.TOKEN]),  # the embedding of BOS has it
    ("attention_spike", [(Cause.TOKEN, Cause.ALONE)], [Cause.TOKEN, Cause.ALONE]),  # heads write it, if nothing dilutes
    ("saturated", [(Cause.ALONE,), (Cause.TOKEN,)], []),  # heads and the embedding of BOS: either is enough
]


@few_texts
@pytest.mark.parametrize(("kind", "enough", "without"), CASES)
def test_the_cause_that_was_planted_is_said(kind, enough, without):
    _, _, found = measured_spikes(why_sink, kind)
    assert sufficient(found.answered.conditions) == enough
    lost = []
    for row in found.answered.conditions:
        if row.key.at_place and row.left.value + (row.left.margin or 0.0) < 0.25:
            lost += row.key.causes
    assert lost == without
    first = found.conclusion().partition(" gets ")[0]
    assert all(cause.given in first for causes in enough for cause in causes)
    assert (" or " in first, " and " in first) == (len(enough) > 1, len(enough[0]) > 1)


@few_texts
def test_of_a_place_that_is_not_the_first_token_causes_are_not_asked():
    with pytest.warns(UserWarning, match="is asked of the first token, and this spike is at"):
        _, _, found = measured_spikes.__wrapped__(why_sink, "two_delimiters", "llama")
    assert found.answered is None and [spike.like for spike in found.spikes] == [None, 0]
