"""How neurons and heads are written everywhere, as TransformerLens writes them: L1.N338, L3.E2.N7, L0.H4."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sinkscope.errors import SinkscopeError

_NEURON = re.compile(r"L?(\d+)(?:[.:]E?(\d+))?[.:]N?(\d+)", re.IGNORECASE)
_HEAD = re.compile(r"L?(\d+)[.:]H?(\d+)", re.IGNORECASE)


def neuron_name(layer: int, *place: int | None) -> str:
    """L1.N338, or L3.E2.N7 of a mixture of experts.

    Args:
        layer: Its layer.
        place: The neuron; or the expert, which may be None, and the neuron.
    """
    *expert, neuron = place
    return ".".join([f"L{layer}", *(f"E{one}" for one in expert if one is not None), f"N{neuron}"])


def head_name(layer: int, head: int) -> str:
    """L0.H4."""
    return f"L{layer}.H{head}"


def neuron_names(sites: Sequence[Any], most: int = 8) -> str:
    """Names with commas between, and how many more there are.

    Args:
        sites: (layer, neuron), (layer, expert, neuron), or objects with these attributes.
        most: Names that are written out.
    """
    return _listed([neuron_name(*_place(site, "layer", "expert", "neuron")) for site in sites], most)


def head_names(sites: Sequence[Any], most: int = 8) -> str:
    """Names with commas between, and how many more there are; sites are (layer, head), or objects with these."""
    return _listed([head_name(*_place(site, "layer", "head")) for site in sites], most)


def _place(site: Any, *names: str) -> Sequence[Any]:
    return site if isinstance(site, tuple | list) else [getattr(site, name) for name in names]


def _listed(names: list[str], most: int) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most]) + (f" and {more[0]}" if more else "")


def read_neuron(text: str, option: str = "--neuron") -> tuple[int, ...]:
    """(layer, neuron) or (layer, expert, neuron) of a name; 1.338 and 1:338 are read as well.

    Raises:
        SinkscopeError: It is no such name.
    """
    return _read(_NEURON, text, option, "a neuron such as L1.N338, or L3.E2.N7 in a mixture")


def read_head(text: str, option: str = "--head") -> tuple[int, int]:
    """(layer, head) of a name; 0.4 and 0:4 are read as well.

    Raises:
        SinkscopeError: It is no such name.
    """
    layer, head = _read(_HEAD, text, option, "a head such as L5.H3")
    return layer, head


def _read(pattern: re.Pattern[str], text: str, option: str, expected: str) -> tuple[int, ...]:
    if (found := pattern.fullmatch(text.strip())) is None:
        raise SinkscopeError(f"{option} {text!r}: expected {expected}")
    return tuple(int(part) for part in found.groups() if part is not None)
