"""The circuit against planted ones, and its shares against the model's own numbers taken with plain hooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from organisms import MODEL_TYPES, Organism, organism, tiny_model
from organisms.hard import HardModel, hard
from organisms.views import views

import sinkscope as ss
from sinkscope.files.notation import neuron_name
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attribution import Attribution, FixedNorm, attribute
from sinkscope.sinks.first_token.circuit import Circuit, MarkEvidence, circuit
from sinkscope.sinks.first_token.effects import Component
from sinkscope.sinks.first_token.position_effect import PositionEffect
from sinkscope.trace import queries_and_keys
from sinkscope.trace.run import trace

PLACES = torch.tensor([[row, pos] for row in range(2) for pos in (0, 4, 11)])
ROWS, POSITIONS = PLACES.T


def _ids() -> torch.Tensor:
    return torch.randint(4, 90, (2, 14), generator=torch.Generator().manual_seed(1))


@cache
def _split(family: str) -> tuple[Target, Attribution, list[tuple[int, ...]]]:
    model, _ = tiny_model(family)
    target = Target.of(model)
    neurons = [(2, 1, 3), (2, 0, 5)] if target.is_mixture(2) else [(2, 3), (2, 7)]
    return target, attribute(target, _ids(), PLACES, neurons, keys=[1, 2]), list(neurons)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_shares_sum_to_the_models_own_pre_activations(family: str) -> None:
    """Gate, up and the neurons' activation, from hooks on the projections; in a mixture from the weights."""
    target, found, neurons = _split(family)
    inputs = found.inputs[2]
    wanted: list[torch.Tensor]
    if target.is_mixture(2):
        seen: list[torch.Tensor] = []
        hook = target.sub(2, "mlp.experts").register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        target.forward(_ids())
        hook.remove()
        x, layer = seen[0].view(2, 14, -1)[ROWS, POSITIONS], views(target.hf).layers[2]
        assert layer.up is not None
        wanted = []
        for weight, bias in ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias)):
            wanted.append(
                torch.stack([weight[e, n] @ x.T + (0 if bias is None else bias[e, n]) for _, e, n in neurons], 1)
            )
    else:
        names = ["hook_pre"] if inputs.gate is None else ["hook_pre", "hook_pre_linear"]
        sites = [f"blocks.2.mlp.{name}" for name in names]
        got = trace(target, _ids(), [*sites, "blocks.2.mlp.hook_post"])
        wanted = [got[site][ROWS, POSITIONS][:, [3, 7]] for site in sites]
        post = got["blocks.2.mlp.hook_post"][ROWS, POSITIONS][:, [3, 7]]
        gate = None if inputs.gate is None else inputs.gate.sum(0)
        torch.testing.assert_close(inputs.post(gate, inputs.up.sum(0)), post, rtol=1e-4, atol=1e-5)
    sums = [part.sum(0) for part in (inputs.gate, inputs.up) if part is not None]
    for mine, true in zip(sums, wanted, strict=True):
        assert float((mine - true.detach()).abs().max()) <= 1e-4 * float(true.detach().abs().max())
    heads = [(c.layer, c.head) for c in inputs.parts if c.kind == "head"]
    assert set(heads) >= {(layer, head) for layer in (0, 1) for head in range(4)} and inputs.error < 1e-4


@pytest.mark.parametrize("family", [family for family in MODEL_TYPES if family != "falcon"])
def test_key_shares_sum_to_the_models_own_scores(family: str) -> None:
    target, found, _ = _split(family)
    caught: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def see(layer: int, rotated: bool, query: torch.Tensor, key: torch.Tensor) -> None:
        if rotated:
            caught[layer] = query, key.repeat_interleave(query.shape[1] // key.shape[1], 1)

    with queries_and_keys(target, see, [1, 2]):
        target.forward(_ids())
    for layer, (query, key) in caught.items():
        mean = torch.stack([query[r, :, p + 1 :].mean(1) for r, p in PLACES.tolist()])
        scale = 1.0 if family == "opt" else query.shape[-1] ** -0.5  # OPT scales its queries itself
        true = torch.einsum("nhd,nhd->nh", mean, key[ROWS, :, POSITIONS]) * scale
        mine = found.keys[layer].scores.sum(0)
        assert float((mine - true).abs().max()) <= 1e-4 * float(true.abs().max())


def test_single_shares_are_what_the_formula_says() -> None:
    """A head's, an MLP's and the embedding's part of a gate, from Llama's weights and equations written out."""
    target, found, _ = _split("llama")
    inputs, layers = found.inputs[2], target.hf.model.layers
    got = trace(
        target, _ids(), ["hook_embed", "blocks.1.attn.hook_z", "blocks.0.hook_mlp_out", "blocks.2.hook_resid_mid"]
    )
    here = {name: value[ROWS, POSITIONS] for name, value in got.items()}
    mid, norm = here["blocks.2.hook_resid_mid"], layers[2].post_attention_layernorm
    scale = (mid.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    way = (layers[2].mlp.gate_proj.weight[[3, 7]] * norm.weight).detach()
    head = here["blocks.1.attn.hook_z"][:, 2] @ layers[1].self_attn.o_proj.weight[:, 16:24].T
    for part, written in (
        (Component("head", 1, 2), head),
        (Component("mlp", 0), here["blocks.0.hook_mlp_out"]),
        (Component("token embedding"), here["hook_embed"]),
    ):
        assert inputs.gate is not None
        torch.testing.assert_close(inputs.gate[inputs.parts.index(part)], written / scale @ way.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
def test_what_sets_two_places_apart_is_split_exactly(family: str) -> None:
    _, found, _ = _split(family)
    inputs = found.inputs[2]
    first, typical = torch.tensor([0, 0, 3]), torch.tensor([1, 2, 5])
    gate = None if inputs.gate is None else inputs.gate.sum(0)
    post = inputs.post(gate, inputs.up.sum(0))
    difference = (post[first] - post[typical]).mean(0)
    torch.testing.assert_close(inputs.contrast(first, typical).sum((0, 1)), difference, rtol=1e-4, atol=1e-5)


def test_a_norm_that_is_none_is_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ss.SinkscopeError, match="nothing can be attributed"):
        FixedNorm.of(torch.nn.GELU(), x, torch.nn.functional.gelu(x))


# -- planted circuits --------------------------------------------------------------------------------------------------


def traced(o: Organism | HardModel, folder: Path, **options: Any) -> Circuit:
    text = folder / "text.txt"
    text.write_text(o.tokenizer.decode(o.natural(6, 64, seed=9)[:, 1:].flatten().tolist()))
    return circuit(o.model, tokenizer=o.tokenizer, text=text, **{"max_repeats": 64, **options})


def check_mark(evidence: MarkEvidence | None, mark: str) -> str:
    """The mark is the component that the planted circuit has, in both directions; returns what it writes into."""
    assert evidence is not None and evidence.marks == (mark,) and evidence.needed_alone
    number = evidence.components.index(mark)
    share = evidence.share[number]
    assert 0.85 < share.sum() < 1.25 and evidence.share.sum(1).argmax() == number
    assert evidence.share.sum() == pytest.approx(1, abs=1e-3)
    assert evidence.necessity[number] > 0.95 and evidence.sufficiency[number] > 0.9
    assert evidence.necessity_control is not None and evidence.necessity_control < 0.2
    assert evidence.sufficiency_control is not None and evidence.sufficiency_control < 0.2
    return evidence.inputs[int(share.argmax())]


SLOWER = [pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt_oss", 1), ("neox", 1), ("mixtral", 1))]


@pytest.mark.parametrize(("family", "seed"), [("llama", 3), ("gemma2", 2), ("gpt2", 0), *SLOWER])
def test_a_planted_circuit_is_found_from_end_to_end(family: str, seed: int, tmp_path: Path) -> None:
    o = organism(family, seed)
    truth, options = o.truth, dict[str, Any]()
    if family == "llama":
        options = {"token": o.tokenizer.decode([o.tokens_of(1)[0]]), "max_repeats": 120}
    found = traced(o, tmp_path, **options)
    assert found.sink_layer == truth.sink_layer and found.error is not None and found.error < 1e-4
    own = truth.group_heads.get(truth.groups[1])  # BOS's group
    target = check_mark(found.first, f"L{truth.marking_layer}.H{own[0]}" if own else "position embedding")
    assert target.startswith(truth.factor or "input")
    neurons = found.neurons
    assert neurons is not None and set(neurons.neurons) == {neuron_name(*site) for site in truth.neurons}
    assert neurons.share.sum() == pytest.approx(1, abs=0.05)
    assert neurons.set_necessity > 0.95 and neurons.set_sufficiency > 0.7 and neurons.necessity_control < 0.1
    readers = found.readers
    assert readers is not None and readers.by_spike
    assert set(readers.heads) == {f"L{layer}.H{head}" for layer, head in truth.reading_heads}
    assert readers.attention_without.mean() < 0.2 < 0.8 < min(readers.attention.mean(), readers.control or 0.0)
    assert min(readers.share.min(), readers.necessity.min(), readers.sufficiency.min()) > 0.9
    assert readers.necessity_control.max() < 0.1
    if options:  # another token is marked by a head of its own
        assert found.repeated == options["token"]
        check_mark(found.repetition, f"L0.H{truth.group_heads[1][0]}")


@pytest.fixture(scope="module")
def through_an_mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Organism, Circuit]:
    """The up factor of its sink neurons reads what a neuron of layer 0 makes of two heads."""
    o = organism("llama", 8, kind="spread")
    return o, traced(o, tmp_path_factory.mktemp("text"))


def test_a_mark_that_passes_through_an_mlp_and_needs_two_heads(through_an_mlp: tuple[Organism, Circuit]) -> None:
    """Each head is needed, and the share is the MLP's."""
    o, found = through_an_mlp
    heads = [f"L0.H{head}" for head in o.truth.group_heads[o.truth.groups[1]]]
    first = found.first
    assert first is not None and o.truth.factor == "up"
    assert set(first.marks) == {*heads, "MLP of layer 0"} and first.needed_alone
    mlp = first.components.index("MLP of layer 0")
    assert first.share[mlp, first.inputs.index(f"up of layer {o.truth.sink_layer}")] == pytest.approx(1, abs=0.15)
    for number in map(first.components.index, heads):
        assert np.abs(first.share[number]).max() < 0.05
        assert first.necessity[number] > 0.9 and first.sufficiency[number] < 0.2


@pytest.mark.parametrize("rule", ["and", "or"])
def test_marks_of_two_layers_are_told_apart(rule: str, tmp_path: Path) -> None:
    """If both are needed, each is needed alone; if either suffices, none is, and the smallest set has both."""
    o = hard(f"{rule}_marking", "llama", 2)
    first = traced(o, tmp_path, max_repeats=8).first
    assert first is not None and first.marks_necessity is not None and first.marks_necessity > 0.95
    assert first.needed_alone == (rule == "and") and ("no component is needed alone" in first.in_words()) == (
        rule == "or"
    )
    assert len(first.marks) == 2
    for (layer, heads), mark in zip(o.truth.marking, first.marks, strict=True):
        number = first.components.index(mark)
        assert mark in [f"L{layer}.H{head}" for head in heads]
        assert first.share[number].sum() == pytest.approx(0.55, abs=0.1)
        assert first.necessity[number] > 0.9 if rule == "and" else first.necessity[number] < 0.7
        assert first.sufficiency[number] < 0.2 if rule == "and" else first.sufficiency[number] > 0.3


@pytest.mark.parametrize(
    ("kind", "family", "seed", "source"),
    [
        ("position", "gpt2", 0, "position embedding"),
        ("key_bias", "qwen2", 0, "key bias"),
        ("no_norm", "llama", 5, None),
    ],
)
def test_a_sink_without_a_spike_goes_from_its_component_to_the_keys(
    kind: str, family: str, seed: int, source: str | None, tmp_path: Path
) -> None:
    o = hard(kind, family, seed)
    found = traced(o, tmp_path, max_repeats=8)
    keys, readers = found.keys, found.readers
    assert found.sink_layer is None and found.neurons is None and keys is not None and readers is not None
    heads = [f"L0.H{head}" for _, own in o.truth.marking for head in own]
    (mark,) = keys.marks
    assert mark == source if source else mark in heads
    number = keys.components.index(mark)
    assert keys.share[number, 0] > 0.9 and keys.inputs == ("keys",) and keys.necessity[number] > 0.85
    assert readers.carried_by == (mark,)
    assert set(readers.heads) == {f"L{layer}.H{head}" for layer, head in o.truth.reading}
    assert readers.attention_without.mean() < 0.1 < 0.8 < min(readers.attention.mean(), readers.control or 0.0)
    assert found.conclusion().startswith("Heads attend to the first token without a spike")


def test_heads_that_read_the_mark_and_not_the_spike(tmp_path: Path) -> None:
    o = hard("decoupled", "neox", 2)
    found = traced(o, tmp_path, max_repeats=8)
    assert found.neurons is not None and found.keys is not None and found.readers is not None
    assert set(found.neurons.neurons) == {neuron_name(*site) for one in o.truth.sets for site in one}
    heads = [f"L0.H{head}" for _, own in o.truth.marking for head in own]
    assert set(found.readers.carried_by) <= set(heads) and not found.readers.by_spike


def test_no_circuit_is_an_answer(tmp_path: Path) -> None:
    found = traced(organism("llama", 3, kind="none"), tmp_path)
    assert found.rows() == [] and found.readers is None
    assert found.conclusion().startswith("No circuit: no MLP raises the first token's norm, and no head attends")
    assert "no circuit" in str(found.figure().layout)


def test_a_component_gives_a_position_what_it_gives_at_another() -> None:
    """Necessity and sufficiency of the token embedding are those of a text with the other token."""
    o = organism("llama", 3)
    target, ids = Target.of(o.model, o.tokenizer), o.natural(2, 12)
    effect = PositionEffect(target, ids, 0, 5, o.truth.sink_layer)

    def norm(tokens: torch.Tensor, at: int) -> torch.Tensor:
        name = f"blocks.{o.truth.sink_layer}.hook_resid_post"
        return trace(target, tokens, [name], "norm")[name][:, at]

    other, later = ids.clone(), ids.clone()
    other[:, 0], later[:, 5] = ids[:, 5], ids[:, 0]
    top, floor = norm(ids, 0), norm(ids, 5)
    span, embedding = (top - floor).mean(), [(Component("token embedding"),)]
    assert effect.necessity(embedding) == pytest.approx([float((top - norm(other, 0)).mean() / span)], abs=1e-4)
    assert effect.sufficiency(embedding) == pytest.approx([float((norm(later, 5) - floor).mean() / span)], abs=1e-4)
    assert np.isnan(effect.necessity([(Component("norm bias"),)])).all()


def test_the_drawing_has_every_step_and_the_file_comes_back(
    through_an_mlp: tuple[Organism, Circuit], tmp_path: Path
) -> None:
    _, found = through_an_mlp
    assert found.first is not None and found.neurons is not None and found.readers is not None
    names = {name for bar in found.figure().data for name in bar.x}
    assert {*found.first.marks, *found.neurons.neurons, found.readers.heads[0]} <= names
    loaded = Result.load(found.save(tmp_path / "a.json"))
    assert loaded.to_dict() == found.to_dict() and loaded.rows() == found.rows()
    assert loaded.conclusion() == found.conclusion() and loaded.details() == found.details()
