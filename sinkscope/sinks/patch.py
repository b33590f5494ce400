"""Patches of the neurons that write a spike: making one if a proof holds, and what one repairs and costs.

Everything is read without a patch, with it, and, as a control, with a patch of other neurons of the same layers that
write as much:

1. Held-out text: its perplexity.
2. Copies of words: how far the last one goes along each spike of the first token. Words need repair whose copies reach
   half of it where one copy, behind ordinary text, does not.
3. Text after copies: the attention that it gives to them, and whether the model writes the word once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.progress import is_first
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Mean, Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.headline import Headline, Verdict, verdict_of
from sinkscope.results.notation import Neuron, count_of, word_list
from sinkscope.results.style import BLUE, GREEN, GREY, bars, figure_of
from sinkscope.results.table import Subject
from sinkscope.sinks.patch_tables import Outcome, Patched, Reading
from sinkscope.sinks.repeat import along_spikes, append_copy, attention_from, copies_of
from sinkscope.sinks.repeat_tables import CopiesKey
from sinkscope.sinks.spikes.controls import OtherNeurons, other_neurons
from sinkscope.sinks.spikes.edited import losses_at
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE, sinks_of, spike_of
from sinkscope.sinks.spikes.spike import Spike, find_spikes, layers_words
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

PatchVerdict = Literal["made", "given", "not-repaired", "refused", "no-sink", "no-repeats"]
NOTHING_TO_PATCH: tuple[PatchVerdict, ...] = ("no-sink", "no-repeats")
AFTER = 16  # tokens of ordinary text after the copies
PIECES = 8  # pieces of held-out text in one pass
CASES = ("intact", "patched", "control")


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
            ordinary text: without a patch, under it, and under one of other neurons. Empty: there is no patch.
        control: The other neurons. None: no other neuron of these layers writes anything.
    """

    kind = "patch"

    verdict: PatchVerdict
    reason: str
    sites: tuple[Neuron, ...] = ()
    calibrated: tuple[float, ...] = ()
    words: int = 0
    repeats: int = 0
    proof: tuple[Patched, ...] = ()
    control: OtherNeurons | None = None

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

    @property
    def norm(self) -> Patched | None:
        """What copies have of the patch's own spike; None where the first token has no spike."""
        return next((row for row in self.proof if row.key is Reading.NORM), None)

    def conclusion(self) -> str:
        """Say what the patch does to copies in its own spike, beside the control, or why there is none."""
        if self.verdict in NOTHING_TO_PATCH:
            return f"Nothing to patch: {self.reason}"
        if self.exit_code:
            return f"No patch was made: {self.reason}"
        norm = self.norm
        if norm is None or norm.intact is None:
            return f"The patch of {word_list(self.sites, 3)} has nothing to repair: the first token has no spike."
        words = f"{len(norm.words)} of {count_of(self.words, 'word')}"
        spike = f"the norm spike of {layers_words(*norm.layers or (0, 0))}"
        return (
            f"{words} need repair, because copies of them reach half of {spike}: without a patch they have up to "
            f"{norm.text('intact')} of it, and with that of {word_list(self.sites, 2)} {norm.text('patched')}. "
            f"{self.control_sentence(norm)}"
        )

    def control_sentence(self, norm: Patched) -> str:
        """Return what a patch of other neurons does to copies; one that does as much is said first."""
        if norm.control is None:
            return "There is no control: no other neuron of these layers writes anything."
        if self.control is None:  # of a file of an earlier version
            return f"As a control, with random other neurons patched they have {norm.text('control')}."
        if not self.control.is_fair:
            return "There is no fair control: no other neurons of these layers write as much."
        begin = "Not shown that it matters which neurons: as" if norm.control.value < HALF else "As"
        return f"{begin} a control, with a patch of {self.control.words}, they have {norm.text('control')}."

    def subjects(self) -> list[Subject]:
        """Return what the patch does to copies in each spike, and to what is written."""
        if not self.proof:
            return []
        trial = ": a trial, which was not saved" if self.exit_code else ""
        held = "held at the value of ordinary tokens everywhere but at position 0"
        words = [("patch", f"{word_list(self.sites, 3)}, {held}{trial}")]
        words.append(("control", "none" if self.control is None else f"a patch of {self.control.words}"))
        if self.words:
            shown = "below, those whose copies reach half of the spike, or all if none does"
            words.append(("words", f"{count_of(self.words, 'word')}, {self.repeats:,} copies of each; {shown}"))
        rows = [row for subject in self.compared() for row in subject.rows]
        return [Subject("What the patch changes", tuple(rows), "patch", words=tuple(words))]

    def compared(self) -> list[Subject]:
        """Return the same with a subject for each spike, by which those of two models are paired."""
        rows_of: dict[CopiesKey, list[Patched]] = {}
        for row in self.proof:
            rows_of.setdefault(CopiesKey(row.layers), []).append(row)
        return [Subject(str(key), tuple(rows), key, rows[0].words) for key, rows in rows_of.items()]

    def headlines(self) -> list[Headline]:
        """Return how far copies go along the spike with the patch, beside other neurons."""
        norm = self.norm
        if self.exit_code or norm is None or norm.intact is None:
            return []
        subject, found = "copies' spike with the patch", f"{norm.text('patched')} ({norm.text('intact')} without)"
        if self.control is None or norm.control is None or not self.control.is_fair:
            return [Headline(subject, found, "no fair control", Verdict.NO_CONTROL)]
        verdict = verdict_of(norm.control.value, norm.patched.value)
        return [Headline(subject, found, f"{norm.text('control')} (others)", verdict)]

    def figure(self) -> go.Figure:
        """Draw what is read at copies without the patch, with it, and with the control."""
        fig = go.Figure()
        rows = [row for row in self.proof if row.key is not Reading.PERPLEXITY]
        names = {"intact": "without patch", "patched": "with the patch", "control": "other neurons patched"}
        for case, colour in zip(CASES, (GREY, BLUE, GREEN), strict=True):
            bars(fig, rows, case, colour, names[case])
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
    """Patch the neurons that make repeated words sinks, and measure what the patch repairs and what it costs.

    The patch is for the spike at the first token that the most heads read. For another spike, make a patch in Python
    (`SinkPatch.from_result`) and evaluate it with `file`. With the neurons patched, repeated words must not reach half
    of the first token's projection on the spike's direction, text after them must give them less than half of the
    attention that it gives them otherwise, and the perplexity of held-out text must not rise. Everything is read
    without the patch, with it, and, as a control, with a patch of other neurons of the same layers that write as much,
    also in the other spikes of the first token. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by
    hand.)

    Args:
        file: Evaluate this patch file instead of making one; from Python also a `SinkPatch`.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.
    """
    most = repetition_limit(setup.target, max_repeats, 1 + AFTER)
    setup.record(max_repeats=most)
    if file is not None:
        return proof_of_file(setup, file, most, held_out(setup, pieces, length))
    if out is not None:
        check_output(out, ["sink-patch"])
    chosen = spike_of(setup)
    if chosen is None:
        return PatchResult(verdict="no-sink", reason=f"{NO_FIRST_SPIKE.lower()}, so there is nothing to patch.")
    edit = replace(chosen.patch, model=vars(setup.info()))
    sinks = sinks_of(setup)
    spikes = [chosen.spike]
    for circuit in sinks.at_first:
        if circuit is not chosen:
            spikes.append(circuit.spike)
    control = other_neurons(sinks.survey, edit.sites, (), setup.seed)
    found = proof_of(setup, spikes, edit, control, most, held_out(setup, pieces, length))
    verdict, reason = patch_verdict(found, limit)
    if out is not None and verdict == "made" and is_first():
        edit.save(out)
    return replace(found, verdict=verdict, reason=reason, calibrated=tuple(edit.calibrated.values()))


def proof_of_file(setup: Setup, file: Any, limit: int, pieces: TokenRows) -> PatchResult:
    """Measure what a patch that is given does, in all spikes of the first token.

    Args:
        setup: The whole model and its text.
        file: The patch, or the path of its file.
        limit: Largest number of repetitions.
        pieces: Held-out text.
    """
    edit = file if isinstance(file, SinkPatch) else SinkPatch.load(file)
    edit.check(setup.target)
    setup.record(file=None if isinstance(file, SinkPatch) else Path(file).name)
    survey = survey_of(setup)
    spikes = [spike for spike in find_spikes(survey, setup.tokenizer) if spike.place.is_first]
    control = other_neurons(survey, edit.sites, (), setup.seed)
    return proof_of(setup, spikes, edit, control, limit, pieces)


def patch_verdict(found: PatchResult, limit: float) -> tuple[PatchVerdict, str]:
    """Return the verdict on the patch of the first spike of a proof, and its reason.

    Args:
        found: What the patch does.
        limit: Largest accepted relative increase of the perplexity.
    """
    first = found.proof[0]
    spike = layers_words(*first.layers or (0, 0))
    rise = found.proof[-1].patched.value
    if first.outcome is not Outcome.REPAIRED and first.outcome is not Outcome.NOT_REPAIRED:
        tried = f"{found.repeats:,} copies of {count_of(found.words, 'word')}"
        return "no-repeats", f"{tried} do not reach half of the first token in the norm spike of {spike}."
    for row in found.proof:
        if row.layers == first.layers and row.outcome is Outcome.NOT_REPAIRED:
            read = f"{row.text('patched')} (without it: {row.text('intact')})"
            return "not-repaired", f"with the patch, the {row.short_label}, is still {read}."
    if not rise <= limit:
        return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
    return "made", f"repeated words no longer reach the spike of {spike}, and text no longer attends to them."


# --- the proof ---


@torch.no_grad()
def proof_of(
    setup: Setup,
    spikes: Sequence[Spike],
    patch: SinkPatch,
    control: OtherNeurons | None,
    limit: int,
    pieces: TokenRows,
) -> PatchResult:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The whole model and its text.
        spikes: The spikes of the first token.
        patch: The patch.
        control: The neurons of the control, held at their second token's values.
        limit: Largest number of repetitions.
        pieces: Held-out text.
    """
    edits = [None, patch]
    if control is not None:
        edits.append(SinkPatch(sites=control.neurons, site=patch.site))
    setup.record(pieces=len(pieces), length=pieces.shape[1])
    ordinary = ordinary_text(setup, edits, pieces)
    found = PatchResult(verdict="given", reason="it was given.", sites=patch.sites, proof=(ordinary,), control=control)
    if not spikes:
        return found
    ids = pick_tokens(setup)
    before = prefix_of(setup, ids)
    count = copies_to_read(setup.target, spikes, ids, before, limit)
    rows = repeated(before, ids, count)
    cases: list[Tensor] = []
    for edit in edits:
        setup.progress("patches", len(cases), len(edits))
        cases.append(read_after(setup, spikes, edit, rows, len(before)))
    layers = [spike.layers for spike in spikes]
    words = token_texts(setup.target, ids)
    copies = copies_rows(words, layers, torch.stack(cases), one_copy_after_text(setup, spikes, rows))
    return replace(found, words=len(ids), repeats=count, proof=(*copies, ordinary))


def copies_to_read(
    target: Target, spikes: Sequence[Spike], ids: Sequence[int], before: Sequence[int], limit: int
) -> int:
    """Return twice as many copies as the slowest word and spike need, and no more than a limit."""
    reached: list[int] = []
    for of_spike in copies_of(target, spikes, ids, before, limit):
        for half in of_spike:
            if half is not None:
                reached.append(half)
    slowest = max(reached, default=limit)
    return max(2, min(limit, 2 * slowest))


def one_copy_after_text(setup: Setup, spikes: Sequence[Spike], rows: TokenRows) -> Float[Tensor, "spike word"]:
    """Project one copy of each word after ordinary text on each spike's direction, without a patch."""
    texts = text_rows(setup.tokenizer, setup.halves.report, len(rows), rows.shape[1], setup.bos)
    with_copy = append_copy(texts[torch.arange(len(rows)) % len(texts)], rows)
    return torch.stack(along_spikes(setup.target, spikes, with_copy))[:, :, -1]


def copies_rows(
    words: Sequence[str],
    spikes: Sequence[tuple[int, int]],
    read: Float[Tensor, "case reading word"],
    one_copy: Float[Tensor, "spike word"],
) -> list[Patched]:
    """Return what is read at the words that need repair in each spike, or at all others if none does.

    Norms: the maximum over words. Other readings: the mean.

    Args:
        words: The words.
        spikes: The layers of the spikes.
        read: What `read_after` reads, in each case.
        one_copy: The norm of one copy behind ordinary text, without a patch.
    """
    failing = (read[0, : len(spikes)] >= HALF) & (one_copy < HALF)  # the words that need repair, by spike
    in_any_spike = failing.any(0)
    rows: list[Patched] = []
    for number, layers in enumerate(spikes):
        row = copies_row(Reading.NORM, words, failing[number], read[:, number])
        of_words = one_copy[number][shown_words(failing[number])]
        largest = Mean(float(of_words.max()), by_text=tuple(of_words.tolist()))
        rows.append(replace(row, layers=layers, one_copy=largest))
    if not bool(in_any_spike.any()):
        return rows
    for number, layers in enumerate(spikes):
        values = read[:, len(spikes) + number]
        if not bool(values[0].isnan().all()):  # else no head reads the spike
            rows.append(replace(copies_row(Reading.ATTENTION, words, failing[number], values), layers=layers))
    rows.append(copies_row(Reading.NEXT, words, in_any_spike, read[:, 2 * len(spikes)]))
    return rows


def shown_words(failing: Bool[Tensor, " word"]) -> Bool[Tensor, " word"]:
    """Return the words that need repair, or all of them if none does."""
    return failing if bool(failing.any()) else ~failing


def copies_row(
    reading: Reading, words: Sequence[str], failing: Bool[Tensor, " word"], values: Float[Tensor, "case word"]
) -> Patched:
    """Return one reading at the words that need repair, or at all others, and what the patch does to it."""
    shown = shown_words(failing)
    numbers: dict[str, Mean] = {}
    for case, of_words in zip(CASES, values, strict=False):
        chosen = of_words[shown]
        value = chosen.max() if reading is Reading.NORM else chosen.mean()
        numbers[case] = Mean(float(value), by_text=tuple(chosen.tolist()))
    intact = numbers["intact"].value
    patched = numbers["patched"].value
    outcome = Outcome.NOTHING
    if bool(failing.any()) and not (reading is Reading.NEXT and intact >= HALF):
        match reading:
            case Reading.NEXT:
                is_repaired = patched >= HALF
            case Reading.ATTENTION:
                is_repaired = patched < HALF * intact
            case _:
                is_repaired = patched < HALF
        outcome = Outcome.REPAIRED if is_repaired else Outcome.NOT_REPAIRED
    names = tuple(word for word, is_shown in zip(words, shown.tolist(), strict=True) if is_shown)
    return Patched(
        key=reading,
        words=names,
        outcome=outcome,
        intact=numbers["intact"],
        patched=numbers["patched"],
        control=numbers.get("control"),
    )


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

    def run(ids_of_pass: TokenRows) -> None:
        chances.append(target.logits_at(ids_of_pass, torch.tensor([end - 1]))[:, 0].float().softmax(-1).cpu())

    with under(edit, target):
        along = [of_spike[:, -1] for of_spike in along_spikes(target, spikes, rows)]
        received = attention_from(target, texts, copies, end, run)[:, 0] / AFTER  # word layer head
    for spike in spikes:
        reading = spike.attention.mean(-1) > READS
        attention.append(received[:, [*spike.reading_layers]][:, reading].mean(1))
    return torch.stack([*along, *attention, torch.cat(chances).gather(1, rows[:, -1:])[:, 0]])


def ordinary_text(setup: Setup, edits: Sequence[SinkPatch | None], ids: TokenRows) -> Patched:
    """Read how a patch and that of its control change the perplexity of held-out text, as shares of it."""
    losses = list[Tensor]()
    changes = list[Mean]()
    positions = torch.arange(1, ids.shape[1] - 1)  # texts begin alike
    for edit in edits:
        with under(edit, setup.target):
            read = [losses_at(setup.target, batch, positions).mean(1) for batch in ids.split(PIECES)]
        losses.append(torch.cat(read).double())
        rise = losses[-1] - losses[0]
        ratio = float(rise.mean().exp())
        margin = margin_of(rise.numpy())
        changes.append(Mean(ratio - 1, None if margin is None else ratio * margin))
    return Patched(
        key=Reading.PERPLEXITY,
        patched=changes[1],
        control=changes[2] if len(changes) > 2 else None,
        perplexity=Mean(float(losses[0].mean().exp())),
    )
