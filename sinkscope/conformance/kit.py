"""What is checked, how strictly, and what a check finds."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import Cache

from sinkscope.conformance.flow import BrokenUseError, Flow, Outcome, error_of, outcome_of
from sinkscope.conformance.models import forget_models, kit_model
from sinkscope.conformance.subject import EXPECTED, Factory, made, parameters, place_of
from sinkscope.conformance.traces import ModelState, author_files, raised_in
from sinkscope.errors import SinkscopeError, SinkscopeWarning, UnsupportedError
from sinkscope.files.records import Budget, share_of
from sinkscope.hooks.edit.base import Intervention

CheckVerdict = Literal["passes", "fails", "does not apply", "not judged"]
TOLERANCE = 1e-3
"""Largest error of logits, in standard deviations of the right ones, of a cache that is exact but for rounding."""
MOST = 300
"""Tokens of the largest budget: a text has three times as many, and caches have room for about a thousand."""
LONG = 600
"""Tokens of the longest text, unless a budget needs more."""
_ASKED = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, MOST)
_ROUNDINGS = 6  # times the relative rounding of a number, if that is more
SEEN = "[sees.sum(-1) for sees in outcome.last.sees.values()]"
"""How many tokens each query sees, as Python that shows it."""
ERROR = "outcome.error()"
"""The largest error of the logits, as Python that shows it."""


def beside(other: Flow, row: int = 0) -> str:
    """Return Python that shows how far the last logits of a row are from those of another flow."""
    return (
        f"error_of(outcome.last.logits[{row} : {row + 1}, -1:], outcome_of({{function}}, {other}).last.logits[:1, -1:])"
    )


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
        error: What tells an error that was raised in use from others; empty if none was.
        misplaced: Whether a layer then had more or fewer positions than slots.
    """

    expected: str
    seen: str
    flow: Flow
    shows: str = ERROR
    error: str = ""
    misplaced: bool = False


@dataclass(frozen=True)
class CheckedBehaviour:
    """What one check found, and what it tried.

    Attributes:
        check: The behaviour.
        verdict: Whether the cache passes, fails, the check does not apply, or an error of an earlier check keeps it
            from being judged.
        expected: What is right.
        seen: What was seen, or why the check does not apply.
        reproduction: Lines of Python that show the failure on the smallest of the uses tried.
        uses: How often the cache was used.
        lengths: Tokens of the shortest and of the longest prompt.
        rows: Rows of the largest batch.
        evicted: The most tokens that were evicted in one use.
        refused: What the cache refuses, in words.
    """

    check: str
    verdict: CheckVerdict
    expected: str
    seen: str
    reproduction: str = ""
    uses: int = 0
    lengths: tuple[int, ...] = ()
    rows: int = 0
    evicted: int = 0
    refused: tuple[str, ...] = ()


@dataclass(eq=False)
class Tried:
    """What a check has tried so far."""

    outcomes: list[tuple[Flow, float]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return it as fields of `CheckedBehaviour`."""
        lengths = [length for flow, _ in self.outcomes for length in flow.lengths]
        return {
            "uses": len(self.outcomes),
            "lengths": (min(lengths), max(lengths)) if lengths else (),
            "rows": max((len(flow.lengths) for flow, _ in self.outcomes), default=0),
            "evicted": round(max((evicted for _, evicted in self.outcomes), default=0)),
            "refused": tuple(dict.fromkeys(self.refused)),
        }


@dataclass(frozen=True)
class Kit:
    """What is checked, and how strictly.

    Attributes:
        factory: Makes the cache, context manager or policy for a model.
        tolerance: Largest error of logits, in standard deviations of the right ones.
        name: Where the factory is, as module:name. Empty: where it says itself.
        budget: What is to be kept, in tokens or as a share of the prompt. None: each check has its own.
        thorough: Whether all lengths and many orders are tried.
        seed: Seed of what is drawn.
        tried: What the present check has tried.
        errors: Errors raised in use, by the check that found them first.
    """

    factory: Factory
    tolerance: float = TOLERANCE
    name: str = ""
    budget: Budget | None = None
    thorough: bool = False
    seed: int = 0
    tried: Tried = field(default_factory=Tried)
    errors: dict[str, str] = field(default_factory=dict)

    def checked(self, check: Check) -> CheckedBehaviour:
        """Return what a check finds."""
        words = check.__name__.replace("_", " ")
        self.tried.__init__()
        try:
            seen = check(self)
        except ApartError as error:
            return CheckedBehaviour(words, "does not apply", "", str(error), **self.tried.summary())
        except FaultError as error:
            earlier = self.errors.setdefault(error.error, words) if error.error else words
            if earlier != words:
                seen = f"the error of the check {earlier!r}"
                return CheckedBehaviour(words, "not judged", "", seen, **self.tried.summary())
            lines = self._reproduction(error)
            return CheckedBehaviour(words, "fails", error.expected, error.seen, lines, **self.tried.summary())
        return CheckedBehaviour(words, "passes", inspect.getdoc(check) or "", seen, **self.tried.summary())

    def _reproduction(self, error: FaultError) -> str:
        module, _, function = (self.name or place_of(self.factory)).partition(":")
        lines = [
            f"from {module} import {function}",
            "from sinkscope.conformance.flow import Flow, error_of, outcome_of",
            f"flow = {error.flow}",
            f"outcome = outcome_of({function}, flow)",
            f"print({error.shows.replace('{function}', function)})",
        ]
        return "\n".join(lines)

    # What it is --------------------------------------------------------------------------------------------------

    @cached_property
    def asked_for(self) -> bool:
        """Whether it can be asked to keep only a part."""
        return not parameters(self.factory).keys().isdisjoint({"budget", "share"})

    @cached_property
    def of_shares(self) -> bool:
        """Whether it is asked for a share of the prompt alone."""
        return parameters(self.factory).keys() & {"budget", "share"} == {"share"}

    @cached_property
    def own_budget(self) -> int | None:
        """Tokens that it keeps by itself of a long text, without being asked; None if it keeps everything."""
        if self.asked_for:
            return None
        try:
            outcome = self._used(Flow(lengths=(LONG,), acts=(("step", 2),), watched=True))
        except Exception:  # what others wrote may fail in any way; the checks say how
            return None
        gone = outcome.evicted()
        return round(LONG + 2 - gone) if outcome.drops and gone >= 1 else None

    @property
    def evicts(self) -> bool:
        """Whether it keeps only a part, asked or by itself."""
        return self.asked_for or self.own_budget is not None

    @cached_property
    def grows(self) -> bool:
        """Whether it chooses at the end of a prompt only, so that generated tokens are added to its budget."""
        return self.of_shares or getattr(self.subject(), "every", None) == "prefill"

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
            flow = self.evicting(Flow(), 3) if self.evicts else Flow()
            return made(self.factory, kit_model("grouped"), flow.prompt, flow.budget)
        except NotImplementedError as error:
            place = self.name or place_of(self.factory)
            raise SinkscopeError(f"{place} refuses a small Llama: {error}; {EXPECTED}") from None

    @cached_property
    def least(self) -> int:
        """The fewest tokens of those tried that it can be asked to keep; the first if it can be asked for none."""
        for tokens in _ASKED:
            try:
                self._used(Flow(lengths=(3 * tokens,), budget=tokens, acts=(("step", 2),)))
            except (NotImplementedError, UnsupportedError):
                continue
            except SinkscopeError as error:
                if raised_in(error, self._files):  # its own error, and no budget that is too small
                    return tokens
                continue
            except BrokenUseError:
                return tokens
            return tokens
        return _ASKED[0]

    @cached_property
    def _files(self) -> set[str]:
        try:
            subject = made(self.factory, kit_model("grouped"), LONG, MOST if self.asked_for else None)
        except NotImplementedError:
            subject = None
        return author_files(self.factory, subject)

    # Uses ----------------------------------------------------------------------------------------------------------

    def flows(self, *flows: Flow) -> list[Flow]:
        """Return flows with room for everything, and then, if less can be kept, with half of the prompt."""
        tried = [self.readable(flow) for flow in flows]
        if self.evicts:
            for flow in flows:
                tried.append(self.evicting(flow))
        return tried

    def readable(self, flow: Flow) -> Flow:
        """Return the flow, with longer prompts if a share of its shortest is less than the cache can keep."""
        if not self.of_shares or flow.budget is not None or min(flow.lengths) >= self.least:
            return flow
        return flow.longer(flow.prompt * -(-self.least // min(flow.lengths)))

    def evicting(self, flow: Flow, times: int = 2) -> Flow:
        """Return a flow in which a cache has to evict: its prompt is at least so many times what is kept.

        What is kept is the budget that was asked for, or the prompt divided by `times` if the cache can be asked for so
        little; prompts become longer where they have to.

        Raises:
            ApartError: It keeps everything.
        """
        if self.own_budget is not None:
            return replace(flow.longer(times * self.own_budget), watched=True)
        if not self.asked_for:
            raise ApartError("it keeps everything")
        if isinstance(self.budget, int):
            return replace(flow.longer(times * self.budget), budget=self.budget)
        if self.of_shares or self.budget is not None:
            share = self.budget or 1 / times
            shortest = min(flow.lengths) * share
            if shortest < self.least:
                flow = flow.longer(int(flow.prompt * -(-self.least // shortest)))
            return replace(flow, budget=share)
        tokens = max(self.least, flow.prompt // times)
        return replace(flow.longer(times * tokens), budget=tokens)

    def budget_in_tokens(self, flow: Flow) -> int:
        """Return the tokens that are to be kept in a flow.

        Raises:
            ApartError: Nobody has asked for a number.
        """
        if flow.budget is None:
            raise ApartError("it keeps what it will: give the factory a parameter budget or share")
        if isinstance(flow.budget, float):
            return max(1, share_of(flow.budget, flow.prompt))
        return flow.budget

    def right(self, *flows: Flow, budget: bool = True) -> str:
        """Check that flows give the right logits: with room for everything, and then with half of the prompt.

        Args:
            flows: From the smallest to the largest.
            budget: Whether a budget is tried, too.

        Returns:
            The largest error.
        """
        worst: float | None = None
        tried = self.flows(*flows) if budget else [self.readable(flow) for flow in flows]
        for flow, outcome in self.outcomes(*dict.fromkeys(tried)):
            if not outcome.rotated_again:
                worst = max(worst or 0.0, self.close(outcome.error(), flow))
        if worst is None:
            raise ApartError(ROTATED)
        return f"an error of {worst:.1g}"

    def as_without(self, flow: Flow, *kinds: str) -> float:
        """Return the error of the last logits of a flow beside those of the flow without some of its acts."""
        flow = replace(flow, watched=False)
        seen, right = self.outcome(flow).last.logits, self.outcome(flow.without(*kinds)).last.logits
        fewest = min(seen.shape[1], right.shape[1])
        error = error_of(seen[:, seen.shape[1] - fewest :], right[:, right.shape[1] - fewest :])
        return self.close(error, flow, f"the logits without {' and '.join(kinds)}", beside(flow.without(*kinds)))

    def outcomes(self, *flows: Flow) -> Iterator[tuple[Flow, Outcome]]:
        """Yield flows with what they give; those that are refused are left out, and noted, unless all are."""
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

    def close(self, error: float, flow: Flow, whose: str = "", shows: str = ERROR) -> float:
        """Return an error of logits, which has to be within the tolerance.

        Args:
            error: The error, in standard deviations of the right logits.
            flow: The flow.
            whose: What the right ones are, if they are not those of a pass over the text.
            shows: What shows the error, as Python.
        """
        tolerance = max(self.tolerance, _ROUNDINGS * torch.finfo(getattr(torch, flow.dtype)).eps)
        if not error <= tolerance:
            masked = "the logits of a pass in which a mask hides what was evicted"
            whole = not flow.is_watched
            whose = whose or ("the logits of the plain model" if whole else masked)
            expected = f"{whose}, to {tolerance:g} standard deviations of the logits"
            raise FaultError(expected, f"an error of {error:.2g}", flow, shows)
        return error

    def outcome(self, flow: Flow) -> Outcome:
        """Return what a flow gives.

        Raises:
            ApartError: The cache refuses.
            FaultError: Another error was raised in use.
        """
        kit_model(flow.model, flow.dtype)  # what cannot be loaded is no fault of the cache
        try:
            outcome = self._used(flow)
        except Exception as error:  # what others wrote may fail in any way
            raise self._refusal_or_fault(error, flow) from None
        self.tried.outcomes.append((flow, outcome.evicted()))
        return outcome

    def _used(self, flow: Flow) -> Outcome:
        """What a flow gives; a model on which something was left is not used again."""
        model = kit_model(flow.model, flow.dtype)
        before = ModelState.of(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SinkscopeWarning)  # a use that ends before a policy acts
                return outcome_of(self.factory, flow)
        finally:
            if ModelState.of(model).left(before):
                forget_models()

    @contextmanager
    def in_use(self, flow: Flow) -> Iterator[None]:
        """Turn what is raised inside into a refusal or a fault."""
        try:
            yield
        except Exception as error:  # what others wrote may fail in any way
            raise self._refusal_or_fault(error, flow) from None
        self.tried.outcomes.append((flow, 0.0))

    def _refusal_or_fault(self, error: Exception, flow: Flow) -> ApartError | FaultError:
        """What an error in use means."""
        slots = error.slots if isinstance(error, BrokenUseError) else ""
        cause = error.__cause__ if isinstance(error, BrokenUseError) and error.__cause__ else error
        reason, where = str(cause).partition("\n")[0], raised_in(cause, self._files)
        refusal = ""
        if isinstance(cause, NotImplementedError):
            refusal = f"it refuses: {reason}"
        elif isinstance(cause, UnsupportedError) and (not where or ("pickle",) in flow.acts):
            refusal = f"sinkscope refuses: {reason}"
        elif "CUDA" in reason and not torch.cuda.is_available():  # as of a cache that is offloaded
            refusal = f"it needs a GPU, and there is none here: {reason}"
        if refusal:
            self.tried.refused.append(refusal)
            return ApartError(refusal)
        self.tried.outcomes.append((flow, 0.0))
        seen = f"{type(cause).__name__}: {reason}"
        if where:
            seen += f"; it was raised in {where}"
        if slots:
            seen = f"{slots}; then {seen}"
        key = f"{type(cause).__name__} {where} {re.sub('[0-9]+', 'n', reason)}"
        return FaultError("logits and no error", seen, flow, ERROR, key, bool(slots))


Check = Callable[[Kit], str]
"""Returns what it saw, and raises if it fails or does not apply."""
