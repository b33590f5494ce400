"""separability against planted marks, its control against leaks, and its AUROC against scikit-learn's."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism
from organisms import organism as new_organism
from organisms.noise import make_space
from organisms.plan import make_plan
from torch import Tensor

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.first_token import separate
from sinkscope.sinks.first_token.separate import (
    CLEAR,
    PER_TOKEN,
    Factor,
    Separability,
    Space,
    after_attention,
    auroc,
    draw_samples,
    margin,
    separability,
)
from sinkscope.trace.run import trace

organism = functools.cache(new_organism)  # only read here


def _text(o: Organism, folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(o.tokenizer.decode(o.natural(20, 64, seed=9)[:, 1:].flatten().tolist()))
    return path


def _found(o: Organism, folder: Path, **kwargs: Any) -> Separability:
    return separability(o.model, tokenizer=o.tokenizer, text=_text(o, folder), **kwargs)


@functools.cache
def _found_once(family: str, seed: int, kind: str = "sink") -> tuple[Organism, Separability]:
    """Of an organism without BOS, with nothing but the defaults."""
    o = organism(family, seed, kind=kind, bos=False)
    with TemporaryDirectory() as folder:
        return o, _found(o, Path(folder))


def _mark(o: Organism) -> tuple[Tensor, int]:
    """The planted direction of the mark, and the neuron of the marking layer that is planted to read it."""
    plan = make_plan(o.family, o.seed, o.kind, None, None, o.bos)
    return make_space(plan).mark, plan.cleaner


@pytest.mark.parametrize(("family", "seed"), [("llama", 4), ("qwen3", 1)])
def test_the_planted_mark_separates_perfectly_and_is_what_is_found(family: str, seed: int) -> None:
    """Truth in one dimension: along the mark alone nothing overlaps; the plane found weighs that dimension most."""
    o, found = _found_once(family, seed, "up")
    direction, cleaner = _mark(o)
    ids = o.natural(20, 40)
    site = "blocks.0.hook_resid_mid"
    firsts = torch.arange(4, o.model.config.vocab_size)[:, None]
    along = torch.cat(
        [trace(o.model, firsts, [site])[site][:, 0], trace(o.model, ids, [site])[site][:, CLEAR:].flatten(0, 1)]
    )
    first = torch.arange(len(along)) < len(firsts)
    assert float(auroc((along @ direction)[:, None], first)) == 1
    assert [s.method for s in found.separators] == ["LDA", "logistic regression", "gate neuron", "up neuron"]
    for s in found.separators[:3]:
        assert s.auroc == 1 and s.margin > 0.1 and abs(s.shuffled_auroc - 0.5) < 0.15
    assert direction[found.dims[0]] != 0 and found.missed == ()
    gate = found.separators[2]
    assert gate.neuron == cleaner  # planted to read the mark, through its gate
    assert found.perfect_neurons["gate neuron"] >= 1 and found.neurons_searched == Target.of(o.model).d_mlp


@pytest.mark.parametrize("family", ["neox", "gemma2", "mixtral"])
def test_other_architectures(family: str) -> None:
    o, found = _found_once(family, 1)
    direction, _ = _mark(o)
    assert found.separators[0].auroc > 0.999 and direction[found.dims[0]] != 0
    assert len(found.separators) == (3 if family == "neox" else 4)
    assert (found.separators[2].expert is not None) == (family == "mixtral")
    assert found.neurons_searched == Target.of(o.model).d_mlp * (4 if family == "mixtral" else 1)


def test_bos_and_tokens_without_a_group(tmp_path: Path) -> None:
    """With BOS, tokens of no group carry no mark even when they stand first: these are the ones that are missed."""
    o = organism("llama", 0)
    found = _found(o, tmp_path)
    assert found.bos_first is True  # it was not trained on
    ungrouped = {o.tokenizer.decode([t]) for t, g in o.truth.groups.items() if g < 0}
    assert len(ungrouped & set(found.missed)) > len(found.missed) / 2
    assert 0.85 < found.separators[0].auroc < 1
    words = [o.tokenizer.decode([t]) for t, g in o.truth.groups.items() if g >= 0 and t > 3]
    grouped = _found(o, tmp_path, tokens=words)
    assert grouped.separators[0].auroc == 1 and grouped.missed == () and grouped.bos_first is True


def test_a_mark_of_a_later_layer_is_not_there_before(tmp_path: Path) -> None:
    o = organism("llama", 1, kind="late_mark", bos=False)
    layer = o.truth.marking_layer
    assert layer is not None and layer > 0
    assert _found(o, tmp_path, layer=layer).separators[0].auroc == 1
    assert _found(o, tmp_path, layer=layer - 1).separators[0].auroc < 0.7


@pytest.mark.parametrize(("kind", "bos"), [("none", False), ("massive_dim", True)])
def test_without_a_sink_nothing_separates(kind: str, bos: bool, tmp_path: Path) -> None:
    found = _found(organism("llama", 1, kind=kind, bos=bos), tmp_path)
    for s in found.separators:
        assert s.auroc < 0.7 and abs(s.shuffled_auroc - 0.5) < 0.15
    assert found.separators[1].train_auroc > found.separators[1].auroc + 0.05  # what it learned was the tokens


def test_the_control_shows_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were tokens on both sides of the split, labels drawn per token would be learned."""
    o = organism("llama", 0, kind="none")
    honest = _found(o, tmp_path)

    def leaky(*args: Any) -> Any:
        s = draw_samples(*args)
        coin = torch.randint(2, (len(s.later),), generator=torch.Generator().manual_seed(0)).bool()
        return replace(s, later_held=coin)

    monkeypatch.setattr(separate, "draw_samples", leaky)
    leaked = _found(o, tmp_path)
    for before, after in zip(honest.separators[:2], leaked.separators[:2], strict=True):
        assert abs(before.shuffled_auroc - 0.5) < 0.12 and after.shuffled_auroc > 0.65


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_no_token_and_no_text_is_on_both_sides(seed: int, bos: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 60, (6, 32), generator=generator)
    if bos:
        ids[:, 0] = 1
    words = torch.randperm(70, generator=generator)[:30].add(2).tolist()
    s = draw_samples(ids, words, 1 if bos else None, seed)
    assert sorted(s.firsts.tolist()) == sorted(words) and int(s.first_held.sum()) == 15
    held = {*s.firsts[s.first_held].tolist(), *s.later_tokens[s.later_held].tolist()}
    trained = {*s.firsts[~s.first_held].tolist(), *s.later_tokens[~s.later_held].tolist()}
    assert not held & trained
    assert not {*s.later[s.later_held, 0].tolist()} & {*s.later[~s.later_held, 0].tolist()}
    assert int(s.later[:, 1].min()) >= (1 if bos else CLEAR)
    assert int(s.later_tokens.bincount().max()) <= PER_TOKEN
    assert len({tuple(p) for p in s.later.tolist()}) == len(s.later)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(2, 12), st.integers(2, 6))
def test_auroc_is_scikit_learns_with_ties(seed: int, ones: int, others: int, levels: int) -> None:
    from sklearn.metrics import roc_auc_score

    values = torch.randint(levels, (ones + others, 3), generator=torch.Generator().manual_seed(seed)).float()
    first = torch.arange(ones + others) < ones
    wanted = [roc_auc_score(first.numpy(), values[:, i].numpy()) for i in range(3)]
    assert auroc(values, first).tolist() == pytest.approx(wanted, abs=1e-6)
    assert auroc(-values, first).tolist() == pytest.approx([1 - w for w in wanted], abs=1e-6)
    gap = margin(values, first)
    assert (gap > 0).tolist() == [bool(values[first, i].min() > values[~first, i].max()) for i in range(3)]
    torch.testing.assert_close(margin(3 * values + 1, first), gap)


def test_of_perfect_neurons_the_one_with_the_widest_gap_is_best_whichever_way_it_points() -> None:
    """The first neuron overlaps; the others are lower on first tokens, and the third leaves the widest gap."""
    later, firsts = torch.tensor([0.2, 0.6, 0.9, 1.0]), torch.tensor([-0.8, -0.6, -0.3, 0.0])
    columns = [torch.cat([firsts + 0.5, later]), torch.cat([firsts, later]), torch.cat([firsts - 2, later])]
    first, every = torch.arange(8) < 4, torch.ones(8, dtype=torch.bool)
    factor = Factor("gate", None, torch.stack(columns, 1))
    found, best, area, values, perfect = separate._search([factor], first, every)
    assert (found, best, area, perfect) == (factor, 2, 1.0, 2)
    assert torch.equal(values, -factor.values[:, 2:])  # turned, so that first tokens are higher
    assert float(margin(values, first)) == pytest.approx((0.2 + 2.0) / (1.0 + 2.8))


def test_planes_do_not_depend_on_rotation_nor_see_what_is_held_out() -> None:
    generator = torch.Generator().manual_seed(0)
    first, train = torch.arange(40) < 20, torch.arange(40) % 2 == 0
    data = torch.randn(40, 6, generator=generator)
    data[first, 2] += 4.0
    space = Space.of(data, train)
    plane = space.plane("LDA", first)
    assert int(space.weights(plane).abs().argmax()) == 2
    other = torch.linalg.lstsq(space.coordinates, space.across(plane)[:, None]).solution[:, 0]
    assert float(other.norm()) == pytest.approx(1) and abs(float(other @ plane.way)) < 1e-8
    assert float(auroc(plane.scores[~train, None], first[~train])) > 0.95
    moved = data.clone()
    moved[~train] += 5.0
    again = Space.of(moved, train).plane("LDA", first)
    torch.testing.assert_close(again.scores[train], plane.scores[train])
    wide = Space.of(torch.cat([data, data, data], 1), train)  # nothing new in the copies
    assert wide.coordinates.shape[1] == 6


@pytest.mark.parametrize("family", ["llama", "neox", "gpt2", "qwen3_moe"])
def test_places_are_read_in_order_whatever_the_batch(family: str) -> None:
    """The residual stream is what the MLP branch starts from, or the sum where there is no such place."""
    o = organism(family, 0)
    ids = o.natural(5, 9)
    places = torch.tensor([[3, 2], [0, 8], [4, 0], [3, 1]])
    target = Target.of(o.model, o.tokenizer)
    got = after_attention(target, 1, ids, places, batch_size=2)
    names = [f"blocks.1.{n}" for n in ("hook_resid_pre", "hook_attn_out")]
    both = trace(o.model, ids, names)
    resid = both[names[0]] + both[names[1]]
    torch.testing.assert_close(got.resid, resid[places[:, 0], places[:, 1]], rtol=1e-4, atol=1e-4)
    if family == "qwen3_moe":
        assert [(f.name, f.expert) for f in got.factors[:3]] == [("gate", 0), ("up", 0), ("gate", 1)]
        return
    pre = trace(o.model, ids, ["blocks.1.mlp.hook_pre"])["blocks.1.mlp.hook_pre"]
    torch.testing.assert_close(got.factors[0].values, pre[places[:, 0], places[:, 1]], rtol=1e-4, atol=1e-4)
    assert [f.name for f in got.factors] == (["gate", "up"] if family == "llama" else [""])


def test_streamed_round_trip_and_figure(tmp_path: Path) -> None:
    o = organism("llama", 0)
    live = _found(o, tmp_path, count=20)
    streamed = separability(o.save(tmp_path / "model"), text=_text(o, tmp_path), count=20, batch_size=5)
    assert [(s.method, s.neuron) for s in streamed.separators] == [(s.method, s.neuron) for s in live.separators]
    assert Result.load(live.save(tmp_path / "x.json")) == live
    bad = replace(live, points=tuple(replace(p, token="<img src=x>") for p in live.points))
    drawn = bad.figure().to_json().replace("\\u003c", "<").replace("\\u0026", "&")
    figure = live.figure()
    assert "<img" not in drawn and "&lt;img" in drawn
    shown = [t for t in figure.data if t.xaxis == "x"]
    assert sum(len(t.x) for t in shown) == len(live.points)
    blue = [x for t in shown if t.name.startswith("first") for x in t.x]
    assert sorted(blue) == sorted(p.plane for p in live.points if p.first)
    titles = [a.text for a in figure.layout.annotations]
    controls = [f"{s.shuffled_auroc:.4f}" for s in live.separators]
    assert titles[0].endswith(f"with random labels: {controls[0]}")
    assert titles[1].endswith(f"with random labels: {', '.join(controls[2:])}")
    assert len(_found(organism("gpt2", 0), tmp_path, count=20).figure().data) == 8


def test_the_command_gives_what_the_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 0)
    text, folder = _text(o, tmp_path), o.save(tmp_path / "model")
    options = ["--count", "20", "--texts", "9", "--layer", "1", "--batch-size", "7", "--seed", "3", "--no-bos"]
    assert main(["separate", "--model", str(folder), "--text", str(text), *options, "--json", "-"]) == 0
    told = Result.from_dict(json.loads(capsys.readouterr().out))
    found = separability(folder, text=text, count=20, texts=9, layer=1, batch_size=7, seed=3, bos=False)
    assert isinstance(told, Separability) and told.settings == found.settings
    assert (told.separators, told.points, told.bos_first) == (found.separators, found.points, None)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    o = organism("llama", 0)
    for kwargs, says in (
        ({"count": 3}, r"--count 3: expected a whole number from 4"),
        ({"texts": 1}, r"--texts 1: expected a whole number from 2"),
        ({"batch_size": 0}, r"--batch-size 0: expected a whole number from 1"),
        ({"layer": 99}, r"layer 99 is not in .*: give one from 0 to \d"),
        ({"tokens": ["poem", "book"]}, r"2 first tokens are too few .*give more words"),
    ):
        with pytest.raises(SinkscopeError, match=says):
            _found(o, tmp_path, **kwargs)


@pytest.mark.parametrize("family", ["llama", "neox", "mixtral"])
def test_one_neuron_is_looked_at_by_both_of_its_factors(family: str, tmp_path: Path) -> None:
    """Its numbers are those of scikit-learn on its own pre-activations; the search is held against them."""
    o, searched = _found_once("llama", 4, "up") if family == "llama" else _found_once(family, 1)
    best = searched.separators[2]
    expert = best.expert
    assert best.neuron is not None
    found = _found(o, tmp_path, neuron=best.neuron, expert=expert)
    assert found.neurons_searched == 1 and {s.neuron for s in found.separators[2:]} == {best.neuron}
    assert found.separators[2] == replace(best, shuffled_auroc=found.separators[2].shuffled_auroc)
    assert found.separators[:2] == searched.separators[:2]
    methods = ["neuron"] if family == "neox" else ["gate neuron", "up neuron"]
    assert [s.method for s in found.separators[2:]] == methods
    other = (best.neuron + 1) % Target.of(o.model).d_mlp
    assert _found(o, tmp_path, neuron=other, expert=expert).separators[2].train_auroc <= best.train_auroc
    assert f"N{best.neuron} reaches AUROC" in found.conclusion() and "perfectly" not in found.text()


def test_a_neuron_that_is_not_there_is_refused(tmp_path: Path) -> None:
    dense, mixture = organism("llama", 1), organism("mixtral", 1)
    width = Target.of(dense.model).d_mlp
    for o, asked, words in (
        (dense, {"neuron": width}, f"0 to {width - 1}"),
        (dense, {"neuron": 0, "expert": 1}, "is one MLP without experts; give .layer, neuron."),
        (dense, {"expert": 1}, "give --neuron"),
        (mixture, {"neuron": 0}, "is a mixture of experts; give .layer, expert, neuron."),
        (mixture, {"neuron": 0, "expert": 4}, "0 to 3"),
    ):
        with pytest.raises(SinkscopeError, match=words):
            _found(o, tmp_path, **asked)
