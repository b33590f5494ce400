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

LENGTH, TEXTS = 64, 12


def pieces(tokenizer, text: str, start: list[int]) -> torch.Tensor:
    """Consecutive pieces of a text, cut here once more."""
    body = LENGTH - len(start)
    ids = tokenizer(text[: 8 * TEXTS * body], add_special_tokens=False)["input_ids"]
    return torch.tensor([[*start, *ids[row * body : (row + 1) * body]] for row in range(min(TEXTS, len(ids) // body))])


def typical() -> str:
    return resources.files("sinkscope.models.text").joinpath("typical.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def of_smollm2(smollm2):
    return ss.find_sinks(smollm2.model, tokenizer=smollm2.tokenizer)


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
        neurons = [(one.layer, one.neuron) for one in spike.needed.neurons]
        left = plain.without(real.model, ids, own, neurons)
        assert spike.needed.left == pytest.approx(left.left, abs=1e-3)
        assert spike.needed.heads == (plain.readers(plain.run(real.model, ids[:4]).attention, own), left.heads)
        assert spike.needed.perplexity == pytest.approx(left.perplexity, rel=1e-3)
        alone = spike.alone[0]
        left = plain.without(real.model, ids, own, [(alone.layer, alone.neuron)], step)
        assert (alone.left, alone.heads) == (pytest.approx(left.left, abs=1e-3), left.heads)


def test_smollm2_has_the_numbers_of_plain_hooks(smollm2, of_smollm2):
    compare(smollm2, of_smollm2, 1)


@pytest.mark.slow
def test_gemma3_has_the_numbers_of_plain_hooks(gemma3, of_gemma3):
    compare(gemma3, of_gemma3, 4)


def test_the_mlp_of_layer_8_marks_the_late_spike_of_smollm2_and_most_heads_stay_without_it(smollm2):
    found = ss.circuit(smollm2.model, tokenizer=smollm2.tokenizer, max_repeats=64)
    ids = pieces(smollm2.tokenizer, typical(), [smollm2.tokenizer.bos_token_id])
    late, mark = found.first_spikes[0], found.first_spikes[0].marks[0]
    (own,) = [one for one in plain.spikes(plain.run(smollm2.model, ids)) if one.first == late.layers[0]]
    left, heads = plain.without_part(smollm2.model, ids, own, "mlp 8")
    assert mark.part == "mlp 8" and mark.left == pytest.approx(left, abs=1e-3) and mark.heads == heads
    assert left < 0.25 and heads[1] > 0.6 * heads[0]
    record = json.loads(found.to_json())["result"]["spikes"][0]["marks"][0]
    assert {"part", "left", "heads", "random"} <= set(record)


def test_smollm2_has_two_spikes_of_which_two_and_three_neurons_are_needed(of_smollm2):
    late, early = of_smollm2.first_spikes
    assert late.layers == (11, 29) and early.layers == (1, 8)
    assert {str(one) for one in late.needed.neurons} == {"L11.N1229", "L11.N1487"} and late.dims == (507,)
    assert {str(one) for one in early.needed.neurons} == {"L1.N83", "L2.N90", "L2.N430"}
    assert abs(late.needed.heads[0] - 151) <= 3 and late.needed.heads[1] <= 30 and late.needed.perplexity > 2
    assert late.before == pytest.approx(180.8, rel=1e-2) and late.needed.random.heads == late.needed.heads[0]
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
    assert len(others) >= 5 and min(one.heads for one in others) >= relay.needed.heads[0] - 4
    assert relay.needed.heads[1] <= 15 and start.layers == (0, 2) and start.dims == (400,)
    assert of_gemma3.bos.heads == 0 and abs(of_gemma3.readers.heads - 53) <= 3


def test_what_is_said_of_smollm2(of_smollm2):
    lines = [of_smollm2.conclusion(), *of_smollm2.details()]
    assert len(lines) <= 6 and max(len(sentence.split()) for line in lines for sentence in line.split(". ")) <= 30
    assert "149 in layers 12-29" in lines[0] and "with or without <|im_start|>" in lines[0]
    assert lines[1].startswith("Layers 11-29: L11.N1229 (73%) and L11.N1487 (27%) raise the norm at the first token")
    assert "Either writer is enough" in lines[1] and "gone" not in " ".join(lines)


@pytest.mark.slow
def test_what_is_said_of_gemma3(of_gemma3):
    lines = [of_gemma3.conclusion(), *of_gemma3.details()]
    assert "(0 without <bos>)" in lines[0]
    assert lines[1].startswith("Layers 3-16: L3.N1414 (12%), ") and "Without L3.N1414, " in lines[1]


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
