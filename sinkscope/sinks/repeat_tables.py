"""The tables of `repeat`: what the last copy has beside its controls, and what each token does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.table import Row, column, optional
from sinkscope.sinks.spikes.spike import common_layers, layers_words


@dataclass(frozen=True)
class CopiesKey:
    """What is read of copies in a spike, or, without layers, of what the model writes.

    Attributes:
        layers: First and last layer of the spike.
    """

    layers: tuple[int, int] | None = None

    def __str__(self) -> str:
        return "text" if self.layers is None else f"copies, {layers_words(*self.layers)}"

    def shared(self, other: CopiesKey) -> int:
        """Return how many layers it has in common with another spike."""
        if self.layers is None or other.layers is None:
            return 0
        return common_layers(self.layers, other.layers)


class Filled(StrEnum):
    """What stands before the position that is read."""

    COPIES = "copies"
    ONE_COPY = "one_copy"  # ordinary tokens, and one copy at the end
    OTHERS = "others"  # ordinary tokens alone


@dataclass(frozen=True, kw_only=True)
class AtLastCopy(
    Row,
    table="effects",
    title="at the last of as many tokens",
    note="Mean over the repeated tokens. Under controls it should be near 0.",
):
    """What is read at the position of the last copy.

    Attributes:
        layers: The spike. None: it is about no spike.
    """

    key: Filled
    layers: tuple[int, int] | None = None

    share: Mean = column(
        "mean\nshare",
        "share",
        "Of the norm: the projection on the direction of the spike, over that of the first token. Of the attention: "
        "the share that later text gives to the copies' positions. Of the probability: that of the token as the next.",
    )

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key is not Filled.COPIES

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        spike = "" if self.layers is None else f", spike of {layers_words(*self.layers)}"
        if self.is_control:
            return f"controls{spike}"
        return "" if self.layers is None else f"spike of {layers_words(*self.layers)}"

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case Filled.COPIES:
                return "copies of a token"
            case Filled.ONE_COPY:
                return "other tokens, and one copy at the end"
            case Filled.OTHERS:
                return "other tokens"


@dataclass(frozen=True)
class TokenKey:
    """A token that is repeated, in a spike; without layers, in what the model writes."""

    token: str
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RepeatedToken(
    Row,
    table="tokens",
    title="repeated token",
    most=12,
    note="Reached: two copies in a row have at least half of the first token's spike. Counted apart: the first copy "
    "has it already, behind BOS or another token.",
):
    """What copies of one token have of a spike."""

    key: TokenKey

    first: Mean = column("first\ncopy", "share", "What the first copy has of the first token's spike.")
    last: Mean = column("last\ncopy", "share", "What the last copy has of it.")
    repeats: Mean | None = optional("copies to\nreach half", "count", "First number of copies that has half of it.")
    below: Mean | None = optional(
        "below half\nagain at", "count", "First number of copies after that with less than half of it."
    )
    apart: str | None = optional("apart", "word", "Whether the first copy has half of the spike already.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "" if self.key.layers is None else f"spike of {layers_words(*self.key.layers)}"

    @property
    def label(self) -> str:
        """What it is called."""
        return repr(self.key.token)


@dataclass(frozen=True, kw_only=True)
class LikelyToken(
    Row, table="tokens", title="repeated token", most=12, note="Stops: from then on the probability stays below 50%."
):
    """How likely one more copy of a token is."""

    key: TokenKey

    first: Mean = column("after\none copy", "share", "Probability that the token comes next after one copy.")
    last: Mean = column("after the\nlast copy", "share", "The same after the last copy.")
    repeats: Mean | None = optional(
        "stops\nafter", "count", "Number of copies from which on the probability stays below one half."
    )

    @property
    def label(self) -> str:
        """What it is called."""
        return repr(self.key.token)


class Places(StrEnum):
    """To which positions attention is given."""

    SINK = "sink"  # the place of the spike
    COPIES = "copies"


class Text(StrEnum):
    """What stands before the text whose attention is read."""

    NATURAL = "natural"
    COPIES = "copies"
    ONE_COPY = "one_copy"


@dataclass(frozen=True)
class GivenKey:
    """The attention that positions get after some text."""

    text: Text
    places: Places


@dataclass(frozen=True, kw_only=True)
class Given(
    Row,
    table="attention",
    title="attention of later text",
    note="1: as much as if all positions got the same.",
):
    """The attention that later text gives to a position, over what it would get if all got the same."""

    key: GivenKey

    times: Mean = column(
        "times an equal\nshare", "number", "Mean attention to a position over what each would get of equal attention."
    )

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        match self.key.text:
            case Text.NATURAL:
                return "control: after ordinary text"
            case Text.COPIES:
                return "after copies"
            case Text.ONE_COPY:
                return "control: after ordinary text with one copy at the end"

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key.text is not Text.COPIES

    @property
    def label(self) -> str:
        """What it is called."""
        return "the first token" if self.key.places is Places.SINK else "the copies' positions"
