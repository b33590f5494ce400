"""Rotary scores by relative offset against the models' own attention, and every number against a dense one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import tiny_model
from torch import Tensor

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.attention.rotary import Disturbed, RotaryInvariance, Rotation, rotary_invariance, tails
from sinkscope.attention.texts import loop_of
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.trace.attention import queries_and_keys

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "attention_factor": 1.3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn, tables once": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}),
    "norm of queries and keys": ("qwen3", {}),
    "norm before heads": ("olmo2", {}),
    "partial": ("phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "partial, fused": ("gpt_neox", {}),
    "fused": ("phi3", {}),
    "soft cap": ("gemma2", {}),
    "two bases": ("gemma3_text", {}),
}


def _ids(length: int, seed: int = 1) -> Tensor:
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed))


def _looping(prefix: int = 10, period: int = 4, repeats: int = 12) -> Tensor:
    return torch.cat([_ids(prefix, 2), _ids(period, 3).repeat(repeats)])


def _before(target: Target, ids: Tensor, layer: int) -> tuple[Tensor, Tensor, Rotation]:
    """Queries and keys before rotary, one key per query head, and the layer's rotation."""
    kept: dict[str, Any] = {}

    def entry(_m: Any, _a: Any, kwargs: dict[str, Any]) -> None:
        kept.setdefault("turn", Rotation.of(kwargs["position_embeddings"][0][0], kwargs["position_embeddings"][1][0]))

    def keep(_layer: int, rotated: bool, query: Tensor, key: Tensor) -> None:
        if not rotated:
            kept["qk"] = query[0], key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)

    with (
        target.hooks((target.sub(layer, target.adapter.attn), "pre", entry)),
        queries_and_keys(target, keep, [layer]),
        torch.no_grad(),
    ):
        target.forward(ids[None])
    return *kept["qk"], kept["turn"]


def _rows(target: Target, scores: Tensor, layer: int) -> Tensor:
    """Attention as the model makes it of scores."""
    module: Any = target.sub(layer, target.adapter.attn)
    scores = scores * float(module.scaling)
    if cap := getattr(target.config, "attn_logit_softcapping", None):
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    if target.adapter.learned_sinks:
        extra = module.sinks.detach()[:, None, None].expand(-1, scores.shape[1], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_scores_by_offset_give_the_models_own_attention(name: str) -> None:
    """Eq. 13 from unrotated queries and keys, against the stock eager attention; and the printed sign fails."""
    family, options = FAMILIES[name]
    model, tokenizer = tiny_model(family, **options)
    target = Target.of(model, tokenizer)
    ids, at = _ids(14), torch.arange(14)  # shorter than every window
    for layer in (0, 2):
        query, key, turn = _before(target, ids, layer)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            own = model(ids[None], output_attentions=True).attentions[layer][0]
        torch.testing.assert_close(_rows(target, turn.scores(query, key, at, at), layer), own, rtol=1e-4, atol=1e-5)
        printed = Rotation(turn.angle.conj(), turn.scale).scores(query, key, at, at)  # R(w (t - i)) as Eq. 13 has it
        assert float((_rows(target, printed, layer) - own).abs().max()) > 0.01
    assert turn.scale == pytest.approx(1.3 if "yarn" in name else 1.0, rel=1e-5)
    assert turn.turned == (query.shape[-1] if "partial" not in name else int(turn.angle.shape[1]) * 2)
    assert ("partial" in name) == (turn.turned < query.shape[-1])


@pytest.mark.parametrize("name", ["llama", "yarn", "partial, fused", "soft cap"])
def test_numbers_equal_their_definitions(name: str) -> None:
    """Each of a tail's numbers by loops over pairs and blocks, with rotation matrices."""
    family, options = FAMILIES[name]
    model, tokenizer = tiny_model(family, **options)
    target = Target.of(model, tokenizer)
    ids, tail, shift, layer = _looping(), 4, 5, 1
    n = len(ids)
    (found,) = tails(target, ids, [layer], tail, [shift], [3])
    query, key, turn = _before(target, ids, layer)
    half, d = turn.angle.shape[1], query.shape[-1]
    pairs = [(j, j + half) for j in range(half)] + [
        (2 * half + j, 2 * half + j + (d - 2 * half) // 2) for j in range((d - 2 * half) // 2)
    ]
    gain = [turn.scale**2 if j < half else 1.0 for j in range(len(pairs))]

    def score(head: int, t: int, i: int) -> float:
        total = 0.0
        for j, pair in enumerate(pairs):
            a = float(turn.angle[1, j].angle()) * (i - t) if j < half else 0.0
            rotation = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
            total += gain[j] * float(query[head, t, list(pair)] @ rotation @ key[head, i, list(pair)])
        return total

    where = [(t, i) for t in range(n - tail, n) for i in range(t - tail + 1, t + 1)]
    for head in range(query.shape[0]):
        dq = max(float((query[head, t] - query[head, t - shift]).norm()) for t in range(n - tail, n))
        dk = max(float((key[head, i] - key[head, i - shift]).norm()) for _, i in where)
        assert float(found.shifts[shift]["delta_q"][head]) == pytest.approx(dq, rel=1e-4)
        assert float(found.shifts[shift]["delta_k"][head]) == pytest.approx(dk, rel=1e-4)
        change = [abs(score(head, t, i) - score(head, t - shift, i - shift)) for t, i in where]

        def block(x: Tensor, pair: tuple[int, int]) -> float:
            return float(x[list(pair)].norm())

        bound = [
            sum(
                g * (block(key[head, i - shift], p) * dq + block(query[head, t - shift], p) * dk + dq * dk)
                for g, p in zip(gain, pairs, strict=True)
            )
            for t, i in where
        ]
        assert float(found.shifts[shift]["change"][head]) == pytest.approx(sum(change) / len(change), rel=1e-3)
        assert float(found.shifts[shift]["largest"][head]) == pytest.approx(max(change), rel=1e-3)
        assert float(found.shifts[shift]["bound"][head]) == pytest.approx(sum(bound) / len(bound), rel=1e-3)
        tight = max(c / b for c, b in zip(change, bound, strict=True))
        assert float(found.shifts[shift]["tightness"][head]) == pytest.approx(tight, rel=2e-2)
        assert float(found.shifts[shift]["whole_bound"][head]) <= float(found.shifts[shift]["bound"][head])
    assert float(found.heads["error"].max()) < 1e-5


def test_tail_operator_equals_its_definition() -> None:
    model, tokenizer = tiny_model("llama")
    target = Target.of(model, tokenizer)
    ids, tail = _looping(), 6
    (found,) = tails(target, ids, [1], tail, [4], [1, 4])
    model.set_attn_implementation("eager")
    values: list[Tensor] = []
    handle = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _m, _a, out: values.append(out))
    with torch.no_grad():
        alpha = model(ids[None], output_attentions=True).attentions[1][0]
    handle.remove()
    value = values[0][0].unflatten(-1, (2, -1)).repeat_interleave(2, 1)  # pos head d_head
    o = torch.zeros(len(ids), 4, value.shape[-1])
    mass = torch.zeros(4, len(ids))
    for t in range(len(ids)):
        for i in range(max(0, t - tail + 1), t + 1):
            o[t] += alpha[:, t, i, None] * value[i]
            mass[:, t] += alpha[:, t, i]
    torch.testing.assert_close(found.heads["tail_mass"], mass[:, -tail:].mean(1), rtol=1e-4, atol=1e-5)
    for step in (1, 4):
        moved = (o[step:] - o[:-step]).norm(dim=-1) / o[step:].norm(dim=-1)
        torch.testing.assert_close(found.drift[step], moved[-tail:].median(0).values, rtol=1e-3, atol=1e-4)
        whole = (o[step:] - o[:-step]).flatten(1).norm(dim=-1) / o[step:].flatten(1).norm(dim=-1)
        torch.testing.assert_close(found.curve[step][step:], whole, rtol=1e-3, atol=1e-4)
        assert found.curve[step][:step].isnan().all()


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), shift=st.integers(1, 12), tail=st.integers(1, 12))
def test_the_bound_holds_whatever_the_shift(seed: int, shift: int, tail: int) -> None:
    model, _ = tiny_model("gpt_neox")
    for part in tails(Target.of(model), _ids(40, seed), [0, 1, 2], tail, [shift], [shift]):
        assert float(part.shifts[shift]["tightness"].max()) <= 1
        assert (part.shifts[shift]["largest"] >= part.shifts[shift]["change"]).all()


def test_a_disturbance_equals_one_in_a_plain_pass() -> None:
    """With the cache cut back again and again, against a whole pass without one, on a model with a window."""
    model, tokenizer = tiny_model("mistral")
    target = Target.of(model, tokenizer)
    ids, period, periods = _looping(), 4, 3
    bench = Disturbed(target, ids, period, periods, directions=3, seed=5)
    found = [bench.decay(1, size=0.1) for _ in range(2)]
    assert found[0] is not None and found[0] == found[1]
    start = len(ids) - (periods + 1) * period
    states: list[Tensor] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda _m, a: states.append(a[0].detach()[0]))
    with torch.no_grad():
        plain = model.model(ids[None], use_cache=False).last_hidden_state[0, start:]
        handle.remove()
        tail = states[0][start - periods * period : start]
        _, s, v = torch.linalg.svd(tail, full_matrices=False)
        rank = next(k for k in range(1, len(s) + 1) if float(s[:k].square().sum() / s.square().sum()) >= 0.999)
        assert found[0].dimensions == rank
        noise = torch.randn(3, period, 32, generator=torch.Generator().manual_seed(5))
        noise = noise - noise @ v[:rank].T @ v[:rank]
        push = 0.1 * noise / noise.norm(dim=-1, keepdim=True) * states[0][start : start + period].norm(dim=-1)[:, None]
        total = torch.zeros(periods + 1)
        for row in push:

            def add(_m: Any, args: Any, row: Tensor = row) -> Any:
                moved = args[0].clone()
                moved[0, start : start + period] += row
                return (moved, *args[1:])

            handle = model.model.layers[1].register_forward_pre_hook(add)
            out = model.model(ids[None], use_cache=False).last_hidden_state[0, start:]
            handle.remove()
            sizes = ((out - plain).norm(dim=-1) / plain.norm(dim=-1)).square()
            total += sizes.view(periods + 1, period).mean(1) / 3
    torch.testing.assert_close(torch.tensor(found[0].change), total.sqrt(), rtol=1e-3, atol=1e-6)


def test_without_attention_nothing_is_carried_on() -> None:
    """The only way to later steps is the cache: with attention's output projection at zero a disturbance stays."""
    model, tokenizer = tiny_model("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    bench = Disturbed(Target.of(model, tokenizer), _looping(), 4, 3)
    for within in (False, True):
        found = bench.decay(1, size=1.0, within=within)
        assert found is not None and found.change[0] > 0.1 and found.change[1:] == (0.0, 0.0, 0.0)
        assert found.contraction == 0 and found.kept == 1


def test_a_loop_is_found_and_measured() -> None:
    model, tokenizer = tiny_model("qwen3")
    ids = _looping()
    found = rotary_invariance(model, tokenizer=tokenizer, ids=ids.tolist())
    assert (found.period, found.onset, found.tokens) == (4, 10, 58)
    assert len(found.heads) == 12 and {d.layer for d in found.drift} == {0, 1, 2}
    for head in found.heads:
        assert head.tightness <= 1 and head.largest >= head.change
        if head.layer == 0:  # where a query is its token's alone: equal a period apart, and only there
            assert head.delta_q == head.delta_k == 0 and head.change < 1e-5 * head.spread
            assert head.other_delta_q is not None and head.other_delta_q > 0.1 * head.query_norm
            assert head.other_change is not None and head.other_change > 0.1 * head.spread
            assert head.healthy_delta_q is not None and head.healthy_delta_q > 0.1 * head.query_norm
    assert loop_of(_ids(60).tolist(), 0).period is None


def test_what_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    """Period 1 has no other shift, a short text no control, and a sequence without a loop nothing to measure."""
    model, tokenizer = tiny_model("llama")
    text = tmp_path / "text.txt"
    text.write_text(tokenizer.decode(_ids(70).tolist()))
    ids = _looping(period=1, repeats=90).tolist()
    ones = rotary_invariance(model, tokenizer=tokenizer, ids=ids, layers=[1], text=text)
    assert ones.healthy_decays == () and all(h.healthy_delta_q is None for h in ones.heads) and str(ones)
    assert len(ones.figure().data) == 9
    assert ones.period == 1 and all(h.other_delta_q is None and h.drift == h.step_drift for h in ones.heads)
    none = rotary_invariance(model, tokenizer=tokenizer, ids=_ids(60).tolist())
    assert none.period is None and none.heads == () and "no loop" in str(none)
    assert len(none.figure().data) == 0


def test_bad_input_is_one_line() -> None:
    model, tokenizer = tiny_model("llama")
    for family in ("gpt2", "opt"):
        absolute, words = tiny_model(family)
        with pytest.raises(UnsupportedError, match="learned absolute positions"):
            rotary_invariance(absolute, tokenizer=words)
    with pytest.raises(UnsupportedError, match="TransformerBridge"):
        rotary_invariance(ss.load(None, backend="bridge"), ids=[5] * 40)
    falcon, words = tiny_model("falcon")
    with pytest.raises(UnsupportedError, match="queries and keys of falcon are not offered: give another model"):
        rotary_invariance(falcon, ids=[5] * 40, tokenizer=words)
    half, words = tiny_model("llama")
    found = rotary_invariance(half.bfloat16(), ids=_looping().tolist(), tokenizer=words)
    assert "near the rounding of bfloat16" in str(found) and "Eq. 15 holds" in str(found)
    for options, message in (
        ({"ids": [5, 500]}, "token id 500 is none of .*: expected 0 to 95"),
        ({"ids": []}, "there is no token id in a row"),
        ({"ids": [5], "prompt": "word"}, "a prompt and ids are given"),
        ({"ids": [5] * 30, "layers": [7]}, "layer 7 is not in .*: give one from 0 to 2"),
        ({"prompt": " "}, "prompt 1 is empty"),
        ({"prompt": [5, 6], "max_new_tokens": 2000}, "ask for at most 1022 new tokens"),
        ({"prompt": [5, 6], "max_new_tokens": 0}, "--max-new-tokens 0: expected a whole number from 1"),
    ):
        with pytest.raises(SinkscopeError, match=message):
            rotary_invariance(model, tokenizer=tokenizer, **options)


def test_the_command_on_the_model_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its loop is real: what the paper says of it, with the contrasts."""
    options = ["--max-new-tokens", "64", "--layer", "1", "--layer", "5", "--json", "-"]
    assert main(["rotary", *options]) == 0
    found = Result.from_dict(json.loads(capsys.readouterr().out))
    assert isinstance(found, RotaryInvariance) and found.period is not None and found.onset is not None
    assert {h.layer for h in found.heads} == {1, 5}
    same = rotary_invariance(max_new_tokens=64, layers=[1, 5])
    assert (same.heads, same.decays, same.drift) == (found.heads, found.decays, found.drift)
    assert Result.load(same.save(tmp_path / "x.json")).to_dict()["result"] == same.to_dict()["result"]
    for h in found.heads:
        assert h.error < 1e-4 and h.tightness <= 1 and h.whole_bound <= h.bound
        assert h.other_delta_q is not None and h.delta_q < 0.5 * h.other_delta_q
        assert h.healthy_change is not None and h.change < 0.5 * h.healthy_change
    late = [h for h in found.heads if h.layer == 5]
    assert all(h.drift < h.step_drift for h in late)
    drawn = same.figure()
    dots = next(t for t in drawn.data if t.name == f"scores {found.period} apart")
    assert [y for y in dots.y] == [max(h.change / h.spread, 1e-6) for h in same.heads]
    assert "Eq. 15 holds" in str(found)
