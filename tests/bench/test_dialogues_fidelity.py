"""How near methods stay to full attention: every number against a dense model under a mask, or the planted answer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from organisms.tiny import tiny_model

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.bench.dialogues.form import POSITIONS, Dialogue, DialogueTurn, write_dialogues
from sinkscope.bench.dialogues.recall import recall_dialogue
from sinkscope.bench.dialogues.run import run_fidelity, text_dialogues
from sinkscope.bench.dialogues.tables import Fidelity, Near, tabulate_fidelity
from sinkscope.bench.files import open_folder, read_folder
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.kv import SnapKV

WORDS = "the cat is in a box and it is so that no one can see what we do now or then if you may be my own new".split()
MODEL = {"name": "tiny", "family": "llama", "n_layers": 3, "d_model": 32, "d_mlp": 64, "fingerprint": "f00"}


@cache
def tiny() -> tuple[Any, Any]:
    torch.manual_seed(0)
    hf, tokenizer = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():  # attention that has something to say
        for name, weight in hf.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8)
            if "lm_head" in name:
                weight.mul_(4)
    return hf, tokenizer


def _dialogue(name: str, prompt: int, answer: int) -> Dialogue:
    both = ((0, prompt), (3, answer))
    text, said = (" ".join(WORDS[(7 * i + shift) % len(WORDS)] for i in range(n)) for shift, n in both)
    return Dialogue(name, "qasper", (DialogueTurn(dict.fromkeys(POSITIONS, text), (said,), (0,)),))


SOME = (_dialogue("a", 40, 9), _dialogue("b", 25, 5), _dialogue("c", 33, 1))


def _run(folder: Path, methods: list[str], **given: Any) -> dict[tuple[str, str], Near]:
    hf, tokenizer = tiny()
    given = {"along": "gold", "budget": 16, **given}
    run_fidelity(hf, SOME, methods, out=folder, tokenizer=tokenizer, **given)
    records = read_folder(folder, Near, "dialogues fidelity").records
    return {(r.method, r.dialogue): replace(r, seconds=0.0) for r in records}


def _ids(dialogue: Dialogue) -> tuple[list[int], list[int]]:
    tokenizer, turn = tiny()[1], dialogue.turns[0]
    answer = tokenizer(turn.answers[0], add_special_tokens=False)["input_ids"]
    return tokenizer(turn.prompts["end"])["input_ids"], answer


def _dense(ids: list[int], seen: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and attention of one plain forward call in which query i sees the keys of `seen[i]`."""
    hf = tiny()[0]
    given: dict[str, Any] = {}
    if seen is not None:
        mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        given = {"attention_mask": mask[None, None]}
    before = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = hf(torch.tensor([ids]), output_attentions=True, **given)
    finally:
        hf.set_attn_implementation(before)
    return out.logits[0], [a[0] for a in out.attentions]


@pytest.mark.parametrize(
    "method", ["streaming", "a-shape:first=2:local=7", "a-shape:budget=0.5", "tri-shape:budget=0.5"]
)
def test_one_forward_call_under_a_mask_gives_the_same(tmp_path: Path, method: str) -> None:
    """What a step can read is known in closed form here, so a dense model with that mask says everything at once."""
    found = _run(tmp_path / "r", [method], batch_size=3)
    assert max(value for record in found.values() for value in record.kl) > 0.01
    for dialogue in SOME:
        prompt, answer = _ids(dialogue)
        n, ids = len(prompt), prompt + answer[:-1]
        key, query = torch.arange(len(ids))[None], torch.arange(len(ids))[:, None]
        causal = key <= query
        if method == "streaming":
            seen = causal & ((query < n) | (key < 4) | (key >= query - 12))
        else:
            tokens = n // 2
            first, local = (2, 7) if "first" in method else (4, tokens - 4)
            dense = n - (4 if "tri" in method else 0)
            seen = causal & ((query >= dense) | (key < first) | (query - key < local))
        full, attention = _dense(ids)
        other, _ = _dense(ids, seen)
        steps = range(n - 1, len(ids))
        kl = [
            float(torch.nn.functional.kl_div(other[i].log_softmax(-1), full[i].softmax(-1), reduction="sum"))
            for i in steps
        ]
        kept = [fmean(float((layer[:, i] * seen[i]).sum(-1).mean()) for layer in attention) for i in steps]
        record = found[method, dialogue.id]
        assert record.kl == pytest.approx(kl, abs=2e-5)
        assert record.agree == tuple(bool(full[i].argmax() == other[i].argmax()) for i in steps)
        assert record.kept == pytest.approx(kept[1:], abs=2e-6)
        read = [float(seen[i].sum()) for i in steps][1:]
        assert record.read == (pytest.approx(fmean(read), abs=1e-3) if read else None)
        if method == "streaming":
            assert record.cells is None and record.kl[0] < 1e-6
            assert not record.kept or max(record.kept) < 0.95
        else:
            assert record.cells == pytest.approx(float(seen[:n, :n].sum()) / (n * (n + 1) / 2), abs=1e-4)
            assert set(record.kept) <= {1.0}


def test_mass_kept_by_heads_that_keep_different_tokens(tmp_path: Path) -> None:
    """SnapKV stepped through by hand: positions from its cache, attention from a plain eager call."""
    hf, dialogue = tiny()[0], SOME[0]
    found = _run(tmp_path / "r", ["snapkv:window=4"], batch_size=3)["snapkv:window=4", "a"]
    prompt, answer = _ids(dialogue)
    attention = _dense(prompt + answer[:-1])[1]
    kept: list[float] = []
    differ = False
    with SnapKV(budget=16, window=4).on(hf), torch.no_grad():
        out = hf(torch.tensor([prompt]), use_cache=True)
        for step, token in enumerate(answer[:-1]):
            out = hf(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            shares: list[float] = []
            for layer, probs in zip(out.past_key_values.layers, attention, strict=True):
                groups = probs.shape[0] // layer.pos.shape[1]
                differ |= not torch.equal(layer.pos[0, 0], layer.pos[0, 1])
                for head in range(probs.shape[0]):
                    mine = [p for p in layer.pos[0, head // groups].tolist() if p >= 0]
                    shares.append(float(probs[head, len(prompt) + step, mine].sum()))
            kept.append(fmean(shares))
    assert differ and len(kept) == 8
    assert found.kept == pytest.approx(kept, abs=2e-6)


def test_full_is_itself_and_batches_change_nothing(tmp_path: Path) -> None:
    methods = [
        "full",
        "h2o",
        "tova",
        "progressive-0:every=2",
        "progressive-0:every=2:gather=false",
        "loopserve-0:alpha=0.7:shortest=0:dense_above=inf",
    ]
    given: dict[str, Any] = {"along": "full", "max_new_tokens": 4}
    one, many = (_run(tmp_path / str(size), methods, batch_size=size, **given) for size in (1, 3))
    assert set(one) == set(many) and len(one) == 18
    for key, record in one.items():
        other = many[key]
        assert record.kl == pytest.approx(other.kl, abs=2e-4) and record.kept == pytest.approx(other.kept, abs=2e-5)
        assert (record.agree, record.read, record.prompt_tokens) == (other.agree, other.read, other.prompt_tokens)
        if "gather" in record.method:  # the same part, behind a mask
            copied = one["progressive-0:every=2", record.dialogue]
            assert record.kl == pytest.approx(copied.kl, abs=2e-4)
            assert record.kept == pytest.approx(copied.kept, abs=2e-5)
        if record.method == "full":
            assert max(record.kl) < 1e-6 and all(record.agree) and record.kept == pytest.approx([1.0] * 3, abs=1e-9)
        else:
            assert min(record.kept) < 0.99 and max(record.kl) > 1e-3, record.method


def test_of_the_recall_model_what_is_lost_is_seen(tmp_path: Path) -> None:
    """A budget that holds the end of the prompt only: the full cache's answers, of 3 and 6 tokens, are not its own."""
    model = ss.load("recall", backend="hf")
    some = [recall_dialogue(hops, turns=1, tokens=70, hops=hops) for hops in (1, 2)]
    given: dict[str, Any] = {"out": tmp_path / "r", "budget": 12, "positions": ["begin", "end"], "batch_size": 2}
    run_fidelity(model, some, ["full", "streaming", "loopserve-d"], **given)
    made = tabulate_fidelity([tmp_path / "r"])
    groups = {(g.method, g.position): g for g in made.groups}
    full, window, late = (groups[name, "all"] for name in ("full", "streaming", "loopserve-d"))
    assert (full.tokens, full.questions) == (18, 4) and full.kl < 1e-6
    assert (full.agree, full.kept) == (1.0, pytest.approx(1.0))
    assert window.kl > 1 and window.agree < 0.9 and window.kl_first < 1e-5
    assert window.kept is not None and window.kept < 0.9 and window.read == 13.0
    assert late.kl < 1e-5 and late.kept == pytest.approx(1.0)  # shorter than what it reads everything for
    assert {g.position for g in made.groups} == {"begin", "end", "all"}


def test_pieces_of_a_text(tmp_path: Path) -> None:
    tokenizer = ss.load("recall", backend="hf").tokenizer
    text = " ".join(["drum engine carla fork needle"] * 8)
    some = text_dialogues(tokenizer, 3, prompt_tokens=8, answer_tokens=5, text=text)
    assert [d.task for d in some] == ["text"] * 3
    joined = " ".join(f"{d.turns[0].prompts['end']} {d.turns[0].answers[0]}" for d in some)
    assert joined.split() == text.split()[:39]
    with pytest.raises(SinkscopeError, match=r"40 tokens, and 4 pieces of 8 \+ 5 are wanted: give at most 3"):
        text_dialogues(tokenizer, 4, prompt_tokens=8, answer_tokens=5, text=text)


# --- Folder and table ------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    methods = ["streaming", "full"]
    whole = _run(tmp_path / "whole", methods)
    done = 0

    class _EnoughError(Exception):
        pass

    def stop(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == 2:
            raise _EnoughError

    with pytest.raises(_EnoughError):
        _run(tmp_path / "cut", methods, progress=stop)
    assert len((tmp_path / "cut/runs.jsonl").read_text().splitlines()) == 4
    assert _run(tmp_path / "cut", methods) == whole
    with pytest.raises(SinkscopeError, match='along was "gold", now "full"'):
        _run(tmp_path / "cut", methods, along="full")


def _near(dialogue: str, kl: tuple[float, ...], **changes: Any) -> Near:
    given = {"method": "full", "position": "end", "kept": (0.5,) * (len(kl) - 1), "read": 9.0, "cells": None, **changes}
    return Near(
        model="f00",
        prompt=f"{dialogue} {given['position']} 0",
        dialogue=dialogue,
        turn=0,
        prompt_tokens=20,
        kl=kl,
        agree=tuple(value < 0.5 for value in kl),
        seconds=1.0,
        **given,
    )


def _folder(path: Path, records: list[Near], **changes: Any) -> Path:
    turn = {"prompts": dict.fromkeys(POSITIONS, "?"), "answers": ["a"], "depends": [], "answerable": True}
    dialogues = [{"id": f"q-{i}", "task": "text", "turns": [turn], "classes": []} for i in range(3)]
    settings = {"command": "dialogues fidelity", "model": MODEL, "budget": 64, "along": "gold", **changes}
    with open_folder(path, settings, dialogues, Near) as store:
        store.append(records)
    return path


def test_means_and_errors_are_recomputed(tmp_path: Path) -> None:
    records = [
        _near("q-0", (0.0, 1.0), method="h2o"),
        _near("q-1", (0.5, 0.7, 0.9), method="h2o"),
        _near("q-2", (0.1,), method="h2o", read=None),
        _near("q-0", (0.0, 0.0), method="a-shape:budget=0.25", cells=0.4),
    ]
    made = tabulate_fidelity([_folder(tmp_path / "r", records)])
    h2o, shape = made.groups
    assert (h2o.questions, h2o.tokens, h2o.read, h2o.budget, h2o.position) == (3, 6, 9.0, 64, "end")
    mean = 3.2 / 6
    assert h2o.kl == pytest.approx(mean) and h2o.kl_first == pytest.approx(0.2)
    assert (h2o.agree, h2o.kept) == (pytest.approx(2 / 6), 0.5)
    # Jackknife over questions, another estimate of the same error: near it, not equal.
    left = [(3.2 - x) / (6 - n) for x, n in ((1.0, 2), (2.1, 3), (0.1, 1))]
    jackknife = (2 / 3 * sum((value - fmean(left)) ** 2 for value in left)) ** 0.5
    assert h2o.kl_error == pytest.approx(jackknife, rel=0.25)
    assert (shape.method, shape.budget, shape.cells, shape.kl_error) == ("a-shape", 0.25, 0.4, None)
    assert made.details() == [
        "text by tiny along the text itself: h2o 64 KL 0.533, 33.3% agree, 50.0% kept, "
        "a-shape 0.25 KL 0, 100.0% agree, 50.0% kept"
    ]
    assert made.conclusion() == (
        "On text by tiny along the text itself, a-shape 0.25 has KL 0 nats a token and the same likeliest token in "
        "100.0% of 2 and h2o 64 has KL 0.533 nats a token and the same likeliest token in 33.3% of 6 (the farthest of "
        "2); the full cache, which is the control, was not run."
    )
    assert Result.from_dict(json.loads(made.to_json())) == made
    with pytest.raises(SinkscopeError, match=r"both hold a-shape 0\.25 on text by tiny"):
        tabulate_fidelity([tmp_path / "r", tmp_path / "r"])


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r")
    file = write_dialogues([recall_dialogue(i, turns=1, tokens=80) for i in range(2)], tmp_path / "d.jsonl")
    words = ["dialogues", "fidelity", "--dialogues", str(file), "--methods", "full,streaming:budget=40"]
    assert main([*words, "--out", out]) == 0
    assert "full KL 0, 100.0% agree, 100.0% kept, streaming 40 KL" in capsys.readouterr().out
    assert main(["dialogues", "table", out, "--json", str(tmp_path / "t.json")]) == 0
    made = Fidelity.load(tmp_path / "t.json")
    assert [(g.method, g.budget, g.questions) for g in made.groups] == [("full", 1.0, 2), ("streaming", 40, 2)]
    bars = [t for t in json.loads(made.figure().to_json())["data"] if t["type"] == "bar"]
    assert bars[0]["y"] == ["full", "streaming 40"]
    assert main(["dialogues", "table", str(tmp_path)]) == 2
    assert "is no folder of `sinkscope dialogues run`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "streaming:sinks=3"], "streaming has no setting 'sinks=3'"),
        (["--methods", "snapkv:budget=48"], "SnapKV: budget=48 is below"),
        (["--dialogues", "text", "--positions", "begin"], "--positions begin: pieces of a text have no question"),
        (["--prompt-tokens", "99"], "--prompt-tokens 99 is of --dialogues text: leave it out for recall"),
        (["--along", "me"], "Invalid value for '--along'"),
        (["--dialogues", "text", "--count", "999"], "the text has"),
        (
            ["--dialogues", "recall", "--answer-tokens", "40000"],
            "and 40000 more are to come, but the context of recall",
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dialogues", "fidelity", "--out", "r", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_an_answer_without_tokens_is_refused(tmp_path: Path) -> None:
    hf, tokenizer = tiny()
    empty = Dialogue("x", "qasper", (DialogueTurn(dict.fromkeys(POSITIONS, "is it"), ("",), (0,)),))
    with pytest.raises(SinkscopeError, match="dialogue 'x', turn 1: its right answer has no tokens"):
        run_fidelity(hf, [empty], ["full"], out=tmp_path / "r", tokenizer=tokenizer, along="gold")
