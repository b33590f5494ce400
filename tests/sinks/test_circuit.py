"""The circuit against planted ones, and its words against its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from attack_kit import text_file
from conclusion_kit import check_size
from covering import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, organism

from sinkscope.hooks.trace.run import trace
from sinkscope.opening.live import target_of
from sinkscope.results.notation import neuron_name
from sinkscope.sinks.circuit.circuit import Circuit, SinkCircuit, circuit
from sinkscope.sinks.circuit.steps import MARK, NEURONS, REPETITION, CircuitStep, Readers
from sinkscope.sinks.removal.components import Component, one_by_one
from sinkscope.sinks.removal.position_effect import PositionEffect


def traced(o: Organism, folder: Path, **options) -> Circuit:
    text = text_file(o, folder, 6, seed=9)
    return circuit(o.model, tokenizer=o.tokenizer, text=text, **{"max_repeats": 8, **options})


SLOWER = [slow(*case) for case in (("gpt_oss", 1), ("gemma2", 2), ("mixtral", 1))]


@pytest.mark.parametrize(("family", "seed"), [("llama", 3), *SLOWER])
def test_an_ordinary_circuit_is_found_from_the_mark_to_the_readers(family, seed, tmp_path):
    o = organism(family, seed)
    truth = o.truth
    word = o.tokenizer.decode([o.tokens_of(1)[0]])
    found = traced(o, tmp_path, token=word, max_repeats=120) if family == "llama" else traced(o, tmp_path)
    assert found.sink_layer == truth.sink_layer
    steps = {MARK: truth.group_heads[truth.groups[1]][0]}
    if family == "llama":  # another token is marked by a head of its own
        assert found.repeated == word
        steps[REPETITION] = truth.group_heads[1][0]
    for name, head in steps.items():
        step = found.step(name)
        assert step.chosen == (f"L{truth.marking_layer}.H{head}",) and step.control < 0.2
        assert step.necessity[0] > 0.95 and step.sufficiency[0] > 0.9
    neurons = found.step(NEURONS)
    assert set(neurons.chosen) == {neuron_name(*site) for site in truth.neurons}
    assert neurons.together > 0.95 and neurons.control < 0.1
    (readers,) = found.readers
    assert readers.needs == ("spike",) and readers.evidence.holds
    assert set(readers.heads) == {f"L{layer}.H{head}" for layer, head in truth.reading_heads}
    assert readers.attention_without.mean() < 0.2 < 0.8 < min(readers.attention.mean(), readers.control)


def test_a_model_without_a_sink_has_no_circuit(tmp_path):
    found = traced(organism("llama", 3, kind="none"), tmp_path)
    assert found.rows() == [] and found.place is None
    assert found.conclusion().startswith("No circuit: no norm stands out, and too few heads attend to any one position")
    assert "no circuit" in str(found.figure().layout)


@pytest.mark.parametrize(("stray_norms", "scattered"), [(0, 0), (9, 0), (0, 9), (9, 9)])
def test_scattered_places_are_not_denied(stray_norms, scattered):
    """A result without a circuit says that no norm, and no attention, stands out only if none does."""
    said = Circuit(first_token="<s>", stray_norms=stray_norms, scattered=scattered).conclusion()
    assert ("no norm stands out" in said) == (not stray_norms)
    assert ("too few heads attend to any one position" in said) == (not scattered)


def test_a_component_gives_a_position_what_it_gives_at_another():
    """Necessity and sufficiency of the token embedding are those of a text with the other token."""
    o = organism("llama", 3)
    target, ids = target_of(o.model, o.tokenizer), o.natural(2, 12)
    effect = PositionEffect(target, ids, 0, 5, o.truth.sink_layer)

    def norm(tokens, at):
        name = f"blocks.{o.truth.sink_layer}.hook_resid_post"
        return trace(target, tokens, [name], "norm")[name][:, at]

    other, later = ids.clone(), ids.clone()
    other[:, 0], later[:, 5] = ids[:, 5], ids[:, 0]
    top, floor = norm(ids, 0), norm(ids, 5)
    span, embedding = (top - floor).mean(), one_by_one([Component("token embedding")])
    assert effect.necessity(embedding) == pytest.approx([float((top - norm(other, 0)).mean() / span)], abs=1e-4)
    assert effect.sufficiency(embedding, float(span)) == pytest.approx(
        [float((norm(later, 5) - floor).mean() / span)], abs=1e-4
    )
    assert np.isnan(effect.sufficiency(one_by_one([Component("key bias")]), 1.0)).all()


# -- words -------------------------------------------------------------------------------------------------------------

NAMES = ("L0.H1", "L1.H2", "MLP of layer 0", "token embedding", "key bias")
STEPS = (MARK, NEURONS, REPETITION)


def any_share(rng: np.random.Generator) -> float:
    """Often near the bar."""
    return float(rng.choice([rng.uniform(-0.3, 1.3), 0.4999, 0.5, 0.5001, 1.0]))


def any_step(rng: np.random.Generator, name: str) -> CircuitStep:
    components = ("L2.N7", "L2.N9") if name == NEURONS else NAMES
    components = components[: rng.integers(1, len(components) + 1)]
    chosen = components[: rng.integers(0, len(components) + 1)]
    losses = np.array([any_share(rng) for _ in components])
    control = None if rng.random() < 0.2 else any_share(rng)
    return CircuitStep(name, components, losses, losses, chosen, any_share(rng) if chosen else 0.0, control)


def any_sink(rng: np.random.Generator, place: str) -> SinkCircuit:
    readers = []
    for _ in range(rng.integers(1, 6)):
        intact = rng.uniform(0.3, 1, rng.integers(1, 4))
        needs = [("spike",), ("L0.H1",), ("token embedding", "position embedding"), ()][rng.integers(4)]
        control = None if rng.random() < 0.2 else float(rng.random())
        heads = tuple(f"L3.H{head}" for head in range(len(intact)))
        readers.append(Readers(needs, heads, intact, intact * rng.uniform(0, 1.1), control))
    readers.sort(key=lambda group: -len(group.heads))
    names = [name for name in STEPS if rng.random() < 0.6]
    steps = tuple(any_step(rng, name) for name in names)
    is_later = place == "'.'"
    about = {"position": 5 * is_later, "sink_layer": 2, "n_heads": 32}
    return SinkCircuit(place=place, steps=steps, readers=tuple(readers), **about)


def claims(text: str, steps: list[CircuitStep]):
    """Every "needed" in a sentence is borne out by a step whose numbers say so."""
    bearing = set()
    for step in steps:
        if step.together >= 0.5 and step.together > (step.control or 0.0):
            bearing.update(step.chosen)
    for names in re.findall(r"([^;]*?) is needed: ", text):
        assert re.findall(r"L\d\.[HN]\d|MLP of layer 0|token embedding|key bias", names)[-1] in bearing, text


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_no_sentence_claims_what_its_numbers_do_not_carry(seed):
    rng = np.random.default_rng(seed)
    first, later = any_sink(rng, "the first token '<s>'"), any_sink(rng, "'.'")
    repeated = {"repeated": " a", "repeats": int(rng.integers(1, 9)), "untested": ("the bias of the keys",)}
    found = Circuit(first_token="<s>", later=(later,), learned_rate=0.3, **vars(first), **repeated)
    lines = [found.conclusion(), *found.details()]
    assert len(lines) <= 7
    check_size(lines[0])
    for line in lines:
        claims(line, [*first.steps, *later.steps])
        assert not re.search(r"without the token embedding and 1 more their", line), line  # there is room for two names
        assert not re.search(r"\b1 \w+s\b|nan", line), line
        for before, after in re.findall(r"falls from (\d\.\d+) to (\d\.\d+)", line):
            assert float(after) <= 0.5 * float(before) + 0.01, line
        for share, chance in re.findall(r"(\d[\d.]*)% is lost without (?:[^;]*?at most (-?[\d.]+)%)?", line):
            more = float(share) > float(chance or 0) or "undecided" in line
            assert float(share) >= 49.99 and more, line
    readers = [row for row in found.rows() if row["step"] == "readers"]
    heads = 0
    for row in found.shown_rows():  # heads that need the same are one row
        if row["step"] == "readers":
            same = [one["necessity"] for one in readers if (one["sink"], one["source"]) == (row["sink"], row["source"])]
            assert min(same) - 1e-9 <= row["necessity"] <= max(same) + 1e-9
            heads += int(row["target"].split()[0]) if "heads" in row["target"] else 1
    assert heads == len(readers)
    for row in found.rows():
        assert set(row) == {"sink", "step", "source", "target", "necessity", "necessity_control", "sufficiency"}
    for grid in found.grids():  # two rows of a terminal can be told apart
        left_out = re.findall(r"Not shown: (.*) \(--csv", grid.narrow(80).note)
        assert not re.search("sink|step|source", " ".join(left_out))
