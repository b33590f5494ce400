"""The tables of `find_sinks` and `why_sink`: what each row is about, in types, and what its numbers mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from sinkscope.results.notation import Component, Head, Neuron, word_list
from sinkscope.results.row import Mean
from sinkscope.results.table import Row, column, detail, optional
from sinkscope.sinks.spikes.spike import Part, Parts, run

SHOWN = 3
"""Parts that a label names."""
Role = Literal["needed", "lowers", "backup", "another spike", "nothing", "raises"]
"""What the removal of a neuron does to the spike."""
WRITES: tuple[Role, ...] = ("needed", "lowers", "backup")
"""The roles of neurons that write a spike."""


def part_name(part: Part) -> str:
    """Return a part as tables have it: "MLP 11", "attention 3", "L0.H4", "L1.N338"."""
    return str(part).replace("mlp", "MLP")


def parts_names(parts: Parts, most: int = SHOWN) -> str:
    """Return the first of some parts: "L1.N83, L2.N90, L2.N430 and 4 more"."""
    return word_list([*map(part_name, parts)], most)


# --- the spike itself ---


@dataclass(frozen=True)
class SpikeKey:
    """A spike: its place and the layers in which it stands out."""

    place: str
    layers: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.place}, {run(*self.layers)}"

    def shared(self, other: SpikeKey) -> int:
        """Return how many layers it has in common with a spike at the same place."""
        last = min(self.layers[1], other.layers[1])
        return max(0, last + 1 - max(self.layers[0], other.layers[0])) if self.place == other.place else 0


@dataclass(frozen=True, kw_only=True)
class Size(Row, table="spike", title="the spike", form="title"):
    """How large a spike is, and who reads it."""

    key: Literal["size"] = "size"

    norm_before: Mean = column("norm\nbefore", "norm", "Mean norm of the state at the place before its first layer.")
    norm_after: Mean = column("norm\nat its peak", "norm", "Mean norm of the state at the place after its peak.")
    ratio: Mean = column("times the\ntypical norm", "times", "That norm over the median of later positions.")
    heads: Mean = column("heads that\nread it", "count", "Heads in its layers that give the place more than 0.3.")
    left: Mean | None = optional("left without\nthe needed", "share", "What is left of it without the needed parts.")


@dataclass(frozen=True, kw_only=True)
class Writer(Row, table="writers", title="written by", form="line", listed=("share", "role")):
    """What a neuron writes of a spike."""

    key: Neuron

    share: Mean = column("share\nwritten", "share", "What it writes along the spike, as a share of the spike.")
    role: Role = column("removing it", "word", "What zeroing it alone, or with the needed ones, does to the spike.")
    left: Mean = column("left\nwithout", "share", "What is left of the spike if it alone is zeroed (texts that chose).")
    neutral: Mean = column("ordinary\nvalue", "number", "Its median activation at ordinary positions.")


@dataclass(frozen=True, kw_only=True)
class Written(Row, table="components", title="components", form="line", listed=("share",)):
    """What a component writes of a spike up to its peak."""

    key: Component

    share: Mean = column("share\nwritten", "share", "What it writes along the spike, as a share of the spike.")

    @property
    def label(self) -> str:
        """What it is called."""
        return part_name(self.key)


@dataclass(frozen=True, kw_only=True)
class Erased(Written, table="erasers", title="erased by", form="line", listed=("share",)):
    """What a component writes against a spike after its peak."""


# --- what its parts do ---


class Done(StrEnum):
    """What is done to the model."""

    INTACT = "intact"
    NEEDED = "needed"  # the needed parts are zeroed or replaced
    PART = "part"  # one of them alone
    HIDDEN = "hidden"  # later tokens do not see the place
    BUSIEST = "busiest"  # other neurons are zeroed that write as much: those that write most
    AS_MANY = "as many"  # as many others as are needed, where no others write as much
    RANDOM = "random"  # random other neurons that write as much, or other components


CONTROLS = (Done.BUSIEST, Done.AS_MANY, Done.RANDOM)


@dataclass(frozen=True)
class Edit:
    """What is done, and where; of one part alone, which."""

    done: Done
    everywhere: bool = False
    part: Neuron | None = None


@dataclass(frozen=True, kw_only=True)
class Effect(Row, table="effects", title="what the spike does"):
    """What an edit does to a spike, to the heads that read it, and to what the model predicts.

    Attributes:
        parts: The parts that are zeroed or replaced, where these are the needed ones.
        since: The first layer in which the place is hidden.
    """

    key: Edit
    parts: Parts = ()
    since: int | None = None

    left: Mean | None = optional("spike\nleft", "share", "What is left of the spike, of the intact one.")
    heads: Mean | None = optional(
        "heads that\nread it", "count", "Heads in its layers that give the place more than 0.3."
    )
    loss: Mean | None = optional("cost", "nats", "By how much the loss of later tokens rises.")
    norm: Mean | None = detail("writes of\nthe needed", "share", "Norm of what the others write over the needed.")
    reached: Mean | None = detail("sets that\ndo as much", "count", "Random sets that do as much as the needed parts.")
    sets: Mean | None = detail("random\nsets", "count", "Random sets, each zeroed in texts of its own.")
    intact: Mean | None = detail("heads\nintact", "count", "Heads that read it in these texts without an edit.")
    tokens: Mean | None = detail("tokens", "count", "Tokens whose loss was read.")
    size: Mean | None = detail("neurons", "count", "Other neurons that were zeroed, mean over sets.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key.done in CONTROLS

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        if self.key.done is Done.AS_MANY:
            return "controls (no others write as much)"
        if self.is_control:
            return "controls"
        if self.key.done is Done.PART:
            return "each alone, at the place"
        if self.key.done is Done.NEEDED:
            zeroed = any(isinstance(part, Neuron) for part in self.parts)
            return f"{parts_names(self.parts)} {'zeroed' if zeroed else 'replaced'}"
        return ""

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key.done:
            case Done.NEEDED:
                return "everywhere" if self.key.everywhere else "at the place"
            case Done.PART:
                return str(self.key.part)
            case Done.HIDDEN:
                return f"place hidden from layer {self.since} on"
            case Done.BUSIEST | Done.AS_MANY | Done.RANDOM:
                return self.others
            case _:
                return "intact"

    @property
    def short_label(self) -> str:
        """What a figure calls it."""
        words = {Done.HIDDEN: "place hidden", Done.RANDOM: "random others"}
        words |= dict.fromkeys((Done.BUSIEST, Done.AS_MANY), "busiest others")
        return words.get(self.key.done, self.label)

    @property
    def others(self) -> str:
        """The parts of a control: "580 busiest others, everywhere"."""
        if self.left is None:
            return "none: no other part writes anything"
        if self.norm is None or self.size is None:
            return "another component, at the place"
        which = "random" if self.key.done is Done.RANDOM else "busiest"
        count = f"the {which} other"
        write = "writes"
        if self.size.value > 1:
            count = f"{self.text('size')} {which} others"
            write = "write"
        if self.key.done is Done.AS_MANY:
            return f"{count}, {write} {self.text('norm')} as much"
        if self.sets is not None:
            return f"{count}, everywhere ({self.text('reached')} of {self.text('sets')} sets do as much)"
        return f"{count}, everywhere"


# --- what makes a position the place ---


class Cause(StrEnum):
    """What is special about the first token."""

    TOKEN = "token"
    ALONE = "alone"
    ID = "id 0"

    @property
    def said(self) -> str:
        """What a position has that has it."""
        words = {Cause.TOKEN: "its token", Cause.ALONE: "sees only itself", Cause.ID: "position id 0"}
        return words[self]

    @property
    def taken(self) -> str:
        """What the place is without it."""
        words = {Cause.TOKEN: "another token", Cause.ALONE: "4 tokens before it", Cause.ID: "32 positions later"}
        return words[self]


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
        return word_list([cause.said for cause in self.causes]) if self.causes else "as it is"


AS_IT_IS = Condition()
ONE_OTHER = Condition(one_other=True)


@dataclass(frozen=True, kw_only=True)
class Conditioned(Row, table="conditions", title="what makes a sink"):
    """What a position has of a spike under a condition."""

    key: Condition

    left: Mean = column("spike\nthere", "share", "What the position has of the spike.")
    heads: Mean | None = optional("heads that\nread it", "count", "Heads that give the position more than 0.3.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        if self.is_control:
            return "an ordinary position, for comparison"
        return "the place with" if self.key.at_place else "an ordinary position with"

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key in (AS_IT_IS, ONE_OTHER)


# --- why heads read it ---

ConstancyKey = Literal["state", "value"]


@dataclass(frozen=True, kw_only=True)
class Constancy(Row, table="constant", title="why heads read it"):
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

    before: Mean = column("place\nbefore", "number", "At the place, before the first spike.")
    after: Mean = column("place\nafter", "number", "At the place, after the spike.")
    ordinary_before: Mean = column("ordinary\nbefore", "number", "At an ordinary position, before the first spike.")
    ordinary_after: Mean = column("ordinary\nafter", "number", "At an ordinary position, after the spike.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return f"{self.readers} heads from layer {self.since} on; before: layer {self.beside}"

    @property
    def label(self) -> str:
        """What it is called."""
        return {"state": "cosine of states between texts", "value": "value norm over the typical"}[self.key]


# --- what attention to it is for ---

PurposeKey = Literal["intact", "hidden in all layers", "hidden", "value zero", "value mean", "other hidden"]


@dataclass(frozen=True, kw_only=True)
class Purpose(Row, table="purpose", title="what attention to it is for"):
    """What later tokens lose without the place.

    Attributes:
        since: The first layer that is changed. None: all layers are.
        other: The position that is hidden instead of the place, as a control.
    """

    key: PurposeKey
    since: int | None = None
    other: int | None = None

    loss: Mean | None = optional("cost", "nats", "By how much the loss of later tokens rises.")
    heads: Mean | None = optional("heads at\nthe place", "count", "Heads that give the place more than 0.3.")
    taker_heads: Mean | None = optional("heads at\nposition 1", "count", "Heads that give the next position as much.")
    tokens: Mean | None = optional("tokens", "count", "Tokens whose loss was read.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key == "other hidden"

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "control" if self.is_control else ""

    @property
    def label(self) -> str:
        """What it is called."""
        words = {
            "hidden": f"place hidden from layer {self.since} on",
            "hidden in all layers": "place hidden in all layers",
            "value zero": f"its value zero from layer {self.since} on",
            "value mean": f"its value the mean from layer {self.since} on",
            "other hidden": f"position {self.other} hidden from layer {self.since} on",
        }
        return words.get(self.key, self.key)


# --- what marks it ---


@dataclass(frozen=True, kw_only=True)
class Mark(Row, table="marks", title="marked by"):
    """Components before the writers without which the spike is not written."""

    key: tuple[Component, ...]

    left: Mean = column("spike\nleft", "share", "What is left of the spike if they are replaced at the place.")
    others: Mean | None = optional("left without\nothers", "share", "Median of what is left without other components.")

    @property
    def label(self) -> str:
        """What it is called."""
        return parts_names(self.key, len(self.key))


@dataclass(frozen=True, kw_only=True)
class Marking(Row, table="first tokens", title="first tokens"):
    """What is left of a spike at many tokens that are put first, without heads."""

    key: Literal["tokens", "all", "fewest", "random"] | Head
    marking: tuple[Head, ...] = ()

    left: Mean | None = optional("spike\nleft", "share", "What is left of the spike, mean over tokens that have it.")
    count: Mean | None = optional("heads\nreplaced", "count", "Heads that are replaced by their mean.")
    have: Mean | None = optional("tokens that\nhave it", "count", "Tokens that, put first and alone, have the spike.")
    tried: Mean | None = optional("tokens\ntried", "count", "Tokens that were put first.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key == "random"

    @property
    def label(self) -> str:
        """What it is called."""
        words = {"tokens": "intact", "all": "without all heads before", "random": "without as many random heads"}
        if self.key == "fewest":
            return f"without {word_list(self.marking, 4)}"
        return words[self.key] if isinstance(self.key, str) else f"without {self.key}"


# --- who attends where ---


@dataclass(frozen=True)
class Attended:
    """What heads attend to: a place, position 0 as the sink rate has it, or learned sink logits."""

    kind: Literal["place", "place without a spike", "sink rate", "learned sink logits"]
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class Attention(Row, table="attention", title="attention to"):
    """How many heads attend to something."""

    key: Attended

    heads: Mean | None = optional("heads", "count", "Heads that give it more than 0.3 of their attention.")
    total: Mean | None = optional("of all", "count", "Heads with softmax attention.")
    share: Mean | None = optional("share", "share", "The sink rate: the share of heads and texts above eps.")
    length: Mean | None = detail("text of\ntokens", "count", "Tokens of the texts of the sink rate.")
    eps: Mean | None = detail("eps", "number", "The attention from which a head counts.")

    @property
    def label(self) -> str:
        """What it is called."""
        if self.key.kind == "sink rate":
            return f"position 0 of {self.text('length')} tokens (sink rate)"
        if self.key.kind == "place without a spike":
            return f"{self.key.place} (no spike)"
        return self.key.place or self.key.kind


@dataclass(frozen=True, kw_only=True)
class Largest(Row, table="norm", title="largest norm", form="title"):
    """The largest norm that was seen anywhere."""

    key: Literal["largest"] = "largest"
    token: str
    layer: int

    ratio: Mean = column("times the\ntypical norm", "times", "The largest norm over the typical one that was seen.")

    @property
    def label(self) -> str:
        """What it is called."""
        return f"at {self.token!r} after layer {self.layer}"
