"""Tracing the circuit of the attention sink, from the mark of its position to the heads that attend to it.

`find_sinks` says which positions are sinks and which neurons make their spikes. Components are replaced there, and the
spike and the attention that are left are read (`position_effect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from einops import reduce

from sinkscope.files.notation import head_name, neuron_name
from sinkscope.measure import Positive, Setup, measurement
from sinkscope.models.target import Target, norm_of
from sinkscope.sinks.first_token.attention_received import with_long_texts
from sinkscope.sinks.first_token.circuit_result import (
    KEYS,
    MARK,
    NEURONS,
    REPETITION,
    Circuit,
    CircuitStep,
    Readers,
    draw,
)
from sinkscope.sinks.first_token.effects import Component, Edit, effects, key_bias, key_projection, one_by_one
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.position_effect import Marks, PositionEffect, random_swaps
from sinkscope.sinks.first_token.result import (
    RATE_EPS,
    FindSinks,
    LaterSink,
    SinkPosition,
    Sites,
    sites_of,
)
from sinkscope.sinks.first_token.sets import random_sets
from sinkscope.sinks.tokens import TokenRows, prefixes
from sinkscope.trace.run import trace

TEXTS = 2  # pieces of typical text


@dataclass(frozen=True)
class _Position:
    """A sink, and the texts on which its circuit is measured.

    Attributes:
        setup: The model and its text.
        name: The position in words.
        ids: Texts that have the same sink at the same position.
        at: The position.
        other: The typical position that it trades places with.
        layer: The layer after which the spike is read. None if there is no spike.
        sites: The neurons that make the spike. If there are none, components that are needed stand for them.
        shared_dims: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    name: str
    ids: TokenRows
    at: int
    other: int
    layer: int | None
    sites: Sites
    shared_dims: tuple[int, ...]

    @classmethod
    def of(
        cls, setup: Setup, sinks: FindSinks, name: str, ids: TokenRows, at: int, layer: int | None, sites: Sites
    ) -> _Position:
        """Chooses the typical position: its norms after the layer are nearest to the median of their text."""
        shared_dims = sinks.shared_dims
        window = getattr(setup.target.config, "sliding_window", None)
        if window and getattr(setup.target.config, "use_sliding_window", True):
            ids = ids[:, : max(at + 4, int(window))]  # every query sees the first position
        site = f"blocks.{setup.n_layers - 1 if layer is None else layer}.hook_resid_post"
        norms = trace(setup.target, ids, [site], lambda resid: norm_of(resid, shared_dims))[site]
        distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
        distance[:, at] = torch.inf
        length = ids.shape[1]
        begin, end = length // 8, max(length // 2, length // 8 + 1)
        other = begin + int(distance[:, begin:end].amax(0).argmin())
        return cls(setup, name, ids, at, other, layer, sites, shared_dims)

    @property
    def spike(self) -> PositionEffect:
        """The norm of the position after the layer."""
        return PositionEffect(self.setup.target, self.ids, self.at, self.other, self.layer, without=self.shared_dims)

    def random_heads(self, depth: int, excluded: Sequence[Component], size: int) -> list[Edit]:
        """Edits that replace random heads of the layers up to one, except these."""
        heads = [Component("head", layer, head) for layer in range(depth + 1) for head in range(self.setup.n_heads)]
        return random_swaps([head for head in heads if head not in excluded], size, self.setup.seed)

    def swapped(self, depth: int, chosen: tuple[Component, ...]) -> list[Edit]:
        """Edits that replace the chosen components, and as many random heads; none if nothing was chosen."""
        if not chosen:
            return []
        return [Edit(swap=chosen), *self.random_heads(depth, chosen, len(chosen))]

    def silenced(self) -> list[Edit]:
        """Edits that silence the neurons, and random sets of as many neurons of the same layers (and experts)."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        return [Edit(zero=sites) for sites in (self.sites, *random_sets(self.setup.target, self.sites, (), generator))]

    def reading_effect(self) -> PositionEffect | None:
        """The attention to the position of the heads that read it; None if there are none.

        Only heads behind the spike's layer count. If there are none, all heads count, and these cannot read the spike.
        """
        target = self.setup.target
        received = effects(target, self.ids, [], at=self.at, attention=True).intact_attention
        reading = reduce(received, "text layer head -> layer head", "mean") > RATE_EPS
        behind = 0 if self.layer is None else self.layer + 1
        if bool(reading[behind:].any()):
            reading[:behind] = False
        if not bool(reading.any()):
            return None
        return PositionEffect(target, self.ids, self.at, self.other, heads=reading)


def _step(
    name: str,
    effect: PositionEffect,
    edits: dict[str, Edit],
    chosen: Sequence[str],
    together: Sequence[Edit],
    judge: PositionEffect,
    control: float | None = None,
) -> CircuitStep:
    """What is lost of an effect under each of some edits, and without all that were chosen.

    Args:
        name: Name of the step.
        effect: The effect.
        edits: What removes each component or neuron, by its name.
        chosen: Those that are called needed.
        together: The edit that removes all of these, and its controls.
        judge: The effect by which they are called needed alone.
        control: The control of a single edit. None: that of all together.
    """
    single = list(edits.values())
    lost = effect.necessity([*single, *together])
    together_control = max(lost[len(single) + 1 :], default=None)
    return CircuitStep(
        name=name,
        components=tuple(edits),
        necessity=np.array(lost[: len(single)]),
        sufficiency=np.array(effect.sufficiency(single)),
        control=together_control if control is None else control,
        chosen=tuple(chosen),
        alone=np.array(judge.necessity([edits[one] for one in chosen])),
        together=lost[len(single)] if together else None,
        together_control=together_control,
    )


def _mark_step(
    position: _Position, name: str, effect: PositionEffect, marks: Marks, depth: int, judge: PositionEffect
) -> CircuitStep:
    """What an effect needs of the components before a layer, which reads it by its MLP or by its keys."""
    control = max(effect.necessity(position.random_heads(depth, marks.chosen, 1)), default=None)
    edits = {str(one): Edit(swap=(one,)) for one in (*marks.chosen, *marks.effective)}
    together = position.swapped(depth, marks.chosen)
    return _step(name, effect, edits, tuple(map(str, marks.chosen)), together, judge, control)


def _readers(effect: PositionEffect, carried_by: tuple[str, ...], edits: Sequence[Edit]) -> Readers:
    """The reading heads under an edit that removes what may carry them, and under its controls."""
    assert effect.heads is not None
    places = effect.heads.nonzero().tolist()
    intact = effect.intact.mean(0)
    left = intact[None]
    if edits:
        left = intact - reduce(effect.removed(edits), "edit text head -> edit head", "mean")
    ranked = intact.argsort(descending=True, stable=True)
    return Readers(
        carried_by=carried_by,
        heads=tuple(head_name(*places[number]) for number in ranked.tolist()),
        length=effect.ids.shape[1],
        attention=intact[ranked].double().numpy(),
        attention_without=left[0, ranked].double().numpy(),
        control=float(left[1:].mean(1).min()) if len(left) > 1 else None,
    )


def _traced(circuit: Circuit, position: _Position, made_by_mlp: bool) -> Circuit:
    """The circuit of a sink; `made_by_mlp` says whether MLPs make its spike."""
    steps = []
    reading, spike = position.reading_effect(), position.spike
    layer, sites = position.layer, position.sites
    readers: Readers | None = None
    carried = False
    if layer is not None:
        marks = spike.marks(layer)
        if reading is not None:
            carried_by: tuple[str, ...] = ("spike",)
            if sites:
                removing = position.silenced()
            elif made_by_mlp:
                removing = one_by_one([Component("mlp", layer)])
            else:
                carried_by = tuple(map(str, marks.chosen))
                removing = position.swapped(layer, marks.chosen)
            readers = _readers(reading, carried_by, removing)
            carried = readers.evidence.holds
        judge = reading if reading is not None and carried else spike
        steps.append(_mark_step(position, MARK, spike, marks, layer, judge))
        if sites:
            neurons = {neuron_name(*site): Edit(zero=(site,)) for site in sites}
            steps.append(_step(NEURONS, spike, neurons, tuple(neurons), position.silenced(), judge))
    if reading is not None and reading.heads is not None and not carried:
        depth = int(reading.heads.nonzero()[:, 0].max())
        marks = reading.marks(depth)
        step = _mark_step(position, KEYS, reading, marks, depth, reading)
        steps.append(step)
        readers = _readers(reading, (), [])
        if step.carried:
            readers = _readers(reading, step.chosen, position.swapped(depth - 1, marks.chosen))
    return replace(
        circuit,
        place=position.name,
        position=position.at,
        sink_layer=layer if made_by_mlp else None,
        steps=tuple(steps),
        readers=readers,
    )


def _with_its_texts(setup: Setup, sinks: FindSinks) -> Setup:
    """The setup with texts that have the sinks: longer ones, if shorter ones do not show them."""
    lengths = [later.position + 1 for later in sinks.later_sinks]
    if sinks.attention_sink is not None:
        lengths.append(sinks.attention_sink.length)
    if max(lengths, default=0) > setup.ids.shape[1]:
        return with_long_texts(setup) or setup
    return setup


def _first_sink(setup: Setup, sinks: FindSinks) -> _Position:
    """The first token as `find_sinks` found it."""
    ids = setup.ids[:TEXTS].clone()
    ids[:, 0] = ids[0, 0]
    spike, name = sinks.norm_spike, f"the first token {setup.tokenizer.decode(ids[0, :1])!r}"
    layer = sinks.sink_layer
    sites = []
    if layer is not None:
        if sinks.minimal is not None:
            sites += sinks.minimal.edit_sites
        sites += [site for site in sites_of(sinks.causal) if site not in sites]
        layer = max(layer, max(sites, default=(0,))[0])
    elif spike is not None and spike.plateau is not None:
        layer = spike.plateau[0]
    return _Position.of(setup, sinks, name, ids, 0, layer, tuple(sites))


def _later_sink(setup: Setup, sinks: FindSinks, place: LaterSink | SinkPosition) -> _Position | None:
    """A sink behind the first token, on texts of its own; None if these have no room for it."""
    name = f"position {place.position}"
    sites = ()
    if isinstance(place, LaterSink) and place.set is not None:
        sites = place.set.edit_sites
    ids = setup.ids[:TEXTS]
    at = place.position
    if place.token:  # one text, if possible one in which it stands where it was examined
        name = repr(place.token)
        here = [token for token in setup.ids.unique().tolist() if setup.tokenizer.decode([token]) == place.token]
        where = torch.isin(setup.ids[:, 1:-4], torch.tensor(here)).nonzero() + torch.tensor([0, 1])
        if not len(where):
            return None
        row, at = min(where.tolist(), key=lambda pair: (pair[1] != place.position, pair[1]))
        ids = setup.ids[row : row + 1]
    return _Position.of(setup, sinks, name, ids, at, max(sites)[0] if sites else None, sites)


@measurement(group="Sinks", figure=draw, quick={"max_repeats": 64})
def circuit(setup: Setup, *, token: str | None = None, max_repeats: Positive | None = None) -> Circuit:
    """Trace the circuit of the attention sink from its mark to the heads that read it, and verify each step.

    Components are replaced at the sink by what they write at a typical token (necessity), and the reverse
    (sufficiency), with random components as the control. For a model without a spike or without a sink, the result says
    so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    sinks = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    setup = _with_its_texts(setup, sinks)
    first = _first_sink(setup, sinks)
    first_token = setup.tokenizer.decode(first.ids[0, :1].tolist())
    result = Circuit(first_token=first_token, lengths=sinks.lengths, untested=_untested(setup.target))
    attended = () if sinks.attention_sink is None else sinks.attention_sink.positions
    if first.layer is not None or (attended and attended[0].position == 0):
        result = _traced(result, first, sinks.sink_layer is not None)
        return _with_repetition(result, first, sinks)
    for place in (*sinks.later_sinks, *attended):
        position = _later_sink(setup, sinks, place)
        if position is not None:
            later = _traced(result, position, bool(position.sites))
            if later.steps:
                return replace(later, stands_out=isinstance(place, LaterSink))
    return result


def _untested(target: Target) -> tuple[str, ...]:
    """What may carry a sink and cannot be replaced: a bias of keys that cannot be taken apart."""
    for layer in range(target.n_layers):
        if getattr(key_projection(target, layer), "bias", None) is not None and key_bias(target, layer) is None:
            return ("the bias of the keys",)
    return ()


def _with_repetition(result: Circuit, first: _Position, sinks: FindSinks) -> Circuit:
    """The mark at the last of 1.5 times as many repetitions as a sink needs, for the word that needs fewest."""
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats > 1]
    if not words or first.layer is None:
        return result
    word = min(words, key=lambda word: word.repeats or 0)
    setup, needed = first.setup, word.repeats or 0
    repeats = needed + needed // 2
    if setup.target.max_positions is not None:
        repeats = min(repeats, setup.target.max_positions - 1)
    ids = torch.tensor([[prefixes(setup, [word.id])[0], *[word.id] * repeats]])
    repeated = replace(first, ids=ids, at=repeats, other=1)
    spike = repeated.spike
    step = _mark_step(repeated, REPETITION, spike, spike.marks(first.layer), first.layer, spike)
    return replace(result, steps=(*result.steps, step), repeated=word.token, repeats=repeats)
