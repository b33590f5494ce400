"""`sinkscope check-cache`: does a KV cache of anyone do what a cache has to do?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sinkscope.conformance.checks import CHECKS, OF_A_BUDGET, OF_POSITIONS
from sinkscope.conformance.kit import MOST, TOLERANCE, CheckedBehaviour, Kit
from sinkscope.conformance.subject import EXPECTED, Factory, factory_named, place_of
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.files.records import Budget, Whole, read_setting
from sinkscope.kv.registry import policies
from sinkscope.results.notation import count_of
from sinkscope.results.result import Result
from sinkscope.results.tables import Table

ROWS = "rows_of_a_batch_are_what_they_are_alone"
OF_TOKENS = ("the_budget_holds_at_every_step_in_tokens", "the_budget_holds_at_every_step_in_bytes")


@dataclass(frozen=True, kw_only=True)
class CacheCheck(Result):
    """What the checks of a cache found.

    Attributes:
        cache: The factory, as module:function.
        checks: The checks in their order.
        evicts: Whether it keeps only a part, asked or by itself.
        least: The smallest budget that was asked for, in tokens.
    """

    kind = "check-cache"
    page = "check_cache"
    table_of = "checks"
    columns = ("check", "verdict", "seen", "evicted")
    brief_rows = len(CHECKS)

    cache: str
    checks: tuple[CheckedBehaviour, ...]
    evicts: bool = False
    least: int = 0

    def rows(self) -> Table:
        """Return one row per check; those that fail stand first."""
        return sorted(super().rows(), key=lambda row: row["verdict"] != "fails")

    def _with(self, verdict: str) -> list[CheckedBehaviour]:
        return [behaviour for behaviour in self.checks if behaviour.verdict == verdict]

    @property
    def verdict(self) -> Literal["passes", "fails", "incomplete"]:
        """Whether all checks that apply pass, one fails, or what every cache has to be tried on was not tried."""
        if self._with("fails"):
            return "fails"
        return "incomplete" if self.untried() or not self._with("passes") else "passes"

    @property
    def exit_code(self) -> int:
        """1 if a check fails, or if rows or, of a cache that evicts, positions, budget or eviction were not tried."""
        return int(self.verdict != "passes")

    def untried(self) -> dict[str, str]:
        """Return what was not tried of the checks that were asked for, each with the reason.

        Rows have to be tried of every cache; eviction, also in a batch, positions and the budget of a cache that
        evicts.
        """
        by_name = {behaviour.check.replace(" ", "_"): behaviour for behaviour in self.checks}
        missing: dict[str, str] = {}
        rows = by_name.get(ROWS)
        if rows is not None and rows.verdict == "does not apply":
            missing["rows"] = rows.seen
        if not self.evicts:
            return missing
        for name, checks in (("positions", OF_POSITIONS), ("budget", OF_TOKENS)):
            chosen = [by_name[check] for check in checks if check in by_name]
            if chosen and all(behaviour.verdict == "does not apply" for behaviour in chosen):
                missing[name] = chosen[0].seen
        cut = [behaviour for name, behaviour in by_name.items() if name in OF_A_BUDGET]
        if cut and not any(behaviour.evicted for behaviour in cut):
            missing["eviction"] = cut[0].seen
        elif rows is not None and "rows" not in missing and not rows.evicted:
            missing["eviction in a batch"] = rows.seen
        return missing

    def conclusion(self) -> str:
        """Return how many checks pass, and which fail or were not tried."""
        failed, passed = self._with("fails"), self._with("passes")
        applied = len(failed) + len(passed)
        name = self.cache.rpartition(":")[2]
        if failed:
            return f"{name} fails {len(failed)} of {count_of(applied, 'check')}, first of all: {failed[0].check}."
        if not passed:
            return f"No check applies to {name}: {self.checks[0].seen.rstrip(chr(46))}."
        if untried := self.untried():
            return f"{name} is incomplete: {', '.join(untried)} not tried; {self._remedy(untried)}."
        apart = len(self.checks) - applied
        keeps = "" if self.evicts or not self._with("does not apply") else "; it keeps every token"
        return f"{name} passes {count_of(applied, 'check')} (not applicable: {apart}){keeps}."

    def _remedy(self, untried: dict[str, str]) -> str:
        """What would try it."""
        if set(untried) == {"rows"}:
            return "let the factory take batches"
        if self.settings.get("budget") is None and self.least:
            return f"give a budget that it takes, such as --budget {2 * self.least}"
        return "give the factory a parameter budget, and --budget 16"

    def details(self) -> list[str]:
        """Return what each failed check expected and saw and how to reproduce it, and why something was not tried."""
        lines: list[str] = []
        for what, reason in self.untried().items():
            lines.append(f"Not tried: {what}; {reason}.")
        refused = dict.fromkeys(reason for behaviour in self._with("passes") for reason in behaviour.refused)
        lines += [f"Refused beside what was tried: {reason}." for reason in refused]
        for behaviour in self._with("fails"):
            lines += [
                f"\nFails: {behaviour.check}.",
                f"  Expected: {behaviour.expected}.",
                f"  Seen: {behaviour.seen}.",
            ]
            lines += [f"    {line}" for line in behaviour.reproduction.splitlines()]
        return lines


@checks_arguments
def check_cache(
    factory: str | Factory,
    *,
    only: Sequence[str] = (),
    tolerance: Annotated[float, Field(ge=0)] = TOLERANCE,
    budget: Budget | str | None = None,
    thorough: bool = False,
    seed: Whole = 0,
    progress: Any = None,
) -> CacheCheck:
    """Check a KV cache on small models whose needs are known: a sink, distant facts, windows, learned sink logits.

    What the factory raises, and NotImplementedError at any time, is a refusal: the check does not apply. Any other
    exception is a failure. The verdict is incomplete if rows of a batch were not tried or, of a cache that evicts,
    positions, the budget or eviction. The exit status is 1 unless the cache passes.

    Args:
        factory: The name of a policy, or a function, as module:function; from Python also the function itself. It
            gives a transformers Cache, a context manager or a cache policy, and is given what its parameters name:
            model, config, max_cache_len, budget (tokens to keep) or share (of the prompt).
        only: Run these checks alone, by their names with underscores.
        tolerance: Largest error of logits, in standard deviations of the right ones. A cache that rounds keys and
            values needs more than the default.
        budget: What to keep in all checks, in tokens or as a fraction of the prompt. By default, each check asks for a
            part of its text, or for the smallest budget that the cache takes; texts are made long enough.
        thorough: Try all lengths, and 500 drawn orders of calls; 10 to 30 seconds.
        seed: Seed of the lengths and orders that are drawn.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: There is no such factory or check, or it gives something else.
    """
    started = time.perf_counter()
    for check in only:
        if check not in CHECKS:
            raise SinkscopeError(f"check {check!r}: expected one of {', '.join(CHECKS)}")
    size: Any = budget
    if isinstance(budget, str):
        size = read_setting(budget, Budget, "--budget ")
    if isinstance(size, int) and size > MOST:
        raise SinkscopeError(f"--budget {size}: expected up to {MOST} tokens, or a share; the texts are short")
    place = ""
    if isinstance(factory, str):
        place, factory = factory, factory_named(factory)
    if ":" not in place or place.partition(":")[0] in policies():  # h2o:0.25 is a policy
        place = place_of(factory)
    if not place:
        raise SinkscopeError(f"{factory!r} has no name: {EXPECTED}")
    kit = Kit(factory, tolerance, place, size, thorough, seed)
    if size is not None and not kit.asked_for:
        raise SinkscopeError(f"--budget {size}: {place} has no parameter budget or share, which would be given it")
    kit.subject()  # bad input is said before anything is checked
    names = [check for check in CHECKS if not only or check in only]
    rows: list[CheckedBehaviour] = []
    for done, check in enumerate(names):
        if progress is not None:
            progress("checking", done, len(names))
        rows.append(kit.checked(CHECKS[check]))
    return CacheCheck(
        model=ModelInfo("check-cache", "kit", 0, 0, 0, ""),
        settings={"only": only, "tolerance": tolerance, "budget": budget, "thorough": thorough, "seed": seed},
        provenance=provenance(started=started, attention="sdpa"),
        cache=place,
        checks=tuple(rows),
        evicts=kit.evicts,
        least=kit.least if kit.asked_for else 0,
    )
