"""float64, and a type that the caller set for all new tensors of torch: the same answers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls_kit import edits
from checkpoints import checkpoint
from covering import every_nth
from organisms import tiny_model

import sinkscope as ss
from sinkscope.hooks.trace import trace
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

    def generated():
        with ACTING[name].on(model):
            return model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    want = generated()
    default()
    assert torch.equal(generated(), want)
    model.double()
    generated()


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
def test_loading_a_model_under_another_default_gives_the_same_and_leaves_torch_as_it_is(family, default):
    ids = torch.arange(5, 45)[None]
    want = ss.load(checkpoint(family), device="cpu")
    default()
    loaded = ss.load(checkpoint(family), device="cpu")
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)
    assert target_of(loaded).adapter == target_of(want).adapter
    assert torch.equal(loaded(ids).logits, want(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_sums_of_a_spike_are_of_float32(dtype):
    """A residual stream of norm 6,000 has a square beyond 65,504: every number that is reported stays finite."""
    live = tiny_model("llama")[0].to(dtype)
    live.model.embed_tokens.weight.data *= 0.5
    live.model.layers[1].mlp.down_proj.weight.data[5] = 0
    site, ids, vector = "blocks.1.hook_resid_post", torch.tensor([[1, 5, 6, 7, 8, 9]]), torch.zeros(32)
    vector[5] = 6000.0
    with ss.Add(vector, site, positions="first").on(live):
        norm = trace(live, ids, [site], "norm")[site]
        logits = trace(live, ids, "logits", lambda tensor: tensor.float().mean(1))["logits"]
    assert norm.dtype == torch.float32 and float(norm[0, 0]) == pytest.approx(6000, rel=0.01)
    assert logits.isfinite().all()
