"""What a decoder type has to pass to be served in full: sites, attention rows and generation as on the plain model.

Truth is computed with hooks and generations of its own, on the plain model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of

from .decoders import byte_tokenizer, decoder
from .products import products_of
from .site_check import check_sites
from .tiny import attention_names

LENGTH = 81  # more than every window and top-k of the tiny configurations
POLICIES = {
    "h2o": lambda: ss.kv.H2O(32),
    "streaming": lambda: ss.kv.StreamingLLM(32),
    "loopguard": lambda: ss.LoopGuard(budget=48),
    "loopserve": ss.LoopServe,
}


@dataclass
class TypeReport:
    """What was found of one type: "" where a part is served, or else why it is not; `wrong` must stay empty.

    `sites` says how many are right, and which kinds are not offered.
    """

    model_type: str
    parts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    scope: str = ""
    sites: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """ "in full", "in part", "refused" or "wrong"."""
        if self.wrong:
            return "wrong"
        served = [part for part, reason in self.parts.items() if not reason]
        if len(served) == len(self.parts) and "policies" in self.parts:
            return "in full"
        return "in part" if served else "refused"

    def attempt(self, part: str, fn: Callable[[], Any]):
        """Call a function; a refusal is noted, anything else that is raised is wrong."""
        try:
            result = fn()
        except SinkscopeError as error:
            self.parts[part] = self.parts.get(part) or str(error)
            return None
        except Exception as error:  # a crash of any kind
            self.wrong.append(f"{part}: {type(error).__name__}: {error}"[:300])
            return None
        self.parts.setdefault(part, "")
        return result

    def must(self, holds: bool, what: str):
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)


@torch.no_grad()
def examine(model_type: str) -> TypeReport:
    """Build a type and check everything."""
    report = TypeReport(model_type)
    model = decoder(model_type)
    tokenizer = byte_tokenizer()
    target = report.attempt("neurons", lambda: target_of(model, tokenizer))
    if target is None:
        return report
    report.scope = scope_line(target)
    sites = check_sites(model)
    report.wrong += [f"site {wrong}" for wrong in sites.wrong]
    report.sites = {"right": len(sites.right), "not offered": sorted({s.split(".", 2)[2] for s in sites.refused})}
    before = model_state(model)
    _check_attention(report, target)
    _check_generation(report, target)
    report.must(model_state(model) == before, "the model was not left as it was")
    found = report.attempt("neurons", lambda: ss.find_sinks(model, tokenizer=tokenizer))
    with tempfile.TemporaryDirectory() as where:
        model.save_pretrained(where)
        tokenizer.save_pretrained(where)
        again = report.attempt("folder", lambda: ss.find_sinks(where))
    if found is not None and again is not None:
        off = float(np.nanmax(np.abs(found.heads - again.heads)))
        report.must(off < 1e-4, f"read from a folder, the attention to the first token is off by {off:.2g}")
    return report


def model_state(model) -> list[Any]:
    """Hooks, attention and weights of a model."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    sums = [float(parameter.sum()) for parameter in model.parameters()]
    return [hooks, attention_names(model), str(model.config.to_dict()), sums]


# -- attention and the cache ---------------------------------------------------------------------------------------


def _ids() -> Tensor:
    return torch.tensor([[0, *(20 + 7 * k % 200 for k in range(LENGTH - 1))]])


def _check_attention(report: TypeReport, target: Target):
    """Rows equal those that the model's own eager attention multiplies values with."""
    layers = target.attending
    sites = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    rows = report.attempt("attention", lambda: ss.trace(target, _ids(), sites))
    if rows is None:
        return
    multiplied = products_of(target.hf, [target.layers[layer] for layer in layers], _ids())
    for site, products in zip(sites, multiplied, strict=True):
        shown, own = rows[site][0].float(), products.rows
        if own is None:  # Falcon has no eager attention
            continue
        if target.adapter.learned_sinks:  # whose share some models take off the output, not the rows
            shown, own = shown / shown.sum(-1, keepdim=True), own / own.sum(-1, keepdim=True)
        off = float((shown - own).abs().max())
        report.must(off < 1e-4, f"{site} is off by {off:.2g}")


def _check_generation(report: TypeReport, target: Target):
    """`Full` gives the tokens of plain `generate`; the other policies and guards run, or are refused."""
    model, ids = target.hf, _ids()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "use_cache": True}
    plain = model.generate(ids, **options)

    def under(policy) -> Tensor:
        with policy.on(target):
            return model.generate(ids, **options)

    full = report.attempt("policies", lambda: under(ss.kv.Full()))
    if full is None:
        return
    report.must(torch.equal(full, plain), "Full gives other tokens than plain generate")
    for name, make in POLICIES.items():
        output = report.attempt("policies", lambda make=make: under(make()))
        if output is not None:
            report.must(output.shape == plain.shape, f"{name} gives {output.shape[1]} tokens")


def scope_line(target: Target) -> str:
    """Return what is served of a model, in one line."""
    layers = range(target.n_layers)
    policies = [layer for layer in cache_layers(target) if layer in target.attending]
    parts = {
        "sink neurons and patches": [layer for layer in layers if layer in target.with_neurons],
        "attention": target.attending,
        "cache policies and guards": policies,
    }
    sentences = list[str]()
    for what, served in parts.items():
        where = f"{len(served)} of {len(layers)} layers"
        if len(served) == len(layers):
            where = "all layers"
        sentences.append(f"{what} in {where}")
    return "; ".join(sentences)
