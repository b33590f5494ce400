"""What a decoder type has to pass to be served in full: sites, attention rows and generation as on the plain model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models.hooks import first_tensor
from sinkscope.models.target import LayerInput, Target
from sinkscope.opening.load import target_of

from .decoders import byte_tokenizer, decoder
from .site_check import check_sites, decoder_layers, eager, seen_of
from .tiny import attention_names

IDS = torch.tensor([[0, *(20 + 7 * k % 200 for k in range(80))]])
"""More tokens than every window and top-k of the tiny configurations."""
EVICTED_TO = 32
"""Tokens that stay in the cache: the first four, which are beyond every window and in another chunk, and the latest."""
OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "use_cache": True}


@dataclass
class TypeReport:
    """What was found of one type: "" where a part is served, or else why it is not; `wrong` must stay empty.

    `sites` says how many are right, and which kinds are not offered.
    """

    parts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    scope: str = ""
    sites: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """ "in full", "in part", "refused" or "wrong"."""
        if self.wrong:
            return "wrong"
        if "policies" in self.parts and not any(self.parts.values()):
            return "in full"
        return "refused" if all(self.parts.values()) else "in part"

    def attempt(self, part: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function; a refusal is noted."""
        self.parts.setdefault(part, "")
        try:
            return fn(*args, **options)
        except SinkscopeError as error:
            self.parts[part] = self.parts[part] or str(error)

    def equal(self, what: str, found: Any, expected: Any, most: float = 1e-4) -> None:
        """Note what differs from what is expected."""
        if not np.allclose(found, expected, rtol=0, atol=most, equal_nan=True):
            self.wrong.append(f"{what} is not that of the plain model")


@torch.no_grad()
def examine(model_type: str) -> TypeReport:
    """Build a type and check everything."""
    report, model, tokenizer = TypeReport(), decoder(model_type), byte_tokenizer()
    target = report.attempt("neurons", target_of, model, tokenizer)
    if target is None:
        return report
    report.scope = scope_line(target)
    before, sites = model_state(model), check_sites(model)
    report.wrong += [f"site {wrong}" for wrong in sites.wrong]
    report.sites = {"right": len(sites.right), "not offered": sorted({s.split(".", 2)[2] for s in sites.refused})}
    _check_passes(report, target)
    _check_generation(report, target)
    if not report.parts.get("policies"):
        _check_eviction(report, model)
    found = report.attempt("neurons", ss.find_sinks, model, tokenizer=tokenizer)
    if model_state(model) != before:
        report.wrong.append("the model was not left as it was")
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / model_type  # whose name a refusal says
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        again = report.attempt("folder", ss.find_sinks, folder)
    if found is not None and again is not None:
        report.equal("read from a folder, the attention to the first token", again.heads, found.heads)
    return report


def model_state(model: Any) -> list[Any]:
    """Hooks, attention and weights of a model."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    sums = [float(parameter.sum()) for parameter in model.parameters()]
    return [hooks, attention_names(model), str(model.config.to_dict()), sums]


def _check_passes(report: TypeReport, target: Target) -> None:
    """Rows equal those with which the model multiplies values; a pass from a later layer on ends as a whole one."""
    plain = eager(target.hf)
    own = seen_of(plain, decoder_layers(plain), IDS)
    sites = [f"blocks.{layer}.attn.hook_pattern" for layer in target.attending]
    rows = report.attempt("attention", ss.trace, target, IDS, sites) or {}
    for site, layer in zip(rows, target.attending, strict=False):
        shown, expected = rows[site][0].float(), own[layer].parts.get("rows")
        if expected is None:  # Falcon has no eager attention
            continue
        if any(
            name.endswith(".sinks") for name, _ in target.hf.named_parameters()
        ):  # whose share some models take off the output, not the rows
            shown, expected = shown / shown.sum(-1, keepdim=True), expected / expected.sum(-1, keepdim=True)
        report.equal(site, shown, expected)
    whole = target.forward(IDS)[0]
    for layer, seen in enumerate(own[:-1], 1) if target.skips_layers else ():
        start = LayerInput(layer, first_tensor(seen.output), isinstance(seen.output, tuple))
        ended = target.forward(IDS, start=start)[0]
        report.equal(f"a pass from layer {layer} on", ended, whole, 1e-4 * float(whole.abs().max()))


def _check_generation(report: TypeReport, target: Target) -> None:
    """`Full` gives the tokens of plain `generate`; the other policies and guards run, or are refused."""

    def generated(policy: Any) -> torch.Tensor:
        with policy.on(target):
            return target.hf.generate(IDS, **OPTIONS)

    plain = target.hf.generate(IDS, **OPTIONS)
    for policy in (ss.kv.Full(), ss.kv.H2O(32), ss.kv.StreamingLLM(32), ss.LoopGuard(budget=48), ss.LoopServe()):
        tokens = report.attempt("policies", generated, policy)
        if tokens is None:
            return
        if tokens.shape != plain.shape or (isinstance(policy, ss.kv.Full) and not torch.equal(tokens, plain)):
            report.wrong.append(f"{type(policy).__name__} gives other tokens than plain generate")


def _check_eviction(report: TypeReport, model: Any) -> None:
    """Logits after tokens left the cache are those of a plain pass in which no later query sees these tokens.

    The model has its own eager attention; the tokens that leave are in every window and chunk, and some stay beyond it.
    """
    plain = eager(model)
    for module in plain.modules():
        module.training = False
    policy = ss.kv.StreamingLLM(EVICTED_TO)
    first = 4
    with policy.on(plain):
        output = report.attempt(
            "policies", plain.generate, IDS, **OPTIONS, return_dict_in_generate=True, output_logits=True
        )
    if output is None:
        return
    length = IDS.shape[1]
    total = output.sequences.shape[1]
    hidden = torch.zeros(total, total, dtype=torch.bool)
    for query in range(length, total):
        hidden[query, first : max(first, query - (EVICTED_TO - first))] = True
    expected = logits_without(plain, output.sequences, hidden)[:, length - 1 : total - 1]
    found = torch.stack(output.logits, 1)
    report.equal("what is said after tokens left the cache", found, expected, 1e-3 * float(expected.abs().max()))


@torch.no_grad()
def logits_without(model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits of a pass without a cache, by the model's own eager attention, with cells hidden beside its own mask.

    Args:
        model: A model whose attention is eager.
        ids: Token ids `[batch pos]`.
        hidden: Which queries do not see which keys `[query key]`.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as stack:
        for file in files:
            attend = getattr(file, "eager_attention_forward", None)
            if attend is None:
                continue

            def hiding(module, query, key, value, attention_mask, *args, attend=attend, **settings):
                least = torch.finfo(query.dtype).min
                cells = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, least)
                mask = (attention_mask + cells).clamp(min=least)
                return attend(module, query, key, value, mask, *args, **settings)

            stack.enter_context(mock.patch.object(file, "eager_attention_forward", hiding))
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def scope_line(target: Target) -> str:
    """Return what is served of a model, in one line."""
    served = {
        "sink neurons and patches": target.with_neurons,
        "attention": target.attending,
        "cache policies and guards": {*cache_layers(target)} & {*target.attending},
    }
    everywhere = f"{target.n_layers} of {target.n_layers} layers"
    lines = [f"{what} in {len(layers)} of {target.n_layers} layers" for what, layers in served.items()]
    return "; ".join(lines).replace(everywhere, "all layers")
