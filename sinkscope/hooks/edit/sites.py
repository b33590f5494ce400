"""How edits name what they change: neurons, heads and positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Whole, Wording, check_values, checked_value
from sinkscope.results.notation import Neuron, read_head, read_neuron

Where = Literal["post", "up"]
Positions = int | tuple[int, ...] | list[int] | slice | Literal["first"] | None
_SITE = Annotated[
    tuple[Whole, Whole] | tuple[Whole, Whole, Whole],
    Wording('(layer, neuron) or (layer, expert, neuron), whole numbers from 0, or "L1.N338"'),
]
_HEAD = Annotated[tuple[Whole, Whole], Wording('(layer, head), whole numbers from 0, or "L0.H4"')]
_POSITIONS = Annotated[
    Literal["first"] | Whole | tuple[Whole, ...] | None,
    Wording(
        '"first", whole numbers from 0 (0 is the first token that is not padding) or a slice of them',
    ),
]


def site_of(site: Any) -> Neuron:
    """Return a `Neuron` from (layer, neuron), (layer, expert, neuron) or a name such as "L1.N338".

    Raises:
        SinkscopeError: The site is neither two or three whole numbers from 0 nor such a name.
    """
    if isinstance(site, Neuron):
        return site
    if isinstance(site, str):
        site = read_neuron(site, "site")
    return Neuron.of(checked_value(_SITE, python_numbers(site), "site"))


def head_of(head: Any) -> tuple[int, int]:
    """Return layer and query head from (layer, head), or from a name such as "L0.H4".

    Raises:
        SinkscopeError: The head is given in any other form.
    """
    if isinstance(head, str):
        return read_head(head, "head")
    return checked_value(_HEAD, python_numbers(head), "head")


def python_numbers(value: Any) -> Any:
    """Numbers of NumPy and torch, such as those of `topk`, as Python's."""
    if isinstance(value, tuple | list):
        return tuple(map(python_numbers, value))
    if getattr(value, "requires_grad", False):
        raise SinkscopeError(
            "a number that requires a gradient would be taken for a constant: give a plain number; a vector trains "
            "through Add"
        )
    if hasattr(value, "tolist"):
        return python_numbers(value.tolist())
    return value


def listed(name: str, value: Any) -> list[Any]:
    """Return one or several numbers, names or sites, as a list."""
    value = python_numbers(value)
    check_values(Iterable[Any] | int, **{name: value})
    return [value] if isinstance(value, int | str) else [*value]


def heads_of(heads: Any) -> tuple[tuple[int, int], ...]:
    """Return one or several heads, each once."""
    return tuple(dict.fromkeys(map(head_of, listed("heads", heads))))


def checked_positions(positions: Any, name: str = "positions") -> Positions:
    """Return positions in the form in which an edit stores them; `name` is that of the field.

    Raises:
        SinkscopeError: These are not positions.
    """
    if isinstance(positions, slice):
        ends = [end for end in (positions.start, positions.stop, positions.step) if end is not None]
        if all(isinstance(end, int) and end >= 0 for end in ends):
            return positions
    return checked_value(_POSITIONS, python_numbers(positions), name)


def chosen_positions(index: Int[Tensor, "batch pos"], positions: Positions) -> Bool[Tensor, "batch pos"]:
    """Return which tokens of a call are at these positions; padding (-1) never is."""
    if positions is None:
        positions = slice(None)
    if isinstance(positions, slice):
        start = positions.start or 0
        chosen = index >= start
        if positions.step:
            chosen &= (index - start) % positions.step == 0
        if positions.stop is not None:
            chosen &= index < positions.stop
        return chosen
    places = 0 if positions == "first" else positions
    return torch.isin(index, torch.tensor(places, device=index.device, dtype=index.dtype))
