"""LoopGuard (section 5): an online monitor for each row removes the repeating tail from the cache when it fires."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Whole, check_fields
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopguard.detect import Found, RowMonitors, largest_probability, poll_of, signals
from sinkscope.kv.loopguard.plan import Clean, Pick, Plan, Retention, plan, repeated, spans
from sinkscope.kv.loopguard.steer import Ban, Rewinder
from sinkscope.kv.policy import NAMED
from sinkscope.kv.session import Moment, Session
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.loops.monitor import MonitorSettings
from sinkscope.loops.signals import tail_period

Escalation = Literal["none", "repeats", "ban", "sample", "both"]


class LoopGuardWindow(StreamingLLM):
    """The window policy behind `between="window"`; a class of its own, so that errors name it."""


@dataclass(frozen=True, kw_only=True)
class LoopGuard(Intervention):
    """Break repetition loops: when a row's monitor fires, its cache is cut to anchors, sparse history and clean tail.

    The defaults are meant for everyday use: any repetition is found after three copies, and if a loop comes back, the
    guard also bans its n-grams. `LoopGuard.paper()` is the guard as published.

    Only generated tokens are watched, which arrive one by one after a prompt. A call with several tokens is a new turn,
    for which monitors start again. Each row is watched and cut independently, and a row that has ended is ignored. All
    layers and heads lose the same positions, right after the call whose token set off the alarm. Kept tokens keep
    their positions. Without an alarm the model's output is exactly that without a guard. Policies in the same run keep
    the guard's anchors, and the guard keeps their first tokens.

    Attributes:
        budget: Largest number of tokens right after an intervention (B), or a fraction of the row's prompt.
        anchors: Number of first positions, which are never removed (N_anchor).
        window: Number of tokens that the monitor looks at (W).
        between: What happens between interventions. "full" removes nothing ("event-driven" in the paper), so the cache
            grows beyond the budget. "window" keeps anchors and latest tokens, so the cache always fits the budget.
        variant: When to intervene: "repeats" for any repetition, "full" for the paper's votes, or a variant of Table 3
            and others: "none" never intervenes, "always" intervenes every 200 tokens, and "p1", "ttr", "cr",
            "stall" and "tail" each use that signal alone (`MonitorSettings.variant`).
        monitor: Further monitor settings, by name (`MonitorSettings`).
        recent: Length of the recent window (R). "window" uses the monitor's, as in the paper; None means no recent
            window. `Retention` explains this field and the next four.
        recent_budget: Number of recent tokens kept at level 0.
        recent_pick: Which recent tokens are kept.
        clean: Which tokens count as bad; "tail" is the paper's rule.
        max_level: Cap on the aggressiveness level; higher levels keep fewer recent tokens. 3 in the paper.
        copies: Number of copies at the end of the recent window that make a bad block, whatever their period. 2 also
            finds long-period loops that stall the output, which the monitor's short-period test does not cover.
        escalate: What else is done when a row triggers again within W tokens. "ban" bans the loop's n-grams for W
            tokens. "sample" draws the next `draws` tokens by their probabilities, with a fixed seed, even if decoding
            is greedy. "both" does both. "repeats" also removes older copies, by the rule of that name in `clean`.
            "none" does nothing more, as in the paper.
        draws: Number of tokens drawn by "sample".
        ban_length: Length of the banned n-grams. Each further consecutive alarm bans n-grams one token shorter, down to
            pairs.
        rewind: Also remove the loop from the output: the text is cut after the first copy and continues under a ban.
            `sinkscope.serving.generate` and `Conversation` support this; a plain `model.generate` does not.
        ends: Ids that end a row. By default the end-of-sequence and padding ids of the model's generation
            configuration; set them if `generate` is given other ids.
        poll: Number of tokens checked at once. By default 1 on a CPU and 8 elsewhere, so that not every token waits for
            the device. Signals are the same, but an intervention may come up to `poll` tokens after its cause.

    An intervention is an event of kind "guard", with `step` and `position` of the token that set it off. Its `data` has
    "signals", "period" (of the repetition at the end, or None), "bad" (ranges to remove), "level", "kept" (ranges
    [start, stop)), "kept_count", "cached_before", "generated" (number of the token), "since" (tokens since the last
    trigger), "escalated" (what was done beside the cut, or None) and "taken_back" (tokens removed from the output).

    Raises:
        SinkscopeError: The budget leaves nothing beside the anchors, or another setting is invalid.
        UnsupportedError: Beam search reorders rows, assisted generation takes tokens back, a policy in the same run
            rebases positions, or the caller cannot take tokens back for `rewind`.

    Example:
        >>> guard = LoopGuard(budget=1024, monitor={"warmup": 128})
        >>> guard.settings.window, guard.settings.warmup
        (256, 128)
    """

    budget: Budget = field(default=1024, kw_only=False)
    anchors: Whole = 32
    window: Natural = 256
    between: Literal["full", "window"] = "full"
    variant: str = "repeats"
    monitor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    recent: Natural | Literal["window"] | None = None
    recent_budget: Natural | None = None
    recent_pick: Pick = "latest"
    clean: Clean = "tail"
    max_level: Whole = 0
    copies: Annotated[int | float, Field(ge=2)] = 2
    escalate: Escalation = "both"
    draws: Natural = 64
    ban_length: Annotated[int, Field(ge=2)] = 4
    rewind: bool = False
    ends: Sequence[int] | None = None
    poll: Natural | None = None

    KIND: ClassVar[str] = "guard"

    def __post_init__(self) -> None:
        check_fields(self)
        if "window" in self.monitor:
            raise SinkscopeError("monitor has 'window': give it as window=..., the recent window follows it")
        _ = self.settings
        if isinstance(self.budget, int):
            self.retention(0)

    @classmethod
    def paper(cls, budget: int | float = 1024, **changed: Any) -> LoopGuard:
        """The guard as published: votes and gates, recent tokens from the monitor's window, and nothing but the cut.

        Args:
            budget: As for the plain constructor.
            changed: Other fields to set.
        """
        printed: dict[str, Any] = {"variant": "full", "recent": "window", "max_level": 3, "escalate": "none"}
        return cls(budget, **printed | changed)

    @property
    def settings(self) -> MonitorSettings:
        """Settings of the monitor of every row."""
        usual: dict[str, Any] = {"relapse": self.window}
        if self.variant == "repeats":
            usual["cooldown"] = 8  # a loop that goes on after the cut is met with more than a cut, so there is no wait
        return MonitorSettings.variant(self.variant, window=self.window, **usual | dict(self.monitor))

    def summary(self, run: Run) -> str:
        """The first loop and the response to it, and how many more followed."""
        cuts = [event for event in run.events if event.kind == self.KIND]
        if not cuts:
            return "LoopGuard found no loop and changed nothing."
        more = f" It stepped in {len(cuts)} times in all." if len(cuts) > 1 else ""
        return in_words(cuts[0]) + more

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that leaves nothing beside the anchors."""
        self.retention(tokens)

    def retention(self, prompt: int, first: int = 0) -> Retention:
        """What is kept of a row with `prompt` prompt tokens, if a policy in the same run keeps the `first` ones."""
        budget = self.budget if isinstance(self.budget, int) else int(self.budget * prompt)
        if isinstance(self.budget, float) and budget <= self.anchors:
            raise SinkscopeError(
                f"LoopGuard: budget={self.budget} of a prompt of {prompt} tokens is {budget}, which leaves nothing "
                f"beside the {self.anchors} anchors: raise it, or keep fewer anchors",
                page="kv-budget",
            )
        try:
            return Retention(
                budget=budget,
                anchors=max(self.anchors, min(first, budget - 1)),
                recent=self.window if isinstance(self.recent, str) else self.recent,
                recent_budget=self.recent_budget,
                recent_pick=self.recent_pick,
                clean=self.clean,
                max_level=self.max_level,
            )
        except SinkscopeError as error:  # the user wrote LoopGuard
            raise SinkscopeError(f"LoopGuard: {str(error).removeprefix('Retention: ')}", page=error.page) from None

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
        session.anchors = max(session.anchors, self.anchors)
        session.rewinder = Rewinder() if self.rewind else None
        guarding = _Guarding(self, settings, run, key, session)
        session.after_call(guarding.remember)
        run.hook(run.target.hf, "post", guarding.decide)


NAMED.update({"loopguard": LoopGuard, "loopguard:paper": LoopGuard.paper})


def in_words(event: Event) -> str:
    """What the guard found and did in one of its events."""
    data = event.data
    found = "an alarm" if data["period"] is None else f"a repetition every {data['period']} tokens"
    done = [f"kept {data['kept_count']} of {data['cached_before']} cached tokens"]
    done += [f"took the last {data['taken_back']} tokens back"] if data["taken_back"] else []
    done += ["banned n-grams of the loop"] if data["escalated"] in ("ban", "both") else []
    done += ["drew the next tokens"] if data["escalated"] in ("sample", "both") else []
    done += ["removed older copies as well"] if data["escalated"] == "repeats" else []
    did = " and ".join([", ".join(done[:-1])] * (len(done) > 1) + done[-1:])
    return f"After {data['generated']} new tokens the guard found {found}. It {did}."


@dataclass(eq=False)
class _Followed:
    """State of the rows that share a cache, since their last prompt.

    Attributes:
        monitors: Monitors of the rows.
        prompt: Number of real tokens of each row before its first generated token.
        reorders: `CacheLayer.reorders` when the prompt ended.
        seen: Number of tokens in the cache after the last call.
        several: Whether the last call had several tokens and was not the first one.
        calls: Number of the call of each generated token.
        ids: The latest columns of ids, of the prompt and generated.
        bans: N-grams that each row may not write.
        drawn: For each row, the step up to which its tokens are drawn.
        rewound: Number of the generated token at which each loop was taken back.
    """

    monitors: RowMonitors
    prompt: Int[Tensor, " batch"]
    reorders: int
    seen: int
    several: bool
    calls: list[int] = field(default_factory=list)
    ids: list[Int[Tensor, "batch pos"]] = field(default_factory=list)
    bans: dict[int, Ban] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    rewound: list[int] = field(default_factory=list)

    def note(self, ids: Int[Tensor, "batch pos"], most: int) -> None:
        """Keep at least the last `most` columns."""
        self.ids.append(ids.detach()[:, -most:])
        if len(self.ids) > 2 * most:
            self.ids = self.ids[-most:]

    def row(self, row: int) -> list[int]:
        """The ids of one row that are kept."""
        if len(self.ids) > 1:
            self.ids = [torch.cat(self.ids, 1)]
        return self.ids[0][row].tolist()

    def take_back(self, count: int) -> None:
        """Forget all but the first `count` generated tokens of a single row, the last of which is read again."""
        gone = len(self.calls) - count + 1
        self.row(0)
        self.ids, self.calls = [self.ids[0][:, :-gone]], self.calls[: count - 1]
        self.seen -= gone
        self.monitors.take_back(count - 1)


class _Guarding:
    """One guard at work in one run."""

    def __init__(self, guard: LoopGuard, settings: MonitorSettings, run: Run, key: int, session: Session) -> None:
        self._guard, self._settings, self._run, self._key, self._session = guard, settings, run, key, session
        # Copies are looked for in the whole row, or by the paper's rule in the recent window.
        window = guard.window if isinstance(guard.recent, str) else guard.recent
        self._recent = 1 << 40 if window is None or "repeats" in (guard.clean, guard.escalate) else window
        padding = getattr(getattr(run.target.hf, "generation_config", None), "pad_token_id", None)
        known = [*run.target.end_ids, *([] if padding is None else [int(padding)])]
        self._ends = frozenset(known if guard.ends is None else guard.ends)
        self._local = threading.local()
        self._random = torch.Generator(run.target.device).manual_seed(0)
        self._probabilities = settings.rule != "repeats"  # which asks for none

    def remember(self, moment: Moment) -> None:
        """Note the moment after the layers; the logits of the call come next."""
        self._local.moment = moment

    def decide(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Pass the token of a finished call to the monitors, and cut the rows that loop."""
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
            memory["followed"] = self._turn(moment, followed, ids)
            return
        if followed is None or past != followed.seen or len(followed.monitors) != len(ids):
            # Tokens were read before the run, or the caller took some back: later tokens are watched from here on.
            memory["followed"] = followed = self._new(moment, past, several=False)
        followed.note(ids, self._recent)
        followed.seen, followed.several = past + 1, False
        followed.calls.append(moment.call.step)
        logits = (output.logits if hasattr(output, "logits") else output[0])[:, -1]
        drawn = [row for row, until in followed.drawn.items() if len(followed.calls) <= until]
        if found := followed.monitors.push(ids[:, -1], largest_probability(logits) if self._probabilities else None):
            self._cut(moment, followed, {one.row: one for one in found})
        if followed.bans or drawn:
            self._steer(followed, logits, drawn)

    def _steer(self, followed: _Followed, logits: Float[Tensor, "row vocab"], drawn: list[int]) -> None:
        """Remove banned tokens from the logits in place; where a token is to be drawn, leave only the drawn one."""
        followed.bans = {row: ban for row, ban in followed.bans.items() if len(followed.calls) <= ban.until}
        if followed.bans:
            length = self._guard.ban_length
            latest = torch.cat(followed.ids[-length:], 1)[:, 1 - length :].tolist()
            for row, ban in followed.bans.items():
                logits[row, ban.banned(latest[row])] = -torch.inf
        for row in drawn:
            token = torch.multinomial(logits[row].float().softmax(-1), 1, generator=self._random)
            logits[row] = torch.full_like(logits[row], -torch.inf).scatter(0, token, 0.0)

    def _turn(self, moment: Moment, followed: _Followed | None, ids: Int[Tensor, "batch pos"]) -> _Followed:
        """Start following rows at a prompt or a new turn; ids of earlier turns stay known."""
        if (rewinder := self._session.rewinder) is not None and rewinder.allowance is None:
            raise UnsupportedError(
                "rewind=True takes tokens back from the output, which model.generate cannot do: use "
                "sinkscope.serving.generate or Conversation, or leave rewind out",
                page="kv-session",
            )
        past, new = moment.call.past, moment.call.index.shape[1]
        before = followed.ids if followed is not None and past > 0 else []
        followed = self._new(moment, past + new, several=past > 0)
        followed.ids = before if not before or len(before[0]) == len(ids) else []
        followed.note(ids, self._recent)
        return followed

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
        self, known: list[tuple[int, int]], begin: int | None, retention: Retention
    ) -> tuple[list[tuple[int, int]], int | None]:
        """Find the positions in bad blocks, and the period of the repetition at the end.

        Recent tokens may reach into the prompt, so a loop that began in the prompt is bad there too.

        Args:
            known: Position and id of the latest tokens.
            begin: Position where the repetition found by the monitor begins; slightly different copies are bad too.
            retention: What is kept.
        """
        recent = known if retention.recent is None else known[-retention.recent :]
        tail = tail_period([i for _, i in recent], repeats=self._guard.copies)
        bad = set() if tail is None else {at for at, _ in recent[tail.start :]}
        if retention.recent is None and begin is not None:
            bad |= {at for at, _ in known if at >= begin}
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
            ids = followed.row(row)
            known = [(at, i) for at, i in zip(rows[row][-len(ids) :], ids, strict=True) if at >= 0]
            held = _held(moment.layers, row, lengths[row])
            retention = self._guard.retention(prompts[row], self._session.anchors)
            escalate = None if one.step.level == 0 or self._guard.escalate == "none" else self._guard.escalate
            retention = replace(retention, clean="repeats") if escalate == "repeats" else retention
            begin = None if one.step.tail is None else prompts[row] + one.step.tail.start
            bad, period = self._bad(known, begin, retention)
            if period is None and one.step.tail is not None:  # copies that differ a little
                period = one.step.tail.period
            loop = [i for at, i in known if bad and at >= bad[-1][0]]
            taken = self._taken(followed, prompts[row], lengths[row], one)
            if taken:
                escalate, bad = "ban", [(lengths[row] - taken, lengths[row])]
            self._escalate(followed, one, escalate, loop, taken)
            level = min(one.step.level, retention.max_level)
            kept = plan(held, lengths[row], bad, retention, level)
            allowed[row] = False
            allowed[row, list(kept.keep)] = True
            more = {"level": level, "cached_before": len(held), "escalated": escalate, "taken_back": taken}
            events.append(_event(one, followed, prompts[row], kept, {"period": period, "bad": bad, **more}))
            if taken:
                followed.take_back(len(followed.calls) - taken)
        for kv in moment.layers:
            at = kv.pos
            wide = allowed.to(at.device)[:, None].expand(-1, at.shape[1], -1)
            keep = wide.gather(2, at.clamp(min=0)) & (at >= 0)
            if bool((keep != (at >= 0)).any()):
                kv.evict(keep)
        self._run.log(lambda: events)

    def _taken(self, followed: _Followed, prompt: int, length: int, one: Found) -> int:
        """Number of tokens to remove from the output: all copies of the loop but the first."""
        rewinder, tail = self._session.rewinder, one.step.tail
        if rewinder is None or tail is None:
            return 0
        taken = length - prompt - tail.start - tail.period
        if not 0 < taken <= rewinder.allowance:
            return 0
        rewinder.allowance -= taken
        rewinder.keep = length - taken
        return taken

    def _escalate(self, followed: _Followed, one: Found, how: str | None, loop: list[int], taken: int) -> None:
        """Escalate, as set, on an alarm that is not the first one."""
        step, level, longest = len(followed.calls) - taken, one.step.level, self._guard.ban_length
        if taken:  # the monitor forgets what was taken back
            level = 1 + sum(abs(step - at) <= self._guard.window for at in followed.rewound)
            followed.rewound.append(step)
        if how in ("ban", "both"):
            ban = followed.bans.setdefault(one.row, Ban())
            ban.add(loop, max(2, longest + 1 - level), step + self._guard.window)
        if how in ("sample", "both"):
            followed.drawn[one.row] = step + self._guard.draws


def _event(one: Found, followed: _Followed, prompt: int, kept: Plan, more: dict[str, Any]) -> Event:
    generated = one.step.step
    data = {
        "signals": signals(one.step),
        **more,
        "kept": kept.spans,
        "kept_count": len(kept.keep),
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
