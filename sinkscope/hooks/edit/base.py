"""Base of all interventions: objects that are entered on a model, act while entered, and leave no trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.engine.run import Run
from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target
from sinkscope.opening.load import target_of
from sinkscope.results.notation import count_of


class Intervention(ABC):
    """An edit of a model's activations or cache that can be entered on any kind of model.

    Interventions are immutable descriptions: one object may be entered many times and on several models. One thread
    steers a model at a time, and there edits of activations may be nested. Cache policies and guards own the model's
    cache, so a second one on the same model is refused while the first acts.
    `a | b` enters both; `a` acts first where they overlap.
    """

    KIND: ClassVar[str] = ""
    """The kind of the events that say what it did."""
    ACTS: ClassVar[bool] = True
    """Whether it changes anything; what only reads sees several texts in a row, too."""

    def __repr__(self) -> str:
        """Return its name; a dataclass has its settings as well."""
        return f"{type(self).__name__}()"

    @abstractmethod
    def enter(self, run: Run, key: int) -> None:
        """Register hooks on `run.target` with `run.hook` or `run.stack`; `key` identifies a part of a composition."""

    def summary(self, run: Run) -> str:
        """Return what the intervention did in a run, in one sentence; "" if there is nothing to say."""
        if not self.KIND:
            return ""
        return f"{type(self).__name__} {self.KIND} {count_of(run.counts[self.KIND], 'value')}."

    def check_prompt(self, tokens: int) -> None:  # noqa: B027 - nothing to refuse by default
        """Refuse a prompt of this length before it is read; most interventions accept any length.

        Raises:
            SinkscopeError: The budget, a fraction of this prompt, is less than what is always kept.
        """

    def store(self, **values: Any) -> None:
        """Store values as they were read, in whatever form they were given: `sites` are `Neuron`s."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def parts(self) -> tuple[Intervention, ...]:
        """The interventions to enter, in order."""
        return (self,)

    def __or__(self, other: Intervention) -> Composed:
        if not isinstance(other, Intervention):
            return NotImplemented
        return Composed((*self.parts, *other.parts))

    def __enter__(self) -> None:
        """Refuse: an edit is entered on a model.

        Raises:
            SinkscopeError: Always.
        """
        name = type(self).__name__
        raise SinkscopeError(f"{name} acts on a model: write `with {name}(...).on(model):`")

    def __exit__(self, *error: object) -> None:  # noqa: B027 - `with` asks for it before it enters
        """Do nothing; nothing was entered."""

    def on(self, model: object) -> Run:
        """Act on `model` (Hugging Face, TransformerBridge or nnsight) inside the `with`. What is returned is used once.

        Everything that calls the model there is edited: forward, `generate` and its variants, nnsight's `trace` and
        `generate`. On exit, even by an exception, the model is restored. Weights are never changed. Entering waits
        while another thread is in a `with` on the same model, and other threads cannot call the model inside this one.

        Raises:
            SinkscopeError: The model has no such layer or neuron.
            UnsupportedError: The model cannot be edited this way (no such site); the message says what can. A call
                raises it where several texts may stand in a row (packed texts, a caller's own mask of queries and
                keys).
        """
        return Run(target_of(model), self.parts)


@dataclass(frozen=True)
class Composed(Intervention):
    """Several interventions entered together, in order of application; made by `a | b`."""

    members: tuple[Intervention, ...]

    @property
    def parts(self) -> tuple[Intervention, ...]:
        """The members."""
        return self.members

    def enter(self, run: Run, key: int) -> None:
        """Refuse: `parts` are entered one by one instead."""
        raise NotImplementedError


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """Return a `with` block in which the edit acts; without an edit, nothing does."""
    return nullcontext() if edit is None else Run(target, edit.parts)
