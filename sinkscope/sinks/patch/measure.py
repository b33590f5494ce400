"""What a patch does, measured without a patch, with it, and with one of random neurons:

1. Held-out text: its perplexity and its logits.
2. Copies of words: how far the last one goes along each spike of the first token.
3. Text after copies, in the same passes: the attention that it gives to them, and whether the model writes the word
   once more.
4. One copy behind ordinary text, and ordinary text alone, without a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.hooks import first_tensor, on_output
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.held_out import held_out, logits_of
from sinkscope.sinks.patch.patches import random_patch
from sinkscope.sinks.patch.proof import CASES, AfterCopies, OrdinaryText, PatchProof, Perplexity
from sinkscope.sinks.repetition.readings import attention_from
from sinkscope.sinks.repetition.sweep import append_copy
from sinkscope.sinks.spikes.copies import along_spikes, copies_of
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import READS
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, token_texts

AFTER = 16  # tokens of ordinary text after the copies
PIECES = 8  # of held-out text in one pass
COMPARED = 4  # pieces of which every logit is compared
PATCHES = ("none", "patch", "random patch")


@torch.no_grad()
def proof_of(
    setup: Setup, survey: Survey, spikes: Sequence[Spike], patch: SinkPatch, limit: int, pieces: int, length: int
) -> PatchProof:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The whole model and its text.
        survey: The survey in which the spikes were found.
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
    halves = [one.half for found in copies_of(target, spikes, ids, before, limit) for one in found]
    slowest = max((half for half in halves if half is not None), default=limit)
    count = max(2, min(limit, 2 * slowest))  # twice as many as the slowest word and spike need, and no more
    rows = repeated(before, ids, count)
    cases, reading = list[Tensor](), [(spike, readers_of(survey, spike)) for spike in spikes]
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

    hooks = [(target.layers[one.peak], "post", on_output(partial(keep, n))) for n, (one, _) in enumerate(spikes)]
    with under(edit, target), target.hooks(*hooks):
        received = attention_from(target, texts, copies, end, run)[:, 0] / AFTER  # word layer head
    attention = [received[:, readers].mean(1) for _, readers in spikes]  # NaN if no head reads it
    one_more = torch.cat(chances).gather(1, rows[:, -1:])[:, 0]
    return torch.stack([*map(torch.cat, along), *attention, one_more])


def readers_of(survey: Survey, spike: Spike) -> Bool[Tensor, "layer head"]:
    """Mark the heads that read a spike in ordinary text, of all layers of a model."""
    reading = survey.received(spike.mask).nanmean(-1) > READS
    layers = torch.zeros(len(reading), 1, dtype=torch.bool)
    layers[spike.first + 1 : spike.last + 2] = True
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
    for name, loss in zip(PATCHES, losses, strict=True):
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
