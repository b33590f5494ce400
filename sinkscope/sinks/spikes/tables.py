"""The tables of `find_sinks`: what each row is about, in types, and what its numbers mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Component, Neuron, word_list
from sinkscope.results.table import NOT_MEASURED, Cell, Column, Row, column, detail, optional
from sinkscope.sinks.spikes.spike import Part, Parts, PlaceKey, common_layers, layers_words
from sinkscope.sinks.thresholds import COUNTS

SHOWN = 3
"""Parts that a label names."""


class Role(StrEnum):
    """What the removal of a neuron does to the spike."""

    NEEDED = "needed"
    LOWERS = "lowers"
    BACKUP = "backup"
    OTHER_SPIKE = "other spike"
    NOTHING = "nothing"
    RAISES = "raises"


WRITES = (Role.NEEDED, Role.LOWERS, Role.BACKUP)
"""The roles of neurons that write a spike."""


ROLES_MEAN = (
    "What zeroing it does: needed (one of the smallest set without which less than a quarter of the spike is left), "
    "lowers (the spike is smaller), backup (it lowers the spike once the needed ones are zeroed), other spike (only "
    "another spike is smaller), nothing, raises."
)


def part_name(part: Part) -> str:
    """Return a part as tables have it: "MLP 11", "attention 3", "L0.H4", "L1.N338"."""
    return str(part).replace("mlp", "MLP")


def parts_names(parts: Parts, most: int = SHOWN) -> str:
    """Return the first of some parts: "L1.N83, L2.N90, L2.N430 and 4 more"."""
    return word_list([*map(part_name, parts)], most)


def verb_of(parts: Parts) -> str:
    """Return what is done to needed parts: neurons are zeroed, components are replaced by their mean."""
    return "zeroed" if any(isinstance(part, Neuron) for part in parts) else "replaced by their mean"


def writes_enough(norm: float, *, as_many: bool) -> bool:
    """Return whether other neurons write enough to be a fair control.

    Args:
        norm: The norm of what they write, over that of the neurons that are compared with them.
        as_many: Whether no others write as much, and these are only as many.
    """
    return not as_many or norm >= COUNTS


# --- the spike itself ---


@dataclass(frozen=True)
class SpikeKey:
    """A spike: its place and the layers in which it stands out."""

    place: PlaceKey
    layers: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.place}, {layers_words(*self.layers)}"

    def shared(self, other: SpikeKey) -> int:
        """Return how many layers it has in common with a spike at the same place."""
        return common_layers(self.layers, other.layers) if self.place == other.place else 0


@dataclass(frozen=True)
class SizeKey:
    """The size of a spike, of which there is one."""

    def __str__(self) -> str:
        return "size"


@dataclass(frozen=True, kw_only=True)
class Size(Row, table="spike", title="the spike", form="title"):
    """How large a spike is, and who reads it."""

    key: SizeKey = SizeKey()

    norm_before: Mean = column(
        "norm\nbefore", "norm", "L2 norm of the state at the place before the first layer of the spike, mean."
    )
    norm_after: Mean = column(
        "norm at\nits largest", "norm", "L2 norm of the state at the place after the layer where it is largest, mean."
    )
    ratio: Mean = column(
        "times other\ntokens",
        "times",
        "L2 norm at the place over the median norm of later tokens, after the layer of the spike where this is "
        "largest.",
    )
    norm_at_ratio: Mean | None = optional("norm\nthere", "norm", "L2 norm at the place after that layer, mean.")
    typical: Mean | None = optional("other\ntokens", "norm", "Median L2 norm of later tokens after that layer.")
    heads: Mean = column(
        "heads that\nattend",
        "count",
        "Heads from the second layer of the spike to the one after its last whose mean attention to the place is "
        "above 0.3.",
    )
    total: Mean | None = optional("of heads", "count", "All heads with softmax attention in these layers.")
    left: Mean | None = optional(
        "left without\nthe needed",
        "share",
        "Share of the spike that is left when the needed parts are zeroed or replaced at the place.",
    )


@dataclass(frozen=True, kw_only=True)
class Writer(Row, table="writers", title="written by", form="line", listed=("share", "role"), most=4, least=0.05):
    """What a neuron writes of a spike."""

    key: Neuron

    share: Mean = column(
        "share\nwritten",
        "share",
        "Projection of what the neuron adds at the place on the direction of the spike, over the whole spike.",
    )
    role: Role = column("its\nrole", "word", ROLES_MEAN)
    left: Mean = column(
        "left\nwithout",
        "share",
        "Share of the spike that is left if this neuron alone is zeroed at the place, in the texts that chose the "
        "neurons.",
    )
    neutral: Mean = column(
        "ordinary\nvalue", "number", "Median of its activation (the input of the down projection) at other tokens."
    )

    @property
    def listed_columns(self) -> tuple[str, ...]:
        """The columns that a line has: the role of the needed ones alone."""
        return ("share", "role") if self.role is Role.NEEDED else ("share",)


@dataclass(frozen=True, kw_only=True)
class Written(Row, table="components", title="components", form="line", listed=("share",), most=4, least=0.05):
    """What a component writes of a spike up to its peak."""

    key: Component

    share: Mean = column(
        "share\nwritten",
        "share",
        "Projection of what the component adds at the place on the direction of the spike, over the whole spike; "
        "negative against it.",
    )

    @property
    def label(self) -> str:
        """What it is called."""
        return part_name(self.key)


@dataclass(frozen=True, kw_only=True)
class Erased(Written, table="erasers", title="erased by", form="line", listed=("share",), most=4, least=0.05):
    """What a component writes against a spike after its peak, as a share of the spike at its peak."""


# --- what its parts do ---


class Done(StrEnum):
    """What is done to the model."""

    INTACT = "intact"
    NEEDED = "needed"  # the needed parts are zeroed or replaced
    PART = "part"  # one of them alone
    HIDDEN = "hidden"  # later tokens do not see the place
    BUSIEST = "busiest"  # other neurons are zeroed that write as much: those that write most
    AS_MANY = "as_many"  # as many others as are needed, where no others write as much
    RANDOM = "random"  # random other neurons that write as much, or other components


CONTROLS = (Done.BUSIEST, Done.AS_MANY, Done.RANDOM)


@dataclass(frozen=True)
class Edit:
    """What is done, and where; of one part alone, which."""

    done: Done
    everywhere: bool = False
    part: Neuron | None = None


@dataclass(frozen=True, kw_only=True)
class Effect(
    Row,
    table="effects",
    title="what is changed",
    note="Spike left: 100% unchanged, 0% as at other tokens. A head attends if the place has more than 0.3 of its "
    "attention. Loss added: mean over the later tokens. As much: the same sum of norms, over all tokens.",
):
    """What an edit does to a spike, to the heads that read it, and to what the model predicts.

    Attributes:
        parts: The parts that are zeroed or replaced, where these are the needed ones.
        since: The first layer in which the place is hidden.
    """

    key: Edit
    parts: Parts = ()
    since: int | None = None

    left: Mean | None = optional(
        "spike\nleft",
        "share",
        "Projection of the state at the place on the direction of the spike, counted from the mean of other tokens, "
        "over the same without a change; mean over texts.",
    )
    heads: Mean | None = optional(
        "heads that\nattend",
        "count",
        "Heads from the second layer of the spike to the one after its last whose mean attention to the place is "
        "above "
        "0.3.",
    )
    loss: Mean | None = optional(
        "loss added", "rise", "Loss of the later tokens with the change minus their loss without, mean over texts."
    )
    norm: Mean | None = detail(
        "writes, of\nthe needed",
        "share",
        "Sum of the norms of what these neurons write, mean over all tokens, over the norm of what the needed neurons "
        "write.",
    )
    reached: Mean | None = detail(
        "sets that\ncost as much",
        "count",
        "Random sets that raise the loss, or lower the spike where no loss is read, as much as the needed parts at "
        "the "
        "place in the same texts.",
    )
    sets: Mean | None = detail("random\nsets", "count", "Random sets, each zeroed in texts of its own.")
    intact: Mean | None = detail("heads\nunchanged", "count", "Heads that attend in these texts without a change.")
    tokens: Mean | None = detail("tokens", "count", "Tokens whose loss was read.")
    size: Mean | None = detail("neurons", "count", "Other neurons that were zeroed, mean over sets.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key.done in CONTROLS

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        match self.key.done:
            case Done.AS_MANY:
                return "control: no other neurons write as much"
            case Done.BUSIEST | Done.RANDOM if self.norm is not None:
                return "controls: other neurons that write as much"
            case Done.BUSIEST | Done.RANDOM:
                return "control"
            case Done.PART:
                return "one of them zeroed, at this place alone"
            case Done.NEEDED:
                return f"{parts_names(self.parts)} {verb_of(self.parts)}"
            case Done.INTACT | Done.HIDDEN:
                return ""

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key.done:
            case Done.NEEDED:
                return "at all tokens" if self.key.everywhere else "at this place alone"
            case Done.PART:
                return str(self.key.part)
            case Done.HIDDEN:
                return f"place hidden from layer {self.since} on"
            case Done.BUSIEST | Done.AS_MANY | Done.RANDOM:
                return self.others
            case Done.INTACT:
                return "nothing"

    @property
    def short_label(self) -> str:
        """What a figure calls it."""
        match self.key.done:
            case Done.HIDDEN:
                return "place hidden"
            case Done.RANDOM:
                return "random others"
            case Done.BUSIEST | Done.AS_MANY:
                return "busiest others"
            case Done.INTACT | Done.NEEDED | Done.PART:
                return self.label

    @property
    def others(self) -> str:
        """The parts of a control: "the 580 that write most, at all tokens"."""
        if self.left is None:
            return "none: no other part writes anything"
        if self.norm is None or self.size is None:
            return "another component, at this place"
        if self.key.done is Done.AS_MANY:
            return f"the {self.count} writing most ({self.text('norm')} as much)"
        if self.key.done is Done.BUSIEST:
            return f"the {self.count} writing most, all tokens"
        return f"{self.text('size')} at random, all tokens ({self.counted_sets})"

    @property
    def count(self) -> str:
        """The neurons of a control: "580", or "one"."""
        assert self.size is not None
        return self.text("size") if self.size.value > 1 else "one"

    @property
    def counted_sets(self) -> str:
        """How many random sets do as much: "0 of 8 sets cost as much"."""
        if self.sets is None:
            return "one set"
        verb = "lower it" if self.loss is None else "cost"
        return f"{self.text('reached')} of {self.text('sets')} sets {verb} as much"

    def cell(self, column: Column) -> Cell:
        """Return what a column shows of it: no heads where none can attend."""
        if self.key.done is Done.HIDDEN and column.key == "heads":
            return Cell(NOT_MEASURED)
        return super().cell(column)


@dataclass(frozen=True, kw_only=True)
class Brief(Row, table="brief", title="other spikes"):
    """Another spike in one line; its own tables have all of it.

    Attributes:
        parts: The smallest set that it needs.
    """

    key: SpikeKey
    parts: Parts = ()

    left: Mean | None = optional("spike\nleft", "share", "Share of the spike that is left without these parts.")
    loss: Mean | None = optional(
        "loss added", "rise", "Loss of the later tokens without these parts at the place minus their loss with them."
    )
    control: Mean | None = optional("a control\nadds", "rise", "Loss added by the control that adds most.")
    heads_before: Mean | None = optional("heads\nbefore", "count", "Heads that attend to the place without a change.")
    heads: Mean | None = optional("heads\nafter", "count", "Heads that attend to it without these parts.")
    ratio: Mean = column("times other\ntokens", "times", "L2 norm at the place over the median norm of later tokens.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return str(self.key)

    @property
    def label(self) -> str:
        """What it is called."""
        return f"{parts_names(self.parts)} {verb_of(self.parts)}" if self.parts else "no needed parts were found"


# --- who attends where ---


class AttendedKind(StrEnum):
    """What heads attend to."""

    PLACE = "place"
    PLACE_WITHOUT_SPIKE = "place_without_spike"
    SINK_RATE = "sink_rate"
    LEARNED = "learned_sink_logits"


@dataclass(frozen=True)
class Attended:
    """What heads attend to: a place, position 0 as the sink rate has it, or learned sink logits."""

    kind: AttendedKind
    place: PlaceKey | None = None


@dataclass(frozen=True, kw_only=True)
class Attention(
    Row,
    table="attention",
    title="attention, all layers",
    note="Heads above 0.3: by their mean attention over texts. Sink rate (Gu et al. 2025): the share of heads "
    "above 0.3 in "
    "each text, then the mean over texts.",
):
    """How many heads attend to something."""

    key: Attended

    heads: Mean | None = optional("heads above 0.3", "count", "Heads whose mean attention over texts is above 0.3.")
    total: Mean | None = optional("of", "count", "All heads with softmax attention.")
    share: Mean | None = optional(
        "share", "share", "Share of heads whose attention to position 0 is above 0.3, text by text, mean over texts."
    )
    length: Mean | None = detail("text of\ntokens", "count", "Tokens of the texts of the sink rate.")
    eps: Mean | None = detail("eps", "number", "The attention from which a head counts.")

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key.kind:
            case AttendedKind.SINK_RATE:
                return f"sink rate, position 0 of {self.text('length')} tokens"
            case AttendedKind.PLACE_WITHOUT_SPIKE:
                return f"{self.key.place} (no spike)"
            case AttendedKind.LEARNED:
                return "learned sink logits"
            case AttendedKind.PLACE:
                return str(self.key.place)


@dataclass(frozen=True)
class LargestKey:
    """The largest norm, of which there is one."""

    def __str__(self) -> str:
        return "largest norm"


@dataclass(frozen=True, kw_only=True)
class Largest(Row, table="norm", title="largest norm", form="title"):
    """The largest norm that was seen anywhere."""

    key: LargestKey = LargestKey()
    token: str
    layer: int

    ratio: Mean = column(
        "times other\ntokens", "times", "The largest L2 norm over the median of later tokens after the same layer."
    )

    @property
    def label(self) -> str:
        """What it is called."""
        return f"at {self.token!r} after layer {self.layer}"
