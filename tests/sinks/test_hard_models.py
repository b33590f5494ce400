"""find_sinks on models that are not the textbook case: whatever it says of them has to be so."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from attack_kit import text_file
from conclusion_kit import check_size
from covering import covering, slow
from organisms import HARD, UNSEEN, HardModel, hard

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Setup
from sinkscope.results.parts import sites_of
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.records import RepeatedToken, RepeatsNeeded, Sink
from sinkscope.sinks.find.repetitions import repetition_spike
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.find.spikes import sink_spike
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.repetition.repeat import repeat

SEEDS = (0, 1, 2)
KINDS = HARD | UNSEEN
CASES = [(name, family, seed) for name, families in KINDS.items() for family in families for seed in SEEDS]
FAST = []  # of each kind one family, in turns
for number, (name, families) in enumerate(KINDS.items()):
    FAST.append((name, families[number % len(families)], 0))


def options_of(h: HardModel, folder: Path) -> dict[str, Any]:
    """The options of a measurement in the model's own words."""
    text = text_file(h, folder, 40 if h.truth.share < 1 else 6)
    return {"tokenizer": h.tokenizer, "text": text, "bos": None if h.truth.bos else False}


def look(h: HardModel, folder: Path, **options) -> FindSinks:
    repeats = 600 if h.truth.repeated else 8
    return find_sinks(h.model, **{"max_repeats": repeats} | options_of(h, folder) | options)


def carried(sink: Sink | None) -> str | None:
    """What most heads of a sink need, in one word."""
    if sink is None or sink.place is None:
        return None if sink is None else "learned logits"
    heads = Counter()
    for group in sink.groups:
        for part in group.claim.subject[-1:] if group.claim else ():  # the one nearest to the heads
            kind = "spike" if group.by_spike else getattr(part, "kind", "mark")
            heads["mark" if kind in ("attention", "mlp", "mixer") else kind] += len(group.heads)
    [(word, count)] = heads.most_common(1) or [(None, 0)]
    return word if 2 * count >= sum(len(group.heads) for group in sink.groups) else None


def check(h: HardModel, result: FindSinks):
    """The result is what was planted, and its numbers prove what it says."""
    truth, sink = h.truth, result.sink
    places = [str(each.place) for each in (*result.sinks, *result.spikes) if each.place is not None]
    assert all("first token" in place for place in places)
    assert bool(result.spikes) == bool(truth.spike) and result.sink_layer == truth.sink_layer
    assert sorted(result.shared_dims) == sorted(truth.shared_dims) and carried(sink) == truth.carried_by
    if result.spikes:
        assert result.spikes[0].step_down == truth.step_down
        assert result.spikes[0].step_up == truth.step_up
    if sink is not None:
        share = 1.0 if sink.place is None else sink.place.share
        assert share == pytest.approx(truth.share, abs=0.25) and (share == 1) == (truth.share == 1)
    if truth.repeated:
        assert result.repetition is not None and result.repetition.other_neurons
    assert (frozenset(sites_of(result.minimal)) or None) in (truth.sets or (None,))
    if result.minimal:
        claim = result.spikes[0].claims[0]
        assert (claim.subject, claim.verdict) == (result.minimal, "needed")
    planted = {site for sites in truth.sets for site in sites}
    for neuron in result.causal:  # neurons of smaller stages make their part of the norm
        smaller_stage = neuron.layer in truth.step_up and neuron.layer != truth.sink_layer
        assert neuron.site in planted or smaller_stage
    said = result.conclusion()
    check_size(said)
    assert ("of texts" in said) == (truth.share < 1)
    assert said.startswith("No attention sink") == bool(result.spikes and not result.sinks)
    named = {int(number) for number in re.findall(r"\.N(\d+)", said)}
    assert named <= {site[-1] for site in planted}


@pytest.mark.parametrize(("name", "family", "seed"), covering(CASES, FAST))
def test_says_what_is_so(name, family, seed, tmp_path):
    h = hard(name, family, seed)
    check(h, look(h, tmp_path))


def test_streamed_layers_are_read_until_there_is_a_sink(tmp_path):
    """The norm stays flat for a third of the layers, but no head attends there: all are read."""
    h = hard("spike_only", "llama")
    h.model.save_pretrained(tmp_path / "model")
    h.tokenizer.save_pretrained(tmp_path / "model")
    found = find_sinks(str(tmp_path / "model"), max_repeats=8, text=text_file(h, tmp_path, 8))
    check(h, found)
    assert found.layers_read == h.model.config.num_hidden_layers


def test_a_claim_names_the_layers_of_one_of_two_spikes_of_a_place(tmp_path):
    h = hard("another_direction")
    result = look(h, tmp_path)
    (spike,) = result.spikes
    assert spike.layers == ((1, 2), (4, 7)) and frozenset(sites_of(spike.set)) == h.truth.sets[0]
    assert spike.claims[0].place == "the first token after layer 4" and spike.claims[0].value < 0.01


def test_a_patch_is_refused_where_repetition_needs_other_neurons(tmp_path):
    with pytest.raises(SinkscopeError, match="would not repair repetition"):
        SinkPatch.from_result(look(hard("other_neurons", "llama"), tmp_path))


def test_without_bos(tmp_path):
    """Texts that begin with a word: nothing where only BOS is marked."""
    h = hard("token_embedding", "gpt2", 1)
    result = look(h, tmp_path, bos=False)
    assert not result.spikes and not result.sinks and not result.minimal


# --- what other commands say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", slow("gpt_oss")])
def test_no_command_denies_a_sink_that_heads_have_without_a_spike(family, tmp_path):
    h = hard("no_norm", family)
    options = options_of(h, tmp_path)
    results = [
        repeat(h.model, max_repeats=4, **options),
        repeat(h.model, read="attention", max_repeats=4, **options),
        heads(h.model, count=2, **options),
        attack(h.model, lengths=[2], sequences=2, **options),
    ]
    for result in results:
        said = result.conclusion()
        assert re.match("No (MLP makes|neurons are known that make) a norm spike", said) and said.endswith(
            "see `circuit`."
        )


def test_repeat_zeroes_the_set_that_find_sinks_names(tmp_path):
    """Two neurons that stand in for each other: neither is causal alone, and every line is about both."""
    h = hard("redundant_pair", "llama", 0)
    result = repeat(h.model, max_repeats=120, ablate=True, **options_of(h, tmp_path))
    assert set(sites_of(result.claims[0].subject)) == set(h.truth.sets[0])
    assert result.claims[0].value < 0.5


# --- ordinary models without a sink --------------------------------------------------------------------------------


def test_copies_make_a_spike_that_no_neurons_are_known_of():
    setup = Setup.open(ss.load())
    made = sink_spike(setup)
    assert made is not None
    token = setup.tokenizer.encode(" the", add_special_tokens=False)[-1]
    needed = RepeatsNeeded((RepeatedToken("the", token, 300),), 300.0, 400)
    found = repetition_spike(setup, made.scan, needed, [setup.bos or 0], ())
    assert found is not None and [claim.verdict for claim in found.claims] == ["sufficient"]
