"""What a patch costs elsewhere: the perplexity of ordinary text, compared with no patch and a random-neuron patch."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from sinkscope.errors import SinkscopeError
from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.edit import NeuronSite
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.layer_view import flat_number, neutral_post, neutral_up, neutral_view
from sinkscope.measure import PIECE, Option, Result, Setup, measurement
from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import neuron_names
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.tokens import TokenRows

CHARACTERS = 8  # largest number of characters per token, as in `text_rows`
NEUTRAL_CHARACTERS = CHARACTERS * 4 * PIECE  # of the text that neutral values are taken from


def under(edit: Intervention | None, target: Target) -> AbstractContextManager[Any]:
    """A `with` block in which the edit acts; without an edit, nothing does."""
    return nullcontext() if edit is None else edit.on(target)


def held_out(setup: Setup, pieces: int, length: int) -> TokenRows:
    """Pieces of the typical text after the part that neutral values are taken from.

    Raises:
        SinkscopeError: The text is too short for two pieces of 8 tokens.
    """
    rest = setup.text[NEUTRAL_CHARACTERS:]
    length = min(length, setup.target.max_positions or length)
    # A short text gives short pieces rather than none.
    beginning = rest[: CHARACTERS * pieces * length]
    count = len(setup.tokenizer(beginning, add_special_tokens=False, verbose=False)["input_ids"])
    length = min(length, count // 2 + (setup.bos is not None))
    if length < 8:
        raise SinkscopeError(
            f"the text has {len(setup.text)} characters, and the first {NEUTRAL_CHARACTERS} of them are used to "
            "measure neutral values: give a longer --text, so that something is held out"
        )
    return text_rows(setup.tokenizer, rest, pieces, length, setup.bos)


@torch.no_grad()
def losses(target: Target, ids: TokenRows, batch_size: int = 8, progress: Progress = silent) -> Float[Tensor, " row"]:
    """Mean next-token loss of each piece in nats, without the first token's prediction, which no patch changes.

    Args:
        target: The whole model.
        ids: Pieces of text.
        batch_size: Pieces per pass.
        progress: Called after every batch.
    """
    out: list[Tensor] = []
    for rows in ids.to(target.device).split(batch_size):
        logits = target.hf(input_ids=rows, use_cache=False).logits
        predictions = rearrange(logits[:, 1:-1].float(), "row pos vocab -> row vocab pos")
        each = functional.cross_entropy(predictions, rows[:, 2:].to(logits.device), reduction="none")
        out.append(each.mean(1).cpu())
        progress("perplexity", sum(map(len, out)), len(ids))
    return torch.cat(out)


def errors_of(samples: Float[Tensor, "condition sample"]) -> Float[Tensor, " edit"]:
    """Standard error of the mean difference to the first condition, over paired samples; NaN for a single sample."""
    if samples.shape[1] < 2:
        return torch.full((len(samples) - 1,), torch.nan)
    return (samples[1:] - samples[0]).std(1) / math.sqrt(samples.shape[1])


@dataclass(frozen=True, kw_only=True)
class PatchEvaluation(Result):
    """Perplexity of held-out text with and without a patch.

    Attributes:
        patches: "none"; "patch"; "random patch": as many random neurons of the same layers.
        perplexity: Perplexity under each of them.
        errors: Standard error of the difference to the perplexity without a patch, over paired pieces. NaN for "none".
        neurons: Neurons of the patch: (layer, neuron) or (layer, expert, neuron).
    """

    page = "measure/patch"
    percent = ("change", "two_errors")
    glossary: ClassVar = {
        "change": "difference to the perplexity without a patch, as a share of it",
        "two_errors": "two standard errors of the change",
    }

    patches: tuple[str, ...] = ("none", "patch", "random patch")
    perplexity: Float[np.ndarray, " patch"]
    errors: Float[np.ndarray, " patch"]
    neurons: tuple[tuple[int, ...], ...]

    def conclusion(self) -> str:
        """The change by the patch, beside a random patch."""
        _, patch, random = self.rows()
        return (
            f"The patch of {neuron_names(self.neurons, 3)} changes the perplexity of held-out text by "
            f"{patch['change']:+.2%} (random neurons: {random['change']:+.2%})."
        )

    def rows(self) -> Table:
        """One row per patch."""
        columns = {
            "perplexity": self.perplexity,
            "change": self.perplexity / self.perplexity[0] - 1,
            "two_errors": 2 * self.errors / self.perplexity[0],
        }
        return long_table(columns, patch=self.patches)


def draw(result: PatchEvaluation) -> go.Figure:
    """Draw the change by the patch and by a random patch, with two standard errors."""
    labels = {"change": "change of the perplexity", "patch": ""}
    fig = px.scatter(result.rows()[1:], render_mode="svg", x="patch", y="change", error_y="two_errors", labels=labels)
    return figure_of(fig.update_yaxes(tickformat=".2%"), result, width=900, height=480)


def read_patch_argument(patch: SinkPatch | str | os.PathLike[str] | None) -> SinkPatch:
    """The patch itself, or the one in the file.

    Raises:
        SinkscopeError: There is none, or the file is not a patch.
    """
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch make --out patch.json`", page="patch-file")
    if isinstance(patch, SinkPatch):
        return patch
    return SinkPatch.load(patch)


def refuse_unknown(patch: SinkPatch | str | os.PathLike[str] | None, **_: object) -> None:
    """Refuse a wrong file before a model is loaded."""
    read_patch_argument(patch)


@measurement(
    group="Sinks",
    order=5,
    help="Measure what a patch costs.",
    figure=draw,
    words="patch eval",
    loading="whole",
    check=refuse_unknown,
    quick={"patch": SinkPatch(layer=1, neurons=[3]), "pieces": 2, "length": 16},
)
def patch_eval(
    setup: Setup,
    patch: Annotated[Any, Option(metavar="FILE", required=True)] = None,
    *,
    pieces: Annotated[int, Field(ge=2)] = 32,
    length: Annotated[int, Field(ge=8)] = 256,
) -> PatchEvaluation:
    """Measure the perplexity without a patch, with it, and with a patch of as many random neurons of the same layers.

    The beginning of the typical text provides the neutral values of the random neurons; perplexity is measured on
    pieces that come after it.

    Args:
        patch: The patch.json to evaluate; from Python also a `SinkPatch`.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.

    Example:
        sinkscope patch eval --model llama-2-7b --patch patch.json
    """
    edit = read_patch_argument(patch)
    edit.check_made_for(setup.target)
    ids = held_out(setup, pieces, length)
    setup.record(
        patch=None if isinstance(patch, SinkPatch) else Path(patch).name,
        site=edit.site,
        value=edit.value,
        made_for=(edit.model or {}).get("name"),
        pieces=len(ids),
        length=ids.shape[1],
    )
    losses_of: list[Tensor] = []
    for each in (None, edit, random_patch(setup, edit)):
        with under(each, setup.target):
            losses_of.append(losses(setup.target, ids, progress=setup.progress))
    samples = torch.stack(losses_of).double()
    perplexity = samples.mean(1).exp()
    errors = torch.cat([torch.tensor([torch.nan]), errors_of(samples) * perplexity[1:]])
    return PatchEvaluation(
        perplexity=perplexity.numpy(),
        errors=errors.numpy(),
        neurons=tuple(site.numbers for site in edit.checked_sites),
    )


def random_patch(setup: Setup, patch: SinkPatch) -> SinkPatch:
    """A patch of the same kind for as many other neurons of the same layers and experts, drawn with the seed.

    Raises:
        SinkscopeError: The patch has more than half of the neurons of a layer.
    """
    calibrated = {}
    for group in patch.groups():
        with setup.target.loaded(group.layer):
            view = neutral_view(setup.target, group.layer, setup.ids)
        width = setup.target.width(group.layer, group.expert)
        taken = set(group.neurons)
        if 2 * len(taken) > width:
            raise SinkscopeError(
                f"the patch has {len(taken)} of the {width} neurons of layer {group.layer}: no random patch of as many "
                "others can be drawn beside it; give a smaller patch"
            )
        generator = draws(setup.seed, f"neurons beside the patch in layer {group.layer}, expert {group.expert}")
        order = torch.randperm(width, generator=generator).tolist()
        others = [neuron for neuron in order if neuron not in taken]
        for neuron in others[: len(taken)]:
            flat = flat_number(setup.target, group.layer, group.expert, neuron)
            value = neutral_up(view, flat)
            if patch.site == "post" or value is None:
                value = neutral_post(setup.target, view, flat)
            calibrated[NeuronSite(group.layer, neuron, group.expert)] = value
    return SinkPatch(sites=tuple(calibrated), site=patch.site, value=patch.value, calibrated=calibrated)
