"""What the engine refuses, in one line: rows of several texts, attention of one's own, calls of another thread."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers as tf
from organisms import tiny_model
from refusals import refused
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import sinkscope as ss
from sinkscope import kv
from sinkscope.errors import SinkscopeError

N = 12
IDS = torch.arange(5, 5 + N)[None]
CAUSAL = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
ACTING = {
    "zero": ss.Ablate(layer=1, neurons=[3]),
    "knockout": ss.Knockout("first"),
    "policy": kv.StreamingLLM(budget=8),
    "guard": ss.LoopGuard(budget=64),
}
SEVERAL = {
    "bool": {"attention_mask": CAUSAL},
    "additive": {"attention_mask": torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)},
    "by kind of layer": {"attention_mask": {"full_attention": CAUSAL}},
    "too short": {"attention_mask": torch.ones(1, 5)},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(7)]]), "use_cache": False},
}


@pytest.mark.parametrize("told", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("edit", ACTING.values(), ids=ACTING)
def test_what_acts_takes_a_row_for_one_text(edit, told):
    model = tiny_model("llama")[0]
    with torch.no_grad(), edit.on(model), refused("several texts may stand in a row.*pad the rows.*or call row by row"):
        model(IDS, **told)


def test_what_only_reads_sees_what_the_model_sees():
    model = tiny_model("llama")[0]
    tree = CAUSAL.clone()
    tree[..., 5:, :5] = False
    seen: list[torch.Tensor] = []
    with torch.no_grad(), kv.Observe(lambda rows: seen.append(rows.probs)).on(model):
        model(IDS, attention_mask=tree)
    assert seen and all(bool((rows[..., 5:, :5] == 0).all()) for rows in seen)


@pytest.mark.parametrize("padding", [0, 3])
def test_generation_into_a_cache_of_fixed_size_says_which_tokens_are_real(padding):
    """It hands the model masks of queries and keys, which it made of those of tokens."""
    model = tiny_model("llama")[0]
    ids, mask = IDS.repeat(2, 1), torch.ones(2, N, dtype=torch.long)
    mask[1, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    edit = ss.Ablate(layer=1, neurons=[3], value=9.0, positions=[0, N - 3])
    found = []
    for kind in ("static", None):
        with edit.on(model) as run:
            written = model.generate(ids, cache_implementation=kind, **options)
        found.append((written.tolist(), run.counts["ablated"]))
    assert found[0] == found[1] and found[0][1] == 4


def own(*args, **kwargs):
    """Attention of a user's own."""
    return sdpa_attention_forward(*args, **kwargs)


@pytest.mark.parametrize(("name", "family"), [("refused_own", "llama"), ("refused_without_masks", "qwen3")])
def test_attention_of_ones_own_is_left_alone(name, family):
    """The second one is met when the model is opened."""
    tf.AttentionInterface.register(name, own)
    if name == "refused_own":
        tf.AttentionMaskInterface.register(name, sdpa_mask)
    model = tiny_model(family)[0]
    model.set_attn_implementation(name)
    for edit in (kv.Full(), ss.Knockout("first"), kv.Observe(print), ss.LoopServe(budget=8)):
        with refused(f"attention is a function of your own, registered as '{name}'.*attn_implementation='sdpa'"):
            edit.on(model).__enter__()
    with ss.Ablate(layer=1, neurons=[3]).on(model) as run, torch.no_grad():  # which does not read it
        model(IDS)
    assert run.counts["ablated"]


def test_a_bare_call_of_a_model_that_another_thread_steers():
    model, found = tiny_model("llama")[0], []

    def call():
        try:
            model(IDS)
        except SinkscopeError as error:
            found.append(str(error))

    for _ in range(2):  # also where the call that was refused ran before
        with ACTING["zero"].on(model):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            model(IDS)
    assert len(found) == 2
    assert "one thread steers a model at a time: call it in that thread, or enter a `with`" in found[0]


def test_a_call_that_began_in_another_thread_stays_plain_to_its_end():
    """It goes on while this thread is in a call, too."""
    model, found = tiny_model("llama")[0], list[torch.Tensor]()
    plain = model(IDS).logits
    there, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: found.append(model(IDS).logits))

    def wait(*_: object) -> None:
        if threading.current_thread() is other:
            there.set()
            go_on.wait(20)

    def let_go(*_: object) -> None:
        if threading.current_thread() is not other:
            go_on.set()
            other.join(20)

    model.model.layers[0].register_forward_pre_hook(wait)
    other.start()
    there.wait(20)
    with ACTING["zero"].on(model), model.model.layers[0].mlp.register_forward_pre_hook(let_go):
        assert not torch.equal(model(IDS).logits, plain)
    assert torch.equal(found[0], plain)


def test_guidance_under_a_guard():
    model = tiny_model("llama")[0]
    options = {"max_new_tokens": 4, "guidance_scale": 1.5, "negative_prompt_ids": IDS[:, :3], "pad_token_id": 0}
    with ACTING["guard"].on(model), refused("guidance_scale=1.5: the model reads a second text.*or without the guard"):
        model.generate(IDS, **options)


def test_continuous_batching():
    model = tiny_model("llama")[0]
    with ACTING["zero"].on(model), refused("continuous batching puts several texts into one row"):
        model.init_continuous_batching()
