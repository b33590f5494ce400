"""LoopGuard (section 5): an online monitor for each row removes the repeating tail from the cache when it fires.

What happens after each call of the model (`GuardActor.after`):

1. A prompt begins new rows, each with a monitor of its own (`_begin_rows`).
2. Each row's monitor takes its newest token and says whether to intervene, Eqs. 8 and 9 (`WatchedRow.add`).
3. Where a row repeats itself is found, I_bad(t) (`find_repetition`), and what of it is cut (`LoopGuard.to_cut`).
4. Anchors, a sparse history and clean recent tokens are kept, Eqs. 10 and 11 (`tokens_to_keep`); everything else
   leaves all layers and heads (`evict_rows`).
5. Where the caller can take tokens back, the copies leave the output as well (`_take_back`); not in the paper.
6. From then on, tokens that would prolong a repetition are less likely, and tokens are drawn (`_steer`); not in the
   paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import Step, TakeBack
from sinkscope.errors import UnsupportedError, warn
from sinkscope.files.records import Budget, Whole, Wording, check_fields, share_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.loops.guard.cut import (
    Act,
    Retention,
    cached_positions,
    copied_tokens,
    evict_rows,
    find_repetition,
    tokens_to_keep,
)
from sinkscope.loops.guard.detect import GuardedRows, ids_of_setting, monitors
from sinkscope.loops.guard.steer import LENIENT, Steer, Steering
from sinkscope.loops.text.copies import CopyRule
from sinkscope.loops.text.monitor import MonitorSettings, PaperSettings, Settings, WatchedRow
from sinkscope.loops.text.repetition import EarlierCopies, asked_copies, asked_items
from sinkscope.models.draws import draws, gumbel
from sinkscope.results.notation import count_of, word_list

CERTAIN = 1000.0  # a logit that leads by so much is drawn at any temperature, and has a place in float16
ASKED_WITHIN = 512  # last tokens of a prompt that may ask for a repetition
_GUARDED = "guarded rows"
DEFAULT_MONITOR = MonitorSettings(cooldown=8, data_tokens=256, most_copies=20)
"""A loop that goes on is met with more than a cut: no need to wait. 20 copies, or 256 tokens, of data are one, too."""
DEFAULT_STEER = Steer()


@dataclass(frozen=True, kw_only=True)
class LoopGuard(Intervention):
    """Break repetition loops: when a row's monitor fires, its cache is cut to anchors, sparse history and clean tail.

    The defaults are meant for everyday use. A repetition is found once it has 64 tokens beyond two copies. Where the
    caller can take tokens back (`sinkscope.generate`, `Conversation`, the command line), the output is cut after the
    first copy; a plain `model.generate` only loses the copies from its cache. From then on, a token that would prolong
    a repetition is less likely, the less the longer the repetition.
    `LoopGuard.paper()` is the guard as published.

    Only generated tokens are watched. A call with several tokens is a new turn, where monitors start again. Each row is
    cut independently. All layers and heads lose the same positions, right after the call whose token set off the alarm,
    and kept tokens keep theirs. Without an alarm the output is exactly that without a guard. Policies in the same run
    keep the guard's anchors, and the guard keeps their first tokens.

    Attributes:
        budget: Largest number of tokens right after an intervention (B), or a fraction of the row's prompt. Between
            interventions the cache grows beyond it; `StreamingLLM(budget=B) | LoopGuard(budget=B)` always holds it.
        anchors: Number of first positions that are kept (N_anchor; 32 in the paper), but at most a quarter of the
            budget.
        monitor: When to intervene. `MonitorSettings` looks for copies, by default with a cooldown of 8, and takes 20
            copies of anything, or 256 tokens of data, for a loop; `PaperSettings` takes the paper's votes. An act is
            soon after another within its `window` (W). Under `PaperSettings` recent tokens come from the last W tokens
            alone (`Retention`), so an intervention soon after another keeps fewer of them.
        steer: How a row that looped is kept from looping again. None does nothing, as in the paper.
        local: Number of last tokens that a cut never removes, because without them the next token has no context; 0 as
            printed.
        act: What an alarm does. "rewind" removes the loop from the output as well, wherever the caller can take tokens
            back: the text is cut after the first copy and continues under the penalty. Elsewhere, and without `steer`,
            it is "cut", which removes the loop from the cache and leaves the copies in the text. "stop" ends the row.
            "report" only adds the event, once in W tokens.

    An intervention is an event of kind "guard", with `step` and `position` of the token that set it off. Its `data` has
    "period" (of the repetition at the end, or None), "bad" (ranges to remove), "kept" (ranges [start, stop)),
    "kept_count", "cached_before", "generated" (number of the token), "taken_back" (tokens removed from the output),
    "left_in_text" (tokens of the copies after the first one that stay in the output), and "level" (alarms before it,
    each within W tokens of the next).

    Raises:
        SinkscopeError: A setting is invalid.
        UnsupportedError: Beam search reorders rows, assisted generation takes tokens back, or a policy in the same run
            rebases positions.

    Example:
        >>> guard = LoopGuard(budget=512, steer=Steer(temperature=0.0))
        >>> guard.steer.penalty, guard.monitor.window
        (2.0, 256)
    """

    budget: Budget = field(default=1024, kw_only=False)
    anchors: Whole = 32
    monitor: Annotated[Settings, Wording("MonitorSettings(...) or PaperSettings(...)")] = DEFAULT_MONITOR
    steer: Annotated[Steer | None, Wording("Steer(...) or None")] = DEFAULT_STEER
    local: Whole = 4
    act: Literal["rewind", "cut", "stop", "report"] = "rewind"
    KIND: ClassVar[str] = "guard"

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def paper(cls, budget: int | float = 1024, **changed: Any) -> LoopGuard:
        """Return the guard as published: votes, gates, recent tokens from the monitor's window, and only the cut.

        Args:
            budget: As for the plain constructor.
            changed: Other fields to set.
        """
        printed: dict[str, Any] = {"monitor": PaperSettings(), "steer": None, "local": 0, "act": "cut"}
        return cls(budget, **(printed | changed))

    @property
    def settings(self) -> Settings:
        """Settings of the monitor of every row; alarms that are only reported come once in a window."""
        if self.act != "report":
            return self.monitor
        return replace(self.monitor, cooldown=max(self.monitor.cooldown, self.monitor.window))

    @property
    def takes_back(self) -> bool:
        """Whether an alarm removes tokens from the output; without `steer` the loop would be written again."""
        return self.act == "rewind" and self.steer is not None

    @property
    def recent_window(self) -> int | None:
        """Length of the window that all recent tokens come from, as in the paper; None: they come from anywhere."""
        return self.monitor.window if isinstance(self.monitor, PaperSettings) else None

    def summary(self, run: Run) -> str:
        """Return the first loop and the response to it, and how often the guard acted again."""
        cuts = [event for event in run.events if event.kind == self.KIND]
        if not cuts:
            return "LoopGuard found no loop and changed nothing."
        numbers = sorted({event.row for event in cuts})
        rows = f"{'row' if len(numbers) == 1 else 'rows'} {word_list(numbers)}"
        return f"{event_in_words(cuts[0], self.act)} It gave {count_of(len(cuts), 'alarm')} in all, in {rows}."

    def retention(self, prompt: int, first: int = 0) -> Retention:
        """Return what is kept of a row of `prompt` prompt tokens, if a policy in the run keeps the `first` ones."""
        budget = self.budget if isinstance(self.budget, int) else share_of(self.budget, prompt)
        anchors = min(self.anchors, budget // 4)
        return Retention(budget, max(anchors, min(first, budget - 1)), self.recent_window)

    def to_cut(self, begin: int, length: int, period: int | None) -> tuple[int, int]:
        """Return the range [begin, end) of positions to remove for a repetition that reaches the last token.

        The last `local` tokens stay, so that the next token has a context. Without a recent window, so does the copy
        that has begun: the text continues in it as if it were the first.

        Args:
            begin: First position of the repetition.
            length: Number of tokens of the row.
            period: Its period, if it is known.
        """
        begun = 0
        if period is not None and self.recent_window is None:
            begun = (length - begin) % period
        return begin, max(begin, length - max(begun, self.local))

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache, and watch ids and logits of the causal model."""
        first = self.anchors  # of a budget that is a fraction, before the prompt is known
        if isinstance(self.budget, int):
            first = self.retention(0).anchors
        keeper = CacheKeeper.of(run, first=first)
        if sum(isinstance(part, LoopGuard) for part in run.parts) > 1:
            raise UnsupportedError("two guards would cut the same rows: enter one LoopGuard")
        keeper.watch_decoding(run)
        run.reads_one_text = True
        run.takes_back = self.takes_back
        run.act(GuardActor(self, self.settings, run, keeper))


def event_in_words(event: Event, act: str) -> str:
    """Return what the guard found and did in one of its events."""
    data = event.data
    period = "" if data["period"] is None else f" with a period of {count_of(data['period'], 'token')}"
    found = f"After {count_of(data['generated'], 'new token')} of row {event.row} the guard found a loop{period}."
    if act in ("report", "stop"):
        return f"{found} It {'changed nothing' if act == 'report' else 'ended the row'}."
    return (
        f"{found} It kept {data['kept_count']} of {count_of(data['cached_before'], 'cached token')}, took "
        f"{count_of(data['taken_back'], 'token')} back, and left {data['left_in_text']} repeated ones in the text."
    )


@dataclass(eq=False)
class GuardActor(Actor):
    """One guard at work in one block.

    Attributes:
        guard: The guard.
        settings: Settings of the monitor of every row.
        run: The block.
        keeper: Who keeps its caches.
    """

    guard: LoopGuard
    settings: Settings
    run: Run
    keeper: CacheKeeper

    reads_logits = True

    def after(self, step: Step) -> TakeBack | None:
        """Pass the token of a finished call to the monitors, and cut the rows that loop."""
        ids, logits = step.ids, step.logits
        if ids is None or logits is None or not step.layers:
            return None
        rows = self._rows_of(step, ids)
        if rows is None:
            return None
        rows.n_read = step.past + 1
        rows.count += 1
        largest: list[float | None] = [None] * len(ids)
        if isinstance(self.settings, PaperSettings):
            largest = logits.float().softmax(-1).amax(-1).tolist()
        alarms: list[int] = []
        for number, (row, token) in enumerate(zip(rows.rows, ids[:, -1].tolist(), strict=True)):
            if token in rows.ends:
                row.ended = True
            if not row.ended and row.add(token, largest[number]):
                alarms.append(number)
        back = self._respond(step, rows, alarms) if alarms else None
        if self.guard.act == "stop":
            self._stop(rows, alarms, logits)
        if self.guard.steer is not None:
            self._steer(self.guard.steer, step, rows, logits)
        return back

    def _stop(self, rows: GuardedRows, alarms: list[int], logits: Float[Tensor, "row vocab"]) -> None:
        """Let rows end from their alarm on: at once, or as soon as the caller's settings allow an end."""
        for number in alarms:
            rows.rows[number].stops = True
        for number, row in enumerate(rows.rows):
            if row.stops and not row.ended:
                logits[number, rows.stops[0]] = logits[number].amax() + CERTAIN

    def _steer(self, steer: Steer, step: Step, rows: GuardedRows, logits: Float[Tensor, "row vocab"]) -> None:
        """Lower the logits of tokens that would prolong a repetition of rows that looped, in place."""
        steered: dict[int, Steering] = {}
        for number, row in enumerate(rows.rows):
            if row.steering is not None and not row.ended:
                steered[number] = row.steering
        if steered:
            temperature = steer.temperature
            if getattr(step.settings, "do_sample", False):  # the caller draws
                temperature = 0.0
            changed = logits[list(steered)].cpu()  # one wait for the device instead of several for each row
            for (number, steering), row_logits in zip(steered.items(), changed, strict=True):
                ids = rows.rows[number].ids
                steering.steer(row_logits, ids, rows.ends)
                if temperature:
                    generator = draws(steer.seed, f"{len(ids)} after {ids[-8:]}")
                    noise = temperature * gumbel(len(row_logits), torch.float32, generator)
                    row_logits[(row_logits.float() + noise).argmax()] = row_logits.amax() + CERTAIN
            logits[list(steered)] = changed.to(logits.device)

    def _rows_of(self, step: Step, ids: Int[Tensor, "batch pos"]) -> GuardedRows | None:
        """The rows that go on by one token; None after a prompt, or a part of one, which begins new ones."""
        rows = step.state.known.get(_GUARDED)
        if not isinstance(rows, GuardedRows) or len(rows.rows) != len(ids):
            rows = None
        if step.state.prefilling:
            prompts: list[list[int]] = []
            for row_ids, row_index in zip(ids, step.index.to(ids.device), strict=True):
                prompts.append(row_ids[row_index >= 0].tolist())
            if rows is not None and rows.count == 0 and step.past > 0:
                prompts = [[*row.ids, *new] for row, new in zip(rows.rows, prompts, strict=True)]
            self._begin_rows(step, prompts)
            return None
        if rows is None or step.past != rows.n_read:
            # Tokens were read before the run, or the caller took some back: later tokens are watched from here on.
            rows = self._begin_rows(step, [[] for _ in ids])
        return rows

    def _begin_rows(self, step: Step, prompts: list[list[int]]) -> GuardedRows:
        """Watch rows anew, whose last ids are those of their prompts that are known."""
        states = len(step.cache.layers) - len(step.layers)
        if states and step.state.prefilling:
            warn(
                f"{count_of(states, 'layer')} of {self.run.target.name} with a state, of which LoopGuard can take "
                "nothing: it cuts the other layers and lowers the loop's tokens, and does not rewind"
            )
        settings = step.settings or getattr(self.run.target.hf, "generation_config", None)
        stops = ids_of_setting(settings, "eos_token_id")
        if self.guard.act == "stop" and not stops:
            raise UnsupportedError(f"LoopGuard(act='stop'): {self.run.target.name} has no end token; use act='report'")
        ends = {*stops}
        if stops:  # a row that has ended goes on as padding; without an end no row does
            ends.update(ids_of_setting(settings, "pad_token_id"))
        tokenizer = self.run.target.available_tokenizer
        monitor = monitors(self.settings, tokenizer)
        known = step.tokens if step.state.prefilling else step.earlier
        rows: list[WatchedRow] = []
        for length, prompt in zip(known.length.tolist(), prompts, strict=True):
            text = "" if tokenizer is None else tokenizer.decode(prompt[-ASKED_WITHIN:])
            monitor_of_row = partial(monitor, asked=asked_copies(text), asked_items=asked_items(text))
            rows.append(WatchedRow(monitor_of_row, length, prompt))
        begun = GuardedRows(rows, known.n_columns, ends, stops)
        step.state.known[_GUARDED] = begun
        return begun

    def _respond(self, step: Step, rows: GuardedRows, alarms: list[int]) -> TakeBack | None:
        """Log the alarms of rows; unless alarms are only reported, cut the cache of the rows that loop."""
        cuts = self.guard.act in ("cut", "rewind")
        if cuts:
            for kv in step.layers:
                kv.settle()
        kept: dict[int, list[int]] = {}
        taken_back = 0
        events: list[Event] = []
        for number in alarms:
            row = rows.rows[number]
            cached = cached_positions(step.layers, number)
            if cuts:
                act = self._plan_cut(step, row, cached, rows.count)
                kept[number] = act.kept
                taken_back = act.taken_back or taken_back
            else:
                act = self._report(row, cached)
            events.append(Event(number, step.number, row.length - 1, None, LoopGuard.KIND, act.data()))
        if cuts:
            evict_rows(step.layers, kept)
        self.run.log(lambda: events)
        return self._take_back(step, rows, taken_back) if taken_back else None

    def _report(self, row: WatchedRow, cached: list[int]) -> Act:
        """What is logged of a row that loops where nothing is done about it."""
        retention = self.guard.retention(row.prompt, self.keeper.anchors)
        begin, period = find_repetition(row, retention)
        return Act(row, period, range(begin, row.length), len(cached), kept=cached)

    def _plan_cut(self, step: Step, row: WatchedRow, cached: list[int], now: int) -> Act:
        """What is cut of a row that loops: the latest copies, or all that is taken out of the text; and steer it."""
        retention = self.guard.retention(row.prompt, self.keeper.anchors)
        begin, period = find_repetition(row, retention)
        taken_back = self._count_to_take_back(step, row)
        level = self._steer_from_here(row, taken_back, now)
        bad = range(*self.guard.to_cut(begin, row.length, period))
        if taken_back:
            bad = range(row.length - taken_back, row.length)
        kept = tokens_to_keep(cached, row.length, bad, retention, level)
        return Act(row, period, bad, len(cached), kept, level, taken_back)

    def _steer_from_here(self, row: WatchedRow, taken_back: int, now: int) -> int:
        """Steer a row that looped from here on; return the level of its act."""
        if row.steering is None:
            penalty = 0.0 if self.guard.steer is None else self.guard.steer.penalty
            row.steering = Steering(penalty, self.settings.window, row.length - taken_back)
        tail, rule = row.monitor.last.tail, row.monitor.rule
        if tail is not None and not tail.exact and isinstance(rule, CopyRule):
            row.steering.copies = EarlierCopies(LENIENT + 1, rule.is_number)
        rule.looped = True
        return row.steering.act(row.ids, taken_back, now)

    def _take_back(self, step: Step, rows: GuardedRows, count: int) -> TakeBack:
        """Take tokens of the only row out of the cache, and the token before them, which is read again."""
        row = rows.rows[0]
        reread = row.ids[-count - 1]
        row.take_back(count + 1)
        length = step.tokens.n_columns - count - 1
        step.state.tokens = step.tokens.first(length)
        for kv in step.layers:
            kv.crop(-count - 1)
        rows.n_read -= count + 1
        return TakeBack(length, reread)

    def _count_to_take_back(self, step: Step, row: WatchedRow) -> int:
        """Number of tokens to remove from the output, all copies of the loop but the first; 0 if that cannot be."""
        draft, count = step.draft, copied_tokens(row)
        has_states = len(step.layers) < len(step.cache.layers)
        if not self.run.takes_back or draft is None or has_states or count > draft.allowance:
            return 0
        if count and draft.can_go_back is not None and not draft.can_go_back():
            return 0
        draft.allowance -= count
        return count
