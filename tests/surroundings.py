"""What may surround a measurement and changes no number of it: settings of torch, of the model, and other threads."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import numpy as np
import torch

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


@contextmanager
def _errors(model: Any) -> Iterator[Any]:
    """Each warning of Python is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield model


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
    for module in model.modules():
        module.register_forward_hook(lambda *_: None, with_kwargs=True)
        module.register_forward_pre_hook(lambda *_: None)


def _wrapped(model: Any) -> None:
    run = model.forward
    model.forward = wraps(run)(lambda *args, **kwargs: run(*args, **kwargs))


@contextmanager
def _beside(step_of: Callable[[Any], Callable[[], bool]], model: Any) -> Iterator[Any]:
    """Another thread does something with the model all the while, which must go on as it does alone."""
    step, stop, wrong = step_of(model), threading.Event(), list[object]()

    def work() -> None:
        try:
            while not stop.is_set() and not wrong:
                if not step():
                    wrong.append("the other thread is disturbed")
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield model
    finally:
        stop.set()
        thread.join()
    assert not wrong, wrong


def _calls(model: Any) -> Callable[[], bool]:
    run = torch.no_grad()(lambda: model(input_ids=IDS).logits)
    alone = run()
    return lambda: torch.allclose(run(), alone, atol=1e-4)


def _writes(model: Any) -> Callable[[], bool]:
    run = partial(model.generate, IDS, max_new_tokens=5, do_sample=False)
    alone = run()
    return lambda: torch.equal(run(), alone)


def _edits(model: Any) -> Callable[[], bool]:
    @torch.no_grad()
    def run() -> torch.Tensor:
        with SINK.on(model):
            return model(input_ids=IDS).logits

    alone = run()
    return lambda: torch.allclose(run(), alone, atol=1e-4)


def _measures(model: Any) -> Callable[[], bool]:
    def run() -> Any:
        return ss.heads(model, n_tokens=2).to_dict()["result"]

    alone = run()
    return lambda: run() == alone


def _copied(copied: Callable[[Any], Any]) -> Surrounding:
    @contextmanager
    def give(model: Any) -> Iterator[Any]:
        yield copied(model)

    return give


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
    "warnings are errors": _errors,
    "torch.compile": _copied(partial(torch.compile, backend="eager")),
    "a copy": _copied(copy.deepcopy),
    "a pickled copy": _copied(lambda model: pickle.loads(pickle.dumps(model))),
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
    state = {
        "modules": modules,
        "parameters": parameters,
        "settings": (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()),
        "random numbers": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # beartype draws others
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), np.geterr()),
        "filters": len(warnings.filters),
    }
    with suppress(AttributeError):
        tokenizer = model.tokenizer
        state["tokenizer"] = tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length
    return state
