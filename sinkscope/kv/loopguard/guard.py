"""LoopGuard (section 5): an online monitor for each row removes the repeating tail from the cache when it fires."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from einops import repeat
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, SinkscopeWarning, UnsupportedError
from sinkscope.files.notation import agreeing, counted, every, listed
from sinkscope.files.records import Budget, Natural, Share, Whole, check_fields
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer, refuse_states
from sinkscope.kv.loopguard.detect import LoopAlarm, RowMonitors, largest_probability, signals
from sinkscope.kv.loopguard.retention import (
    KeptTokens,
    Retention,
    ranges_of,
    tokens_to_keep,
)
from sinkscope.kv.loopguard.steer import PENALTY, Ban, Rewinder, draw
from sinkscope.kv.policy import GUARDS
from sinkscope.kv.session import CacheState, Moment, Session
from sinkscope.kv.streaming_llm import StreamingLLM
from sinkscope.loops.monitor import MonitorSettings
from sinkscope.loops.signals import tail_period

Escalation = Literal["none", "ban", "draw"]
ANCHORS = 32  # LoopGuard, section 6.1; at most a quarter of the budget
DRAW_FROM = 6  # rung of the answer to a loop from which on tokens are drawn


class LoopGuardWindow(StreamingLLM):
    """The window policy behind `between="window"`; a class of its own, so that errors name it."""


@dataclass(frozen=True, kw_only=True)
class LoopGuard(Intervention):
    """Break repetition loops: when a row's monitor fires, its cache is cut to anchors, sparse history and clean tail.

    The defaults are meant for everyday use. A repetition is found once it covers 48 tokens and two and a half copies,
    or three if some tokens differ. Where the caller can take tokens back (`sinkscope.serving.generate`, `Conversation`,
    the command line), the output is cut after the first copy; a plain `model.generate` only loses the copies from its
    cache. What is done in addition climbs by a rung with every alarm that soon follows another: nothing, then a mild
    ban of the loop's n-grams that grows, then a few tokens are drawn. `LoopGuard.paper()` is the guard as published.

    Only generated tokens are watched, which arrive one by one after a prompt. A call with several tokens is a new turn,
    for which monitors start again. Each row is watched and cut independently, and a row that has ended is ignored. All
    layers and heads lose the same positions, right after the call whose token set off the alarm. Kept tokens keep
    their positions. Without an alarm the model's output is exactly that without a guard. Policies in the same run keep
    the guard's anchors, and the guard keeps their first tokens.

    Attributes:
        budget: Largest number of tokens right after an intervention (B), or a fraction of the row's prompt.
        anchors: Number of first positions that are kept (N_anchor): by default 32, as in the paper, but at most a
            quarter of the budget.
        window: Number of tokens that the monitor looks at (W).
        between: What happens between interventions. "full" removes nothing ("event-driven" in the paper), so the cache
            grows beyond the budget. "window" keeps anchors and latest tokens, so the cache always fits the budget.
        variant: When to intervene: "repeats" for any repetition, "tolerant" for looser ones too, "full" for the paper's
            votes, or a variant of Table 3 and others: "none" never intervenes, "always" intervenes every 200 tokens,
            and "p1", "ttr", "cr", "stall" and "tail" each use that signal alone (`MonitorSettings.variant`).
        monitor: Further monitor settings, by name (`MonitorSettings`).
        recent: Length of the recent window (R). "window" uses the monitor's, as in the paper; None means no recent
            window. `Retention` explains it.
        max_level: Cap on the aggressiveness level; higher levels keep fewer recent tokens. 3 in the paper.
        copies: Number of copies at the end of the recent window that make a bad block, whatever their period. 2 also
            finds long-period loops that stall the output, which the monitor's short-period test does not cover.
        escalate: What is done beside the cut. The first alarm is rung 0, and each further one within W tokens of the
            one before is a rung more; where a loop is taken back, they are counted from rung 1. "ban" bans the loop's
            n-grams for W tokens from rung 1 on: the token that would complete one loses 5 logits times the rung.
            "draw" does so too, and from rung 6 on it draws the next `draws` tokens with a fixed seed if decoding is
            greedy; a caller who samples draws tokens already. "none" does nothing more, as in the paper.
        draws: Number of tokens drawn by "draw".
        min_p: Tokens with less than this share of the largest probability are not drawn.
        ban_length: Length of the n-grams banned at rung 1. Each further rung bans n-grams one token shorter, down to
            pairs.
        rewind: Whether to remove the loop from the output as well: the text is cut after the first copy and continues
            under a ban. None does so wherever the caller can take tokens back; True refuses all others.
        ends: Ids that end a row. By default the end-of-sequence and padding ids of the model's generation
            configuration; set them if `generate` is given other ids.

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
    anchors: Whole | None = None
    window: Natural = 256
    between: Literal["full", "window"] = "full"
    variant: str = "repeats"
    monitor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    recent: Natural | Literal["window"] | None = None
    max_level: Whole = 0
    copies: Annotated[int | float, Field(ge=2)] = 2
    escalate: Escalation = "draw"
    draws: Natural = 64
    min_p: Share = 0.1
    ban_length: Annotated[int, Field(ge=2)] = 4
    rewind: bool | None = None
    ends: Sequence[int] | None = None

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
        printed: dict[str, Any] = {"variant": "full", "recent": "window", "max_level": 3}
        printed |= {"escalate": "none", "rewind": False}
        return cls(budget, **(printed | changed))

    @property
    def settings(self) -> MonitorSettings:
        """Settings of the monitor of every row."""
        settings: dict[str, Any] = {"relapse": self.window}
        if self.variant in ("repeats", "tolerant"):
            settings["cooldown"] = 8  # a loop that goes on after the cut is met with more than a cut: no need to wait
        settings |= self.monitor
        return MonitorSettings.variant(self.variant, window=self.window, **settings)

    @property
    def recent_window(self) -> int | None:
        """Length of the recent window (R); None if there is none."""
        return self.window if isinstance(self.recent, str) else self.recent

    def summary(self, run: Run) -> str:
        """The first loop and the response to it, and how many more followed."""
        cuts = [event for event in run.events if event.kind == self.KIND]
        if not cuts:
            return "LoopGuard found no loop and changed nothing."
        if len(cuts) == 1:
            return in_words(cuts[0])
        return f"{in_words(cuts[0])} It stepped in {len(cuts)} times in all."

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that leaves nothing beside the anchors."""
        self.retention(tokens)

    def retention(self, prompt: int, first: int = 0) -> Retention:
        """What is kept of a row with `prompt` prompt tokens, if a policy in the same run keeps the `first` ones."""
        budget = self.budget if isinstance(self.budget, int) else int(self.budget * prompt)
        try:
            return Retention(
                budget=budget,
                anchors=max(self.first_tokens(budget), min(first, budget - 1)),
                recent=self.recent_window,
                max_level=self.max_level,
            )
        except SinkscopeError as error:  # the user wrote LoopGuard, and perhaps a share
            text = str(error).removeprefix("Retention: ")
            share = "" if budget == self.budget else f" ({self.budget} of a prompt of {counted(prompt, 'token')})"
            raise SinkscopeError(f"LoopGuard: {text}{share}", page=error.page) from None

    def first_tokens(self, budget: int) -> int:
        """Number of anchors: the given one, or 32, but at most a quarter of the budget."""
        if self.anchors is not None:
            return self.anchors
        return min(ANCHORS, budget // 4)

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache, and watch ids and logits of the causal model."""
        session = Session.of(run)
        session.own_cache()
        anchors = self.first_tokens(self.budget if isinstance(self.budget, int) else 4 * ANCHORS)
        if self.between == "window":
            LoopGuardWindow(budget=self.budget, first=anchors).enter(run, key)
        settings = self.settings
        if settings.rule == "never":
            return
        if session.one_by_one:
            raise UnsupportedError(
                "two guards would watch and cut the same rows: enter one LoopGuard", page="kv-session"
            )
        session.one_by_one = True
        session.anchors = max(session.anchors, anchors)
        if self.rewind is not False:
            session.rewinder = Rewinder(self.rewind is True)
        guarding = Guarding(self, settings, run, session)
        session.after_call(guarding.note_call)
        run.hook(run.target.hf, "post", guarding.decide)


GUARDS.update({"loopguard": LoopGuard, "loopguard:paper": LoopGuard.paper})


def in_words(event: Event) -> str:
    """What the guard found and did in one of its events."""
    data = event.data
    alarm = "an alarm" if data["period"] is None else f"a repetition {every(data['period'], 'token')}"
    actions = [f"kept {data['kept_count']} of {counted(data['cached_before'], 'cached token')}"]
    if data["taken_back"]:
        actions.append(f"took {counted(data['taken_back'], 'token')} back")
    if data["escalated"]:
        actions.append("banned n-grams of the loop")
    if data["escalated"] == "draw":
        actions.append("drew the next tokens")
    new = counted(data["generated"], "new token")
    return f"After {new} the guard found {alarm}. It {listed(actions)}."


@dataclass(eq=False)
class GuardedRows:
    """State of the rows that share a cache, since their last prompt.

    Attributes:
        monitors: Monitors of the rows.
        prompt: Number of real tokens of each row before its first generated token.
        reorders: `CacheLayer.reorders` when the prompt ended.
        seen: Number of tokens in the cache after the last call.
        later_turn: Whether the last call had several tokens and was not the first one.
        count: Number of calls since the prompt.
        ids: Columns of ids, of the prompt and generated.
        bans: N-grams that each row may not write.
        drawn_until: For each row, the `count` up to which tokens are drawn.
        rewound_at: For each row, the number of the generated token at which each loop was taken back.
    """

    monitors: RowMonitors
    prompt: Int[Tensor, " batch"]
    reorders: int
    seen: int
    later_turn: bool
    count: int = 0
    ids: list[Int[Tensor, "batch pos"]] = field(default_factory=list)
    bans: dict[int, Ban] = field(default_factory=dict)
    drawn_until: dict[int, int] = field(default_factory=dict)
    rewound_at: dict[int, list[int]] = field(default_factory=dict)

    def row_ids(self, row: int) -> list[int]:
        """The ids of one row."""
        if len(self.ids) > 1:
            self.ids = [torch.cat(self.ids, 1)]
        return self.ids[0][row].tolist()

    def drop_columns(self, count: int) -> None:
        """Forget the last columns, which no row has any more."""
        self.row_ids(0)
        self.ids = [self.ids[0][:, : self.ids[0].shape[1] - count]]
        self.seen -= count


@dataclass(frozen=True, eq=False)
class LoopingRow:
    """A row whose monitor triggered.

    Attributes:
        alarm: What the monitor reported.
        prompt: Number of real tokens before the first generated token.
        length: Number of real tokens so far.
        positions: Positions of the latest tokens.
        ids: Their ids.
    """

    alarm: LoopAlarm
    prompt: int
    length: int
    positions: list[int]
    ids: list[int]


@dataclass(frozen=True)
class BadTokens:
    """What is removed from a row.

    Attributes:
        ranges: Ranges [start, stop) of positions.
        period: Period of the repetition at the end; None if there is none.
        loop: Ids of the repetition.
    """

    ranges: list[tuple[int, int]]
    period: int | None
    loop: list[int]


class Guarding:
    """One guard at work in one run."""

    def __init__(self, guard: LoopGuard, settings: MonitorSettings, run: Run, session: Session) -> None:
        self._guard = guard
        self._settings = settings
        self._run = run
        self._session = session
        self._ends = frozenset(_end_ids(run) if guard.ends is None else guard.ends)
        self._rows: WeakKeyDictionary[CacheState, GuardedRows] = WeakKeyDictionary()
        self._local = threading.local()
        self._warned = False
        self._random = torch.Generator(run.target.device).manual_seed(0)
        self._needs_probabilities = settings.rule != "repeats"

    def note_call(self, moment: Moment) -> None:
        """Note the moment after the layers; the logits of the call come next."""
        self._local.moment = moment

    def decide(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Pass the token of a finished call to the monitors, and cut the rows that loop."""
        moment: Moment | None = getattr(self._local, "moment", None)
        self._local.moment = None
        ids = kwargs.get("input_ids", args[0] if args else None)
        if moment is None or ids is None:
            return
        rewinder = self._session.rewinder
        if rewinder is not None and rewinder.read is not None:  # this piece of the generation has ended
            return
        rows = self._rows.get(moment.state)
        if rows is not None:
            self._check_order(moment, rows)
        past, new = moment.call.past, moment.call.index.shape[1]
        if new > 1 or past == 0 or self._session.now.prompting:
            self._rows[moment.state] = self._new_turn(moment, rows, ids)
            return
        if rows is None or past != rows.seen or len(rows.monitors) != len(ids):
            # Tokens were read before the run, or the caller took some back: later tokens are watched from here on.
            rows = self._new_rows(moment, past, later_turn=False)
            self._rows[moment.state] = rows
        rows.seen = past + 1
        self._note_tokens(rows, ids)
        logits = (output.logits if hasattr(output, "logits") else output[0])[:, -1]
        drawn = [row for row, until in rows.drawn_until.items() if rows.count <= until]
        alarms = self._alarms(rows, ids, logits)
        if alarms:
            self._cut(moment, rows, alarms)
        if rows.bans or drawn:
            self._steer(rows, logits, drawn)

    def _note_tokens(self, rows: GuardedRows, ids: Int[Tensor, "batch pos"]) -> None:
        """Count a generated token of each row, and go on with the bans that are still in force."""
        rows.ids.append(ids.detach())
        rows.later_turn = False
        rows.count += 1
        if rows.bans:
            newest = ids[:, -1].tolist()
            rows.bans = {row: ban for row, ban in rows.bans.items() if rows.count <= ban.until}
            for row, ban in rows.bans.items():
                ban.latest.append(newest[row])

    def _alarms(
        self, rows: GuardedRows, ids: Int[Tensor, "batch pos"], logits: Float[Tensor, "row vocab"]
    ) -> list[LoopAlarm]:
        """Pass the newest tokens to the monitors; the alarms of rows that still have tokens to write."""
        largest = largest_probability(logits) if self._needs_probabilities else None
        alarms = rows.monitors.push(ids[:, -1], largest)
        rewinder = self._session.rewinder
        if rewinder is None or not rewinder.full_at:
            return alarms
        return [alarm for alarm in alarms if rows.seen < rewinder.full_at[alarm.row]]  # a full row goes on as padding

    def _steer(self, rows: GuardedRows, logits: Float[Tensor, "row vocab"], drawn: list[int]) -> None:
        """Lower the logits of banned tokens in place, and raise that of a drawn one where decoding is greedy."""
        for row, ban in rows.bans.items():
            logits[row, ban.banned()] -= ban.penalty
        if not self._session.now.samples:
            for row in drawn:
                draw(logits[row], self._guard.min_p, self._random)

    def _new_turn(self, moment: Moment, earlier: GuardedRows | None, ids: Int[Tensor, "batch pos"]) -> GuardedRows:
        """Start following rows at a prompt or a new turn; ids of earlier turns stay known."""
        rewinder = self._session.rewinder
        if rewinder is not None and rewinder.required and rewinder.allowance is None:
            raise UnsupportedError(
                "rewind=True takes tokens back from the output, which model.generate and streamers cannot do: use "
                "sinkscope.serving.generate or Conversation, or leave rewind out",
                page="kv-session",
            )
        if len(moment.layers) < len(moment.cache.layers):
            self._spare_states(moment)
        past, new = moment.call.past, moment.call.index.shape[1]
        rows = self._new_rows(moment, past + new, later_turn=past > 0)
        if earlier is not None and past > 0 and earlier.ids and len(earlier.ids[0]) == len(ids):
            rows.ids = earlier.ids
        rows.ids.append(ids.detach())
        return rows

    def _spare_states(self, moment: Moment) -> None:
        """Take nothing back where layers keep a state, such as those of linear attention."""
        rewinder = self._session.rewinder
        if rewinder is not None and rewinder.required:
            refuse_states(moment.cache, "rewind=True")
        if rewinder is not None:
            rewinder.allowance = None
        if not self._warned:
            self._warned = True
            states = len(moment.cache.layers) - len(moment.layers)
            keep = agreeing(states, "keeps", "keep")
            warnings.warn(
                f"{counted(states, 'layer')} of {self._run.target.name} {keep} a state, of which LoopGuard can take "
                "nothing: it cuts the other layers and bans the loop's n-grams, and does not rewind",
                SinkscopeWarning,
                stacklevel=2,
            )

    def _new_rows(self, moment: Moment, seen: int, later_turn: bool) -> GuardedRows:
        columns = moment.call.columns[:, :seen]
        prompt = columns.amax(1) + 1
        if isinstance(self._guard.budget, float):
            self._guard.retention(int(prompt.min()))  # an error comes now rather than at the first loop
        monitors = RowMonitors(self._settings, len(columns), self._ends)
        return GuardedRows(monitors, prompt, moment.layers[0].reorders, seen, later_turn)

    def _check_order(self, moment: Moment, rows: GuardedRows) -> None:
        if moment.layers[0].reorders != rows.reorders:
            raise UnsupportedError(
                "beam search lets rows change places, and LoopGuard follows each row: use num_beams=1 under a guard",
                page="kv-session",
            )
        if rows.later_turn and moment.call.past < rows.seen:
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

    def _cut(self, moment: Moment, rows: GuardedRows, alarms: list[LoopAlarm]) -> None:
        """Cut the cache of the rows that loop, and do what else is set."""
        for kv in moment.layers:
            kv.settle()
        columns: list[list[int]] = moment.call.columns.tolist()
        prompts: list[int] = rows.prompt.tolist()
        kept: dict[int, KeptTokens] = {}
        events: list[Event] = []
        for alarm in alarms:
            ids = rows.row_ids(alarm.row)
            positions = columns[alarm.row][-len(ids) :]
            row = LoopingRow(
                alarm=alarm,
                prompt=prompts[alarm.row],
                length=max(columns[alarm.row]) + 1,
                positions=[position for position in positions if position >= 0],
                ids=[token for position, token in zip(positions, ids, strict=True) if position >= 0],
            )
            event, kept[alarm.row] = self._respond(moment, rows, row)
            events.append(event)
        _evict_rows(moment.layers, kept, columns)
        taken_back = {event.row: event.data["taken_back"] for event in events if event.data["taken_back"]}
        if taken_back:
            self._rewind(moment, rows, taken_back)
        self._run.log(lambda: events)

    def _rewind(self, moment: Moment, rows: GuardedRows, taken_back: dict[int, int]) -> None:
        """Take tokens of some rows back, and the token before them, which is read again; the piece ends here."""
        rewinder, sequence = self._session.rewinder, moment.call.sequence
        columns = sequence.columns.clone()
        rewinder.again = {}
        for row, count in taken_back.items():
            stays = int(columns[row].max()) + 1 - count
            again = columns[row] == stays - 1
            rewinder.again[row] = rows.row_ids(row)[int(again[-len(rows.row_ids(row)) :].nonzero())]
            columns[row] = torch.where(columns[row] < stays - 1, columns[row], -1)
            rows.monitors.take_back(row, stays - 1 - int(rows.prompt[row]))
        used = int((columns >= 0).any(0).nonzero().max()) + 1
        dropped = columns.shape[1] - used
        sequence.columns = columns[:, :used]
        sequence.length = columns.amax(1) + 1
        for kv in moment.layers:
            kv.crop(-dropped)
        rows.drop_columns(dropped)
        rewinder.ended = rows.monitors.ended
        rewinder.read = sequence.columns >= 0

    def _respond(self, moment: Moment, rows: GuardedRows, row: LoopingRow) -> tuple[Event, KeptTokens]:
        """Choose what is kept of a row, and what else is done."""
        step = row.alarm.step
        cached = _cached_positions(moment.layers, row.alarm.row, row.length)
        retention = self._guard.retention(row.prompt, self._session.anchors)
        taken_back = self._take_back(row)
        rung = step.level
        if taken_back:  # the monitor forgets it, and without a ban it would be written again
            earlier = rows.rewound_at.setdefault(row.alarm.row, [])
            place = row.length - row.prompt - taken_back
            rung = 1 + sum(abs(place - at) <= self._guard.window for at in earlier)
            earlier.append(place)
        escalation = self._escalation(rung, taken_back > 0)
        bad = self._bad_tokens(row, retention)
        if taken_back:
            bad = replace(bad, ranges=[(row.length - taken_back, row.length)])
        if escalation is not None:
            longest = self._guard.ban_length
            left = row.ids[: len(row.ids) - taken_back - bool(taken_back)]
            ban = rows.bans.setdefault(row.alarm.row, Ban(deque(maxlen=longest - 1)))
            ban.latest = deque(left[1 - longest :], longest - 1)
            ban.add(bad.loop, max(2, longest + 1 - rung), rows.count + self._guard.window)
            ban.penalty = rung * PENALTY
        if escalation == "draw":
            rows.drawn_until[row.alarm.row] = rows.count + self._guard.draws
        level = min(step.level, retention.max_level)
        kept = tokens_to_keep(cached, row.length, bad.ranges, retention, level)
        data = {
            "signals": signals(step),
            "period": bad.period,
            "bad": bad.ranges,
            "level": level,
            "cached_before": len(cached),
            "escalated": escalation,
            "taken_back": taken_back,
            "kept": kept.ranges,
            "kept_count": len(kept.positions),
            "generated": step.step,
            "since": step.since,
        }
        if taken_back:  # the last token that stays is read again
            kept = replace(kept, positions=tuple(p for p in kept.positions if p < row.length - taken_back - 1))
        position = row.prompt + step.step - 1
        return Event(row.alarm.row, moment.call.step, position, None, None, LoopGuard.KIND, data), kept

    def _escalation(self, rung: int, rewinds: bool) -> str | None:
        """What is done beside the cut: nothing at rung 0, then a ban, and at last draws."""
        escalate = self._guard.escalate
        if rung == 0 or (escalate == "none" and not rewinds):
            return None
        return "draw" if escalate == "draw" and rung >= DRAW_FROM else "ban"

    def _bad_tokens(self, row: LoopingRow, retention: Retention) -> BadTokens:
        """Find the positions in bad blocks.

        Recent tokens may reach into the prompt, so a loop that began in the prompt is bad there too.
        """
        recent = slice(-retention.recent if retention.recent else None, None)
        recent_positions = row.positions[recent]
        tail = tail_period(row.ids[recent], repeats=self._guard.copies)
        bad: set[int] = set()
        if tail is not None:
            bad.update(recent_positions[tail.start :])
        monitor_tail = row.alarm.step.tail
        if retention.recent is None and monitor_tail is not None:  # copies that differ slightly are bad too
            begin = row.prompt + monitor_tail.start
            bad.update(position for position in row.positions if position >= begin)
        loop = [token for position, token in zip(row.positions, row.ids, strict=True) if position in bad]
        tail = tail or monitor_tail
        if retention.recent is None and tail is not None:
            # The text goes on in the copy that has begun, as if it were the first one.
            bad.difference_update(range(row.length - len(bad) % tail.period, row.length))
        return BadTokens(ranges_of(sorted(bad)), None if tail is None else tail.period, loop)

    def _take_back(self, row: LoopingRow) -> int:
        """Number of tokens to remove from the output: all copies of the loop but the first."""
        rewinder, tail = self._session.rewinder, row.alarm.step.tail
        if rewinder is None or rewinder.allowance is None or tail is None:
            return 0
        count = row.length - row.prompt - tail.start - tail.period
        if not 0 < count <= rewinder.allowance[row.alarm.row]:
            return 0
        rewinder.allowance[row.alarm.row] -= count
        return count


def _end_ids(run: Run) -> list[int]:
    """End-of-sequence and padding ids of the model's generation configuration."""
    ends = list(run.target.end_ids)
    padding = getattr(getattr(run.target.hf, "generation_config", None), "pad_token_id", None)
    if padding is not None:
        ends.append(int(padding))
    return ends


def _cached_positions(layers: list[CacheLayer], row: int, length: int) -> list[int]:
    """Positions of a row that at least one layer and head holds."""
    for kv in layers:
        if not kv.edited:  # holds everything
            layers = [kv]
            break
    cached = torch.zeros(length + 1, dtype=torch.bool, device=layers[0].pos.device)
    for kv in layers:
        cached[kv.pos[row].flatten().to(cached.device) + 1] = True  # holes, -1, fall into the first place
    return cached[1:].nonzero()[:, 0].tolist()


def _evict_rows(layers: list[CacheLayer], kept: dict[int, KeptTokens], columns: list[list[int]]) -> None:
    """Evict everything else from some rows, in all layers and heads; the others stay."""
    longest = max(max(row) for row in columns) + 1
    allowed = torch.ones(len(columns), longest, dtype=torch.bool, device=layers[0].pos.device)
    for row, tokens in kept.items():
        allowed[row] = False
        allowed[row, list(tokens.positions)] = True
    for kv in layers:
        pos = kv.pos
        occupied = pos >= 0
        by_head = repeat(allowed.to(pos.device), "batch pos -> batch kv_head pos", kv_head=pos.shape[1])
        keep = by_head.gather(2, pos.clamp(min=0)) & occupied
        if not torch.equal(keep, occupied):
            kv.evict(keep)
