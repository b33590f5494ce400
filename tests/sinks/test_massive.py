"""Massive activations, value drain and secondary sinks against hidden states, hook_v and planted circuits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import Organism, organism, tiny_model
from sample_results import sample_find_sinks

import sinkscope.sinks.first_token.find
import sinkscope.sinks.first_token.massive
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows, typical_text
from sinkscope.sinks.first_token.massive import MassiveActivations, massive_activations
from sinkscope.trace import trace


def _measured(o: Organism, **options: Any) -> MassiveActivations:
    return massive_activations(o.model, tokenizer=o.tokenizer, **options)


@pytest.mark.parametrize("family", ["llama", "neox", "qwen3_moe"])
def test_magnitudes_and_values_by_hand(family: str) -> None:
    o = organism(family, 3)
    result = _measured(o, texts=3)
    assert [c.bos for c in result.conditions] == [True, False]
    for condition in result.conditions:
        ids = text_rows(o.tokenizer, typical_text(), 3, 64, 1 if condition.bos else None)
        hidden = o.model(ids, output_hidden_states=True).hidden_states[1:-1]  # the last one is behind the final norm
        for one, states in zip(condition.layers, hidden, strict=False):
            sizes = [row.abs().flatten().sort().values for row in states.detach()]
            assert one.top == pytest.approx([float(sum(s[-i] for s in sizes)) / 3 for i in (1, 2, 3)], rel=1e-4)
            assert one.median == pytest.approx(float(sum(s[(len(s) - 1) // 2] for s in sizes)) / 3, rel=1e-4)
            assert one.first_norm == pytest.approx(float(states[:, 0].detach().norm(dim=-1).median()), rel=1e-4)
        for value in condition.values:
            site = f"blocks.{value.layer}.attn.hook_v"
            norms = trace(o.model, ids, [site], "norm")[site]
            assert value.sink == pytest.approx(norms[:, 0].mean(0).tolist(), rel=1e-4)
            assert value.others == pytest.approx(norms[:, 1:].mean((0, 1)).tolist(), rel=1e-4)
            want = (norms[:, 0].mean(0) / norms[:, 1:].mean((0, 1))).mean()
            assert value.ratio == pytest.approx(float(want), rel=1e-4)
        assert len(condition.values) == len(condition.layers) == o.model.config.num_hidden_layers


def test_heads_without_values_have_no_ratio() -> None:
    """Zero over zero is no number: such heads are left out, and a layer of them says nothing."""
    o = organism("llama", 2)
    size = o.model.model.layers[0].self_attn.head_dim
    with torch.no_grad():
        o.model.model.layers[0].self_attn.v_proj.weight.zero_()
        o.model.model.layers[1].self_attn.v_proj.weight[:size] = 0
    result = _measured(o, bos=True)
    none, some, *others = result.conditions[0].values
    assert none.ratio is None and none.sink == none.others == (0.0,) * len(none.sink)
    assert some.others[0] == 0 and some.ratio is not None
    assert some.ratio == pytest.approx(
        sum(a / b for a, b in zip(some.sink[1:], some.others[1:], strict=True)) / (len(some.sink) - 1)
    )
    low = min([some, *others], key=lambda v: v.ratio or 0)
    assert f"smallest in layer {low.layer}: their norm is {low.ratio:.2g} times" in result.text()
    assert "nan" not in result.text()
    means = [t for t in result.figure().data if t.name == "mean over kv heads"]
    assert [t.y[0] for t in means] == [None]
    with torch.no_grad():
        for layer in o.model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    assert "value vectors" not in _measured(o, bos=True).text()


def test_planted_sink_is_massive_and_its_values_are_drained() -> None:
    o = organism("llama", 2)
    result = _measured(o, bos=True)
    (condition,) = result.conditions
    layer = o.truth.sink_layer
    assert layer is not None
    last = condition.layers[layer]
    assert last.dims == o.truth.residual_dims and condition.layers[layer - 1].dims == ()
    assert last.share == 1 / 64  # the first of 64 positions
    assert last.top[0] > 5 * condition.layers[layer - 1].top[0]
    assert all((v.ratio or 1) < 0.2 for v in condition.values[layer + 1 :])  # the spike shrinks the rest in the norm
    assert all((v.ratio or 0) > 0.2 for v in condition.values[: layer + 1])
    assert [(t.token, t.high, t.seen, t.first) for t in condition.tokens] == [("<s>", 4, 4, 4)]
    assert condition.secondary == () and "no secondary sinks" in result.summary()


def test_two_of_one_group_first_are_a_sink_and_a_secondary_sink(tmp_path: Path) -> None:
    o = organism("llama", 5)
    layer, free = o.truth.sink_layer, o.tokens_of(-1)
    assert layer is not None and len(free) >= 4
    pair = o.tokens_of(0)[:2]
    words = [*pair, *(free[i % len(free)] for i in range(70))]
    text = tmp_path / "t.txt"
    text.write_text(" ".join(o.tokenizer.decode([w]) for w in words))
    (condition,) = _measured(o, text=text, texts=1, bos=False).conditions
    n = o.model.config.num_hidden_layers
    found = [(s.text, s.position, s.token, s.created, s.lifetime) for s in condition.secondary]
    assert found == [(0, 1, o.tokenizer.decode([pair[1]]), layer, n - layer)]
    assert condition.secondary[0].cosine > 0.99 and 0.5 < condition.secondary[0].of_first < 2
    assert {t.id: t.first for t in condition.tokens} == {pair[0]: 1, pair[1]: 0}
    with_bos = _measured(o, text=text, texts=1, bos=True).conditions[0]
    assert not with_bos.secondary and [t.id for t in with_bos.tokens] == [1]


def test_a_massive_dimension_is_everywhere_and_no_sink() -> None:
    o = next(o for o in (organism("llama", s, kind="massive_dim") for s in range(20)) if o.truth.residual_dims)
    condition = _measured(o, bos=True).conditions[0]
    last = condition.layers[-1]
    assert condition.tokens == () and condition.secondary == ()
    assert last.top[0] > 100 and last.top[0] < 1.2 * last.top[2]  # large, but so are others


def test_without_a_sink_it_says_so_and_unshown_values_are_left_out() -> None:
    plain = _measured(organism("qwen3", 0, kind="none"))
    assert all(not c.secondary and not c.tokens and not any(one.dims for one in c.layers) for c in plain.conditions)
    assert "none is massive" in plain.summary()
    falcon, tokenizer = tiny_model("falcon")
    result = massive_activations(falcon, tokenizer=tokenizer, bos=False)
    assert [c.bos for c in result.conditions] == [False] and result.conditions[0].values == ()
    assert "shows no value vectors" in result.figure().to_json()
    no_bos = organism("llama", 0, bos=False)
    assert [c.bos for c in _measured(no_bos).conditions] == [False]
    with pytest.raises(SinkscopeError, match="has no BOS token"):
        _measured(no_bos, bos=True)


def test_read_from_disk_it_is_the_same(tmp_path: Path) -> None:
    o = organism("llama", 2)
    live, streamed = _measured(o), massive_activations(str(o.save(tmp_path / "m")), dtype="float32")
    assert not Target.of(o.model).hf.training and streamed.conditions == live.conditions


def test_all_prints_and_writes_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    massive = _measured(organism("llama", 2), texts=1)
    monkeypatch.setattr(
        sinkscope.sinks.first_token.find, "find_sinks", lambda *_, **k: asked.append(k) or sample_find_sinks()
    )
    monkeypatch.setattr(
        sinkscope.sinks.first_token.massive, "massive_activations", lambda *_, **k: asked.append(k) or massive
    )
    file, page = tmp_path / "f.json", tmp_path / "f.html"
    assert main(["find-sinks", "--all", "--no-bos", "--json", str(file), "--html", str(page)]) == 0
    assert asked[0]["all_layers"] and asked[0]["bos"] is False and asked[1]["bos"] is False
    assert "all_layers" not in asked[1]
    out = capsys.readouterr().out
    assert sample_find_sinks().text() in out and massive.text() in out
    data = json.loads(file.read_text())
    assert Result.load(file) == sample_find_sinks() and Result.from_dict(data["massive"]) == massive
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == 2 and "massive-activations" in text and text.count('class="plot"') == 2
    assert main(["find-sinks", "--json", "-"]) == 0 and "massive" not in json.loads(capsys.readouterr().out)


def test_figure_shows_the_numbers() -> None:
    result = _measured(organism("llama", 2), texts=2)
    data = result.figure().data
    assert list(data[0].y) == [one.top[0] for one in result.conditions[0].layers]
    means = [t for t in data if t.name == "mean over kv heads"]
    assert [list(t.y) for t in means] == [[v.ratio for v in c.values] for c in result.conditions]
    assert torch.tensor([one.median for one in result.conditions[0].layers]).gt(0).all()
