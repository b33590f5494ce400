"""Entering and leaving: what is refused, what stays behind (nothing), and what goes together."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from intervention_kit import bridge_of, count_hooks, nnsight_of
from kv_kit import Drawn, Ragged, decode, prompts
from kv_kit import shallow_of as model_of
from organisms.tiny import tiny_model
from refusals import refused
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

from sinkscope.errors import SinkscopeError, SinkscopeWarning, UnsupportedError
from sinkscope.interventions.base import Run
from sinkscope.kv import AShape, Full, Observe, Session, SnapKV, StreamingLLM
from sinkscope.kv.cache import COLUMNS, CacheLayer
from sinkscope.kv.loopserve import LoopServe
from sinkscope.models.wrapped import target_of
from sinkscope.trace import attention as tap

IDS, MASK = prompts([14, 9], 4)


def ignore(_):
    pass


def state_of(model) -> dict[str, Any]:
    """All that a run may have touched."""
    hf = target_of(model).hf
    return {
        "hooks": count_hooks(hf),
        "attributes": {name: sorted(vars(module)) for name, module in hf.named_modules()},
        "configs": {
            name: m.config.to_dict()
            for name, m in hf.named_modules()
            if hasattr(m, "config") and hasattr(m.config, "to_dict")
        },
        "attention": hf.config._attn_implementation,
        "generation": hf.generation_config.to_dict(),
        "weights": {name: (p.data_ptr(), p._version) for name, p in hf.named_parameters()},
        "known": dict(tap._STOCK),
        "context": (tap._HANDLERS.get(), COLUMNS.get()),
    }


def every_kind() -> list[Any]:
    model, tokenizer = model_of("llama"), tiny_model("llama")[1]
    return [model, bridge_of(model, tokenizer), nnsight_of(model, tokenizer)]


def run_it(model):
    hf = target_of(model).hf
    hf.generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, pad_token_id=3)


def test_nothing_stays():
    for model in every_kind():
        run_it(model)
        before = state_of(model)
        for way in (Full(), Drawn(budget=6), Observe(ignore), StreamingLLM(budget=6) | Observe(ignore, last=1)):
            with way.on(model):
                run_it(model)
                assert target_of(model).hf.config._attn_implementation == "sinkscope"
            assert state_of(model) == before


class Mine(Exception):  # noqa: N818 - a test's own
    pass


def _fail(*_, **__):
    raise Mine


class Failing(Drawn):
    """Fails while it scores the second layer, when something was already evicted."""

    def scores(self, at) -> Tensor:
        return _fail() if at.layer == 1 else super().scores(at)


class NeverEntered(Drawn):
    def watch(self, session: Session, key: int):
        _fail()


def _hook(path: str, when: str) -> Callable[[nn.Module], Any]:
    def add(model: nn.Module):
        module = model.get_submodule(path)
        return module.register_forward_pre_hook(_fail) if when == "pre" else module.register_forward_hook(_fail)

    return add


def _refused(model):
    model.generate(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=30), max_new_tokens=3)


@pytest.mark.parametrize(
    ("way", "hook", "call"),
    [
        (Failing(budget=6), None, run_it),
        (Drawn(budget=6) | NeverEntered(budget=6), None, run_it),
        (Drawn(budget=6) | Observe(_fail, last=1), None, run_it),
        (Drawn(budget=6), _hook("model.layers.1.mlp", "post"), run_it),
        (Drawn(budget=6), _hook("model", "post"), run_it),
        (StreamingLLM(budget=6), None, _refused),
        (StreamingLLM(budget=0.01), None, run_it),
    ],
)
def test_an_exception_leaves_everything_as_it_was(way, hook, call):
    model = model_of("llama")
    want = decode(model, IDS, MASK, 14)
    before = state_of(model)
    handle = None
    with pytest.raises((Mine, SinkscopeError)), way.on(model):
        handle = hook(model) if hook else None
        call(model)
    if handle is not None:
        handle.remove()
    assert state_of(model) == before
    assert torch.equal(decode(model, IDS, MASK, 14), want)


def test_ctrl_c_inside_a_call_too():
    """torch runs no hooks then."""
    model = model_of("llama")
    before = state_of(model)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), Drawn(budget=6).on(model):
        run_it(model)
    handle.remove()
    assert state_of(model) == before


def test_a_call_that_failed_can_be_made_again():
    model = model_of("llama")
    policy = Drawn(budget=6)
    with policy.on(model):
        want = decode(model, IDS, MASK, 14)
        handle = _hook("model.layers.1.mlp", "post")(model)
        with pytest.raises(Mine):
            decode(model, IDS, MASK, 14)
        handle.remove()
        assert tap._HANDLERS.get() == () and COLUMNS.get() is None
        assert torch.equal(decode(model, IDS, MASK, 14), want)


def test_many_runs_leak_nothing():
    model = model_of("llama")
    way = Ragged(budget=6) | Observe(ignore, last=1)

    def once():
        with way.on(model) as run:
            run_it(model)
        assert run.usage[0].calls == 4

    def counts():
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        named = (DynamicCache, CacheLayer, Session, Run, Tensor)
        return {kind.__name__: kinds[kind] for kind in named}, sum(kinds.values())

    for _ in range(5):
        once()
    counts()  # asking makes caches of its own
    before, start = state_of(model), counts()
    for _ in range(5):
        once()
    after = counts()
    assert after[0] == start[0] and after[1] - start[1] < 5 and state_of(model) == before


def test_what_cannot_be_entered():
    model = model_of("llama")
    before = state_of(model)
    falcon = tiny_model("falcon", new_decoder_architecture=False, alibi=True)[0]
    compiled = torch.compile(model_of("llama"), backend="eager")
    inner = model_of("llama")
    inner.model.layers[0].compile(backend="eager")

    def nested(first, second):
        with first.on(model), second.on(model):
            pass

    cases = [
        ("StreamingLLM and Drawn would both", lambda: (StreamingLLM(budget=9) | Drawn(budget=9)).on(model).__enter__()),
        ("already inside a `with`", lambda: nested(Full(), Drawn(budget=5))),
        ("recomputed attention differs from the model's own", lambda: Full().on(falcon).__enter__()),
        ("compiled", lambda: Drawn(budget=5).on(compiled).__enter__()),
        ("compiled", lambda: Drawn(budget=5).on(inner).__enter__()),
        ("layer 2 is not in .*: give one from 0 to 1", lambda: Observe(ignore, layers=[2]).on(model).__enter__()),
    ]
    for said, enter in cases:
        with refused(said):
            enter()
    assert state_of(model) == before


@pytest.mark.parametrize("policy", [SnapKV(budget=8, window=4), LoopServe(budget=8, first=0)])
def test_a_cache_whose_queries_were_not_seen(policy):
    model = model_of("llama")
    filled = DynamicCache()
    with torch.no_grad():
        model(IDS, attention_mask=MASK, past_key_values=filled)
        with policy.on(model):
            inside = DynamicCache()
            model(IDS, attention_mask=MASK, past_key_values=inside)
            for cache in (filled, copy.deepcopy(inside)):
                with pytest.raises(UnsupportedError, match="this cache was filled outside of the `with`, or is a copy"):
                    model(IDS[:, -1:], attention_mask=pad(MASK, (0, 1), value=1), past_key_values=cache)


def test_a_policy_that_never_acts_warns_at_the_end():
    """As under the log-likelihoods of an evaluation: each text is read at once, so nothing is ever evicted."""
    model = model_of("llama")

    def warned(policy, *calls):
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            with policy.on(model):
                for call in calls:
                    call()
        return [str(each.message) for each in caught if issubclass(each.category, SinkscopeWarning)]

    def read():
        model(input_ids=IDS, attention_mask=MASK)

    def generate():
        model.generate(IDS, attention_mask=MASK, max_new_tokens=1)

    (message,) = warned(StreamingLLM(budget=8), read, read)
    assert message.startswith("StreamingLLM never acted") and "those of the full cache" in message
    for policy, calls in (
        (StreamingLLM(budget=8), [generate]),
        (StreamingLLM(budget=8), [lambda: decode(model, IDS, MASK, 14), read]),
        (StreamingLLM(budget=8), []),
        (Full(), [read]),
        (AShape(), [read]),
    ):
        assert not warned(policy, *calls)
