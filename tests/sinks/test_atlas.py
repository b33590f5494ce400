"""sink_atlas against planted groups and against one long pass per token; its table in HTML; resuming."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, organism
from report_kit import Reader

from sinkscope.app.cli import main
from sinkscope.app.pages import page
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.layer_scan import norms_after
from sinkscope.sinks.repetition.atlas import AtlasWork, SinkAtlas, _shared, sink_atlas

LIMIT = 160


def _atlas(o: Organism, **kwargs: Any) -> SinkAtlas:
    return sink_atlas(o.model, tokenizer=o.tokenizer, **{"max_repeats": LIMIT, **kwargs})


@cache
def whole() -> SinkAtlas:
    """Every token of a small organism; for those who only read."""
    return _atlas(organism("qwen2", 1))


def _by_hand(o: Organism, layer: int, first: int, token: int, limit: int) -> int | None:
    """The whole model on the longest sequence, transformers' own hidden states."""
    with torch.no_grad():
        out = o.model(torch.tensor([[first] + [token] * limit]), output_hidden_states=True)
    norm = out.hidden_states[layer + 1][0].norm(dim=-1)
    above = (norm[1:] >= norm[0] / 2).nonzero()
    return int(above[0]) + 1 if len(above) else None


LATER = [pytest.param(family, 1, marks=pytest.mark.slow) for family in ("qwen2", "gemma2")]


@pytest.mark.parametrize(("family", "seed"), [("llama", 5), ("neox", 1), ("gpt_oss", 1), *LATER])
def test_repeats_are_those_of_one_whole_pass_per_token(family: str, seed: int) -> None:
    o = organism(family, seed)
    some = [*o.tokens_of(0)[:3], *o.tokens_of(-1)[:2], o.tokens_of(1)[0]]
    found = _atlas(o, tokens=[o.tokenizer.decode([t]) for t in some])
    assert found.sink_layer == o.truth.sink_layer and found.ids == tuple(some)
    bos = o.tokenizer.bos_token_id
    assert list(found.repeats) == [_by_hand(o, o.truth.sink_layer, bos, t, LIMIT) for t in some]


def test_every_grouped_token_gets_there_and_no_other() -> None:
    o = organism("qwen2", 1)
    found, expected = whole(), o.truth.repeats_expected
    assert expected is not None and expected < 100 and len(found.ids) == o.model.config.vocab_size
    for i, n in zip(found.ids, found.repeats, strict=True):
        if o.truth.groups[i] < 0:
            assert n is None
        elif i != o.tokenizer.bos_token_id:  # which after itself is its own group from the start
            assert n is not None and 0.6 * expected <= n <= 1.5 * expected
    free = sum(g < 0 for g in o.truth.groups.values())
    assert found.unreached == free == sum(row.resisting for row in found.by_head)
    assert {row.head for row in found.by_head if row.resisting} == {None}
    got = [n for n in found.repeats if n is not None and n > 1]  # BOS after itself needs no repetition
    assert found.median == pytest.approx(torch.tensor(got, dtype=torch.float64).quantile(0.5))
    share = {p.name: p for p in found.shared}["share served by a single head"]
    assert (share.reached, share.resisting, share.auroc) == (1.0, 0.0, 0.0)
    assert found.repeats[found.ids.index(o.tokenizer.bos_token_id)] == 1
    assert any("first occurrence is already a sink" in line and "'<s>'" in line for line in found.details())


def test_without_bos_a_token_of_the_text_stands_first_and_never_itself() -> None:
    o = organism("llama", 1, bos=False)
    work = AtlasWork(o.truth.sink_layer or 0, 7, 9, 64, 64, 1024)
    assert work.row(5, 2) == [7, 5, 5] and work.row(7, 2) == [9, 7, 7]
    found = _atlas(o, max_repeats=16)
    first = o.tokenizer.unk_token_id  # what the neutral text is for this tokenizer
    for t in (10, 20):
        assert found.ids[t] == t and found.repeats[t] == _by_hand(o, found.sink_layer or 0, first, t, 16)


@settings(max_examples=12)
@given(batch=st.integers(1, 900), length=st.integers(1, 200), limit=st.integers(1, 200))
def test_passes_of_any_size_give_the_same_table(batch: int, length: int, limit: int) -> None:
    o = _ORGANISM
    target, tokens = Target.of(o.model, o.tokenizer), [*o.tokens_of(0)[:2], *o.tokens_of(-1)[:1]]
    assert o.truth.sink_layer is not None
    work = AtlasWork(o.truth.sink_layer, 1, 1, length, limit, batch)
    got = work(target, tokens)
    norm = norms_after(target, o.truth.sink_layer, torch.tensor([work.row(t, limit) for t in tokens]))
    share = norm[:, 1:] / norm[:, :1]
    for n, value, row in zip(got["repeats"], got["norm"], share, strict=True):
        above = (row >= 0.5).nonzero().flatten().tolist()
        assert n == (above[0] + 1 if above else None)
        assert value == pytest.approx(float(row[above[0]] if above else row.max()), abs=2e-3)


_ORGANISM = organism("qwen2", 1, n_layers=4)


def test_what_resisting_tokens_share_is_counted_right() -> None:
    repeats, values = [None, 3, None, 5, 2, None], [4.0, 1.0, 2.0, 2.0, 1.0, 9.0]
    (found,) = _shared(repeats, {"median of something": values})
    pairs = [(values[i], values[j]) for i, a in enumerate(repeats) for j, b in enumerate(repeats) if a is None and b]
    assert found.auroc == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert (found.reached, found.resisting) == (1.0, 4.0)
    assert _shared([1, 2], {"x": [1.0, 2.0]}) == ()


def test_columns_beside_the_table_are_those_of_the_model_and_the_text(tmp_path: Path) -> None:
    o = organism("gemma2", 1)  # whose embedding is scaled
    (tmp_path / "t.txt").write_text("poem book poem cat poem " * 40)
    words = ["poem", "book", "dog"]
    found = _atlas(o, tokens=words, text=tmp_path / "t.txt", max_repeats=4, texts=1)
    assert found.frequency == (120, 40, 0) and found.text_tokens == 200
    with torch.no_grad():
        norm = o.model.get_input_embeddings()(torch.tensor(found.ids)).norm(dim=-1)
    torch.testing.assert_close(torch.tensor(found.embedding_norm), norm, atol=1e-3, rtol=1e-4)


def test_html_holds_every_token_and_none_can_escape() -> None:
    found = _atlas(organism("llama", 1), tokens=["poem", "book", "cat"], max_repeats=4)
    evil = ('</script><img src=x onerror="alert(1)">', "<!--<script>", "a\u2028\"'&")
    html = page(replace(found, tokens=evil))
    assert "<img src=x" not in html and "<!--<script>" not in html
    (rows,) = (block for block in Reader(html).data if isinstance(block, list))
    assert [row[1] for row in rows] == list(evil) and [row[0] for row in rows] == list(found.ids)
    assert [row[2] for row in rows] == list(found.repeats)
    assert not re.search(r'(src|href)="(https?:)?//', html.split("<body>")[1].split('id="themes"')[0])
    assert "application/gzip" not in found._repr_html_()


def test_result_survives_a_file_and_its_figure_counts_every_token(tmp_path: Path) -> None:
    found = whole()
    found.save(tmp_path / "a.json")
    assert Result.load(tmp_path / "a.json") == found
    drawn = found.figure()
    bars = [trace for trace in drawn.data if trace.type == "bar"]
    assert sum(sum(bar.y) for bar in bars) == len(found.ids)
    assert sum(bar.y[-1] for bar in bars) == found.unreached
    assert len(found.to_frame()) == len(found.ids) and len(str(found).splitlines()) < 30


def test_a_killed_run_goes_on_with_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = organism("qwen2", 1)
    words = [w for w in map(o.tokenizer.decode, range(4, 196)) if len(o.tokenizer.tokenize(w)) == 1]
    some: dict[str, Any] = {"tokens": words[:70], "max_repeats": 80, "batch_size": 64 * 32}
    expected = _atlas(o, **some)
    real, calls = AtlasWork.__call__, [0]

    def dying(self: AtlasWork, target: Target, items: list[int]) -> Any:
        calls[0] += 1
        if calls[0] == 4:  # the first one is the pilot
            raise KeyboardInterrupt
        return real(self, target, items)

    monkeypatch.setattr(AtlasWork, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        _atlas(o, **some, resume=tmp_path / "r")
    assert (tmp_path / "r" / "atlas" / "runs.jsonl").read_bytes().count(b"\n") == 2
    calls[0] = 100
    resumed = _atlas(o, **some, resume=tmp_path / "r")
    assert calls[0] - 100 == 1 + -(-len(expected.ids) // 32) - 2
    for name in ("ids", "tokens", "repeats", "norm", "frequency", "embedding_norm", "head", "by_head", "shared"):
        assert getattr(resumed, name) == getattr(expected, name), name
    with pytest.raises(SinkscopeError, match=r"max_repeats was 80, now 40"):
        _atlas(o, **{**some, "max_repeats": 40}, resume=tmp_path / "r")


def test_bad_input_and_no_sink() -> None:
    o = organism("llama", 0)
    for arguments, words in (
        ({"max_repeats": 10**9}, "the largest is"),
        ({"max_repeats": 0}, "--max-repeats 0"),
        ({"batch_size": 0}, "--batch-size"),
        ({"workers": -1}, "--workers -1"),
        ({"tokens": ["poem book"]}, "2 tokens"),
    ):
        with pytest.raises(SinkscopeError, match=words):
            _atlas(o, **arguments)
    none = _atlas(organism("llama", 0, kind="none"))
    assert none.sink_layer is None and none.rows() == [] and "no attention sink" in str(none)
    assert none.figure() is not None and "no attention sink" in page(none)


def test_command_reads_a_folder_layer_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("qwen2", 1)
    folder = str(o.save(tmp_path / "m"))
    capsys.readouterr()
    words = [o.tokenizer.decode([t]) for t in (o.tokens_of(0)[0], o.tokens_of(-1)[0])]
    out = ["--json", "-", "--html", str(tmp_path / "a.html")]
    assert main(["atlas", "--model", folder, *(x for w in words for x in ("--token", w)), *out]) == 0
    repeats = json.loads(capsys.readouterr().out)["result"]["repeats"]
    assert repeats[0] is not None and repeats[1] is None
    assert "only those that resist" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_two_processes_make_the_same_table() -> None:
    o = organism("qwen2", 1)
    one, two = (_atlas(o, batch_size=64 * 32, workers=n) for n in (1, 2))
    for name in ("ids", "repeats", "norm", "head", "by_head", "shared", "median"):
        assert getattr(one, name) == getattr(two, name), name
