"""How neurons, heads, lists and counts are written everywhere: L1.N338, L3.E2.N7, L0.H4; "a, b and c"; "1 token"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible

_NUMBER = r"(\d{1,9})"
_NEURON = re.compile(
    rf"L?{_NUMBER}(?:[.:]?E{_NUMBER}|[.:]{_NUMBER}(?=[.:]))?(?:[.:]?N|[.:]){_NUMBER}", re.IGNORECASE | re.ASCII
)
_HEAD = re.compile(rf"L?{_NUMBER}(?:[.:]?H|[.:]){_NUMBER}", re.IGNORECASE | re.ASCII)


def word_list(things: Sequence[object], most: int = 12) -> str:
    """Join the items of a list in words: "a", "a and b", "a, b and c", "a, b and 3 more"; "none" of an empty list.

    Args:
        things: The items; strings are written as they are.
        most: Items that are written out.
    """
    names = [*map(str, things[:most])]
    if len(things) > most:
        names.append(f"{len(things) - most:,} more")
    if len(names) < 2:
        return "".join(names) or "none"
    return ", ".join(names[:-1]) + " and " + names[-1]


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent; what rounds to zero has no sign."""
    return f"{share:z,.{digits}%}"


def count_of(count: int, noun: str) -> str:
    """Return a number of things: "no token", "1 token", "2 tokens"."""
    if count == 0:
        return f"no {noun}"
    return f"{count:,} {noun}" + "s" * (count != 1)


def _read(pattern: re.Pattern[str], text: str, option: str, expected: str) -> tuple[int, ...]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise SinkscopeError(f"{option} {text!r}: expected {expected}")
    return tuple(map(int, filter(None, match.groups())))


def read_neuron(text: str, option: str = "--neuron") -> tuple[int, ...]:
    """Read a neuron's name as (layer, neuron) or (layer, expert, neuron); L1N338, 1.338 and 1:338 are names, too.

    Raises:
        SinkscopeError: It is no such name.
    """
    return _read(_NEURON, text, option, "a neuron such as L1.N338, or L3.E2.N7 in a mixture")


def read_head(text: str, option: str = "--heads") -> tuple[int, int]:
    """Read a head's name as (layer, head); L0H4, 0.4 and 0:4 are names, too.

    Raises:
        SinkscopeError: It is no such name.
    """
    layer, head = _read(_HEAD, text, option, "a head such as L5.H3")
    return layer, head


# --- parts of a model that results name ---


ComponentKind = Literal["embedding", "attention", "mixer", "mlp"]


@dataclass(frozen=True)
class Neuron:
    """The address of a neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Neuron:
        """Return the neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        if len(site) == 2:
            return cls(site[0], None, site[1])
        return cls(site[0], site[1], site[2])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        if self.expert is None:
            return (self.layer, self.neuron)
        return (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        expert = "" if self.expert is None else f".E{self.expert}"
        return f"L{self.layer}{expert}.N{self.neuron}"


@dataclass(frozen=True)
class Head:
    """The address of an attention head."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class Component:
    """A component that writes into the residual stream; the embedding has no layer.

    A mixer is what a layer without softmax attention has in its place, such as a convolution.
    """

    kind: ComponentKind
    layer: int | None = None

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"


def setting_text(value: Any) -> str:
    """Return a setting as text: four digits, yes or no, a dash for None; outer spaces stand in quotes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value))
    text = visible(str(value)).replace("\n", "\\n")
    return text if text == text.strip() else f'"{text}"'
