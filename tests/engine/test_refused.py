"""What the engine refuses, in one line: rows of several texts, calls of another thread; what it leaves alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from kv_kit import shallow_of
from organisms import tiny_model
from refusals import refused
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import sinkscope as ss
from sinkscope import kv
from sinkscope.errors import SinkscopeError, SinkscopeWarning

N = 12
IDS = torch.arange(5, 5 + N)[None]
CAUSAL = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
ZERO = ss.Ablate(layer=1, neurons=[3])
ACTING = {
    "zero": ZERO,
    "knockout": ss.Knockout("first"),
    "policy": kv.StreamingLLM(budget=8),
    "guard": ss.LoopGuard(budget=64),
}
SEVERAL = {
    "bool": {"attention_mask": CAUSAL},
    "by kind of layer": {"attention_mask": {"full_attention": CAUSAL}},
    "too short": {"attention_mask": torch.ones(1, 5)},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(7)]]), "use_cache": False},
}


@pytest.fixture
def model():
    return tiny_model("llama")[0]


@pytest.mark.parametrize("told", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("edit", ACTING.values(), ids=ACTING)
def test_what_acts_takes_a_row_for_one_text(edit, told, model):
    with torch.no_grad(), edit.on(model), refused("several texts may stand in a row.*pad the rows.*or call row by row"):
        model(IDS, **told)


def test_what_only_reads_sees_what_the_model_sees(model):
    tree, seen = CAUSAL.clone(), list[bool]()
    tree[..., 5:, :5] = False
    look = kv.Observe(lambda rows: seen.append(bool((rows.probs[..., 5:, :5] == 0).all())))
    with torch.no_grad(), look.on(model):
        model(IDS, attention_mask=tree)
    assert seen and all(seen)


def test_attention_of_ones_own_that_has_no_masks_is_left_alone():
    """The net has what reads it, which is refused."""
    tf.AttentionInterface.register("without_masks", lambda *args, **given: sdpa_attention_forward(*args, **given))
    model = tiny_model("qwen3")[0]
    model.set_attn_implementation("without_masks")
    with ZERO.on(model) as run, torch.no_grad():
        model(IDS)
    assert run.counts["ablated"]


def test_a_bare_call_of_a_model_that_another_thread_steers(model):
    def call():
        with refused("one thread steers a model at a time: call it in that thread, or enter a `with`"):
            model(IDS)
        called.append(1)

    called = list[int]()
    for _ in range(2):  # also where the call that was refused ran before
        with ZERO.on(model):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            model(IDS)
    assert len(called) == 2


def test_a_call_that_began_in_another_thread_stays_plain_to_its_end(model):
    """It goes on while this thread is in a call, too."""
    plain, found = model(IDS).logits, list[torch.Tensor]()
    there, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: found.append(model(IDS).logits))

    def wait(*_: object) -> None:
        if threading.current_thread() is other:
            there.set()
            go_on.wait(20)
        else:
            go_on.set()
            other.join(20)

    model.model.layers[0].mlp.register_forward_pre_hook(wait)
    other.start()
    there.wait(20)
    with ZERO.on(model):
        assert not torch.equal(model(IDS).logits, plain)
    assert torch.equal(found[0], plain)


def test_continuous_batching(model):
    with ZERO.on(model), refused("continuous batching puts several texts into one row"):
        model.init_continuous_batching()


def in_a_thread(work) -> list[BaseException]:
    """What a thread that this one joins, while it holds the model, ends with."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            work()
        except SinkscopeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return raised


def test_a_wait_in_a_circle_is_refused(model):
    """The thread that holds the model joins the one that waits for it, by itself or through a pool or a model."""
    other = shallow_of("llama")

    def enter(entered=model) -> None:
        with ZERO.on(entered):
            pass

    with ZERO.on(model):
        (error,) = in_a_thread(enter)
        assert "has held" in str(error) and "waits for this thread, which waits for the model" in str(error)
        with ThreadPoolExecutor(1) as pool, refused("waits for this thread"):
            pool.submit(enter).result()

    def wait_for_both() -> None:
        with ZERO.on(other):
            (error,) = in_a_thread(enter)
            raise error

    with ZERO.on(model):
        (error,) = in_a_thread(wait_for_both)
        assert "waits for this thread" in str(error)
    enter()


def test_a_wait_says_so_and_ends(model, monkeypatch):
    monkeypatch.setattr("sinkscope.engine.waiting.SILENT", 0.2)
    monkeypatch.setenv("SINKSCOPE_WAIT", "0.8")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ZERO.on(model):
            entered.set()
            leave.wait(20)

    holder = threading.Thread(target=hold, name="streams")
    holder.start()
    entered.wait(20)
    with pytest.warns(SinkscopeWarning, match=r"thread 'streams' has held .* since \d\d:\d\d:\d\d; this thread waits"):
        with refused("thread 'streams' has held .*, and this thread has waited 0.8 s for it: leave"):
            ZERO.on(model).__enter__()
    leave.set()
    holder.join()
    monkeypatch.setenv("SINKSCOPE_WAIT", "soon")
    with refused("SINKSCOPE_WAIT='soon': expected a number of seconds"):
        ZERO.on(model).__enter__()
