"""Triton's kernel, interpreted on a CPU, equals attention under a mask; and what happens without triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lines_kit import along, drawn
from repository import ROOT
from test_loopserve_sparse import inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from sinkscope.errors import UnsupportedError
from sinkscope.lines import sparse
from sinkscope.lines.attention import Scores
from sinkscope.lines.serve import LoopServe
from sinkscope.lines.shapes import AShape
from sinkscope.tap.call import Attention
from sinkscope.tap.view import View

CASES = [
    (*case, dtype)
    for case in (  # lines, queries, keys before them, width, kv heads, limit above which heads are dense
        ("mixed", 300, 0, 24, 2, 1e9),  # heads share keys, and nothing is a multiple of a block
        ("mixed", 300, 0, 24, 2, 0.9),  # the last heads are dense
        ("mixed", 256, 0, 16, 4, 1e9),  # everything is
        ("lone", 200, 130, 48, 1, 1e9),  # no vertical lines
        ("band", 130, 211, 80, 1, 1e9),
        ("columns", 190, 0, 16, 2, 1e9),  # no slash lines but the main diagonal
        ("columns", 1, 70, 16, 2, 1e9),
    )
    for dtype in ("float16", "float32")
]


@pytest.fixture(scope="module")
def found():
    """All cases, in one process that reads the variable before it imports triton."""
    pytest.importorskip("triton")
    try:
        int(np.ones(1, dtype=np.int64))  # Triton 3.6's interpreter does so; NumPy 2.5 refuses
    except TypeError:
        pytest.skip("Triton's interpreter does not run with this version of NumPy")
    here = ROOT / "tests"
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, sys.path)])
    run = [sys.executable, str(here / "triton_cases.py"), json.dumps(CASES)]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_interpreted_it_equals_attention_under_the_mask(number, found):
    *_, limit, dtype = CASES[number]
    case = found["cases"][number]
    assert case["kernel"] == "triton" and case["type"] == f"torch.{dtype}"
    assert case["off"] < (1e-6 if dtype == "float32" else 5e-4)  # weights and the result are rounded
    assert not any(case["dense"]) if limit > 1 else case["dense"][3] and not case["dense"][2]
    numbers = zip(case["dense"], case["computed"], case["cells"], strict=True)
    assert all(full or done > cells for full, done, cells in numbers)


LISTS = "heads kv_heads block_count block_index column_count column_index lone_count lone_offset".split()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 128), ("float32", 128), ("bfloat16", 256)])
def test_it_compiles_for_compute_capability_90_and_fits_its_shared_memory(dtype, width):
    """No GPU is needed to compile. Without tensor cores a float32 kernel has no registers left for its products."""
    pytest.importorskip("triton")
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sinkscope.lines import triton as kernel

    kind = getattr(torch, dtype)
    size = kernel.queries_at_once(kind)
    fixed = {"width": width, "values": width, "SIZE": size, "KEYS": kernel.KEYS}
    names = kernel._attend.arg_names
    types = {name: "i32" for name in names} | {"scaling": "fp32"} | dict.fromkeys(fixed, "constexpr")
    types |= dict.fromkeys(("query", "key", "value", "out"), "*bf16" if dtype == "bfloat16" else "*fp32")
    types |= dict.fromkeys(LISTS, "*i32") | dict.fromkeys(("banded", "vertical", "whole"), "*u8")
    # Addresses are multiples of 16, as those of a model's tensors are.
    even = [i for i, name in enumerate(names) if types[name][0] == "*"]
    source = ASTSource(
        kernel._attend,
        types,
        {(names.index(name),): number for name, number in fixed.items()},
        {(i,): [["tt.divisibility", 16]] for i in even},
    )
    options = {"num_warps": kernel._warps(width, size), "num_stages": 1}
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 * 1024
    assert "wgmma" in made.asm["ptx"], "the products are not computed on tensor cores"


def test_what_compilers_raise_leaves_lines_to_pytorch_and_errors_of_cuda_do_not(found):
    failures = found["failures"]
    assert failures.pop("AcceleratorError") == ["raised", "no"]
    for name, said in failures.items():
        assert said == ["left", f"lines are not computed by Triton: {name} no"]


@pytest.mark.parametrize(
    ("library", "module", "interpreted"),
    [("triton", "sinkscope.lines.triton", "1"), ("numba", "sinkscope.lines.lone", "0")],
)
def test_without_its_library_lines_are_refused_and_it_is_said_once(monkeypatch, library, module, interpreted):
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    sparse._module.cache_clear()
    with pytest.warns(UserWarning, match=f"install {library}") as said:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=f"on cpu: {library} is not installed"):
                sparse.sparse_attention(*inputs(2, 1, 200, 200), drawn(2, 200, 200, 0.05, 0.02))
    assert len(said) == 1
    sparse._module.cache_clear()


def test_the_limit_on_a_cpu_goes_by_width():
    assert [sparse.dense_limit(torch.empty(2, 9, width), 9) for width in (64, 24)] == [0.65, 0.325]


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_on_a_gpu_heads_are_dense_where_lines_were_measured_to_be_slower(card):
    """By the largest loss and gain: up to 15 % either way are within the spread of the measurement."""
    decided = set()
    for name, row in measured(card).items():
        if not name.startswith(("prefill", "lone")) or row["dense_heads"]:
            continue
        with FakeTensorMode():
            limit = sparse.dense_limit(torch.empty(32, row["n"], 128, device="cuda"), row["n"])
        lines = row["computed"] <= limit
        assert row["times_faster"] > 0.85 if lines else row["times_faster"] < 1.15, (name, limit)
        decided.add(lines)
    assert decided == {True, False}


def measured(card: str) -> dict[str, Any]:
    """What `experiments.gpu.loopserve` measured on a card."""
    return json.loads((ROOT / f"experiments/gpu/measured/{card}/loopserve.json").read_text())["result"]


def test_on_a_gpu_no_prompt_is_read_along_lines_where_that_was_measured_to_be_slower():
    prompts = [row for name, row in measured("h100").items() if name.startswith("prompt of")]
    assert len(prompts) >= 3
    with FakeTensorMode():  # no memory, and no GPU
        for row in prompts:
            query = torch.empty(32, row["n"], 128, device="cuda", dtype=torch.bfloat16)
            if row["times_faster"] < 1:
                assert not LoopServe().pays(query, row["n"]), row["n"]
        assert LoopServe().pays(torch.empty(32, 131072, 128, device="cuda"), 131072)
        assert not LoopServe().pays(torch.empty(32, 512, 128, device="cuda"), 131072)  # a short turn
        assert LoopServe(shortest=0).pays(query, row["n"])  # whatever that costs


def test_on_a_gpu_decoding_reads_everything_where_a_choice_was_measured_to_be_slower():
    """Layers of 8k and 32k tokens, and of 16 rows of 4k, in the shape of Llama-2-7B."""
    chosen: list[bool] = []
    for rows, tokens in ((1, 8192), (1, 32768), (16, 4128)):
        with FakeTensorMode():
            keys = torch.empty(rows, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
        layer: Any = SimpleNamespace(keys=keys, values=keys)
        chosen.append(LoopServe().decoding.pays(layer))
        assert LoopServe(shortest=0).decoding.pays(layer)
    assert chosen == [False, False, True]
    layer = SimpleNamespace(keys=torch.empty(1, 1, 8, 4), values=torch.empty(1, 1, 8, 4))
    assert LoopServe().decoding.pays(layer)  # on a CPU


def test_prompts_on_a_device_without_it_are_left_to_the_model():
    query = torch.empty(1, 2, 200, 16, device="meta")
    key = torch.empty(1, 1, 200, 16, device="meta")
    pos = torch.arange(200)[None]
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(_attn_implementation="sdpa"))
    view = View(pos[None], pos)
    prompt = Attention(module, 0, query, key, key, None, {}, viewed=lambda _: view)
    assert AShape().why_dense(prompt, view, None, flat=False) == "on meta: only CPUs and CUDA do that"


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("queries", "past"), [(512, 0), (300, 211), (1000, 0)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-3)])
def test_on_a_gpu_it_is_what_is_used(dtype, error, queries, past):
    pytest.importorskip("sinkscope.lines.triton")
    query, key = torch.randn(4, queries, 128) * 2, torch.randn(2, queries + past, 128)
    value = torch.randn(2, queries + past, 96).to(dtype)
    scores = Scores(query.to(dtype), key.to(dtype), 0.25)
    lines = drawn(4, queries + past, queries, 0.05, 0.01)
    lines.slash[1, 20:200] = True
    there = sparse.HeadLines(lines.chosen.cuda(), queries)
    on_gpu = Scores(scores.query.cuda(), scores.key.cuda(), 0.25)
    out, what = sparse.sparse_attention(on_gpu, value.cuda(), there, dense_above=1e9)
    assert what.kernel == "triton" and not any(what.dense)
    wanted = along(scores, value, lines)
    assert float((out.cpu().double() - wanted).norm() / wanted.norm()) < error
