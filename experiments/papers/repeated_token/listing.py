"""The patch of the paper's Listing 1 as printed, beside the patch with calibrated values (Sec. 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.papers.repeated_token.circuit import first_tokens, norms, sink_neurons_of
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement
from sinkscope.results.style import BLUE, ORANGE, bars, figure_of
from sinkscope.sinks.spikes.edited import losses_at
from sinkscope.sinks.tokens import held_out, pick_tokens

PIECES, LENGTH = 16, 64  # of held-out ordinary text


class Patch(StrEnum):
    """Which patch."""

    NONE = "none"
    LISTING = "listing"
    CALIBRATED = "calibrated"


@dataclass(frozen=True)
class Tried:
    """A patch, and whether BOS stands before the copies."""

    patch: Patch
    bos: bool

    def __str__(self) -> str:
        names = {
            Patch.NONE: "control: no patch",
            Patch.LISTING: "Listing 1: the second token's value of the linear factor",
            Patch.CALIBRATED: "SinkPatch: the value of ordinary text",
        }
        return names[self.patch]


@dataclass(frozen=True, kw_only=True)
class Copies(
    Row,
    table="patches",
    title="under a patch of the sink neurons",
    note="Lower is better for copies. Loss added: to ordinary text that chose nothing.",
):
    """What the last copy has of the first token's norm."""

    key: Tried

    last: Mean = column("last copy, % of the\nfirst token's norm", "share", "Norm of the last copy, mean over words.")
    loss: Mean = column("loss\nadded", "rise", "Loss on held-out ordinary text under the patch minus that without.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return "copies behind BOS" if self.key.bos else "copies alone"


@dataclass(frozen=True, kw_only=True)
class Listing(Result):
    """What two patches of the same neurons do to copies, behind BOS and alone."""

    patches: tuple[Copies, ...]

    def conclusion(self) -> str:
        """Return what Listing 1 leaves beside the calibrated patch and no patch."""
        of = {(row.key.patch, row.key.bos): row for row in self.patches}
        bos = (Patch.LISTING, True) in of
        none, listing, calibrated = (of[patch, bos] for patch in (Patch.NONE, Patch.LISTING, Patch.CALIBRATED))
        words = (
            f"{'Behind BOS t' if bos else 'T'}he last copy has {listing.text('last')} of the first token's norm under "
            f"Listing 1 as printed, and {calibrated.text('last')} under a patch with the values of ordinary text (as a "
            f"control, without a patch: {none.text('last')})."
        )
        if (Patch.LISTING, False) not in of or not bos:
            return words
        listing, calibrated = of[Patch.LISTING, False], of[Patch.CALIBRATED, False]
        return f"{words} Without BOS they leave {listing.text('last')} and {calibrated.text('last')}."

    def figure(self) -> Any:
        """Draw what the last copy has under each patch."""
        fig = go.Figure()
        bars(fig, [row for row in self.patches if row.key.bos], "last", BLUE, "behind BOS")
        bars(fig, [row for row in self.patches if not row.key.bos], "last", ORANGE, "copies alone", "/")
        fig.update_yaxes(tickformat=".0%", title_text="norm of the last copy")
        return figure_of(fig, self, width=1000, height=480)


@measurement(loading="whole")
def listing(setup: Setup, *, words: Sequence[str] | None = None, copies: Natural = 500) -> Listing:
    """Compare Listing 1 of the paper, as printed, with a patch that holds the values of ordinary text.

    Args:
        words: The words. By default five of the text.
        copies: Number of copies.
    """
    sinks = sink_neurons_of(setup)
    ids = torch.tensor(pick_tokens(setup)) if words is None else first_tokens(setup, words)
    copies = min(copies, (setup.target.max_positions or copies + 1) - 1)
    patches: dict[Patch, Intervention | None] = {
        Patch.NONE: None,
        Patch.LISTING: SinkPatch(sites=sinks.neurons, site="up"),
        Patch.CALIBRATED: sinks.patch,
    }
    intact = losses(setup, None)
    made: list[Copies] = []
    for bos in (True, False) if setup.bos is not None else (False,):
        rows = ids[:, None].expand(-1, copies)
        if bos and setup.bos is not None:
            rows = torch.cat([torch.full((len(ids), 1), setup.bos), rows], 1)
        for patch, edit in patches.items():
            read = norms(setup, rows, sinks.site, edit)
            last = mean_of(read[:, -1] / norms(setup, rows, sinks.site)[:, 0])
            loss = mean_of(losses(setup, edit) - intact)
            made.append(Copies(key=Tried(patch, bos), last=last or Mean(0.0), loss=loss or Mean(0.0)))
    return Listing(patches=tuple(made))


@torch.no_grad()
def losses(setup: Setup, edit: Intervention | None) -> Float[Tensor, " text"]:
    """Return the loss of each piece of held-out text under an edit, in nats a token."""
    ids = held_out(setup, PIECES, LENGTH)
    positions = torch.arange(1, ids.shape[1] - 1)
    with under(edit, setup.target):
        return losses_at(setup.target, ids, positions).mean(1).double()
