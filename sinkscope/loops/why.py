"""What keeps a loop going: the causes whose removal from the cache ends it, beside random removals.

1. The text: given, or written by the model; its loop is found at the end.
2. Room for a control: if fewer tokens stand before the loop than its copies have, ordinary text is put before all.
3. Cuts: positions near the loop's onset, from where it has gone round twice, over one more round.
4. Removals at each cut: nothing, all of the context, each cause, and random tokens before the loop, as many as the
   cause has; they take no copy away.
5. Continuations: the model goes on greedily after each removal.
6. The verdict: a cause is needed if without it at least half of the continuations that looped no longer do, and more
   than after the random removals.
7. Which sink: if the sink is needed, the text is read again with the first token hidden from all others, so that
   another may become the sink. If the loop goes on there, it needs a sink, but not this one.

LoopGuard (Xu et al. 2026, section 3) blames the copies in the cache; other causes need another remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from plotly.subplots import make_subplots
from pydantic import Field, Strict

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Wording
from sinkscope.generation.decode import decode
from sinkscope.hooks.edit import Knockout
from sinkscope.kv.keeper import check_servable
from sinkscope.kv.watch import RemoveTokens
from sinkscope.loops.text.signals import Tail, end_loop
from sinkscope.measure import Mean, Natural, Result, Setup, measurement
from sinkscope.measure.setup import prompt_and_continuation, prompt_ids
from sinkscope.models.inputs import check_length, read_row
from sinkscope.models.target import tokenizer_of
from sinkscope.results.headline import Headline, verdict_of
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.style import BLUE, GREY, bars, figure_of
from sinkscope.results.table import Row, Subject, column, optional

Cause = Literal["copies", "sink", "context", "sink_from_start"]
"""What is taken away. The context is all tokens but the first, for reference. From the start, the first token is hidden
from all others in the whole text, so that another may become the sink.
"""
CONTINUED = 48  # tokens after a cut, or three periods
STANDS = 0.5  # share of the loops that end without a cause that is needed
Cuts = Annotated[int, Strict(), Field(ge=3), Wording("a whole number from 3")]
"""Number of cuts; half of two continuations would be one."""
NOTHING = "nothing"
"""The intact cache."""
CAUSES: tuple[Cause, ...] = ("copies", "sink")
"""The loop's copies in the cache, and the sink."""
CONTEXT: Cause = "context"
"""All tokens but the first, for reference."""
Continuations = dict[str, list[list[int]]]
"""The tokens that follow each removal, for one cut after another."""


@dataclass(frozen=True, kw_only=True)
class Tried(
    Row,
    table="removals",
    title="the loop without",
    note="Tokens are removed from the cache at several points after the loop has begun, and the model continues "
    "greedily. Its copies: all rounds of the loop up to there; the last token is read again.",
):
    """What becomes of the loop when something is taken away."""

    key: Cause

    share: Mean = column("goes\non", "share", "Continuations that end in the same loop, over all cuts.")
    control: Mean | None = optional(
        "without as many\nrandom tokens", "share", "The same, if as many others are removed."
    )
    other_loop: Mean = column("another loop\nfollows", "share", "Continuations that end in another loop.")

    @property
    def label(self) -> str:
        """What it is called."""
        match self.key:
            case "copies":
                return "its copies in the cache"
            case "sink":
                return "the sink (the first token)"
            case "context":
                return "all tokens but the first"
            case "sink_from_start":
                return "the sink, hidden from the start"


@dataclass(frozen=True, kw_only=True)
class WhyLoop(Result):
    """What keeps a loop going.

    Attributes:
        prompt_tokens: Length of the prompt.
        period: Period of the loop in tokens. None if the text ends in no loop.
        onset: Position of the loop's first token.
        cuts: Positions at which causes were taken away.
        goes_on: Share of the continuations that end in the same loop if nothing is taken away.
        tried: What the loop does without each thing. Random tokens are drawn before the loop, anew at each cut; if
            fewer stand there, there is no control.
        kept_by: What keeps it going: causes that are needed, each of them, or "weights". Empty: undecided.
        added: Tokens of ordinary text that were put before the text, so that the copies have a control.
        ids: The tokens, the prompt first.
    """

    kind = "why-loop"

    prompt_tokens: int
    period: int | None = None
    onset: int | None = None
    cuts: tuple[int, ...] = ()
    goes_on: float = 0.0
    tried: tuple[Tried, ...] = ()
    kept_by: tuple[Cause | Literal["weights"], ...] = ()
    added: int = 0
    ids: tuple[int, ...] = ()

    def conclusion(self) -> str:
        """Return what keeps the loop going, beside the control; or what was measured, and what to try."""
        if self.period is None:
            return f"The {len(self.ids) - self.prompt_tokens} tokens after the prompt end in no loop."
        loop = f"the loop of {count_of(self.period, 'token')}"
        if self.goes_on < STANDS:
            return (
                f"Undecided: {loop} goes on in {self.cases_of(self.goes_on)} continuations if nothing is removed; give "
                "the prompt and the policy under which it was written."
            )
        needed = [row for row in self.tried if row.key in self.kept_by]
        if not needed:
            shares = [f"{self.cases_of(row.share.value)} without {row.label}" for row in self.tried]
            verdict = "The weights alone keep it going" if self.kept_by else "Undecided, try another prompt"
            return f"{verdict}: {loop} goes on in {word_list(shares)}."
        weakest = max(needed, key=lambda row: row.share.value)
        assert weakest.control is not None
        without = " or ".join(f"without {row.label}" for row in needed)
        goes_on = f"{without[0].upper()}{without[1:]}, {loop} goes on in {self.cases_of(weakest.share.value)}"
        control = f"without as many random tokens in {self.cases_of(weakest.control.value)}"
        other = max(row.other_loop.value for row in needed)
        follows = f"; another loop follows in {self.cases_of(other)}" if other else ""
        return f"{goes_on} continuations ({control}){follows}."

    def cases_of(self, share: float) -> str:
        """Return a share of the continuations in cases: "2 of 3"."""
        return f"{round(share * len(self.cuts))} of {len(self.cuts)}"

    def subjects(self) -> list[Subject]:
        """Return what the loop does without each thing."""
        if not self.tried:
            return []
        cases = f"{self.cases_of(self.goes_on)} continuations end in it if nothing is removed"
        title = f"The loop of {count_of(self.period or 0, 'token')}: {cases}"
        return [Subject(title, self.tried, "loop")]

    def details(self) -> list[str]:
        """Return how much ordinary text was put before the text, and which causes have no control all the same."""
        lines: list[str] = []
        if self.added:
            lines.append(
                f"{count_of(self.added, 'token')} of ordinary text stand before the prompt here, for a control."
            )
        for row in self.tried:
            if row.key in CAUSES and row.control is None:
                lines.append(
                    f"The {row.key} had no control, because fewer random tokens stand before the loop: whether it is "
                    "needed is not said."
                )
        return lines

    def headlines(self) -> list[Headline]:
        """Return how often the loop stops without each needed thing, beside as many random tokens."""
        headlines: list[Headline] = []
        cases = len(self.cuts)
        for row in self.tried:
            if row.key not in CAUSES or row.control is None:
                continue
            stopped, control = (round((1 - share.value) * cases) for share in (row.share, row.control))
            beside = f"{control} of {cases} (random)"
            verdict = verdict_of(stopped, control)
            headlines.append(Headline(f"stops without the {row.key}", f"{stopped} of {cases}", beside, verdict))
        return headlines

    def figure(self) -> Any:
        """Draw how often the loop goes on without each thing, beside random changes of the same size."""
        fig: Any = make_subplots(subplot_titles=["share of continuations in which the same loop goes on"])
        bars(fig, self.tried, "share", BLUE, "without it")
        bars(fig, self.tried, "control", GREY, "under random changes")
        fig.add_hline(self.goes_on, line={"color": GREY, "dash": "dot"}, annotation_text="intact")
        fig.update_yaxes(range=[0, 1.05], tickformat=".0%")
        return figure_of(fig, self, width=1000, height=460, legend=-0.3, bottom=120)


@dataclass(frozen=True)
class LoopedText:
    """A text that ends in a loop, and what may keep the loop going.

    Attributes:
        setup: The model, with the interventions under which the text was made.
        ids: The text.
        prompt: Length of the prompt.
        loop: The loop at the end.
    """

    setup: Setup
    ids: list[int]
    prompt: int
    loop: Tail

    def after_ordinary_text(self, cuts: int) -> tuple[LoopedText, int]:
        """Return the text with room for a control of its copies, and how many tokens of ordinary text make the room."""
        target, last = self.setup.target, self.cuts(cuts)[-1]
        room = (target.max_positions or 1 << 30) - last - self.new_tokens
        missing = max(0, min(last - 2 * self.loop.start + 1, room))
        tokenizer = tokenizer_of(target)
        text = self.setup.halves.choose[: 8 * missing]  # more characters a token than any tokenizer needs for prose
        ordinary = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:missing]
        first = int(self.loop.start > 0 and self.ids[0] in tokenizer.all_special_ids)  # it stays the first
        ids, added = [*self.ids[:first], *ordinary, *self.ids[first:]], len(ordinary)
        loop = self.loop._replace(start=self.loop.start + added)
        return LoopedText(self.setup, ids, self.prompt + added, loop), added

    def cuts(self, count: int) -> list[int]:
        """Return positions near the onset: from two rounds on, over one more, but not inside the prompt."""
        period, last = self.loop.period, len(self.ids) - 1
        first = min(last, max(self.prompt, self.loop.start + max(2 * period, 8)))
        last = min(last, first + max(period, count))
        return sorted({first + (last - first) * number // count for number in range(count)})

    @property
    def new_tokens(self) -> int:
        """Return the length of a continuation: three periods at least."""
        return max(CONTINUED, 3 * self.loop.period)

    def removals(self, cut: int) -> dict[str, list[int]]:
        """Return the positions that each removal takes, with random ones where enough tokens stand before the loop."""
        start = self.loop.start
        removals = {
            NOTHING: [],
            "context": [*range(1, cut)],
            "copies": [*range(max(1, start), cut)],
            "sink": [0],
        }
        for cause in CAUSES:
            count = len(removals[cause])
            if count < start:
                random = Random(f"{self.setup.seed} {[cause]} 0 {cut}")
                removals[f"random {cause}"] = random.sample(range(1, start), count)
        return removals

    def continuations(self, cuts: Sequence[int]) -> Continuations:
        """Return the tokens that the model writes after each removal, at one cut after another.

        A removal that is not possible at the last cut, where the copies are the most, is none.
        """
        written: Continuations = {name: [] for name in self.removals(cuts[-1])}
        for done, cut in enumerate(cuts):
            self.setup.progress("continuations", done, len(cuts))
            removals = self.removals(cut)
            removed = torch.zeros(len(written), cut, dtype=torch.bool)
            for row, name in enumerate(written):
                removed[row, removals[name]] = True
            remove = RemoveTokens(removed)
            edit = remove if self.setup.edit is None else self.setup.edit | remove
            rows = [self.ids[:cut]] * len(written)
            continued, _ = decode(self.setup.target, rows, self.new_tokens, edit)
            for name, tokens in zip(written, continued, strict=True):
                written[name].append(tokens)
        return written

    def goes_on(self, tokens: Sequence[int]) -> bool:
        """Return whether a continuation ends in the same loop, begun anywhere in it."""
        period = self.loop.period
        size = max(2 * period, 8)
        rounds = self.ids[-period:] * (2 + size // period)
        return any(rounds[begin : begin + size] == list(tokens[-size:]) for begin in range(period))

    def effect_of(self, cause: Cause, written: Continuations) -> Tried:
        """Compare the continuations without a cause with those of its random draws."""
        shares = {name: Mean(fmean(map(self.goes_on, continued))) for name, continued in written.items()}
        other = fmean(not self.goes_on(tokens) and end_loop(tokens) is not None for tokens in written[cause])
        control = shares.get(f"random {cause}")
        return Tried(key=cause, share=shares[cause], control=control, other_loop=Mean(other))


def causes_of(goes_on: float, tried: Sequence[Tried]) -> tuple[Cause | Literal["weights"], ...]:
    """Return what keeps a loop going: the causes that are needed, else "weights" if it goes on without all of them.

    Args:
        goes_on: Share of the continuations that end in the loop if nothing is taken away.
        tried: What the loop does without each of `CAUSES`, and without the context.
    """
    if goes_on < STANDS:
        return ()
    needed: list[Cause | Literal["weights"]] = []
    without_context = 0.0
    for row in tried:
        if row.key in CAUSES and is_needed(row, goes_on):
            needed.append(row.key)
        if row.key == CONTEXT:
            without_context = row.share.value
    if not needed and without_context >= STANDS:
        return ("weights",)
    return tuple(needed)


def is_needed(row: Tried, goes_on: float) -> bool:
    """Return whether a loop ends without a cause, and more often than under random changes of the same size.

    A cause whose control had no room is not: nothing says that other tokens would not have done as much.
    """
    if row.control is None:
        return False
    goes_on_without = row.share.value
    ends = goes_on - goes_on_without >= STANDS * goes_on
    return ends and goes_on_without < row.control.value


def _refuse_unused(*, answer: Any, max_new_tokens: int | None, **_: Any) -> None:
    if answer is not None and max_new_tokens is not None:
        raise SinkscopeError("max_new_tokens has no effect on an answer that is given: leave one of the two out")


@measurement(
    loading="whole",
    edits=True,
    check=_refuse_unused,
)
def why_loop(
    setup: Setup,
    prompt: str | Sequence[int] | None = None,
    *,
    answer: str | Sequence[int] | None = None,
    max_new_tokens: Natural | None = None,
    cuts: Cuts = 3,
) -> WhyLoop:
    """Find what keeps a loop going: remove one thing after another, and let the model continue.

    A loop needs a cause if at least half of the continuations no longer end in it without the cause, and more than if
    as many random tokens before the loop are removed. A loop that needs the sink is tried again with the first token
    hidden from the start, so that another may become the sink. Only if no cause is needed and the loop goes on after
    the first and the last token alone, it lies in the weights.

    Args:
        prompt: Text to continue; from Python also ids. By default the beginning of the typical text.
        answer: The text after the prompt, which ends in a loop; from Python also ids. By default what the model writes.
        max_new_tokens: Tokens to generate. By default 512, or as many as the context holds.
        cuts: Number of positions at which causes are taken away, at least 3.

    Raises:
        SinkscopeError: The text is longer than the context, an input is empty, or there are fewer than 3 cuts.
        UnsupportedError: The model is a TransformerBridge, on whose cache nothing can act.
    """
    target = setup.target
    check_servable(target)
    if answer is None:
        ids, prompt_tokens = prompt_and_continuation(setup, prompt, max_new_tokens, CONTINUED)
    else:
        if isinstance(answer, str):
            answer = answer.rstrip()  # a file ends with a newline, and a token of white space is no copy
        start = prompt_ids(setup, prompt)
        ids, prompt_tokens = [*start, *read_row(target, answer, special=False)], len(start)
    loop = end_loop(ids)
    text = WhyLoop(prompt_tokens=prompt_tokens, ids=tuple(ids))
    if loop is None:
        return text
    looped, added = LoopedText(setup, ids, prompt_tokens, loop).after_ordinary_text(cuts)
    positions = looped.cuts(cuts)
    check_length(target, "the text up to a cut", positions[-1], looped.new_tokens)
    written = looped.continuations(positions)
    goes_on = fmean(map(looped.goes_on, written[NOTHING]))
    tried = [looped.effect_of(removed, written) for removed in (*CAUSES, CONTEXT)]
    kept_by = causes_of(goes_on, tried)
    if "sink" in kept_by and setup.edit is None:
        rows = [looped.ids[:position] for position in positions]
        hidden = [decode(target, [row], looped.new_tokens, Knockout([0]))[0][0] for row in rows]
        tried.append(looped.effect_of("sink_from_start", written | {"sink_from_start": hidden}))
    return replace(
        text,
        period=loop.period,
        onset=loop.start,
        cuts=tuple(position - added for position in positions),
        goes_on=goes_on,
        tried=tuple(tried),
        kept_by=tuple(kept_by),
        added=added,
    )
