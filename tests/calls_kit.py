"""Calls of the package on a model, for tests that keep its weights in other places or on several processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

import sinkscope as ss
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.registry import policies

IDS = torch.tensor([[1] + [4 + (7 * i * i + 3 * i) % 60 for i in range(27)]])
MEASURED: dict[str, Callable[..., Any]] = {
    "find_sinks": ss.find_sinks,
    "why_sink": ss.why_sink,
    "repeat": partial(ss.repeat, max_repeats=24),
    "probability": partial(ss.repeat, max_repeats=24, quantity="probability"),
    "attack": partial(ss.attack, length=4, n_tokens=16, sequences=4),
    "patch": partial(ss.patch, max_repeats=300, pieces=2, length=16),
    "lines": partial(ss.lines, count=2, length=48),
    "why_loop": partial(ss.why_loop, prompt=IDS[0].tolist(), max_new_tokens=60),
}


def edits(config: PreTrainedConfig) -> dict[str, Intervention]:
    """Edits of every kind: of neurons at the ends of halves of a layer, and of the sink of the model in the package."""
    width = config.intermediate_size
    sites = [(1, 0), (1, 31), (1, 32), (1, 338 % width), (2, width - 1)]
    found: dict[str, Intervention] = {
        "Ablate": ss.Ablate(sites=sites),
        "Ablate, up factor": ss.Ablate(sites=sites, site="up", value=0.5),
        "Ablate, heads": ss.Ablate(heads=[(1, 0), (1, 3), (2, 1)], value=0.5),
        "Add": ss.Add(torch.linspace(-1, 1, config.hidden_size), "blocks.1.hook_resid_post"),
        "SinkPatch": ss.SinkPatch(sites=sites),
        "LoopServe": ss.LoopServe(12),
    }
    for name, policy in policies().items():
        if policy.__module__.startswith("sinkscope."):
            found[name] = policies()[name](budget=12)
    return found


@torch.no_grad()
def under(edit: Intervention, model: Any, tokenizer: Any) -> list[Any]:
    """Logits of a prompt and of generated tokens under an edit, and what it says that it did."""
    ids = torch.cat([IDS, IDS.flip(1)])
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with edit.on(model) as run:
        prompt = model(IDS).logits
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    return [prompt, torch.stack(made.logits), [vars(event) for event in run.events], run.summary()]


def trace(model: Any, tokenizer: Any) -> Any:
    """Every site."""
    return ss.trace(model, IDS, "*")


def barcode(model: Any, tokenizer: Any) -> list[Any]:
    """Attention is in thousandths there, of which the last one may be rounded otherwise."""
    found = ss.barcode(model, ids=IDS[0].tolist() * 3, tokenizer=tokenizer)
    pictures = found.attention / 200, found.control_attention / 200
    return [found.score, found.control_score, found.shown, *pictures]


def generate(model: Any, tokenizer: Any, **settings: Any) -> list[Any]:
    """Tokens and events."""
    made = ss.generate(model, [IDS[0].tolist()], tokenizer=tokenizer, max_new_tokens=40, **settings)
    return [[one.tokens, [event.kind for event in one.events]] for one in made]


def measured(measure: Callable[..., Any], model: Any, tokenizer: Any) -> Any:
    return measure(model, tokenizer=tokenizer)


def calls(config: PreTrainedConfig) -> dict[str, Callable[[Any, Any], Any]]:
    """Each call of a model of this configuration and its tokenizer, by name."""
    found: dict[str, Callable[[Any, Any], Any]] = {"trace": trace, "barcode": barcode, "generate": generate}
    found["LoopGuard"] = partial(generate, guard=True)
    for name, measure in MEASURED.items():
        found[name] = partial(measured, measure)
    for name, edit in edits(config).items():
        found[name] = partial(under, edit)
    return found
