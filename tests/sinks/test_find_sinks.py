"""find_sinks against planted truth, and its shortcuts against the long way."""

from __future__ import annotations

import re
import secrets
import tempfile
from typing import Any

import pytest
import torch
from organisms import FAMILIES, KINDS, Organism, organism
from organisms.plan import LEAST_LAYERS

from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import Ablate
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.find import FindSinks, find_sinks
from sinkscope.sinks.first_token.layer_scan import Walk, walk
from sinkscope.sinks.first_token.neurons import (
    columns,
    contribution_norms,
    norm_without,
    prove,
    repeat_until_half,
    view_layer,
)
from sinkscope.sinks.repetition.repeat import repeat_norms
from sinkscope.trace.run import trace

SINKLESS = ("none", "massive_dim")


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sinkscope.sinks.first_token.attention_received.RATE_TEXTS", 8
    )  # the sink rate has tests of its own


def _found(o: Organism, **kwargs: Any) -> FindSinks:
    # Text in the organism's own words: English would be one unknown word over and over, a repeated token.
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        rows = o.natural(8, 64)
        file.write(" ".join(o.tokenizer.decode(row[o.bos :]) for row in rows))
        file.flush()
        return _find(o, text=file.name, **kwargs)


def _find(o: Organism, **kwargs: Any) -> FindSinks:
    limit = (o.model.config.max_position_embeddings or 1000) - 1
    return find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=min(64, limit), **kwargs)


def _mistake(o: Organism, result: FindSinks) -> str:
    """What differs from the planted truth, "" for nothing."""
    truth = o.truth
    causal = {n.site for n in result.causal if n.layer == result.sink_layer}
    stages = tuple(s.layer for s in result.stages)
    wanted = (truth.sink_layer, set(truth.neurons), truth.stages if truth.has_sink else ())
    got = (result.sink_layer, causal, stages)
    return "" if wanted == got else f"{o.family} {o.kind} seed {o.seed} bos {o.bos}: planted {wanted}, found {got}"


def _draw(kinds: tuple[str, ...], count: int, seed: int) -> list[tuple[str, int, str, bool]]:
    """Random (family, seed, kind, bos)."""
    draws = []
    rng = torch.Generator().manual_seed(seed)
    first = int(torch.randint(len(kinds), (1,), generator=rng))

    def pick(options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=rng))]

    while len(draws) < count:
        kind = kinds[(first + len(draws)) % len(kinds)]  # all of them as often
        family = pick([name for name, family in FAMILIES.items() if kind in family.kinds])
        draws.append((family, int(torch.randint(1 << 30, (1,), generator=rng)), kind, pick([True, False])))
    return draws


def _recover(kinds: tuple[str, ...], count: int, *, shallow: bool = False) -> None:
    """With as many layers as an organism draws; `shallow`: with the fewest that its kind needs, or one more."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest when the test fails
    mistakes = []
    for i, (family, number, kind, bos) in enumerate(_draw(kinds, count, seed)):
        o = organism(family, number, kind=kind, bos=bos, n_layers=LEAST_LAYERS[kind] + i % 2 if shallow else None)
        mistakes.append(_mistake(o, _found(o)))
    wrong = [m for m in mistakes if m]
    assert not wrong, f"seed {seed}: {len(wrong)} of {count} wrong:\n" + "\n".join(wrong)


def test_recovers_random_organisms_of_every_kind() -> None:
    kinds = tuple(k for k in KINDS if k not in SINKLESS)
    _recover(kinds, 2 * len(kinds), shallow=True)


def test_finds_no_sink_in_ten_sinkless_ones() -> None:
    _recover(SINKLESS, 10, shallow=True)


@pytest.mark.slow
def test_recovers_two_hundred_random_organisms() -> None:
    _recover(tuple(k for k in KINDS if k not in SINKLESS), 200)


@pytest.mark.slow
def test_finds_no_sink_in_a_hundred_sinkless_ones() -> None:
    _recover(SINKLESS, 100)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "gate"), ("gemma2", "sink"), ("gpt2", "sink"), ("mixtral", "sink")]
)
def test_same_layer_ablation_equals_a_real_ablated_pass(family: str, kind: str) -> None:
    """`norm_without` takes columns away; Ablate zeroes activations in a forward pass. Also for random neurons."""
    o = organism(family, 3, kind=kind)
    target = Target.of(o.model, o.tokenizer)
    layer = o.truth.sink_layer
    assert layer is not None
    ids = o.natural(2, 12)
    view = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool))
    flat = [s[-1] + (s[1] * target.d_mlp if len(s) == 3 else 0) for s in o.truth.neurons]
    experts = [0] if target.is_mixture(layer) else [None]
    sites = [*o.truth.neurons, *((layer, 1) if e is None else (layer, e, 1) for e in experts)]
    for picks, zeroed in (([flat[0]], sites[:1]), ([*flat, 1], sites)):
        sets = torch.tensor([picks])
        cols = columns(target, layer, sets.flatten()).unflatten(0, tuple(sets.shape))
        with Ablate(sites=zeroed).on(o.model):
            norm = trace(o.model, ids, [f"blocks.{layer}.hook_resid_post"], "norm")[f"blocks.{layer}.hook_resid_post"]
        torch.testing.assert_close(norm_without(target, view, sets, cols)[0], norm.flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "qwen3_moe"])
def test_contribution_is_post_times_column(family: str) -> None:
    o = organism(family, 1)
    target = Target.of(o.model, o.tokenizer)
    ids = o.natural(1, 6)
    view = view_layer(target, 1, ids, torch.ones_like(ids, dtype=torch.bool))
    every = columns(target, 1, torch.arange(view.post.shape[1]))
    torch.testing.assert_close(
        contribution_norms(target, view), (view.post[:, :, None] * every).norm(dim=-1), rtol=1e-4, atol=1e-5
    )
    bias = getattr(target.sub(1, target.adapter.down), "bias", None) if not target.is_mixture(1) else None
    whole = view.post @ every + (0 if bias is None else bias)
    torch.testing.assert_close(whole, view.mlp, rtol=1e-4, atol=1e-4)  # the parts are the MLP's output


def test_tokens_of_the_first_tokens_own_cluster_are_left_out_of_the_median() -> None:
    """BOS's neighbour is a sink at its first occurrence: a median of 1 and 90 would say that 45 repetitions do it."""
    o = organism("llama", 2)
    expected = o.truth.repeats_expected or 0
    twin, grouped, free = o.tokens_of(0)[1], o.tokens_of(0)[0], o.tokens_of(-1)[0]
    with torch.no_grad():
        o.model.get_input_embeddings().weight[twin] = o.model.get_input_embeddings().weight[o.tokenizer.bos_token_id]
    words = [o.tokenizer.decode([t]) for t in (twin, grouped, free)]
    options: dict[str, Any] = {"tokenizer": o.tokenizer, "max_repeats": 2 * expected}
    every = find_sinks(o.model, tokens=words, **options)
    found, said = every.repeats, every.text()
    assert [t.repeats == 1 for t in found.tokens] == [True, False, False]
    assert found.median == found.tokens[1].repeats and 0.6 * expected <= (found.median or 0) <= 1.5 * expected
    assert (found.at_once, found.unreached) == (found.tokens[:1], 1)
    assert f"(median over 1 tokens; 1 of 2 never do within {2 * expected})" in said
    assert f"first occurrence is already a sink, without repetition: {words[0]!r}." in said
    alone = find_sinks(o.model, tokens=words[:1], **options)
    assert (alone.repeats.median, alone.repeats.unreached) == (None, 0)
    assert "None of" not in alone.text() and "becomes a sink after" not in alone.text()
    curve = repeat_norms(o.model, tokens=words, **options)
    assert f"after {found.median:.0f} repetitions (median of 1 of 2 tokens)" in curve.conclusion()
    assert f"without repetition: {words[0]!r}." in curve.text()
    assert "first occurrence of every token" in repeat_norms(o.model, tokens=words[:1], **options).conclusion()


def test_repeats_are_those_of_one_long_pass() -> None:
    """Doubling must give what a single pass of full length shows, and tokens in no group must stay unreached."""
    o = organism("llama", 5)
    target = Target.of(o.model, o.tokenizer)
    layer = o.truth.sink_layer
    assert layer is not None and o.truth.repeats_expected is not None
    grouped, free = o.tokens_of(0)[0], o.tokens_of(-1)[0]
    limit = min(4 * o.truth.repeats_expected + 64, o.model.config.max_position_embeddings - 1)
    found = repeat_until_half(target, layer, [grouped, free], [o.tokenizer.bos_token_id] * 2, limit)
    site = f"blocks.{layer}.hook_resid_post"
    norm = trace(o.model, o.repeated(limit, grouped), [site], "norm")[site][0]
    first = int((norm[1:] >= norm[0] / 2).nonzero()[0]) + 1
    assert found.repeats == [first, None]
    assert found.view is not None and len(found.view.resid) == 1
    assert 0.6 * o.truth.repeats_expected <= first <= 1.5 * o.truth.repeats_expected


def test_random_controls_never_hold_a_candidate() -> None:
    o = organism("qwen2", 2)
    target = Target.of(o.model, o.tokenizer)
    assert o.truth.sink_layer is not None
    proof = prove(target, o.natural(), o.truth.sink_layer, 4, torch.Generator().manual_seed(0), None)
    candidates = {n.site for n in proof.neurons}
    assert len(proof.controls) == len(o.truth.neurons) and not candidates & set(proof.controls)
    assert proof.set_drop is not None and proof.set_control_drop is not None
    assert proof.set_drop > 0.8 and proof.set_control_drop < 0.1


def test_walk_stops_where_the_norm_stays_flat() -> None:
    o = organism("llama", 0, n_layers=8)
    target = Target.of(o.model, o.tokenizer)
    ids, layer = o.natural(), o.truth.sink_layer
    assert layer is not None
    seen = walk(target, ids, whole=False)
    assert len(seen.first) == min(8, layer + 1 + 3)
    whole = walk(target, ids, whole=True)
    assert whole.first[: len(seen.first)] == seen.first and whole.stages == seen.stages == [layer]


def test_a_stage_writes_far_more_along_the_spike_than_on_typical_text() -> None:
    """Layers 2 and 3 write a tenth of the spike's size; layer 2 writes half of that on typical text, too."""
    spike = torch.eye(4)[0]
    along, usual = [0.0, 50.0, 5.0, 5.0], [0.0, 0.0, 2.5, 0.5]
    seen = Walk(
        4,
        first=[2.0, 50.0, 50.0, 50.0],  # what layers 2 and 3 add, their attention takes away
        typical=[(1.0, 2.0, 3.0)] * 4,
        mlp_first=along,
        mlp_typical=[1.0] * 4,
        residual=[2 * spike, *[50 * spike] * 3],
        written=[size * spike for size in along],
        sample=[torch.full((3, 1), size) * spike for size in usual],
    )
    assert seen.stages == [1, 3] and seen.sink_layer == 1


def test_notebook_rule_needs_all_layers_and_six_of_them() -> None:
    def made(n: int) -> Walk:
        return Walk(n, first=[1.0] * n, raw_first=[1.0, 100.0] + [1.0] * (n - 2))

    assert made(5).notebook_layer is None  # the largest z-score of n values is (n - 1) / sqrt(n): 1.79 for five
    assert made(6).notebook_layer == 1
    assert Walk(9, first=[1.0] * 6, raw_first=[1.0, 100.0, 1.0, 1.0, 1.0, 1.0]).notebook_layer is None


def test_zeroing_takes_the_attention_away_and_random_neurons_do_not() -> None:
    result = _found(organism("llama", 4))
    assert result.attention is not None
    a = result.attention
    assert a.intact > 0.3 and a.ablated < 0.5 * a.intact and abs(a.control - a.intact) < 0.02


def test_result_survives_a_file_and_says_what_it_found(tmp_path: Any) -> None:
    o = organism("mixtral", 1)
    result = _found(o)
    result.save(tmp_path / "r.json")
    assert Result.load(tmp_path / "r.json") == result
    text = str(result)
    layer, expert, neuron = o.truth.neurons[0]
    assert f"sink layer is layer {layer}" in text
    assert re.search(rf"L{layer}\.E{expert}\.N{neuron}\b.* makes? the spike", text)
    none = _found(organism("llama", 0, kind="none"))
    assert none.sink_layer is None and "Neither a norm spike nor an attention sink" in str(none) and none.neurons == ()
    assert none.repeats.tokens == () and none.set_drop is None


def test_unknown_bos_and_bad_numbers_are_refused() -> None:
    o = organism("llama", 0, bos=False)
    with pytest.raises(SinkscopeError, match="has no BOS token"):
        _found(o, bos=True)
    with pytest.raises(SinkscopeError, match=r"--top-k 0"):
        _found(o, top_k=0)
    with pytest.raises(SinkscopeError, match=r"--top-k 9999 is more than the \d+ neurons"):
        _found(o, top_k=9999)
    with pytest.raises(SinkscopeError, match=r"--seed -1: expected a whole number from 0"):
        _found(o, seed=-1)
    with pytest.raises(SinkscopeError, match="the largest is"):
        find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=10**9)
    with pytest.raises(SinkscopeError, match="carries no tokenizer"):
        find_sinks(o.model)
