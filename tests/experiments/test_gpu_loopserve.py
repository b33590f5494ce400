"""LoopServe's latency by context and answer, and the GPU script, on a CPU."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.gpu import loopserve as script
from experiments.loopserve import latency
from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve import LoopServe
from sinkscope.models.target import Target

CONTEXT, NEW, BUDGET = 160, 20, 80
WORDS = ["--quick", "--shape", "lines-128", "--out"]


@pytest.fixture(scope="module")
def target() -> Target:
    return latency.shape_of("lines-128", 0)


def test_a_turn_is_timed_call_by_call_and_its_bytes_are_those_of_the_cache(target: Target) -> None:
    ids = latency.text(CONTEXT + NEW, 0, 0.1)
    choices = latency.arms(BUDGET, 0)
    found = {arm: latency.turn(target, edit, ids, CONTEXT, time.thread_time) for arm, edit in choices.items()}
    assert all(len(run["seconds"]) == 1 + NEW and min(run["seconds"]) > 0 for run in found.values())
    size = 2 * 2 * 2 * 32 * 4  # keys and values, layers, kv heads, width, bytes
    for arm in ("full", "loopserve-p", "minference"):  # the cache stays as it is
        assert found[arm]["logical"] == found[arm]["physical"] == found[arm]["answering"] == (CONTEXT + NEW) * size
    # The whole, and the copy that was taken after 16 steps, with the four tokens since.
    for arm in ("loopserve", "loopserve-d"):
        assert found[arm]["logical"] == (CONTEXT + NEW) * size
        assert found[arm]["physical"] == found[arm]["answering"] == (CONTEXT + 16 + BUDGET + 4) * size
        wide = sum(range(CONTEXT + 1, CONTEXT + 17)) + sum(BUDGET + 1 + i for i in range(4))
        assert found[arm]["read"] == pytest.approx(wide / NEW)
    assert found["snapkv"]["answering"] == (BUDGET + NEW) * size and found["snapkv"]["physical"] == CONTEXT * size
    assert found["h2o"]["answering"] == (BUDGET + 1) * size  # chosen before every step
    rows = LoopServe().dense_rows  # the last queries attend to everything, whatever lines are chosen
    dense = sum(range(CONTEXT - rows + 1, CONTEXT + 1)) / sum(range(1, CONTEXT + 1))
    # Beside the dense rows, the printed choice takes the planted lines, and the other keys that are kept come on top.
    lines = replace(LoopServe(decode=False, shortest=0), begin=1, local=1, sharp=None, checked=0)
    planted = latency.turn(target, lines, ids, CONTEXT, time.thread_time)["cells"]
    assert dense < planted < dense + 0.1 and planted < found["loopserve"]["cells"] < 1
    assert found["full"]["cells"] is None
    assert found["loopserve"]["cells"] == found["loopserve-p"]["cells"] and found["loopserve-d"]["cells"] is None


def test_every_layer_has_the_planted_lines(target: Target) -> None:
    """Half of the heads on one offset and half on marked tokens: few cells, in the last layer as in the first."""
    ids = latency.text(512, 0, 0.1)
    with LoopServe(decode=False, shortest=0, dense_above=torch.inf).on(target) as run, torch.no_grad():
        target.hf(input_ids=ids)
    cells = [event.data["cells"] for event in run.events]
    assert len(cells) == target.n_layers and all(0.01 < share < 0.2 for share in cells)


def test_ratios_are_of_the_same_round() -> None:
    def run(arm: str, number: int, *seconds: float) -> dict[str, Any]:
        noted = dict.fromkeys(latency.NOTED)
        return {"context": 64, "round": number, "arm": arm, "seconds": list(seconds), "peak": 5 + number, **noted}

    runs = [
        run("full", 0, 4, 1, 1),
        run("x", 0, 2, 1, 2),
        run("full", 1, 40, 10, 10),
        run("x", 1, 10, 5, 5),
        run("x", 2, 1, 1, 1),
    ]
    full, row = latency.rows_of(runs, (1, 2))
    assert full["times_faster"] == {"1": 1.0, "2": 1.0}
    assert row["rounds"] == 2 and row["peak"] == 6, "a round without full attention has nothing to be compared with"
    assert row["first_times_faster"] == 3.0 and row["first_seconds"] == 6.0
    assert row["per_token_times_faster"] == pytest.approx((2 / 3 + 2) / 2)
    assert row["times_faster"]["1"] == pytest.approx((5 / 3 + 50 / 15) / 2) and row["seconds"] == {"1": 9.0, "2": 12.5}


def test_interrupted_it_goes_on_and_only_with_the_same_settings(tmp_path: Path, monkeypatch: Any) -> None:
    words, real, made = [*WORDS, str(tmp_path), "--arms", "full", "snapkv"], latency.turn, []

    def twice(*args: Any) -> Any:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(args[3])
        return real(*args)

    monkeypatch.setattr(latency, "fresh", lambda work: {**work(), "peak": None})
    monkeypatch.setattr(latency, "turn", twice)
    with pytest.raises(KeyboardInterrupt):
        latency.main(words)
    file = tmp_path / "loopserve_latency.json"
    held = json.loads(file.read_text())["result"]
    assert not held["complete"] and len(held["runs"]) == 2  # the first two of four were to load libraries
    made.clear()
    monkeypatch.setattr(latency, "turn", lambda *args: made.append(args[3]) or real(*args))
    monkeypatch.setattr(latency, "save", lambda name, text, figure, folder: (folder / f"{name}.json").write_text(text))
    latency.main(words)
    result = json.loads(file.read_text())["result"]
    assert made == [160, 160, 256, 256] and result["complete"] and result["runs"][:2] == held["runs"]
    assert [(row["context"], row["arm"]) for row in result["rows"]] == [
        (160, "full"),
        (160, "snapkv"),
        (256, "full"),
        (256, "snapkv"),
    ]
    made.clear()
    latency.main([*words, "--seed", "1"])
    assert len(made) == 6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_that_of_a_run_of_its_own() -> None:
    def work(size: int) -> int:
        return latency.fresh(lambda: {"sum": float(torch.ones(size // 4).sum())})["peak"]

    small = [torch.ones(8_000) for _ in range(4000)]
    del small[::2]  # free pages between what is held, as any long program has
    assert 60e6 < work(64_000_000) - work(4) < 80e6
    del small
    assert 60e6 < work(64_000_000) - work(4) < 80e6
    assert work(4) < 30e6, "what an earlier run took is not counted"


def test_the_figure_shows_every_arm_and_names_what_was_left_out() -> None:
    row = {
        "first_times_faster": 1.0,
        "per_token_times_faster": 1.0,
        "times_faster": {"40": 1.5},
        "seconds": {"40": 2.0},
        "answering": 2**20,
        "peak": 2**21,
        "rounds": 1,
    }
    rows = [{"context": n, "arm": arm, **row} for n in (64, 128) for arm in ("full", "snapkv")]
    drawn = latency.figure({"result": {"rows": rows, "load": [1.0, 2.0]}, "settings": {"outputs": [40]}})
    assert [trace.name for trace in drawn.data] == ["full"] * 6 + ["snapkv"] * 6
    assert list(drawn.data[6].y) == [1.5, 1.5] and list(drawn.data[10].y) == [1.0, 1.0]
    args = latency.parse(["--contexts", "2048", "8192", "--long", "16384"])
    want = ["16384: one round", "h2o above 4096", "context 4096", "context 32768"]
    assert latency.left_out(args) == want


def test_script_runs_unattended_without_bridge_and_nnsight(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("transformer_lens", "nnsight", "plotly"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    out = tmp_path / "r.json"
    words = [*WORDS, str(out), "--device", "cpu", "--dtype", "float32"]
    script.main([*words, "--sections", "decoding", "prefill"])
    script.main([*words, "--sections", "selection", "prompt", "latency"])  # the others stay
    text = json.loads(out.read_text())
    result = text["result"]
    assert set(result) == set(script.SECTIONS) and all(part["complete"] for part in result.values())
    assert text["provenance"]["versions"]["torch"] and text["settings"]["hardware"] == "cpu"
    first, *curve = result["prefill"]["rows"]
    assert first["same"] < 1e-4
    assert [(row["n"], row["density"]) for row in curve] == [(n, d) for n in (128, 256) for d in script.DENSITIES]
    assert {row["kernel"] for row in [*curve, *result["selection"]["rows"]]} <= {
        "blocks",
        "blocks, lone lines not compiled",
    }
    for row in curve:
        assert row["times_faster"] > 0 and 0.5 * row["density"] < row["cells"] < 1.5 * row["density"] + 0.05
    for row in result["selection"]["rows"]:
        assert row["selection_over_dense"] > 0 and row["layer"] == 1 and row["cells"] < 0.5
        assert 0.7 < row["mass"]["least"] <= row["mass"]["mean"] <= 1.0001 and row["attention"]["times_faster"] > 0
    assert [row["n"] for row in result["prompt"]["rows"]] == [128, 256]
    assert result["prompt"]["rows"][1]["attended"] < 0.9
    for row in result["prompt"]["rows"]:
        assert row["times_faster"] > 0 and row["model_s_own"] == [] and 0 < row["attended"] <= 1
        assert 0.5 < row["mass"]["least"] <= row["mass"]["mean"] <= 1.0001 and row["kernel"][0].startswith("blocks")
    for row in result["decoding"]["rows"]:
        context, size = row["context"], 2 * 2 * 2 * 32 * 4 * row["rows"]
        assert row["logical"] == (context + 20) * size and row["physical"] == (context + 16 + 80 + 4) * size
        assert row["part"]["tokens_read"] == pytest.approx(80 + sum([*range(1, 17), *range(1, 5)]) / 20)
    table = {(row["context"], row["arm"]): row for row in result["latency"]["rows"]}
    assert set(table) == {(n, arm) for n in (128, 192) for arm in latency.STYLES if arm != "h2o"}
    assert len(result["latency"]["runs"]) == len(table)


def test_a_section_stops_when_its_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = [*WORDS, str(out), "--device", "cpu", "--dtype", "float32", "--sections", "prefill", "--minutes", "0"]
    script.main(words)
    part = json.loads(out.read_text())["result"]["prefill"]
    assert not part["complete"] and len(part["rows"]) == 1


@pytest.mark.slow
def test_a_model_of_ones_own_and_what_it_cannot_read(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["--quick", "--model", "recall", "--out", str(out), "--device", "cpu", "--dtype", "float32"]
    script.main([*words, "--sections", "selection", "decoding"])
    settings = json.loads(out.read_text())["settings"]
    assert settings["model"] == "recall"
    with pytest.raises(SinkscopeError):
        script.main(["--quick", "--model", str(tmp_path / "nothing"), "--device", "cpu", "--out", str(out)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.slow
def test_script_on_a_gpu(tmp_path: Path) -> None:
    script.main([*WORDS, str(tmp_path / "r.json")])
    result = json.loads((tmp_path / "r.json").read_text())["result"]
    assert all(part["complete"] for part in result.values()) and result["prefill"]["rows"][0]["same"] < 0.02
