"""Barcodes against the attention of stock eager runs, step by step; pictures and bins against the raw rows."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import loop_organism, tiny_model
from torch import Tensor

import sinkscope as ss
from sinkscope.app.cli import main
from sinkscope.attention.barcode import COLUMNS, NEAR, NEAR_STEPS, STEPS, Barcode, Live, barcode
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.result import Result
from sinkscope.kv import StreamingLLM
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.models.text import typical_text

HEADS = [(0, 1), (1, 0), (2, 3)]
PROMPT = [1, *range(10, 30)]
LONG = [1, *range(4, 27)]
NEW = 8


def _stock(model: Any, prompt: list[int], new: int) -> tuple[list[int], dict[tuple[int, int], Tensor]]:
    """Greedy decoding by hand with eager attention: the last query's rows, step x position."""
    model.set_attn_implementation("eager")
    out = model(torch.tensor([prompt]), use_cache=True, output_attentions=True)
    ids, rows = list(prompt), {head: torch.zeros(new, len(prompt) + new) for head in HEADS}
    for step in range(new):
        for layer, head in HEADS:
            row = out.attentions[layer][0, head, -1]
            at = len(prompt) + step - len(row)  # layers with a window hold only its last positions
            rows[layer, head][step, at : at + len(row)] = row
        ids.append(int(out.logits[0, -1].argmax()))
        cache = out.past_key_values
        out = model(torch.tensor([ids[-1:]]), past_key_values=cache, use_cache=True, output_attentions=True)
    return ids[len(prompt) :], rows


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_neox", "gpt_oss"])
@torch.no_grad()
def test_rows_are_those_of_a_stock_eager_run(family: str) -> None:
    model, tokenizer = tiny_model(family)
    model.generation_config.eos_token_id = None
    found = barcode(model, PROMPT, heads=HEADS, raw=True, max_new_tokens=NEW, tokenizer=tokenizer, control=False)
    new, rows = _stock(model, PROMPT, NEW)
    assert found.steps == len(new) == NEW and not found.ended
    for head in HEADS:
        assert found.arrays[head].shape == (NEW, len(PROMPT) + NEW)
        torch.testing.assert_close(found.arrays[head], rows[head], rtol=1e-4, atol=1e-6)
        sums = found.arrays[head].sum(1)
        if family == "gpt_oss":  # a learned sink takes part and is dropped
            assert (sums < 1).all()
        else:
            torch.testing.assert_close(sums, torch.ones(NEW))


@settings(max_examples=5)
@given(bins=st.integers(1, 60), new=st.integers(1, 20))
def test_bins_are_sums_of_raw_columns(bins: int, new: int) -> None:
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": new, "tokenizer": tokenizer, "control": False, "heads": HEADS}
    raw = barcode(model, PROMPT, raw=True, **options)
    binned = barcode(model, PROMPT, bins=bins, **options)
    total = len(PROMPT) + new
    assert binned.bins == min(bins, total)
    for head in HEADS:
        want = torch.zeros(new, binned.bins)
        for position in range(total):
            want[:, position * binned.bins // total] += raw.arrays[head][:, position]
        torch.testing.assert_close(binned.arrays[head].float(), want, rtol=2e-3, atol=1e-4)


def test_all_heads_take_two_bytes_a_bin() -> None:
    model, tokenizer = tiny_model("llama")
    found = barcode(model, PROMPT, bins=16, max_new_tokens=NEW, tokenizer=tokenizer, control=False)
    assert set(found.arrays) == {(layer, head) for layer in range(3) for head in range(4)}
    near = 12 * NEAR_STEPS * NEAR * 4
    assert found.nbytes == 12 * NEW * 16 * 2 + near
    assert 48 * 2500 * 512 * 2 + near * 4 < 200 << 20  # six layers of eight heads, far below half a gigabyte


def test_an_evicting_policy_is_seen_at_true_positions() -> None:
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    policy = StreamingLLM(budget=12, first=3)
    found = barcode(
        model,
        PROMPT,
        heads=HEADS,
        raw=True,
        max_new_tokens=NEW,
        tokenizer=tokenizer,
        interventions=policy,
        control=False,
    )
    for head in HEADS:
        rows = found.arrays[head]
        torch.testing.assert_close(rows.sum(1), torch.ones(NEW))
        for step in range(1, NEW):
            at = len(PROMPT) + step - 1
            seen = set(rows[step].nonzero().flatten().tolist())
            assert seen <= {0, 1, 2, *range(at - 12, at + 1)}
            assert {0, 1, 2, at} <= seen and len(seen) < at
    assert "StreamingLLM" in found.settings["interventions"]


def test_every_kind_of_model_gives_the_same() -> None:
    options: dict[str, Any] = {"heads": [(2, 2), (5, 7)], "raw": True, "max_new_tokens": 4, "control": False}
    plain = barcode(None, "The import system", **options)
    for backend in ("bridge", "nnsight"):
        other = barcode(ss.load(None, backend=backend), "The import system", **options)
        for head, rows in plain.arrays.items():
            torch.testing.assert_close(other.arrays[head], rows, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_pictures_and_the_control_show_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quarter of the usual sizes, for which few tokens are enough."""
    module, near_steps, near, new = import_module(Barcode.__module__), NEAR_STEPS // 4, NEAR // 4, 28
    sizes = {"NEAR_STEPS": near_steps, "NEAR": near, "STEPS": STEPS // 4, "COLUMNS": COLUMNS // 4}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    found = barcode(model, LONG, heads=HEADS, raw=True, max_new_tokens=new, tokenizer=tokenizer)
    length = len(LONG) + new
    model.set_attn_implementation("eager")
    for h in found.heads:
        assert h.whole and h.late and h.healthy_whole and h.healthy_late
        rows = found.arrays[h.layer, h.head]
        steps, columns = -(-new // sizes["STEPS"]), -(-length // sizes["COLUMNS"])
        assert (h.whole.steps, h.whole.positions) == (steps, columns)
        values = np.array(h.whole.values())
        for line in (0, 7, len(values) - 1):
            part = rows[line * steps : (line + 1) * steps].mean(0)
            for column in (0, 3, values.shape[1] - 1):
                want = float(part[column * columns : (column + 1) * columns].sum())
                assert values[line, column] == pytest.approx(want, abs=6e-4)
        late = np.array(h.late.values())
        assert late.shape == (near_steps, near) and h.late.first_position == length - near
        want = rows[-near_steps:, length - near : length]
        assert np.abs(late - want.numpy()).max() < 6e-4
        assert h.near == pytest.approx(
            float(
                np.mean([float(rows[s, max(0, len(LONG) + s - near) :].sum()) for s in range(new - near_steps, new)])
            ),
            abs=1e-3,
        )
    # The control is the text that ships, read token by token: one causal pass over it has the same rows.
    words = tokenizer(typical_text()[:4000], add_special_tokens=False)["input_ids"]
    ids = [tokenizer.bos_token_id, *words][:length]
    dense = model(torch.tensor([ids]), output_attentions=True).attentions
    h = found.heads[0]
    assert h.healthy_late is not None
    want = dense[h.layer][0, h.head, length - 1 - near_steps : length - 1, length - near :]
    assert np.abs(np.array(h.healthy_late.values()) - want.numpy()).max() < 6e-4


def test_heads_of_a_loop_are_shown() -> None:
    """The planted heads put their attention on the same offsets as a period before, and in ordinary text do not."""
    o = loop_organism(3, vocab_size=1024)
    found = barcode(o.model, o.looping_prompt(5).ids[0].tolist(), max_new_tokens=45, tokenizer=o.tokenizer)
    assert (found.period, found.onset) == (5, 41)
    by_name = {(h.layer, h.head): h for h in found.heads}
    for head in o.truth.locking_heads:
        assert by_name[head].overlap is not None and by_name[head].overlap > 0.7
        assert by_name[head].healthy_overlap is not None and by_name[head].healthy_overlap < 0.1
    shown = [h for h in found.heads if h.whole is not None]
    assert len(shown) == 4 and len({h.layer for h in shown}) == 4 and found.heads[:4] == tuple(shown)
    assert {(h.layer, h.head) for h in shown} & set(o.truth.locking_heads)


def test_a_guard_leaves_its_marks() -> None:
    guard = LoopGuard.paper(budget=96, anchors=8, window=64, variant="tail")
    found = barcode(None, max_new_tokens=96, heads=[(5, 7)], raw=True, interventions=guard, control=False)
    marks = [mark for mark in found.marks if mark.kind == "guard"]
    assert marks and all(0 < mark.step < 96 for mark in marks) and f"guard: at {len(marks)} steps" in str(found)
    rows = found.arrays[5, 7]
    step = marks[0].step
    assert int((rows[step + 2] > 0).sum()) <= 96 + 2 < int((rows[step - 1] > 0).sum())
    drawn = found.figure()
    assert {shape.y0 for shape in drawn.layout.shapes} >= {marks[0].step}


def test_live_is_silent_but_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = tiny_model("llama")
    options: dict[str, Any] = {"heads": [(1, 0)], "max_new_tokens": 5, "tokenizer": tokenizer, "control": False}
    barcode(model, PROMPT, live=True, **options)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sinkscope.attention.barcode._EVERY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    barcode(model, PROMPT, **options)
    assert capsys.readouterr() == ("", "")
    barcode(model, PROMPT, live=True, **options)
    out, err = capsys.readouterr()
    assert out == "" and "step 5" in err and any(shade in err for shade in "░▒▓█")


def test_a_notebook_gets_a_picture_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/plain"])

    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr("IPython.display.display", lambda *_a, **_k: Handle())
    with Live("title") as live:
        live(0, torch.tensor([0.0, 1.0]))
        live(1, torch.tensor([1.0, 0.0]))
    assert shown[-1].splitlines() == ["title: step 2, position 0 to 1, down: steps", " █", "█ "]


def test_a_live_picture_fits_and_groups_steps() -> None:
    live = Live("t", enabled=False)
    live.place = "terminal"
    live._shown = float("inf")
    for step in range(10):
        live(step, torch.eye(10)[step])
    lines = live.picture(5, 6)
    assert len(lines) == 6 and all(len(line) <= 5 for line in lines)
    assert lines[1:] == ["█    ", " █   ", "  █  ", "   █ ", "    █"]


def test_round_trip_arrays_and_figure(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama")
    model.config._name_or_path = "<img src=x>"
    found = barcode(model, PROMPT, heads=HEADS, max_new_tokens=NEW, tokenizer=tokenizer)
    back = Result.load(found.save(tmp_path / "x.json"))
    assert back == found and isinstance(back, Barcode) and back.arrays == {}
    with np.load(found.save_arrays(tmp_path / "x.npz")) as arrays:
        assert set(arrays) == {"0.1", "1.0", "2.3"}
        assert np.array_equal(arrays["2.3"], found.arrays[2, 3].numpy())
    with pytest.raises(SinkscopeError, match="read from a file, which holds pictures only"):
        back.save_arrays(tmp_path / "y.npz")
    drawn = back.figure()
    assert len(drawn.data) == 4 * len(HEADS) and "<img" not in drawn.layout.title.text
    assert [list(line) for line in drawn.data[0].customdata] == found.heads[0].whole.values()  # type: ignore[union-attr]


def test_the_command_gives_what_the_function_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def f(x):")
    options = ["--prompt-file", str(prompt), "--max-new-tokens", "9", "--head", "2.2", "--head", "5.0", "--bins", "7"]
    files = ["--npz", str(tmp_path / "x.npz"), "--json", "-", "--live"]
    assert main(["barcode", *options, *files]) == 0
    out, err = capsys.readouterr()
    told = Result.from_dict(json.loads(out))
    found = barcode(None, "def f(x):", max_new_tokens=9, heads=[(2, 2), (5, 0)], bins=7)
    assert isinstance(told, Barcode) and told.heads == found.heads and err == ""
    assert told.settings == {**found.settings, "live": True}
    assert (tmp_path / "x.npz").is_file()


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/measure/barcode.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], names)
    assert names["rows"].shape == (40, 104)
    torch.testing.assert_close(names["rows"].sum(1), torch.ones(40))
    assert int((names["rows"][-1] > 0).sum()) <= 65


def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny_model("llama")
    for options, message in (
        ({"raw": True}, "12 heads one position at a time: expected up to 4; give --head"),
        ({"heads": [(0, 4)]}, "head 4 is not in .*: give one from 0 to 3"),
        ({"heads": [(3, 0)]}, "layer 3 is not in .*: give one from 0 to 2"),
        ({"heads": [(0, 0)], "layers": [0]}, "layers and heads are given"),
        ({"bins": 0}, "--bins 0: expected a whole number from 1"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"max_new_tokens": 5000}, "ask for at most"),
        ({"prompt": [5, 200]}, "token id 200 is none of"),
    ):
        with pytest.raises(SinkscopeError, match=message):
            barcode(model, tokenizer=tokenizer, **options)
    falcon, words = tiny_model("falcon")
    with pytest.raises(UnsupportedError, match="attention of falcon cannot be replaced"):
        barcode(falcon, PROMPT, tokenizer=words)
    monkeypatch.chdir(tmp_path)
    assert main(["barcode", "--npz", "-"]) == 2
    assert main(["barcode", "--npz", "x", "--json", "./x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "only --json writes to standard output" in first and "x is given for two outputs" in second
    assert main(["barcode", "--head", "five"]) == 2
    assert "--head 'five': expected a head such as L5.H3" in capsys.readouterr().err
