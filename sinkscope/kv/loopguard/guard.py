"""LoopGuard (section 5): an online monitor for each row removes the repeating tail from the cache when it fires."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopguard.detect import Found, RowMonitors, largest_probability, poll_of, signals
from sinkscope.kv.loopguard.plan import Clean, Pick, Plan, Retention, plan, repeated, spans
from sinkscope.kv.session import Moment, Session
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.loops.monitor import MonitorSettings
from sinkscope.loops.signals import tail_period
from sinkscope.records import Natural, Whole, check_fields


class LoopGuardWindow(StreamingLLM):
    """What `between="window"` holds the cache to; its own class, so that errors name it."""


@dataclass(frozen=True, kw_only=True)
class LoopGuard(Intervention):
    """Break repetition loops: when a row's monitor fires, its cache is cut to anchors, sparse history and clean tail.

    Only generated tokens are watched, which come one by one after a prompt. A call with several tokens is a new turn,
    in which monitors start anew. Each row is watched and cut by itself, and a row that has ended is ignored. All layers
    and heads lose the same positions, right after the call whose token set off the alarm. Kept tokens keep their
    positions. Without an alarm the model does exactly what it does without a guard.

    Attributes:
        budget: largest number of tokens right after an intervention (B), or a fraction of the row's prompt.
        anchors: number of first positions, which are never removed (N_anchor).
        window: number of tokens that the monitor looks at (W).
        between: "full": nothing is removed between interventions, as "event-driven" says, so the cache grows beyond the
            budget. "window": the cache also stays within the budget at all times, by keeping anchors and latest tokens.
        variant: "full", or a variant of Table 3 and others: "none" never intervenes, "always" intervenes every 200
            tokens, and "p1", "ttr", "cr", "stall" and "tail" go by that signal alone (`MonitorSettings.variant`).
        monitor: further settings of the monitor, by name (`MonitorSettings`).
        recent: length of the recent window (R); `window` by default. For this and the next four see `Retention`.
        recent_budget: number of recent tokens kept at level 0.
        recent_pick: which recent tokens these are.
        clean: which tokens are bad; "tail" is the paper's rule.
        max_level: cap of the aggressiveness level.
        copies: number of copies at the end of the recent window that make a bad block, whatever their period. With 2
            it also finds the long periods that stall the output, which the monitor's short-period test does not cover.
        ends: ids after which a row has ended; by default the end-of-sequence and padding ids of the model's generation
            configuration. They are needed if `generate` gets other ids.
        poll: number of tokens decided at once; by default 1 on a CPU and 8 elsewhere, so that not every token waits for
            the device. Signals are the same, but an intervention comes up to 8 tokens after the token that caused it.

    An intervention is an event of kind "guard": `step` and `position` of the token that set it off, and in `data`
    "signals", "period" (of the repetition at the end, or None), "bad" (ranges to remove), "level", "kept" (ranges
    [start, stop)), "kept_count", "cached_before", "generated" (number of the token) and "since" (tokens since the last
    trigger).

    Raises:
        SinkscopeError: the budget leaves nothing beside the anchors, or another setting makes no sense.
        UnsupportedError: beam search exchanges rows, assisted generation takes tokens back, or a policy beside the
            guard rebases positions.

    Example:
        >>> guard = LoopGuard(budget=1024, monitor={"warmup": 128})
        >>> guard.settings.window, guard.settings.warmup
        (256, 128)
    """

    budget: int | float = 1024
    anchors: Whole = 32
    window: Natural = 256
    between: Literal["full", "window"] = "full"
    variant: str = "full"
    monitor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    recent: Natural | None = None
    recent_budget: Natural | None = None
    recent_pick: Pick = "latest"
    clean: Clean = "tail"
    max_level: Whole = 3
    copies: Annotated[int | float, Field(ge=2)] = 2
    ends: Sequence[int] | None = None
    poll: Natural | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise SinkscopeError(
                f"budget={self.budget!r}: expected a number of tokens, or a fraction of the prompt above 0.0 and up to "
                "1.0",
                page="kv-budget",
            )
        if "window" in self.monitor:
            raise SinkscopeError("monitor has 'window': give it as window=..., the recent window follows it")
        _ = self.settings
        if isinstance(self.budget, int):
            self.retention(0)

    @property
    def settings(self) -> MonitorSettings:
        """Settings of the monitor of every row."""
        relapse = {} if "relapse" in self.monitor else {"relapse": self.window}
        return MonitorSettings.variant(self.variant, window=self.window, **relapse, **self.monitor)

    def check_prompt(self, tokens: int) -> None:
        """Refuse a fraction of the prompt that leaves nothing beside the anchors."""
        self.retention(tokens)

    def retention(self, prompt: int) -> Retention:
        """What is kept of a row whose prompt has `prompt` tokens."""
        budget = self.budget if isinstance(self.budget, int) else int(self.budget * prompt)
        if isinstance(self.budget, float) and budget <= self.anchors:
            raise SinkscopeError(
                f"budget={self.budget} of a prompt of {prompt} tokens is {budget}, which leaves nothing beside the "
                f"{self.anchors} anchors: raise it, or keep fewer anchors",
                page="kv-budget",
            )
        return Retention(
            budget=budget,
            anchors=self.anchors,
            recent=self.window if self.recent is None else self.recent,
            recent_budget=self.recent_budget,
            recent_pick=self.recent_pick,
            clean=self.clean,
            max_level=self.max_level,
        )

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache, and watch ids and logits of the causal model."""
        session = Session.of(run)
        session.own_cache()
        if self.between == "window":
            LoopGuardWindow(budget=self.budget, first=self.anchors).enter(run, key)
        settings = self.settings
        if settings.rule == "never":
            return
        if session.one_by_one:
            raise UnsupportedError(
                "two guards would watch and cut the same rows: enter one LoopGuard", page="kv-session"
            )
        session.one_by_one = True
        guarding = _Guarding(self, settings, run, key, session)
        session.after_call(guarding.remember)
        run.hook(run.target.hf, "post", guarding.decide)


@dataclass(eq=False)
class _Followed:
    """Rows that share a cache, since their last prompt.

    Attributes:
        monitors: monitors of the rows.
        prompt: number of real tokens of each row before its first generated token.
        reorders: `CacheLayer.reorders` when the prompt ended.
        seen: number of tokens in the cache after the last call.
        several: whether the last call had several tokens and was not the first one.
        calls: number of the call of each generated token.
        ids: the latest columns of ids, of the prompt and generated.
    """

    monitors: RowMonitors
    prompt: Int[Tensor, " batch"]
    reorders: int
    seen: int
    several: bool
    calls: list[int] = field(default_factory=list)
    ids: list[Int[Tensor, "batch pos"]] = field(default_factory=list)

    def note(self, ids: Int[Tensor, "batch pos"], most: int) -> None:
        """Keep at least the last `most` columns."""
        self.ids.append(ids.detach()[:, -most:])
        if len(self.ids) > 2 * most:
            self.ids = self.ids[-most:]


class _Guarding:
    """One guard at work in one run."""

    def __init__(self, guard: LoopGuard, settings: MonitorSettings, run: Run, key: int, session: Session) -> None:
        self._guard, self._settings, self._run, self._key, self._session = guard, settings, run, key, session
        whole = guard.clean == "repeats"  # finds copies in the whole row; the paper's rule, in the recent window
        self._recent = 1 << 40 if whole else guard.window if guard.recent is None else guard.recent
        padding = getattr(getattr(run.target.hf, "generation_config", None), "pad_token_id", None)
        known = [*run.target.end_ids, *([] if padding is None else [int(padding)])]
        self._ends = frozenset(known if guard.ends is None else guard.ends)
        self._local = threading.local()

    def remember(self, moment: Moment) -> None:
        """Note the moment after the layers; the logits of the call come next."""
        self._local.moment = moment

    def decide(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Monitor the token of a call that has ended, and cut the rows that loop."""
        moment: Moment | None = getattr(self._local, "moment", None)
        self._local.moment = None
        ids = kwargs.get("input_ids", args[0] if args else None)
        if moment is None or ids is None:
            return
        memory = moment.state.memory.setdefault(self._key, {})
        followed: _Followed | None = memory.get("followed")
        past, new = moment.call.past, moment.call.index.shape[1]
        if followed is not None:
            self._check(moment, followed)
        if new > 1 or past == 0 or self._session.now.prompting:
            before = followed.ids if followed is not None and past > 0 else []
            memory["followed"] = followed = self._new(moment, past + new, several=past > 0)
            followed.ids = before if not before or len(before[0]) == len(ids) else []
            followed.note(ids, self._recent)
            return
        if followed is None or past != followed.seen or len(followed.monitors) != len(ids):
            # Tokens were read before the run, or the caller took some back: later tokens are watched from here on.
            memory["followed"] = followed = self._new(moment, past, several=False)
        followed.note(ids, self._recent)
        followed.seen, followed.several = past + 1, False
        followed.calls.append(moment.call.step)
        found = followed.monitors.push(ids[:, -1], largest_probability(_logits(output)[:, -1]))
        if found:
            self._cut(moment, followed, {one.row: one for one in found})

    def _new(self, moment: Moment, seen: int, several: bool) -> _Followed:
        columns = moment.call.columns[:, :seen]
        prompt = columns.amax(1) + 1
        if isinstance(self._guard.budget, float):
            self._guard.retention(int(prompt.min()))  # an error comes now rather than at the first loop
        poll = poll_of(self._guard.poll, columns.device)
        monitors = RowMonitors(self._settings, len(columns), self._ends, poll)
        return _Followed(monitors, prompt, moment.layers[0].reorders, seen, several)

    def _check(self, moment: Moment, followed: _Followed) -> None:
        if moment.layers[0].reorders != followed.reorders:
            raise UnsupportedError(
                "beam search lets rows change places, and LoopGuard follows each row: use num_beams=1 under a guard",
                page="kv-session",
            )
        if followed.several and moment.call.past < followed.seen:
            raise UnsupportedError(
                "tokens were taken back right after a call that had several, as assisted generation does, and "
                "LoopGuard watches tokens that come one by one: generate without an assistant under a guard",
                page="kv-session",
            )
        if moment.state.dropped is not None:
            raise UnsupportedError(
                'LoopGuard keeps the positions that tokens were read at: use positions="original" in the policy beside',
                page="kv-session",
            )

    def _bad(
        self, followed: _Followed, row: int, columns: list[int], retention: Retention
    ) -> tuple[list[tuple[int, int]], int | None]:
        """Find the positions in bad blocks, and the period of the repetition at the end.

        The recent window may reach into the prompt, so a loop that the prompt began is bad there too.
        """
        ids = torch.cat(followed.ids, 1)[row].tolist()
        known = [(at, i) for at, i in zip(columns[-len(ids) :], ids, strict=True) if at >= 0]
        recent = known[-retention.recent :]
        tail = tail_period([i for _, i in recent], repeats=self._guard.copies)
        bad = set() if tail is None else {at for at, _ in recent[tail.start :]}
        if retention.clean == "repeats":
            bad |= {known[i][0] for i in repeated([i for _, i in known], self._settings.novelty_n)}
        return spans(sorted(bad)), None if tail is None else tail.period

    def _cut(self, moment: Moment, followed: _Followed, found: dict[int, Found]) -> None:
        for kv in moment.layers:
            kv.settle()
        columns = moment.call.columns
        rows: list[list[int]] = columns.tolist()
        lengths = [max(row) + 1 for row in rows]
        prompts: list[int] = followed.prompt.tolist()
        allowed = torch.ones(len(lengths), max(lengths), dtype=torch.bool, device=columns.device)
        events: list[Event] = []
        for row, one in found.items():
            held = _held(moment.layers, row, lengths[row])
            retention = self._guard.retention(prompts[row])
            bad, period = self._bad(followed, row, rows[row], retention)
            level = min(one.step.level, retention.max_level)
            kept = plan(held, lengths[row], bad, retention, level)
            allowed[row] = False
            allowed[row, list(kept.keep)] = True
            events.append(_event(one, followed, prompts[row], kept, period, bad, level, len(held)))
        for kv in moment.layers:
            at = kv.pos
            wide = allowed.to(at.device)[:, None].expand(-1, at.shape[1], -1)
            keep = wide.gather(2, at.clamp(min=0)) & (at >= 0)
            if bool((keep != (at >= 0)).any()):
                kv.evict(keep)
        self._run.log(lambda: events)


def _event(
    one: Found,
    followed: _Followed,
    prompt: int,
    kept: Plan,
    period: int | None,
    bad: list[tuple[int, int]],
    level: int,
    before: int,
) -> Event:
    generated = one.step.step
    data = {
        "signals": signals(one.step),
        "period": period,
        "bad": bad,
        "level": level,
        "kept": kept.spans,
        "kept_count": len(kept.keep),
        "cached_before": before,
        "generated": generated,
        "since": one.step.since,
    }
    return Event(one.row, followed.calls[generated - 1], prompt + generated - 1, None, None, "guard", data)


def _held(layers: list[CacheLayer], row: int, length: int) -> list[int]:
    """Positions of a row that at least one layer and head holds."""
    whole = [kv for kv in layers if not kv.edited]
    mark = torch.zeros(length + 1, dtype=torch.bool, device=layers[0].pos.device)
    for kv in whole[:1] or layers:
        mark[kv.pos[row].flatten().to(mark.device) + 1] = True  # holes, -1, fall into the first place
    return mark[1:].nonzero().flatten().tolist()


def _logits(output: Any) -> Float[Tensor, "batch pos vocab"]:
    return output.logits if hasattr(output, "logits") else output[0]
