"""Triton's kernels, interpreted on a CPU, equal the same under masks; and what happens without triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lines_kit import dense, per_head
from repository import ROOT
from test_bands import random_bands
from test_sparse_attention import inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sinkscope.errors import UnsupportedError
from sinkscope.sparse import choice, line_attention, select_bands, sparse
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.serve import LoopServe

CASES = [  # queries, keys before them, width, kv heads, dtype: nothing is a multiple of a block
    (300, 0, 24, 2, "float16"),
    (130, 211, 80, 1, "float16"),
    (64, 64, 16, 4, "float32"),
    (1, 70, 16, 2, "float32"),
]
CUDA = torch.device("cuda")


def test_interpreted_they_equal_sums_and_attention_under_masks():
    """All cases, in one process that reads the variable before it imports triton."""
    pytest.importorskip("triton")
    tests = ROOT / "tests"
    path = os.pathsep.join([str(tests), str(tests / "sparse"), str(ROOT), *filter(None, sys.path)])
    run = [sys.executable, str(tests / "triton_cases.py"), json.dumps(CASES)]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:  # Triton 3.6's interpreter, with NumPy from 2.4 on
        pytest.skip("Triton's interpreter does not run with this version of NumPy")
    assert done.returncode == 0, done.stderr
    for words, case in zip(CASES, json.loads(done.stdout), strict=True):
        assert case.pop("cells", 0.0) <= 1  # a band at the threshold may be chosen or not, in each head
        limit = 2e-6 if words[-1] == "float32" else 5e-4  # weights and the result are rounded
        assert max(case.values()) < limit, (words, case)


@pytest.mark.parametrize("name", ["OutOfResources", "AcceleratorError"])
def test_where_shared_memory_is_short_smaller_tilings_are_tried_and_errors_of_cuda_are_raised(name, monkeypatch):
    kernel, errors = pytest.importorskip("sinkscope.sparse.triton"), pytest.importorskip("triton.runtime.errors")
    kind = errors.OutOfResources if name == "OutOfResources" else torch.AcceleratorError
    fails = MagicMock()
    fails.__getitem__.return_value.side_effect = type(name, (kind,), {"__init__": lambda _: None})()
    monkeypatch.setattr(kernel, "_attend", fails)
    with pytest.raises(kind):
        kernel.attention_on(*inputs(4, 2, 64, 64), random_bands(4, 64, 64, 0))
    assert fails.__getitem__.return_value.call_count == (len(kernel.TILINGS) if name == "OutOfResources" else 1)


def test_without_triton_lines_are_refused_on_its_devices_and_prompts_left_to_the_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "sinkscope.sparse.triton", None)  # an import of it fails
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sparse.lack_of_library.cache_clear()
    with pytest.raises(UnsupportedError, match="install triton"):
        line_attention(*inputs(4, 1, 200, 200), random_bands(4, 200, 200, 0))
    assert sparse.lack_of_library(torch.device("cpu")) == "install triton"
    sparse.lack_of_library.cache_clear()
    assert sparse.lack_of_library(torch.device("meta")) == "only CPUs and CUDA do that"


def test_on_a_gpu_no_prompt_is_read_along_bands_where_that_was_measured_to_be_slower():
    """By the newest record of whole prompts on a GPU, which `SHORTEST` follows."""
    serve, at_default = LoopServe(), 0
    measured = json.loads((ROOT / "experiments/gpu/measured/h100/bands.json").read_text())["result"]
    for name, row in measured.items():
        if name.startswith("prompt of") and row["alpha"] >= serve.alpha:
            assert serve.too_short(row["n"], row["n"], CUDA) is not None or row["times_faster"] > 1, name
            at_default += 1
    assert at_default >= 2
    assert serve.too_short(1 << 17, 1 << 17, CUDA) is None
    assert serve.too_short(256, 1 << 17, CUDA) is not None  # a short turn


@pytest.mark.parametrize(("rows", "tokens", "pays"), [(1, 32768, False), (16, 4128, True)])
def test_on_a_gpu_decoding_reads_everything_where_a_choice_was_measured_to_be_slower(rows, tokens, pays):
    """In layers of the shape of Llama-2-7B."""
    with FakeTensorMode():
        keys = torch.empty(rows, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    layer: Any = SimpleNamespace(keys=keys, values=keys)
    assert LoopServe().decoding.pays(layer) == pays and LoopServe(shortest=0).decoding.pays(layer)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("queries", "past"), [(300, 211), (1000, 0), (2, 0)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 8e-3)])
def test_on_a_gpu_it_is_what_is_used(dtype, error, queries, past):
    pytest.importorskip("sinkscope.sparse.triton")
    scores, value = inputs(4, 2, queries, queries + past, 0, dtype, 128)
    there = Scores(scores.query.cuda(), scores.key.cuda(), scores.scaling)
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
            assert not isinstance(tensor, torch.Tensor) or tensor.is_meta, function
        return result


def test_nothing_in_the_choice_waits_for_the_device_or_reads_the_host(monkeypatch):
    """On tensors that have a device and no numbers; the kernels' launches are left out."""
    sums = pytest.importorskip("sinkscope.sparse.triton_sums")
    monkeypatch.setattr(sums, "launch", lambda *_, **__: None)
    monkeypatch.setattr(choice, "triton_module", lambda *_: sums)
    rows = torch.zeros(64, dtype=torch.int64, device="meta")
    monkeypatch.setattr(choice, "sample_queries", lambda *_: rows)
    scores = Scores(torch.empty(4, 600, 64, device="meta"), torch.empty(2, 700, 64, device="meta"), 0.125)
    settings: Any = {"checked": 64, "dense_rows": 16, "dense_above": 0.5}
    choose = partial(select_bands, scores, 0.9, **settings)
    choose()  # fills caches
    with OnDevice():
        assert choose().offsets.is_meta
        for waits in (rows.nonzero, rows[0].item):  # what may not be done is noticed
            with pytest.raises((RuntimeError, NotImplementedError)):
                waits()
        with pytest.raises(AssertionError):
            torch.where(rows > 0, rows, torch.tensor(0))
