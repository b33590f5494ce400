"""What `sinkscope view` shows: texts as a model reads them, intact and under edits, and the circuit of the sink."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from sinkscope.measure import Result
from sinkscope.results.mean import Mean
from sinkscope.results.table import Row, Subject, column, whole
from sinkscope.sinks.spikes.result import SpikeResult
from sinkscope.sinks.spikes.tables import SpikeKey, parts_names

LEVELS = 255
DARKEST = 1e-9  # has the code 0; still smaller numbers are slow to take roots of


@dataclass(frozen=True)
class Packed:
    """An array of shares, from 0 to 1, in 8 bits each. The steps are smallest near zero.

    A value is `(code / 255) ** 2`, and its error is at most 1/255.

    Attributes:
        shape: Length of each axis.
        codes: The codes in row-major order, compressed with zlib, as base64.
    """

    shape: tuple[int, ...]
    codes: str

    @classmethod
    def of(cls, codes: UInt8[np.ndarray, "*axes"]) -> Packed:
        """Return the array that has these codes."""
        packer = zlib.compressobj(strategy=zlib.Z_RLE)  # for rows of attention smaller, and twice as fast
        packed = packer.compress(codes.tobytes()) + packer.flush()
        return cls(codes.shape, base64.b64encode(packed).decode())

    def array(self) -> Float[np.ndarray, "*axes"]:
        """Return the values."""
        codes = np.frombuffer(zlib.decompress(base64.b64decode(self.codes)), np.uint8)
        return ((codes / LEVELS) ** 2).reshape(self.shape)


def codes_of(shares: Float[Tensor, "*axes"]) -> UInt8[np.ndarray, "*axes"]:
    """Return the codes of shares; values below 0, and NaN, become 0, and values above 1 become 1."""
    return shares.nan_to_num(0).clamp_(DARKEST, 1).sqrt_().mul_(LEVELS).round_().byte().cpu().numpy()


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
class CircuitSpike:
    """A spike in the column of the circuit.

    Attributes:
        found: The spike.
        lines: What is measured of it: labels, each with its numbers.
        first_reader: The layer of the first row of `attention`.
        attention: Mean attention of each head to the place, in the layers whose heads can read the spike.
    """

    found: SpikeResult
    lines: tuple[tuple[str, str], ...]
    first_reader: int
    attention: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CircuitRow(
    Row, table="circuit", title="norm spike", note="A head attends if the place has more than 0.3 of its attention."
):
    """A spike of the circuit."""

    key: SpikeKey

    heads: Mean = column("heads that\nattend", "count", "Heads in its layers whose mean attention to it is above 0.3.")
    ratio: Mean = column("times other\ntokens", "times", "L2 norm at the place over the median norm of later tokens.")
    needs: str = column("needs", "word", "The smallest set without which less than a quarter of the spike is left.")


@dataclass(frozen=True, kw_only=True)
class ModelView(Result):
    """A model on texts that can be explored with the mouse or the keys.

    Attributes:
        layer: The sink layer. If no MLP makes a sink, the layer after which a token stands out most.
        typical_norm: Median norm over later positions of typical text.
        neurons: The sink neurons.
        marks: The heads that mark the first token or a repetition, as `why_sink` finds them.
        switches: The edits that can be switched on.
        meanings: What each of these edits does, in a sentence.
        control: Name of the switch that is the control of the sink neurons, if there is one.
        texts: The texts.
        circuit: The spikes, those that most heads read first.
        circuit_sentence: The conclusion about the circuit.
        purpose: What hiding the sink from later tokens costs, in a sentence; empty if it was not measured.
        others: What each measurement of another package says, or why it has no result.
    """

    kind = "view"
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
    purpose: str = ""
    others: dict[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """Return the page in which it can be explored."""
        from sinkscope.app.view.page import view_page

        return view_page(self, self.model.name)

    def conclusion(self) -> str:
        """Return which tokens of the first text have a norm spike, beside typical text."""
        return self.texts[0].variants[0].sentence

    def details(self) -> list[str]:
        """Return what each switch changes in the first text."""
        return [variant.sentence for variant in self.texts[0].variants[1:]]

    def subjects(self) -> list[Subject]:
        """Return one row per spike of the circuit."""
        rows: list[CircuitRow] = []
        for spike in (entry.found for entry in self.circuit):
            needs = parts_names(spike.needed) if spike.needed else "nothing that was tried"
            rows.append(CircuitRow(key=spike.key, heads=whole(spike.heads), ratio=Mean(spike.ratio), needs=needs))
        return [Subject("", tuple(rows), "circuit")] if rows else []
