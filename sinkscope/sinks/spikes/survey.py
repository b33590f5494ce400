"""Step 1, the survey: one pass over typical text, without edits, which reads states, norms and attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.engine.tap import visible_rows
from sinkscope.errors import SinkscopeError
from sinkscope.measure import PIECE, Setup
from sinkscope.models.hooks import Hook, on_hidden, on_input, on_output
from sinkscope.models.neurons import keep_call, on_mlp
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.models.text.kinds import Half
from sinkscope.results.parts import Component
from sinkscope.sinks.thresholds import MASSIVE, NARROWEST, READS, SMALLEST
from sinkscope.sinks.tokens import Mask, TokenRows

SURVEYED = 16  # texts of a survey, four of each kind
KEPT_ELEMENTS = 1 << 28  # states of this many elements are kept: one gigabyte; of larger models fewer texts are read
FEWEST = 4  # ... but at least these


@dataclass(eq=False)
class Survey:
    """What one pass over texts shows.

    Attributes:
        target: The model.
        ids: The texts.
        entered: The residual stream where it enters each layer and, last, after all layers.
        mlp: What the MLP of each layer adds to it.
        attention: Attention that each position receives, mean over the later queries that see it; 0 for the last
            position, and in layers that do not attend or whose window is narrower than 24 positions.
        own: Attention that the first position gives itself.
        seen: Number of later queries that see each position.
        learned: Attention to the learned sink logit of each head, mean over queries; 0 without any.
        wrapped: Whether the layers of the model return a tuple.
        kinds: The kind of each text; empty words for texts of the user's own.
        losses: Loss of the next tokens, when it was first asked for; NaN where it is not read.
    """

    target: Target
    ids: TokenRows
    entered: Float[Tensor, "layer_1 text pos d_model"]
    mlp: Float[Tensor, "layer text pos d_model"]
    attention: Float[Tensor, "layer head text pos"]
    own: Float[Tensor, "layer head text"]
    seen: Float[Tensor, "layer pos"]
    learned: Float[Tensor, "layer head text"]
    wrapped: bool = False
    kinds: tuple[str, ...] = ()
    losses: list[Float[Tensor, "text pos"]] = field(default_factory=list)

    @property
    def states(self) -> Float[Tensor, "layer text pos d_model"]:
        """The residual stream after each layer."""
        return self.entered[1:]

    @cached_property
    def norms(self) -> Float[Tensor, "layer text pos"]:
        """Norm of the residual stream after each layer."""
        return self.states.norm(dim=-1)

    @cached_property
    def ratios(self) -> Float[Tensor, "layer text pos"]:
        """Each norm over the typical one of its layer, without what massive dimensions hold everywhere."""
        return ratios_of(self.states)

    @cached_property
    def typical_norm(self) -> list[float]:
        """Median norm of later positions after each layer."""
        return self.norms[:, :, 1:].flatten(1).median(1).values.tolist()

    @property
    def first_norm(self) -> list[float]:
        """Median norm of first tokens after each layer."""
        return self.norms[:, :, 0].median(1).values.tolist()

    def added(self, part: Component) -> Float[Tensor, "text pos d_model"]:
        """Return what a component adds; attention and mixers are all that a layer adds beside its MLP."""
        layer = part.layer
        if layer is None:
            return self.entered[0]
        if part.kind == "mlp":
            return self.mlp[layer]
        return self.entered[layer + 1] - self.entered[layer] - self.mlp[layer]

    def received(self, place: Mask) -> Float[Tensor, "layer head text"]:
        """Return the attention to all positions of a place together, mean over the queries after the first.

        It is NaN in texts without the place.
        """
        seen = self.seen[:, None, None]
        return to_place(self.attention * seen, seen, place)

    @property
    def sink_rate(self) -> Float[Tensor, " text"]:
        """Share of heads that give position 0 more than 0.3, over all queries that see it (Gu et al. 2025)."""
        seen = self.seen[:, :1, None]
        whole = (self.attention[..., 0] * seen + self.own) / (seen + 1)
        return (whole[self.target.attending] > READS).float().mean((0, 1))

    @cached_property
    def weights(self) -> Float[Tensor, " none"]:
        """An empty tensor of the device and the type in which the model computes."""
        return torch.empty(0, device=self.target.device, dtype=self.target.dtype)

    def start(self, layer: int, texts: slice | Tensor = slice(None), length: int | None = None) -> LayerInput | None:
        """Return what a later pass over texts, or their beginnings, may start with at a layer; None: at the first."""
        if not self.target.skips_layers or layer == 0:
            return None
        hidden = self.entered[layer, texts, :length].to(self.weights, copy=True)
        return LayerInput(layer, hidden, self.wrapped)  # a copy: some layers add to it in place


def ratios_of(states: Float[Tensor, "site text pos d"]) -> Float[Tensor, "site text pos"]:
    """Divide each norm by the typical one of its site: the median over all positions after the first.

    A dimension is massive if it is 30 times the median dimension or more at ordinary positions. Its median is taken
    away first, because it would hide a spike.

    Args:
        states: What is at each site.
    """
    later = states[:, :, 1:].flatten(1, 2)
    size = later.abs().median(1).values
    massive = size > MASSIVE * size.median(1, keepdim=True).values.clamp(min=SMALLEST)
    norms = states.norm(dim=-1)
    if bool(massive.any()):
        norms = (states - (later.median(1).values * massive)[:, None, None]).norm(dim=-1)
    typical = norms[:, :, 1:].flatten(1).median(1).values.clamp(min=SMALLEST)
    return norms / typical[:, None, None]


def survey_of(setup: Setup, bos: int | None, half: Half = "choose", count: int | None = None) -> Survey:
    """Read texts of four kinds once, sixteen if the setup says nothing else; of a large model fewer.

    Args:
        setup: The model and its text.
        bos: The token that texts begin with. None: none.
        half: Whether the texts are those that choose, or those on which what was chosen is reported.
        count: Number of texts. None: as many as the setup says.

    Raises:
        SinkscopeError: A state is not finite.
    """
    target = setup.target
    length = min(PIECE, target.max_positions or PIECE)
    kept = KEPT_ELEMENTS // (target.n_layers * length * target.d_model)
    texts = setup.survey_rows(half, max(min(count or setup.surveyed or SURVEYED, kept), FEWEST), length, bos)
    survey = read_survey(target, texts.ids, texts.kinds)
    setup.progress("survey", len(texts.ids), len(texts.ids))
    return survey


@torch.no_grad()
def read_survey(target: Target, ids: TokenRows, kinds: tuple[str, ...] = ()) -> Survey:
    """Read some texts of equal length once, in one pass.

    Args:
        target: The model.
        ids: The texts.
        kinds: The kind of each.

    Raises:
        SinkscopeError: A state is not finite.
    """
    depth, heads, calls = target.n_layers, target.n_heads, list[Any]()
    survey = Survey(
        target=target,
        ids=ids,
        entered=torch.zeros(depth + 1, *ids.shape, target.d_model),
        mlp=torch.zeros(depth, *ids.shape, target.d_model),
        attention=torch.zeros(depth, heads, *ids.shape),
        own=torch.zeros(depth, heads, len(ids)),
        seen=torch.zeros(depth, ids.shape[1]),
        learned=torch.zeros(depth, heads, len(ids)),
        kinds=kinds or ("",) * len(ids),
    )

    def after(layer: int, output: Any) -> None:
        survey.wrapped = isinstance(output, tuple)
        hidden = output[0] if survey.wrapped else output
        _keep(survey.entered[layer + 1], hidden)
        if calls:
            _keep(survey.mlp[layer], calls.pop()(hidden))
        else:
            survey.mlp[layer] *= target.adapter.write_factor
        if not bool(hidden.isfinite().all()):
            raise SinkscopeError(
                f"layer {layer} of {target.name} gives infinite or NaN values in {target.dtype}; "
                "try --dtype float32, and check the checkpoint"
            )

    def attend(layer: int, _first: int, probs: Tensor, visible: Tensor) -> None:
        given, seen = given_later(probs, visible)
        if bool(seen.any()):
            survey.seen[layer] = seen
            survey.attention[layer] = given.transpose(0, 1).cpu() / seen.clamp(min=1)
            survey.own[layer] = probs[:, :, 0, 0].T.cpu()
        if target.adapter.learned_sinks:
            survey.learned[layer] = 1 - probs.sum(-1).mean(-1).T.cpu()

    hooks: list[Hook] = [(target.layers[0], "first", on_input(partial(_keep, survey.entered[0])))]
    for layer in target.with_neurons:
        take = partial(_keep, survey.mlp[layer])
        if not target.adapter.adds:
            hooks.append(keep_call(target, layer, calls))
        elif "post_mlp_norm" in target.paths[layer]:
            hooks += target.part_hooks(layer, "post_mlp_norm", "post", on_hidden(take))
        else:
            hooks += on_mlp(target, layer, take)
    for layer, module in enumerate(target.layers):
        hooks.append((module, "post", on_output(partial(after, layer))))
    rows = visible_rows(target, attend, rows_per_chunk=ids.shape[1]) if target.attending else nullcontext()
    with target.hooks(*hooks), rows:
        target.forward(ids, last_layer=depth - 1)
    return survey


def _keep(where: Tensor, values: Tensor) -> None:
    where[:] = values.detach().float().cpu().reshape(where.shape)


def given_later(
    probs: Float[Tensor, "row head query key"], visible: Bool[Tensor, "row _ query key"]
) -> tuple[Float[Tensor, "row head key"], Int[Tensor, " key"]]:
    """Return what later queries give to each position, and how many see it; 0 where a window is too narrow.

    Args:
        probs: Attention of texts without padding, all queries.
        visible: What the mask shows.
    """
    sees = visible[0, 0].tril(-1)
    if not bool(sees[-1, 0]) and int(sees[-1].sum()) + 1 < NARROWEST:
        sees = torch.zeros_like(sees)
    return (probs * sees.to(probs.device)).sum(2), sees.sum(0).cpu()


def to_place(given: Float[Tensor, "*n key"], seen: Shaped[Tensor, "... key"], place: Bool[Tensor, "... key"]) -> Tensor:
    """Return mean attention to all positions of a place together, over the queries that see it; NaN without any.

    Args:
        given: What later queries give to each position.
        seen: How many these are.
        place: The positions.
    """
    queries = (seen * place).amax(-1)
    return torch.where(place.any(-1), (given * place).sum(-1) / queries.clamp(min=1), torch.nan)
