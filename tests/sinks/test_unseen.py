"""Spikes of kinds that came after the steps: what was planted is said, and marks are those of plain hooks."""

from __future__ import annotations

from types import SimpleNamespace

import plain_spikes as plain
import pytest
from attack_kit import measured_spikes, words_of
from covering import slow
from organisms.blind import BLIND
from organisms.organism import PlantedSpike

from sinkscope.sinks.spikes.find import sinks_of, why_sink
from sinkscope.sinks.spikes.records import TAKEN, SpikeResult, sufficient

pytestmark = pytest.mark.few_texts

QUICK = {"restart": 0, "backup_of_two": 1, "second_position": 0, "saturated": 0, "attention_spike": 0, "relay": 1}
CASES = []
for name, families in BLIND.items():
    for number, family in enumerate(families):
        CASES.append((name, family) if QUICK.get(name) == number else slow(name, family))


def written_in_run(spike: SpikeResult) -> set[str]:
    """The components that write a tenth of a spike in its layers; the embedding does so before the first."""
    parts = set[str]()
    for name, row in spike.table("components").items():
        layer = 0 if name == "embedding" else int(name.split()[1])
        if abs(row.get("share")) >= 0.1 and layer >= spike.layers[0]:
            parts.add(name)
    return parts


@pytest.mark.parametrize(("name", "family"), CASES)
def test_what_was_planted_is_said(name, family):
    h, _, found = measured_spikes(why_sink, name, family)
    assert len(found.spikes) == len(h.truth.planted)
    for planted in h.truth.planted:
        words, layers = words_of(h, planted.place), (planted.first, planted.last)
        (spike,) = [one for one in found.spikes if words in one.place.words and one.layers == layers]
        check(planted, spike)
    assert " 0 of 0 " not in found.text() and "-0%" not in found.text()


def check(planted: PlantedSpike, spike: SpikeResult):
    marks = list(spike.table("marks"))
    assert spike.needed and frozenset(spike.needed) in planted.needs
    assert written_in_run(spike) == set(planted.writers)
    assert set(spike.table("erasers")) == set(planted.erasers)
    assert planted.backups <= {name for name, row in spike.table("writers").items() if row.note in ("needed", "backup")}
    if "embedding" in spike.needed:
        assert not marks  # what has the spike itself marks nothing
    elif planted.marks:
        assert marks[0] in planted.marks
    else:
        assert set(marks[0].split(" and ")) == {"attention 0", "embedding"}


CAUSES = [
    ("plain", "llama", [("alone",)], ["alone"]),  # heads mark a token that sees none but its own group
    ("embedding_spike", "llama", [("its token",)], ["its token"]),  # the embedding of BOS has it
    (
        "attention_spike",
        "mistral",
        [("its token", "alone")],
        ["its token", "alone"],
    ),  # heads write it, if nothing dilutes
    ("many_small", "gpt2", [("id 0",)], ["id 0"]),  # the embedding of position 0 marks it
    (
        "saturated",
        "llama",
        [("alone",), ("its token",)],
        [],
    ),  # heads and the embedding of BOS both do, and either is enough
    slow("relay", "llama", [("alone",)], ["alone"]),
]


@pytest.mark.parametrize(("name", "family", "enough", "without"), CAUSES)
def test_the_cause_that_was_planted_is_said(name, family, enough, without):
    assert name in BLIND or name in ("plain", "embedding_spike")
    _, _, found = measured_spikes(why_sink, name, family)
    rows = found.answered.rows
    taken = {cause: found.answered.table("conditions").get(name) for cause, name in TAKEN.items()}
    assert sufficient(rows) == enough
    needs = [cause for cause, row in taken.items() if row is not None and row.get("left") + row.margin("left") < 0.25]
    assert needs == without
    words = {"its token": "carries '<s>'", "alone": "sees only itself", "id 0": "has position id 0"}
    first = found.conclusion().partition(" becomes the sink")[0]
    assert all(words[cause] in first for causes in enough for cause in causes)
    assert (" or " in first) == (name == "saturated") and (" and " in first) == (name == "attention_spike")


def test_a_card_names_each_writer_with_its_sign():
    _, _, found = measured_spikes(why_sink, "saturated", "llama")
    (card,) = [card for card in found.cards() if card.title.startswith("Spike")]
    said = dict(card.rows)
    assert "408%" in said["writers"] and "-308%" in said["writers"] and said["at place"].startswith("0% of the spike")


@pytest.mark.parametrize(("name", "family", "first"), [("second_position", "gpt2", 1), ("restart", "mistral", 0)])
def test_what_remains_without_a_mark_is_that_of_plain_hooks(name, family, first):
    """GPT-2 adds an embedding of positions to that of tokens, and both are the embedding."""
    h, setup, found = measured_spikes(why_sink, name, family)
    spike, own = found.spikes[0], sinks_of(setup).spikes[0].reported
    (mark, row), *_ = spike.table("marks").items()
    (begin, end), ids = own.layers, own.survey.ids
    own = SimpleNamespace(first=begin, last=end, peak=spike.peak, ordinary=own.ordinary, along=own.along)
    left, _ = plain.without_part(h.model, ids, plain.run(h.model, ids), own, mark, first)
    assert row.get("left") == pytest.approx(left, abs=1e-3)
