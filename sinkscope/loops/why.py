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
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field, Strict
from transformers import DynamicCache

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Wording
from sinkscope.generation.decode import decode
from sinkscope.hooks.edit import Knockout
from sinkscope.hooks.edit.base import under
from sinkscope.kv import Full
from sinkscope.kv.keeper import check_servable
from sinkscope.kv.watch import RemoveTokens
from sinkscope.loops.text.signals import Tail, end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, measurement
from sinkscope.measure.attention_texts import prompt_and_continuation, prompt_ids
from sinkscope.models.inputs import check_length, read_row, tokenizer_of
from sinkscope.results.effect import STANDS, Effect
from sinkscope.results.notation import count_of, percent, word_list
from sinkscope.results.row import row_beside
from sinkscope.results.style import BLUE, GREY, figure_of, panels

CONTINUED = 48  # tokens after a cut, or three periods
Cuts = Annotated[int, Strict(), Field(ge=3), Wording("a whole number from 3")]
"""Number of cuts; half of two continuations would be one."""
CAUSES = ("copies", "sink")
"""The loop's copies in the cache, and the sink."""
CONTEXT = "context"
"""All tokens but the first one, which are removed for reference."""
NO_REMOVAL = "nothing"
"""The intact cache."""
Removal = tuple[str, bool]
"""What is taken from the cache, a cause, `CONTEXT` or `NO_REMOVAL`; and whether random tokens go in its place."""


@dataclass(frozen=True)
class RemovalEffect:
    """What a loop does without a cause, over all cuts.

    Attributes:
        without: What was taken away: a cause, or, for reference, all of the context.
        goes_on: Share of the continuations that end in the same loop.
        other_loop: Share of them that end in another loop.
        control: `goes_on` without as many random tokens before the loop, drawn anew at each cut. None: there is no
            control, or fewer tokens stand before the loop.
        ends: Whether at least half of the loops end, and more than under random changes.
        from_start: `goes_on` if the first token is hidden from all others from the start of the text, so that another
            may become the sink. None: it was not asked, or another intervention acts.
    """

    without: str
    goes_on: float
    other_loop: float
    control: float | None
    ends: bool
    from_start: float | None = None


@dataclass(frozen=True, kw_only=True)
class WhyLoop(Result):
    """What keeps a loop going.

    Attributes:
        prompt_tokens: Length of the prompt.
        period: Period of the loop in tokens. None if the text ends in no loop.
        onset: Position of the loop's first token.
        cuts: Positions at which causes were taken away.
        goes_on: Share of the continuations that end in the same loop if nothing is taken away.
        tried: What was taken away, one after another.
        kept_by: What keeps it going: causes that are needed, each of them, or "weights". Empty: undecided.
        added: Tokens of ordinary text that were put before the text, so that the copies have a control.
        ids: The tokens, the prompt first.
    """

    kind = "why-loop"
    page = "measure/why-loop"
    percent = ("goes_on", "other_loop", "control", "from_start")
    table_of = "tried"

    prompt_tokens: int
    period: int | None = None
    onset: int | None = None
    cuts: tuple[int, ...] = ()
    goes_on: float = 0.0
    tried: tuple[RemovalEffect, ...] = ()
    kept_by: tuple[str, ...] = ()
    added: int = 0
    ids: tuple[int, ...] = ()

    def conclusion(self) -> str:
        """Return what keeps the loop going, beside the control; or what was measured, and what to try."""
        if self.period is None:
            return f"The {len(self.ids) - self.prompt_tokens} tokens after the prompt end in no loop."
        loop = f"the loop of period {self.period}"
        if self.goes_on < STANDS:
            return (
                f"Undecided: {loop} goes on in {self._of(self.goes_on)} continuations of the same text; give the "
                "prompt and the policy under which it was written."
            )
        if self.kept_by == ("weights",):
            share = self._of(self.tried[-1].goes_on)
            return f"The weights alone keep {loop} going: after the first and the last token, in {share} cases."
        taken = [tried for tried in self.tried if tried.without in self.kept_by]
        if not taken:
            without = [f"without the {tried.without} in {self._of(tried.goes_on)}" for tried in self.tried[:-1]]
            return f"Undecided: {loop} goes on {word_list(without)} cases; try another prompt, or more cuts."
        shares: list[str] = []
        for tried in taken:  # each cause has a share of its own, as in the table
            if tried.other_loop:
                shares.append(f"{percent(tried.other_loop)}{f' ({tried.without})' * (len(taken) > 1)}")
        follows = f", but another follows in {word_list(shares)}" if shares else ""
        if len(taken) == 1 and self.needs_any_sink:
            follows = f", but goes on in {percent(taken[0].from_start or 0.0)} if it is hidden from the start"
        causes = word_list([f"the {tried.without}" for tried in taken])
        if len(taken) > 1:
            causes = f"one of {causes}"
        weakest = max(taken, key=lambda tried: tried.goes_on)
        effect = Effect(1 - weakest.goes_on, 0.0, {"random changes": 1 - (weakest.control or 0.0)})
        template = "Remove {causes}, and this loop stops in {value} of {count} cases{follows} ({control})."
        return effect.sentence(template, causes=causes, count=str(len(self.cuts)), follows=follows)

    @property
    def needs_any_sink(self) -> bool:
        """Whether the loop needs a sink, but goes on where another token than the first may become it."""
        shares = [tried.from_start for tried in self.tried if tried.from_start is not None]
        return bool(shares) and min(shares) >= STANDS * self.goes_on

    def details(self) -> list[str]:
        """Return which sink the loop needs, and how much ordinary text was put before the text."""
        lines: list[str] = []
        for tried in self.tried:
            if tried.from_start is not None:
                which = "it needs a sink, not this one" if self.needs_any_sink else "no other token takes its place"
                lines.append(
                    "With the first token hidden from all others from the start, where another may become the sink, "
                    f"the loop goes on in {self._of(tried.from_start)} cases: {which}."
                )
        if self.added:
            ordinary = f"{count_of(self.added, 'token')} of ordinary text"
            lines.append(f"{ordinary} stand before the prompt here, for a control.")
        return lines

    def _of(self, share: float) -> str:
        return f"{round(share * len(self.cuts))} of {len(self.cuts)}"

    def findings(self) -> list[Row]:
        """Return how often the loop goes on without each thing."""
        rows: list[Row] = []
        for tried in self.tried:
            share = Mean(tried.goes_on, kind="share")
            rows.append(row_beside(f"goes on without {tried.without}", share, tried.control, "random changes"))
        return rows


def draw(result: WhyLoop) -> Any:
    """Draw how often the loop goes on without each thing, beside random changes of the same size."""
    fig = panels(["share of continuations in which the same loop goes on"])
    names: list[str] = []
    for tried in result.tried:
        names.append(tried.without if tried.control is not None else f"{tried.without}<br>(no control)")
    fig.add_bar(x=names, y=[tried.goes_on for tried in result.tried], name="without it", marker_color=BLUE)
    controls = [tried.control for tried in result.tried]
    fig.add_bar(x=names, y=controls, name="under random changes", marker_color=GREY)
    fig.add_hline(result.goes_on, line={"color": GREY, "dash": "dot"}, annotation_text="intact")
    fig.update_yaxes(range=[0, 1.05], tickformat=".0%")
    return figure_of(fig, result, width=1000, height=460, barmode="group", legend=-0.3, bottom=120)


Continuations = dict[Removal, list[list[int]]]
"""The tokens that follow each removal, for one cut after another."""


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
        missing = last - 2 * self.loop.start + 1
        if target.max_positions:
            missing = min(missing, target.max_positions - last - self.new_tokens)
        if missing <= 0:
            return self, 0
        tokenizer = tokenizer_of(target)
        text = self.setup.halves.choose[: 8 * missing]  # more characters a token than any tokenizer needs for prose
        ordinary = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:missing]
        first = int(self.loop.start > 0 and self.ids[0] in tokenizer.all_special_ids)  # it stays the first
        ids = [*self.ids[:first], *ordinary, *self.ids[first:]]
        loop = self.loop._replace(start=self.loop.start + len(ordinary))
        return LoopedText(self.setup, ids, self.prompt + len(ordinary), loop), len(ordinary)

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

    def positions(self, removal: Removal, cut: int) -> list[int]:
        """Return the positions that a removal takes from the cache at a cut."""
        cause, is_random = removal
        own = {
            NO_REMOVAL: range(0),
            "copies": range(max(1, self.loop.start), cut),
            "sink": range(1),
            CONTEXT: range(1, cut),
        }[cause]
        if not is_random:
            return list(own)
        random = Random(f"{self.setup.seed} {[cause]} 0 {cut}")
        return random.sample(range(1, self.loop.start), len(own))

    def removals(self, last_cut: int) -> list[Removal]:
        """Return all removals, with random ones where enough tokens stand before the loop at all cuts."""
        removals: list[Removal] = [(NO_REMOVAL, False), (CONTEXT, False)]
        for cause in CAUSES:
            removals.append((cause, False))
            if len(self.positions((cause, False), last_cut)) < self.loop.start:
                removals.append((cause, True))
        return removals

    def continuations(self, cuts: Sequence[int]) -> Continuations:
        """Return the tokens that the model writes after each removal, at one cut after another.

        All removals of a cut begin with the same tokens, which are read once where no intervention acts on them.
        """
        target, edit = self.setup.target, self.setup.edit
        removals = self.removals(cuts[-1])
        written: Continuations = {removal: [] for removal in removals}
        read = DynamicCache(config=target.config) if edit is None else None
        for done, cut in enumerate(cuts):
            self.setup.progress("continuations", done, len(cuts))
            removed = torch.zeros(len(removals), cut, dtype=torch.bool)
            for row, removal in enumerate(removals):
                removed[row, self.positions(removal, cut)] = True
            cache = None
            if read is not None:
                self._read_up_to(cut - 1, read)
                cache = deepcopy(read)
                cache.batch_repeat_interleave(len(removals))
            remove = RemoveTokens(removed)
            rows = torch.tensor([self.ids[:cut]] * len(removals))
            continued, _ = decode(target, rows, self.new_tokens, remove if edit is None else edit | remove, cache=cache)
            for removal, tokens in zip(removals, continued, strict=True):
                written[removal].append(tokens)
        return written

    def hidden_from_start(self, cuts: Sequence[int]) -> list[list[int]]:
        """Return the tokens that the model writes after each cut if no token ever sees the first one but itself."""
        written: list[list[int]] = []
        for cut in cuts:
            rows = torch.tensor([self.ids[:cut]])
            written += decode(self.setup.target, rows, self.new_tokens, Knockout([0]))[0]
        return written

    @torch.no_grad()
    def _read_up_to(self, end: int, cache: DynamicCache) -> None:
        """Let the model read the text to a position, into a cache of ours, which keeps all tokens in any layer."""
        target = self.setup.target
        new = torch.tensor([self.ids[cache.get_seq_length() : end]], device=target.device)
        with under(Full(), target):
            target.hf(input_ids=new, past_key_values=cache, use_cache=True)

    def goes_on(self, tokens: Sequence[int]) -> bool:
        """Return whether a continuation ends in the same loop, begun anywhere in it."""
        if len(tokens) < self.new_tokens:
            return False
        period = self.loop.period
        size = max(2 * period, 8)
        end, cycle = list(tokens[-size:]), self.ids[-period:]
        return any(end == [cycle[(begin + i) % period] for i in range(size)] for begin in range(period))

    def share_going_on(self, continuations: Sequence[list[int]]) -> float:
        """Return the share of continuations that end in the same loop."""
        return fmean(map(self.goes_on, continuations))

    def effect_of(self, cause: str, written: Continuations) -> RemovalEffect:
        """Compare the continuations without a cause with those of its random draws and of the intact cache."""
        intact, own = self.share_going_on(written[NO_REMOVAL, False]), written[cause, False]
        goes_on = self.share_going_on(own)
        other = fmean(not self.goes_on(tokens) and end_loop(tokens) is not None for tokens in own)
        control = None
        if (cause, True) in written:
            control = self.share_going_on(written[cause, True])
        ends = control is not None and intact > 0 and intact - goes_on >= STANDS * intact and goes_on < control
        return RemovalEffect(cause, goes_on, other, control, ends)


def _refuse_unused(*, answer: Any, max_new_tokens: int | None, **_: Any) -> None:
    if answer is not None and max_new_tokens is not None:
        raise SinkscopeError("max_new_tokens has no effect on an answer that is given: leave one of the two out")


@measurement(
    figure=draw,
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
    """Take away, one after another, what may keep a loop going, and let the model continue.

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
    goes_on = looped.share_going_on(written[NO_REMOVAL, False])
    tried = [looped.effect_of(removed, written) for removed in (*CAUSES, CONTEXT)]
    for number, each in enumerate(tried):
        if each.ends and each.without == "sink" and setup.edit is None:
            hidden = looped.share_going_on(looped.hidden_from_start(positions))
            tried[number] = replace(each, from_start=hidden)
    kept_by = tuple(each.without for each in tried if each.ends and goes_on >= STANDS)
    if not kept_by and min(goes_on, tried[-1].goes_on) >= STANDS:
        kept_by = ("weights",)
    return replace(
        text,
        period=loop.period,
        onset=loop.start,
        cuts=tuple(position - added for position in positions),
        goes_on=goes_on,
        tried=tuple(tried),
        kept_by=kept_by,
        added=added,
    )
