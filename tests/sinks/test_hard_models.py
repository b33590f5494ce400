"""find_sinks on models that are not the textbook case: whatever it says of them has to be so."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_kit import text_file
from conclusion_kit import check_size
from covering import covering, slow
from organisms import HARD, UNSEEN, HardModel, hard
from raw_kit import norms, zeroed

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
from sinkscope.sinks.find.sentences import spike_fact
from sinkscope.sinks.find.spikes import sink_spike
from sinkscope.sinks.marking_heads import heads
from sinkscope.sinks.repetition.repeat import repeat

SEEDS = (0, 1, 2)
KINDS = HARD | UNSEEN
CASES = [(name, family, seed) for name, families in KINDS.items() for family in families for seed in SEEDS]
FAST = []  # of each kind one family, in turns
for number, (name, families) in enumerate(KINDS.items()):
    if name != "small_stages":  # 28 layers, which are streamed below
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
        first, *others = [set(each.step_up) for each in result.spikes if each.place == result.spikes[0].place]
        assert first <= {*truth.step_up} <= first.union(*others) or not truth.step_up  # of a small spike, noise too
    if sink is not None:
        share = 1.0 if sink.place is None else sink.place.share
        assert (sink.window, sink.length) == (truth.window, 64)
        assert share == pytest.approx(truth.share, abs=0.25) and (share == 1) == (truth.share == 1)
    if truth.repeated:
        assert {neuron.site for neuron in result.repetition.others} == set(truth.repeated)
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
    assert ("(window " in said) == (truth.window is not None) and ("of texts" in said) == (truth.share < 1)
    assert said.startswith("No attention sink") == bool(result.spikes and not result.sinks)
    named = {int(number) for number in re.findall(r"\.N(\d+)", said)}
    assert named <= {site[-1] for site in planted}


@pytest.mark.parametrize(("name", "family", "seed"), covering(CASES, FAST))
def test_says_what_is_so(name, family, seed, tmp_path):
    h = hard(name, family, seed)
    check(h, look(h, tmp_path))


def test_streamed_layers_are_read_until_attention_agrees(tmp_path):
    """Layers 1 and 2 of 28 or more make a norm that stands out and stays flat for a third of the model."""
    h = hard("small_stages", "gpt2", 1)
    h.model.save_pretrained(tmp_path / "model")
    h.tokenizer.save_pretrained(tmp_path / "model")
    text = str(options_of(h, tmp_path)["text"])
    setup = Setup.open(str(tmp_path / "model"), text=text)
    found, made = find_sinks.on(setup, max_repeats=8), sink_spike(setup)
    check(h, found)
    assert made is not None and made.scan.sink_layer == found.sink_layer  # what other commands edit
    assert {neuron.site for neuron in made.neurons} <= {neuron.site for neuron in found.neurons}


def test_a_spike_in_another_direction_is_another_spike(tmp_path):
    h = hard("another_direction")
    result = look(h, tmp_path)
    last, first = result.spikes
    assert [last.layers, first.layers] == [((4, 7),), ((1, 2),)]
    assert [frozenset(sites_of(spike.set)) for spike in (last, first)] == list(h.truth.sets)
    assert all(spike.claims[0].verdict == "needed" and spike.claims[0].value < 0.01 for spike in result.spikes)
    assert last.step_down == () and first.step_down == (3,)
    places = [spike.claims[0].place for spike in (last, first)]
    assert places == ["the first token after layers 4 to 7", "the first token after layers 1 to 2"]


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
        repeat(h.model, max_repeats=4, tokens=["all"], sample=4, **options),
        heads(h.model, count=2, **options),
        attack(h.model, lengths=[2], sequences=2, **options),
    ]
    attended = str(repeat(h.model, read="attention", max_repeats=4, **options))
    for result in results:
        said = result.conclusion()
        assert said.startswith("No MLP makes a norm spike, so ") and "heads attend to" in said
        assert len(said.split()) <= 30
    assert "no attention sink" not in attended and "the first token" in attended


def test_a_patch_holds_the_neurons_of_repetition_too_and_is_refused_without(tmp_path):
    h = hard("other_neurons", "llama")
    result = look(h, tmp_path)
    first = {site for sites in h.truth.sets for site in sites}
    assert {site.site for site in SinkPatch.from_result(result).checked_sites} == first | set(h.truth.repeated)
    unknown = replace(result, repetition=replace(result.repetition, others=()))
    with pytest.raises(SinkscopeError, match="repeated"):
        SinkPatch.from_result(unknown)


def test_repeat_zeroes_the_set_that_find_sinks_names(tmp_path):
    """Two neurons that stand in for each other: neither is causal alone, and every line is about both."""
    h = hard("redundant_pair", "llama", 0)
    result = repeat(h.model, max_repeats=120, ablate=True, **options_of(h, tmp_path))
    assert set(sites_of(result.claims[0].subject)) == set(h.truth.sets[0])
    assert result.claims[0].value < 0.5


# --- ordinary models without a sink --------------------------------------------------------------------------------


def test_neurons_that_serve_different_tokens_are_told_apart(tmp_path):
    h = hard("two_classes", "llama")
    text = text_file(h, tmp_path, 40)
    result = find_sinks(h.model, tokenizer=h.tokenizer, text=text, bos=False, max_repeats=8)
    (both,) = h.truth.sets
    assert set(sites_of(result.minimal)) == both
    serving = [claim for claim in result.claims if claim.role == "serves" and claim.place.startswith("the first token")]
    assert {claim.subject[0].site for claim in serving} == both
    sink = h.truth.sink_layer
    for claim in serving:
        assert claim.verdict == "needed"
        tokens = h.tokenizer.convert_tokens_to_ids(re.findall("'(.+?)'", claim.place))
        first = torch.tensor(tokens)[:, None]
        assert len(tokens) >= 3
        intact = norms(h.model, first)[sink, :, 0]
        for site in both:
            with zeroed(h.model, (site,)):
                kept = norms(h.model, first)[sink, :, 0] / intact
            assert (kept < 0.2).all() if claim.subject[0].site == site else (kept > 0.8).all()
    # A head that reads the spike needs both, also if the first texts that it is read in need the same one.
    assert result.sink is not None
    for group in result.sink.groups:
        assert {neuron.site for neuron in group.claim.subject} == both


@pytest.mark.parametrize(("name", "depends"), [("dependent", True), ("two_sinks", False)])
def test_a_spike_that_needs_another_one_is_said_to(name, depends, tmp_path):
    h: Any = hard(name, "llama")
    text = text_file(h, tmp_path, 30)
    result = find_sinks(h.model, tokenizer=h.tokenizer, text=text, max_repeats=8)
    claims = [claim for claim in result.claims if claim.role == "depends"]
    first, other = result.spikes
    assert first.set and other.set
    rows = torch.tensor(h.tokenizer(Path(text).read_text())["input_ids"][: 16 * 40]).view(16, 40)
    rows[:, 0] = h.tokenizer.bos_token_id
    after = norms(h.model, rows)[-1]
    there = after > 10 * after.median()
    there[:, 0] = False
    assert there.sum() >= 3
    with zeroed(h.model, sites_of(first.set)):
        gone = (norms(h.model, rows)[-1] < 0.2 * after)[there]
    assert gone.all() if depends else not gone.any()
    assert [claim.subject for claim in claims] == ([first.set] if depends else [])
    assert all(claim.place == other.place.words and claim.value < 0.2 for claim in claims)
    if depends:  # also where nothing at its own place was found to make it
        assert "nothing that was removed takes it away" in spike_fact(replace(other, claims=tuple(claims)))
        assert claims[0].sentence() in result.details()


def test_copies_make_a_spike_that_no_neurons_are_known_of():
    setup = Setup.open(ss.load())
    made = sink_spike(setup)
    assert made is not None
    token = setup.tokenizer.encode(" the", add_special_tokens=False)[-1]
    needed = RepeatsNeeded((RepeatedToken("the", token, 300),), 300.0, 400)
    found = repetition_spike(setup, made.scan, needed, [setup.bos or 0], ())
    assert found is not None and [claim.verdict for claim in found.claims] == ["sufficient"]
