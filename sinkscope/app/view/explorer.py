"""What pages and widgets ask of an open model: its readings of texts, intact and under edits, as results."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel

from sinkscope.app.report import not_measured, why_missing
from sinkscope.app.view.readings import (
    ModelSink,
    TextReading,
    four_digits,
    heads_that_fit,
    read_tokens,
    spikes_of,
)
from sinkscope.app.view.result import (
    CircuitSpike,
    ModelView,
    Packed,
    Variant,
    ViewedText,
    codes_of,
)
from sinkscope.app.view.switches import OTHERS_SWITCH, Switch, moved_names, switch_named, switch_without, switches_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import other_measurements
from sinkscope.files.plain import check_encodable
from sinkscope.files.records import checked_value
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.trace import trace
from sinkscope.measure import Setup
from sinkscope.models.inputs import check_length
from sinkscope.models.text import behind_beginning
from sinkscope.results.table import lines_of
from sinkscope.sinks.spikes.result import purpose_sentence, spike_subject

MOST_TOKENS = 512
STORY = (
    "Once upon a time, there was a little bird who lived in a tall tree. Every day she sang a song for her friends. "
    'One day, a big cat came to the tree and said, "Can you sing for me, too?" The little bird was scared, but she'
)
PAGE_VALUES = 24 << 20  # values of attention in a page


class Request(BaseModel, extra="forbid"):
    """What a page asks for; see `Explorer.answer`."""

    text: str | None = None
    switch: str | None = None
    off: tuple[str, ...] = ()


@dataclass
class Explorer(ModelSink):
    """An open model, what is known of its sink, and the text that is shown.

    Attributes:
        text: The text that is shown where a request names none. None: a story.
        latest: The text that was read last, and how the intact model reads it.
        lock: Held by whoever runs the model.
    """

    text: str | None = None
    latest: tuple[str | None, TextReading] | None = None
    lock: Any = field(default_factory=threading.RLock)

    @classmethod
    def showing(cls, text: str | None, model: object, **options: Any) -> Explorer:
        """Open a model for a text, or a story; a text that cannot be shown is refused before anything is measured.

        Args:
            text: The text.
            model: As for `Setup.open`.
            options: As for `Setup.open`.
        """
        if text is not None:
            refuse_blank(text)
        setup = Setup.open(model, **options, loading="whole")
        setup.target.shards.check_alone("view")
        ids_of(setup, STORY if text is None else text)
        return cls(setup, text)

    @cached_property
    def column(self) -> tuple[CircuitSpike, ...]:
        """The circuit of each spike, that which most heads read first."""
        column: list[CircuitSpike] = []
        for found, measured in zip(self.circuit.spikes, self.sinks.spikes, strict=True):
            shares = measured.reported.attention.mean(-1).tolist()
            attention = tuple(tuple(round(share, 5) for share in layer) for layer in shares)
            first = measured.spike.reading_layers.start
            column.append(CircuitSpike(found, lines_of(spike_subject(found)), first, attention))
        return tuple(column)

    @cached_property
    def others(self) -> dict[str, str]:
        """What the measurements of other packages say of the model, with their defaults."""
        notes: dict[str, str] = {}
        for name, point in other_measurements().items():
            try:
                outcome = point.load().on(replace(self.setup, settings={}, started=time.perf_counter()))
                notes[name.replace("_", "-")] = outcome.conclusion()
            except Exception as error:
                notes[name.replace("_", "-")] = not_measured(why_missing(error))
        return notes

    def read(self, text: str | None) -> TextReading:
        """Return how the intact model reads a text, or a story; the last one is kept."""
        if self.latest is None or self.latest[0] != text:
            self.latest = (text, read_tokens(self, ids_of(self.setup, STORY if text is None else text)))
        return self.latest[1]

    def view(self, text: str | None = None) -> ModelView:
        """Return the model on a text, intact and under its switches: all that a page shows alone."""
        text = self.text if text is None else text
        return self.result(text, [None, *switches_of(self), *self.moved_in(text)])

    def moved_in(self, text: str | None) -> list[Switch]:
        """Return the switches of the token in the middle of a text."""
        length = len(self.read(text).ids)
        return [switch_named(self, name, length) for name in moved_names(self, length)]

    def result(self, text: str | None, shown: Sequence[Switch | None]) -> ModelView:
        """Return the view of a text under these switches, with all that is known of the sink; None is no switch."""
        setup, switches = self.setup, [*switches_of(self), *self.moved_in(text)]
        answered = self.circuit.answered
        purpose = None if answered is None else purpose_sentence(answered)
        return ModelView(
            model=setup.info(),
            settings={"seed": setup.seed, "bos": setup.bos is not None},
            provenance=setup.provenance(),
            layer=self.layer,
            typical_norm=_rounded(np.array(self.sinks.survey.typical_norm)),
            neurons=tuple(map(str, self.neurons)),
            marks=tuple(map(str, self.marks)),
            switches=tuple(switch.name for switch in switches),
            meanings=tuple(switch.meaning for switch in switches),
            control=OTHERS_SWITCH,
            texts=(self.viewed(text, shown),),
            circuit=self.column,
            circuit_sentence=self.circuit.conclusion(),
            purpose=purpose or "",
            others=self.others,
        )

    def viewed(self, text: str | None, switches: Sequence[Switch | None]) -> ViewedText:
        """Return a text under these switches; None is the intact model."""
        intact = self.read(text)
        tokens = tuple(self.setup.tokenizer.decode([token]) for token in intact.ids)
        heads = heads_that_fit(intact, PAGE_VALUES // len(switches))
        variants: list[Variant] = []
        for switch in switches:
            name, reading, sentence = "intact", intact, self.intact_sentence(intact, tokens)
            if switch is not None:
                name, reading = switch.name, read_tokens(self, switch.of(intact.ids), switch.edit)
                sentence = self.change(switch, intact, reading, tokens)
            variant = Variant(
                name=name,
                sentence=sentence,
                norm=_rounded(reading.norm),
                received=Packed.of(codes_of(reading.received)),
                rows=tuple(Packed.of(reading.rows[head]) for head in heads),
                following=reading.following,
            )
            variants.append(variant)
        name = "text" if text else "a story"
        return ViewedText(name, tokens, heads, tuple(variants), spikes_of(self, intact))

    def intact_sentence(self, intact: TextReading, tokens: Sequence[str]) -> str:
        """Return how many tokens have a norm spike, and the largest norm beside typical text."""
        layer, count = self.layer, len(spikes_of(self, intact))
        norm = intact.norm[layer]
        highest = int(norm.argmax())
        return (
            f"{count} of {len(norm)} tokens {'has' if count == 1 else 'have'} a norm spike after layer {layer}: "
            f"the largest norm is {short(norm[highest])} at {tokens[highest]!r}, where typical text has "
            f"{short(self.sinks.survey.typical_norm[layer])}."
        )

    def change(self, switch: Switch, intact: TextReading, reading: TextReading, tokens: Sequence[str]) -> str:
        """Return what an edit changes most, beside its control."""
        layer = self.layer
        before, after = intact.norm[layer], reading.norm[layer]
        position = int(np.abs(after - before).argmax())
        chance = ""
        if switch.control is not None:
            site = f"blocks.{layer}.hook_resid_post"
            with under(switch.control, self.setup.target):
                states = trace(self.setup.target, [intact.ids], site)[site]
            chance = f" (control: {short(float(states[0, position].float().norm()))})"
        moved = f"from {short(before[position])} to {short(after[position])}{chance}"
        return (
            f"{switch.name[:1].upper()}{switch.name[1:]}: after layer {layer}, the norm changes most at token "
            f"{position}, {tokens[position]!r}, {moved}."
        )

    def answer(self, request: Any) -> dict[str, Any]:
        """Return what a page asks for, as the dictionary of a view that holds nothing else; or an error in one line.

        Args:
            request: An object. `text` is the text (None: that of the explorer). Without more, its intact variant is
                measured. `switch` (a name) or `off` (names of neurons and heads) asks for this variant of the text.
        """
        try:
            asked = checked_value(Request, request, "the request: ")
            with self.lock:
                text = asked.text or self.text
                switch: Switch | None = None
                if asked.switch is not None:
                    switch = switch_named(self, asked.switch, len(self.read(text).ids))
                elif asked.off:
                    switch = switch_without(self, asked.off)
                return self.result(text, [switch]).to_dict()
        except SinkscopeError as error:
            return {"error": str(error)}


def refuse_blank(text: str) -> None:
    """Refuse a text of which no tokenizer makes a word.

    Raises:
        SinkscopeError: It is empty, or no Unicode.
    """
    check_encodable(text, "the text")
    if not text.strip():
        raise SinkscopeError("the text is empty: give one with at least one word")


def ids_of(setup: Setup, text: str) -> list[int]:
    """Return the tokens of a text, after BOS if there is one.

    Raises:
        SinkscopeError: The text is empty, unknown to the tokenizer, or too long.
    """
    refuse_blank(text)
    ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if set(ids) <= {setup.tokenizer.unk_token_id}:
        raise SinkscopeError(f"the text {text[:40]!r} has no word that this tokenizer knows: give another text")
    ids = behind_beginning(setup.tokenizer, setup.bos, ids)
    if len(ids) > MOST_TOKENS:
        raise SinkscopeError(
            f"the text has {len(ids)} tokens and a view shows {MOST_TOKENS} at most: give a shorter text"
        )
    check_length(setup.target, "the text", len(ids))
    return ids


def short(value: float) -> str:
    """Return a number with four significant digits and without a power of ten: 25,100."""
    return f"{four_digits(value):,.12g}"


def _rounded(values: Float[np.ndarray, "*axes"]) -> Float[np.ndarray, "*axes"]:
    """Return an array with four significant digits."""
    return np.vectorize(four_digits, otypes=[float])(values)
