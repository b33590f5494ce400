"""What a decoder type has to pass to be served in full: a planted sink neuron is found, and every number is checked.

Truth is computed with hooks and generations of its own, on the plain model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models.hooks import first_tensor
from sinkscope.models.neurons import column_factor
from sinkscope.models.target import Target
from sinkscope.models.weights import is_transposed
from sinkscope.opening.live import target_of
from sinkscope.opening.places import begins_at
from sinkscope.sinks.spikes.records import neuron_of

from .decoders import byte_tokenizer, decoder
from .products import products_of
from .site_check import check_sites
from .tiny import attention_names

NEURON = 7
LENGTH = 81  # more than every window and top-k of the tiny configurations
NOT_PLANTED = ("git",)  # its layers end with a norm of the residual stream: no neuron makes that of a token stand out
PLANTED = (12, 72)  # texts and tokens by which a neuron is planted: as long as those in which it is then looked for
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
    """Build a type, plant a neuron and check everything."""
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
    for layer in range(1, target.n_layers):
        if target.skips_layers:
            report.must(begins_at(target, layer, target.n_layers - 1), f"a pass from layer {layer} on ends otherwise")
    _check_generation(report, target)
    report.must(model_state(model) == before, "the model was not left as it was")
    if model_type in NOT_PLANTED:
        return report
    planted = _plant(target)
    found = report.attempt("neurons", lambda: ss.find_sinks(model, tokenizer=tokenizer))
    if found is not None:
        _check_neurons(report, target, planted, found)
    _check_folder(report, model, tokenizer, planted)
    return report


def _check_folder(report: TypeReport, model, tokenizer, planted: Planted):
    with tempfile.TemporaryDirectory() as where:
        model.save_pretrained(where)
        tokenizer.save_pretrained(where)
        found = report.attempt("folder", lambda: ss.find_sinks(where))
    if found is not None:
        first = next(
            (neuron_of(next(iter(one.table("writers")))).site for one in found.spikes if one.table("writers")), None
        )
        report.must(first == planted.site, f"by folder, the first neuron is {first}, planted is {planted.site}")


def model_state(model) -> list[Any]:
    """Hooks, attention and weights of a model."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    sums = [float(parameter.sum()) for parameter in model.parameters()]
    return [hooks, attention_names(model), str(model.config.to_dict()), sums]


# -- neurons -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A neuron that fires at the first token alone and writes much; `site` as in results."""

    layer: int
    expert: int | None
    module: Any  # whose input holds the neuron, or the fused experts
    column: Tensor  # what it writes, a view of the weight

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron)."""
        if self.expert is None:
            return self.layer, NEURON
        return self.layer, self.expert, NEURON


def _reading(inputs: Tensor, high: float, low: float) -> Tensor:
    """A weight row that gives `high` at the first token and `low` elsewhere."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    wanted = torch.full((len(rows),), low)
    wanted.view(inputs.shape[0], inputs.shape[1])[:, 0] = high
    return torch.linalg.solve(rows.T @ rows + 1e-3 * torch.eye(rows.shape[1]), rows.T @ wanted)


def _plant(target: Target) -> Planted:
    """Plant a neuron in the first layer after the bottom one that has neurons."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 250, PLANTED, generator=generator)
    ids[:, 0] = 0
    layer = next(number for number in [*range(1, target.n_layers), 0] if number in target.with_neurons)
    is_mixture = layer in target.mixtures
    seen = {}

    def keep(_module, args, kwargs):
        seen["in"], seen["kwargs"] = (*args, *kwargs.values())[0], kwargs
        seen["args"] = args

    def keep_out(_module, _args, _kwargs, output):
        seen["out"] = first_tensor(output)

    first = target.sub(layer, "mlp")
    if is_mixture:
        first = target.sub(layer, "experts")
    elif target.adapter.up is not None:
        first = target.sub(layer, "up")
    with target.hooks((first, "pre", keep), (target.layers[layer], "post", keep_out)):
        target.forward(ids)
    inputs = seen["in"].reshape(*PLANTED, -1)
    typical = float(seen["out"].norm(dim=-1).mean())
    written = torch.randn(target.d_model, generator=generator)
    written *= typical / written.norm()
    if is_mixture:
        expert = int(target.experts(layer).routed(seen["args"], seen["kwargs"]).weight[0].argmax())
        module, views = first, expert_views(first, expert)
        written *= 2
    else:
        expert, module, views = None, target.sub(layer, "down"), _dense_views(target, layer)
    for rows in views.inputs:
        rows[NEURON] = _reading(inputs, 6.0, 0.0 if len(views.inputs) > 1 else -1.0)
    for bias in views.biases:
        bias[NEURON] = 0
    _write(target, layer, views.down, written, expert)
    return Planted(layer, expert, module, views.down[NEURON])


@dataclass(frozen=True)
class NeuronViews:
    """Views into the weights of an MLP or an expert: rows of its input projections with their biases, and columns."""

    inputs: list[Tensor]
    biases: list[Tensor]
    down: Tensor


def expert_views(module, expert: int) -> NeuronViews:
    """The weights of an expert, as the forward function of each family reads them."""
    bias = []
    if not hasattr(module, "down_proj"):  # Llama 4
        rows, down = module.experts.gate_up_proj[expert].T, module.experts.down_proj[expert]
    elif not hasattr(module, "gate_up_proj"):  # Nemotron-H
        return NeuronViews([module.up_proj[expert]], [], module.down_proj[expert].T)
    else:
        rows, down = module.gate_up_proj[expert], module.down_proj[expert].T
        if getattr(module, "is_transposed", False):
            rows, down = rows.T, down.T
        if getattr(module, "has_bias", False):
            bias = [module.gate_up_proj_bias[expert]]
    halves = [[whole[::2], whole[1::2]] for whole in (rows, *bias)]
    if getattr(module, "is_concatenated", True):
        halves = [list(whole.chunk(2)) for whole in (rows, *bias)]
    return NeuronViews(halves[0], [half for pair in halves[1:] for half in pair], down)


def _dense_views(target: Target, layer: int) -> NeuronViews:
    adapter = target.adapter
    names, count = ["up"], 1
    if adapter.fused_gate_up:
        count = 2
    elif "gate" in target.paths[layer] or adapter.up is None:
        names.append("gate")
    inputs, biases = [], []
    for name in names:
        if adapter.up is None:  # a norm stands after the product, and the row names neither factor
            module = target.sub(layer, "mlp").get_submodule(f"{name}_proj")
        else:
            module = target.sub(layer, name)
        inputs += (module.weight.T if is_transposed(module) else module.weight).chunk(count)
        if getattr(module, "bias", None) is not None:
            biases += module.bias.chunk(count)
    down = target.sub(layer, "down")
    return NeuronViews(inputs, biases, down.weight if is_transposed(down) else down.weight.T)


def _write(target: Target, layer: int, down: Tensor, written: Tensor, expert: int | None):
    """Set what the neuron writes; after a norm, one dimension that it lets through and no other neuron writes."""
    if "post_mlp_norm" not in target.paths[layer]:
        down[NEURON] = written * 4 / column_factor(target, layer, expert)
        return
    down[:, 5] = 0
    for other in range(target.n_experts(layer)):
        expert_views(target.sub(layer, "experts"), other).down[:, 5] = 0
    if layer in target.mixtures and "down" in target.paths[layer]:
        shared = target.sub(layer, "down")
        shared.weight[5] = 0
    down[NEURON] = 0
    down[NEURON, 5] = 1
    target.sub(layer, "post_mlp_norm").weight[5] = 50


def _check_neurons(report: TypeReport, target: Target, planted: Planted, found):
    """What is found is what was planted, writes the spike, and is needed."""
    spike = next((one for one in found.spikes if one.table("writers")), None)
    row = None if spike is None else next(iter(spike.table("writers").values()))
    first = None if row is None else neuron_of(row.name)
    report.must(first is not None and first.site == planted.site, f"the first neuron is {first}, planted is {planted}")
    if spike is None or row is None or first is None or first.site != planted.site:
        return
    report.must(row.get("share") > 0.5, f"it writes {row.get('share'):.2f} of the spike")
    report.must(first in spike.needed_neurons, "it is not called needed")


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
