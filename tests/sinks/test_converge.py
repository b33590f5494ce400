"""Distance to the single token against separate passes, and theorem 4.1's bound against numbers made by hand."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, tiny_model
from organisms import organism as new_organism
from torch import nn

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.load import load
from sinkscope.models.target import Target
from sinkscope.sinks.repetition.converge import Convergence, _same_from, _same_later, convergence, head_outputs, slope
from sinkscope.trace import trace

organism = functools.cache(new_organism)  # only read here
IN_THEOREM = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "neox", "mixtral", "qwen3_moe")


def _measured(o: Organism, n: int, **options: Any) -> Convergence:
    return convergence(o.model, tokenizer=o.tokenizer, max_repeats=n, **options)


def _head(result: Convergence, head: int | None, layer: int = 0, number: int = 0) -> Any:
    return [c for c in result.curves if c.layer == layer and c.head == head][number]


@settings(max_examples=8)
@given(
    family=st.sampled_from(IN_THEOREM),
    seed=st.integers(0, 50),
    prefix=st.sampled_from(["some prefix:", "poem", "dust bites one another and you", "is is is"]),
)
def test_no_head_ever_exceeds_the_bound(family: str, seed: int, prefix: str) -> None:
    o = organism(family, seed)
    result = _measured(o, 40, prefix=prefix, tokens=["cat", "dog"])
    assert result.outside is None
    for curve in result.curves:
        if curve.layer:
            assert curve.bound is None
            continue
        assert curve.bound is not None and curve.closest is not None
        assert curve.closest <= 1
        assert all(d <= b + 1e-6 for d, b in zip(curve.distance, curve.bound, strict=True) if b is not None)
        assert curve.head is not None or curve.closest > 1e-7  # nor is it so large by mistake that it could not fail


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox", "qwen2"])
def test_bound_and_distance_by_hand(family: str) -> None:
    """Per head from the eager attention, the value projection and W_O; Lemma D.1's own sum over the prefix."""
    o = organism(family, 1)
    result, n = _measured(o, 60, prefix="poem book"), 60
    start, word = o.tokenizer("poem book")["input_ids"], result.curves[0].id
    assert result.prefixes[0].k == len(start) and start[0] == 1
    ids = torch.tensor([start + [word] * n])
    target = Target.of(o.model, o.tokenizer)
    eager = copy.deepcopy(o.model)
    eager.set_attn_implementation("eager")
    attention = eager(ids, output_attentions=True).attentions[0][0].detach()
    value = trace(o.model, ids, ["blocks.0.attn.hook_v"])["blocks.0.attn.hook_v"][0]
    per = target.n_heads // target.n_kv_heads
    weight = target.sub(0, target.adapter.o).weight.detach()
    size = weight.shape[1] // target.n_heads
    for head in range(target.n_heads):
        written = value[:, head // per] @ weight[:, head * size : (head + 1) * size].T
        curve = _head(result, head)
        r, deltas = float(written.norm(dim=-1).max()), []
        for at, m in enumerate(result.counts):
            row = attention[head, len(start) + m - 1, : len(start) + m]
            lemma = (row[: len(start), None] * (written[: len(start)] - written[-1])).sum(0).norm()
            assert curve.distance[at] == pytest.approx(float(lemma), rel=1e-3, abs=2e-5)
            delta = float(row.max().log() - row.min().log())
            deltas.append(delta)
            want = 2 * r * len(start) * torch.tensor(delta).exp() / m
            assert curve.bound[at] == pytest.approx(float(want), rel=1e-3)
        assert curve.r == pytest.approx(r, rel=1e-4)
        assert curve.delta >= max(deltas) - 1e-4
    whole = _head(result, None)
    sums = [sum(_head(result, h).bound[i] for h in range(target.n_heads)) for i in range(len(result.counts))]
    assert whole.bound == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "neox"])
def test_one_pass_is_n_passes(family: str) -> None:
    o = organism(family, 2)
    result = _measured(o, 33, tokens=["cat", "dog"], prefix="poem book")
    target = Target.of(o.model, o.tokenizer)
    last = target.n_layers - 1
    for number, word in enumerate(dict.fromkeys(c.id for c in result.curves)):
        for layer in (0, last):
            site = f"blocks.{layer}.attn.hook_z"
            w = head_outputs(target, layer)
            alone = torch.einsum("hd,hdm->hm", trace(o.model, torch.tensor([[word]]), [site])[site][0, -1], w)
            for at, n in enumerate(result.counts):
                if n not in (1, 2, 9, 33):
                    continue
                ids = torch.tensor([[1, 4, 5] + [word] * n])
                moved = torch.einsum("hd,hdm->hm", trace(o.model, ids, [site])[site][0, -1], w) - alone
                whole = _head(result, None, layer, number)
                assert whole.distance[at] == pytest.approx(float(moved.sum(0).norm()), rel=1e-3, abs=1e-4)
                for head in range(target.n_heads):
                    got = _head(result, head, layer, number).distance[at]
                    assert got == pytest.approx(float(moved[head].norm()), rel=1e-3, abs=1e-4)
        bias = getattr(target.sub(last, target.adapter.o), "bias", None)
        out = alone.sum(0) + (0 if bias is None else bias.detach())
        assert whole.reference == pytest.approx(float(out.norm()), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_absolute_positions_are_outside_and_do_not_vanish(family: str) -> None:
    model, tokenizer = tiny_model(family)
    result = convergence(model, tokenizer=tokenizer, max_repeats=400)
    assert result.outside is not None and "absolute positions" in result.outside
    assert all(c.bound is None and c.r is None and c.closest is None for c in result.curves)
    assert all(s.expected is None for c in result.curves for s in c.same)
    assert min(c.distance[-1] for c in result.wholes()) > 0.05 * max(c.distance[0] for c in result.wholes())
    assert "theorem 4.1 gives no bound here" in result.summary()


def test_outside_the_window_the_distance_is_exactly_zero() -> None:
    model, tokenizer = tiny_model("mistral")  # a window of 16
    result = convergence(model, tokenizer=tokenizer, max_repeats=40, tokens=["cat"])
    assert result.outside is not None and "window of 16" in result.outside and result.window == 16
    assert all(c.bound is None for c in result.curves)
    for curve in (c for c in result.curves if c.layer == 0):
        for n, distance in zip(result.counts, curve.distance, strict=True):
            assert (distance == 0) is (n >= 16)
    # what was taken for zero is zero but for rounding, which float64 shows
    double, word = copy.deepcopy(model).double(), result.curves[0].id
    site = "blocks.0.hook_attn_out"
    outs = trace(double, torch.tensor([[1, 0, 0] + [word] * 40]), [site])[site][0, 3:]
    far = (outs - trace(double, torch.tensor([[word]]), [site])[site][0, 0]).norm(dim=-1)
    assert far[15:].max() < 1e-13 and far[14] > 1e-3
    assert {s.dtype: s.repeats for s in result.wholes()[0].same}["bfloat16"] <= 16
    assert result.wholes()[0].exponent is None  # nothing of the last decade is left to fit


def test_a_window_that_holds_everything_changes_nothing() -> None:
    model, tokenizer = tiny_model("mistral", sliding_window=64)
    fits = convergence(model, tokenizer=tokenizer, max_repeats=61, tokens=["cat"])
    assert fits.prefixes[0].k == 3 and fits.outside is None and fits.window is None and fits.holds
    assert convergence(model, tokenizer=tokenizer, max_repeats=62, tokens=["cat"]).outside is not None
    gemma = tiny_model("gemma3_text", layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    assert convergence(gemma[0], tokenizer=gemma[1], max_repeats=40, tokens=["cat"]).outside is None


def test_learned_sinks_are_outside() -> None:
    model, tokenizer = tiny_model("gpt_oss", sliding_window=2048)
    result = convergence(model, tokenizer=tokenizer, max_repeats=500, tokens=["cat"])
    assert result.outside is not None and "learned sink" in result.outside
    assert result.wholes()[0].distance[-1] > 0.05 * result.wholes()[0].reference  # repetition gives the weight back


def test_exponent_of_the_theorem_is_minus_one_and_deeper_layers_have_no_bound() -> None:
    o = organism("llama", 3)
    # BOS alone: a marking head gives it odds / (odds + n), odds at most 80
    result = _measured(o, 1300, prefix="", tokens=["dog", "bla"])
    marking = [c for c in result.curves if c.layer == 0 and c.head in o.truth.group_heads.get(o.truth.groups[c.id], ())]
    assert marking and all(-1.02 < c.exponent < -0.7 for c in marking)
    assert all(a > b for c in marking for a, b in itertools.pairwise(c.distance))
    assert result.layers_read == o.model.config.num_hidden_layers
    assert all(c.bound is None and c.delta is None for c in result.curves if c.layer)
    short = _measured(o, 5)
    assert [c.token for c in short.wholes()] == ["cat", "dog", "the", "bla"]  # figure 5's words and prefix
    assert short.settings["prefix"] == ["some prefix:"]
    n = torch.arange(1.0, 501)
    assert slope(3 * n**-1.5, 0.0) == pytest.approx(-1.5, abs=1e-4)
    assert slope(3 * n**-1.5, 1e-3) is None


def test_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    one, way = torch.randn(24, generator=generator), torch.randn(24, generator=generator)
    n = torch.arange(1, 3001)
    outs = one + 0.2 * way / n[:, None]
    for dtype in (torch.bfloat16, torch.float16):
        equal = [bool((out.to(dtype) == one.to(dtype)).all()) for out in outs]
        want = next((i + 1 for i in range(len(n)) if all(equal[i:])), None)
        assert _same_from(outs, one, dtype) == want
        assert _same_from(outs[:2], one, dtype) is None
        later = _same_later(outs[9], one, dtype, 10)
        assert later is not None
        at = [bool(((one + 0.2 * way / m).to(dtype) == one.to(dtype)).all()) for m in (later / 2, later)]
        assert at == [False, True]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_read_from_disk_in_batches_it_is_the_same(family: str, tmp_path: Path) -> None:
    o = organism(family, 4)
    folder = o.save(tmp_path / "model")
    options: dict[str, Any] = {"prefix": ["some prefix:", "poem"], "tokens": ["cat", "dog"], "all_layers": True}
    live = _measured(o, 30, **options)
    streamed = convergence(str(folder), max_repeats=30, batch_size=3, dtype="float32", **options)
    assert len(live.prefixes) == 2 and len(live.curves) == len(streamed.curves)
    for a, b in zip(live.curves, sorted(streamed.curves, key=lambda c: c.prefix), strict=True):
        assert (a.token, a.layer, a.head, a.prefix) == (b.token, b.layer, b.head, b.prefix)
        assert a.distance == pytest.approx(b.distance, rel=1e-3, abs=1e-4)
    first = convergence(str(folder), max_repeats=30, tokens=["cat"])
    assert first.layers_read == 1 and {c.layer for c in first.curves} == {0} and first.holds


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bridge", "nnsight"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_every_kind_of_model_gives_the_same(family: str, backend: str, tmp_path: Path) -> None:
    o = organism(family, 2)
    want = _measured(o, 40)
    got = convergence(load(str(o.save(tmp_path / "m")), backend=backend), tokenizer=o.tokenizer, max_repeats=40)
    for a, b in zip(got.curves, want.curves, strict=True):
        assert a.distance == pytest.approx(b.distance, rel=1e-3, abs=1e-4)
        assert (a.bound is None) is (b.bound is None) and (
            a.bound is None or a.bound == pytest.approx(b.bound, rel=1e-3)
        )


class _Adapted(nn.Module):
    """An output projection without a weight of its own, as quantised and adapted ones are."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.in_features, self._call = inner.in_features, [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call[0](x)


def test_projections_without_a_weight_are_asked() -> None:
    model, tokenizer = tiny_model("phi")  # with a bias, which is no part of any head
    want = head_outputs(Target.of(model, tokenizer), 1)
    model.model.layers[1].self_attn.dense = _Adapted(model.model.layers[1].self_attn.dense)
    torch.testing.assert_close(head_outputs(Target.of(model, tokenizer), 1), want)


def test_bad_input_is_refused_in_one_line() -> None:
    o = organism("llama", 0)
    largest = o.model.config.max_position_embeddings - 3
    for options, message in (
        ({"tokens": ["poem"], "prefix": "my poem"}, "contains the repeated token 'poem'.*another --prefix or --token"),
        ({"tokens": ["poem book"]}, "is 2 tokens"),
        ({"prefix": "", "bos": False}, "--prefix is empty"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"seed": -1}, "--seed -1: expected"),
    ):
        with pytest.raises(SinkscopeError, match=message) as caught:
            _measured(o, 20, **options)
        assert "\n" not in str(caught.value)
    half = convergence(copy.deepcopy(o.model).bfloat16(), tokenizer=o.tokenizer, max_repeats=20)
    assert half.holds and all(s.expected is None for c in half.curves for s in c.same)  # rounded already
    with pytest.raises(SinkscopeError, match="--max-repeats 0"):
        _measured(o, 0)
    with pytest.raises(SinkscopeError, match=f"the largest is {largest}"):
        _measured(o, largest + 1)


def test_result_survives_a_file_and_is_drawn(tmp_path: Path) -> None:
    result = _measured(organism("llama", 0), 50)
    result.save(tmp_path / "c.json")
    assert Result.load(tmp_path / "c.json") == result
    assert "every head stays within the bound of theorem 4.1" in result.summary()
    first, bound = result.figure().data[:2]
    assert list(first.x) == list(result.counts) and list(first.y) == list(_head(result, None).distance)
    assert list(bound.y) == list(_head(result, None).bound) and bound.line.dash == "dot"
    assert (
        first.name == "'cat'"
        and "every head stays within the bound of theorem 4.1" in result.figure().layout.title.text.replace("<br>", " ")
    )


def test_arguments_of_the_command_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "converge --token the --token of --prefix poem --max-repeats 9 --batch-size 2 --no-bos --all-layers"
    assert main([*words.split(), "--json", str(tmp_path / "c.json")]) == 0
    made = Result.load(tmp_path / "c.json")
    asked = {"tokens": ["the", "of"], "prefix": ["poem"], "max_repeats": 9, "batch_size": 2, "all_layers": True}
    assert asked.items() <= made.settings.items() and made.settings["bos"] is False
    assert isinstance(made, Convergence) and made.counts[-1] == 9 and made.layers_read == made.model.n_layers
    assert main(["converge", "--max-repeats", "4", "--json", "-"]) == 0
    assert '"some prefix:"' in capsys.readouterr().out
