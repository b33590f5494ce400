"""What a patch costs elsewhere: the perplexity of ordinary text, compared with no patch and a random-neuron patch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Option, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.results.parts import Neuron, in_words
from sinkscope.results.style import figure_of
from sinkscope.sinks.held_out import Length, Pieces, held_out, logits_of
from sinkscope.sinks.patch.patches import random_patch, read_patch_argument
from sinkscope.sinks.tokens import TokenRows

PIECES = 8  # in one pass
COMPARED = 4  # pieces of which every logit is compared


def losses(target: Target, ids: TokenRows) -> Float[Tensor, " row"]:
    """Measure the mean loss of each piece in nats, without the first token's prediction: texts begin alike."""
    read = []
    for rows in ids.split(PIECES):
        # One row of logits after the other: along another axis torch adds float32 up less exactly (4e-4 of 262k tokens)
        predictions = logits_of(target, rows)[:, 1:-1].flatten(0, 1)
        following = rows[:, 2:].flatten().to(predictions.device)
        loss = cross_entropy(predictions, following, reduction="none")
        read.append(loss.unflatten(0, (len(rows), -1)).mean(1).cpu())
    return torch.cat(read)


def errors_of(samples: Float[Tensor, "condition sample"]) -> Float[Tensor, " edit"]:
    """Return the standard error of the mean difference to the first condition, over paired samples."""
    return (samples[1:] - samples[0]).std(1) / math.sqrt(samples.shape[1])


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of held-out text.

    Attributes:
        patch: "none"; "patch"; "random patch": as many random neurons of the same layers.
        perplexity: The perplexity.
        change: Difference to the perplexity without a patch, as a share of it.
        two_errors: Two standard errors of the change, over paired pieces.
    """

    patch: str
    perplexity: float
    change: float
    two_errors: float


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(Result):
    """Perplexity of held-out text with and without a patch.

    Attributes:
        read: The perplexity without a patch, with it, and with a random one.
        neurons: Neurons of the patch.
        largest_change: Largest change of a logit under the patch, in a few of the pieces.
        flips: Share of next tokens there whose likeliest prediction changes.
        largest_at: The token after which that logit is read.
    """

    page = "measure/patch"
    percent = ("change", "two_errors")
    table_of = "read"

    read: tuple[Perplexity, ...]
    neurons: tuple[Neuron, ...]
    largest_change: float
    flips: float
    largest_at: str = ""

    def conclusion(self) -> str:
        """Say how the patch changes the perplexity, beside random neurons."""
        _, patched, random = self.read
        texts = f"{self.settings['pieces']} held-out texts of {self.settings['length']} tokens"
        return (
            f"The patch of {in_words(self.neurons, 3)} changes the perplexity of {texts} by {patched.change:+.2%} "
            f"(± {patched.two_errors:.2%}; random neurons: {random.change:+.2%})."
        )

    def details(self) -> list[str]:
        """Say what changes beside the mean loss."""
        return [changed_logits(self.largest_change, self.largest_at, self.flips)]


def changed_logits(largest: float, after: str, flips: float) -> str:
    """Say how much a patch changes logits."""
    return (
        f"The largest change of a logit is {largest:.2g} (after {after!r}); {flips:.2%} of the likeliest tokens change."
    )


def draw(result: PatchEvaluation) -> go.Figure:
    """Draw the change by the patch and by a random patch, with two standard errors."""
    labels = {"change": "change of the perplexity", "patch": ""}
    fig = px.scatter(result.rows()[1:], render_mode="svg", x="patch", y="change", error_y="two_errors", labels=labels)
    return figure_of(fig.update_yaxes(tickformat=".2%"), result, width=900, height=480)


@measurement(
    group="Sinks",
    help="Measure what a patch costs.",
    figure=draw,
    words="patch eval",
    loading="whole",
    check=read_patch_argument,
)
def patch_eval(
    setup: Setup,
    patch: Annotated[Any, Option(metavar="FILE", required=True)] = None,
    *,
    pieces: Pieces = 32,
    length: Length = 64,
) -> PatchEvaluation:
    """Measure the perplexity without a patch, with it, and with a patch of as many random neurons of the same layers.

    The random neurons hold their values at the second token. Perplexity is measured on pieces of the typical text after
    the part that neutral values are taken from.

    Args:
        patch: The patch.json to evaluate; from Python also a `SinkPatch`.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.

    Example:
        sinkscope patch eval --model llama-2-7b --patch patch.json
    """
    edit = read_patch_argument(patch)
    edit.check(setup.target)
    ids = held_out(setup, pieces, length)
    setup.record(
        patch=None if isinstance(patch, SinkPatch) else Path(patch).name,
        pieces=len(ids),
        length=ids.shape[1],
    )
    read = []
    for each in (None, edit, random_patch(setup, edit)):
        with under(each, setup.target):
            read.append(losses(setup.target, ids))
        setup.progress("perplexity", len(read), 3)
    samples = torch.stack(read).cpu().double()
    perplexity = samples.mean(1).exp()
    errors = [0.0, *(2 * errors_of(samples) * perplexity[1:] / perplexity[0]).tolist()]
    change = (perplexity / perplexity[0] - 1).tolist()
    rows = zip(("none", "patch", "random patch"), perplexity.tolist(), change, errors, strict=True)
    intact = logits_of(setup.target, ids[:COMPARED])
    with edit.on(setup.target):
        patched = logits_of(setup.target, ids[:COMPARED])
    change_at = (patched - intact).abs().amax(-1).flatten().cpu()
    return PatchEvaluation(
        read=tuple(Perplexity(*row) for row in rows),
        neurons=edit.checked_sites,
        largest_change=float(change_at.max()),
        largest_at=setup.tokenizer.decode([int(ids[:COMPARED].flatten()[change_at.argmax()])]),
        flips=float((patched.argmax(-1) != intact.argmax(-1)).float().mean()),
    )
