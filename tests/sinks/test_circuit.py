"""The circuit against planted ones, and its shares against the model's own numbers taken with plain hooks."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import MODEL_TYPES, Organism, organism, tiny_model
from organisms.hard import HardModel, hard
from organisms.views import views

import sinkscope as ss
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attribution import Attribution, FixedNorm, attribute
from sinkscope.sinks.first_token.circuit import Circuit, circuit
from sinkscope.sinks.first_token.circuit_steps import Bench
from sinkscope.sinks.first_token.effects import Component
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


def _circuit(o: Organism | HardModel, folder: Path, **kwargs: Any) -> Circuit:
    text = folder / "text.txt"
    text.write_text(o.tokenizer.decode(o.natural(6, 64, seed=9)[:, 1:].flatten().tolist()))
    return circuit(o.model, tokenizer=o.tokenizer, text=text, **{"max_repeats": 64, **kwargs})


def _steps(found: Circuit, step: str) -> dict[str, Any]:
    return {s.source if step != "keys" else s.target: s for s in found.steps if s.step == step}


def _name(site: tuple[int, ...]) -> str:
    return f"L{site[0]}.E{site[1]}.N{site[2]}" if len(site) == 3 else f"L{site[0]}.N{site[1]}"


SLOWER = [pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt_oss", 1), ("neox", 1), ("mixtral", 1))]


@pytest.mark.parametrize(("family", "seed"), [("llama", 3), ("gemma2", 2), ("gpt2", 0), *SLOWER])
def test_a_planted_circuit_is_found_from_end_to_end(family: str, seed: int, tmp_path: Path) -> None:
    o = organism(family, seed)
    again = {"token": o.tokenizer.decode([o.tokens_of(1)[0]]), "max_repeats": 120} if family == "llama" else {}
    found, truth = _circuit(o, tmp_path, **again), o.truth
    assert found.sink_layer == truth.sink_layer and set(found.neurons) == set(map(_name, truth.neurons))
    own = truth.group_heads.get(truth.groups[1])  # BOS's group
    mark = f"L{truth.marking_layer}.H{own[0]}" if own else "position embedding"
    marks = _steps(found, "first token")
    step = marks[mark]
    assert step.share is not None and 0.85 < step.share < 1.25 and max(marks, key=lambda m: marks[m].share or 0) == mark
    assert step.target.startswith(truth.factor or "input")
    assert step.necessity > 0.95 and step.sufficiency > 0.9
    assert step.necessity_control < 0.2 and step.sufficiency_control < 0.2
    assert [m.relation for m in found.marking if m.place == "first token"] == ["alone"]
    columns = _steps(found, "column")
    assert sum(columns[_name(n)].share for n in truth.neurons) == pytest.approx(1, abs=0.05)
    whole = columns.get("all of them", columns[_name(truth.neurons[0])])
    assert whole.necessity > 0.95 and whole.sufficiency > 0.7 and whole.necessity_control < 0.1
    assert found.attention is not None and found.carried_by == "spike"
    assert set(found.attention.heads) == set(truth.reading_heads)
    assert found.attention.without < 0.2 < 0.8 < min(found.attention.intact, found.attention.control or 0.0)
    for head in _steps(found, "keys").values():
        assert head.share > 0.9 and head.necessity > 0.9 and head.sufficiency > 0.9 and head.necessity_control < 0.1
    assert found.error is not None and found.error < 1e-4
    if again:  # another token is marked by a head of its own
        assert found.repeated == again["token"]
        step = _steps(found, "repetition")[f"L0.H{truth.group_heads[1][0]}"]
        assert step.share > 0.85 and step.necessity > 0.95 and step.sufficiency > 0.9 and step.necessity_control < 0.2


@pytest.fixture(scope="module")
def through_an_mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Organism, Circuit]:
    """The up factor of its sink neurons reads what a neuron of layer 0 makes of two heads."""
    o = organism("llama", 8, kind="spread")
    return o, _circuit(o, tmp_path_factory.mktemp("text"))


def test_a_mark_that_passes_through_an_mlp_and_needs_two_heads(through_an_mlp: tuple[Organism, Circuit]) -> None:
    """Each head is needed, and the share is the MLP's."""
    o, found = through_an_mlp
    assert o.truth.factor == "up"
    layer = o.truth.sink_layer
    heads = [f"L0.H{head}" for head in o.truth.group_heads[o.truth.groups[1]]]
    marks = _steps(found, "first token")
    assert abs(marks["MLP of layer 0"].share - 1) < 0.15 and marks["MLP of layer 0"].target == f"up of layer {layer}"
    for head in heads:
        assert abs(marks[head].share) < 0.05 and marks[head].necessity > 0.9 and marks[head].sufficiency < 0.2
    between, within = (m for m in found.marking if m.place == "first token")
    assert between.relation == "in series" and set(between.by) == {*heads, "the MLP of layer 0"}
    assert within.relation == "all needed" and list(within.components) == heads
    factors = {(s.source, s.target): s for s in found.steps if s.step == "gate and up"}
    for neuron in map(_name, o.truth.neurons):
        assert factors[f"up of layer {layer}", neuron].necessity == pytest.approx(1, abs=0.01)
        assert abs(factors[f"gate of layer {layer}", neuron].sufficiency) < 0.1


@pytest.mark.parametrize(("rule", "relation"), [("and", "all needed"), ("or", "any suffices")])
def test_marks_of_two_layers_are_told_apart(rule: str, relation: str, tmp_path: Path) -> None:
    o = hard(f"{rule}_marking", "llama", 2)
    found = _circuit(o, tmp_path, max_repeats=8)
    between = found.marking[0]
    assert between.relation == relation and len(between.by) == 2
    assert between.components == ("the attention of layer 0", "the attention of layer 1")
    assert between.necessity is not None and between.necessity > 0.95
    marks = _steps(found, "first token")
    for (layer, heads), name in zip(o.truth.marking, between.by, strict=True):
        assert name in [f"L{layer}.H{head}" for head in heads]
        assert marks[name].share == pytest.approx(0.55, abs=0.1)
        assert marks[name].necessity > 0.9 if rule == "and" else marks[name].necessity < 0.7
        assert marks[name].sufficiency < 0.2 if rule == "and" else marks[name].sufficiency > 0.3


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
    found = _circuit(o, tmp_path, max_repeats=8)
    assert found.sink_layer is None and found.neurons == () and found.attention is not None
    marks = _steps(found, "first token")
    heads = [f"L0.H{head}" for _, own in o.truth.marking for head in own]
    name = source or next(head for head in heads if head in marks)
    assert marks[name].share > 0.9 and marks[name].target == "keys" and marks[name].necessity > 0.85
    assert found.carried_by == (f"the {name}" if source else name)
    assert set(found.attention.heads) == set(o.truth.reading)
    assert found.attention.without < 0.1 < 0.8 < min(found.attention.intact, found.attention.control or 0.0)
    assert found.conclusion().startswith("No MLP raises the first token's norm, but heads attend to it")


def test_heads_that_read_the_mark_and_not_the_spike(tmp_path: Path) -> None:
    o = hard("decoupled", "neox", 2)
    found = _circuit(o, tmp_path, max_repeats=8)
    assert {_name(site) for one in o.truth.sets for site in one} == set(found.neurons)
    heads = [f"L0.H{head}" for _, own in o.truth.marking for head in own]
    assert found.carried_by in heads and "heads do not need the spike" in found.conclusion()
    assert [m.place for m in found.marking] == ["first token", "keys"]


@pytest.mark.slow
def test_a_folder_read_layer_by_layer_gives_the_same(tmp_path: Path) -> None:
    o = organism("llama", 3)
    live = _circuit(o, tmp_path)
    streamed = circuit(o.save(tmp_path / "model"), text=tmp_path / "text.txt", max_repeats=64)
    for mine, theirs in zip(live.steps, streamed.steps, strict=True):
        assert (mine.source, mine.target) == (theirs.source, theirs.target)
        assert theirs.share == pytest.approx(mine.share, abs=1e-3)
        assert theirs.necessity == pytest.approx(mine.necessity, abs=1e-3)


def test_no_circuit_is_an_answer(tmp_path: Path) -> None:
    found = _circuit(organism("llama", 3, kind="none"), tmp_path)
    assert found.steps == () and found.attention is None
    assert found.conclusion().startswith("No circuit: no MLP raises the first token's norm, and no head attends")
    assert "no circuit" in str(found.figure().layout)


def test_a_component_gives_a_position_what_it_gives_at_another() -> None:
    """Necessity and sufficiency of the token embedding are those of a text with the other token."""
    o = organism("llama", 3)
    target, ids = Target.of(o.model, o.tokenizer), o.natural(2, 12)
    bench = Bench(target, ids, 0, 5, o.truth.sink_layer)

    def norm(tokens: torch.Tensor, at: int) -> torch.Tensor:
        name = f"blocks.{o.truth.sink_layer}.hook_resid_post"
        return trace(target, tokens, [name], "norm")[name][:, at]

    other, later = ids.clone(), ids.clone()
    other[:, 0], later[:, 5] = ids[:, 5], ids[:, 0]
    top, floor = norm(ids, 0), norm(ids, 5)
    proof = bench.proofs([(Component("token embedding"),)])[0]
    span = (top - floor).mean()
    assert proof.necessity == pytest.approx(float((top - norm(other, 0)).mean() / span), abs=1e-4)
    assert proof.sufficiency == pytest.approx(float((norm(later, 5) - floor).mean() / span), abs=1e-4)


def test_the_drawing_has_every_step_and_escapes_names(through_an_mlp: tuple[Organism, Circuit]) -> None:
    o, found = through_an_mlp
    truth = o.truth
    figure = found.figure()
    names = {text for trace_ in figure.data for text in trace_.text or ()}
    planted = {f"L0.H{head}" for head in truth.group_heads[truth.groups[1]]} | set(map(_name, truth.neurons))
    first = html.escape(f"first token {found.first_token!r}")
    assert {first, *planted, "spike", f"up of layer {truth.sink_layer}"} <= names
    assert "<s>" not in "".join(names)
    told = " ".join(a.hovertext or "" for a in figure.layout.annotations)
    assert f"necessity {found.steps[0].necessity:.0%}, random control" in told
