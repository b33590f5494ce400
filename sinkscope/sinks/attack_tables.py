"""The tables of `attack`: which heads make tokens sinks, and sequences of such tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Head
from sinkscope.results.table import Row, column, detail


class Sequences(StrEnum):
    """Which tokens stand in sequences."""

    ONE_CLUSTER = "one_cluster"
    RANDOM = "random"


@dataclass(frozen=True)
class AttemptKey:
    """Sequences that are read, intact or under the patch of the spike's neurons."""

    sequences: Sequences
    patched: bool = False


@dataclass(frozen=True, kw_only=True)
class Attempt(
    Row,
    table="attempts",
    title="sequences of different tokens",
    note="Read without BOS. A position has the spike if its state has at least half of the first token's projection on "
    "the direction of the spike; the first position of a sequence does not count. ±: half of the 95% interval over "
    "sequences.",
):
    """How many positions of sequences have the spike."""

    key: AttemptKey

    share: Mean = column(
        "positions with\nthe spike",
        "share",
        "Positions after the first whose state has at least half of the first token's projection on the direction of "
        "the spike; mean over sequences.",
    )
    sequences: Mean | None = detail("sequences", "count", "Sequences that were read.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key.sequences is Sequences.RANDOM

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "control: any of the tokens at random" if self.is_control else "all of one cluster"

    @property
    def label(self) -> str:
        """What it is called."""
        return "under the patch" if self.key.patched else "the model as it is"

    @property
    def short_label(self) -> str:
        """What a figure calls it."""
        tokens = "random tokens" if self.is_control else "one cluster"
        return f"{tokens}, patched" if self.key.patched else tokens


class HeadsKept(StrEnum):
    """Which heads of layer 0 are kept; the others are replaced by their mean."""

    ALL = "all"
    MARKING = "marking"  # the one that gives the token the spike by itself
    ANOTHER = "another"  # the median head
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class TokensWithSpike(
    Row,
    table="tokens",
    title="heads of layer 0 that are kept",
    note="Each token is put first, alone; other heads of layer 0 are replaced by their mean output. Its cluster's head "
    "is the one that gives it the spike by itself; the control is the median over all heads.",
):
    """How many tokens that are put first have the spike while only some heads of layer 0 act."""

    key: HeadsKept

    share: Mean = column("tokens with\nthe spike", "share", "Share of the tokens that were tried.")

    @property
    def is_control(self) -> bool:
        """Whether it is a control."""
        return self.key is HeadsKept.ANOTHER

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "control" if self.is_control else ""

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case HeadsKept.ALL:
                return "all"
            case HeadsKept.MARKING:
                return "one: the head of the token's cluster"
            case HeadsKept.ANOTHER:
                return "one: another head (median)"
            case HeadsKept.NONE:
                return "none"


@dataclass(frozen=True, kw_only=True)
class Cluster(Row, table="clusters", title="clusters", form="line", listed=("tokens",), most=6):
    """The tokens to which one head of layer 0 gives the spike by itself."""

    key: Head

    tokens: Mean = column("tokens", "count", "Tokens of the cluster, of those that were tried.")
