"""Which neurons make the sink: candidates by contribution, proven by ablation against random draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.models.target import Target, first_tensor
from sinkscope.sinks.first_token.around_sink import view_layer
from sinkscope.sinks.first_token.layer import LayerView, columns, contribution_norms, norm_without, reach, split

DRAWS = 20  # random sets of as many neurons that every ablation is held against
CAUSAL = 0.1  # a causal neuron takes at least this share of the norm with it


def numbers(layer: int, expert: int | None, neuron: int) -> tuple[int, ...]:
    """(layer, neuron) or (layer, expert, neuron), as interventions take a neuron."""
    return (layer, neuron) if expert is None else (layer, expert, neuron)


@dataclass(frozen=True)
class Neuron:
    """One candidate; drops are shares of the norm at the sink layer that vanish when it is zeroed.

    Attributes:
        layer: where it is.
        expert: None where the layer is no mixture of experts.
        neuron: its number in the MLP (in the expert).
        contribution_norm: norm of `hook_post[j] * W_out[j]` at the first token.
        share: that over the norm of the MLP's output there.
        ablation_drop: at the first token.
        repeat_drop: at the last of the repeated tokens; None if no token got there.
        control_drop: largest drop among 20 random neurons of the layer, at either place.
        causal: ablation_drop > control_drop and >= 0.1.
        neutral_post: median `hook_post` on typical text: what SinkPatch writes instead.
        neutral_up: median output of the up projection there; None where there is no such factor.
    """

    layer: int
    expert: int | None
    neuron: int
    contribution_norm: float
    share: float
    ablation_drop: float
    repeat_drop: float | None
    control_drop: float
    causal: bool
    neutral_post: float
    neutral_up: float | None

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return numbers(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Proof:
    """The candidates of one layer, and the causal ones together."""

    neurons: tuple[Neuron, ...]
    set_drop: float | None
    set_control_drop: float | None
    controls: tuple[tuple[int, ...], ...]  # sites of one random draw of as many neurons as are causal


@torch.no_grad()
def prove(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None,
) -> Proof:
    """Candidates of the sink layer and what zeroing them does there.

    Args:
        target: the model.
        ids: typical text, position 0 the first token.
        layer: the sink layer.
        top_k: number of candidates.
        generator: of the random draws.
        repeated: the layer at the last repetition of tokens that reached half of the first token's norm.
    """
    with target.loaded(layer):
        first = view_layer(target, layer, ids[:, :1], torch.ones(len(ids), 1, dtype=torch.bool))
        text = neutral_view(target, layer, ids)
        contribution = contribution_norms(target, first).median(0).values
        top = reach(target, first).topk(min(top_k, int((contribution > 0).sum().clamp(min=1)))).indices
        spare = torch.ones_like(contribution, dtype=torch.bool)
        spare[top] = False
        if first.routing is not None:  # a neuron of an expert that was not chosen would be no control
            spare &= contribution > 0
        pool = spare.nonzero().flatten().cpu()

        def draw(size: int) -> Tensor:
            picks = [torch.randperm(len(pool), generator=generator)[:size] for _ in range(DRAWS)]
            return pool[torch.stack(picks)].to(top.device)

        def drops(sets: Tensor, view: LayerView) -> Tensor:
            cols = columns(target, layer, sets.flatten()).unflatten(0, tuple(sets.shape))
            return (1 - norm_without(target, view, sets, cols) / view.resid.norm(dim=-1)).median(1).values

        singles, control = top[:, None], draw(1)
        at_first, by_chance = drops(singles, first), drops(control, first).max()
        at_repeat = None if repeated is None else drops(singles, repeated)
        if repeated is not None:
            by_chance = torch.maximum(by_chance, drops(control, repeated).max())
        written = first.mlp.norm(dim=-1).median()
        neurons = tuple(
            _row(
                target,
                text,
                int(n),
                float(contribution[n]),
                float(contribution[n] / written),
                float(at_first[i]),
                None if at_repeat is None else float(at_repeat[i]),
                float(by_chance),
            )
            for i, n in enumerate(top)
        )
        chosen = torch.tensor([int(n) for i, n in enumerate(top) if neurons[i].causal], device=top.device)
        if not len(chosen):
            return Proof(neurons, None, None, ())
        set_controls = draw(len(chosen))
        sites = tuple(_site(target, layer, int(n)) for n in set_controls[0])
        return Proof(neurons, float(drops(chosen[None], first)), float(drops(set_controls, first).max()), sites)


@torch.no_grad()
def prove_stage(
    target: Target, ids: Int[Tensor, "row pos"], stage: int, sink_layer: int, generator: torch.Generator, top_k: int = 2
) -> tuple[Neuron, ...]:
    """Candidates of another stage; what zeroing them does at the sink layer (at its own layer, where that is later)."""
    first_ids, ones = ids[:, :1], torch.ones(len(ids), 1, dtype=torch.bool)
    with target.loaded(stage):
        first = view_layer(target, stage, first_ids, ones)
        text = neutral_view(target, stage, ids)
        contribution = contribution_norms(target, first).median(0).values
        top = reach(target, first).topk(top_k).indices.tolist()
    written = first.mlp.norm(dim=-1).median()
    pool = torch.tensor([n for n in contribution.nonzero().flatten().tolist() if n not in top])
    others = pool[torch.randperm(len(pool), generator=generator)[:DRAWS]].tolist()
    drops = _drops_above(target, first_ids[:1], stage, [*top, *others], max(stage, sink_layer))
    control = max(drops[top_k:], default=0.0)
    return tuple(
        _row(target, text, n, float(contribution[n]), float(contribution[n] / written), drop, None, control)
        for n, drop in zip(top, drops, strict=False)
    )


def _drops_above(target: Target, first_ids: Tensor, stage: int, neurons: list[int], layer: int) -> list[float]:
    """Drop at a layer for each neuron of that or an earlier layer, zeroed one at a time, by real ablated passes.

    One pass with a row per neuron; in a mixture, where rows cannot be edited apart, a pass each.
    """
    if target.is_mixture(stage):
        from sinkscope.interventions import Ablate

        intact = _norm_at(target, layer, first_ids)
        norms = []
        for n in neurons:
            with Ablate(sites=[_site(target, stage, n)]).on(target):
                norms.append(_norm_at(target, layer, first_ids))
        return [float(1 - n / intact) for n in norms]

    def zero(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, object]) -> tuple[object, object]:
        post = args[0].clone()
        rows = torch.arange(len(neurons), device=post.device)
        post.view(len(neurons) + 1, -1)[rows, torch.tensor(neurons, device=post.device)] = 0
        return (post, *args[1:]), kwargs

    with target.hooks((target.sub(stage, target.adapter.down), "pre", zero)):
        norms = _norm_at(target, layer, first_ids.expand(len(neurons) + 1, 1))
    return (1 - norms[:-1] / norms[-1]).tolist()


def neutral_view(target: Target, layer: int, ids: Int[Tensor, "row pos"]) -> LayerView:
    """The layer on typical text, first tokens left out; as many positions as 64 MB of activations allow."""
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    experts = int(getattr(target.config, "num_local_experts", None) or getattr(target.config, "num_experts", None) or 1)
    rows = max(1, (1 << 24) // (target.d_mlp * experts * ids.shape[1]))
    return view_layer(target, layer, ids[:rows], where[:rows])


def _row(
    target: Target,
    text: LayerView,
    flat: int,
    norm: float,
    share: float,
    drop: float,
    repeat: float | None,
    chance: float,
) -> Neuron:
    expert, neuron = split(target, text.layer, flat)
    post, up = neutral_values(target, text, flat)
    return Neuron(
        text.layer, expert, neuron, norm, share, drop, repeat, chance, drop > chance and drop >= CAUSAL, post, up
    )


def neutral_values(target: Target, text: LayerView, flat: int) -> tuple[float, float | None]:
    """Median `hook_post` of a neuron on typical text, and of its up factor where there is one: what a patch writes."""
    expert, _ = split(target, text.layer, flat)
    post = text.post[:, flat]
    if text.routing is not None and expert is not None:  # what the expert itself gives, where it was asked
        asked = text.routing[:, expert] > 0
        post = post[asked] / text.routing[asked, expert] if bool(asked.any()) else torch.zeros(1)
    return float(post.median()), None if text.up is None else float(text.up[:, flat].median())


def _site(target: Target, layer: int, flat: int) -> tuple[int, ...]:
    return numbers(layer, *split(target, layer, flat))


def _norm_at(target: Target, layer: int, ids: Tensor) -> Tensor:
    kept: list[Tensor] = []

    def keep(_m: object, _a: object, _k: object, out: object) -> None:
        kept.append(torch.linalg.vector_norm(first_tensor(out)[:, 0], dim=-1, dtype=torch.float32))
        target.stop()

    with target.hooks((target.layers[layer], "post", keep)):
        target.forward(ids)
    return kept[0]


def set_drop_across(
    target: Target, ids: Int[Tensor, "row pos"], sink_layer: int, sites: Sequence[tuple[int, ...]]
) -> float:
    """Drop of the first token's norm with neurons of several layers zeroed together, by a real ablated pass."""
    from sinkscope.interventions import Ablate

    intact = _norm_at(target, sink_layer, ids[:, :1])
    with Ablate(sites=list(sites)).on(target):
        return float((1 - _norm_at(target, sink_layer, ids[:, :1]) / intact).median())
