"""Commands on models whose sinks are elsewhere or made otherwise: each conclusion is so, or says that it is open."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering, slow
from organisms.hard import hard
from organisms.unseen import UNSEEN, UnseenModel, unseen
from raw_kit import norms

from sinkscope.errors import SinkscopeError
from sinkscope.interventions import SinkPatch
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.first_token.circuit import circuit
from sinkscope.sinks.first_token.find import FindSinks, find_sinks
from sinkscope.sinks.first_token.marking_heads import heads
from sinkscope.sinks.repetition.norm import NormReading
from sinkscope.sinks.repetition.repeat import repeat

CASES = [(name, family, seed) for name, families in UNSEEN.items() for family in families for seed in range(2)]
FAST = (
    ("second_position", "gpt2", 0),
    ("other_windows", "gemma2", 0),
    ("amplified", "llama", 0),
)


def options_of(u: UnseenModel, folder: Path, texts: int = 40) -> dict[str, Any]:
    """The options of a measurement in the model's own words."""
    text = folder / "text.txt"
    text.write_text(" ".join(u.hard.tokenizer.decode(row[1:]) for row in u.hard.natural(texts, 64)), encoding="utf-8")
    return {"tokenizer": u.hard.tokenizer, "text": text, "bos": None if u.beyond.bos else False}


def look(u: UnseenModel, folder: Path) -> FindSinks:
    return find_sinks(u.hard.model, max_repeats=4 if not u.repeated else 600, **options_of(u, folder))


# --- what find-sinks says ------------------------------------------------------------------------------------------


def mistakes(u: UnseenModel, result: FindSinks) -> list[str]:
    """Everything in which the result differs from what was planted."""
    truth, beyond, spike, sink = u.hard.truth, u.beyond, result.norm_spike, result.attention_sink
    assert sink is not None, result.conclusion()
    tokens = {u.hard.tokenizer.decode([token]) for token in truth.later}
    positions = {rule.position for rule in sink.place.rules if rule.position is not None}
    attended = {rule.token for rule in sink.place.rules if rule.position is None}
    sites = {frozenset(each.set.edit_sites) for each in result.further_spikes if each.set is not None}
    planted_later = {frozenset(own) for own in truth.later.values() if own}
    minimal = {frozenset(each.edit_sites) for each in result.causal_sets}
    pairs = {
        "positions": (positions, set(beyond.positions)),
        "tokens": (attended <= tokens, True),
        "spike": (spike is not None and beyond.positions[0] in spike.positions, truth.spike),
        "sets": (minimal, set(truth.sets)),
        "further sets": (sites - minimal, planted_later),
        "carried by": (sink.carried_by, truth.carried_by),
        "window": (sink.window, beyond.window),
        "length": (sink.length > 64, beyond.length > 0),
        "all texts": (sink.share == 1, beyond.share == 1),
    }
    wrong = [f"{name}: found {got}, planted {planted}" for name, (got, planted) in pairs.items() if got != planted]
    if abs(sink.share - beyond.share) > 0.25:
        wrong.append(f"share of texts: found {sink.share}, planted {beyond.share}")
    if u.repeated and (result.repetition is None or result.repetition.set is None):
        wrong.append(f"repetition: found {result.repetition}, planted {u.repeated}")
    elif u.repeated and set(result.repetition.set.edit_sites) != set(u.repeated):  # pyright: ignore
        wrong.append(f"repetition: found {result.repetition}, planted {u.repeated}")
    return [*wrong, *misleading(u, result)]


def misleading(u: UnseenModel, result: FindSinks) -> list[str]:
    """Neurons that the conclusion names and that are not planted, and words that it lacks."""
    text = result.conclusion()
    truth, beyond = u.hard.truth, u.beyond
    named = {int(number) for number in re.findall(r"\.N(\d+)", text)}
    planted = {site[-1] for sites in (*truth.sets, *truth.later.values()) for site in sites}
    words = {
        "(window ": beyond.window is not None,
        "of texts": beyond.share < 1,
        "texts of 512": beyond.length > 0,
        "amplif": u.hard.name == "amplified",
        f"position {beyond.positions[0]}": beyond.positions[0] > 0,
        "without a norm spike": not truth.spike,
    }
    wrong = [word for word, there in words.items() if (word in text) != there]
    if named <= planted and not wrong and len(text.split()) <= 30:
        return []
    return [f"conclusion: {text} {wrong}"]


@pytest.mark.parametrize(("name", "family", "seed"), covering(CASES, FAST))
def test_says_what_is_so(name, family, seed, tmp_path):
    u = unseen(name, family, seed)
    assert mistakes(u, look(u, tmp_path)) == []


# --- what other commands say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", slow("gpt_oss")])
def test_no_command_denies_a_sink_that_heads_have_without_a_spike(family, tmp_path):
    u = unseen("reads_the_mark", family)
    options = options_of(u, tmp_path)
    results = [
        repeat(u.hard.model, max_repeats=4, **options),
        repeat(u.hard.model, max_repeats=4, tokens=["all"], sample=4, **options),
        heads(u.hard.model, count=2, **options),
        attack(u.hard.model, lengths=[2], sequences=2, prefix="", **options),
    ]
    attention = repeat(u.hard.model, read="attention", max_repeats=4, **options)
    for result in results:
        said = result.conclusion()
        assert said.startswith("No MLP makes a norm spike at the first token, so ") and "heads attend to" in said
        assert len(said.split()) <= 30
    assert "no attention sink" not in str(attention) and "No MLP makes a norm spike" in str(attention)


@pytest.mark.slow
def test_circuit_says_of_a_spike_without_neurons_and_of_a_second_way_what_is_so(tmp_path):
    u = unseen("embedded_delimiter", "qwen3")
    found = circuit(u.hard.model, max_repeats=4, **options_of(u, tmp_path))
    (delimiter,) = u.hard.truth.later
    later = found.later[0].sentence(found.later[0].place)
    place = f"{u.hard.tokenizer.decode([delimiter])!r} wherever it stands"
    assert f"attend to {place}; without the token embedding" in later
    u = unseen("other_layer", "neox")  # another token in BOS's place trips the other neuron, and heads read that spike
    says = circuit(u.hard.model, max_repeats=4, **options_of(u, tmp_path)).conclusion()
    assert says.startswith("For the spike of the first token") and "the token embedding is needed" in says


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [("other_neurons", "llama"), slow("other_layer", "neox")])
def test_repetition_through_other_neurons_is_said_and_patched(name, family, tmp_path):
    u = unseen(name, family)
    result = look(u, tmp_path)
    assert not (wrong := mistakes(u, result)), "\n".join(wrong)
    assert "Repetition trips other neurons" in str(result)
    patch = SinkPatch.from_result(result)
    first = {site for sites in u.hard.truth.sets for site in sites}
    assert {site.numbers for site in patch.checked_sites} == first | set(u.repeated)
    token = next(token for token, group in u.hard.groups.items() if group >= 0 and token > 4)
    row = torch.tensor([[1, *[token] * 600]])
    intact = norms(u.hard.model, row)[-1, 0, -1]
    with patch.on(u.hard.model):
        assert norms(u.hard.model, row)[-1, 0, -1] < intact / 4


def test_a_patch_without_the_neurons_of_repetition_is_refused(tmp_path):
    result = look(unseen("other_neurons", "llama"), tmp_path)
    unknown = replace(result, repetition=replace(result.repetition, set=None, neurons=()))
    with pytest.raises(SinkscopeError, match="repeated"):
        SinkPatch.from_result(unknown)


def test_repeat_zeroes_the_set_that_find_sinks_names(tmp_path):
    """Two neurons that stand in for each other: neither is causal alone, and every line is about both."""
    h = hard("redundant_pair", "llama", 0)
    u = UnseenModel(h, unseen("reads_the_mark", "llama").beyond)
    result = repeat(h.model, max_repeats=120, ablate=True, **options_of(u, tmp_path))
    assert isinstance(result.reading, NormReading)
    assert set(result.reading.zeroed[1]) == set(h.truth.sets[0])
    assert float(result.reading.lost[1].max()) > 0.5
