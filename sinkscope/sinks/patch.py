"""Patches of the neurons that write a spike: making one if a proof holds, and what one repairs and costs.

Everything is read without a patch, with it, and with a patch of random neurons:

1. Held-out text: its perplexity.
2. Copies of words: how far the last one goes along each spike of the first token. Words need repair whose copies reach
   half of it where one copy, behind ordinary text, does not.
3. Text after copies: the attention that it gives to them, and whether the model writes the word once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.progress import is_first
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Mean, Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import text_rows
from sinkscope.results.notation import Neuron, count_of, percent, word_list
from sinkscope.results.row import Row, row_of
from sinkscope.results.style import BLUE, GREEN, GREY, bars, figure_of
from sinkscope.sinks.repeat import along_spikes, append_copy, attention_from, copies_of
from sinkscope.sinks.spikes.edited import losses_at
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE, sinks_of, spike_of
from sinkscope.sinks.spikes.needs import random_neurons
from sinkscope.sinks.spikes.spike import Spike, find_spikes
from sinkscope.sinks.spikes.survey import survey_of
from sinkscope.sinks.thresholds import HALF, READS
from sinkscope.sinks.tokens import (
    Length,
    Pieces,
    TokenRows,
    held_out,
    pick_tokens,
    prefix_of,
    repeated,
    repetition_limit,
    token_texts,
)

Verdict = Literal["made", "given", "not-repaired", "refused", "no-sink", "no-repeats"]
AFTER = 16  # tokens of ordinary text after the copies
PIECES = 8  # pieces of held-out text in one pass
CASES = ("intact", "patched", "control")
NORM = "norm of copies"
ATTENTION = "attention to copies"
NEXT = "one more copy"
COST = "change of the perplexity"
BROKEN = "not repaired"


@dataclass(frozen=True, kw_only=True)
class PatchResult(Result):
    """A patch with what it repairs and costs, or why none was made.

    Attributes:
        verdict: "made"; "given": it is that of a file; "not-repaired": repeated words reach the spike, or text after
            them attends to them; "refused": the patch would harm; "no-sink": there is nothing to patch; "no-repeats":
            repetition makes no sink, so nothing can be proved.
        reason: One sentence that explains the verdict.
        sites: The neurons of the patch.
        calibrated: Their neutral values.
        words: Number of words that were repeated.
        repeats: How often each is repeated.
        proof: What is read in each spike of the first token at the words that need repair, or else at all words, and in
            ordinary text: without a patch, under it, and under a patch of random neurons of the same layers. Empty:
            there is no patch.
    """

    kind = "patch"
    columns = ("about", "name", "intact", "patched", "control", "note")

    verdict: Verdict
    reason: str
    sites: tuple[Neuron, ...] = ()
    calibrated: tuple[float, ...] = ()
    words: int = 0
    repeats: int = 0
    proof: tuple[Row, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 1 if no patch was made, whatever the reason: a script that goes on with the file must stop."""
        return int(self.verdict not in ("made", "given"))

    @property
    def patch(self) -> SinkPatch:
        """Return the patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}")
        calibrated = dict(zip(self.sites, self.calibrated, strict=True))
        return SinkPatch(sites=self.sites, calibrated=calibrated, model=vars(self.model))

    def conclusion(self) -> str:
        """Say what the patch does to copies in its own spike, or why there is none."""
        if self.exit_code:
            return f"No patch was made: {self.reason}"
        norm = self.proof[0]
        if norm.name != NORM:
            return f"The patch of {word_list(self.sites, 3)} has nothing to repair: the first token has no spike."
        before, after, random = (percent(norm.get(case)) for case in CASES)
        words = f"{len(norm.texts)} of {count_of(self.words, 'word')}"
        beside = f"(without it: {before}; random neurons: {random})"
        return f"Under the patch, copies of {words} reach at most {after} of the spike of {norm.about} {beside}."

    def figure(self) -> go.Figure:
        """Draw what is read at copies without the patch, with it, and with random neurons."""
        fig = go.Figure()
        rows = [replace(row, name=f"{row.name} {row.about}") for row in self.proof if row.table == "copies"]
        for case, colour in zip(CASES, (GREY, BLUE, GREEN), strict=True):
            bars(fig, rows, case, colour, case)
        return figure_of(fig.update_yaxes(tickformat=".0%"), self, width=900, height=480)


def check_file(file: Any = None, out: Any = None, **_: Any) -> None:
    """Refuse a file that holds no patch, or that is evaluated together with one that is made."""
    if file is not None and out is not None:
        raise SinkscopeError("--out has no effect with --file, which holds a patch: leave one of both out")
    if file is not None and not isinstance(file, SinkPatch):
        SinkPatch.load(file)


@measurement(loading="whole", check=check_file)
def patch(
    setup: Setup,
    *,
    file: Any = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Pieces = 32,
    length: Length = 64,
    out: str | Path | None = None,
) -> PatchResult:
    """Make a patch of the neurons that write a spike, prove it, and say what it repairs and costs.

    The spike is that of the first token that most heads read, of those that need neurons; `SinkPatch.from_result` makes
    a patch of another, which `file` evaluates. With the neurons patched, repeated words must not reach half of the
    first token's projection on the spike's direction, text after them must give them less than half of the attention
    that it gives them otherwise, and the perplexity of held-out text must not rise. Everything is read without the
    patch, with it, and with a patch of as many random neurons of the same layers, also in the other spikes of the first
    token. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)

    Args:
        file: A patch that exists, which is evaluated instead; from Python also a `SinkPatch`.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.
    """
    most = repetition_limit(setup.target, max_repeats, 1 + AFTER)
    setup.record(max_repeats=most)
    if file is not None:
        edit = file if isinstance(file, SinkPatch) else SinkPatch.load(file)
        edit.check(setup.target)
        setup.record(file=None if isinstance(file, SinkPatch) else Path(file).name)
        found = find_spikes(survey_of(setup), setup.tokenizer)
        spikes = [spike for spike in found if spike.place.is_first]
        return proof_of(setup, spikes, edit, most, held_out(setup, pieces, length))
    if out is not None:
        check_output(out, ["sink-patch"])
    chosen = spike_of(setup)
    if chosen is None:
        return PatchResult(verdict="no-sink", reason=f"{NO_FIRST_SPIKE.lower()}, so there is nothing to patch.")
    edit = replace(chosen.patch, model=vars(setup.info()))
    others = [circuit.spike for circuit in sinks_of(setup).at_first if circuit is not chosen]
    found = proof_of(setup, [chosen.spike, *others], edit, most, held_out(setup, pieces, length))
    verdict, reason = verdict_of(found, limit)
    if out is not None and verdict == "made" and is_first():
        edit.save(out)
    return replace(found, verdict=verdict, reason=reason, calibrated=tuple(edit.calibrated.values()))


def verdict_of(found: PatchResult, limit: float) -> tuple[Verdict, str]:
    """Return the verdict on the patch of the first spike of a proof, and its reason.

    Args:
        found: What the patch does.
        limit: Largest accepted relative increase of the perplexity.
    """
    spike = found.proof[0].about
    rise = found.proof[-1].get("patched")
    if not found.proof[0].note:
        tried = f"{found.repeats:,} copies of {count_of(found.words, 'word')}"
        return "no-repeats", f"{tried} do not reach half of the first token in the spike of {spike}."
    for row in found.proof:
        if row.about == spike and row.note == BROKEN:
            read = f"{row.numbers['patched']} (without it: {row.numbers['intact']})"
            return "not-repaired", f"under the patch, the {row.name} in the spike of {spike} is still {read}."
    if not rise <= limit:
        return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
    return "made", f"repeated words no longer reach the spike of {spike}, and text no longer attends to them."


# --- the proof ---


@torch.no_grad()
def proof_of(setup: Setup, spikes: Sequence[Spike], patch: SinkPatch, limit: int, pieces: TokenRows) -> PatchResult:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The whole model and its text.
        spikes: The spikes of the first token.
        patch: The patch.
        limit: Largest number of repetitions.
        pieces: Held-out text.
    """
    target = setup.target
    edits = (None, patch, random_patch(setup, patch))
    setup.record(pieces=len(pieces), length=pieces.shape[1])
    ordinary = ordinary_text(setup, edits, pieces)
    found = PatchResult(verdict="given", reason="it was given.", sites=patch.sites, proof=(ordinary,))
    if not spikes:
        return found
    ids = pick_tokens(setup)
    before = prefix_of(setup, ids)
    halves = chain(*copies_of(target, spikes, ids, before, limit))
    slowest = max((half for half in halves if half is not None), default=limit)
    count = max(2, min(limit, 2 * slowest))  # twice as many as the slowest word and spike need, and no more
    rows = repeated(before, ids, count)
    cases = list[Tensor]()
    for edit in edits:
        setup.progress("patches", len(cases), len(edits))
        cases.append(read_after(setup, spikes, edit, rows, len(before)))
    texts = text_rows(setup.tokenizer, setup.halves.report, len(rows), rows.shape[1], setup.bos)
    behind_text = append_copy(texts[torch.arange(len(rows)) % len(texts)], rows)
    one_copy = torch.stack(along_spikes(target, spikes, behind_text))[:, :, -1]
    copies = copies_rows(token_texts(target, ids), [spike.name for spike in spikes], torch.stack(cases), one_copy)
    return replace(found, words=len(ids), repeats=count, proof=(*copies, ordinary))


def copies_rows(
    words: Sequence[str],
    spikes: Sequence[str],
    read: Float[Tensor, "case reading word"],
    one_copy: Float[Tensor, "spike word"],
) -> list[Row]:
    """Return what is read at the words that need repair in each spike, or at all others if none does.

    Of a norm it is the most that a word reaches, of what else is read the mean.

    Args:
        words: The words.
        spikes: The spikes, by their layers.
        read: What `read_after` reads, in each case.
        one_copy: The norm of one copy behind ordinary text, without a patch.
    """
    failing = (read[0, : len(spikes)] >= HALF) & (one_copy < HALF)
    rows = list[Row]()
    every = failing.any(0, keepdim=True)
    names = [*((NORM, spike) for spike in spikes), *((ATTENTION, spike) for spike in spikes), (NEXT, "")]
    for (name, about), own, values in zip(names, [*failing, *failing, *every], read.unbind(1), strict=True):
        if (name != NORM and not bool(every.any())) or bool(values[0].isnan().all()):  # no head reads the spike
            continue
        shown = own if bool(own.any()) else ~own
        by_case = dict[str, Tensor](zip(CASES, values, strict=True))
        numbers = dict[str, Mean]()
        if name == NORM:
            by_case["one_copy"] = one_copy[len(rows)]
        for case, of_words in by_case.items():
            some = of_words[shown]
            numbers[case] = Mean(
                float(some.max() if name == NORM else some.mean()), None, tuple(some.tolist()), "share"
            )
        texts = tuple(word for word, is_shown in zip(words, shown.tolist(), strict=True) if is_shown)
        intact = numbers["intact"].value
        patched = numbers["patched"].value
        note = ""
        if bool(own.any()) and not (name == NEXT and intact >= HALF):
            repaired = {NORM: patched < HALF, ATTENTION: patched < HALF * intact, NEXT: patched >= HALF}
            note = "repaired" if repaired[name] else BROKEN
        rows.append(Row("copies", name, numbers, note, about, texts))
    return rows


def random_patch(setup: Setup, patch: SinkPatch) -> SinkPatch:
    """Make a patch of as many random neurons of the same layers and experts, held at their second token's values."""
    neurons = patch.sites
    return SinkPatch(sites=random_neurons(setup.target, setup.ids, neurons, setup.seed), site=patch.site)


def read_after(
    setup: Setup, spikes: Sequence[Spike], edit: SinkPatch | None, rows: TokenRows, before: int
) -> Float[Tensor, "reading word"]:
    """Read copies and the text that follows them.

    The readings are the last copy on each spike's direction, the share of its attention that text after copies gives to
    them, mean over the heads that read each spike in ordinary text (NaN: no head does), and the probability of one
    more copy.

    Args:
        setup: The whole model and its text.
        spikes: The spikes.
        edit: The edit. None: none.
        rows: Copies of the words, each after `before` other tokens.
        before: Number of tokens before the copies.
    """
    target = setup.target
    end = rows.shape[1]
    chances = list[Tensor]()
    attention = list[Tensor]()
    ordinary = text_rows(setup.tokenizer, setup.halves.report, 1, AFTER, None)
    texts = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    copies = torch.zeros(*texts.shape, 1)
    copies[:, before:end] = 1

    def run(some: TokenRows) -> None:
        chances.append(target.logits_at(some, torch.tensor([end - 1]))[:, 0].float().softmax(-1).cpu())

    with under(edit, target):
        along = [of_spike[:, -1] for of_spike in along_spikes(target, spikes, rows)]
        received = attention_from(target, texts, copies, end, run)[:, 0] / AFTER  # word layer head
    for spike in spikes:
        reading = spike.attention.mean(-1) > READS
        attention.append(received[:, [*spike.reading_layers]][:, reading].mean(1))
    return torch.stack([*along, *attention, torch.cat(chances).gather(1, rows[:, -1:])[:, 0]])


def ordinary_text(setup: Setup, edits: Sequence[SinkPatch | None], ids: TokenRows) -> Row:
    """Read how a patch and a random one change the perplexity of held-out text, as shares of it."""
    losses = list[Tensor]()
    changes = list[Mean]()
    positions = torch.arange(1, ids.shape[1] - 1)  # texts begin alike
    for edit in edits:
        with under(edit, setup.target):
            read = [losses_at(setup.target, some, positions).mean(1) for some in ids.split(PIECES)]
        losses.append(torch.cat(read).double())
        rise = losses[-1] - losses[0]
        ratio = float(rise.mean().exp())
        margin = margin_of(rise.numpy())
        changes.append(Mean(ratio - 1, None if margin is None else ratio * margin, kind="share"))
    perplexity = float(losses[0].mean().exp())
    control = "random neurons"
    return row_of("held-out text", COST, control, patched=changes[1], control=changes[2], perplexity=perplexity)
