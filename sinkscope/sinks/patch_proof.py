"""What a patch does, measured without a patch, with it, and with a patch of random neurons:

1. Held-out text: its perplexity and its logits.
2. Copies of words: how far the last one goes along each spike of the first token.
3. Text after copies, in the same passes: the attention that it gives to them, and whether the model writes the word
   once more.
4. One copy behind ordinary text, and ordinary text alone, without a patch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.hooks import first_tensor, on_output
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import count_of
from sinkscope.sinks.repeat import append_copy, attention_from
from sinkscope.sinks.spikes.controls import ordered_in, random_neurons
from sinkscope.sinks.spikes.copies import along_spikes, copies_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF, READS
from sinkscope.sinks.tokens import TokenRows, held_out, logits_of, pick_tokens, prefix_of, repeated, token_texts

INTACT, PATCHED, RANDOM, ONCE, OTHERS = range(5)
CASES = ("intact", "patched", "random", "one copy", "other tokens")
SENTENCES = {
    "norm": "Under the patch, copies of {words} reach at most {after:.0%} of the spike of {spike} (without it: "
    "{before:.0%}; random neurons: {random:.0%}).",
    "attention": "Heads that read the spike of {spike} give the copies {after:.0%} (without the patch: "
    "{before:.0%}; random neurons: {random:.0%}) of their attention.",
    "next token": "The model repeats the word with a probability of {after:.0%} (without the patch: {before:.0%}; "
    "random neurons: {random:.0%}).",
}
"""What is said of each reading."""


@dataclass(frozen=True)
class AfterCopies:
    """Attention and output after copies of each word: without the patch, with it, and with random neurons.

    Attributes:
        attention: Share of its attention that the text gives to the copies, mean over the heads that read each spike in
            ordinary text. NaN: no head does.
        one_more: Probability that the model writes the word once more after the last copy.
    """

    attention: Float[np.ndarray, "case spike word"]
    one_more: Float[np.ndarray, "case word"]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of held-out text.

    Attributes:
        patch: "none"; "patch"; "random patch": as many random neurons of the same layers.
        perplexity: The perplexity.
        change: Difference to the perplexity without a patch, as a share of it.
        margin: Two standard errors of the change, over paired pieces. None: fewer than three pieces.
    """

    patch: str
    perplexity: float
    change: float
    margin: float | None


@dataclass(frozen=True)
class OrdinaryText:
    """What a patch changes on held-out text.

    Attributes:
        pieces: Number of pieces.
        length: Tokens of a piece.
        perplexity: The perplexity without a patch, with it, and with a random one.
        largest_change: Largest change of a logit under the patch, in a few of the pieces.
        flips: Share of next tokens there whose likeliest prediction changes.
        largest_at: The token after which that logit is read.
    """

    pieces: int
    length: int
    perplexity: tuple[Perplexity, ...]
    largest_change: float
    flips: float
    largest_at: str

    def sentences(self) -> list[str]:
        """Say how much perplexity and logits change."""
        _, patched, random = self.perplexity
        margin = "" if patched.margin is None else f"± {patched.margin:.3%}; "
        return [
            f"The perplexity of {count_of(self.pieces, 'held-out text')} of {self.length} tokens changes by "
            f"{patched.change:+.3%} ({margin}random neurons: {random.change:+.3%}).",
            f"The largest change of a logit is {self.largest_change:.2g} (after {self.largest_at!r}); "
            f"{self.flips:.2%} of the likeliest tokens change.",
        ]


@dataclass(frozen=True)
class Reading:
    """What is read at and after copies: without the patch, with it, and with random neurons.

    Attributes:
        what: "norm": how far copies go along the spike at most; "attention": what the heads that read the spike give
            the copies; "next token": the probability of one more copy.
        spike: The spike, by its layers. Empty: it belongs to no single spike.
        words: Number of words.
        values: The numbers.
        broken: Whether copies break it in the intact model.
        repaired: In each case, whether copies do not break it: they do not reach the spike; less than half of the
            attention is left; the model writes the word once more.
    """

    what: str
    spike: str
    words: int
    values: Float[np.ndarray, " case"]
    broken: bool
    repaired: Bool[np.ndarray, " case"]


@dataclass(frozen=True)
class PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Cases: "intact", "patched" and "random" are the last copy of each word without a patch, with it, and with as many
    random neurons of the same layers patched; without a patch also "one copy" behind ordinary text, and "other tokens".

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        spikes: The spikes of the first token, by their layers.
        along: Projection on the direction of each spike, as a share of the first token's.
        following: What follows copies. None: no word needs repair.
        ordinary: What changes on held-out text.
    """

    words: tuple[str, ...]
    repeats: int
    spikes: tuple[str, ...]
    along: Float[np.ndarray, "case spike word"]
    following: AfterCopies | None
    ordinary: OrdinaryText

    @property
    def has_spike(self) -> Bool[np.ndarray, "case spike word"]:
        """Return whether a position reaches half of the first token's projection."""
        return self.along >= HALF

    @property
    def failing(self) -> Bool[np.ndarray, "spike word"]:
        """Return the words that need repair: copies reach the spike in the intact model, and one copy does not."""
        return self.has_spike[INTACT] & ~self.has_spike[ONCE]

    def readings(self) -> list[Reading]:
        """Return what is read at the words that need repair in each spike; if none does, at all words."""
        norms, attention = list[Reading](), list[Reading]()
        for number, spike in enumerate(self.spikes):
            failing = self.failing[number]
            broken = bool(failing.any())
            shown = failing if broken else ~failing
            count, along = int(shown.sum()), self.along[: RANDOM + 1, number, shown].max(1)
            norms.append(Reading("norm", spike, count, along, broken, along < HALF))
            if self.following is not None and not np.isnan(self.following.attention[0, number]).all():
                to_copies = self.following.attention[:, number, shown].mean(1)
                attention.append(
                    Reading("attention", spike, count, to_copies, broken, to_copies < HALF * to_copies[INTACT])
                )
        if self.following is None:
            return norms
        failing = self.failing.any(0)
        one_more = self.following.one_more[:, failing].mean(1)
        likely = one_more >= HALF
        following = Reading("next token", "", int(failing.sum()), one_more, not likely[INTACT], likely)
        return [*norms, *attention, following]

    def sentences(self) -> list[str]:
        """Say what the patch does in each spike, to attention and output after copies, and to ordinary text."""
        lines: list[str] = []
        for reading in self.readings():
            before, after, random = reading.values
            words = f"{reading.words} of {count_of(len(self.words), 'word')}"
            values = {"before": before, "after": after, "random": random}
            lines.append(SENTENCES[reading.what].format(words=words, spike=reading.spike, **values))
        return [*lines, *self.ordinary.sentences()]


PatchArgument = SinkPatch | str | os.PathLike[str] | None
"""A patch, or its file."""


def read_patch_argument(patch: PatchArgument, **_: object) -> SinkPatch:
    """Return the patch itself, or load the one in the file; it is read before a model is loaded.

    Raises:
        SinkscopeError: There is none, or the file is not a patch.
    """
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch --out patch.json`")
    if isinstance(patch, SinkPatch):
        return patch
    return SinkPatch.load(patch)


def random_patch(setup: Setup, patch: SinkPatch) -> SinkPatch:
    """Make a patch of as many random neurons of the same layers and experts, held at their second token's values."""
    neurons = patch.checked_sites
    orders = ordered_in(setup.target, setup.ids, neurons)
    return SinkPatch(sites=random_neurons(orders, neurons, setup.seed), site=patch.site)


AFTER = 16  # tokens of ordinary text after the copies
PIECES = 8  # pieces of held-out text in one pass
COMPARED = 4  # pieces whose logits are compared


@torch.no_grad()
def proof_of(
    setup: Setup, spikes: Sequence[Spike], patch: SinkPatch, limit: int, pieces: int, length: int
) -> PatchProof:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The whole model and its text.
        spikes: The spikes of the first token.
        patch: The patch.
        limit: Largest number of repetitions.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    target, edits = setup.target, (None, patch, random_patch(setup, patch))
    ordinary = ordinary_text(setup, edits, pieces, length)
    if not spikes:
        return PatchProof((), 0, (), np.zeros((len(CASES), 0, 0)), None, ordinary)
    ids = pick_tokens(setup)
    before = prefix_of(setup, ids)
    halves = [copies.half for of_spike in copies_of(target, spikes, ids, before, limit) for copies in of_spike]
    slowest = max((half for half in halves if half is not None), default=limit)
    count = max(2, min(limit, 2 * slowest))  # twice as many as the slowest word and spike need, and no more
    rows = repeated(before, ids, count)
    cases, reading = list[Tensor](), [(spike, reader_mask(spike)) for spike in spikes]
    for edit in edits:
        setup.progress("patches", len(cases), len(edits))
        cases.append(read_copies(setup, reading, edit, rows, len(before)))
    read, number = torch.stack(cases), len(spikes)
    texts = text_rows(setup.tokenizer, setup.halves.report, len(rows), rows.shape[1], setup.bos)
    others = texts[torch.arange(len(rows)) % len(texts)]
    others_along = torch.stack(along_spikes(target, spikes, append_copy(others, rows)))  # a copy is last, after text
    along = torch.cat([read[:, :number], others_along[None, :, :, -1], others_along[None, :, :, -2]])
    proof = PatchProof(
        words=token_texts(target, ids),
        repeats=count,
        spikes=tuple(spike.name for spike in spikes),
        along=along.numpy(),
        following=AfterCopies(read[:, number:-1].numpy(), read[:, -1].numpy()),
        ordinary=ordinary,
    )
    return proof if proof.failing.any() else replace(proof, following=None)


@torch.no_grad()
def read_copies(
    setup: Setup,
    spikes: Sequence[tuple[Spike, Bool[Tensor, "layer head"]]],
    edit: SinkPatch | None,
    rows: TokenRows,
    before: int,
) -> Float[Tensor, "reading word"]:
    """Read copies and the text that follows them, in one pass over each word.

    The readings are the last copy on each spike's direction, the attention that the heads that read each
    spike give to copies, and the probability of one more (`AfterCopies`).

    Args:
        setup: The whole model and its text.
        spikes: The spikes whose directions are read, each with the heads that read it.
        edit: The edit. None: none.
        rows: Copies of the words, each after `before` other tokens.
        before: Number of tokens before the copies.
    """
    target, end = setup.target, rows.shape[1]
    ordinary = text_rows(setup.tokenizer, setup.halves.report, 1, AFTER, None)
    texts = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    copies = torch.zeros(*texts.shape, 1)
    copies[:, before:end] = 1
    along: list[list[Tensor]] = [[] for _ in spikes]
    chances = list[Tensor]()

    def keep(number: int, output: Any) -> None:
        along[number].append(spikes[number][0].along(first_tensor(output)[:, end - 1].float().cpu()))

    def run(some: TokenRows) -> None:
        chances.append(target.logits_at(some, torch.tensor([end - 1]))[:, 0].float().softmax(-1).cpu())

    hooks = [(target.layers[spike.peak], "post", on_output(partial(keep, n))) for n, (spike, _) in enumerate(spikes)]
    with under(edit, target), target.hooks(*hooks):
        received = attention_from(target, texts, copies, end, run)[:, 0] / AFTER  # word layer head
    attention = [received[:, readers].mean(1) for _, readers in spikes]  # NaN if no head reads it
    one_more = torch.cat(chances).gather(1, rows[:, -1:])[:, 0]
    return torch.stack([*map(torch.cat, along), *attention, one_more])


def reader_mask(spike: Spike) -> Bool[Tensor, "layer head"]:
    """Mark the heads of a model that read a spike in ordinary text."""
    reading = spike.survey.received(spike.place.mask).nanmean(-1) > READS
    layers = torch.zeros(len(reading), 1, dtype=torch.bool)
    layers[[*spike.reading_layers]] = True
    return reading & layers


@torch.no_grad()
def ordinary_text(setup: Setup, edits: Sequence[SinkPatch | None], pieces: int, length: int) -> OrdinaryText:
    """Read held-out text without a patch, with it, and with a random one.

    Args:
        setup: The whole model and its text.
        edits: None, the patch and the random one.
        pieces: Number of pieces.
        length: Tokens of a piece.
    """
    ids, target = held_out(setup, pieces, length), setup.target
    setup.record(pieces=len(ids), length=ids.shape[1])
    losses, logits = list[Tensor](), list[Tensor]()
    for edit in edits:
        with under(edit, target):
            loss, first = read_pieces(target, ids)
        losses.append(loss)
        logits.append(first)
        setup.progress("perplexity", len(losses), len(edits))
    rows: list[Perplexity] = []
    for name, loss in zip(("none", "patch", "random patch"), losses, strict=True):
        rise = loss - losses[0]
        ratio, margin = float(rise.mean().exp()), margin_of(rise.numpy())
        rows.append(Perplexity(name, float(loss.mean().exp()), ratio - 1, None if margin is None else ratio * margin))
    intact, patched, _ = logits
    change = (patched - intact).abs().amax(-1).flatten().cpu()
    return OrdinaryText(
        pieces=len(ids),
        length=ids.shape[1],
        perplexity=tuple(rows),
        largest_change=float(change.max()),
        flips=float((patched.argmax(-1) != intact.argmax(-1)).float().mean()),
        largest_at=setup.tokenizer.decode([int(ids[:COMPARED].flatten()[change.argmax()])]),
    )


def read_pieces(target: Target, ids: TokenRows) -> tuple[Float[Tensor, " row"], Float[Tensor, "some pos vocab"]]:
    """Measure the mean loss of each piece in nats, and return the logits of the first few.

    The prediction of the first token is left out: texts begin alike.
    """
    losses, first = list[Tensor](), list[Tensor]()
    for rows in ids.split(PIECES):
        logits = logits_of(target, rows)
        # One row of logits after the other: along another axis torch adds float32 up less exactly (4e-4 of 262k tokens)
        following = rows[:, 2:].flatten().to(logits.device)
        loss = cross_entropy(logits[:, 1:-1].flatten(0, 1), following, reduction="none")
        losses.append(loss.unflatten(0, (len(rows), -1)).mean(1))
        first = first or [logits[:COMPARED].clone()]
    return torch.cat(losses).cpu().double(), first[0]
