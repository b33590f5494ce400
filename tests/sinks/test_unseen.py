"""Spikes of kinds that came after the steps: what was planted is said, and marks are those of plain hooks."""

from __future__ import annotations

from contextlib import contextmanager

import plain_spikes as plain
import pytest
import torch
from attack_kit import text_file
from covering import slow
from organisms import HardModel, hard
from organisms.blind import BLIND, PlantedSpike
from organisms.build import FIRST, SECOND
from raw_kit import blocks, part

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.sinks.spikes.circuit import circuit
from sinkscope.sinks.spikes.records import SpikeResult
from sinkscope.sinks.spikes.steps import sinks_of

QUICK = {"restart": 0, "backup_of_two": 1, "second_position": 0, "saturated": 0, "attention_spike": 0, "relay": 1}
CASES = []
for name, families in BLIND.items():
    for number, family in enumerate(families):
        CASES.append((name, family) if QUICK.get(name) == number else slow(name, family))


def measured(h: HardModel, folder) -> tuple[Setup, ss.Result]:
    bos = None if h.truth.bos else False
    setup = Setup.open(h.model, tokenizer=h.tokenizer, text=text_file(h, folder, 20), bos=bos)
    return setup, circuit.on(setup, max_repeats=4)


def words_of(h: HardModel, place) -> str:
    if place == FIRST:
        return "the first token"
    return "position 1" if place == SECOND else repr(h.tokenizer.decode([place]))


def written_in_run(spike: SpikeResult) -> set[str]:
    """The components that write a tenth of a spike in its layers; the embedding does so before the first."""
    parts = set[str]()
    for one in spike.writers:
        layer = 0 if one.part == "embedding" else int(one.part.split()[1])
        if abs(one.share) >= 0.1 and layer >= spike.layers[0]:
            parts.add(one.part)
    return parts


@pytest.mark.parametrize(("name", "family"), CASES)
def test_what_was_planted_is_said(name, family, tmp_path):
    h = hard(name, family)
    _, found = measured(h, tmp_path)
    assert len(found.spikes) == len(h.truth.planted)
    for planted in h.truth.planted:
        words, layers = words_of(h, planted.place), (planted.first, planted.last)
        (spike,) = [one for one in found.spikes if words in one.place.words and one.layers == layers]
        check(planted, spike)
    said = " ".join([found.conclusion(), *found.details()])
    assert " 0 of 0 " not in said and "-0%" not in said


def check(planted: PlantedSpike, spike: SpikeResult):
    assert spike.needed is not None and frozenset(spike.needed.parts) in planted.needs
    assert written_in_run(spike) == set(planted.writers)
    assert {one.part for one in spike.erasers} == set(planted.erasers)
    assert planted.backups <= set(map(str, spike.backups))
    if "embedding" in spike.needed.parts:
        assert not spike.marks  # what has the spike itself marks nothing
    elif planted.marks:
        assert spike.marks[0].part in planted.marks
    else:
        assert spike.marks[0].part == "attention 0 and embedding"


def test_a_sentence_names_no_writer_that_was_erased_before_and_each_that_writes_against(tmp_path):
    _, found = measured(hard("restart", "mistral"), tmp_path)
    late, early = found.details()[2:4]
    assert "L1.N" not in late and "L1.N" in early
    _, found = measured(hard("saturated", "llama"), tmp_path)
    (line,) = [line for line in found.details() if "raises the norm" in line]
    assert "(408%) raises the norm" in line and "(308%) writes against it" in line and "Without both, 0%" in line


@contextmanager
def replaced(model, name: str, place: torch.Tensor, mean: torch.Tensor):
    """At a place, the embedding or an attention layer writes this instead."""

    def edited(states: torch.Tensor) -> torch.Tensor:
        return torch.where(place[..., None], mean, states)

    if name == "embedding":
        handle = blocks(model)[0].register_forward_pre_hook(lambda _m, args: (edited(args[0]), *args[1:]))
    else:
        module = part(blocks(model)[int(name.split()[1])], "self_attn", "attn")
        handle = module.register_forward_hook(lambda _m, _a, out: (edited(out[0]), *out[1:]))
    yield
    handle.remove()


@pytest.mark.parametrize(("name", "family", "first"), [("second_position", "gpt2", 1), ("restart", "mistral", 0)])
def test_what_remains_without_a_mark_and_the_heads_are_those_of_plain_hooks(name, family, first, tmp_path):
    """GPT-2 adds an embedding of positions to that of tokens, and both are the embedding."""
    h = hard(name, family)
    setup, found = measured(h, tmp_path)
    spike, own, ids = found.spikes[0], sinks_of(setup).spikes[0].spike, sinks_of(setup).survey.ids
    mark = spike.marks[0]
    place = torch.zeros_like(ids, dtype=torch.bool)
    place[:, first] = True
    seen = plain.run(h.model, ids)
    added = seen.states[0] if mark.part == "embedding" else seen.states[1] - seen.states[0] - seen.mlp[0]
    with replaced(h.model, mark.part, place[:4], added[own.ordinary].mean(0)):
        edited = plain.run(h.model, ids[:4])
    along = [own.along(states[own.peak + 1, :4, first]).mean() for states in (edited.states, seen.states)]
    assert mark.left == pytest.approx(float(along[0] / along[1]), abs=1e-3)
    layers = range(spike.layers[0] + 1, len(seen.mlp))
    heads = []
    for rows in (seen.attention, edited.attention):
        given = torch.stack([rows[layer][:4, :, first + 1 :, first].mean((0, 2)) for layer in layers])
        heads.append(int((given > 0.3).sum()))
    assert mark.heads == tuple(heads) and heads[0] > heads[1] == 0
