"""Parts, conditions and purpose in models of other kinds: every number is that of plain hooks and masks."""

from __future__ import annotations

from functools import partial

import plain_hooks as plain
import pytest
import torch
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from plain_hooks import blocks, inputs_edited, part, residuals, zeroed

from sinkscope.errors import UnsupportedError
from sinkscope.opening.live import target_of
from sinkscope.results.notation import Component, Head
from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import BEFORE, BEGIN, SpikeCircuit, conditions_of, ordinary_positions, purpose_of
from sinkscope.sinks.spikes.edited import left_at_place
from sinkscope.sinks.spikes.find import Sinks, answers_of
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.spike import Place, PlaceWords, Spike, at_position, ordinary_of
from sinkscope.sinks.spikes.survey import read_survey
from sinkscope.sinks.spikes.writers import neuron_at, of_layer

LENGTH, PEAK = 48, 1


def first_token(model, bos: int | None = 1) -> Spike:
    """What the first token of a random model has beyond ordinary positions, as if it were a spike."""
    ids = torch.randint(5, 90, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    if bos is not None:
        ids[:, 0] = bos
    survey = read_survey(target_of(model), ids)
    place, ordinary = at_position(ids, 0), ordinary_of(survey)
    mean = survey.states[PEAK][ordinary].mean(0)
    away = survey.states[PEAK][place].mean(0) - mean
    place = Place(place, PlaceWords("the first token", "<s>"), partial(at_position, position=0))
    return Spike(survey, place, ordinary, mean, away / away.norm(), float(away.norm()), (0, PEAK), PEAK, PEAK)


def circuit_of(spike: Spike) -> SpikeCircuit:
    """The spike, as if nothing were known that it needs."""
    return SpikeCircuit(spike, spike, Needs({}, {}, ()))


# --- parts ---

OUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attention.dense")
"""Where heads are put together."""


@pytest.mark.parametrize(
    "model_type", ["gemma2", "gpt_oss", "mixtral", "glm4_moe", "gpt2", "gpt_neox", "falcon", "lfm2"]
)
@torch.no_grad()
def test_neurons_heads_and_components_of_each_family_are_those_of_plain_hooks(model_type):
    """Norms behind parts, experts in two layouts and shared ones, fused and transposed projections, mixers."""
    model = decoder("lfm2") if model_type == "lfm2" else tiny_model(model_type)[0]
    spike = first_token(model)
    survey, ids = spike.survey, spike.survey.ids
    own = at_position(ids, 0)
    intact = spike.along(survey.states[PEAK][own]).mean()

    def left() -> float:
        return float(spike.along(residuals(model, ids)[PEAK][:, 0]).mean() / intact)

    expected = dict[tuple, float]()
    view = of_layer(spike, PEAK)
    beyond = (survey.mlp[PEAK][own] - survey.mlp[PEAK][spike.ordinary].mean(0)) @ spike.direction / spike.size
    torch.testing.assert_close(view.shares.sum(0), beyond, atol=1e-4, rtol=1e-3)  # biases are everywhere
    largest = view.shares.mean(1).abs().topk(2).indices.tolist()
    neurons = tuple(neuron_at(survey.target, PEAK, number) for number in largest)
    if model_type != "glm4_moe":  # which has shared experts, too: not in the kit of plain hooks
        with zeroed(model, [neuron.site for neuron in neurons]):
            expected[neurons] = left()
    mixer = "attention" if 0 in survey.target.attending else "mixer"
    for kind in ("embedding", mixer, "mlp"):
        component = Component(kind, None if kind == "embedding" else 0)
        with plain.replaced(model, ids, str(component), spike.ordinary):
            expected[component,] = left()
    if mixer == "attention":
        out = part(blocks(model)[0], *OUT)
        columns = survey.target.head_columns(0, 1)
        with plain.reading([out], "input") as seen:
            model(ids)
        mean = seen[0][spike.ordinary].mean(0)

        def other(z: torch.Tensor) -> torch.Tensor:
            z = z.clone()
            z[..., columns] = mean[columns]
            return z

        with inputs_edited(out, other):
            expected[Head(0, 1),] = left()
    found = left_at_place(spike, [*expected])[:, 0].mean(1)
    torch.testing.assert_close(found, torch.tensor([*expected.values()]), atol=1e-3, rtol=1e-3)


def test_what_learned_sinks_take_is_what_no_key_gets():
    model, _ = tiny_model("gpt_oss")
    spike = first_token(model)
    probs = plain.attention(model, spike.survey.ids)
    torch.testing.assert_close(spike.survey.learned, 1 - probs.sum(-1).mean(-1).transpose(1, 2), atol=1e-4, rtol=1e-4)
    assert spike.survey.learned.mean() > 0.01


# --- conditions and purpose ---

KINDS = {
    "few learned positions": ("gpt2", {"max_position_embeddings": 64, "n_positions": 64}),
    "learned sinks": ("gpt_oss", {"sliding_window": 64}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 6}),
    "no BOS": ("llama", {}),
}


@torch.no_grad()
def plain_share(spike: Spike, ids: torch.Tensor, **given) -> torch.Tensor:
    """The share of the last token of texts, from the model alone."""
    with plain.reading([blocks(spike.survey.target.hf)[PEAK]], "output") as seen:
        spike.survey.target.hf(input_ids=ids, use_cache=False, **given)
    return spike.along(seen[0][:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_conditions_are_those_of_the_model_alone(kind):
    model_type, settings = KINDS[kind]
    spike = first_token(tiny_model(model_type, **settings)[0], None if kind == "no BOS" else 1)
    ids, learned = spike.survey.ids, model_type == "gpt2"
    at, rows = ordinary_positions(ids, 0), torch.arange(8)
    found = of_table(conditions_of([spike], 0)[0], "conditions")
    left = {name: row.get("left") for name, row in found.items()}
    judged = [kind != "windows in some layers"] * 2 + [True]  # windows of six show every position to too few
    assert spike.survey.attention.sum((1, 2, 3)).bool().tolist() == judged
    assert left["its token, alone, id 0"] == pytest.approx(1, abs=1e-4)  # it is the first token again
    as_it_is = spike.along(spike.survey.states[PEAK][rows, at])
    assert left["as it is"] == pytest.approx(float(as_it_is.mean()), abs=1e-4)  # with its window
    positions = {"position_ids": at[:, None]} if learned else {}
    alone = plain_share(spike, ids[rows, at][:, None], **positions)
    assert left["alone"] == pytest.approx(float(alone.mean()), abs=1e-4)  # a text of one token
    assert (abs(left["alone"] - left["alone, id 0"]) < 1e-4) != learned
    assert ("place, 32 later" in left) != learned  # it has no such position
    if not learned:
        assert left["place, 32 later"] == pytest.approx(1, abs=1e-4)  # no other position is nearer
    before = torch.cat([ids[:, LENGTH - BEFORE :], ids[:, :1]], 1)  # within all windows
    unseen = torch.ones(BEFORE + 1, BEFORE + 1, dtype=torch.bool).triu(1)
    causal = torch.zeros(8, 1, *unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
    own = plain_share(spike, before, position_ids=torch.zeros_like(before), attention_mask=causal)
    assert left["place, sees 4 more"] == pytest.approx(float(own.mean()), abs=1e-4)


@pytest.mark.parametrize(("model_type", "window"), [("gpt2", LENGTH), ("mistral", 6)])
@torch.no_grad()
def test_purpose_is_that_of_plain_masks(model_type, window):
    spike = first_token(tiny_model(model_type, sliding_window=window)[0])
    model, ids = spike.survey.target.hf, spike.survey.ids
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    unseen = (distance < 0) | (distance >= window)
    unseen[1:, 0] = True
    mask = torch.zeros(8, 1, LENGTH, LENGTH).masked_fill(unseen, torch.finfo(torch.float32).min)
    losses = []
    for options in ({"attention_mask": mask}, {}):
        losses.append(plain.losses(model, ids, **options)[:, BEGIN:].mean(1))
    row = of_table(purpose_of([circuit_of(spike)])[0], "purpose")["hidden in all layers"]
    assert row.numbers["loss"].by_text == pytest.approx((losses[0] - losses[1]).tolist(), abs=1e-4)


def test_with_alibi_no_key_can_be_hidden_and_this_is_said_in_one_line():
    """A whole mask, from which BLOOM computes no distances, was given before: an error without words."""
    spike = first_token(tiny_model("bloom", n_layer=3, n_head=4)[0])
    for ask in (lambda: conditions_of([spike], 0), lambda: purpose_of([circuit_of(spike)])):
        with pytest.raises(UnsupportedError, match="where no cache policy, guard, knockout or"):
            ask()
    with pytest.warns(UserWarning, match="is not measured: a model of type"):
        assert not answers_of(Sinks(spike.survey, spike.survey, (circuit_of(spike),)), 0)
