"""The tables of `why_sink`: what makes a position the sink, why heads read it, what for, and what marks it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Component, Head, word_list
from sinkscope.results.table import Row, column, detail, optional
from sinkscope.sinks.spikes.tables import parts_names

# --- what makes a position the place ---


class Cause(StrEnum):
    """What is special about the first token."""

    TOKEN = "token"
    ALONE = "alone"
    ID = "id_0"

    @property
    def given(self) -> str:
        """What an ordinary position is or does that gets it."""
        words = {Cause.TOKEN: "is the same token", Cause.ALONE: "sees only itself", Cause.ID: "has position id 0"}
        return words[self]

    @property
    def taken(self) -> str:
        """What the place is or does without it."""
        words = {
            Cause.TOKEN: "is another token",
            Cause.ALONE: "sees 4 tokens before it",
            Cause.ID: "has position id 32",
        }
        return words[self]

    @property
    def short(self) -> str:
        """What a figure calls it."""
        return {Cause.TOKEN: "same token", Cause.ALONE: "sees itself", Cause.ID: "id 0"}[self]

    @property
    def short_taken(self) -> str:
        """What a figure calls the place without it."""
        return {Cause.TOKEN: "other token", Cause.ALONE: "sees 4 more", Cause.ID: "id 32"}[self]


@dataclass(frozen=True)
class Condition:
    """What an ordinary position gets of the first token's causes, or which is taken away at the place.

    Attributes:
        causes: The causes, in the order of `Cause`.
        at_place: Whether these are taken away at the place.
        one_other: Whether an ordinary position sees one other token beside itself: the control of `Cause.ALONE`.
    """

    causes: tuple[Cause, ...] = ()
    at_place: bool = False
    one_other: bool = False

    @property
    def gives(self) -> bool:
        """Whether an ordinary position gets some of the causes."""
        return bool(self.causes) and not self.at_place

    def __str__(self) -> str:
        if self.one_other:
            return "sees one other token"
        if self.at_place:
            return word_list([cause.taken for cause in self.causes])
        return word_list([cause.given for cause in self.causes]) if self.causes else "is left as it is"


AS_IT_IS = Condition()
ONE_OTHER = Condition(one_other=True)


@dataclass(frozen=True, kw_only=True)
class Conditioned(
    Row,
    table="conditions",
    title="what makes the sink",
    note="Spike there: 100% is that of the first token. Sees only itself: in all layers; one other: drawn at "
    "random. A head "
    "attends if the position has more than 0.3 of its attention.",
):
    """What a position has of a spike under a condition."""

    key: Condition

    left: Mean = column(
        "spike\nthere",
        "share",
        "Projection of the state at the position on the direction of the spike, over that of the first token; mean "
        "over "
        "texts.",
    )
    heads: Mean | None = optional(
        "heads that\nattend",
        "count",
        "Heads in the layers that read the spike whose mean attention to it is above 0.3.",
    )

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        if self.is_control:
            return "control: an ordinary token that"
        return "the first token, if it" if self.key.at_place else "an ordinary token that"

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key in (AS_IT_IS, ONE_OTHER)

    @property
    def short_label(self) -> str:
        """What a figure calls it."""
        if self.key.one_other:
            return "sees one other"
        if self.key.at_place:
            return f"first token: {', '.join(cause.short_taken for cause in self.key.causes)}"
        return ", ".join(cause.short for cause in self.key.causes) or "as it is"


# --- why heads read it ---


class ConstancyKey(StrEnum):
    """What is compared between texts."""

    STATE = "state"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class Constancy(
    Row,
    table="constant",
    title="why heads read it",
    note="Cosine 1: the state is the same vector in every text, a fixed key that heads can look for. Value: the "
    "vector that a head adds where it attends; small, it adds little. Those heads: above 0.3 in the mean over texts.",
):
    """How constant the spike makes the place, beside an ordinary position.

    Attributes:
        key: The cosine of states between texts, or the norm of the value over the typical one.
        readers: Heads that read the place.
        since: The first layer in which they do.
        beside: The layer before the spike.
    """

    key: ConstancyKey
    readers: int
    since: int
    beside: int

    before: Mean = column("first token\nbefore", "number", "At the place, at the input of the layer before its spike.")
    after: Mean = column("first token\nafter", "number", "At the place, at the input of the first layer that reads it.")
    ordinary_before: Mean = column(
        "other token\nbefore", "number", "At an ordinary position, in the same layer before."
    )
    ordinary_after: Mean = column("other token\nafter", "number", "At an ordinary position, in the same layer after.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return (
            f"before: at layer {self.beside}, without the spike; after: at layer {self.since}, the first in which "
            "heads attend to it"
        )

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case ConstancyKey.STATE:
                return "cosine of its states in two texts"
            case ConstancyKey.VALUE:
                return f"norm of its value over the median, in the {self.readers} heads that attend to it"


# --- what attention to it is for ---


class PurposeKey(StrEnum):
    """What is done to the place, in layers from one on."""

    INTACT = "intact"
    HIDDEN_EVERYWHERE = "hidden_everywhere"
    HIDDEN = "hidden"
    VALUE_ZERO = "value_zero"
    VALUE_MEAN = "value_mean"
    OTHER_HIDDEN = "other_hidden"  # another position is hidden: the control


@dataclass(frozen=True, kw_only=True)
class Purpose(
    Row,
    table="purpose",
    title="what attention to it does",
    note="A head of any layer is on a token if its queries from the 16th token on give it more than 0.3 of their "
    "attention. Loss added: over tokens from the 16th on. Mean value: that of other tokens, in each head.",
):
    """What later tokens lose without the place.

    Attributes:
        since: The first layer that is changed. None: all layers are.
        other: The position that is hidden instead of the place, as a control.
    """

    key: PurposeKey
    since: int | None = None
    other: int | None = None

    loss: Mean | None = optional(
        "loss added", "rise", "Loss of the later tokens with the change minus their loss without, mean over texts."
    )
    heads: Mean | None = optional(
        "heads on the\nfirst token", "count", "Heads whose mean attention to it is above 0.3."
    )
    taker_heads: Mean | None = optional(
        "heads on the\nsecond", "count", "Heads whose mean attention to the second token is above 0.3."
    )
    tokens: Mean | None = detail("tokens", "count", "Tokens whose loss was read.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key is PurposeKey.OTHER_HIDDEN

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "control" if self.is_control else ""

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case PurposeKey.INTACT:
                return "nothing changed"
            case PurposeKey.HIDDEN_EVERYWHERE:
                return "first token hidden in all layers"
            case PurposeKey.HIDDEN:
                return f"first token hidden from layer {self.since} on"
            case PurposeKey.VALUE_ZERO:
                return f"its value set to zero from layer {self.since} on"
            case PurposeKey.VALUE_MEAN:
                return f"its value set to the mean from layer {self.since} on"
            case PurposeKey.OTHER_HIDDEN:
                return f"token {self.other} hidden from layer {self.since} on"


# --- what marks it ---


@dataclass(frozen=True, kw_only=True)
class Mark(
    Row,
    table="marks",
    title="without its mark",
    note="The mark is what earlier parts write at the first token by which the needed neurons know it. Each part is "
    "replaced there by its mean output at other tokens; control: the median of other components.",
):
    """Components before the writers without which the spike is not written."""

    key: tuple[Component, ...]

    left: Mean = column("spike\nleft", "share", "Share of the spike that is left if they are replaced at the place.")
    others: Mean | None = optional(
        "control: other\ncomponents", "share", "Median of what is left if other components are replaced instead."
    )

    @property
    def label(self) -> str:
        """What it is called."""
        return f"{parts_names(self.key, len(self.key))} replaced"


class MarkingKind(StrEnum):
    """Which heads are replaced at tokens that are put first."""

    NONE = "none"
    ALL = "all"  # all heads before the needed neurons
    FEWEST = "fewest"  # the fewest that take nine tenths of what all take
    RANDOM = "random"  # as many others
    HEAD = "head"


@dataclass(frozen=True)
class MarkingKey:
    """Heads that are replaced; of one head alone, which."""

    kind: MarkingKind
    head: Head | None = None


@dataclass(frozen=True, kw_only=True)
class Marking(
    Row,
    table="marking",
    title="heads replaced by their mean",
    note="Many tokens are put first, each alone; spike left: mean over those that have at least half of the "
    "spike. The set "
    "is the fewest heads that take nine tenths of what all take; a single head is listed if a token loses half "
    "without it.",
):
    """What is left of a spike at many tokens that are put first, without heads.

    Attributes:
        marking: The fewest heads, where the row is about them.
    """

    key: MarkingKey
    marking: tuple[Head, ...] = ()

    left: Mean | None = optional("spike\nleft", "share", "What is left of the spike, mean over tokens that have it.")
    count: Mean | None = detail("heads\nreplaced", "count", "Heads that are replaced by their mean.")
    have: Mean | None = optional(
        "tokens with\nthe spike", "count", "Tokens that, put first and alone, have at least half of the spike."
    )
    tried: Mean | None = optional("tokens\ntried", "count", "Tokens that were put first.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key.kind is MarkingKind.RANDOM

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "control" if self.is_control else ""

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key.kind:
            case MarkingKind.NONE:
                return "none"
            case MarkingKind.ALL:
                return f"all {self.text('count')} before the neurons" if self.count else "all before the neurons"
            case MarkingKind.FEWEST:
                return word_list(self.marking, 4)
            case MarkingKind.RANDOM:
                return "as many others (the strongest random set)"
            case MarkingKind.HEAD:
                return f"{self.key.head} alone"
