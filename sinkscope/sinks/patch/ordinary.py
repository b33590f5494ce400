"""What a patch costs elsewhere: the perplexity of held-out text and its logits, beside no patch and a random one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of
from sinkscope.sinks.held_out import held_out, logits_of
from sinkscope.sinks.tokens import TokenRows

PIECES = 8  # in one pass
COMPARED = 4  # pieces of which every logit is compared
PATCHES = ("none", "patch", "random patch")


def losses(target: Target, ids: TokenRows) -> Float[Tensor, " row"]:
    """Measure the mean loss of each piece in nats, without the first token's prediction: texts begin alike."""
    read = []
    for rows in ids.split(PIECES):
        # One row of logits after the other: along another axis torch adds float32 up less exactly (4e-4 of 262k tokens)
        predictions = logits_of(target, rows)[:, 1:-1].flatten(0, 1)
        following = rows[:, 2:].flatten().to(predictions.device)
        loss = cross_entropy(predictions, following, reduction="none")
        read.append(loss.unflatten(0, (len(rows), -1)).mean(1))
    return torch.cat(read).cpu().double()


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
    read, logits = list[Tensor](), list[Tensor]()
    for edit in edits:
        with under(edit, target):
            read.append(losses(target, ids))
            if len(logits) < 2:
                logits.append(logits_of(target, ids[:COMPARED]))
        setup.progress("perplexity", len(read), len(edits))
    rows: list[Perplexity] = []
    for name, loss in zip(PATCHES, read, strict=True):
        ratio, margin = float((loss - read[0]).mean().exp()), margin_of((loss - read[0]).numpy())
        rows.append(Perplexity(name, float(loss.mean().exp()), ratio - 1, None if margin is None else ratio * margin))
    intact, patched = logits
    change = (patched - intact).abs().amax(-1).flatten().cpu()
    return OrdinaryText(
        pieces=len(ids),
        length=ids.shape[1],
        perplexity=tuple(rows),
        largest_change=float(change.max()),
        flips=float((patched.argmax(-1) != intact.argmax(-1)).float().mean()),
        largest_at=setup.tokenizer.decode([int(ids[:COMPARED].flatten()[change.argmax()])]),
    )
