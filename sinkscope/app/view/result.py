"""What `sinkscope view` shows: texts as a model reads them, intact and under edits, and the circuit of the sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from sinkscope.app.view.packed import Packed
from sinkscope.measure import Result
from sinkscope.results.tables import Table


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
        activations: Activation of each neuron of `ModelView.neuron_pages` at each token, after the edit; nothing for a
            neuron that has its intact ones. Empty for the intact model, and for experts, where they are not measured.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}

    name: str
    sentence: str
    norm: Float[np.ndarray, "layer pos"]
    received: Packed
    rows: tuple[Packed, ...]
    following: tuple[tuple[str, float], ...] = ()
    activations: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class ViewedText:
    """A text and its variants.

    Attributes:
        name: What the text is.
        tokens: Its tokens.
        heads: Heads whose rows are stored, as (layer, head); all heads if there is room.
        variants: The intact text first.
        spikes: Positions whose norm stands out after the sink layer of the intact model.
        activations: Activation of each neuron of `ModelView.neuron_pages` at each token, in the intact model.
    """

    name: str
    tokens: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    variants: tuple[Variant, ...]
    spikes: tuple[int, ...]
    activations: tuple[tuple[float, ...], ...] = ()


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
        share: Of a part that writes the spike or erases it, what it writes, as a share of the spike. None: not listed.
        left: Share of the spike that is left without the part. None: it was not measured alone.
        others: Of a part that marks the place, the median share left without as many others. None: there are none.
        needed: Whether the part is in the smallest set found that the spike needs.
    """

    name: str
    share: float | None = None
    left: float | None = None
    others: float | None = None
    needed: bool = False


@dataclass(frozen=True)
class Remaining:
    """What is left without some parts.

    Attributes:
        parts: The parts; empty for random ones that stand for several sets.
        left: Share of the spike.
        heads: Heads in its layers that attend to the place.
        perplexity: Perplexity over that of the intact model. None: it was not measured.
    """

    parts: tuple[str, ...]
    left: float
    heads: int
    perplexity: float | None


@dataclass(frozen=True)
class CircuitSpike:
    """A spike in the column of the circuit.

    Attributes:
        place: Where it is.
        layers: First and last layer in which it stands out.
        peak: The layer after which it is largest.
        norm: Norm there after the peak.
        before: Norm there before the run.
        ratio: Norm there over the typical one.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        marks: What marks the place.
        writers: What writes it: neurons by name, then components without these neurons; the shares sum to 1.
        erasers: What is written against it after the peak.
        heads: Heads in its layers that attend to the place.
        first_reader: The layer of the first row of `attention`.
        attention: Mean attention of each head to the place, in the layers whose heads can read the spike.
        needed: What is left without what it needs. None: nothing is known that it needs.
        random: The same without random parts.
        sentence: The same in words. Empty: nothing is known that it needs.
    """

    place: str
    layers: tuple[int, int]
    peak: int
    norm: float
    before: float
    ratio: float
    dims: tuple[int, ...]
    marks: tuple[CircuitPart, ...]
    writers: tuple[CircuitPart, ...]
    erasers: tuple[CircuitPart, ...]
    heads: int
    first_reader: int
    attention: tuple[tuple[float, ...], ...]
    needed: Remaining | None
    random: Remaining | None
    sentence: str


@dataclass(frozen=True)
class Activation:
    """A neuron at a position of the typical text.

    Attributes:
        value: Its activation, the input of the down projection.
        before: The text before the token.
        token: The token.
        after: The text after it.
        texts: Number of texts that begin with the same tokens up to there, so that the value is the same.
    """

    value: float
    before: str
    token: str
    after: str
    texts: int


@dataclass(frozen=True)
class NeuronSpike:
    """A neuron as a writer of a spike.

    Attributes:
        spike: Number of the spike in `ModelView.circuit`.
        share: What it writes, as a share of the spike. None: it is not listed among the writers.
        alone: What is left without it alone. None: it was not measured.
        random: The same without a random neuron of its layer.
    """

    spike: int
    share: float | None
    alone: Remaining | None
    random: Remaining | None


@dataclass(frozen=True)
class NeuronPage:
    """What a page says of a neuron that writes a spike.

    Attributes:
        name: The neuron.
        spikes: The spikes that it writes, or that need it.
        median: Its median activation on the typical text.
        positions: Number of positions of that text.
        largest: Its activations of largest magnitude there, each beginning of a text once.
    """

    name: str
    spikes: tuple[NeuronSpike, ...]
    median: float
    positions: int
    largest: tuple[Activation, ...]


@dataclass(frozen=True, kw_only=True)
class ModelView(Result):
    """A model on texts that can be explored with the mouse or the keys.

    Attributes:
        layer: The sink layer. If no MLP makes a sink, the layer after which a token stands out most.
        typical_norm: Median norm over later positions of typical text.
        neurons: The sink neurons.
        marks: The heads that mark the first token or a repetition, as `circuit` finds them.
        switches: The edits that can be switched on.
        meanings: What each of these edits does, in a sentence.
        control: Name of the switch that is the control of the sink neurons, if there is one.
        texts: The texts.
        circuit: The spikes, those that most heads read first.
        circuit_sentence: The conclusion about the circuit.
        neuron_pages: The neurons that the circuit names.
        generation: What the model writes without the guard and with it; empty if it was not asked.
    """

    kind = "view"
    page = "view"
    columns = ("place", "needed", "layers", "heads")
    glossary: ClassVar[dict[str, str]] = {
        "place": "Where the norm stands out.",
        "layers": "First and last layer in which it does.",
        "ratio": "Norm there over the typical one.",
        "heads": "Heads of its layers that attend to the place.",
        "needed": "The neurons or components without which it goes.",
    }

    layer: int
    typical_norm: Float[np.ndarray, " layer"]
    neurons: tuple[str, ...]
    marks: tuple[str, ...]
    switches: tuple[str, ...]
    meanings: tuple[str, ...] = ()
    control: str = ""
    texts: tuple[ViewedText, ...]
    circuit: tuple[CircuitSpike, ...] = ()
    circuit_sentence: str = ""
    neuron_pages: tuple[NeuronPage, ...] = ()
    generation: tuple[Writing, ...] = ()

    def own_page(self) -> str:
        """Return the page in which it can be explored."""
        from sinkscope.app.view.page import view_page

        return view_page(self, self.model.name)

    def conclusion(self) -> str:
        """Return which tokens of the first text have a norm spike, beside typical text."""
        return self.texts[0].variants[0].sentence

    def facts(self) -> list[str]:
        """Return what each switch changes in the first text."""
        return [variant.sentence for variant in self.texts[0].variants[1:]]

    def rows(self) -> Table:
        """Return one row per spike of the circuit."""
        rows: Table = []
        for spike in self.circuit:
            first, last = spike.layers
            row = {"place": spike.place, "layers": f"{first}-{last}", "ratio": spike.ratio, "heads": spike.heads}
            rows.append({**row, "needed": ", ".join(part.name for part in spike.writers if part.needed)})
        return rows
