"""What each component writes into the inputs of a neuron and into the keys of a head, as exact shares.

Once the scale of each norm on the way is fixed at its value, everything from the components to these inputs is linear:
token and position embedding, each head's part of the attention output, the attention's bias, each MLP, and the biases
of norms and projections sum to the input. Every run compares this sum with the model's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, repeat
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
MOST_KEY_VALUES = 1 << 24  # largest number of values in one call of an attention module


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
        one = torch.ones(1, x.shape[-1], device=x.device)
        if norm is None:
            return cls(one[0], 0 * one[0], False, torch.ones_like(x[..., :1]))
        dtype = next((p.dtype for p in norm.parameters()), x.dtype)
        signs = one.clone()
        signs[:, 1::2] = -1
        signs[:, 1] -= signs.sum()  # never zero, with mean zero
        bias, flat, swing = norm.forward(torch.stack([0 * one, one, signs]).to(dtype)).float()[:, 0]
        centred = torch.allclose(flat, bias, atol=1e-3)
        gain = (swing - bias) / signs[0] if centred else flat - bias
        raw = gain * (x - x.mean(-1, keepdim=True) if centred else x)
        inverse = ((y - bias) * raw).sum(-1, keepdim=True) / raw.square().sum(-1, keepdim=True).clamp(min=1e-30)
        if float((raw * inverse + bias - y).abs().max()) > 0.02 * float(y.abs().max()):
            raise UnsupportedError(f"{type(norm).__name__} is not linear at a fixed scale: nothing can be attributed")
        return cls(gain, bias, centred, inverse)

    def __call__(self, parts: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Apply the norm to parts of `x`, without the bias."""
        return self.gain * (parts - parts.mean(-1, keepdim=True) if self.centred else parts) * self.inverse


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
        u1, u0 = self.up.sum(0)[first], self.up.sum(0)[typical]
        to_up = self.up[:, first] - self.up[:, typical]
        if self.gate is None:
            return (_slope(self.post(None, u1) - self.post(None, u0), u1 - u0) * to_up).mean(1)[None]
        g1, g0 = self.gate.sum(0)[first], self.gate.sum(0)[typical]
        to_gate = self.gate[:, first] - self.gate[:, typical]
        both, neither, gate, up = self.post(g1, u1), self.post(g0, u0), self.post(g1, u0), self.post(g0, u1)
        by_gate, by_up = (both - up + gate - neither) / 2, (both - gate + up - neither) / 2
        return torch.stack([(_slope(by_gate, g1 - g0) * to_gate).mean(1), (_slope(by_up, u1 - u0) * to_up).mean(1)])


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
    embedded = (target.embedding, "post", run.keep("tokens", "post"))
    with target.hooks(embedded, *(hook for i in range(last + 1) for hook in run.hooks(i))):
        target.forward(ids, upto=last)
    return Attribution(run.inputs, run.keys)


class _AttributionPass:
    """The residual stream of one pass, as a growing list of components."""

    def __init__(
        self, target: Target, ids: Tensor, places: Tensor, neurons: Sequence[tuple[int, ...]], keys: Sequence[int]
    ) -> None:
        self.target, self.shape, self.places = target, tuple(ids.shape), places.T.to(target.device)
        self.sites: dict[int, list[tuple[int, ...]]] = {}
        for site in neurons:
            self.sites.setdefault(site[0], []).append(tuple(site))
        self.scored = set(keys) if target.adapter.attention_interface else set[int]()
        split = max(self.sites, default=target.n_layers - 1) + 1  # layers whose heads are separate components
        self.split = split if split * target.n_heads * target.d_model * len(places) <= MOST_HEAD_VALUES else 0
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
        return tensor.detach().reshape(*self.shape, -1)[self.places[0], self.places[1]].float()

    def keep(self, name: str, when: str = "pre") -> Any:
        """A hook that keeps a module's input or output."""

        def pre(read: Tensor) -> None:
            if not self.nested:
                self.layer_values[name] = self.at(read)

        def post(out: Any) -> None:
            self.layer_values[name] = self.at(first_tensor(out))

        return on_input(pre) if when == "pre" else on_output(post)

    def hooks(self, layer: int) -> list[tuple[Any, str, Any]]:
        """Of one layer, in the order in which they must act."""
        t, a = self.target, self.target.adapter
        attn, mlp = t.sub(layer, a.attn), t.sub(layer, a.mlp)

        def normed(module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            if not self.nested and x.numel() == self.shape[0] * self.shape[1] * t.d_model:
                self.norms.append((module, self.at(x), self.at(out)))

        hooks: list[tuple[Any, str, Any]] = [
            (t.layers[layer], "pre", self.keep("resid")),
            (t.layers[layer], "pre", lambda *_: self.begin()),
            *((m, "post", normed) for m in t.layers[layer].modules() if "norm" in type(m).__name__.lower()),
            (t.sub(layer, a.o), "pre", self.keep("z")),
            (attn, "post", self.keep("attn", "post")),
            (mlp, "post", self.keep("mlp", "post")),
        ]
        after = [
            t.sub(layer, path) if path else own for path, own in ((a.post_attn_norm, attn), (a.post_mlp_norm, mlp))
        ]
        hooks.append((after[0], "post", lambda _m, _a, _k, out: self.add_attention(layer, first_tensor(out))))
        hooks.append((after[1], "post", lambda _m, _a, _k, out: self.add_mlp(layer, first_tensor(out))))
        if layer in self.scored:
            hooks.append((attn, "pre", lambda _m, args, kwargs: self.split_keys(layer, args, kwargs)))
        if layer in self.sites:
            hooks.insert(0, (t.sub(layer, a.up or "") if a.mlp == a.down else mlp, "pre", self.keep("y")))
            if t.is_mixture(layer):
                hooks.insert(0, (t.sub(layer, a.experts or ""), "post", lambda _m, *call: self.route(layer, *call[:2])))
                if a.shared_gate is not None:
                    hooks.insert(0, (t.sub(layer, a.shared_gate), "post", self.keep("shared", "post")))
            else:
                hooks.insert(0, (t.sub(layer, a.down), "pre", self.keep("post")))
        return hooks

    def begin(self) -> None:
        """A layer begins; the first one begins with the embeddings."""
        if not self.parts:
            tokens = self.layer_values.get("tokens", self.layer_values["resid"])
            self.add(Component("token embedding"), tokens)
            if self.target.adapter.absolute_positions:
                self.add(Component("position embedding"), self.layer_values["resid"] - tokens)
        self.norms, self.before = [], len(self.parts)

    def add(self, part: Component, value: Float[Tensor, "place d_model"]) -> None:
        """One more component of the residual stream; a bias of zero is none."""
        if part.kind != "attention bias" or bool(value.any()):
            self.parts.append(part)
            self.values.append(value)

    def add_attention(self, layer: int, added: Tensor) -> None:
        """The attention of a layer, head by head."""
        a, out = self.target.adapter, self.at(added)
        after = self.target.sub(layer, a.post_attn_norm) if a.post_attn_norm else None
        fixed = FixedNorm.of(after, self.layer_values["attn"], out)
        module: Any = self.target.sub(layer, a.o)
        heads, z = self.target.n_heads, self.layer_values["z"]
        alone = torch.zeros(heads + 1, *z.shape, device=z.device)
        for head in range(heads) if layer < self.split else []:
            part = slice(head * z.shape[1] // heads, (head + 1) * z.shape[1] // heads)
            alone[head, :, part] = z[:, part]
        rows = module.forward(alone.to(self.target.dtype)).float()
        if layer < self.split:
            for head in range(heads):
                self.add(Component("head", layer, head), fixed(rows[head] - rows[-1]))
        else:
            self.add(Component("attention", layer), fixed(self.layer_values["attn"] - rows[-1]))
        self.add(Component("attention bias", layer), fixed(rows[-1]) + fixed.bias)

    def add_mlp(self, layer: int, added: Tensor) -> None:
        """The MLP of a layer, its sink neurons apart."""
        a, out = self.target.adapter, self.at(added)
        if layer not in self.sites:
            return self.add(Component("mlp", layer), out)
        after = self.target.sub(layer, a.post_mlp_norm) if a.post_mlp_norm else None
        fixed = FixedNorm.of(after, self.layer_values["mlp"], out)
        inputs = self.neurons(layer, fixed, sum(self.values) + out)
        self.inputs[layer] = inputs
        self.add(Component("mlp", layer), out - inputs.written.sum(0))
        self.add(Component("sink neurons", layer), inputs.written.sum(0))

    def reading(self, y: Tensor) -> tuple[tuple[Component, ...], Float[Tensor, "part place d_model"]]:
        """What the components, and the bias of the norm, are in what a part of the layer reads."""
        norm, x, _ = next((n for n in reversed(self.norms) if torch.equal(n[2], y)), (None, y, y))
        fixed = FixedNorm.of(norm, x, y)
        count = self.before if torch.equal(x, self.layer_values["resid"]) else len(self.parts)
        parts, values = list(self.parts[:count]), [fixed(value) for value in self.values[:count]]
        if bool(fixed.bias.any()):
            parts.append(Component("norm bias"))
            values.append(fixed.bias.expand_as(y))
        return tuple(parts), torch.stack(values)

    def neurons(self, layer: int, fixed: FixedNorm, stream: Tensor) -> NeuronInputs:
        """The inputs of this layer's sink neurons."""
        y, sites = self.layer_values["y"], self.sites[layer]
        parts, values = self.reading(y)
        project, post = self.projection(layer, sites)
        zero, actual = project(torch.zeros_like(y[:1])), project(y)
        split = [p - z for p, z in zip(project(values), zero, strict=True)]
        error = 0.0
        for i, (inputs, bias, true) in enumerate(zip(split, zero, actual, strict=True)):
            split[i] = torch.cat([inputs, bias[None].expand(1, *inputs.shape[1:])])
            error = max(error, float((split[i].sum(0) - true).abs().max() / true.abs().max().clamp(min=1e-9)))
        gate, up = split if len(split) == 2 else (None, split[0])
        if "routing" in self.layer_values:
            weight = self.layer_values.pop("routing")
            if "shared" in self.layer_values:
                of_shared = torch.tensor([len(site) == 2 for site in sites], device=weight.device)
                weight = torch.where(of_shared, self.layer_values.pop("shared").sigmoid(), weight)
            size = post(gate.sum(0) if gate is not None else None, up.sum(0)) * weight
            cols = torch.cat([self.target.w_out(layer, [site[-1]], *site[1:-1]) for site in sites]).float()
        else:
            size = self.layer_values["post"][:, [site[1] for site in sites]]
            cols = self.target.w_out(layer, [site[1] for site in sites]).float()
        raw = size.T[:, :, None] * cols[:, None]
        return NeuronInputs(
            tuple(sites), (*parts, Component("input bias")), gate, up, post, fixed(raw), raw, stream, error
        )

    def projection(self, layer: int, sites: list[tuple[int, ...]]) -> tuple[Callable[[Tensor], list[Tensor]], Any]:
        """The function from what the MLP reads to gate and up (or up alone) of the neurons, and their activation."""
        t, a = self.target, self.target.adapter
        if t.is_mixture(layer):
            experts: Any = t.sub(layer, a.experts or "")

            def of_one(site: tuple[int, ...], y: Tensor) -> Sequence[Tensor]:
                if len(site) == 3:
                    return gate_up(experts, site[1], y.to(experts.gate_up_proj.dtype), [site[2]])
                which = torch.tensor([site[1]])
                parts = [_rows(t, t.mlp_part(layer, n), which) for n in ("gate", "up")]
                return [y @ weight.T + bias for weight, bias in parts]

            def of_experts(y: Tensor) -> list[Tensor]:
                each = [of_one(site, y.flatten(0, -2)) for site in sites]
                return [torch.cat([one[i].float() for one in each], -1).view(*y.shape[:-1], -1) for i in (0, 1)]

            return of_experts, lambda gate, up: activate(experts, gate, up)
        order = torch.tensor([site[1] for site in sites])
        if a.fused_gate_up:
            wanted = [(a.up, order), (a.up, order + t.d_mlp)]
        else:
            wanted = [(path, order) for path in (a.gate, a.up) if path]
        maps = [_rows(t, t.sub(layer, path or ""), which) for path, which in wanted]
        act = _activation(t)
        post = (lambda gate, up: act(up)) if len(maps) == 1 else (lambda gate, up: act(gate) * up)
        return lambda y: [y @ weight.T + bias for weight, bias in maps], post

    def route(self, layer: int, args: Any, kwargs: Any) -> None:
        """The weights of the experts that hold sink neurons; 1 for a shared expert."""
        _, chosen, weights = bind(args, kwargs)
        flat = self.places[0] * self.shape[1] + self.places[1]
        ones = torch.ones_like(weights[:, 0])
        each = [
            torch.where(chosen == site[1], weights, 0).sum(-1)[flat] if len(site) == 3 else ones[flat]
            for site in self.sites[layer]
        ]
        self.layer_values["routing"] = torch.stack(each, -1).float()

    # -- keys ------------------------------------------------------------------------------------------------------

    def split_keys(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scores of the keys at the places with the mean query of later positions, by component."""
        hidden = args[0] if args else kwargs["hidden_states"]
        parts, values = self.reading(self.at(hidden))
        call = self.attend(layer, args, kwargs, hidden, None)
        queries = call.query.float()
        mean = torch.stack([queries[r, :, min(p + 1, self.shape[1] - 1) :].mean(1) for r, p in self.places.T.tolist()])
        scaling = call.settings.get("scaling")
        mean *= mean.shape[-1] ** -0.5 if scaling is None else scaling
        y = self.at(hidden)
        rows = torch.cat([torch.zeros_like(y)[None], values])
        step, parts_scored = max(1, MOST_KEY_VALUES // y.numel()), list[Tensor]()
        for some in rows.split(step):
            keys = self.attend(layer, args, kwargs, torch.cat([y[None], some]), self.places[1]).key.float()
            group = self.target.n_heads // keys.shape[1]
            grouped = repeat(keys, "part kv_head place d -> part (kv_head group) place d", group=group)
            products = einsum(mean, grouped, "place head d, part head place d -> part place head")
            parts_scored.append(products[len(parts_scored) > 0 :])
        scores = torch.cat(parts_scored)  # of the whole, of nothing (the biases alone), of each component
        each = torch.cat([scores[2:] - scores[1], scores[1:2]])
        error = float((each.sum(0) - scores[0]).abs().max() / scores[0].abs().max().clamp(min=1e-9))
        self.keys[layer] = KeyScores((*parts, Component("key bias", layer)), each.cpu(), error)

    def attend(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor, positions: Tensor | None
    ) -> Attention:
        """Queries and keys that the attention module makes of `hidden`; at these positions, or at all."""
        module = self.target.sub(layer, self.target.adapter.attn)
        inner: Any = getattr(module, "original_component", None) or module
        hidden = hidden.to(self.target.dtype)
        kwargs = {**kwargs, "attention_mask": None, "past_key_values": None}
        if positions is not None and kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = tuple(t[:1, positions] for t in kwargs["position_embeddings"])
        caught: list[Attention] = []

        def see(call: Attention) -> None:
            caught.append(call)
            shape = (call.query.shape[0], call.query.shape[2], call.query.shape[1], call.value.shape[-1])
            nothing = call.query.new_zeros(shape)
            call.compute = lambda _: (nothing, None)

        norms = [m for m in inner.modules() if "norm" in type(m).__name__.lower() and not any(m.children())]
        hooks = [] if positions is None else [(m, "post", _at_fixed_scale) for m in norms]
        self.nested = True
        try:
            with listening(self.target, see), alone(see), self.target.hooks(*hooks):
                if args:
                    inner.forward(hidden, *args[1:], **kwargs)
                else:
                    inner.forward(**{**kwargs, "hidden_states": hidden})
        finally:
            self.nested = False
        return caught[0]


def _at_fixed_scale(module: Any, args: tuple[Tensor, ...], _kwargs: object, out: Tensor) -> Tensor:
    """A norm of keys that treats every row as a part of the first one."""
    x, y = args[0].float(), out.float()
    fixed = FixedNorm.of(module, x[:1], y[:1])
    return torch.cat([y[:1], fixed(x[1:]) + fixed.bias]).to(out.dtype)


def _rows(target: Target, module: Any, which: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a projection's weight, float32, and its bias there."""
    device = next((p.device for p in module.parameters()), target.device)
    nothing = torch.zeros(1, target.d_model, dtype=target.dtype, device=device)
    return target.rows_of(module, target.d_model)[which].float(), module.forward(nothing)[0, which].float()


def _activation(target: Target) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    return ACT2FN[next(getattr(target.config, name) for name in names if getattr(target.config, name, None))]
