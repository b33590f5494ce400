"""What is checked, how strictly, and what a check finds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import Cache

from sinkscope.conformance.flow import Flow, error_of, outcome_of, right_logits
from sinkscope.conformance.models import kit_model
from sinkscope.conformance.recorder import CacheRecorder, Logits
from sinkscope.conformance.subject import EXPECTED, Factory, made, parameters, place_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, share_of
from sinkscope.hooks.edit.base import Intervention

CheckVerdict = Literal["passes", "fails", "does not apply"]
TOLERANCE = 1e-3
"""Largest error of logits, in standard deviations of the right ones, of a cache that is exact but for rounding."""
_ROUNDINGS = 6  # times the relative rounding of a number, if that is more
SEEN = "[sees.sum(-1) for sees in outcome.sees.values()]"
"""How many tokens each query sees, as Python that shows it."""
ERROR = "(outcome.logits - right_logits(flow, outcome.sees)).abs().max()"
"""The largest error of the logits, as Python that shows it."""
ROTATED = "keys are rotated again, so no mask says what is right: facts on both sides of a hole say it"


class ApartError(Exception):
    """Raised where a check does not apply; the message says why."""


@dataclass(eq=False)
class FaultError(Exception):
    """Raised where a check fails.

    Attributes:
        expected: What is right.
        seen: What was seen.
        flow: The smallest of the uses tried that fails.
        shows: What of the outcome shows it, as Python.
    """

    expected: str
    seen: str
    flow: Flow
    shows: str = ERROR


@dataclass(frozen=True)
class CheckedBehaviour:
    """What one check found.

    Attributes:
        check: The behaviour.
        verdict: Whether the cache passes, fails, or the check does not apply.
        expected: What is right.
        seen: What was seen, or why the check does not apply.
        reproduction: Lines of Python that show the failure on the smallest of the uses tried.
    """

    check: str
    verdict: CheckVerdict
    expected: str
    seen: str
    reproduction: str = ""


@dataclass(frozen=True)
class Kit:
    """What is checked, and how strictly.

    Attributes:
        factory: Makes the cache, context manager or policy for a model.
        tolerance: Largest error of logits, in standard deviations of the right ones.
        name: Where the factory is, as module:name. Empty: where it says itself.
        budget: What is to be kept, in tokens or as a share of the prompt. None: each check has its own.
    """

    factory: Factory
    tolerance: float = TOLERANCE
    name: str = ""
    budget: Budget | None = None

    def checked(self, check: Check) -> CheckedBehaviour:
        """Return what a check finds."""
        words = check.__name__.replace("_", " ")
        try:
            return CheckedBehaviour(words, "passes", inspect.getdoc(check) or "", check(self))
        except ApartError as error:
            return CheckedBehaviour(words, "does not apply", "", str(error))
        except FaultError as error:
            module, _, function = (self.name or place_of(self.factory)).partition(":")
            lines = [
                f"from {module} import {function}",
                "from sinkscope.conformance.flow import Flow, outcome_of, right_logits",
                f"flow = {error.flow}",
                f"outcome = outcome_of({function}, flow)",
                f"print({error.shows})",
            ]
            return CheckedBehaviour(words, "fails", error.expected, error.seen, "\n".join(lines))

    @property
    def evicts(self) -> bool:
        """Whether it can be asked to keep only a part."""
        return not parameters(self.factory).keys().isdisjoint({"budget", "share"})

    @property
    def grows(self) -> bool:
        """Whether it chooses at the end of a prompt only, so that generated tokens are added to its budget."""
        subject = self.subject()
        return "share" in parameters(self.factory) or getattr(subject, "every", None) == "prefill"

    @property
    def knows_length(self) -> bool:
        """Whether the length of the cache is its own business, and not that of a stock cache below it."""
        return isinstance(self.subject(), Cache | Intervention)

    def subject(self) -> Any:
        """Return what the factory gives for the smallest model.

        Raises:
            SinkscopeError: It gives nothing.
        """
        try:
            flow = self.evicting(Flow(), 12)
            return made(self.factory, kit_model("grouped"), flow.prompt, flow.budget if self.evicts else None)
        except NotImplementedError as error:
            place = self.name or place_of(self.factory)
            raise SinkscopeError(f"{place} refuses a small Llama: {error}; {EXPECTED}") from None

    def flows(self, *flows: Flow) -> list[Flow]:
        """Return flows with room for everything, and then, if less can be asked for, with half of the prompt."""
        tried = list(flows)
        if self.evicts:
            for flow in flows:
                with suppress(ApartError):
                    tried.append(self.evicting(flow, flow.prompt // 2))
        return tried

    def evicting(self, flow: Flow, otherwise: int) -> Flow:
        """Return a flow with the budget that was asked for, or `otherwise`; a text of one call is long enough for it.

        Raises:
            ApartError: Its text is no longer than the budget.
        """
        tokens = otherwise if self.budget is None else self.budget
        if isinstance(tokens, float):
            return replace(flow, budget=max(1, share_of(tokens, flow.prompt)))
        if tokens < flow.prompt:
            return replace(flow, budget=tokens)
        if flow.model == "grouped" and len(flow.lengths) == 1 and not flow.chunks:
            return replace(flow, budget=tokens, lengths=(3 * tokens,))
        raise ApartError(f"{tokens} tokens are to be kept, and its texts are no longer")

    def right(self, *flows: Flow, budget: bool = True) -> str:
        """Check that flows give the right logits: with room for everything, and then with half of the prompt.

        Args:
            flows: From the smallest to the largest.
            budget: Whether a budget is tried, too.

        Returns:
            The largest error.
        """
        worst: float | None = None
        for flow, outcome in self.outcomes(*(self.flows(*flows) if budget else flows)):
            if not outcome.rotated_again:
                worst = max(worst or 0.0, self.close(outcome.logits, right_logits(flow, outcome.sees), flow))
        if worst is None:
            raise ApartError(ROTATED)
        return f"an error of {worst:.1g}"

    def outcomes(self, *flows: Flow) -> Iterator[tuple[Flow, CacheRecorder]]:
        """Yield flows with what they give; those that are refused are left out, unless all are."""
        refusals: list[ApartError] = []
        for flow in flows:
            try:
                outcome = self.outcome(flow)
            except ApartError as error:
                refusals.append(error)
            else:
                yield flow, outcome
        if len(refusals) == len(flows):
            raise refusals[-1]

    def close(self, seen: Logits, right: Logits, flow: Flow, whose: str = "") -> float:
        """Return the error of logits, which has to be within the tolerance.

        Args:
            seen: The logits of a flow.
            right: The right ones.
            flow: The flow.
            whose: What the right ones are, if they are not those of `right_logits`.
        """
        error = error_of(seen, right)
        tolerance = max(self.tolerance, _ROUNDINGS * torch.finfo(getattr(torch, flow.dtype)).eps)
        if not error <= tolerance:
            masked = "the logits of a pass in which a mask hides what was evicted"
            whose = whose or ("the logits of the plain model" if flow.budget is None else masked)
            expected = f"{whose}, to {tolerance:g} standard deviations of the logits"
            raise FaultError(expected, f"an error of {error:.2g}", flow)
        return error

    def outcome(self, flow: Flow) -> CacheRecorder:
        """Return what a flow gives.

        Raises:
            ApartError: The cache refuses, or keeps everything and is asked for less.
            FaultError: Another error was raised in use.
        """
        if flow.budget is not None and not self.evicts:
            raise ApartError("it cannot be asked to keep a part: its factory has no budget or share")
        kit_model(flow.model, flow.dtype)  # what cannot be loaded is no fault of the cache
        try:
            return outcome_of(self.factory, flow)
        except Exception as error:  # what others wrote may fail in any way
            reason = str(error).partition("\n")[0]
            if isinstance(error, NotImplementedError):
                raise ApartError(f"it refuses: {reason}") from None
            if "CUDA" in reason and not torch.cuda.is_available():  # as of a cache that is offloaded
                raise ApartError(f"it needs a GPU, and there is none here: {reason}") from None
            raise FaultError(
                "logits and no error", f"{type(error).__name__}: {reason}", flow, "outcome.logits"
            ) from None


Check = Callable[[Kit], str]
"""Returns what it saw, and raises if it fails or does not apply."""
