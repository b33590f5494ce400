"""What edits of single components do to one position of a text: its norm in each layer and the attention it receives.

All edits run side by side in one forward pass: a row for each edit, and for the intact text. A streamed model is
therefore read once for any number of edits, and every value that is written comes from the intact text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.files.progress import report
from sinkscope.hooks.edit.places import Place, heads_place, neurons_place
from sinkscope.hooks.edit.sites import groups_of
from sinkscope.models.hooks import Hook, first_tensor, hidden_of, on_hidden, on_output, with_hidden
from sinkscope.models.modules.experts import Args, Kwargs
from sinkscope.models.norms import norm_of
from sinkscope.models.target import NOT_READ, Entering, LayerInput, Target
from sinkscope.results.parts import Component, Head, Neuron, Part, Parts
from sinkscope.sinks.removal.components import Heads, key_bias, key_projection, writing_modules
from sinkscope.sinks.tokens import Mask, TokenRows
from sinkscope.tap.observers import visible_rows

KEY_BIAS, POSITIONS = Component("key bias"), Component("position embedding")
BATCH_ELEMENTS = 1 << 25  # largest number of elements of the widest activation in a batch
Values = Float[Tensor, "row pos d"]
At = Int[Tensor, " #text"]
"""A position of each text, or one for all."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Texts, edits of them, and what is read.

    Attributes:
        ids: The texts.
        edits: The parts that each edit removes, in as many rows of a batch as there are texts. Neurons are silenced at
            every position. Other parts write at the position what they write at the source position of the intact text.
        at: The position that swaps edit, and where effects are read.
        places: Positions that swaps edit, and whose attention is read in sum. None: this one.
        source: The position whose values replace those of swapped components.
        upto: The last layer to run; its MLP is not run where attention is read. None: all.
        attention: Whether to read attention; else it is 0.
        behind: The first layer whose attention is read; that of earlier layers is 0.
        without: Residual dimensions that norms leave out.
        directions: Directions of the residual stream after each layer on which it is projected; None: that is not read.
        entering: What entered each layer when the texts were read intact.
    """

    ids: TokenRows
    edits: Sequence[Parts]
    at: At
    source: At
    places: Mask | None = None
    upto: int | None = None
    attention: bool = False
    behind: int = 0
    without: Sequence[int] = ()
    directions: Float[Tensor, "layer d_model"] | None = None
    entering: Entering = NOT_READ

    def first_layer(self, edit: Parts) -> int:
        """The layer of the first part of an edit."""
        layers = [part.layer or 0 for part in edit if isinstance(part, Neuron | Head | Component)]
        return min(layers, default=max(self.entering.inputs, default=0))

    @property
    def begin(self) -> int:
        """The first layer that is run: before it, no edit differs and nothing is read."""
        begin = min(map(self.first_layer, self.edits or [()]))
        if self.attention:
            begin = min(begin, self.behind)
        if self.upto is not None:
            begin = min(begin, self.upto)
        return self.entering.latest(begin)


@dataclass(frozen=True)
class Effects:
    """The state of the position in the intact texts, which come first, and under each edit.

    Attributes:
        norms: L2 norm of the residual stream after each layer, without the dimensions that were left out. NaN in layers
            before the first that was run, where nothing differs, and in the last one where attention is read.
        along: Projection of the residual stream on the directions that were given; NaN without any.
        attention: Mean attention from later queries that see the position; 0 where it was not requested.
    """

    norms: Float[Tensor, "state text layer"]
    along: Float[Tensor, "state text layer"]
    attention: Float[Tensor, "state text layer head"]

    def drops(self, layer: int) -> Float[Tensor, " edit"]:
        """Share of the norm after a layer that each edit takes away, mean over texts."""
        norms = self.norms[..., layer]
        return (1 - norms[1:] / norms[0]).mean(1)

    def attention_from(self, heads: Heads) -> Float[Tensor, "state text pair"]:
        """The attention to the position from (layer, head) pairs."""
        layer, head = torch.tensor(heads).T
        return self.attention[:, :, layer, head]


class Rows:
    """One batch: all texts intact, then all of them under the first edit, then under the second, and so on.

    The rows of an edit join in the layer of its first part, as copies of the intact ones, if passes over the model may
    begin at a layer. What is written by an edit is taken from the rows of the intact texts.

    Attributes:
        edits: No edit, and the edits.
        norms: Norm of the position after each layer; NaN where nothing was run.
        along: Its projection on the directions, if there are any.
        received: Attention to the position, summed over later queries that see it.
        seeing: The number of these queries.
    """

    def __init__(self, target: Target, trial: Trial, edits: Sequence[Parts]) -> None:
        self.target = target
        self.trial = trial
        self._layer = trial.begin  # the next to run
        self.edits: list[Parts] = [(), *edits]
        self._joins = [self._layer] * len(self.edits)
        if target.skips_layers:
            self._joins[1:] = map(trial.first_layer, edits)
        self._joined = [0]  # the intact texts, and edits
        self.texts, length = trial.ids.shape
        self._at = trial.at.expand(self.texts)
        self._source = trial.source.expand(self.texts)
        self._places = torch.nn.functional.one_hot(self._at, length).bool()
        if trial.places is not None:
            self._places = trial.places
        self._next = trial.entering.at(self._layer)
        depth = target.n_layers
        if trial.upto is not None:
            depth = trial.upto + 1
        self.seeing = torch.zeros(len(self.edits), self.texts, depth)
        self.received = torch.zeros(*self.seeing.shape, target.n_heads)
        self.norms = torch.full_like(self.seeing, torch.nan)
        self.along = self.norms.clone()

    def read(self) -> list[Float[Tensor, "edit text layer *head"]]:
        """Norms and projections after each layer, and mean attention from later queries."""
        attention = self.received / self.seeing.clamp(min=1)[..., None]
        return [self.norms, self.along, attention]

    def run(self, upto: int) -> None:
        """Go on to the end of a layer, or to the last layer that is wanted; nothing to do if it has been passed."""
        last = min(upto, self.seeing.shape[2] - 1)
        while self._layer <= last:
            self._pass(min([last, *(join - 1 for join in self._joins if join > self._layer)]))

    def _pass(self, last: int) -> None:
        """Run layers in which no edit joins but at the first."""
        ready = [number for number, join in enumerate(self._joins) if join <= self._layer]
        joining = [number for number in ready if number not in self._joined]
        start = self._next
        if start is not None and joining:
            more = start.hidden[: self.texts].repeat(len(joining), 1, 1)
            start = replace(start, hidden=torch.cat([start.hidden, more]))
        self._joined += joining
        layers = range(self._layer, last + 1)
        hooks = self._hooks(layers)
        for layer in layers:
            hooks.append((self.target.layers[layer], "post", on_output(partial(self._layer_done, layer))))
        if last == self.trial.upto:
            hooks += self._ending(last)
        listening = nullcontext()
        if self.trial.attention and last >= self.trial.behind:
            attending = list(range(self.trial.behind, last + 1))
            listening = visible_rows(self.target, self._attention_read, layers=attending, whole=False)
        with listening, self.target.hooks(*hooks):
            self.target.forward(self._of_edits(self.trial.ids), upto=last, start=start)
        self._layer = last + 1

    def _ending(self, layer: int) -> list[Hook]:
        """Hooks by which the last layer computes only what is read: its attention, or else its MLP at the position."""
        if self.trial.attention:
            return self.target.part_hooks(layer, "attn", "post", lambda *_: self.target.stop())
        if any(Component("mlp", layer) in edit for edit in self.edits):
            return []
        rows, length = len(self._joined) * self.texts, self.trial.ids.shape[1]

        def here(_module: object, args: Args, kwargs: Kwargs) -> Any:
            entering = hidden_of(args, kwargs)
            if sum(isinstance(given, Tensor) for given in (*args, *kwargs.values())) > 1:
                return None  # such as the residual stream in BLOOM, or what a router said of each position
            there = self._here(entering.reshape(rows, length, -1))
            if entering.dim() > 2:  # OPT runs row and position together
                there = there[:, None]
            return with_hidden(args, kwargs, there)

        def everywhere(leaving: Tensor) -> Tensor | None:
            if leaving.flatten(0, -2).shape[0] > rows:
                return None
            there = leaving.reshape(rows, 1, -1).repeat(1, length, 1)
            return there if leaving.dim() > 2 else there.flatten(0, 1)

        narrowed = self.target.part_hooks(layer, "mlp", "pre", here)
        return [*narrowed, *self.target.part_hooks(layer, "mlp", "post", on_hidden(everywhere))]

    def _of_edits(self, values: Shaped[Tensor, "text ..."]) -> Shaped[Tensor, "row ..."]:
        """The same values for each edit that has joined."""
        return values.repeat(len(self._joined), *[1] * (values.dim() - 1))

    def _of_all(self, values: Shaped[Tensor, "row ..."]) -> Shaped[Tensor, "edit text ..."]:
        """What each edit shows; edits that are still to join show what the intact texts do."""
        of_edits = values.cpu().unflatten(0, (-1, self.texts))
        every = of_edits[:1].repeat_interleave(len(self.edits), 0)
        every[self._joined] = of_edits
        return every

    def _layer_done(self, layer: int, output: Any) -> None:
        hidden = first_tensor(output)
        there = self._here(hidden)
        self.norms[:, :, layer] = self._of_all(norm_of(there, self.trial.without))
        directions = self.trial.directions
        if directions is not None:
            self.along[:, :, layer] = self._of_all(there.float() @ directions[layer].to(there.device))
        self._next = LayerInput(layer + 1, hidden, isinstance(output, tuple))

    def _here(self, values: Values) -> Float[Tensor, "row d"]:
        """The values of the position."""
        return values[torch.arange(len(values)), self._of_edits(self._at)]

    def _attention_read(
        self,
        layer: int,
        first: int,
        probs: Float[Tensor, "row head query key"],
        visible: Callable[[], Bool[Tensor, "row _ query key"]],
    ) -> None:
        queries = torch.arange(first, first + probs.shape[2])
        keys = self._of_edits(self._places).to(probs.device)[:, : probs.shape[-1]]
        later = queries > rearrange(keys.int().argmax(1).cpu(), "row -> row 1")
        sees = visible().expand(len(probs), -1, -1, -1)[:, 0]  # one that sees the position may give it exactly nothing
        later &= (sees.to(probs.device) & rearrange(keys, "row key -> row 1 key")).any(-1).cpu()
        given = einsum(probs, keys.to(probs.dtype), "row head query key, row key -> row head query")
        received = (given * rearrange(later.to(given.device), "row query -> row 1 query")).sum(-1)
        self.received[:, :, layer] += self._of_all(self.target.shards.gather(received, self.target.n_heads, 1))
        self.seeing[:, :, layer] += self._of_all(later.sum(1))

    # --- edits ---

    def _hooks(self, layers: range) -> list[Hook]:
        """The hooks that carry out the edits in some layers."""
        parts = dict.fromkeys(chain.from_iterable(self.edits[number] for number in self._joined))
        silenced = [part for part in parts if isinstance(part, Neuron)]
        hooks: list[Hook] = []
        for group in groups_of(silenced):
            if group.layer in layers:
                where = torch.cat([self._rows_with(site) for site in group.sites], -1)
                hooks.append(neurons_place(self.target, group).rows(where, torch.zeros_like))
        for part in parts:
            if isinstance(part, Component | Head) and part != KEY_BIAS and (part.layer or 0) in layers:
                hooks += self._swap(part)
        for layer in layers:
            if KEY_BIAS in parts and key_bias(self.target, layer) is not None:
                keys = Place(key_projection(self.target, layer), "post")
                hooks.append(keys.rows(self._rows_with(KEY_BIAS), partial(self._unbiased, layer)))
        return hooks

    def _rows_with(self, part: Part) -> Bool[Tensor, "row 1 1"]:
        """The rows whose edit has this part."""
        having = torch.tensor([part in self.edits[number] for number in self._joined])
        return repeat(having, "edit -> (edit text) 1 1", text=self.texts)

    def _swap(self, component: Component | Head) -> list[Hook]:
        """What a component writes at the source of the intact texts is put where it is swapped."""
        where = self._rows_with(component) & self._of_edits(self._places)[..., None]
        embedded: list[Tensor] = []

        def at_source(values: Values) -> Float[Tensor, "row 1 d"]:
            return self._of_edits(values[torch.arange(self.texts), self._source])[:, None]

        def moved(entering: Values) -> Values:
            """The learned position embedding is what the first layer gets beyond the token embedding."""
            positions = self._of_edits((entering - embedded.pop())[: self.texts])
            return entering + (at_source(positions) - positions)

        if component == POSITIONS:
            keep = Place(self.target.embedding, "post").hook(embedded.append)
            return [keep, Place(self.target.layers[0], "pre").rows(where, moved)]
        if isinstance(component, Head):
            columns = self.target.head_columns(component.layer, component.head)
            return [heads_place(self.target, component.layer, columns).rows(where, at_source)]
        modules = writing_modules(self.target, component)
        return [Place(module, "post").rows(where, at_source) for module in modules]

    def _unbiased(self, layer: int, given: Values) -> Values:
        """What gives the keys of a layer, without their bias."""
        bias = key_bias(self.target, layer)  # a streamed layer is there only now
        assert bias is not None
        return given - bias


def _batches(target: Target, trial: Trial) -> list[Rows]:
    """The rows of a trial in as few batches as memory allows, each beside the intact texts."""
    texts, length = trial.ids.shape
    size = max(1, BATCH_ELEMENTS // (texts * length * max(target.d_mlp, target.d_model)) - 1)
    starts = range(0, max(1, len(trial.edits)), size)
    return [Rows(target, trial, trial.edits[start : start + size]) for start in starts]


@torch.no_grad()
def side_by_side(target: Target, trials: Sequence[Trial]) -> list[Effects]:
    """Run trials. A streamed model is walked once: in each layer, the rows of all trials pass before the next is read.

    Args:
        target: The model.
        trials: What is run.

    Returns:
        The effects of each trial. Entries of layers that were not run are missing at the end.
    """
    batches = [_batches(target, trial) for trial in trials]
    depth = len(target.layers)
    lasts = range(depth - 1, depth)
    if not target.resident and target.skips_layers:
        lasts = range(min(trial.begin for trial in trials), depth)
    total = len(lasts) * sum(map(len, batches))
    for step, (last, rows) in enumerate(product(lasts, chain.from_iterable(batches)), 1):
        rows.run(last)
        report("removals", step, total)
    effects: list[Effects] = []
    for of_trial in batches:
        first, *others = [rows.read() for rows in of_trial]
        edited = [[values[1:] for values in read] for read in others]  # the intact texts once
        effects.append(Effects(*map(torch.cat, zip(first, *edited, strict=True))))
    return effects
