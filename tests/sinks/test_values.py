"""What a sink does to its readers: against values edited by plain hooks, and against planted models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attack_kit import setup_of, text_file
from covering import slow
from organisms import Organism, organism
from raw_kit import blocks, norms
from sinkscope.sinks.circuit.circuit import circuit
from sinkscope.sinks.values import TEXTS, HeadValue, values_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from sinkscope.measure import Setup
from sinkscope.results.claims import Claim
from sinkscope.results.parts import Head
from sinkscope.sinks.find.survey import Survey

pytestmark = pytest.mark.few_texts


def opened(folder: Path, o: Organism) -> Setup:
    return setup_of(o, text=text_file(o, folder, 6, seed=9))


def measured(setup: Setup) -> tuple[dict[tuple[Head, str], HeadValue], tuple[Claim, ...]]:
    values, claims = values_of(setup.target, Survey.of(setup))
    return {(value.head, value.place): value for value in values}, claims


@torch.no_grad()
def written(model, ids: Tensor, layer: int, head: int, there: Tensor | None = None, at: int | None = None) -> Tensor:
    """What a head writes, [text query d_model], with the value of the places zeroed or that of a position."""
    attention, width = blocks(model)[layer].self_attn, model.config.hidden_size // model.config.num_attention_heads
    seen = []

    def edit(_module, _args, value):
        if there is None:
            return value
        other = torch.zeros_like(value) if at is None else value[:, at : at + 1].expand_as(value)
        return torch.where(there[..., None], other, value)

    handles = [
        attention.v_proj.register_forward_hook(edit),
        attention.o_proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0])),
    ]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    columns = slice(head * width, (head + 1) * width)
    return seen[0][..., columns] @ attention.o_proj.weight[:, columns].T


def size(output: Tensor, later: Tensor) -> Tensor:
    return (output.square().sum(-1) * later).sum(-1)


def by_hooks(model, ids: Tensor, layer: int, head: int, there: Tensor, barred: Tensor) -> float:
    """Change of a head's output: its value is zeroed, and replaced by one position after another."""
    later = (there.cumsum(1) > 0) & ~there
    intact, zeroed = written(model, ids, layer, head), written(model, ids, layer, head, there)
    total = torch.zeros(len(ids))
    for at in range(ids.shape[1]):
        counts = ~barred[:, at]
        if bool(counts.any()):
            total += counts * size(written(model, ids, layer, head, there, at), later)
    return float((size(intact - zeroed, later) * (~barred).sum(1) / total).sqrt().mean())


CASES = [("llama", 3), slow("qwen2", 1), slow("mistral", 2)]


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_numbers_are_those_of_values_edited_by_plain_hooks(family, seed, tmp_path):
    o = organism(family, seed, values="half")
    model = AutoModelForCausalLM.from_pretrained(o.save(tmp_path / "model"))
    setup = opened(tmp_path, o)
    values, _ = measured(setup)
    ids = Survey.of(setup).received.ids[:TEXTS]
    there, barred = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    there[:, 0] = barred[:, 0] = barred[:, -16:] = True
    assert {head for head, _ in values} == {Head(*site) for site in o.truth.reading_heads}
    for layer, head in (o.truth.reading_heads[-1], o.truth.reading_heads[0]):
        value = values[Head(layer, head), "the first token"]
        assert value.change == pytest.approx(by_hooks(model, ids, layer, head, there, barred), abs=1e-4)
    after = norms(model, ids)[max(o.truth.reading_heads)[0]]
    distance = (after / after[:, 1:].median(1, keepdim=True).values).log().abs()
    typical = torch.zeros_like(there).scatter(1, distance.masked_fill(barred, 1e9).argmin(1, keepdim=True), True)
    assert value.control == pytest.approx(by_hooks(model, ids, layer, head, typical, barred), abs=1e-4)


FAMILIES = [("llama", 3), ("gpt2", 0), slow("qwen2", 1), slow("gemma2", 2), slow("neox", 1), slow("mixtral", 1)]


@pytest.mark.parametrize("kind", ["nop", "broadcast", "half"])
@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_planted_heads_do_nothing_or_broadcast(family, seed, kind, tmp_path):
    o = organism(family, seed, values=kind)
    values, claims = measured(opened(tmp_path, o))
    said = {head: value.kind for (head, _), value in values.items()}
    planted = {}
    for site in o.truth.reading_heads:
        planted[Head(*site)] = "broadcast" if site in o.truth.broadcasts else "nop"
    assert said == planted
    verdicts = {name: claim.verdict for claim in claims for name in claim.outcome.heads}
    assert verdicts == {name: "needed" if what == "broadcast" else "not shown" for name, what in planted.items()}
    assert all(claim.draws > 3 and claim.margin is not None for claim in claims)


def test_circuit_says_how_many_heads_are_of_each_kind(tmp_path):
    o = organism("llama", 3, values="half")
    found = circuit.on(opened(tmp_path, o), max_repeats=8)
    assert {claim.verdict for claim in found.of("writes")} == {"needed", "not shown"}
    broadcast = {row["subject"] for row in found.readers() if row["value"] == "broadcast"}
    assert broadcast == {f"L{layer}.H{head}" for layer, head in o.truth.broadcasts}
