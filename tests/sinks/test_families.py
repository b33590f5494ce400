"""Parts, conditions and purpose in models of other kinds: every number is that of plain hooks and masks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import plain_hooks as plain
import pytest
import torch
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from refusals import refused

from sinkscope.models.neurons import heads_point, neuron_at
from sinkscope.opening.load import target_of
from sinkscope.results.notation import Component, Head
from sinkscope.sinks.spikes.conditions import BEFORE, conditions_of, ordinary_positions
from sinkscope.sinks.spikes.edited import left_at_place, share_left
from sinkscope.sinks.spikes.effects import SpikeCircuit
from sinkscope.sinks.spikes.find import Sinks, answers_of
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.purpose import BEGIN, purpose_of
from sinkscope.sinks.spikes.spike import Place, PlaceKey, PlaceKind, PlaceWords, Spike, at_position
from sinkscope.sinks.spikes.survey import read_survey
from sinkscope.sinks.spikes.why_tables import AS_IT_IS, Cause, Condition, PurposeKey
from sinkscope.sinks.spikes.writers import of_layer

LENGTH, PEAK = 48, 1


def first_token(model, bos: int | None = 1) -> Spike:
    """What the first token of a random model has beyond ordinary positions, as if it were a spike."""
    ids = torch.randint(5, 90, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    if bos is not None:
        ids[:, 0] = bos
    survey = read_survey(target_of(model), ids)
    place, states = at_position(ids, 0), survey.entered[PEAK + 1]
    mean = states[survey.ordinary].mean(0)
    away = states[place].mean(0) - mean
    words = PlaceWords("the first token", "<s>", PlaceKey(PlaceKind.FIRST))
    place = Place(place, words, partial(at_position, position=0))
    return Spike(survey, place, mean, away / away.norm(), float(away.norm()), (0, PEAK), PEAK, PEAK)


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
    spike = first_token(model, None)
    survey, ids = spike.survey, spike.survey.ids
    view = of_layer(spike, PEAK)
    added = survey.mlp[PEAK][:, 0] - survey.mlp[PEAK][survey.ordinary].mean(0)
    torch.testing.assert_close(view.shares.sum(0), added @ spike.direction / spike.size, atol=1e-4, rtol=1e-3)
    mixer = "attention" if 0 in survey.target.attending else "mixer"
    edits = dict[tuple, AbstractContextManager]()
    for part in (Component("embedding"), Component(mixer, 0), Component("mlp", 0)):
        edits[part,] = plain.replaced(model, ids, str(part), survey.ordinary)
    if model_type != "glm4_moe":  # which has shared experts, too: not in the kit of plain hooks
        largest = view.shares.mean(1).abs().topk(2).indices.tolist()
        neurons = tuple(neuron_at(survey.target, PEAK, number) for number in largest)
        edits[neurons] = plain.zeroed(model, [neuron.site for neuron in neurons])
    if mixer == "attention":
        out, own = plain.part(plain.blocks(model)[0], *OUT), heads_point(survey.target, 0, 1).columns
        with plain.reading([out], "input") as seen:
            model(ids)
        mean, columns = seen[0][survey.ordinary].mean(0), torch.arange(seen[0].shape[-1])
        here = torch.isin(columns, columns[own])
        edits[Head(0, 1),] = plain.inputs_edited(out, lambda z: torch.where(here, mean, z))
    intact = spike.along(survey.entered[PEAK + 1][:, 0])
    expected = []
    for edit in edits.values():
        with edit:
            expected.append(spike.along(plain.residuals(model, ids)[PEAK][:, 0]))
    found = left_at_place(spike, [*edits])[:, 0]
    torch.testing.assert_close(found, share_left(torch.stack(expected), intact), atol=1e-3, rtol=1e-3)


def test_what_learned_sinks_take_is_what_no_key_gets():
    model, _ = tiny_model("gpt_oss")
    survey = first_token(model).survey
    taken = 1 - plain.attention(model, survey.ids).sum(-1).mean(-1).transpose(1, 2)
    torch.testing.assert_close(survey.learned, taken, atol=1e-4, rtol=1e-4)
    assert survey.learned.mean() > 0.01


def test_the_sink_rate_is_a_share_of_the_heads_that_attend():
    survey = first_token(decoder("lfm2")).survey
    survey.attention[survey.target.attending, ..., 0] = survey.first_to_itself[survey.target.attending] = 1.0
    assert 0 < len(survey.target.attending) < survey.target.n_layers and survey.sink_rate.tolist() == [1] * len(
        survey.ids
    )


# --- conditions and purpose ---

KINDS = {
    "few learned positions": ("gpt2", {"max_position_embeddings": 64, "n_positions": 64}),
    "learned positions": ("gpt2", {"max_position_embeddings": 128, "n_positions": 128}),
    "learned sinks": ("gpt_oss", {"sliding_window": 64}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 6}),
    "no BOS": ("llama", {}),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_conditions_are_those_of_the_model_alone(kind):
    model_type, settings = KINDS[kind]
    model, learned = tiny_model(model_type, **settings)[0], model_type == "gpt2"
    spike = first_token(model, None if kind == "no BOS" else 1)
    ids = spike.survey.ids
    at, rows = ordinary_positions(ids, 0), torch.arange(8)
    left = {row.key: row.left.value for row in conditions_of([spike], 0)[0]}

    def share(ids: torch.Tensor, **given) -> float:
        """The share of the last token of texts, from the model alone."""
        with plain.reading([plain.blocks(model)[PEAK]], "output") as seen:
            model(input_ids=ids, use_cache=False, **given)
        return float(spike.along(seen[0][:, -1]).mean())

    before = torch.cat([ids[:, LENGTH - BEFORE :], ids[:, :1]], 1)  # within all windows
    causal = torch.full((8, 1, BEFORE + 1, BEFORE + 1), torch.finfo(torch.float32).min).triu(1)
    alone, later = Condition((Cause.ALONE,)), Condition((Cause.ID,), at_place=True)
    wanted = {
        Condition((*Cause,)): 1,  # it is the first token again
        AS_IT_IS: float(spike.along(spike.survey.entered[PEAK + 1][rows, at]).mean()),  # with its window
        alone: share(ids[rows, at][:, None], **({"position_ids": at[:, None]} if learned else {})),
        Condition((Cause.ALONE,), at_place=True): share(
            before, position_ids=torch.zeros_like(before), attention_mask=causal
        ),
    }
    if kind != "few learned positions":  # which have no such position
        wanted[later] = share(ids[:, :1], position_ids=torch.full((8, 1), 32))
    assert [left[key] for key in wanted] == pytest.approx([*wanted.values()], abs=1e-4)
    assert (abs(left[alone] - left[Condition((Cause.ALONE, Cause.ID))]) > 1e-4) == learned
    assert (later in left) == (later in wanted)
    judged = [kind != "windows in some layers"] * 2 + [True]  # windows of six show every position to too few
    assert spike.survey.attention.sum((1, 2, 3)).bool().tolist() == judged


@pytest.mark.parametrize(("model_type", "window"), [("gpt2", LENGTH), ("mistral", 6)])
def test_purpose_is_that_of_plain_masks(model_type, window):
    model = tiny_model(model_type, sliding_window=window)[0]
    spike = first_token(model)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    sees = (distance >= 0) & (distance < window)
    sees[1:, 0] = False
    losses = [plain.losses(model, spike.survey.ids, attention_mask=mask) for mask in (sees[None, None], None)]
    (row,) = (row for row in purpose_of([circuit_of(spike)])[0] if row.key is PurposeKey.HIDDEN_EVERYWHERE)
    rise = (losses[0] - losses[1])[:, BEGIN:].mean(1)
    assert row["loss"].by_text == pytest.approx(rise.tolist(), abs=1e-4)


def test_with_alibi_no_key_can_be_hidden_and_this_is_said_in_one_line():
    spike = first_token(tiny_model("bloom", n_layer=3, n_head=4)[0])
    for ask in (lambda: conditions_of([spike], 0), lambda: purpose_of([circuit_of(spike)])):
        with refused("where no cache policy, guard, knockout or"):
            ask()
    with pytest.warns(UserWarning, match="is not measured: a model of type"):
        assert not answers_of(Sinks(spike.survey, spike.survey, (circuit_of(spike),)), 0)
