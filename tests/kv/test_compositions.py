"""Edits, a policy or a guard, padding and a batch together, drawn at random, each against a plain way to the same."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from functools import cache, reduce
from operator import or_
from typing import Any

import kv_reference as dense
import pytest
import torch
from intervention_kit import count_hooks
from kv_kit import close, prompts, run_policy, shallow_of

from sinkscope.interventions import Ablate, SinkPatch, Write
from sinkscope.interventions.steer import Add
from sinkscope.kv import H2O, TOVA, SnapKV, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard

FAMILIES = ("llama", "gemma2", "gpt_neox", "mixtral", "qwen3", "gpt2")
ACTING: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "guard": (LoopGuard(64), None),
    "streaming": (StreamingLLM(budget=12), dense.streaming_llm()),
    "h2o": (H2O(budget=12), dense.h2o()),
    "tova": (TOVA(budget=12), dense.tova()),
    "snapkv": (SnapKV(budget=14, window=8, kernel=3), dense.snapkv(8, 3)),
}
STEPS = 4
QUICK, ALL = 12, 300


@cache
def model_of(family: str) -> Any:
    model = shallow_of(family)
    model.set_attn_implementation("eager")  # so that the reference can read its attention
    model(torch.tensor([[5]]), output_attentions=True)  # transformers leaves hooks of its own
    return model


def drawn_edits(draw: random.Random, family: str) -> list[Any]:
    """Some edits, in some order."""
    sites = [(draw.randrange(2), draw.randrange(64)) for _ in range(2)]
    if family == "mixtral":
        sites = [(layer, draw.randrange(4), neuron) for layer, neuron in sites]
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    edits = [
        SinkPatch(sites=sites, value=draw.choice(["second", 0.5])),
        Ablate(sites=sites[:1], positions=draw.choice([None, "first", slice(3, None)])),
        Ablate(heads=[(draw.randrange(2), draw.randrange(4))]),
        Write(sites=sites[1:], value=2.0, position=draw.randrange(12)),
        Add(torch.randn(32, generator=generator), f"blocks.{draw.randrange(2)}.hook_resid_post"),
    ]
    return draw.sample(edits, draw.randrange(4))


def entered(parts: list[Any], model: Any) -> AbstractContextManager[Any]:
    if not parts:
        return nullcontext()
    return reduce(or_, parts).on(model)


@torch.no_grad()
def tokens(parts: list[Any], model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with entered(parts, model) as run:
        made = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert run is None or run.counts["guard"] == 0
    return made


@pytest.mark.filterwarnings("ignore:the second token's value is itself like a sink's")
@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n < QUICK else pytest.mark.slow) for n in range(ALL)])
def test_a_composition(number: int) -> None:
    draw = random.Random(number)
    family = FAMILIES[number % 6]
    acting, choose = list(ACTING.values())[(number + number // 6) % 6]
    model, edits = model_of(family), drawn_edits(draw, family)
    lengths = [draw.randrange(15, 27) for _ in range(draw.randrange(1, 4))]
    width = max(lengths)
    ids, mask = prompts(lengths, STEPS, seed=number)
    hooks = count_hooks(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    if choose is None:  # a guard that does not step in changes no token
        plain = tokens(edits, model, ids[:, :width], mask[:, :width])
        together = [*edits, acting] if acting is not None else edits
        assert torch.equal(tokens(together, model, ids[:, :width], mask[:, :width]), plain)
        for row, length in enumerate(lengths):  # nor do neighbours and padding
            alone = tokens(together, model, ids[row : row + 1, width - length : width], torch.ones(1, length).long())
            assert torch.equal(plain[row, width - length :], alone[0])
    else:  # a policy keeps what one pass over everything says, under the same edits
        together = reduce(or_, [*edits, acting])
        logits, kept = run_policy(together, model, ids, mask, (width,))
        every = None if acting.every == "prefill" else int(acting.every)
        budgets = [acting.budget] * len(lengths)
        with entered(edits, model):
            want = dense.dense_run(model, ids, width, budgets, choose, mask[:, :width], every)
        close(logits, want.logits, 2e-5)
        for step, layers in enumerate(kept):
            for ours, theirs in zip(layers, want.kept[step], strict=True):
                assert torch.equal(ours[..., : width + step], theirs)
        for row, length in enumerate(lengths):
            pad = width - length
            alone, alone_kept = run_policy(
                together, model, ids[row : row + 1, pad:], mask[row : row + 1, pad:], (length,)
            )
            close(logits[row : row + 1], alone, 2e-5)
            for ours, theirs in zip(kept, alone_kept, strict=True):
                assert all(torch.equal(a[row : row + 1, :, pad:], b) for a, b in zip(ours, theirs, strict=True))

    assert count_hooks(model) == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
