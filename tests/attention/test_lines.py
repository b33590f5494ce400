"""What lines carry: planted lines come out on top, and every number equals the one from the matrix written out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intervention_kit import bridge_of, nnsight_of
from organisms import tiny_model
from organisms.lines import line_organism
from torch import Tensor

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.attention.lines import LineWeights, line_overlap, line_weights
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.result import Result
from sinkscope.kv import H2O
from sinkscope.lines.choice import HeadLines, top_lines

COLUMNS = (20, 33, 90)


@pytest.mark.parametrize(
    ("seed", "window"),
    [
        (0, None),
        (1, 30),
        (2, None),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [(0, 30), (1, None), (2, 30)]),
    ],
)
def test_planted_lines_come_out_on_top(seed: int, window: int | None) -> None:
    o = line_organism(seed, window)
    found = line_weights(o.model, [o.text(160, COLUMNS)], etas=[0.02], tokenizer=o.tokenizer)
    assert len(found.heads) == 8
    for h in found.heads:
        place = h.layer, h.head
        if place in o.truth.offsets:
            assert h.top_slash[0].at == o.truth.offsets[place] and h.top_slash[0].share > 0.4
        if place in o.truth.vertical:
            assert {line.at for line in h.top_vertical if line.at}.issuperset(COLUMNS)
            heaviest = [line.at for line in h.top_vertical if line.at][:3]  # the first position is in every row
            assert set(heaviest) == set(COLUMNS)
        if place in o.truth.plain:
            assert h.mass[0] < 0.3 and max(line.share for line in (*h.top_slash, *h.top_vertical)) < 0.1
        elif window is None:
            assert h.mass[0] > 0.8 and h.mass[0] > 1.1 * h.random_mass[0]
    if window is None:  # shown is a head with both kinds of lines
        shown = found.picture
        assert (shown.layer, shown.head) in o.truth.offsets.keys() & o.truth.vertical
        assert o.truth.offsets[shown.layer, shown.head] in shown.slash


def _dense(model: Any, ids: Tensor) -> list[Tensor]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_attentions=True).attentions
    return [layer[0].double() for layer in out]


def _chosen(weights: Tensor, eta: float) -> tuple[set[int], set[int]]:
    """Columns and offsets of one head [query, key], by sorting."""
    n = len(weights)
    lines = [(-float(weights[:, b].sum()), "v", b) for b in range(n)]
    lines += [(-float(weights.diagonal(-o).sum()), "s", o) for o in range(n)]
    top = [line for line in sorted(lines)[: int(eta * 2 * n + 1e-9)] if line[0] < 0]
    return {at for _, kind, at in top if kind == "v"}, {at for _, kind, at in top if kind == "s"}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_mass_is_exact(model_type: str) -> None:
    """Over two texts, against sets of cells of the models' own attention: window, soft cap and learned sinks too."""
    model, tokenizer = tiny_model(model_type)
    g = torch.Generator().manual_seed(3)
    texts = [torch.randint(4, 90, (n,), generator=g).tolist() for n in (30, 41)]
    etas, layers = (0.05, 0.2, 1.0), [0, 2]
    expected: dict[tuple[int, int], list[dict[str, list[float]]]] = {}
    for ids in texts:
        dense, n = _dense(model, torch.tensor([ids])), len(ids)
        back = torch.arange(n)[:, None] - torch.arange(n)
        for layer in layers:
            for head, weights in enumerate(dense[layer]):
                one: dict[str, list[float]] = {"mass": [], "line_sums": [], "cells": [], "vertical": []}
                for eta in etas:
                    columns, offsets = _chosen(weights, eta)
                    on = torch.zeros(n, n, dtype=torch.bool)
                    on[:, list(columns)] = True
                    for offset in offsets:
                        on |= back == offset
                    on &= back >= 0
                    total = weights.sum()
                    twice = sum(weights[:, b].sum() for b in columns)
                    twice = twice + sum(weights.diagonal(-offset).sum() for offset in offsets)
                    one["mass"].append(float(weights[on].sum() / total))
                    one["line_sums"].append(float(twice / total))
                    one["cells"].append(float(on.sum()) / (n * (n + 1) / 2))
                    one["vertical"].append(len(columns) / (len(columns) + len(offsets)))
                expected.setdefault((layer, head), []).append(one)
    if model_type not in ("gemma2", "gpt_oss"):
        model.set_attn_implementation("sdpa")
    found = line_weights(model, texts, etas=etas, layers=layers, tokenizer=tokenizer)
    for h in found.heads:
        for name in ("mass", "line_sums", "cells", "vertical"):
            values = [one[name] for one in expected[h.layer, h.head]]
            means = [sum(v) / len(v) for v in zip(*values, strict=True)]
            assert getattr(h, name) == pytest.approx(means, abs=2e-4), (h.layer, h.head, name)
        assert h.mass[-1] == pytest.approx(1, abs=1e-4) and h.line_sums[-1] == pytest.approx(2, abs=1e-4)
        assert list(h.mass) == sorted(h.mass)
    for name in ("mass", "line_sums", "random_mass", "cells"):
        means = [sum(v) / len(found.heads) for v in zip(*(getattr(h, name) for h in found.heads), strict=True)]
        assert getattr(found, name) == pytest.approx(means)


@given(st.integers(1, 24), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1 << 30))
@settings(max_examples=50)
def test_random_lines_are_as_many_or_as_long(n: int, columns: float, offsets: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    own = HeadLines(torch.rand(2, 3, n, generator=g) < columns, torch.rand(2, 3, n, generator=g) < offsets, n)
    length = torch.arange(n, 0, -1)
    many, long = own.random(g, cells=False), own.random(g, cells=True)
    for kind in ("vertical", "slash"):
        a, b, c = (getattr(lines, kind) for lines in (own, many, long))
        assert torch.equal(a.sum(2), b.sum(2))
        apart = ((a * length).sum(2) - (c * length).sum(2)).abs()
        assert (apart <= n / 2).all()
    back = torch.arange(n)[:, None] - torch.arange(n)
    for lines in (own, many, long):
        on = (lines.vertical[:, :, None] | lines.slash[:, :, back.clamp(min=0)]) & (back >= 0)
        torch.testing.assert_close(lines.density(), on.sum((2, 3)) / (n * (n + 1) / 2))


def test_random_lines_are_drawn_evenly() -> None:
    one = torch.zeros(1, 4000, 10, dtype=torch.bool)
    one[:, :, :3] = True
    drawn = HeadLines(one, one, one.shape[-1]).random(torch.Generator().manual_seed(0), cells=False)
    for kind in (drawn.vertical, drawn.slash):
        torch.testing.assert_close(kind[0].float().mean(0), torch.full((10,), 0.3), atol=0.03, rtol=0)


def test_a_share_of_whole_lines_loses_none_to_rounding() -> None:
    """0.29 * 100 is a little less than 29 in floating point."""
    weights = torch.rand(2, 1, 50) + 0.1
    chosen = top_lines(*weights, [0.29])
    assert int(chosen.vertical.sum() + chosen.slash.sum()) == 29


def test_lines_without_weight_are_never_chosen() -> None:
    vertical, slash = torch.tensor([[3.0, 0.0, 1.0]]), torch.tensor([[0.0, 4.0, 0.0]])
    lines = top_lines(vertical, slash, [1 / 6, 0.5, 1.0])
    assert lines.counts().flatten().tolist() == [1, 3, 3] and lines.slash[0, 0].tolist() == [False, True, False]
    assert lines.vertical[1, 0].tolist() == [True, False, True]


def test_map_is_the_models_attention_and_round_trip(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("qwen2")
    ids = torch.randint(4, 90, (110,), generator=torch.Generator().manual_seed(0)).tolist()
    found = line_weights(model, [ids], etas=[0.1, 0.05], head=(1, 3), tokenizer=tokenizer)
    assert found.etas == (0.05, 0.1) and (found.picture.layer, found.picture.head) == (1, 3)
    dense = _dense(model, torch.tensor([ids[:96]]))[1][3]
    for q, row in enumerate(found.picture.values()):
        assert row == pytest.approx(dense[q, : q + 1].tolist(), abs=6e-4)
    columns, offsets = _chosen(dense, 0.05)
    assert (set(found.picture.vertical), set(found.picture.slash)) == (columns, offsets)
    assert Result.load(found.save(tmp_path / "x.json")) == found
    drawn = found.figure()
    heat = [t for t in drawn.data if t.type == "heatmap"]
    assert heat[0].z[0][0] == next(h for h in found.heads if (h.layer, h.head) == (0, 0)).mass[1]
    assert math.isclose(heat[1].z[7][3] ** 2, found.picture.values()[7][3], abs_tol=1e-9)
    lines = next(t for t in drawn.data if t.name == "slash line")
    assert (lines.x[0], lines.y[0]) == (0, found.picture.slash[0]) and lines.y[1] == 95
    again = line_weights(model, [ids], etas=[0.1, 0.05], head=(1, 3), tokenizer=tokenizer)
    assert again.heads == found.heads


def test_ids_need_no_tokenizer_and_texts_do() -> None:
    model, tokenizer = tiny_model("qwen2")
    model.config._name_or_path = ""
    ids = [torch.randint(4, 90, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    for measure in (line_weights, line_overlap):
        alone: Any = measure(model, texts=ids)
        assert alone.heads == measure(model, texts=ids, tokenizer=tokenizer).heads
    assert line_weights(model, ids[:1]).picture.words == tuple(map(str, ids[0]))
    for texts in (["a text"], [ids[0], "a text"], None):
        with pytest.raises(SinkscopeError, match="carries no tokenizer"):
            line_weights(model, texts)


def test_a_file_of_prompts_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "samsum.jsonl"
    rows = [
        {
            "context": f"Dialogue: A: hello {i}\nSummary: they greet. " * 8,
            "input": "Dialogue: B: bye\nSummary: ",
            "dataset": "samsum",
            "_id": f"x{i}",
        }
        for i in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "x.json"
    argv = ["lines", "--data", str(file), "--count", "2", "--length", "64", "--layer", "2", "--eta", "0.1"]
    assert main([*argv, "--json", str(out)]) == 0
    found = LineWeights.load(out)
    assert [(i.name, i.tokens) for i in found.inputs] == [("x0", 64), ("x1", 64)]
    assert str(tmp_path) not in out.read_text() and "carry" in capsys.readouterr().out
    assert found.heads == line_weights(None, data=file, count=2, length=64, layers=[2], etas=[0.1]).heads


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--eta", "0"], "--eta 0.0: expected a share above 0"),
        (["--eta", "1.5"], "--eta 1.5: expected a share"),
        (["--length", "8"], "--length 8: expected 16 to"),
        (["--length", "100000"], "--length 100000: expected 16 to"),
        (["--head", "x"], "--head 'x': expected a head such as L5.H3"),
        (["--head", "1.99"], "head 1.99 is not measured"),
        (["--layer", "77"], "layer 77 is not in"),
        (["--data", "nowhere.jsonl"], "'nowhere.jsonl': no such file"),
        (["--count", "9999", "--length", "4000"], "pieces of 4000 tokens, 9999 were asked for"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lines", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and shown.err.count("\n") == 1


def test_a_wrapped_model_and_half_precision_give_the_same() -> None:
    model, tokenizer = tiny_model("llama")
    ids = torch.randint(4, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    own = line_weights(model, [ids], tokenizer=tokenizer)
    assert line_weights(nnsight_of(model, tokenizer), [ids], tokenizer=tokenizer).heads == own.heads
    half = line_weights(model.to(torch.bfloat16), [ids], tokenizer=tokenizer)
    for a, b in zip(own.heads, half.heads, strict=True):
        assert a.mass == pytest.approx(b.mass, abs=0.05)
    bridge = bridge_of(*tiny_model("llama"))
    with pytest.raises(UnsupportedError, match="TransformerBridge are not offered"):
        line_weights(bridge, [ids], tokenizer=tokenizer)


def test_under_a_guard_a_policy_and_a_patch() -> None:
    """What evicts nothing in one pass changes nothing; a patch of the neurons changes the attention behind them."""
    model, tokenizer = tiny_model("llama")
    ids = torch.randint(4, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    own = line_weights(model, [ids], tokenizer=tokenizer)
    for edit in (ss.LoopGuard(budget=64), H2O(budget=64)):
        under = line_weights(model, [ids], tokenizer=tokenizer, interventions=edit)
        for a, b in zip(own.heads, under.heads, strict=True):
            assert a.mass == pytest.approx(b.mass, abs=1e-5) and a.top_slash[0].at == b.top_slash[0].at
    patched = line_weights(
        model, [ids], tokenizer=tokenizer, interventions=ss.Ablate(sites=[(0, j) for j in range(16)])
    )
    changed = [a.mass != pytest.approx(b.mass, abs=1e-6) for a, b in zip(own.heads, patched.heads, strict=True)]
    assert not any(c for c, h in zip(changed, own.heads, strict=True) if h.layer == 0) and any(changed)


def test_short_texts_and_other_models_are_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"text 0 has \d tokens, at least 16"):
        line_weights(None, ["too short"])
    with pytest.raises(SinkscopeError, match="only one of them"):
        line_weights(None, ["x"], data="y.jsonl")
    with pytest.raises(SinkscopeError, match="expected a list of them"):
        line_weights(None, "one text")
    falcon, tokenizer = tiny_model("falcon")
    with pytest.raises(UnsupportedError, match="falcon"):
        ss.line_weights(falcon, [list(range(4, 40))], tokenizer=tokenizer)
