"""Spikes of two real models: every number is that of plain hooks, and what is said of them is known from elsewhere."""

from __future__ import annotations

import inspect
import re
from importlib import resources
from pathlib import Path

import plain_constancy
import plain_spikes as plain
import pytest
import torch

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import LAST, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import find_sinks, sinks_of, why_sink
from sinkscope.sinks.spikes.records import neuron_of

LENGTH, TEXTS, BESIDE, ALONE = 64, 16, 8, 4


def pieces(tokenizer, half: str) -> torch.Tensor:
    """The texts of four kinds in turn, cut here once more: even documents choose, odd ones report."""
    rows: list[list[int]] = []
    for number in range(TEXTS // 4):
        for kind in ("prose", "dialogue", "code", "tables"):
            text = resources.files("sinkscope.models.text").joinpath("kinds", f"{kind}.txt").read_text("utf-8")
            document = text.split("\n%%%\n")[2 * number + (half == "report")]
            ids = tokenizer(document, add_special_tokens=False)["input_ids"]
            rows.append([tokenizer.bos_token_id, *ids[: LENGTH - 1]])
    return torch.tensor(rows)


INTACT: dict[tuple[str, str], plain.Pass] = {}


def intact(real, half: str) -> plain.Pass:
    """What an intact pass over one half of the texts shows, read once for each model."""
    key = real.model.config.model_type, half
    if key not in INTACT:
        INTACT[key] = plain.run(real.model, pieces(real.tokenizer, half))
    return INTACT[key]


def spike_from(real, first: int) -> plain.PlainSpike:
    """The spike whose run begins at a layer: found in one half, measured in the other."""
    (found,) = [one for one in plain.spikes(intact(real, "choose")) if one.first == first]
    return plain.in_texts(found, intact(real, "report"))


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
    """Numbers of a result and of plain hooks on the same texts; the loss of every so many tokens is read."""
    ids, seen = pieces(real.tokenizer, "report"), intact(real, "report")
    expected = {(one.first, one.last) for one in plain.spikes(intact(real, "choose"))}
    assert {one.layers for one in found.first_spikes} == expected
    given = plain.received(seen.attention)
    torch.testing.assert_close(torch.tensor(found.heads), given.mean(-1), atol=1e-3, rtol=0)
    for spike in found.first_spikes:
        own = spike_from(real, spike.layers[0])
        norm = spike.named("spike", "norm").get("norm_after")
        assert norm == pytest.approx(own.norm, rel=1e-3) and spike.peak == own.peak
        shares = plain.mlp_shares(seen, own)
        for name, row in spike.table("components").items():
            if name.startswith("mlp "):
                assert row.get("share") == pytest.approx(shares[int(name[4:])], abs=1e-3)
        neurons = [(one.layer, one.neuron) for one in spike.needed_neurons]
        for name, at, texts in (("at place", 0, TEXTS), ("everywhere", None, BESIDE)):
            left = plain.without(real.model, ids[:texts], own, neurons, at, step, seen=plain.some(seen, texts))
            row = spike.named("effects", name)
            assert row.get("left") == pytest.approx(left.left, abs=1e-3) and row.get("tokens") == left.tokens
            assert row.get("intact") == plain.readers(given[..., :texts], own) and row.get("heads") == left.heads
            assert row.get("loss") == pytest.approx(left.loss, abs=1e-3)
        for name, row in spike.table("alone").items():
            left = plain.without(real.model, ids[:ALONE], own, [neuron_of(name).site], 0, seen=plain.some(seen, ALONE))
            assert (row.get("left"), row.get("heads")) == (pytest.approx(left.left, abs=1e-3), left.heads)


@pytest.mark.slow
def test_every_number_of_smollm2_is_that_of_plain_hooks(smollm2, of_smollm2):
    compare(smollm2, of_smollm2, 1)


@pytest.mark.slow
def test_every_number_of_gemma3_is_that_of_plain_hooks(gemma3, of_gemma3):
    compare(gemma3, of_gemma3, 2)


@pytest.mark.slow
def test_the_mlp_of_layer_8_marks_the_late_spike_of_smollm2_and_most_heads_stay_without_it(smollm2, setup_of_smollm2):
    found = why_sink.on(setup_of_smollm2)
    ids, seen = pieces(smollm2.tokenizer, "report"), intact(smollm2, "report")
    late = found.first_spikes[0]
    name, mark = next(iter(late.table("marks").items()))
    own = spike_from(smollm2, late.layers[0])
    left, heads = plain.without_part(smollm2.model, ids, seen, own, "mlp 8")
    assert name == "mlp 8" and mark.get("left") == pytest.approx(left, abs=1e-3)
    assert left < 0.25 and heads[1] > 0.6 * heads[0] and "others" in mark.numbers


def test_smollm2_has_two_spikes_of_which_two_and_three_neurons_are_needed(of_smollm2):
    late, early = of_smollm2.first_spikes
    assert late.layers == (11, 29) and early.layers == (1, 8)
    assert {*late.needed} == {"L11.N1229", "L11.N1487"} and late.dims == (507,)
    assert {*early.needed} == {"L1.N83", "L2.N90", "L2.N430"}
    at_place = late.named("effects", "at place")
    assert abs(at_place.get("intact") - 151) <= 3 and at_place.get("heads") <= 30 and at_place.get("loss") > 1
    assert late.named("spike", "norm").get("norm_before") == pytest.approx(180.8, rel=1e-2)
    assert of_smollm2.readers.get("heads") == (of_smollm2.heads > 0.3).sum()  # one count
    assert [*late.table("erasers")][:2] == ["mlp 28", "mlp 29"]


def test_the_effect_of_the_late_writers_is_at_the_place_and_that_of_the_early_ones_mostly_elsewhere(of_smollm2):
    late, early = of_smollm2.first_spikes
    (at_late, at_early), (late_loss, early_loss) = (
        [spike.named("effects", name).get("loss") for spike in (late, early)] for name in ("at place", "everywhere")
    )
    assert late_loss == pytest.approx(at_late, abs=0.1) and at_early < 0.2 < early_loss


def test_what_the_late_writers_do_goes_through_attention_to_the_place(smollm2, of_smollm2):
    """With the first token hidden in the layers behind them, these neurons change no later token: by plain masks."""
    late, ids = of_smollm2.first_spikes[0], pieces(smollm2.tokenizer, "report")[:4]
    losses = []
    for neurons in ([], [(11, 1229), (11, 1487)]):
        with plain.hidden_first(smollm2.model, range(12, 30)), plain.removed(smollm2.model, neurons, 0):
            losses.append(plain.run(smollm2.model, ids).loss[:, 1:])
    torch.testing.assert_close(*losses, atol=1e-4, rtol=0)
    rise = float((losses[0] - plain.some(intact(smollm2, "report"), 4).loss[:, 1:]).mean())
    assert late.named("effects", "hidden").get("loss") < late.named("effects", "at place").get("loss")
    assert rise > 0.5


def test_of_the_early_spike_some_candidates_take_the_late_one_along_or_raise_it(smollm2, of_smollm2):
    """Six neurons write 2 % or more; three are needed. Plain hooks say what the other three do."""
    late, early = of_smollm2.first_spikes
    roles = {name: row.note for name, row in early.table("writers").items()}
    assert roles["L1.N1299"] == "raises" and roles["L1.N609"] == "another spike"
    assert {str(one) for one in early.calibrated} == {name for name in roles if roles[name] in ("needed", "lowers")}
    ids, first, left = pieces(smollm2.tokenizer, "report")[:1], {}, {}
    seen = plain.some(intact(smollm2, "report"), 1)
    for layers in (early.layers, late.layers):
        first[layers] = spike_from(smollm2, layers[0])
        for name, neuron in (("raises", (1, 1299)), ("takes", (1, 609))):
            left[name, layers] = plain.without(smollm2.model, ids, first[layers], [neuron], 0, seen=seen).left
    assert left["raises", early.layers] > 1.5
    assert left["takes", early.layers] > 0.9 and left["takes", late.layers] < 1 - (1 - left["takes", early.layers])
    kept = []
    for roles_of in ({"needed"}, {"needed", "lowers", "raises", "another spike"}):
        some = [neuron_of(name).site for name, role in roles.items() if role in roles_of]
        kept.append(plain.without(smollm2.model, ids, first[late.layers], some, 0, seen=seen).left)
    assert kept[0] > 0.9 and kept[1] < 0.6  # the needed three leave the late spike, all six do not


def test_the_busiest_others_write_as_much_and_cost_a_tenth(smollm2, of_smollm2):
    """Chosen here once more, by plain hooks: the largest mean written norm first, up to that of both neurons."""
    late = of_smollm2.first_spikes[0]
    busiest, own = late.named("controls", "busiest"), {(11, 1229), (11, 1487)}
    chosen, ids = (pieces(smollm2.tokenizer, half) for half in ("choose", "report"))
    norms = plain.written_norms(smollm2.model, chosen, 11)
    total = sum(float(norms[neuron]) for _, neuron in own)
    order = [number for number in norms.argsort(descending=True).tolist() if (11, number) not in own]
    count = 1 + int((norms[order].cumsum(0) - total).abs().argmin())
    norm = float(norms[order[:count]].sum()) / total
    assert busiest.get("size") == count and busiest.get("norm") == pytest.approx(norm, rel=1e-3)
    removed, seen = [(11, number) for number in order[:count]], plain.some(intact(smollm2, "report"), BESIDE)
    left = plain.without(smollm2.model, ids[:BESIDE], spike_from(smollm2, 11), removed, None, seen=seen)
    assert [busiest.get("left"), busiest.get("loss")] == pytest.approx([left.left, left.loss], abs=1e-3)
    assert busiest.get("loss") < 0.2 * late.named("effects", "everywhere").get("loss")
    assert late.named("controls", "random").get("reached") == 0


def test_why_heads_read_the_first_token_of_smollm2(smollm2, setup_of_smollm2):
    """Its state is one and the same in all texts after the spike, its value small, its score there for every query."""
    late, early = sinks_of(setup_of_smollm2).spikes[:2]
    found = constancy_of(late.reported, early.spike.layers[0], ("alone",), 0)
    state, value, score = of_table(found, "constant").values()
    count, after, before = map(int, re.findall(r"\d+", state.note))
    assert before == early.spike.layers[0]
    model, ids, rows = smollm2.model, pieces(smollm2.tokenizer, "report")[:BESIDE], torch.arange(BESIDE)
    own, seen, at = (
        spike_from(smollm2, 11),
        intact(smollm2, "report"),
        ordinary_positions(late.reported.survey.ids[:8], 0),
    )
    given = plain.received(seen.attention).mean(-1) > 0.3
    layers = [layer for layer in range(12, 30) if own.along(seen.states[layer][:, 0]).mean() >= 0.5]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BESIDE, -1, -1)
    alone = causal.clone()
    alone[rows, at] = torch.arange(LENGTH) == at[:, None]
    states, scores, values = plain_constancy.plain(model, ids, causal)
    made = plain_constancy.plain(model, ids, alone)[0][:, rows, at]
    has = own.along(made[own.peak + 1]) >= 0.5
    assert after == layers[0]
    state = of_table(found, "constant")["state"]
    for number, read in (("after", made), ("ordinary_after", states[:, rows, at])):
        between = plain_constancy.cosine_between(read[:, has])
        assert state.get(number) == pytest.approx(float(between[after]), abs=1e-3)
    heads = {layer: given[layer] for layer in layers}
    of_value, of_score = plain_constancy.in_heads(model, scores, values, heads, at, LAST)
    assert len(of_value[0]) == count > 100
    for row, numbers in ((value, of_value), (score, of_score)):
        assert row.get("after") == pytest.approx(float(torch.stack(numbers[0]).mean()), abs=1e-3)
        assert row.get("ordinary_after") == pytest.approx(float(torch.stack(numbers[1]).mean()), abs=1e-3)
    assert state.get("after") > 0.999 > state.get("ordinary_after")
    assert value.get("after") < 0.3 and score.get("after") > 0.9


@pytest.mark.slow
def test_gemma3_is_a_relay_of_which_the_first_neuron_is_needed(of_gemma3):
    relay, start = of_gemma3.first_spikes
    assert relay.layers == (3, 16) and relay.dims == (163,)
    assert relay.needed == ("L3.N1414",)
    written = {name: row.get("share") for name, row in relay.table("writers").items()}
    for name in ("L4.N84", "L5.N584", "L6.N1824", "L7.N1455", "L8.N188"):
        assert 0.1 < written[name] < 0.2
    assert written.get("L11.N163", 0) < 0.05  # a third of it before the norm behind the MLP
    others = [row.get("left") for row in relay.table("writers").values() if row.note != "needed"]
    assert len(others) >= 5 and min(others) > 0.75
    assert relay.named("effects", "at place").get("heads") <= 15 and start.layers == (0, 2) and start.dims == (400,)
    assert "L3.N1414 suffices" in of_gemma3.conclusion() and abs(of_gemma3.readers.get("heads") - 55) <= 4


def test_what_is_said_of_smollm2(of_smollm2):
    late, early, _ = of_smollm2.cards()
    assert max(map(len, "\n".join(card.text(80) for card in of_smollm2.cards()).splitlines())) <= 80
    assert (late.title, early.title) == (
        "Spike at the first token, layers 11-29",
        "Spike at the first token, layers 1-8",
    )
    said = dict(late.rows)
    assert said["norm"].startswith("181 -> 25,102, 183 times the typical one after layer 11; along dimension 507")
    assert said["writers"] == "L11.N1229 73%, needed   L11.N1487 27%, needed"
    assert said["needed"].startswith("L11.N1229 and L11.N1487; 0%")
    assert "nats" in said["at place"] and "MLP 28" in said["erasers"] and "also at" in dict(early.rows)
    assert of_smollm2.conclusion().startswith("L11.N1229 and L11.N1487 suffice for the spike at the first token")


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
    needed = {one.layers[0]: {*one.needed} for one in found.first_spikes if one.needed}
    assert needed[11] == {"L11.N1229", "L11.N1487"} and needed[1] == {"L1.N83", "L2.N90", "L2.N430"}
