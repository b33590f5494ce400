"""What a decoder type has to pass to be served in full: sites, attention rows and generation as on the plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models.hooks import first_tensor, on_output
from sinkscope.models.target import LayerInput, Target
from sinkscope.opening.live import target_of

from .decoders import byte_tokenizer, decoder
from .products import rows_of
from .site_check import check_sites
from .tiny import attention_names

IDS = torch.tensor([[0, *(20 + 7 * k % 200 for k in range(80))]])
"""More tokens than every window and top-k of the tiny configurations."""
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

    def attempt(self, part: str, fn: Callable[[], Any]) -> Any:
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

    def must(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(what)


@torch.no_grad()
def examine(model_type: str) -> TypeReport:
    """Build a type and check everything."""
    report, model, tokenizer = TypeReport(model_type), decoder(model_type), byte_tokenizer()
    target = report.attempt("neurons", lambda: target_of(model, tokenizer))
    if target is None:
        return report
    report.scope = scope_line(target)
    sites = check_sites(model)
    report.wrong += [f"site {wrong}" for wrong in sites.wrong]
    report.sites = {"right": len(sites.right), "not offered": sorted({s.split(".", 2)[2] for s in sites.refused})}
    before = model_state(model)
    _check_attention(report, target)
    _check_starts(report, target)
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


def model_state(model: Any) -> list[Any]:
    """Hooks, attention and weights of a model."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    sums = [float(parameter.sum()) for parameter in model.parameters()]
    return [hooks, attention_names(model), str(model.config.to_dict()), sums]


def _check_attention(report: TypeReport, target: Target) -> None:
    """Rows equal those that the model's own eager attention multiplies values with."""
    sites = [f"blocks.{layer}.attn.hook_pattern" for layer in target.attending]
    rows = report.attempt("attention", lambda: ss.trace(target, IDS, sites))
    if rows is None:
        return
    for site, own in zip(sites, rows_of(target.hf, [target.layers[n] for n in target.attending], IDS), strict=True):
        shown = rows[site][0].float()
        if own is None:  # Falcon has no eager attention
            continue
        if target.adapter.learned_sinks:  # whose share some models take off the output, not the rows
            shown, own = shown / shown.sum(-1, keepdim=True), own / own.sum(-1, keepdim=True)
        off = float((shown - own).abs().max())
        report.must(off < 1e-4, f"{site} is off by {off:.2g}")


def _check_starts(report: TypeReport, target: Target) -> None:
    """A pass that begins at a layer, with what entered it, ends as a whole pass."""
    starts = list[LayerInput]()

    def keep(output: Any) -> None:
        starts.append(LayerInput(len(starts) + 1, first_tensor(output).clone(), isinstance(output, tuple)))

    with target.hooks(*[(layer, "post", on_output(keep)) for layer in target.layers]):
        whole = target.forward(IDS)[0]
    for start in starts[:-1] if target.skips_layers else ():
        off = float((target.forward(IDS, start=start)[0] - whole).abs().max())
        report.must(off < 1e-4 * float(whole.abs().max()), f"a pass from layer {start.layer} on is off by {off:.2g}")


def _check_generation(report: TypeReport, target: Target) -> None:
    """`Full` gives the tokens of plain `generate`; the other policies and guards run, or are refused."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "use_cache": True}
    plain = target.hf.generate(IDS, **options)

    def under(policy: Any) -> Any:
        with policy.on(target):
            return target.hf.generate(IDS, **options)

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
    served = {
        "sink neurons and patches": len(target.with_neurons),
        "attention": len(target.attending),
        "cache policies and guards": len({*cache_layers(target)} & {*target.attending}),
    }
    sentences = list[str]()
    for what, count in served.items():
        where = "all layers" if count == target.n_layers else f"{count} of {target.n_layers} layers"
        sentences.append(f"{what} in {where}")
    return "; ".join(sentences)
