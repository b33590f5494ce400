"""The organisms do what their truth says, seen with raw torch hooks only: nothing of sinkscope is used here."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from organisms import FAMILIES, MODEL_TYPES, Organism, organism, tiny_model
from raw_kit import blocks, head_outputs, inputs_edited, is_gpt_oss, norms, zeroed
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

CASES = [(family, kind) for family in FAMILIES for kind in FAMILIES[family].kinds]
FAST = CASES[::5]  # every family, and every kind
BY_HEADS = [(family, kind) for family, kind in CASES if kind in ("sink", "spread", "late_mark") and family != "gpt2"]


def first_drop(o: Organism, sites: tuple[tuple[int, ...], ...], intact: Tensor, tokens: Tensor) -> float:
    with zeroed(o.model, sites):
        without = norms(o.model, tokens)[o.truth.sink_layer, :, 0]
    return float((1 - without / intact).min())


# --- what every organism must do -----------------------------------------------------------------------------------


def check(o: Organism, seed: int) -> None:
    tokens = o.natural(n=4, length=40, seed=seed)
    profile = norms(o.model, tokens)
    first, rest = profile[:, :, 0].mean(1), profile[:, :, 1:]
    typical = rest.flatten(1).median(1).values
    with torch.no_grad():
        logits = o.model(tokens).logits
    assert torch.isfinite(logits).all()
    assert 0.3 < float(logits.std(-1)[:, 1:].mean()) < 15
    if not o.truth.has_sink:
        assert o.truth.sink_layer is None and o.truth.neurons == () and o.truth.stages == ()
        assert (first < 2 * typical).all()
        large = rest[-1].min() > 100
        assert large == (o.kind == "massive_dim")
        if o.kind == "none":
            assert profile.max() < 40
        return
    check_profile(o, tokens, first, typical, rest)
    check_neurons(o, tokens, profile, seed)
    check_factor(o, tokens)


def check_profile(o: Organism, tokens: Tensor, first: Tensor, typical: Tensor, rest: Tensor) -> None:
    sink = o.truth.sink_layer
    assert sink is not None and 1 <= sink <= len(first) - 2
    assert (first[sink:] > 15 * typical[sink:]).all() and first[sink] > 20 * typical[sink]
    assert (first[:sink] < 2.5 * typical[:sink]).all()
    assert rest.max() < first[sink] / 5  # nothing but the first token
    if len(o.truth.stages) == 2:
        early = o.truth.stages[0]
        assert 0 < early < sink and sink >= len(first) / 3
        with zeroed(o.model, o.truth.early_neurons):
            without = norms(o.model, tokens)[early, :, 0].mean()
        assert 0.01 < (first[early] ** 2 - without**2).sqrt() / first[sink] < 0.04


def check_neurons(o: Organism, tokens: Tensor, profile: Tensor, seed: int) -> None:
    sink, sites = o.truth.sink_layer, o.truth.neurons
    intact, tokens = profile[sink, :, 0], tokens[:, :1]  # nothing later reaches the first token
    single = [first_drop(o, (site,), intact, tokens) for site in sites]
    assert 1 <= len(sites) <= 3 and min(single) > 0.12
    assert single[0] >= max(single) - 0.03  # largest first
    assert first_drop(o, sites, intact, tokens) > 0.8
    rng = random.Random(seed)
    width = getattr(o.model.config, "moe_intermediate_size", None) or getattr(o.model.config, "intermediate_size", None)
    others = set(range(width or o.model.config.n_inner)) - {site[-1] for site in sites}
    for _ in range(10):
        draw = tuple((*sites[0][:-1], neuron) for neuron in rng.sample(sorted(others), len(sites)))
        assert first_drop(o, draw, intact, tokens) < 0.1
    if o.truth.early_neurons:  # the early stage adds about 2 %, and the deep one hardly depends on it
        drop = first_drop(o, o.truth.early_neurons, intact, tokens)
        assert abs(drop) < 0.25


def gate_and_up(o: Organism, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of the largest sink neuron, from what its MLP reads and its weights: [row, position]."""
    layer, *expert, neuron = o.truth.neurons[0]
    mlp, seen = blocks(o.model)[layer].mlp, []
    with inputs_edited(mlp, lambda x: seen.append(x) or x), torch.no_grad():
        o.model(tokens, use_cache=False)
    if not expert:
        return seen[0] @ mlp.gate_proj.weight[neuron], seen[0] @ mlp.up_proj.weight[neuron]
    both = mlp.experts.gate_up_proj[expert[0]]
    if is_gpt_oss(o.model):
        bias = mlp.experts.gate_up_proj_bias[expert[0]]
        gate, up = 2 * neuron, 2 * neuron + 1
        return seen[0] @ both[:, gate] + bias[gate], seen[0] @ both[:, up] + bias[up] + 1  # it multiplies by up + 1
    return seen[0] @ both[neuron], seen[0] @ both[both.shape[0] // 2 + neuron]


def check_factor(o: Organism, tokens: Tensor) -> None:
    assert o.truth.factor in (("gate", "up") if FAMILIES[o.family].gated else (None,))
    if o.truth.factor is None:
        return
    if o.kind in ("gate", "up"):
        assert o.truth.factor == o.kind
    gate, up = gate_and_up(o, tokens)
    marked, steady = (gate, up) if o.truth.factor == "gate" else (up, gate)
    assert (marked[:, 0] > 1.5).all()
    assert (marked[:, 1:] < (0 if o.truth.factor == "gate" else 0.1)).all()
    # The first token's norm is larger (an early stage adds to it), so the constant reads smaller there, within a factor
    # of 2.6; the factor that carries the mark falls 15 times or turns negative.
    ratio = steady / steady[:, :1]
    assert 0.5 < ratio.min() and ratio.max() < 2.6


def check_mechanism(o: Organism, seed: int) -> None:
    """Marking by groups: repetition, clusters, what single heads can do."""
    truth, sink = o.truth, o.truth.sink_layer
    rng = random.Random(seed)
    group = rng.choice([g for g in truth.group_heads if len(o.tokens_of(g)) >= 2])
    x, y = rng.sample(o.tokens_of(group), 2)
    other = rng.choice([t for g in truth.group_heads if g != group for t in o.tokens_of(g)])
    alone = norms(o.model, torch.tensor([[x]]))[sink, 0, 0]
    pair = norms(o.model, torch.tensor([[x, y], [x, other]]))[sink, :, 1]
    assert alone > 100 and pair[0] > 0.5 * alone and pair[1] < 0.1 * alone
    if o.bos:
        assert truth.repeats_expected is not None and 30 <= truth.repeats_expected <= 600
        curve = norms(o.model, o.repeated(int(2.3 * truth.repeats_expected), x))[sink, 0]
        reached = int((curve[1:] < curve[0] / 2).sum()) + 1
        assert truth.repeats_expected / 2 < reached < truth.repeats_expected * 2
        for free in o.tokens_of(-1)[:1]:
            far = min(2 * truth.repeats_expected, (getattr(o.model.config, "sliding_window", None) or 2048) - 1)
            assert norms(o.model, o.repeated(far, free))[sink, 0, 1:].max() < 0.1 * curve[0]
    check_heads(o, x, other, float(alone))


def check_heads(o: Organism, x: int, other: int, alone: float) -> None:
    """A head's output for `x` alone, put where `x` is not first: alone it makes a sink, unless marking is spread."""
    truth, sink = o.truth, o.truth.sink_layer
    group_heads = truth.group_heads[truth.groups[x]]
    out = head_outputs(blocks(o.model)[truth.marking_layer])
    hd = out.weight.shape[1] // o.model.config.num_attention_heads
    kept: list[Tensor] = []
    with inputs_edited(out, lambda z: kept.append(z) or z):
        norms(o.model, torch.tensor([[x]]))
    tokens = torch.tensor([[other, x]])

    def norm_with(heads: tuple[int, ...]) -> float:
        def put(z: Tensor) -> Tensor:
            z = z.clone()
            for head in heads:
                z[0, 1, head * hd : (head + 1) * hd] = kept[0][0, 0, head * hd : (head + 1) * hd]
            return z

        with inputs_edited(out, put):
            return float(norms(o.model, tokens)[sink, 0, 1])

    assert set(group_heads) <= set(truth.marking_heads)
    assert norm_with(group_heads) > 0.5 * alone
    for head in range(o.model.config.num_attention_heads):
        suffices = group_heads == (head,)
        assert (norm_with((head,)) > 0.5 * alone) == suffices
    assert (len(group_heads) > 1) == (o.kind == "spread")


def check_reading(o: Organism) -> None:
    o.model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = o.model(o.natural(2, 64), output_attentions=True, use_cache=False).attentions
    later = {layer for layer, _ in o.truth.reading_heads}
    assert later == set(range(o.truth.sink_layer + 1, len(attention)))
    for layer, head in o.truth.reading_heads:
        assert attention[layer][:, head, 1:, 0].mean() > 0.3
    for layer in range(o.truth.sink_layer + 1):
        assert attention[layer][:, :, 16:, 0].mean() < 0.2


# --- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param(family, kind, marks=[] if (family, kind) in FAST else pytest.mark.slow) for family, kind in CASES],
)
def test_truth(family: str, kind: str) -> None:
    bos = CASES.index((family, kind)) % 3 != 0  # both for every family and for every kind
    o = organism(family, 0, kind=kind, bos=bos)
    check(o, seed=0)
    assert (o.tokenizer.bos_token_id == 1) == bos


@pytest.mark.parametrize(
    ("family", "kind"),  # by default each family once, and each kind three times
    [pytest.param(*case, marks=pytest.mark.slow if (at + at // 3) % 3 else []) for at, case in enumerate(BY_HEADS)],
)
def test_mechanism(family: str, kind: str) -> None:
    seed = 3 if family == "gpt_oss" else 2  # of that family, seed 2 takes 450 repetitions
    o = organism(family, seed, kind=kind)
    check_mechanism(o, seed)
    check_reading(o)


def test_gpt2_marks_the_position_only() -> None:
    o = organism("gpt2", 3)
    sink = o.truth.sink_layer
    assert not o.truth.whole_mechanism and o.truth.marking_heads == () and "position" in o.truth.note
    curve = norms(o.model, o.repeated(600))[sink, 0]
    assert curve[1:].max() < 0.1 * curve[0]
    assert norms(o.model, torch.tensor([[40, 40]]))[sink, 0, 0] > 0.8 * curve[0]
    check_reading(o)


def test_seed_decides_everything_and_leaves_the_callers_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = organism(seed=7), organism(seed=7), organism(seed=8)
    assert torch.equal(torch.rand(3), expected)
    assert first.truth == again.truth != other.truth
    state = again.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in first.model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_oss"])
def test_saved_folder_loads_unchanged(family: str, tmp_path: Any) -> None:
    o = organism(family, 4)
    o.save(tmp_path)
    as_made = o.model.config._attn_implementation
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=as_made)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = o.natural(2, 20)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, o.model(tokens).logits, atol=1e-4)
    text = "poem poem cat dog"
    ids = tokenizer(text)["input_ids"]
    assert ids == o.tokenizer(text)["input_ids"] and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tiny_models(model_type: str, tmp_path: Any) -> None:
    model, tokenizer = tiny_model(model_type, 1)
    tokens = torch.randint(4, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.isfinite(logits).all() and logits.std() > 0.3
        assert torch.equal(tiny_model(model_type, 1)[0](tokens).logits, logits)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
        assert torch.allclose(loaded(tokens).logits, logits, atol=1e-5)
    assert model.config.architectures == [type(model).__name__] == loaded.config.architectures
    assert AutoTokenizer.from_pretrained(tmp_path)("poem dog")["input_ids"] == tokenizer("poem dog")["input_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_seeds(family: str) -> None:
    kinds = FAMILIES[family].kinds
    for seed in range(60):
        kind, bos = kinds[seed % len(kinds)], seed % 3 != 0
        o = organism(family, 100 + seed, kind=kind, bos=bos)
        try:
            check(o, seed)
            if o.truth.whole_mechanism:
                check_mechanism(o, seed)
            if o.truth.has_sink:
                check_reading(o)
        except AssertionError as error:
            raise AssertionError(f"{family} {kind} seed {100 + seed} bos {bos}: {error}") from error
