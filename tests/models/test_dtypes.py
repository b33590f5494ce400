"""float64, and a type that the caller set for all new tensors of torch: the same answers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from calls_kit import edits
from checkpoints import checkpoint
from covering import every_nth
from kv_kit import model_of
from organisms import tiny_model

import sinkscope as ss
from sinkscope.models.checkpoints.config import float32_by_default
from sinkscope.opening.live import target_of

ACTING = edits(tiny_model("llama")[0].config) | {"guard": ss.LoopGuard(64)}


@pytest.fixture
def default():
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:the second token's value is itself like a sink's")
@pytest.mark.parametrize("name", every_nth(ACTING, 4))
def test_what_acts_in_generation_under_another_default(name, default):
    model = tiny_model("llama")[0]
    ids = torch.randint(5, 96, (2, 100), generator=torch.Generator().manual_seed(1))
    ask = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with ACTING[name].on(model):
        want = model.generate(ids, **ask)
    default()
    with ACTING[name].on(model):
        assert torch.equal(model.generate(ids, **ask), want)
    with ACTING[name].on(model.double()):
        model.generate(ids, **ask)


def test_measurements_that_overlap_in_two_threads(default):
    """The first that began ends before the second, which still measures in float32."""
    default()
    began, ended = threading.Event(), threading.Event()

    @float32_by_default()
    def second() -> torch.dtype:
        began.set()
        ended.wait(10)
        return torch.zeros(1).dtype

    with ThreadPoolExecutor(1) as pool:
        with float32_by_default():
            running = pool.submit(second)
            began.wait(10)
        ended.set()
        assert running.result() == torch.float32
    assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])  # an attention of its own; usual
def test_loading_a_model_leaves_another_and_torch_as_they_are(family, default):
    """torch's default is set by nobody but transformers, while it makes the modules, and then set back."""
    model = model_of("llama")
    ids = torch.arange(5, 45)[None]
    logits, config = model(ids).logits, str(model.config)
    want = ss.load(checkpoint(family), device="cpu")
    default()
    with mock.patch("torch.set_default_dtype", side_effect=torch.set_default_dtype) as chosen:
        loaded = ss.load(checkpoint(family), device="cpu")
    assert [call.args[0] for call in chosen.mock_calls] == [torch.float32, torch.float64]
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
    assert target_of(loaded).adapter == target_of(want).adapter
    assert torch.equal(loaded(ids).logits, want(ids).logits)
    assert str(model.config) == config and model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, logits)
