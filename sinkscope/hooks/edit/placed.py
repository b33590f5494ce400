"""Edits of what passes some places of a model: one editor for all, with what they keep between calls and log."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.hooks.edit.base import Event, Intervention, Run
from sinkscope.hooks.edit.places import Place
from sinkscope.hooks.edit.positions import Call, Memory
from sinkscope.hooks.edit.sites import NeuronGroup
from sinkscope.models.target import Target


@dataclass(frozen=True, eq=False)
class Values:
    """The values that pass a place in one forward call.

    Attributes:
        old: The values; of a head, the columns of its output.
        of: What they are values of: a group of neurons, or another object with a `layer`.
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

    def log(self, kind: str, where: Bool[Tensor, "batch pos *n"], data: Mapping[str, Tensor], **fixed: Any) -> None:
        """Log one event for each True in `where`.

        Args:
            kind: Kind of the events.
            where: Where something happened; for a head, its last dimension is 1.
            data: Values of the events' data, each of a shape that expands to that of `where`.
            fixed: What is the same in the data of all these events.
        """
        of, step, index = self.of, self.call.step, self.index
        tensors = {name: tensor.detach() for name, tensor in data.items()}
        head = None
        if isinstance(of, NeuronGroup):
            head = of.head
            if of.expert is not None:
                fixed["expert"] = of.expert

        def events() -> list[Event]:
            columns = [tensor.expand(where.shape)[where].tolist() for tensor in tensors.values()]
            positions = index.tolist()
            logged = list[Event]()
            for (row, token, *neuron), *values in zip(where.nonzero().tolist(), *columns, strict=True):
                entry = dict(zip(tensors, values, strict=True)) | fixed
                if neuron and head is None:
                    entry = {"neuron": of.neurons[neuron[0]], **entry}
                logged.append(Event(row, step, positions[row][token], of.layer, head, kind, entry))
            return logged

        self.run.log(events)

    def log_rows(
        self, kind: str, site: str, what: str, counts: Int[Tensor, " batch"], last: Int[Tensor, " batch"]
    ) -> None:
        """Log one event for each row in which something was changed: how many, at the last position."""
        where = (self.index == last[:, None]) & (counts > 0)[:, None]
        self.log(kind, where, {what: counts[:, None]}, site=site)


class PlacedEdit(Intervention):
    """Gives new values to what passes some places."""

    @abstractmethod
    def places_in(self, target: Target) -> list[tuple[Place, Any]]:
        """The places in this model, each with what its values are values of."""

    @abstractmethod
    def edited(self, values: Values) -> Float[Tensor, "batch pos *d"] | None:
        """The values that replace `values.old`; None leaves them unchanged."""

    def total(self, run: Run, what: str) -> int:
        """The sum of a number in the data of its events."""
        return sum(event.data[what] for event in run.events if event.kind == self.KIND)

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
        new = self.edited(Values(old, of, call, memory, run))
        if new is None:
            return None
        return new.reshape(tensor.shape)
