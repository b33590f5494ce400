"""Triton's kernels, interpreted on a CPU, equal the same under masks; and what happens without triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lines_kit import dense, per_head
from repository import ROOT
from test_bands import random_bands
from test_sparse_attention import inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sinkscope.engine.attention import Attention
from sinkscope.engine.stock import Stock
from sinkscope.engine.visible import CausalMask
from sinkscope.errors import UnsupportedError
from sinkscope.sparse import choice, line_attention, select_bands, sparse
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.serve import LoopServe

CASES = [  # queries, keys before them, width, kv heads, dtype: nothing is a multiple of a block
    (300, 0, 24, 2, "float16"),
    (130, 211, 80, 1, "float16"),
    (64, 64, 16, 4, "float32"),
    (190, 0, 64, 2, "float32"),
    (1, 70, 16, 2, "float32"),
    (3, 0, 16, 2, "float16"),
    (200, 130, 128, 1, "float16"),
]


@pytest.fixture(scope="module")
def found():
    """All cases, in one process that reads the variable before it imports triton."""
    pytest.importorskip("triton")
    here = ROOT / "tests"
    path = os.pathsep.join([str(here), str(here / "lines"), str(here.parent), *filter(None, sys.path)])
    run = [sys.executable, str(here / "triton_cases.py"), json.dumps(CASES)]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:  # Triton 3.6's interpreter, with NumPy from 2.4 on
        pytest.skip("Triton's interpreter does not run with this version of NumPy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_interpreted_they_equal_sums_and_attention_under_masks(number, found):
    case = found["cases"][number]
    limit = 2e-6 if CASES[number][-1] == "float32" else 5e-4  # weights and the result are rounded
    assert case.pop("cells", 0.0) <= 1  # a band at the threshold may be chosen or not, in each head
    for what, error in case.items():
        assert error < limit, what


LISTS = ("columns", "columns_below", "bands", "bands_below")
NUMBERS = ("keys", "queries", "blocks", "lead", "before", "sparse_tiles")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 128), ("float32", 128), ("bfloat16", 256)])
def test_it_compiles_for_compute_capability_90_and_fits_its_shared_memory(dtype, width):
    """No GPU is needed to compile. A tiling must fit, and products must be on tensor cores."""
    pytest.importorskip("triton")
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sinkscope.sparse import triton as kernel

    fixed = {"GROUP": 4, "WIDTH": width, "VALUES": width}
    names = kernel._attend.arg_names
    pointers = dict.fromkeys(("query", "key", "value", "out"), "*bf16" if dtype == "bfloat16" else "*fp32")
    fits: list[bool] = []
    for tiling in kernel.TILINGS:
        constants = {**fixed, "SIZE": tiling["SIZE"]}
        types = {name: "i32" for name in names} | {"scaling": "fp32", "on_band": "*u8"} | pointers
        types |= dict.fromkeys(LISTS, "*i32")
        types |= dict.fromkeys(constants, "constexpr")
        # Addresses and strides are multiples of 16, as those of a model's tensors are.
        even = [i for i, name in enumerate(names) if types[name] != "constexpr" and name not in (*NUMBERS, "scaling")]
        source = ASTSource(
            kernel._attend,
            types,
            {(names.index(name),): number for name, number in constants.items()},
            {(i,): [["tt.divisibility", 16]] for i in even},
        )
        options = {name: tiling[name] for name in ("num_warps", "num_stages")}
        made = compiled(source, target=GPUTarget("cuda", 90, 32), options=options)
        fits.append(made.metadata.shared <= 227 * 1024)
        assert "wgmma" in made.asm["ptx"], "the products are not computed on tensor cores"
        if fits[-1]:
            break
    assert any(fits)


def test_where_shared_memory_is_short_smaller_tilings_are_tried_and_errors_of_cuda_are_raised(found):
    assert found["failures"]["OutOfResources"] == ["OutOfResources", found["tilings"]]
    assert found["failures"]["AcceleratorError"] == ["AcceleratorError", 1]


def test_without_triton_lines_are_refused_on_its_devices_and_prompts_left_to_the_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "sinkscope.sparse.triton", None)  # an import of it fails
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sparse.lack_of_library.cache_clear()
    with pytest.raises(UnsupportedError, match="install triton"):
        line_attention(*inputs(4, 1, 200, 200), random_bands(4, 200, 200, 0))
    assert sparse.lack_of_library(torch.device("cpu")) == "install triton"
    sparse.lack_of_library.cache_clear()


NEWEST = "experiments/gpu/measured/h100/bands.json"
"""The newest record of whole prompts on a GPU, which `SHORTEST` follows."""


def test_on_a_gpu_no_prompt_is_read_along_bands_where_that_was_measured_to_be_slower():
    serve, cuda, at_default = LoopServe(), torch.device("cuda"), 0
    for name, row in json.loads((ROOT / NEWEST).read_text())["result"].items():
        if name.startswith("prompt of") and row["alpha"] >= serve.alpha:
            assert serve.too_short(row["n"], row["n"], cuda) is not None or row["times_faster"] > 1, name
            at_default += 1
    assert at_default >= 2
    assert serve.too_short(1 << 17, 1 << 17, cuda) is None
    assert serve.too_short(256, 1 << 17, cuda) is not None  # a short turn
    assert LoopServe(shortest=0).too_short(1024, 1024, torch.device("cuda")) is None  # whatever that costs


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
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(_attn_implementation_internal="sdpa"))
    prompt = Attention(module, 0, query, key, key, None, CausalMask(), 0, 0, {}, Stock(module.config), 0.25)
    assert LoopServe(shortest=0).why_dense(prompt) == "on meta: only CPUs and CUDA do that"


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("queries", "past"), [(512, 0), (300, 211), (1000, 0), (2, 0)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 8e-3)])
def test_on_a_gpu_it_is_what_is_used(dtype, error, queries, past):
    pytest.importorskip("sinkscope.sparse.triton")
    query, key = torch.randn(4, queries, 128) * 2, torch.randn(2, queries + past, 128)
    value = torch.randn(2, queries + past, 96).to(dtype)
    scores = Scores(query.to(dtype), key.to(dtype), 0.25)
    there = Scores(scores.query.cuda(), scores.key.cuda(), 0.25)
    chosen = select_bands(there, 0.7, dense_rows=16)
    out = line_attention(there, value.cuda(), chosen).cpu().double()
    seen = chosen.rows(torch.arange(queries, device="cuda") + past).cpu()
    wanted = dense(scores, seen) @ per_head(value, 4)
    assert float((out - wanted).norm() / wanted.norm()) < error


class OnDevice(TorchDispatchMode):
    """Refuses anything that is not on the device, also numbers that are copied there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_meta, function
        return result


def test_nothing_in_the_choice_waits_for_the_device_or_reads_the_host(monkeypatch):
    """On tensors that have a device and no numbers; the kernels' launches are left out."""
    sums = pytest.importorskip("sinkscope.sparse.triton_sums")
    monkeypatch.setattr(sums, "launch", lambda *_, **__: None)
    monkeypatch.setattr(choice, "triton_module", lambda *_: sums)
    place = torch.device("meta")
    query, key = torch.empty(4, 600, 64, device=place), torch.empty(2, 700, 64, device=place)
    rows = torch.zeros(64, dtype=torch.int64, device=place)
    monkeypatch.setattr(choice, "sample_queries", lambda *_: rows)
    settings: Any = {"checked": 64, "dense_rows": 16, "dense_above": 0.5}
    choose = partial(select_bands, Scores(query, key, 0.125), 0.9, **settings)
    choose()  # fills caches
    with OnDevice():
        assert choose().offsets.is_meta
        for waits in (rows.nonzero, rows[0].item):  # what may not be done is noticed
            with pytest.raises((RuntimeError, NotImplementedError)):
                waits()
        with pytest.raises(AssertionError):
            torch.where(rows > 0, rows, torch.tensor(0))
