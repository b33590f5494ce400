"""Spikes of planted models: what is said is what was planted, and no more."""

from __future__ import annotations

import plain_hooks as plain
import pytest
import torch
from attack_kit import measured_spikes, words_of
from organisms import KINDS
from organisms.planted import PlantedSpike

from sinkscope.sinks.spikes.find import sinks_of, why_sink
from sinkscope.sinks.spikes.result import TAKEN, SpikeResult, sufficient

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
    assert bool(found.readers.get("heads")) == (kind != "none")


def check(planted: PlantedSpike, spike: SpikeResult) -> None:
    marks, writers, components = (spike.table(name) for name in ("marks", "writers", "components"))
    assert spike.held_out and spike.needed and frozenset(spike.needed) in planted.needs
    assert spike.named("spike", "needed").get("left") == pytest.approx(0, abs=0.25)
    start = {"embedding"} if spike.layers[0] else set()  # which writes what is there before the first layer
    written = {name for name, row in components.items() if abs(row.get("share")) >= 0.1}
    early = {name for name in written if name[-1].isdigit() and int(name.split()[1]) < spike.layers[0]}
    assert written - start - early == set(planted.writers) and set(spike.table("erasers")) == set(planted.erasers)
    assert sum(row.get("share") for row in components.values()) == pytest.approx(1, abs=0.05)
    assert planted.backups <= {name for name, row in writers.items() if row.note in ("needed", "backup")}
    assert bool(spike.table("effects")) == (spike.like is None) == bool(spike.table("controls"))
    first = next(iter(marks), "")  # what has the spike itself marks nothing
    expected = planted.marks or {"attention 0 and embedding", "embedding and attention 0"}
    assert first in ({""} if "embedding" in spike.needed else expected)


CASES = [
    ("sink", [("alone",)], ["alone"]),  # heads mark a token that sees none but its own group
    ("embedding_spike", [("its token",)], ["its token"]),  # the embedding of BOS has it
    ("attention_spike", [("its token", "alone")], ["its token", "alone"]),  # heads write it, if nothing dilutes
    ("saturated", [("alone",), ("its token",)], []),  # heads and the embedding of BOS: either is enough
]


@few_texts
@pytest.mark.parametrize(("kind", "enough", "without"), CASES)
def test_the_cause_that_was_planted_is_said(kind, enough, without):
    _, _, found = measured_spikes(why_sink, kind)
    conditions = found.answered.table("conditions")
    assert sufficient(found.answered.rows) == enough
    taken = {cause: conditions[name] for cause, name in TAKEN.items() if name in conditions}
    assert [cause for cause, row in taken.items() if row.get("left") + row.margin("left") < 0.25] == without
    words = {"its token": "carries '<s>'", "alone": "sees only itself"}
    first = found.conclusion().partition(" becomes the sink")[0]
    assert all(words[cause] in first for causes in enough for cause in causes)
    assert (" or " in first, " and " in first) == (len(enough) > 1, len(enough[0]) > 1)


@few_texts
def test_of_a_place_that_is_not_the_first_token_causes_are_not_asked():
    with pytest.warns(UserWarning, match="is asked of the first token, and this spike is at"):
        _, _, found = measured_spikes.__wrapped__(why_sink, "two_delimiters", "llama")
    assert found.answered is None and [spike.like for spike in found.spikes] == [None, 0]
