"""What each component writes into the inputs of a neuron and into the keys of a head, as exact shares.

Once the scale of each norm on the way is fixed at its value, everything from the components to these inputs is linear:
token and position embedding, each head's part of the attention output, the attention's bias, each MLP, and the biases
of norms and projections sum to the input. Every run compares this sum with the model's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from einops import einsum, rearrange, reduce, repeat
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor, on_input, on_output
from sinkscope.sinks.first_token.effects import Component
from sinkscope.trace.attention import Attention, alone, listening

MOST_HEAD_VALUES = (
    1 << 27
)  # largest number of values of all heads' outputs; beyond it, a layer's heads are one component


@dataclass(frozen=True)
class FixedNorm:
    """A norm whose scale is fixed at some positions, so that it is a linear map plus a bias at each.

    Its gain, its bias and whether it subtracts the mean are determined by probing the module itself.
    """

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    centred: bool
    inverse: Float[Tensor, "*n 1"]

    @classmethod
    def of(cls, norm: Any, x: Float[Tensor, "*n d"], y: Float[Tensor, "*n d"]) -> FixedNorm:
        """Built from positions where the module turned `x` into `y`. Module None: there is no norm, and `y` equals `x`.

        Raises:
            UnsupportedError: The module is not a norm of this form.
        """
        one = torch.ones(x.shape[-1], device=x.device)
        if norm is None:
            return cls(one, 0 * one, False, torch.ones_like(x[..., :1]))
        signs = one.clone()
        signs[1::2] = -1
        signs[1] -= signs.sum()  # never zero, with mean zero
        probes = torch.stack([0 * one, one, signs])
        for weight in norm.parameters():
            probes = probes.to(weight.dtype)
        bias, flat, swing = norm.forward(rearrange(probes, "probe d -> probe 1 d")).float()[:, 0]
        centred = torch.allclose(flat, bias, atol=1e-3)
        gain = flat - bias
        scaled = x
        if centred:
            gain = (swing - bias) / signs
            scaled = x - x.mean(-1, keepdim=True)
        scaled = gain * scaled
        along = ((y - bias) * scaled).sum(-1, keepdim=True)
        inverse = along / scaled.square().sum(-1, keepdim=True).clamp(min=1e-30)
        distance = (scaled * inverse + bias - y).abs().max()
        if bool(distance > 0.02 * y.abs().max()):
            raise UnsupportedError(f"{type(norm).__name__} is not linear at a fixed scale: nothing can be attributed")
        return cls(gain, bias, centred, inverse)

    def __call__(self, parts: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the norm to parts of `x`, without the bias."""
        if self.centred:
            parts = parts - parts.mean(-1, keepdim=True)
        return self.gain * parts * self.inverse


@dataclass(frozen=True)
class NeuronInputs:
    """Gate and up inputs of neurons, by component; sums over components are the model's own pre-activations.

    Attributes:
        sites: The neurons.
        parts: The components.
        gate: Gate input of each neuron by component. None if the MLP has no gate.
        up: Up input of each neuron by component; for an MLP without a gate, its only input.
        post: The neurons' activation as a function of gate and up.
        written: What the neurons add to the residual stream at each place.
        raw: The same before a norm behind the MLP; equal to `written` if there is no such norm.
        stream: The residual stream after the layer.
        error: Largest distance of the sums from the model's own values, relative to the largest of these values.
    """

    sites: tuple[tuple[int, ...], ...]
    parts: tuple[Component, ...]
    gate: Float[Tensor, "part place neuron"] | None
    up: Float[Tensor, "part place neuron"]
    post: Callable[[Tensor | None, Tensor], Tensor]
    written: Float[Tensor, "neuron place d_model"]
    raw: Float[Tensor, "neuron place d_model"]
    stream: Float[Tensor, "place d_model"]
    error: float

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the factors of the activation."""
        return ("input",) if self.gate is None else ("gate", "up")

    def weight_in_stream(self, places: Int[Tensor, " text"]) -> Float[Tensor, " neuron"]:
        """How much of the residual stream at these places a neuron writes when its activation is 1."""
        gate = None if self.gate is None else self.gate.sum(0)[places]
        size = self.post(gate, self.up.sum(0)[places]).mean(0)
        stream = self.stream[places].mean(0)
        along = einsum(self.written[:, places].mean(1), stream, "neuron d, d -> neuron")
        return torch.where(size.abs() > 1e-9, along / size, 0.0)

    def contrast(
        self, first: Int[Tensor, " pair"], typical: Int[Tensor, " pair"]
    ) -> Float[Tensor, "factor part neuron"]:
        """What each component adds to the activation at `first` places beyond that at `typical` ones, mean over pairs.

        The activation is a function of two factors, so the difference is split between them as in a Shapley value: by
        the mean over both orders in which they can change. The part of each factor is split between the components in
        proportion to their linear shares of its input. The sum over factors (gate, then up) and components equals the
        difference.
        """
        up = self.up.sum(0)
        up_change = up[first] - up[typical]
        up_parts = self.up[:, first] - self.up[:, typical]
        if self.gate is None:
            rise = self.post(None, up[first]) - self.post(None, up[typical])
            by_part = _slope(rise, up_change) * up_parts
            return reduce(by_part, "part pair neuron -> 1 part neuron", "mean")
        gate = self.gate.sum(0)
        gate_change = gate[first] - gate[typical]
        gate_parts = self.gate[:, first] - self.gate[:, typical]
        both = self.post(gate[first], up[first])
        neither = self.post(gate[typical], up[typical])
        gate_alone = self.post(gate[first], up[typical])
        up_alone = self.post(gate[typical], up[first])
        by_gate = (both - up_alone + gate_alone - neither) / 2
        by_up = (both - gate_alone + up_alone - neither) / 2
        parts = [_slope(by_gate, gate_change) * gate_parts, _slope(by_up, up_change) * up_parts]
        return reduce(parts, "factor part pair neuron -> factor part neuron", "mean")


def _slope(rise: Tensor, run: Tensor) -> Tensor:
    return torch.where(run.abs() > 1e-9, rise / run, 0.0)


@dataclass(frozen=True)
class KeyScores:
    """Scores of keys against the mean query of later positions, by component, before any soft cap.

    Attributes:
        parts: The components.
        scores: Score of each component; their sums are the model's scores.
        error: As in `NeuronInputs`.
    """

    parts: tuple[Component, ...]
    scores: Float[Tensor, "part place head"]
    error: float


@dataclass(frozen=True)
class Attribution:
    """The result of `attribute`, by layer."""

    inputs: dict[int, NeuronInputs]
    keys: dict[int, KeyScores]

    @property
    def errors(self) -> list[float]:
        """The error of every sum."""
        return [part.error for part in (*self.inputs.values(), *self.keys.values())]


@torch.no_grad()
def attribute(
    target: Target,
    ids: Int[Tensor, "row pos"],
    places: Int[Tensor, "place 2"],
    neurons: Sequence[tuple[int, ...]],
    keys: Sequence[int] = (),
) -> Attribution:
    """Split the inputs of neurons and the keys of layers into what each component writes into them, in one pass.

    Args:
        target: The model.
        ids: The sequences.
        places: The (row, position) places of interest.
        neurons: Each neuron as (layer, neuron) or (layer, expert, neuron).
        keys: Layers whose keys are split. Architectures that do not expose their keys (Falcon) give none.
    """
    run = _AttributionPass(target, ids, places, neurons, keys)
    last = max([*keys, *(site[0] for site in neurons)])
    hooks = [run.keep_output(target.embedding, "tokens")]
    for layer in range(last + 1):
        hooks += run.hooks(layer)
    with target.hooks(*hooks):
        target.forward(ids, upto=last)
    return Attribution(run.inputs, run.keys)


class _AttributionPass:
    """The residual stream of one pass, as a growing list of components."""

    def __init__(
        self, target: Target, ids: Tensor, places: Tensor, neurons: Sequence[tuple[int, ...]], keys: Sequence[int]
    ) -> None:
        self.target = target
        self.shape = tuple(ids.shape)
        self.places = rearrange(places, "place index -> index place").to(target.device)
        self.sites: dict[int, list[tuple[int, ...]]] = {}
        for site in neurons:
            self.sites.setdefault(site[0], []).append(tuple(site))
        self.scored: set[int] = set()
        if target.adapter.attention_interface:
            self.scored.update(keys)
        self.split = max(self.sites, default=target.n_layers - 1) + 1  # layers whose heads are separate components
        if self.split * target.n_heads * target.d_model * len(places) > MOST_HEAD_VALUES:
            self.split = 0
        self.parts: list[Component] = []
        self.values: list[Tensor] = []
        self.inputs: dict[int, NeuronInputs] = {}
        self.keys: dict[int, KeyScores] = {}
        self.layer_values: dict[str, Tensor] = {}  # of the running layer
        self.norms: list[tuple[Any, Tensor, Tensor]] = []
        self.nested = False  # True while an attention module is called again
        self.before = 0  # components before the running layer

    def at(self, tensor: Tensor) -> Float[Tensor, "place d"]:
        """At the places, float32."""
        rows = tensor.detach().reshape(*self.shape, -1)
        return rows[self.places[0], self.places[1]].float()

    def note(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the running layer."""
        if not self.nested:
            self.layer_values[name] = self.at(tensor)

    def keep_input(self, module: Any, name: str) -> tuple[Any, str, Any]:
        """A hook that keeps a module's input."""
        return module, "pre", on_input(partial(self.note, name))

    def keep_output(self, module: Any, name: str) -> tuple[Any, str, Any]:
        """A hook that keeps a module's output."""
        return module, "post", on_output(lambda out: self.note(name, first_tensor(out)))

    def hooks(self, layer: int) -> list[tuple[Any, str, Any]]:
        """Of one layer, in the order in which they must act."""
        target, adapter = self.target, self.target.adapter
        block = target.layers[layer]
        attn, mlp = target.sub(layer, adapter.attn), target.sub(layer, adapter.mlp)
        hooks: list[tuple[Any, str, Any]] = []
        if layer in self.sites:
            hooks += self.neuron_hooks(layer)
        hooks.append(self.keep_input(block, "resid"))
        hooks.append((block, "pre", lambda *_: self.begin()))
        for module in block.modules():
            if "norm" in type(module).__name__.lower():
                hooks.append((module, "post", self.keep_norm))
        hooks.append(self.keep_input(target.sub(layer, adapter.o), "z"))
        hooks.append(self.keep_output(attn, "attn"))
        hooks.append(self.keep_output(mlp, "mlp"))
        if layer in self.scored:
            hooks.append((attn, "pre", lambda _m, args, kwargs: self.split_keys(layer, args, kwargs)))
        if adapter.post_attn_norm:
            attn = target.sub(layer, adapter.post_attn_norm)
        if adapter.post_mlp_norm:
            mlp = target.sub(layer, adapter.post_mlp_norm)
        hooks.append((attn, "post", partial(self.add_attention, layer)))
        hooks.append((mlp, "post", partial(self.add_mlp, layer)))
        return hooks

    def neuron_hooks(self, layer: int) -> list[tuple[Any, str, Any]]:
        """Those that read what the sink neurons of a layer read, and how active they are."""
        target, adapter = self.target, self.target.adapter
        path = adapter.mlp
        if path == adapter.down:  # the MLP is no module of its own
            path = adapter.up or ""
        hooks = [self.keep_input(target.sub(layer, path), "y")]
        if not target.is_mixture(layer):
            hooks.append(self.keep_input(target.sub(layer, adapter.down), "post"))
            return hooks
        hooks.append((target.sub(layer, adapter.experts or ""), "post", partial(self.route, layer)))
        if adapter.shared_gate is not None:
            hooks.append(self.keep_output(target.sub(layer, adapter.shared_gate), "shared"))
        return hooks

    def keep_norm(self, module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """Keep what a norm of the residual stream read and wrote."""
        x = args[0] if args else kwargs["hidden_states"]
        rows, length = self.shape
        if not self.nested and x.numel() == rows * length * self.target.d_model:
            self.norms.append((module, self.at(x), self.at(out)))

    def begin(self) -> None:
        """A layer begins; the first one begins with the embeddings."""
        if not self.parts:
            resid = self.layer_values["resid"]
            tokens = self.layer_values.get("tokens", resid)
            self.add(Component("token embedding"), tokens)
            if self.target.adapter.absolute_positions:
                self.add(Component("position embedding"), resid - tokens)
        self.norms = []
        self.before = len(self.parts)

    def add(self, part: Component, value: Float[Tensor, "place d_model"]) -> None:
        """One more component of the residual stream; a bias of zero is none."""
        if part.kind != "attention bias" or bool(value.any()):
            self.parts.append(part)
            self.values.append(value)

    def norm_behind(self, layer: int, path: str | None, name: str, out: Tensor) -> FixedNorm:
        """The norm behind a part of the layer, if there is one."""
        module = self.target.sub(layer, path) if path else None
        return FixedNorm.of(module, self.layer_values[name], out)

    def add_attention(self, layer: int, _module: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        """The attention of a layer, head by head."""
        adapter, n_heads = self.target.adapter, self.target.n_heads
        fixed = self.norm_behind(layer, adapter.post_attn_norm, "attn", self.at(first_tensor(out)))
        project: Any = self.target.sub(layer, adapter.o)
        z = self.layer_values["z"]
        width = z.shape[1] // n_heads
        single_heads = torch.zeros(n_heads + 1, *z.shape, device=z.device)  # the last row has no head
        if layer < self.split:
            for head in range(n_heads):
                own = slice(head * width, (head + 1) * width)
                single_heads[head, :, own] = z[:, own]
        rows = project.forward(single_heads.to(self.target.dtype)).float()
        bias = rows[-1]
        if layer < self.split:
            for head in range(n_heads):
                self.add(Component("head", layer, head), fixed(rows[head] - bias))
        else:
            self.add(Component("attention", layer), fixed(self.layer_values["attn"] - bias))
        self.add(Component("attention bias", layer), fixed(bias) + fixed.bias)

    def add_mlp(self, layer: int, _module: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        """The MLP of a layer, its sink neurons apart."""
        written = self.at(first_tensor(out))
        if layer not in self.sites:
            self.add(Component("mlp", layer), written)
            return
        fixed = self.norm_behind(layer, self.target.adapter.post_mlp_norm, "mlp", written)
        inputs = self.neurons(layer, fixed, sum(self.values) + written)
        self.inputs[layer] = inputs
        by_neurons = inputs.written.sum(0)
        self.add(Component("mlp", layer), written - by_neurons)
        self.add(Component("sink neurons", layer), by_neurons)

    def reading(self, y: Tensor) -> tuple[tuple[Component, ...], Float[Tensor, "part place d_model"]]:
        """What the components, and the bias of the norm, are in what a part of the layer reads."""
        norm, x = None, y
        for module, before, after in self.norms:
            if torch.equal(after, y):
                norm, x = module, before
        fixed = FixedNorm.of(norm, x, y)
        count = len(self.parts)
        if torch.equal(x, self.layer_values["resid"]):
            count = self.before
        parts = self.parts[:count]
        values = [fixed(value) for value in self.values[:count]]
        if bool(fixed.bias.any()):
            parts.append(Component("norm bias"))
            values.append(fixed.bias.expand_as(y))
        return tuple(parts), torch.stack(values)

    def neurons(self, layer: int, fixed: FixedNorm, stream: Tensor) -> NeuronInputs:
        """The inputs of this layer's sink neurons."""
        y, sites = self.layer_values["y"], self.sites[layer]
        parts, values = self.reading(y)
        project, post = self.projection(layer, sites)
        factors: list[Tensor] = []
        error = 0.0
        for inputs, bias, true in zip(project(values), project(torch.zeros_like(y)), project(y), strict=True):
            by_part = torch.cat([inputs - bias, bias[None]])
            factors.append(by_part)
            error = max(error, _relative_error(by_part.sum(0), true))
        up = factors[-1]
        gate = factors[0] if len(factors) == 2 else None
        if self.target.is_mixture(layer):
            total_gate = None if gate is None else gate.sum(0)
            activation = post(total_gate, up.sum(0)) * self.routing_weight(sites)
            each = [self.target.w_out(layer, [site[-1]], *site[1:-1]) for site in sites]
            columns = torch.cat(each).float()
        else:
            numbers = [site[1] for site in sites]
            activation = self.layer_values["post"][:, numbers]
            columns = self.target.w_out(layer, numbers).float()
        raw = einsum(activation, columns, "place neuron, neuron d_model -> neuron place d_model")
        return NeuronInputs(
            sites=tuple(sites),
            parts=(*parts, Component("input bias")),
            gate=gate,
            up=up,
            post=post,
            written=fixed(raw),
            raw=raw,
            stream=stream,
            error=error,
        )

    def projection(self, layer: int, sites: list[tuple[int, ...]]) -> tuple[Callable[[Tensor], list[Tensor]], Any]:
        """The function from what the MLP reads to gate and up (or up alone) of the neurons, and their activation."""
        target, adapter = self.target, self.target.adapter
        if target.is_mixture(layer):
            experts = target.sub(layer, adapter.experts or "")
            return partial(self.expert_inputs, layer, sites), partial(activate, experts)
        act = _activation(target)
        numbers = torch.tensor([site[1] for site in sites])
        up_module = target.sub(layer, adapter.up or "")
        if adapter.fused_gate_up:
            maps = [_rows(target, up_module, numbers), _rows(target, up_module, numbers + target.d_mlp)]
        else:
            maps = [_rows(target, up_module, numbers)]
            if adapter.gate:
                maps.insert(0, _rows(target, target.sub(layer, adapter.gate), numbers))

        def project(y: Tensor) -> list[Tensor]:
            return [y @ weight.T + bias for weight, bias in maps]

        if len(maps) == 1:
            return project, lambda gate, up: act(up)
        return project, lambda gate, up: act(gate) * up

    def expert_inputs(self, layer: int, sites: list[tuple[int, ...]], y: Tensor) -> list[Tensor]:
        """Gate and up inputs of neurons of experts, or of the shared expert."""
        target = self.target
        experts: Any = target.sub(layer, target.adapter.experts or "")
        flat = y.flatten(0, -2)
        inputs: dict[Literal["gate", "up"], list[Tensor]] = {"gate": [], "up": []}
        for site in sites:
            if len(site) == 3:
                gate, up = gate_up(experts, site[1], flat.to(experts.gate_up_proj.dtype), [site[2]])
                inputs["gate"].append(gate.float())
                inputs["up"].append(up.float())
                continue
            for name, values in inputs.items():
                weight, bias = _rows(target, target.mlp_part(layer, name), torch.tensor([site[1]]))
                values.append(flat @ weight.T + bias)
        return [torch.cat(values, -1).view(*y.shape[:-1], -1) for values in inputs.values()]

    def route(self, layer: int, _module: Any, args: Any, kwargs: Any, _out: Any) -> None:
        """The weights of the experts that hold sink neurons; 1 for a shared expert."""
        _, chosen, weights = bind(args, kwargs)
        rows, positions = self.places
        flat = rows * self.shape[1] + positions
        each: list[Tensor] = []
        for site in self.sites[layer]:
            weight = torch.ones_like(weights[:, 0])
            if len(site) == 3:
                weight = torch.where(chosen == site[1], weights, 0).sum(-1)
            each.append(weight[flat])
        self.layer_values["routing"] = torch.stack(each, -1).float()

    def routing_weight(self, sites: list[tuple[int, ...]]) -> Float[Tensor, "place neuron"]:
        """With what weight the router uses the expert of each neuron, or the gate its shared expert."""
        weight = self.layer_values.pop("routing")
        if "shared" not in self.layer_values:
            return weight
        of_shared = torch.tensor([len(site) == 2 for site in sites], device=weight.device)
        return torch.where(of_shared, self.layer_values.pop("shared").sigmoid(), weight)

    # -- keys ------------------------------------------------------------------------------------------------------

    def split_keys(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scores of the keys at the places with the mean query of later positions, by component."""
        hidden = args[0] if args else kwargs["hidden_states"]
        y = self.at(hidden)
        parts, values = self.reading(y)
        attention = self.attend(layer, args, kwargs, hidden, None)
        queries = attention.query.float()
        last = queries.shape[2] - 1
        means: list[Tensor] = []
        for row, pos in self.places.T.tolist():
            later = queries[row, :, min(pos + 1, last) :]
            means.append(reduce(later, "head query d -> head d", "mean"))
        scaling = attention.settings.get("scaling")
        if scaling is None:
            scaling = queries.shape[-1] ** -0.5
        mean_query = scaling * torch.stack(means)
        rows = torch.cat([torch.stack([y, torch.zeros_like(y)]), values])
        keys = self.attend(layer, args, kwargs, rows, self.places[1]).key.float()
        group = self.target.n_heads // keys.shape[1]
        keys = repeat(keys, "part kv_head place d -> part (kv_head group) place d", group=group)
        scores = einsum(mean_query, keys, "place head d, part head place d -> part place head")
        whole, biases = scores[0], scores[1]
        by_part = torch.cat([scores[2:] - biases, biases[None]])
        error = _relative_error(by_part.sum(0), whole)
        self.keys[layer] = KeyScores((*parts, Component("key bias", layer)), by_part.cpu(), error)

    def attend(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor, positions: Tensor | None
    ) -> Attention:
        """Queries and keys that the attention module makes of `hidden`; at these positions, or at all."""
        module = self.target.sub(layer, self.target.adapter.attn)
        inner: Any = getattr(module, "original_component", None) or module
        kwargs = {**kwargs, "attention_mask": None, "past_key_values": None}
        hooks: list[tuple[Any, str, Any]] = []
        if positions is not None:
            rotary = kwargs.get("position_embeddings")
            if rotary is not None:
                kwargs["position_embeddings"] = tuple(part[:1, positions] for part in rotary)
            for part in inner.modules():
                if "norm" in type(part).__name__.lower() and not any(part.children()):
                    hooks.append((part, "post", _at_fixed_scale))
        calls: list[Attention] = []

        def see(call: Attention) -> None:
            calls.append(call)
            rows, heads, length, _ = call.query.shape
            nothing = call.query.new_zeros(rows, length, heads, call.value.shape[-1])
            call.compute = lambda _: (nothing, None)

        kwargs["hidden_states"] = hidden.to(self.target.dtype)
        if args:
            args = (kwargs.pop("hidden_states"), *args[1:])
        self.nested = True
        try:
            with listening(self.target, see), alone(see), self.target.hooks(*hooks):
                inner.forward(*args, **kwargs)
        finally:
            self.nested = False
        return calls[0]


def _relative_error(total: Tensor, true: Tensor) -> float:
    """Largest distance of a sum from the model's own values, relative to the largest of these."""
    return float((total - true).abs().max() / true.abs().max().clamp(min=1e-9))


def _at_fixed_scale(module: Any, args: tuple[Tensor, ...], _kwargs: object, out: Tensor) -> Tensor:
    """A norm of keys that treats every row as a part of the first one."""
    x, y = args[0].float(), out.float()
    fixed = FixedNorm.of(module, x[:1], y[:1])
    return torch.cat([y[:1], fixed(x[1:]) + fixed.bias]).to(out.dtype)


def _rows(target: Target, module: Any, which: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a projection's weight, float32, and its bias there."""
    weight = target.rows_of(module, target.d_model)[which].float()
    nothing = torch.zeros(1, target.d_model, dtype=target.dtype, device=weight.device)
    return weight, module.forward(nothing)[0, which].float()


def _activation(target: Target) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    for name in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        value = getattr(target.config, name, None)
        if value:
            return ACT2FN[value]
    raise UnsupportedError("the configuration names no activation: nothing can be attributed")
