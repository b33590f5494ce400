"""What may surround a measurement and changes no number of it: settings of torch, of the model, and other threads."""

from __future__ import annotations

import copy
import operator
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from ways.settings import Beside, Other

import sinkscope as ss

IDS = torch.tensor([[1, *range(9, 17)]])
SINK = ss.Ablate(layer=1, neurons=[338])
Surrounding = Callable[[Any], AbstractContextManager[Any]]
"""Takes a model of its own; gives what is measured."""


@contextmanager
def _set(prepare: Callable[[Any], object], model: Any) -> Iterator[Any]:
    """A model on which something is set."""
    prepare(model)
    yield model


@contextmanager
def _made(make: Callable[[Any], Any], model: Any) -> Iterator[Any]:
    """What is made of a model."""
    yield make(model)


@contextmanager
def _inside(enter: Callable[[], AbstractContextManager[Any]], model: Any) -> Iterator[Any]:
    """A model as it is, in a block of torch or of numpy."""
    with enter():
        yield model


@contextmanager
def _torch_setting(name: str, value: Any, before: Any, model: Any) -> Iterator[Any]:
    """A model as it is, under a setting of torch for the whole process."""
    getattr(torch, name)(value)
    try:
        yield model
    finally:
        getattr(torch, name)(before)


def _with_dropout(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()


def _checkpointed(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    model.train()


def _other_seeds(_model: Any) -> None:
    torch.manual_seed(99)
    np.random.seed(7)
    random.seed(5)


def _generation_settings(model: Any) -> None:
    settings = {"do_sample": True, "temperature": 3.0, "num_beams": 3, "repetition_penalty": 1.7, "max_length": 20}
    model.generation_config.update(**settings, no_repeat_ngram_size=2, use_cache=False, min_new_tokens=3)
    model.config.use_cache = False


def _reads_texts_otherwise(model: Any) -> None:
    model.tokenizer.padding_side = model.tokenizer.truncation_side = "left"
    model.tokenizer.model_max_length = 16
    model.tokenizer.backend_tokenizer.enable_truncation(5)


def _own_hooks(model: Any) -> None:
    """On all modules but the MLPs, whose neurons are refused then."""
    for name, module in model.named_modules():
        if "mlp" not in name:
            module.register_forward_hook(lambda *_: None, with_kwargs=True)
            module.register_forward_pre_hook(lambda *_: None)


def _wrapped(model: Any) -> None:
    run = model.forward
    model.forward = wraps(run)(lambda *args, **kwargs: run(*args, **kwargs))


@contextmanager
def _beside(step_of: Beside, model: Any) -> Iterator[Any]:
    """Another thread does something with the model all the while, which must go on as it does alone."""
    with Other(step_of).running(model, IDS) as wrong:
        yield model
    assert not wrong, wrong[0]


def _repeats(run: Callable[[], Any], same: Callable[[Any, Any], bool], wrong: list[str]) -> Callable[[], None]:
    """Something that must give the same each time; a bare call is refused while the measurement steers the model."""
    alone = run()

    def step() -> None:
        try:
            if not same(run(), alone):
                wrong.append("the other thread is disturbed")
        except ss.SinkscopeError as error:
            if "one thread steers a model at a time" not in str(error):
                raise
            time.sleep(0.01)

    return step


_near = partial(torch.allclose, atol=1e-4)


def _calls(model: Any, ids: torch.Tensor, wrong: list[str]) -> Callable[[], None]:
    return _repeats(lambda: model(input_ids=ids).logits, _near, wrong)


def _writes(model: Any, ids: torch.Tensor, wrong: list[str]) -> Callable[[], None]:
    return _repeats(partial(model.generate, ids, max_new_tokens=5, do_sample=False), torch.equal, wrong)


def _edits(model: Any, ids: torch.Tensor, wrong: list[str]) -> Callable[[], None]:
    def run() -> torch.Tensor:
        with SINK.on(model):
            return model(input_ids=ids).logits

    repeats = _repeats(run, _near, wrong)

    def step() -> None:
        repeats()
        time.sleep(0.1)  # in which the measurement may begin

    return step


def _measures(model: Any, _ids: torch.Tensor, wrong: list[str]) -> Callable[[], None]:
    return _repeats(lambda: ss.attack(model, length=2, n_tokens=8, sequences=2).to_dict()["result"], operator.eq, wrong)


SURROUNDINGS: dict[str, Surrounding] = {
    "a thread that calls": partial(_beside, _calls),
    "a thread that writes": partial(_beside, _writes),
    "a thread that edits": partial(_beside, _edits),
    "a thread that measures": partial(_beside, _measures),
    "dropout": partial(_set, _with_dropout),
    "gradient checkpointing": partial(_set, _checkpointed),
    "no gradients": partial(_set, lambda model: model.requires_grad_(False)),
    "eager attention": partial(_set, lambda model: model.set_attn_implementation("eager")),
    "settings of generate": partial(_set, _generation_settings),
    "settings of the tokenizer": partial(_set, _reads_texts_otherwise),
    "hooks": partial(_set, _own_hooks),
    "a wrapped forward": partial(_set, _wrapped),
    "other seeds": partial(_set, _other_seeds),
    "inference mode": partial(_inside, torch.inference_mode),
    "float64 by default": partial(_torch_setting, "set_default_dtype", torch.float64, torch.float32),
    "the meta device by default": partial(_torch_setting, "set_default_device", "meta", None),
    "deterministic algorithms": partial(_torch_setting, "use_deterministic_algorithms", True, False),
    "numpy raises": partial(_inside, partial(np.errstate, all="raise")),
    "warnings are errors": partial(_inside, partial(warnings.catch_warnings, action="error")),
    "torch.compile": partial(_made, partial(torch.compile, backend="eager")),
    "a copy": partial(_made, copy.deepcopy),
    "a pickled copy": partial(_made, lambda model: pickle.loads(pickle.dumps(model))),
}
"""What surrounds a measurement, by name; the model that each takes is changed."""


def state_of(model: Any) -> dict[str, Any]:
    """What a measurement has to leave as it was: the model, and what all of the process shares."""
    modules, parameters = {}, {}
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        modules[name] = type(module), module.training, hooks, sorted(vars(module))
    for name, one in model.named_parameters():
        parameters[name] = one.requires_grad, one.grad, one._version
    tokenizer = model.tokenizer
    return {
        "modules": modules,
        "parameters": parameters,
        "settings": (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()),
        "random numbers": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # beartype draws others
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), np.geterr()),
        "filters": len(warnings.filters),
        "tokenizer": (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length),
    }
