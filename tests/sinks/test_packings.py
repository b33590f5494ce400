"""What the packing of a model may not change: every answer is the same however neurons are packed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_kit import measured_spikes, options_of
from organisms import organism
from torch import Tensor, nn

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.mean import Mean
from sinkscope.sinks.spikes.find import find_sinks
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.tables import Done
from sinkscope.sinks.spikes.why_tables import MarkingKind

pytestmark = pytest.mark.few_texts

CLOSE = {"rel": 1e-2, "abs": 2e-3}
"""How near numbers are: a hundredth, as float32 allows."""


def put(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear map new weights, of any shape."""
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.out_features, linear.in_features = weight.shape


@torch.no_grad()
def gauged(model: Any) -> tuple[Any, dict[str, str]]:
    """A copy with neurons and heads in another order and on other scales, and the new names of those that moved."""
    new, generator, names = copy.deepcopy(model), torch.Generator().manual_seed(7), dict[str, str]()
    heads, groups, width = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    of_heads = torch.arange(heads).view(groups, -1).flip(1).flatten()  # within the heads of a group
    for number, layer in enumerate(new.model.layers):
        mlp, attn = layer.mlp, layer.self_attn
        order = torch.randperm(len(mlp.gate_proj.weight), generator=generator)
        scale = 10 ** (2 * torch.rand(len(order), generator=generator) - 1)
        scale *= 2 * torch.randint(2, (len(order),), generator=generator) - 1
        put(mlp.gate_proj, mlp.gate_proj.weight[order])
        put(mlp.up_proj, mlp.up_proj.weight[order] * scale[:, None])
        put(mlp.down_proj, mlp.down_proj.weight[:, order] / scale)
        put(attn.q_proj, attn.q_proj.weight.unflatten(0, (heads, width))[of_heads].flatten(0, 1))
        put(attn.o_proj, attn.o_proj.weight.unflatten(1, (heads, width))[:, of_heads].flatten(1))
        for letter, moved in (("N", order), ("H", of_heads)):
            names |= {f"L{number}.{letter}{old}": f"L{number}.{letter}{now}" for now, old in enumerate(moved.tolist())}
    return new, names


@torch.no_grad()
def split(model: Any, layer: int, neuron: int, parts: Tensor) -> Any:
    """A copy in which a neuron is several; the parts sum to 1, and the first keeps its place."""
    new, more = copy.deepcopy(model), [neuron] * (len(parts) - 1)
    for number, block in enumerate(new.model.layers):  # neurons that write nothing, at the end of other layers
        for linear in (block.mlp.gate_proj, block.mlp.up_proj):
            put(linear, torch.cat([linear.weight, linear.weight[more]]))
        down, shares = block.mlp.down_proj.weight, parts if number == layer else torch.eye(len(parts))[0]
        put(block.mlp.down_proj, torch.cat([down, down[:, more] * shares[1:]], 1))
        block.mlp.down_proj.weight[:, neuron] *= shares[0]
    new.config.intermediate_size += len(more)
    return new


def answers(setup: Setup, names: dict[str, str]) -> tuple[set[str], dict[tuple[str, ...], float]]:
    """The neurons of the patch, and every number that measurements say, under new names."""

    def renamed(text: str) -> str:
        return re.sub(r"L\d+\.[NH]\d+", lambda part: names.get(part[0], part[0]), text)

    patch = ss.patch.on(setup, max_repeats=64, pieces=4, length=16)
    results = ss.why_sink.on(setup), patch, ss.attack.on(setup, n_tokens=24, sequences=4)
    numbers = dict[tuple[str, ...], float]()
    for row in [row for result in results for subject in result.compared() for row in subject.rows]:
        if getattr(row.key, "done", None) is Done.RANDOM or getattr(row.key, "kind", None) is MarkingKind.RANDOM:
            continue  # sets that are drawn by the numbers of neurons and heads
        for name, number in row.values().items():
            if isinstance(number, Mean) and name != "neutral":  # which is on its own scale
                numbers[row.table, renamed(row.full_label), name] = number.value
    return {renamed(str(site)) for site in patch.sites}, numbers


def test_every_measurement_says_the_same_under_gauges(tmp_path):
    o = organism()
    new, names = gauged(o.model)
    (sites, numbers), (others, same) = (
        answers(Setup.open(model, **options_of(o, tmp_path)), own) for model, own in ((o.model, names), (new, {}))
    )
    assert sites == others and numbers == pytest.approx(same, nan_ok=True, **CLOSE)


def effects(spike: SpikeResult) -> list[float]:
    """What the needed set does, and what the busiest others do."""
    numbers: list[float] = []
    for row in spike.effects:
        if row.key.done not in (Done.PART, Done.RANDOM, Done.AS_MANY):  # as many others are others in each packing
            numbers += [row[name].value for name in ("left", "intact", "heads", "loss") if name in row.values()]
    return numbers


@pytest.mark.parametrize(
    ("kind", "parts", "more"),
    [
        ("redundant_pair", (3.0, -2.0), 1),
        ("sink", (0.999 / 60,) * 60 + (0.001,), 60),  # all are writers, though none alone writes 2 %; one writes less
    ],
)
def test_what_a_spike_does_is_the_same_however_many_neurons_share_the_work(kind, parts, more, tmp_path: Path):
    """The needed set is another one; what is left without all writers, the heads and the perplexity are not."""
    o, _, found = measured_spikes(find_sinks, kind)
    new = split(o.model, *o.truth.neurons[0], torch.tensor(parts))
    one, other = found.spikes[0], find_sinks(new, **options_of(o, tmp_path)).spikes[0]
    assert (one.place, one.layers, one.peak, one.heads) == (other.place, other.layers, other.peak, other.heads)
    assert len(other.writers) == len(one.writers) + more
    assert effects(one) == pytest.approx(effects(other), **CLOSE)
