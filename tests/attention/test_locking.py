"""Locking heads against planted ones, and the score against its definition on dense attention."""

from __future__ import annotations

import json
import secrets
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from organisms import LoopOrganism, tiny_model
from organisms import loop_organism as new_loop_organism
from torch import Tensor

from sinkscope.app.cli import main
from sinkscope.attention.locking import LOCKED, Locking, Overlaps, locking
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.result import Result
from sinkscope.kv import Full, Observe, StreamingLLM
from sinkscope.loops.signals import collapse_point, diversity, novelty
from sinkscope.measure import Setup

loop_organism = partial(new_loop_organism, n_layers=3, vocab_size=1024)


def _found(o: LoopOrganism, prompt: Tensor, new: int, **options: Any) -> Locking:
    """Held against a walk on the ring, which for an organism is ordinary text."""
    calm = o.healthy_prompt(prompt.shape[1] + new, start=400)[0].tolist()
    return locking(
        o.model, prompt[0].tolist(), max_new_tokens=new, tokenizer=o.tokenizer, **{"control": calm, **options}
    )


@cache
def _ordinary() -> tuple[LoopOrganism, Locking]:
    """An organism in a loop of 5, and the result with its control. No test alters them."""
    o = loop_organism(0)
    return o, _found(o, o.looping_prompt(5).ids, 40)


def test_planted_heads_rank_first() -> None:
    seed = secrets.randbits(32)
    for i, (period, delay) in enumerate(((5, 0), (3, 12), (9, 4), (1, 0))):
        o = loop_organism(seed + i)
        prompt = o.looping_prompt(period, delay=delay)
        found = _found(o, prompt.ids, max(48, 8 * period - 2))
        planted = set(o.truth.locking_heads)
        top = [(h.layer, h.head) for h in found.heads[: len(planted)]]
        assert set(top) == planted, f"seed {seed + i}, period {period}: {top}, planted {planted}"
        first, after = found.heads[len(planted) - 1], found.heads[len(planted)]
        assert first.locked and first.gain > after.gain + 0.02 and first.stability > 0.7
        assert first.healthy_score is not None and first.healthy_score < 0.1
        assert found.period == period and found.locking_onset is not None
        if delay:  # they lock once the loop has begun, within two periods and the smoothing
            begins = prompt.ids.shape[1] + delay
            locked = [h.onset for h in found.heads[: len(planted)]]
            assert all(at is not None and begins - 8 <= at <= begins + 2 * period + 8 for at in locked), (
                begins,
                locked,
            )


def test_without_planted_heads_nothing_locks() -> None:
    o = loop_organism(1, induction=False)
    prompt = o.looping_prompt(5)
    walk = _found(o, prompt.ids, 60)
    assert walk.period is None and walk.locked_curve == () and walk.locking_onset is None and "no loop" in str(walk)
    ids = [*prompt.ids[0].tolist(), *prompt.cycle * 12]  # what the organism with them would say
    whole = locking(o.model, ids=ids, tokenizer=o.tokenizer, control=o.healthy_prompt(len(ids), 400)[0].tolist())
    with_them = loop_organism(1)
    planted = locking(
        with_them.model, ids=ids, tokenizer=o.tokenizer, control=o.healthy_prompt(len(ids), 400)[0].tolist()
    )
    gain = {(h.layer, h.head): h.gain for h in whole.heads}
    other = {(h.layer, h.head): h.gain for h in planted.heads}
    assert all(gain[head] < 0.7 < other[head] for head in with_them.truth.locking_heads)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_the_score_equals_its_definition(family: str) -> None:
    """Also in pieces of three rows, which must not matter."""
    model, _ = tiny_model(family)
    ids = torch.randint(4, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    shift, suffix, layer = 4, 9, 1
    whole, parts = Overlaps([layer], suffix, shift), Overlaps([layer], suffix, shift)
    with whole.observe().on(model):
        model(ids, use_cache=False)
    with parts.observe().on(model):
        cache = None
        for start in range(0, 40, 3):
            cache = model(ids[:, start : start + 3], past_key_values=cache, use_cache=True).past_key_values
    model.set_attn_implementation("eager")
    dense = model(ids, output_attentions=True).attentions[layer][0]
    rows = torch.zeros(4, 40, suffix)  # head query offset
    for t in range(40):
        for offset in range(suffix):
            if t - offset > 0:  # the first position belongs to no suffix
                rows[:, t, offset] = dense[:, t, t - offset]
    track = whole.tracks()[layer]
    torch.testing.assert_close(track.mass, rows.sum(-1), rtol=1e-3, atol=1e-5)
    shared = torch.minimum(rows[:, shift:], rows[:, :-shift]).sum(-1)
    torch.testing.assert_close(track.shared[:, shift:], shared, rtol=1e-3, atol=1e-5)
    assert (track.shared[:, :shift] == 0).all()
    p = rows[:, 5:] / rows[:, 5:].sum(-1, keepdim=True)
    torch.testing.assert_close(track.width[:, 5:], (-p * p.clamp_min(1e-30).log()).sum(-1).exp(), rtol=1e-3, atol=1e-4)
    for name in ("mass", "shared", "width"):
        torch.testing.assert_close(getattr(parts.tracks()[layer], name), getattr(track, name), rtol=1e-3, atol=1e-5)


def test_token_by_token_equals_one_pass_and_a_policy_is_seen() -> None:
    """With a policy the text is gone through a token at a time: one that keeps everything changes nothing."""
    o = loop_organism(2)
    prompt = o.looping_prompt(4).ids
    plain, full = _found(o, prompt, 16), _found(o, prompt, 16, interventions=Full())
    for a, b in zip(plain.heads, full.heads, strict=True):
        assert (a.layer, a.head, a.onset) == (b.layer, b.head, b.onset)
        assert (b.score, b.mass, b.healthy_score) == pytest.approx((a.score, a.mass, a.healthy_score), abs=1e-4)
    short = _found(o, prompt, 16, interventions=StreamingLLM(budget=10, first=2), period=4, control=False)
    rows: list[Tensor] = []
    watch = StreamingLLM(budget=10, first=2) | Observe(lambda r: rows.append(r.probs[0, :, -1]), layers=[1], last=1)
    with watch.on(o.model), torch.no_grad():
        o.model.generate(prompt, max_new_tokens=16, do_sample=False)
    assert all(len(r[0]) <= 11 for r in rows[1:])
    assert max(h.width for h in short.heads) <= 11 < max(h.width for h in plain.heads)


def test_onsets_are_those_of_the_text() -> None:
    """Against the signals' own definitions, one token at a time."""
    found = locking(None, max_new_tokens=96, window=40, layers=[5])
    from sinkscope.attention.texts import generated, prompt_ids

    made = Setup.open(loading="whole")
    loop = generated(made, prompt_ids(made, None), 96)
    ids, start = loop.ids.tolist(), loop.prompt
    assert (found.period, found.loop_onset, found.tokens) == (loop.period, loop.onset, len(ids))
    new = [i for i in range(3, len(ids)) if novelty(ids[: i + 1], window=40, span=1)]
    assert found.last_new == new[-1]
    point = collapse_point(ids[start:], 40)
    assert point is not None and found.collapse == start + point - 1
    ratio = [None] * start + diversity(ids[start:], 40)
    assert found.diversity == tuple(ratio[p] for p in found.positions)
    assert found.locking_onset is not None and found.loop_onset is not None
    assert found.loop_onset <= found.locking_onset < found.collapse
    locked = [h for h in found.heads if h.locked]
    assert locked and all(h.gain >= LOCKED for h in locked)
    assert [h.gain for h in found.heads] == sorted((h.gain for h in found.heads), reverse=True)


def test_round_trip_and_figure(tmp_path: Path) -> None:
    o, found = _ordinary()
    assert Result.load(found.save(tmp_path / "x.json")) == found
    drawn = found.figure()
    heat = next(t for t in drawn.data if t.type == "heatmap")
    for h in found.heads:
        assert heat.z[list(heat.y).index(h.layer)][list(heat.x).index(h.head)] == h.gain
    bars = next(t for t in drawn.data if t.name == "score in the loop")
    assert list(bars.x)[:2] == [f"{h.layer}.{h.head}" for h in found.heads[:2]]
    alone = _found(o, o.looping_prompt(5).ids, 40, control=False)
    assert all(h.healthy_score is None and h.gain == h.score for h in alone.heads) and "no control" in str(alone)
    assert len(alone.figure().data) == len(drawn.data) - 2


def test_a_given_period_is_the_one_that_is_measured() -> None:
    """Also where the text ends in a loop of another; and without a loop nothing is said of one."""
    o, plain = _ordinary()
    said = {None: plain} | {p: _found(o, o.looping_prompt(5).ids, 40, period=p, control=False) for p in (10, 7)}
    assert [found.period for found in said.values()] == [5, 10, 7]
    assert "repetition of period 5:" in str(said[None]) and "The loop begins at" in str(said[10])
    assert said[7].loop_onset is None and "in no loop of period 7" in str(said[7])
    model, tokenizer = tiny_model("llama")
    asked = locking(model, ids=list(range(4, 64)), period=6, tokenizer=tokenizer, control=False)
    assert (asked.period, asked.loop_onset) == (6, None)
    assert "The 60 tokens are in no loop of period 6" in str(asked) and "None" not in str(asked)
    assert "no loop" in asked.figure().layout.title.text


def test_the_command_gives_what_the_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def f(x):")
    options = [
        "--max-new-tokens",
        "12",
        "--no-control",
        "--layer",
        "5",
        "--suffix",
        "40",
        "--window",
        "30",
        "--period",
        "3",
    ]
    policy = ["--policy", "streaming:48"]
    assert main(["locking", "--prompt-file", str(prompt), *options, *policy, "--json", "-"]) == 0
    told = Result.from_dict(json.loads(capsys.readouterr().out))
    found = locking(
        None,
        "def f(x):",
        max_new_tokens=12,
        layers=[5],
        suffix=40,
        window=30,
        period=3,
        control=False,
        interventions=StreamingLLM(budget=48),
    )
    assert isinstance(told, Locking) and told.settings == found.settings
    assert (told.heads, told.locked_curve, told.diversity) == (found.heads, found.locked_curve, found.diversity)


def test_bad_input_is_one_line() -> None:
    model, tokenizer = tiny_model("llama")
    for options, message in (
        ({"ids": [5], "prompt": "word"}, "a prompt and ids are given"),
        ({"ids": [5] * 30, "suffix": 0}, "suffix 0: expected a whole number from 1"),
        ({"ids": [5] * 30, "period": 0}, "period 0: expected a whole number from 1"),
        ({"ids": [5] * 30, "period": 16}, "period 16: expected at most 15, half of the 30 tokens"),
        ({"prompt": [5], "max_new_tokens": 20, "period": 11}, "period 11: expected at most 10"),
        ({"prompt": [5] * 1025, "max_new_tokens": 3}, "context of .* is 1024: "),
        ({"ids": [5] * 30, "layers": []}, "no layer was given"),
        ({"ids": [5] * 30, "control": [6] * 20}, "a control of 20 ids: expected 30"),
        ({"prompt": [5], "max_new_tokens": 3000}, "ask for at most"),
    ):
        with pytest.raises(SinkscopeError, match=message):
            locking(model, tokenizer=tokenizer, **options)
    falcon, words = tiny_model("falcon")
    with pytest.raises(UnsupportedError, match="attention of falcon cannot be replaced"):
        locking(falcon, ids=[5] * 30, tokenizer=words)
