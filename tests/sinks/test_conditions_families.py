"""Both questions on models of other kinds: learned positions, learned sinks, windows, no BOS; ALiBi is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from organisms.tiny import tiny_model
from raw_kit import blocks
from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.opening.load import open_target
from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import BEFORE, BEGIN, SpikeCircuit, conditions_of, ordinary_positions, purpose_of
from sinkscope.sinks.spikes.find import Sinks, answers_of
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.spike import Place, PlaceWords, Spike, at_position, ordinary_of
from sinkscope.sinks.spikes.survey import read_survey
from sinkscope.sinks.spikes.writers import Writers

LENGTH, PEAK = 48, 1
KINDS = {
    "learned positions": ("gpt2", {"max_position_embeddings": 80, "n_positions": 80}),
    "few learned positions": ("gpt2", {"max_position_embeddings": 64, "n_positions": 64}),
    "learned sinks": ("gpt_oss", {"sliding_window": 64}),
    "windows": ("mistral", {"sliding_window": 6}),
    "windows in some layers": ("gemma3_text", {"sliding_window": 6}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}),
    "no BOS": ("llama", {}),
}
ALIBI = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, "expansion_ratio": 2},
}


def first_token(model_type: str, settings: dict[str, int], *, bos: bool = True) -> Spike:
    """What the first token of a random model has beyond ordinary positions, as if it were a spike."""
    model, tokenizer = tiny_model(model_type, **settings)
    ids = torch.randint(5, 90, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    if bos:
        ids[:, 0] = tokenizer.bos_token_id
    survey = read_survey(open_target(model, tokenizer), ids)
    place, ordinary = at_position(ids, 0), ordinary_of(survey)
    mean = survey.states[PEAK][ordinary].mean(0)
    away = survey.states[PEAK][place].mean(0) - mean
    words = PlaceWords("the first token", "<s>")
    place = Place(place, words, partial(at_position, position=0))
    return Spike(survey, place, ordinary, mean, away / away.norm(), float(away.norm()), (0, PEAK), PEAK, PEAK)


def circuit_of(spike: Spike) -> SpikeCircuit:
    """The spike, as if nothing were known that it needs."""
    return SpikeCircuit(spike, spike, Needs(Writers({}, {}), ()))


@torch.no_grad()
def plain_share(spike: Spike, ids: torch.Tensor, **given) -> torch.Tensor:
    """The share of the last token of texts, from the model alone."""
    model, seen = spike.survey.target.hf, []
    handle = blocks(model)[PEAK].register_forward_hook(
        lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    model(input_ids=ids, use_cache=False, **given)
    handle.remove()
    return spike.along(seen[0][:, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_conditions_are_those_of_the_model_alone(kind):
    model_type, settings = KINDS[kind]
    spike = first_token(model_type, settings, bos=kind != "no BOS")
    ids, learned = spike.survey.ids, model_type == "gpt2"
    at, rows = ordinary_positions(ids, 0), torch.arange(8)
    found = of_table(conditions_of([spike], 0)[0], "conditions")
    left = {name: row.get("left") for name, row in found.items()}
    assert left["its token, alone, id 0"] == pytest.approx(1, abs=1e-4)  # it is the first token again
    as_it_is = spike.along(spike.survey.states[PEAK][rows, at])
    assert left["as it is"] == pytest.approx(float(as_it_is.mean()), abs=1e-4)  # with its window
    positions = {"position_ids": at[:, None]} if learned else {}
    alone = plain_share(spike, ids[rows, at][:, None], **positions)
    assert left["alone"] == pytest.approx(float(alone.mean()), abs=1e-4)  # a text of one token
    assert (abs(left["alone"] - left["alone, id 0"]) < 1e-4) != learned
    assert ("place, 32 later" in left) == (kind != "few learned positions")
    if not learned:
        assert left["place, 32 later"] == pytest.approx(1, abs=1e-4)  # no other position is nearer
    before = torch.cat([ids[:, LENGTH - BEFORE :], ids[:, :1]], 1)  # within all windows
    unseen = torch.ones(BEFORE + 1, BEFORE + 1, dtype=torch.bool).triu(1)
    causal = torch.zeros(8, 1, *unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
    own = plain_share(spike, before, position_ids=torch.zeros_like(before), attention_mask=causal)
    assert left["place, sees 4 more"] == pytest.approx(float(own.mean()), abs=1e-4)


@pytest.mark.parametrize("kind", ["learned positions", "windows", "no BOS"])
def test_purpose_is_that_of_plain_masks(kind):
    model_type, settings = KINDS[kind]
    spike = first_token(model_type, settings, bos=kind != "no BOS")
    survey, model = spike.survey, spike.survey.target.hf
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    unseen = (distance < 0) | (distance >= settings.get("sliding_window", LENGTH))
    unseen[1:, 0] = True
    mask = torch.zeros(8, 1, LENGTH, LENGTH).masked_fill(unseen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(survey.ids, attention_mask=mask, use_cache=False).logits
    own = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), survey.ids[:, 1:], reduction="none")
    with torch.no_grad():
        logits = model(survey.ids, use_cache=False).logits
    intact = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), survey.ids[:, 1:], reduction="none")
    (rows,) = purpose_of([circuit_of(spike)])
    row = of_table(rows, "purpose")["hidden in all layers"]
    assert row.numbers["loss"].by_text == pytest.approx((own - intact)[:, BEGIN:].mean(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("model_type", ALIBI)
def test_with_alibi_no_key_can_be_hidden_and_this_is_said_in_one_line(model_type):
    """A whole mask, from which BLOOM computes no distances, was given before: an error without words."""
    spike = first_token(model_type, ALIBI[model_type])
    for ask in (lambda: conditions_of([spike], 0), lambda: purpose_of([circuit_of(spike)])):
        with pytest.raises(UnsupportedError, match="where no cache policy, guard, knockout or"):
            ask()
    with pytest.warns(UserWarning, match="is not measured: a model of type"):
        assert not answers_of(Sinks(spike.survey, spike.survey, (circuit_of(spike),)), 0, {"conditions", "purpose"})
