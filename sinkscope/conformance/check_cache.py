"""`sinkscope check-cache`: does a KV cache of anyone do what a cache has to do?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sinkscope.conformance.checks import CHECKS, OF_A_BUDGET
from sinkscope.conformance.kit import TOLERANCE, CheckedBehaviour, Kit
from sinkscope.conformance.subject import EXPECTED, Factory, factory_named, place_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.files.records import Budget, read_setting
from sinkscope.kv.registry import policies
from sinkscope.results.notation import count_of
from sinkscope.results.result import Result
from sinkscope.results.tables import Table

MOST = 300
"""Tokens of the largest budget: a text has three times as many, and caches have room for about a thousand."""


@dataclass(frozen=True, kw_only=True)
class CacheCheck(Result):
    """What the checks of a cache found.

    Attributes:
        cache: The factory, as module:function.
        checks: The checks in their order.
        evicts: Whether the factory can be asked to keep only a part.
    """

    kind = "check-cache"
    page = "check_cache"
    table_of = "checks"
    columns = ("check", "verdict", "seen")
    brief_rows = len(CHECKS)

    cache: str
    checks: tuple[CheckedBehaviour, ...]
    evicts: bool = False

    def rows(self) -> Table:
        """Return one row per check; those that fail stand first."""
        return sorted(super().rows(), key=lambda row: row["verdict"] != "fails")

    def _with(self, verdict: str) -> list[CheckedBehaviour]:
        return [one for one in self.checks if one.verdict == verdict]

    @property
    def exit_code(self) -> int:
        """1 if a check fails, if none applies, or if a cache takes a budget and no check of a budget applies."""
        return int(bool(self._with("fails") or self._apart_from_its_budget()) or not self._with("passes"))

    def _apart_from_its_budget(self) -> list[CheckedBehaviour]:
        """The checks of a budget, if the cache takes one and none of them applies."""
        checks = [one for one in self.checks if one.check.replace(" ", "_") in OF_A_BUDGET]
        if not self.evicts or any(one.verdict != "does not apply" for one in checks):
            return []
        return checks

    def conclusion(self) -> str:
        """Return how many checks pass, and which fail."""
        failed, apart = self._with("fails"), self._with("does not apply")
        applied = len(self.checks) - len(apart)
        name = self.cache.rpartition(":")[2]
        if failed:
            return f"{name} fails {len(failed)} of {count_of(applied, 'check')}, first of all: {failed[0].check}."
        if not applied:
            return f"No check applies to {name}: {apart[0].seen.rstrip(chr(46))}."
        if unchecked := self._apart_from_its_budget():
            return f"{name} takes a budget, and no check of a budget applies: {unchecked[0].seen.rstrip(chr(46))}."
        return f"{name} passes {count_of(applied, 'check')} (not applicable: {len(apart)})."

    def details(self) -> list[str]:
        """Return what each failed check expected and saw, and how to reproduce it."""
        lines: list[str] = []
        for one in self._with("fails"):
            lines += [f"\nFails: {one.check}.", f"  Expected: {one.expected}.", f"  Seen: {one.seen}."]
            lines += [f"    {line}" for line in one.reproduction.splitlines()]
        return lines


@checks_arguments
def check_cache(
    factory: str | Factory,
    *,
    only: Sequence[str] = (),
    tolerance: Annotated[float, Field(ge=0)] = TOLERANCE,
    budget: Budget | str | None = None,
    progress: Any = None,
) -> CacheCheck:
    """Check a KV cache on small models whose needs are known: a sink, distant facts, windows, learned sink logits.

    What the factory raises, and NotImplementedError at any time, is a refusal: the check does not apply. Any other
    exception is a failure. The exit status is 1 if a check fails, if none applies, or if the cache takes a budget and
    no check of a budget applies.

    Args:
        factory: The name of a policy, or a function, as module:function; from Python also the function itself. It
            gives a transformers Cache, a context manager or a cache policy, and is given what its parameters name:
            model, config, max_cache_len, budget (tokens to keep) or share (of the prompt).
        only: Run these checks alone, by their names with underscores.
        tolerance: Largest error of logits, in standard deviations of the right ones. A cache that rounds keys and
            values needs more than the default.
        budget: What to keep in all checks, in tokens or as a fraction of the prompt, for a cache that needs more than
            these ask for, which is from an eighth to a half; texts are made long enough, or are left out.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: There is no such factory or check, or it gives something else.
    """
    started = time.perf_counter()
    for one in only:
        if one not in CHECKS:
            raise SinkscopeError(f"check {one!r}: expected one of {', '.join(CHECKS)}")
    kept: Any = budget
    if isinstance(budget, str):
        kept = read_setting(budget, Budget, "--budget ")
    if isinstance(kept, int) and kept > MOST:
        raise SinkscopeError(f"--budget {kept}: expected up to {MOST} tokens, or a share; the texts are short")
    place = ""
    if isinstance(factory, str):
        place, factory = factory, factory_named(factory)
    if ":" not in place or place.partition(":")[0] in policies():  # h2o:0.25 is a policy
        place = place_of(factory)
    if not place:
        raise SinkscopeError(f"{factory!r} has no name: {EXPECTED}")
    kit = Kit(factory, tolerance, place, kept)
    if kept is not None and not kit.evicts:
        raise SinkscopeError(f"--budget {kept}: {place} has no parameter budget or share, which would be given it")
    kit.subject()  # bad input is said before anything is checked
    names = [one for one in CHECKS if not only or one in only]
    rows: list[CheckedBehaviour] = []
    for done, one in enumerate(names):
        if progress is not None:
            progress("checking", done, len(names))
        rows.append(kit.checked(CHECKS[one]))
    return CacheCheck(
        model=ModelInfo("check-cache", "kit", 0, 0, 0, ""),
        settings={"only": only, "tolerance": tolerance, "budget": budget},
        provenance=provenance(started=started, attention="sdpa"),
        cache=place,
        checks=tuple(rows),
        evicts=kit.evicts,
    )
