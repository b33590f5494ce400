"""marking_heads against planted heads, and its passes of single tokens against edited passes over whole texts."""

from __future__ import annotations

import html
import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import FAMILIES, Organism, organism

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.marking_heads import MarkingHeads, Replacement, geometry, marking_heads
from sinkscope.sinks.first_token.result import Neuron
from sinkscope.trace.run import trace

ANSWER = {"sink": "single head", "late_mark": "single head", "spread": "several heads"}
BY_HEADS = [family for family in FAMILIES if family != "gpt2"]


def _text(o: Organism, folder: Path) -> Path:
    """Prose of the organism's own words: of English it knows few."""
    path = folder / "text.txt"
    path.write_text(o.tokenizer.decode(o.natural(8, 64, seed=9)[:, 1:].flatten().tolist()))
    return path


def _found(o: Organism, folder: Path, **kwargs: Any) -> MarkingHeads:
    return marking_heads(o.model, tokenizer=o.tokenizer, text=_text(o, folder), **{"count": 12, **kwargs})


def _mistakes(o: Organism, found: MarkingHeads) -> list[str]:
    """Where this differs from what was planted, each first token against the heads of its own group."""
    truth = o.truth
    wrong = [
        f"{f.token!r} of group {truth.groups[f.id]}: {f.heads}, fires {f.fires}"
        for f in found.first_tokens
        if f.fires != (truth.groups[f.id] >= 0)
        or (f.fires and f.heads != truth.group_heads[truth.groups[f.id]])
        or (f.fires and not (f.set_drop or 0) > 0.9)
        or (f.control_drop is not None and f.control_drop > 0.2)
    ]
    served = {h.head for h in found.heads if h.serves}
    if found.marking_layer != truth.marking_layer or not served <= set(truth.marking_heads):
        wrong.append(f"layer {found.marking_layer}, planted {truth.marking_layer}; heads {served}")
    if found.answer != ANSWER[o.kind]:
        wrong.append(found.answer)
    return [f"{o.family} {o.kind} seed {o.seed} bos {o.bos}: {w}" for w in wrong]


@pytest.mark.parametrize("kind", list(ANSWER))
def test_planted_heads_are_recovered(kind: str, tmp_path: Path) -> None:
    """One head per group, two per group of which neither suffices, and heads that are not in layer 0."""
    seed = secrets.randbits(32)
    wrong: list[str] = []
    for i in range(3):
        o = organism(BY_HEADS[(seed + 3 * i) % len(BY_HEADS)], seed + i, kind=kind, bos=i % 2 == 0)
        wrong += _mistakes(o, _found(o, tmp_path))
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_HEADS)
def test_planted_heads_are_recovered_in_every_family(family: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    wrong: list[str] = []
    for i, kind in enumerate([*ANSWER] * 4):
        o = organism(family, seed + i, kind=kind, bos=i % 2 == 0)
        wrong += _mistakes(o, _found(o, tmp_path))
    assert not wrong, f"seed {seed}:\n" + "\n".join(wrong)


def test_a_mark_that_no_head_makes_and_no_sink_at_all(tmp_path: Path) -> None:
    by_position = _found(organism("gpt2", 0), tmp_path)
    assert by_position.answer == "no head" and by_position.marking_layer is None
    assert by_position.all_drop is not None and by_position.all_drop < 0.1
    assert "attention does not make the mark" in str(by_position)
    none = _found(organism("llama", 0, kind="none"), tmp_path)
    assert (
        none.sink_layer is None and none.answer == "no sink" and none.heads == () and "no attention sink" in str(none)
    )


def _bench(o: Organism, ids: torch.Tensor) -> Replacement:
    sites = [(n[0], n[1] if len(n) == 3 else None, n[-1]) for n in o.truth.neurons]
    neurons = [Neuron(la, ex, ne, 1.0, 1.0, 1.0, None, 0.0, True, 0.0, None) for la, ex, ne in sites]
    assert o.truth.sink_layer is not None
    return Replacement.of(Target.of(o.model, o.tokenizer), o.truth.sink_layer, neurons, ids)


def test_replacement_equals_an_edited_pass_over_the_text() -> None:
    """Rows of single tokens, each with its own edit, against a hook of our own on whole texts, one edit at a time."""
    o = organism("llama", 3)
    ids = o.natural(3, 20)
    bench = _bench(o, ids)
    sink = o.truth.sink_layer
    assert sink is not None
    z = trace(o.model, ids, ["blocks.0.attn.hook_z"])["blocks.0.attn.hook_z"]
    means = z[:, 1:].flatten(0, 1).mean(0)
    torch.testing.assert_close(bench.means[0], means)
    heads = o.model.config.num_attention_heads
    edits = torch.zeros(heads, *bench.shape, dtype=torch.bool)
    edits[:, 0] = torch.eye(heads, dtype=torch.bool)
    got = replace(bench, batch_size=3).written(ids[:1, :1].expand(heads, 1), edits)[:, 0]
    for head in range(heads):

        def swap(_module: Any, args: Any, head: int = head) -> Any:
            edited = args[0].clone().unflatten(-1, (heads, -1))
            edited[:, 0, head] = means[head]
            return edited.flatten(-2)

        handle = o.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(swap)
        post = trace(o.model, ids[:1], [f"blocks.{sink}.mlp.hook_post"])[f"blocks.{sink}.mlp.hook_post"][0, 0]
        handle.remove()
        weight = o.model.model.layers[sink].mlp.down_proj.weight.detach()
        wanted = sum(post[n] * weight[:, n] for _, n in o.truth.neurons)
        torch.testing.assert_close(got[head], wanted, rtol=1e-4, atol=1e-4)


def test_later_positions_are_replaced_where_that_is_asked() -> None:
    o = organism("llama", 3)
    ids = o.natural(2, 10)
    bench = _bench(o, ids)
    every = torch.ones(2, *bench.shape, dtype=torch.bool)
    later, intact = bench.written(ids, every, later=True), bench.written(ids, ~every, later=True)
    assert later.shape == (2, 9, o.model.config.hidden_size)
    assert not torch.allclose(later, intact)
    assert float(bench.written(ids[:, :1], every)[:, 0].norm()) < 0.1 * float(
        bench.written(ids[:, :1], ~every)[:, 0].norm()
    )


def test_geometry_equals_its_definition_on_dense_attention(tmp_path: Path) -> None:
    o = organism("llama", 5)
    ids = o.natural(2, 24)
    ids[:, 10] = ids[:, 4]  # a token that comes back
    target = Target.of(o.model, o.tokenizer)
    (found, tokens) = geometry(target, ids, [0, 1])
    assert tokens.tolist() == ids[:, 1:].flatten().tolist()
    o.model.set_attn_implementation("eager")
    dense = o.model(ids, output_attentions=True).attentions[1]
    places = torch.arange(1, 24)
    ratio = dense[:, :, places, places] * (places + 1)
    torch.testing.assert_close(found[1].attention, ratio.transpose(0, 1).flatten(1), rtol=1e-3, atol=1e-4)
    got = trace(o.model, ids, ["blocks.1.attn.hook_q", "blocks.1.attn.hook_k"])
    query, key = got["blocks.1.attn.hook_q"], got["blocks.1.attn.hook_k"]
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    same, other = [], []
    for row in range(2):
        for i in range(1, 24):
            for j in range(1, i):
                cos = torch.cosine_similarity(query[row, i], key[row, j], dim=-1)
                (same if ids[row, i] == ids[row, j] else other).append(cos)
    torch.testing.assert_close(found[1].same[0], torch.stack(same).mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1].other[0], torch.stack(other).mean(0), rtol=1e-3, atol=1e-4)
    own = torch.cosine_similarity(query[:, 1:], key[:, 1:], dim=-1).permute(2, 0, 1).flatten(1)
    torch.testing.assert_close(found[1].own, own, rtol=1e-3, atol=1e-4)


def test_marking_heads_look_away_from_the_tokens_they_serve(tmp_path: Path) -> None:
    """The paper's "other token detectors": planted with an opposite key for the own group."""
    found = _found(organism("llama", 0), tmp_path, count=24)
    marking = [h for h in found.heads if h.serves and h.served_self_attention is not None]
    assert marking
    for h in marking:
        assert h.served_self_attention is not None and h.served_self_attention < 0.3
        assert h.served_self_cosine is not None and h.self_cosine is not None
        assert h.served_self_cosine < -0.5 < h.self_cosine


def test_every_kind_of_model_gives_the_same(tmp_path: Path) -> None:
    """A folder whose layers are read from disk, and a bridge, where only queries and keys cannot be had."""
    o = organism("llama", 2)
    text = _text(o, tmp_path)
    live = marking_heads(o.model, tokenizer=o.tokenizer, text=text, count=8)
    streamed = marking_heads(o.save(tmp_path / "model"), text=text, count=8, batch_size=50)
    bridge = marking_heads(ss.load(tmp_path / "model", backend="bridge"), text=text, count=8)
    for other in (streamed, bridge):
        assert [(f.id, f.heads) for f in other.first_tokens] == [(f.id, f.heads) for f in live.first_tokens]
        assert other.layer_drops == pytest.approx(live.layer_drops, abs=1e-4)
        attention = {(h.layer, h.head): h.self_attention for h in other.heads}
        assert attention == pytest.approx({(h.layer, h.head): h.self_attention for h in live.heads}, abs=1e-4)
    assert streamed.heads[0].self_cosine == pytest.approx(live.heads[0].self_cosine, abs=1e-4)
    assert bridge.heads[0].self_cosine is None and bridge.heads[0].served_self_attention is not None


def test_tokens_given_round_trip_and_figure(tmp_path: Path) -> None:
    o = organism("llama", 0)
    words = [o.tokenizer.decode([o.tokens_of(g)[0]]) for g in (0, 1)]
    found = _found(o, tmp_path, tokens=words)
    assert [f.token for f in found.first_tokens] == ["<s>", *words]
    assert not _mistakes(o, found)
    assert Result.load(found.save(tmp_path / "x.json")) == found
    bad = replace(found, first_tokens=tuple(replace(f, token="<img src=x>") for f in found.first_tokens))
    drawn = bad.figure().to_json()
    assert "<img" not in drawn.replace("\\u003c", "<") and "&lt;img" in drawn.replace("\\u0026", "&")
    heat, control = (t for t in found.figure().data if t.type == "heatmap")
    assert sorted(map(tuple, heat.z)) == sorted(f.drops for f in found.first_tokens)
    of = {f"{f.token!r} ({f.id})": f.control_drop for f in found.first_tokens}
    assert [html.unescape(y) for y in control.y] == [html.unescape(y) for y in heat.y]
    assert [z for (z,) in control.z] == [of[html.unescape(y)] for y in control.y]
    assert control.x[0] > heat.x[-1]
    assert len(_found(organism("gpt2", 0), tmp_path).figure().data) == 1


def test_the_command_gives_what_the_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 0)
    text, folder = _text(o, tmp_path), o.save(tmp_path / "model")
    words = [o.tokenizer.decode([o.tokens_of(g)[0]]) for g in (0, 1)]
    options = ["--token", words[0], "--token", words[1], "--batch-size", "9", "--seed", "3"]
    assert main(["heads", "--model", str(folder), "--text", str(text), *options, "--json", "-"]) == 0
    told = Result.from_dict(json.loads(capsys.readouterr().out))
    found = marking_heads(folder, text=text, tokens=words, batch_size=9, seed=3)
    assert isinstance(told, MarkingHeads) and told.settings == found.settings
    assert (told.heads, told.first_tokens) == (found.heads, found.first_tokens)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    o = organism("llama", 0)
    with pytest.raises(SinkscopeError, match=r"--count 0: expected a whole number from 1"):
        _found(o, tmp_path, count=0)
    with pytest.raises(SinkscopeError, match=r"--batch-size 0: expected a whole number from 1"):
        _found(o, tmp_path, batch_size=0)
    with pytest.raises(SinkscopeError, match="is 2 tokens"):
        _found(o, tmp_path, tokens=["poem book"])
    assert re.search("no token fires|None of the tokens given", str(_found_nothing(o, tmp_path)))


def _found_nothing(o: Organism, folder: Path) -> MarkingHeads:
    alone = next(t for t, g in o.truth.groups.items() if g < 0 and t > 3)
    return _found(o, folder, tokens=[o.tokenizer.decode([alone])], bos=False)
