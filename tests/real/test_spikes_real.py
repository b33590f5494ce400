"""Spikes of two real models: every number is that of plain hooks, and what is said of them is known from elsewhere."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from pathlib import Path

import plain_spikes as plain
import pytest
import torch

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.sinks.spikes.find import circuit, find_sinks

LENGTH, TEXTS = 64, 12


def pieces(tokenizer, text: str, start: list[int]) -> torch.Tensor:
    """Consecutive pieces of a text, cut here once more."""
    body = LENGTH - len(start)
    ids = tokenizer(text[: 8 * TEXTS * body], add_special_tokens=False)["input_ids"]
    return torch.tensor([[*start, *ids[row * body : (row + 1) * body]] for row in range(min(TEXTS, len(ids) // body))])


def typical() -> str:
    return resources.files("sinkscope.models.text").joinpath("typical.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def setup_of_smollm2(smollm2):
    """What `find_sinks` and `circuit` both measure is measured once."""
    return Setup.open(smollm2.model, tokenizer=smollm2.tokenizer)


@pytest.fixture(scope="module")
def of_smollm2(setup_of_smollm2):
    return find_sinks.on(setup_of_smollm2)


@pytest.fixture(scope="module")
def of_gemma3(gemma3):
    return ss.find_sinks(gemma3.model, tokenizer=gemma3.tokenizer)


def compare(real, found, step: int):
    """Numbers of a result and of plain hooks on the same texts."""
    ids = pieces(real.tokenizer, typical(), [real.tokenizer.bos_token_id])
    seen = plain.run(real.model, ids)
    expected = {(one.first, one.last): one for one in plain.spikes(seen)}
    assert {one.layers for one in found.first_spikes} == set(expected)
    mean = plain.received(seen.attention).mean(-1)
    torch.testing.assert_close(torch.tensor(found.heads), mean, atol=1e-3, rtol=0)
    for spike in found.first_spikes:
        own = expected[spike.layers]
        assert spike.norm == pytest.approx(own.norm, rel=1e-3) and spike.peak == own.peak
        shares = plain.mlp_shares(seen, own)
        for writer in spike.writers:
            if writer.part.startswith("mlp "):
                assert writer.share == pytest.approx(shares[int(writer.part[4:])], abs=1e-3)
        without, neurons = spike.without_writers, [(one.layer, one.neuron) for one in spike.neurons]
        left = plain.without(real.model, ids, own, neurons)
        assert without.left == pytest.approx(left.left, abs=1e-3)
        assert without.heads == (plain.readers(seen.attention, own), left.heads)
        assert without.perplexity == pytest.approx(left.perplexity, rel=1e-3)
        alone = spike.alone[0]
        left = plain.without(real.model, ids, own, [(alone.layer, alone.neuron)], step)
        assert (alone.left, alone.heads) == (pytest.approx(left.left, abs=1e-3), left.heads)


def test_smollm2_has_the_numbers_of_plain_hooks(smollm2, of_smollm2):
    compare(smollm2, of_smollm2, 1)


@pytest.mark.slow
def test_gemma3_has_the_numbers_of_plain_hooks(gemma3, of_gemma3):
    compare(gemma3, of_gemma3, 4)


def test_the_mlp_of_layer_8_marks_the_late_spike_of_smollm2_and_most_heads_stay_without_it(smollm2, setup_of_smollm2):
    found = circuit.on(setup_of_smollm2, max_repeats=64)
    ids = pieces(smollm2.tokenizer, typical(), [smollm2.tokenizer.bos_token_id])
    late, mark = found.first_spikes[0], found.first_spikes[0].marks[0]
    seen = plain.run(smollm2.model, ids)
    (own,) = [one for one in plain.spikes(seen) if one.first == late.layers[0]]
    left, heads = plain.without_part(smollm2.model, ids, seen, own, "mlp 8")
    assert mark.part == "mlp 8" and mark.left == pytest.approx(left, abs=1e-3) and mark.heads == heads
    assert left < 0.25 and heads[1] > 0.6 * heads[0]
    record = json.loads(found.to_json())["result"]["spikes"][0]["marks"][0]
    assert {"part", "left", "heads", "random"} <= set(record)


def test_smollm2_has_two_spikes_of_which_two_and_three_neurons_are_needed(of_smollm2):
    late, early = of_smollm2.first_spikes
    assert late.layers == (11, 29) and early.layers == (1, 8)
    assert {str(one) for one in late.needed.neurons} == {"L11.N1229", "L11.N1487"} and late.dims == (507,)
    assert {str(one) for one in early.needed.neurons} == {"L1.N83", "L2.N90", "L2.N430"}
    without = late.without_writers
    assert abs(without.heads[0] - 151) <= 3 and without.heads[1] <= 30 and without.perplexity > 2
    assert late.before == pytest.approx(180.8, rel=1e-2) and without.random.heads == without.heads[0]
    assert of_smollm2.readers.heads == sum(given > 0.3 for layer in of_smollm2.heads for given in layer)  # one count
    assert {one.part for one in late.erasers[:2]} == {"mlp 28", "mlp 29"}
    assert of_smollm2.bos.heads >= 0.9 * of_smollm2.readers.heads  # the sink does not need the token


@pytest.mark.slow
def test_gemma3_is_a_relay_of_which_the_first_neuron_is_needed(of_gemma3):
    relay, start = of_gemma3.first_spikes
    assert relay.layers == (3, 16) and relay.dims == (163,)
    assert [str(one) for one in relay.needed.neurons] == ["L3.N1414"]
    written = {str(one.address): one.share for one in relay.neurons}
    for name in ("L4.N84", "L5.N584", "L6.N1824", "L7.N1455", "L8.N188"):
        assert 0.1 < written[name] < 0.2
    assert written.get("L11.N163", 0) < 0.05  # a third of it before the norm behind the MLP
    others = [one for one in relay.alone if str(one.address) != "L3.N1414"]
    assert len(others) >= 5 and min(one.heads for one in others) >= relay.heads - 6
    assert relay.without_writers.heads[1] <= 15 and start.layers == (0, 2) and start.dims == (400,)
    assert of_gemma3.bos.heads == 0 and abs(of_gemma3.readers.heads - 53) <= 3


def test_what_is_said_of_smollm2(of_smollm2):
    late, early, elsewhere = of_smollm2.cards()
    assert max(map(len, "\n".join(card.text(80) for card in of_smollm2.cards()).splitlines())) <= 80
    assert (late.title, early.title) == (
        "Spike at the first token, layers 11-29",
        "Spike at the first token, layers 1-8",
    )
    said = dict(late.rows)
    assert said["norm"].startswith("181 -> 25,102, 190 times the typical one after layer 11; along dimension 507")
    assert said["writers"] == "L11.N1229 73%   L11.N1487 27%" and said["needed"].startswith("both; 0% left")
    assert said["random"].startswith("100%, ") and "MLP 28" in said["erasers"] and "also at" in dict(early.rows)
    assert elsewhere.rows[0][0] == "without <|im_start|>" and "heads at the first token" in elsewhere.rows[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["code", "table", "license"])
def test_smollm2_needs_the_same_neurons_on_other_texts_and_seeds(smollm2, kind, tmp_path):
    texts = {
        "code": inspect.getsource(inspect),
        "table": "\n".join(f"item{n},{n * 7 % 31},{n / 3:.2f},{'red blue green'.split()[n % 3]}" for n in range(900)),
        "license": Path(resources.files("sinkscope.models.text").joinpath("LICENSE-typical.txt")).read_text("utf-8"),
    }
    file = tmp_path / "text.txt"
    file.write_text(texts[kind] * 4)
    found = ss.find_sinks(smollm2.model, tokenizer=smollm2.tokenizer, text=file, seed=len(kind))
    needed = {one.layers[0]: {str(n) for n in one.needed.neurons} for one in found.first_spikes if one.needed}
    assert needed[11] == {"L11.N1229", "L11.N1487"} and needed[1] == {"L1.N83", "L2.N90", "L2.N430"}
