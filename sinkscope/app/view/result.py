"""What `sinkscope view` shows: texts as a model reads them, intact and under edits, and the circuit of the sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from sinkscope.app.view.packed import Packed
from sinkscope.measure import Result


@dataclass(frozen=True)
class Variant:
    """A text as the model reads it, intact or under one edit.

    Attributes:
        name: "intact", or what is edited.
        sentence: What the edit changed, and by how much, beside its control.
        norm: L2 norm of the residual stream after each layer.
        received: Attention that each position receives, mean over later queries; 0 at the last position.
        rows: Attention `[query key]` of each head in `ViewedText.heads`.
        following: The likeliest next tokens after the text, with their probabilities.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}

    name: str
    sentence: str
    norm: Float[np.ndarray, "layer pos"]
    received: Packed
    rows: tuple[Packed, ...]
    following: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ViewedText:
    """A text and its variants.

    Attributes:
        name: What the text is.
        tokens: Its tokens.
        heads: Heads whose rows are stored, as (layer, head); all heads if there is room.
        variants: The intact text first.
        spikes: Positions whose norm stands out after the sink layer of the intact model.
    """

    name: str
    tokens: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    variants: tuple[Variant, ...]
    spikes: tuple[int, ...]


@dataclass(frozen=True)
class Writing:
    """What a model writes after a prompt.

    Attributes:
        name: "without the guard" or "with the guard".
        prompt: The prompt.
        pieces: The text; between two pieces, the guard took copies back.
        summary: What the guard did.
    """

    name: str
    prompt: str
    pieces: tuple[str, ...]
    summary: str


@dataclass(frozen=True)
class CircuitPart:
    """A part of the circuit of a spike.

    Attributes:
        name: The part, such as "L2.N412", "L0.H4" or "the MLP of layer 2".
        share: Of a part that writes the spike, its share of it; of a head that reads it, its attention to the place.
        left: Share of the spike that is left without the part. None: it was not measured alone.
    """

    name: str
    share: float | None = None
    left: float | None = None


@dataclass(frozen=True)
class CircuitSpike:
    """A spike in the column of the circuit.

    Attributes:
        place: Where it is.
        layers: First and last layer in which it stands out.
        peak: The layer after which it is largest.
        ratio: Norm there over the typical one.
        marks: What marks the place.
        writers: What writes it, and what it needs.
        readers: The heads that attend to the place, each once, the strongest first.
        sentence: What is left without what it needs, beside random parts. Empty: nothing is known that it needs.
    """

    place: str
    layers: tuple[int, int]
    peak: int
    ratio: float
    marks: tuple[CircuitPart, ...]
    writers: tuple[CircuitPart, ...]
    readers: tuple[CircuitPart, ...]
    sentence: str


@dataclass(frozen=True, kw_only=True)
class ModelView(Result):
    """A model on texts that can be explored with the mouse or the keys.

    Attributes:
        layer: The sink layer. If no MLP makes a sink, the layer after which a token stands out most.
        typical_norm: Median norm over later positions of typical text.
        neurons: The sink neurons.
        marks: The heads that mark the first token or a repetition, as `circuit` finds them.
        switches: The edits that can be switched on.
        control: Name of the switch that is the control of the sink neurons, if there is one.
        texts: The texts.
        circuit: The spikes, those that most heads read first.
        circuit_sentence: The conclusion about the circuit.
        generation: What the model writes without the guard and with it; empty if it was not asked.
    """

    kind = "view"
    page = "view"

    layer: int
    typical_norm: Float[np.ndarray, " layer"]
    neurons: tuple[str, ...]
    marks: tuple[str, ...]
    switches: tuple[str, ...]
    control: str = ""
    texts: tuple[ViewedText, ...]
    circuit: tuple[CircuitSpike, ...] = ()
    circuit_sentence: str = ""
    generation: tuple[Writing, ...] = ()

    def own_page(self) -> str:
        """Return the page in which it can be explored."""
        from sinkscope.app.view.page import view_page

        return view_page(self, self.model.name)

    def conclusion(self) -> str:
        """Return which tokens of the first text have a norm spike, beside typical text."""
        return self.texts[0].variants[0].sentence
