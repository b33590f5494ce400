"""Half precision on a CPU: the verdicts of float32, and sums that do not overflow where a spike is large."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from organisms import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sinkscope as ss
from sinkscope.app.commands import Command, commands
from sinkscope.measure import Measurement
from sinkscope.models.target import Target
from sinkscope.trace import trace


@cache
def model(dtype: str) -> Any:
    return ss.load(backend="hf", dtype=dtype)


@cache
def found(dtype: str) -> Any:
    return ss.find_sinks(model(dtype), max_repeats=64)


@pytest.mark.slow
def test_the_same_sink() -> None:
    half, full = found("float16"), found("float32")
    assert half.sink_layer == full.sink_layer and half.residual_dims == full.residual_dims
    assert {n.site for n in half.causal} == {n.site for n in full.causal}
    assert [(s.kind, s.sites) for s in half.causal_sets] == [(s.kind, s.sites) for s in full.causal_sets]
    assert half.set_drop == pytest.approx(full.set_drop, abs=0.02)
    assert half.first_token_norm == pytest.approx(full.first_token_norm, rel=0.02)
    assert (
        half.repeats.median == full.repeats.median and half.attention_sink.carried_by == full.attention_sink.carried_by
    )


@pytest.mark.slow
def test_the_same_circuit() -> None:
    half, full = (ss.circuit(model(dtype), max_repeats=64) for dtype in ("float16", "float32"))
    for name in ("sink_layer", "spike_by", "neurons", "carried_by", "repeats"):
        assert getattr(half, name) == getattr(full, name), name


@pytest.mark.slow
def test_the_same_repetitions() -> None:
    half, full = (ss.repeat(model(dtype), max_repeats=64) for dtype in ("float16", "float32"))
    assert half.sink_layer == full.sink_layer
    assert half.norm is not None and full.norm is not None
    np.testing.assert_allclose(half.norm.repeats, full.norm.repeats, atol=2)


@pytest.mark.slow
def test_the_same_patch_with_the_same_effect() -> None:
    """The norm of the last of many repeated tokens, over the first token's, without the patch and with it."""
    shares = {}
    for dtype in ("float16", "float32"):
        patch, site = ss.SinkPatch.from_result(found(dtype)), f"blocks.{found(dtype).sink_layer}.hook_resid_post"
        ids = torch.tensor([[1, *[300] * 200]])
        plain = trace(model(dtype), ids, [site], "norm")[site][0]
        with patch.on(model(dtype)):
            after = trace(model(dtype), ids, [site], "norm")[site][0]
        shares[dtype] = torch.stack([plain[-1] / plain[0], after[-1] / after[0]])
    torch.testing.assert_close(shares["float16"], shares["float32"], atol=0.02, rtol=0.02)
    assert shares["float16"][0] > 0.5 > shares["float16"][1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_sums_of_a_spike_are_of_float32(dtype: torch.dtype) -> None:
    """A residual stream of norm 6,000 has a square beyond 65,504: every number that is reported stays finite."""
    live, _ = tiny_model("llama")
    live = live.to(dtype)
    live.model.embed_tokens.weight.data[:] *= 0.5
    live.model.layers[1].mlp.down_proj.weight.data[5] = 0
    target, site = Target.of(live), "blocks.1.hook_resid_post"
    ids = torch.tensor([[1, 5, 6, 7, 8, 9]])
    vector = torch.zeros(target.d_model)
    vector[5] = 6000.0
    with ss.Add(vector, site, positions="first").on(live) as run:
        norm = trace(live, ids, [site], "norm")[site]
        logits = trace(live, ids, "logits", "mean")["logits"]
    assert norm.dtype == torch.float32 and float(norm[0, 0]) == pytest.approx(6000, rel=0.01)
    assert logits.isfinite().all() and len(run.events) == 2
    with (ss.Ablate(heads=[(2, 1)]) | ss.H2O(4) | ss.LoopGuard(64, anchors=2, window=16)).on(live) as run:
        made = live.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert made.shape == (1, 14) and run.usage[0].peak_tokens == [6.0]
    assert all(
        torch.tensor(list(event.data.values())).isfinite().all() for event in run.events if event.kind != "guard"
    )


# Operations of ours, one by one --------------------------------------------------------------------------------------

ALL = [command for command in commands().values() if isinstance(command.load(), Measurement)]
SUMS = ("pow", "square", "norm", "mm", "mul", "sum", "mean", "var", "std", "add", "sub", "cumsum")
ADDS = ("scatter_add", "index_add", "scatter_reduce", "put_", "bincount", "histc")
IN_ORDER = {
    # Every place gets one number that is not zero, so the order of the additions does not matter.
    ("attention/barcode.py", "scatter_add_"),
    ("attention/locking.py", "scatter_add_"),
    ("measure/setup.py", "scatter_add_"),
    # Adds in integers on a GPU.
    ("adding.py", "scatter_add_"),
}


class Watched(TorchDispatchMode):
    """Notes what our own lines compute: finite numbers of which an infinite one is made, and additions at places."""

    def __init__(self) -> None:
        super().__init__()
        self.overflows, self.additions = set[str](), set[tuple[str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), str(func.__name__).partition(".")[0]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if inputs and any(word in name for word in ADDS) and (line := _ours()):
            accumulates = "put_" not in name or any(x is True for x in args)
            self.additions |= {(line.partition(":")[0], name)} if accumulates else set()
        half = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.dtype == torch.float16]
        if half and any(word in name for word in SUMS) and (line := _ours()):
            if not all(x.isfinite().all() for x in half) and all(x.isfinite().all() for x in inputs):
                self.overflows.add(f"{line} {name}")
        return out


def _ours() -> str | None:
    """The line of sinkscope that calls; None: transformers does."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/transformers/" in file:
            return None
        if (place := file.partition("/sinkscope/")[2]) and "/tests/" not in file and "/site-packages/" not in file:
            return f"{place.rpartition('sinkscope/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@pytest.mark.slow
@pytest.mark.parametrize("command", ALL, ids=lambda command: command.name)
def test_no_operation_of_a_measurement_overflows_or_adds_in_an_order_that_matters(command: Command) -> None:
    """The model's spike has a norm of 6,000, and 4,800 in one dimension."""
    measure = command.load()
    with Watched() as seen:
        result = measure(model("float16"), **measure.quick)
    assert seen.overflows == set()
    assert seen.additions <= IN_ORDER, "say how it adds in the same order on a GPU"
    assert result.conclusion()


def test_the_watch_sees_what_it_is_for() -> None:
    from sinkscope.attention.locking import _smooth

    with Watched() as seen:
        _smooth(torch.full((20,), 60000.0, dtype=torch.float16), 8)
    assert seen.overflows
