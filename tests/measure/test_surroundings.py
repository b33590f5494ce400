"""A measurement says the same whatever surrounds it, disturbs no other thread, and leaves everything as it was."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls_kit import calls
from same_kit import differences, plain
from transformers import AutoConfig
from ways.model_copies import bundled

import sinkscope as ss

pytestmark = [
    pytest.mark.few_texts,
    pytest.mark.filterwarnings("ignore::sinkscope.errors.SinkscopeWarning"),  # of settings that are not used
]


CONFIG = AutoConfig.from_pretrained(Path(ss.__file__).parent / "models/bundled")
CALLS = calls(CONFIG)


def trained(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    model.train()


def writes_otherwise(model: Any) -> None:
    settings = {"do_sample": True, "temperature": 3.0, "num_beams": 3, "repetition_penalty": 1.7, "max_length": 20}
    model.generation_config.update(**settings, no_repeat_ngram_size=2, use_cache=False, min_new_tokens=3)
    model.config.use_cache = False


def reads_otherwise(model: Any) -> None:
    model.tokenizer.padding_side = model.tokenizer.truncation_side = "left"
    model.tokenizer.model_max_length = 16
    model.tokenizer.backend_tokenizer.enable_truncation(5)


def hooked(model: Any) -> None:
    """On all modules but the MLPs, whose neurons are refused then."""
    for name, module in model.named_modules():
        if "mlp" not in name:
            module.register_forward_hook(lambda *_: None, with_kwargs=True)
            module.register_forward_pre_hook(lambda *_: None)


def measure(model: Any) -> Any:
    return ss.attack(model, length=2, n_tokens=8, sequences=2).to_dict()["result"]


@contextmanager
def beside_another_thread(model: Any) -> Iterator[None]:
    """Another thread measures the same model all the while, and must find what it finds alone."""
    alone, wrong, done = measure(model), list[Any](), threading.Event()

    def work() -> None:
        try:
            while not done.is_set():
                assert measure(model) == alone
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not wrong, wrong


@contextmanager
def default(name: str, value: Any, before: Any, _model: Any) -> Iterator[None]:
    """A setting of torch for the whole process."""
    getattr(torch, name)(value)
    try:
        yield
    finally:
        getattr(torch, name)(before)


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dropout and gradient checkpointing": ("attack", trained),
    "settings of generate": ("why_loop", writes_otherwise),
    "settings of the tokenizer": ("find_sinks", reads_otherwise),
    "hooks": ("LoopGuard", hooked),
    "eager attention": ("find_sinks", lambda model: model.set_attn_implementation("eager")),
    "a thread that measures": ("find_sinks", beside_another_thread),
    "inference mode": ("repeat", lambda _: torch.inference_mode()),
    "float64 by default": ("probability", partial(default, "set_default_dtype", torch.float64, torch.float32)),
    "the meta device by default": ("find_sinks", partial(default, "set_default_device", "meta", None)),
    "warnings are errors": ("why_loop", lambda _: warnings.catch_warnings(action="error")),
}
"""What surrounds a measurement: it is set on the model, or a block around the measurement."""


def state_of(model: Any) -> dict[str, Any]:
    """What a measurement has to leave as it was: the model, and what all of the process shares."""
    hooks = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    tokenizer = model.tokenizer
    return {
        "modules": hooks,
        "parameters": [(one.requires_grad, one.grad, one._version) for one in model.parameters()],
        "settings": (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()),
        "random numbers": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # beartype draws others
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        "tokenizer": (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length),
    }


@cache
def alone(name: str) -> Any:
    """What a measurement says of a model that nothing surrounds."""
    model = bundled()
    return plain(CALLS[name](model, model.tokenizer))


@pytest.mark.parametrize("surrounding", CASES)
def test_a_measurement_says_the_same_whatever_surrounds_it(surrounding):
    name, surround = CASES[surrounding]
    wanted, model = alone(name), bundled()
    with surround(model) or nullcontext():
        before = state_of(model)
        found = plain(CALLS[name](model, model.tokenizer))
        after = state_of(model)
    assert differences(wanted, found, 2e-3) == []
    for what in before:
        assert "thread" in surrounding or before[what] == after[what], what
