"""An open model, what is known of its sink, and its readings of texts, intact and under edits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import starmap
from typing import Any

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Float, UInt8
from pydantic import BaseModel, Field
from torch import Tensor

from sinkscope.app.view.packed import Packed, codes_of
from sinkscope.app.view.result import (
    SPIKE_RATIO,
    SPIKE_SHARE,
    Generation,
    ModelView,
    Variant,
    ViewedText,
    Writing,
)
from sinkscope.attention.barcode import Barcode, barcode, picture_bins
from sinkscope.errors import SinkscopeError
from sinkscope.files.notation import agreeing, head_name, listed, neuron_name
from sinkscope.files.records import conform
from sinkscope.interventions import Ablate, SinkPatch
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.sites import head_of, site_of
from sinkscope.kv.loopguard.guard import LoopGuard
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length, check_site
from sinkscope.models.hooks import on_input
from sinkscope.models.norms import norm_of
from sinkscope.sinks.first_token.circuit import MARK, REPETITION, Circuit, circuit
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.first_token.layer_view import flat_number, view_layer
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.tokens import prefixes
from sinkscope.trace import attention_rows, trace

MOST_TOKENS = 512
TYPICAL_TOKENS = 64  # of the text that is shown by default
AFTER_SINK = 16  # further repetitions that are shown behind the one that makes a sink
ROOM = 3 << 20  # bytes of packed attention in a page
PROMPT_TOKENS, NEW_TOKENS = 48, 144  # of the generation


@dataclass(frozen=True)
class Reading:
    """What one pass over a text shows.

    Attributes:
        norm: L2 norm of the residual stream after each layer.
        rows: Attention, in the codes of `Packed`.
        received: Attention that each position receives from later queries, on average.
        activation: Values of the sink neurons.
    """

    norm: Float[np.ndarray, "layer pos"]
    rows: UInt8[np.ndarray, "layer head query key"]
    received: Float[Tensor, "layer head pos"]
    activation: Float[np.ndarray, "neuron pos"]


@dataclass(frozen=True)
class Switch:
    """An edit that can be switched on, and the edit that is its control.

    Attributes:
        name: What is edited.
        edit: The edit.
        control: The same of random neurons or heads. None if there are too few.
    """

    name: str
    edit: Intervention
    control: Intervention | None = None


class Request(BaseModel):
    """What a page asks for; see `Explorer.answer`."""

    text: str | None = None
    at_once: bool = False
    place: int = Field(0, ge=0)
    switch: str | None = None
    off: tuple[str, ...] = ()
    circuit: bool = False
    generation: bool = False


@dataclass(frozen=True)
class OpenText:
    """A text, and how the intact model reads it.

    Attributes:
        ids: Its tokens.
        intact: How the intact model reads it.
        shown: What a page shows of it, still without variants.
    """

    ids: list[int]
    intact: Reading
    shown: ViewedText


@dataclass
class Explorer:
    """An open model and what is known of its sink.

    Attributes:
        setup: The model and typical text.
        scan: Norms on typical text, without dimensions that are massive on all tokens.
        sinks: Where its sink is made. None until `measure_sinks` was called.
        circuit: The circuit of the sink. None until `measure_circuit` was called.
        text: The text that is shown where a request names none. None: the default texts.
        latest: The texts that were read last, and the request for them.
        lock: Held by whoever runs the model.
    """

    setup: Setup
    scan: LayerScan
    sinks: FindSinks | None = None
    circuit: Circuit | None = None
    text: str | None = None
    latest: tuple[Any, list[OpenText]] = (None, [])
    lock: Any = field(default_factory=threading.RLock)

    @classmethod
    def open(cls, model: object = None, **options: Any) -> Explorer:
        """Open a model as `Setup.open` does, whole, and find the layer that makes its sink."""
        setup = Setup.open(model, **options, loading="whole")
        return cls(setup, scan_layers(setup.target, setup.ids, whole=True))

    def measure_sinks(self) -> FindSinks:
        """Find the sink neurons, once."""
        if self.sinks is None:
            self.sinks = find_sinks.on(self.setup)
        return self.sinks

    def measure_circuit(self) -> None:
        """Trace the circuit of the sink, once."""
        if self.circuit is None:
            self.circuit = circuit.on(self.setup)

    @property
    def layer(self) -> int:
        """The sink layer, or the layer after which the first token stands out most."""
        if self.scan.sink_layer is not None:
            return self.scan.sink_layer
        return int((np.array(self.scan.spike_norm) / np.array(self.scan.typical_norm)).argmax())

    @property
    def neurons(self) -> list[tuple[int, ...]]:
        """The sink neurons: the smallest set that makes the spike, or those that are causal alone."""
        if self.sinks is None:
            return []
        for causal_set in self.sinks.causal_sets:
            if causal_set.kind == "minimal":
                return list(causal_set.edit_sites)
        return [neuron.site for neuron in self.sinks.causal]

    @property
    def marks(self) -> list[tuple[int, int]]:
        """The heads that mark the first token, and those that mark a repetition."""
        names: list[str] = []
        if self.circuit is not None and self.circuit.position == 0:
            for step in filter(None, map(self.circuit.step, (MARK, REPETITION))):
                names += step.chosen
        return [head_of(name) for name in dict.fromkeys(names) if ".H" in name]

    def switches(self) -> list[Switch]:
        """The edits that this model has."""
        switches: list[Switch] = []
        if self.sinks is not None and self.neurons:
            zeroed = self.switch("sink neurons zeroed", self.neurons, [])
            switches.append(zeroed)
            if self.sinks.spike_is_first:
                switches.append(Switch("patched", SinkPatch.from_result(self.sinks), zeroed.control))
            if zeroed.control is not None:
                switches.append(Switch("random control", zeroed.control))
        if self.marks:
            switches.insert(1, self.switch("marking heads replaced", [], self.marks))
        return switches

    def switch(self, name: str, neurons: Sequence[tuple[int, ...]], heads: Sequence[tuple[int, int]]) -> Switch:
        """Zero some neurons and replace some heads by their mean; the control does the same to random ones."""
        widths = [self.setup.target.width(site[0], *site[1:-1]) for site in neurons]
        other_neurons = self.random_others(neurons, widths)
        other_heads = self.random_others(heads, [self.setup.n_heads] * len(heads))
        control = None
        if len(other_neurons) == len(neurons) and len(other_heads) == len(heads):
            control = _off(other_neurons, other_heads)
        return Switch(name, _off(neurons, heads), control)

    def random_others(self, places: Sequence[tuple[int, ...]], widths: Sequence[int]) -> list[tuple[int, ...]]:
        """As many other neurons or heads of the same layers and experts, as far as there are any.

        Args:
            places: The neurons or heads.
            widths: How many there are where each of them is.
        """
        generator = torch.Generator().manual_seed(self.setup.seed)
        drawn: list[tuple[int, ...]] = []
        for place, width in zip(places, widths, strict=True):
            taken = {*places, *self.neurons, *self.marks, *drawn}
            order = torch.randperm(width, generator=generator).tolist()
            others = [(*place[:-1], number) for number in order if (*place[:-1], number) not in taken]
            drawn += others[:1]
        return drawn

    def default_texts(self) -> dict[str, list[int]]:
        """Typical text and, if repeating a word makes a sink, the word that needs fewest repetitions."""
        texts = {"typical text": self.setup.ids[0, :TYPICAL_TOKENS].tolist()}
        sinks: list[tuple[int, int, str]] = []
        if self.sinks is not None:
            for word in self.sinks.repeats.tokens:
                if word.repeats is not None and word.repeats > 1:
                    sinks.append((word.repeats, word.id, word.token))
        if sinks:
            repeats, number, token = min(sinks)
            count = repeats + AFTER_SINK
            ids = [*prefixes(self.setup, [number]), *[number] * count]
            if len(ids) <= min(MOST_TOKENS, self.setup.target.max_positions or MOST_TOKENS):
                texts[f"{token!r} {count} times"] = ids
        return texts

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a text, after BOS if there is one.

        Raises:
            SinkscopeError: The text is empty, unknown to the tokenizer, or too long.
        """
        setup = self.setup
        ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not text.strip() or set(ids) <= {setup.tokenizer.unk_token_id}:
            raise SinkscopeError(f"the text {text[:40]!r} has no word that this tokenizer knows: give another text")
        if setup.bos is not None and ids[0] != setup.bos:
            ids = [setup.bos, *ids]
        if len(ids) > MOST_TOKENS:
            raise SinkscopeError(
                f"the text has {len(ids)} tokens and a view shows {MOST_TOKENS} at most: give a shorter text"
            )
        check_length(setup.target, "the text", len(ids))
        return ids

    def texts(self, text: str | None = None, variants: int = 1) -> list[OpenText]:
        """A text, or the default texts, as the intact model reads them; there is room for so many variants of each."""
        asked = (text, variants, self.sinks is None)
        if self.latest[0] != asked:
            texts = self.default_texts() if text is None else {"text": self.ids_of(text)}
            read: list[OpenText] = []
            for name, ids in texts.items():
                tokens = tuple(self.setup.tokenizer.decode([token]) for token in ids)
                intact = self.read(ids)
                heads = heads_that_fit(intact, ROOM // (len(texts) * variants))
                read.append(OpenText(ids, intact, ViewedText(name, tokens, heads, (), self.spikes(intact))))
            self.latest = (asked, read)
        return self.latest[1]

    def view(self, text: str | None = None) -> ModelView:
        """The model on a text, or on the default texts, intact and under its switches."""
        self.measure_sinks()
        switches = [None, *self.switches()]
        return self.result([self.viewed(one, switches) for one in self.texts(text, len(switches))])

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What every view says of the model and its run, which takes some milliseconds to gather."""
        settings = {"seed": self.setup.seed, "bos": self.setup.bos is not None}
        return {"model": self.setup.info(), "settings": settings, "provenance": self.setup.provenance()}

    def result(self, texts: Sequence[ViewedText] = ()) -> ModelView:
        """These texts, and what is known of the sink."""
        edges: tuple[dict[str, Any], ...] | None = None
        sentence = ""
        if self.circuit is not None:
            edges = tuple(self.circuit.edges())
            sentence = self.circuit.conclusion()
        return ModelView(
            **self.origin,
            layer=self.layer,
            typical_norm=_rounded(np.array(self.scan.typical_norm)),
            first_norm=_rounded(np.array(self.scan.spike_norm)),
            neurons=tuple(starmap(neuron_name, self.neurons)),
            marks=tuple(starmap(head_name, self.marks)),
            switches=tuple(switch.name for switch in self.switches()),
            texts=tuple(texts),
            circuit=edges,
            circuit_sentence=sentence,
        )

    def whole_view(self, text: str | None = None, *, generation: bool = True) -> ModelView:
        """The view with the circuit and, if wanted, a generation: everything that a page without a server shows."""
        self.measure_circuit()
        result = self.view(text)
        if generation:
            result = replace(result, generation=self.generation())
        return result

    def viewed(self, text: OpenText, switches: Sequence[Switch | None]) -> ViewedText:
        """A text under these switches; None is the intact model."""
        variants: list[Variant] = []
        for switch in switches:
            name, reading, sentence = "intact", text.intact, self.intact_sentence(text)
            if switch is not None:
                name, reading = switch.name, self.read(text.ids, switch.edit)
                sentence = self.change(switch, text, reading)
            variant = Variant(
                name=name,
                sentence=sentence,
                norm=_rounded(reading.norm),
                activation=_rounded(reading.activation),
                received=Packed.of(codes_of(reading.received)),
                rows=tuple(Packed.of(reading.rows[head]) for head in text.shown.heads),
            )
            variants.append(variant)
        return replace(text.shown, variants=tuple(variants))

    @torch.no_grad()
    def read(self, ids: list[int], edit: Intervention | None = None) -> Reading:
        """Read a text under an edit, or intact (None), in one pass; sink neurons of a mixture take another one."""
        target, length, row = self.setup.target, len(ids), torch.tensor([ids])
        shape = (self.setup.n_layers, self.setup.n_heads, length)
        rows, received = np.zeros((*shape, length), np.uint8), torch.zeros(shape)
        activation = np.zeros((len(self.neurons), length))

        def see(layer: int, first_query: int, probs: Float[Tensor, "1 head query key"]) -> None:
            rows[layer, :, first_query : first_query + probs.shape[2], : probs.shape[3]] = codes_of(probs[0])
            received[layer, :, : probs.shape[3]] += reduce(probs, "1 head query key -> head key", "sum").cpu()
            itself = probs[0].diagonal(first_query, 1, 2).cpu()
            received[layer, :, first_query : first_query + probs.shape[2]] -= itself

        posts: dict[int, Tensor] = {}
        hooks: list[tuple[Any, str, Any]] = []
        for layer in {site[0] for site in self.neurons}:
            if not target.is_mixture(layer):
                keep = on_input(partial(posts.__setitem__, layer))
                hooks.append((target.sub(layer, target.adapter.down), "pre", keep))
        with nullcontext() if edit is None else edit.on(target):
            with attention_rows(target, see), target.hooks(*hooks):
                norm = self.norms(ids)
            for number, (layer, *expert, neuron) in enumerate(self.neurons):
                if layer not in posts:
                    posts[layer] = view_layer(target, layer, row, torch.ones_like(row, dtype=torch.bool)).post
                column = flat_number(target, layer, expert[0] if expert else None, neuron)
                activation[number] = posts[layer].flatten(0, -2)[:, column].float().cpu()
        received /= torch.arange(length - 1, -1, -1).clamp(min=1)  # later queries
        return Reading(norm, rows, received, activation)

    def norms(self, ids: list[int], layers: str | int = "*") -> Float[np.ndarray, "layer pos"]:
        """Norms after these layers of a pass."""
        norm = partial(norm_of, without=self.scan.shared_dims)
        norms = trace(self.setup.target, [ids], f"blocks.{layers}.hook_resid_post", norm)
        return rearrange([*norms.values()], "layer 1 pos -> layer pos").numpy()

    def spikes(self, reading: Reading) -> tuple[int, ...]:
        """Positions with at least half of the first token's norm and three times the typical one."""
        bar = SPIKE_RATIO * self.scan.typical_norm[self.layer]
        first = self.scan.spike_norm[self.layer]
        if first > bar:
            bar = max(bar, SPIKE_SHARE * first)
        return tuple(np.flatnonzero(reading.norm[self.layer] >= bar).tolist())

    def intact_sentence(self, text: OpenText) -> str:
        """How many tokens have a norm spike, and the largest norm beside typical text."""
        norm, count = text.intact.norm[self.layer], len(text.shown.spikes)
        highest = int(norm.argmax())
        return (
            f"{count} of {len(norm)} tokens {agreeing(count, 'has', 'have')} a norm spike after layer {self.layer}: "
            f"the largest norm is {norm[highest]:.4g} at {text.shown.tokens[highest]!r}, where typical text has "
            f"{self.scan.typical_norm[self.layer]:.4g}."
        )

    def change(self, switch: Switch, text: OpenText, reading: Reading) -> str:
        """What an edit changes most, beside its control."""
        before, after = text.intact.norm[self.layer], reading.norm[self.layer]
        position = int(np.abs(after - before).argmax())
        beside = ""
        if switch.control is not None:
            with switch.control.on(self.setup.target):
                control = self.norms(text.ids, self.layer)[0]
            beside = f" (random control: {control[position]:.4g})"
        token = f"{position}, {text.shown.tokens[position]!r}"
        return (
            f"{switch.name[:1].upper()}{switch.name[1:]}: after layer {self.layer}, the norm changes most at token "
            f"{token}, from {before[position]:.4g} to {after[position]:.4g}{beside}."
        )

    def named_switch(self, asked: Request) -> Switch | None:
        """The switch that a page asks for: one of the model's, or the neurons and heads to switch off.

        Raises:
            SinkscopeError: There is no such switch, or a name is no neuron and no head that the model has.
        """
        if asked.switch is not None:
            named = {switch.name: switch for switch in self.switches()}
            if asked.switch not in named:
                raise SinkscopeError(f"{asked.switch!r} is no switch of this model: expected one that the page shows")
            return named[asked.switch]
        neurons: list[tuple[int, ...]] = []
        heads: list[tuple[int, int]] = []
        for name in asked.off:
            if "H" in name.upper():
                heads.append(head_of(name))
                check_site(self.setup.target, heads[-1][0], head=heads[-1][1])
            else:
                site = site_of(name)
                check_site(self.setup.target, *site)
                neurons.append(site.numbers)
        if not asked.off:
            return None
        return self.switch(f"without {listed(asked.off)}", neurons, heads)

    def answer(self, request: Any) -> dict[str, Any]:
        """What a page does not have yet, as the dictionary of a view that holds nothing else; or an error in one line.

        Args:
            request: An object. `text` is the text (None: that of the explorer). Without more, its intact variant is
                measured; `at_once` leaves out what needs the sink neurons. `switch` (a name) or `off` (names of neurons
                and heads) asks for this variant of the text with the number `place`; true `circuit` or `generation` for
                these.
        """
        try:
            asked = conform(Request, request, "the request")
            with self.lock:
                return self.answer_to(asked).to_dict()
        except SinkscopeError as error:
            return {"error": str(error)}

    def answer_to(self, asked: Request) -> ModelView:
        """See `answer`."""
        if not asked.at_once:
            self.measure_sinks()
        if asked.circuit:
            self.measure_circuit()
            return self.result()
        if asked.generation:
            return replace(self.result(), generation=self.generation())
        texts, switch = self.texts(asked.text or self.text), self.named_switch(asked)
        if switch is not None:
            texts = texts[asked.place : asked.place + 1]
        return self.result([self.viewed(one, [switch]) for one in texts])

    def generation(self, new: int = NEW_TOKENS) -> Generation:
        """What the model writes after the beginning of typical text, with and without the guard."""
        prompt = self.setup.ids[0, :PROMPT_TOKENS].tolist()
        sides: list[Writing] = []
        copied: list[int] = []
        heads: tuple[str, ...] | None = None
        for name, edit in (("without the guard", None), ("with the guard", LoopGuard())):
            setup = replace(self.setup, edit=edit)
            result = barcode.on(setup, prompt=prompt, max_new_tokens=new, heads=heads, control=heads is None)
            heads = result.shown[:1]
            sides.append(_writing(self.setup, name, result))
            copied.append(0 if result.onset is None else len(result.ids) - max(result.onset, len(prompt)))
        sentence = (
            f"Without the guard, {copied[0]} of {len(sides[0].tokens)} new tokens belong to a repetition at the end; "
            f"with it, {copied[1]} of {len(sides[1].tokens)} (its alarms: {len(sides[1].alarms)})."
        )
        return Generation(self.setup.tokenizer.decode(prompt), sentence, tuple(sides))


def heads_that_fit(reading: Reading, room: int) -> tuple[tuple[int, int], ...]:
    """The heads whose packed rows fit into so many bytes; those with most attention to the first token come first.

    There is at least one.
    """
    order = reading.received[..., 0].flatten().argsort(descending=True, stable=True)
    heads: list[tuple[int, int]] = []
    for number in order.tolist():
        layer, head = divmod(number, reading.received.shape[1])
        room -= len(Packed.of(reading.rows[layer, head]).codes)
        if heads and room < 0:
            break
        heads.append((layer, head))
    return tuple(sorted(heads))


def _off(neurons: Sequence[tuple[int, ...]], heads: Sequence[tuple[int, ...]]) -> Intervention:
    """Zero neurons and replace heads by their mean output."""
    if not heads:
        return Ablate(sites=[*neurons])
    replaced = Ablate(heads=[*heads], value="mean")
    if not neurons:
        return replaced
    return Ablate(sites=[*neurons]) | replaced


def _writing(setup: Setup, name: str, result: Barcode) -> Writing:
    return Writing(
        name=name,
        tokens=tuple(setup.tokenizer.decode([token]) for token in result.ids[result.prompt_tokens :]),
        alarms=result.events.get("guard", ()),
        head=result.shown[0],
        steps=picture_bins(result.prompt_tokens, len(result.ids))[0],
        picture=Packed.of(codes_of(torch.from_numpy(result.attention[0]))),
    )


def _rounded(values: Float[np.ndarray, "*axes"]) -> Float[np.ndarray, "*axes"]:
    """Four significant digits: more only make a file larger."""
    with np.errstate(divide="ignore"):
        digits = 3 - np.floor(np.log10(np.abs(values)))
    factor = 10.0 ** np.where(np.isfinite(digits), digits, 0)
    return np.round(values * factor) / factor
