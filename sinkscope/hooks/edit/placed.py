"""Edits of what passes some places of a model: one editor for all, with what they keep between calls and log."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.hooks.edit.places import Place
from sinkscope.hooks.edit.positions import Call, Memory
from sinkscope.models.target import Target


@dataclass(frozen=True, eq=False)
class Values:
    """The values that pass a place in one forward call.

    Attributes:
        old: The values; of a head, the columns of its output.
        of: What the edit says of the place.
        call: The forward call.
        memory: What the edit keeps of these rows between calls.
        run: The run in which the edit acts.
    """

    old: Float[Tensor, "batch pos *d"]
    of: Any
    call: Call
    memory: Memory
    run: Run

    @property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each token in its row; -1 at padding."""
        return self.call.on(self.old.device)


class PlacedEdit(Intervention):
    """Gives new values to what passes some places."""

    @abstractmethod
    def places_in(self, target: Target) -> list[tuple[Place, Any]]:
        """The places in this model, each with what its values are values of."""

    @abstractmethod
    def edited(self, values: Values) -> Float[Tensor, "batch pos *d"]:
        """The values that replace `values.old`."""

    def enter(self, run: Run, key: int) -> None:
        """Hooks on the modules beside which the values pass."""
        for number, (place, of) in enumerate(self.places_in(run.target)):
            run.hook_edit(*place.hook(partial(self._edit, run, (key, number), of)))

    def _edit(self, run: Run, key: tuple[int, int], of: Any, tensor: Tensor) -> Tensor | None:
        """New values; None if the run does not act on this call."""
        call = run.call
        if call is None:
            return None
        # OPT and experts run batch and position together.
        old = tensor.reshape(*call.index.shape, tensor.shape[-1])
        memory = call.sequence.memory.setdefault(key, Memory())
        return self.edited(Values(old, of, call, memory, run)).reshape(tensor.shape)
