"""First and later tokens after an attention layer, separated by linear probes (Yona et al. 2025, Fig. 4)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score, permutation_test_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import PIECE, Natural, Result, Setup, Whole, measurement
from sinkscope.models.checks import check_site
from sinkscope.models.draws import seed_of
from sinkscope.models.text import text_rows
from sinkscope.results.style import figure_of

CLEAR = 8  # later tokens begin here: without BOS, the first few of a text can be marked like the first one
FOLDS, SHUFFLES = 5, 5


@dataclass(frozen=True)
class Probe:
    """A logistic regression that tells first tokens from later ones.

    Attributes:
        probe: "plane": of the residual stream; "neuron": of the pre-activation of the neuron that separates the
            training texts best; "up factor": the same by the linear factor of a gated MLP.
        neuron: The neuron that separates all texts best.
        auroc: Area under the ROC curve on texts and tokens that were held out, mean over five folds.
        error: Its standard error over the folds.
        shuffled: The same where first and later are shuffled in each text, mean over five draws.
    """

    probe: str
    neuron: int | None
    auroc: float
    error: float
    shuffled: float


@dataclass(frozen=True, kw_only=True)
class Separation(Result):
    """How well linear probes tell first tokens from later ones after the attention of a layer.

    Attributes:
        layer: The layer.
        probes: The probes; without neurons in a mixture of experts.
    """

    page = "measure/related"
    columns = ("probe", "neuron", "auroc", "error", "shuffled")
    glossary: ClassVar = {"neuron": "its number in the layer"}

    layer: int
    probes: tuple[Probe, ...]

    def conclusion(self) -> str:
        """How well a plane separates, beside shuffled labels."""
        plane = self.probes[0]
        separates = "separates" if plane.auroc - 2 * plane.error > plane.shuffled else "does not separate"
        return (
            f"After the attention of layer {self.layer}, a plane {separates} first tokens from later ones: held-out "
            f"AUROC {plane.auroc:.3f}, with shuffled labels {plane.shuffled:.3f}."
        )


def draw(result: Separation) -> go.Figure:
    """Draw how well each probe separates, beside shuffled labels."""
    fig = px.scatter(
        result.rows(), x="probe", y=["auroc", "shuffled"], labels={"value": "held-out AUROC", "variable": ""}
    )
    return figure_of(fig, result, width=900, height=460)


@measurement(group="Sinks", help="Tell first tokens from later ones by linear probes.", figure=draw)
def separate(
    setup: Setup, *, layer: Whole = 0, neuron: Whole | None = None, pieces: Natural = 128, count: Natural = 1024
) -> Separation:
    """Measure how well a plane, and one neuron, tell first tokens from later ones after an attention layer.

    Each token is read once in text and once alone, without BOS. Whole texts are held out, with their tokens alone.

    Args:
        layer: Layer of the attention and of the neurons.
        neuron: Examine this neuron instead of the best one.
        pieces: Pieces of typical text, 64 tokens each.
        count: Largest number of tokens.

    Example:
        sinkscope separate --model llama-2-7b --neuron 912
    """
    check_site(setup.target, layer, neuron)
    ids = text_rows(setup.tokenizer, setup.text, pieces, PIECE, setup.bos)
    if len(ids) < FOLDS:
        raise SinkscopeError(f"there are {len(ids)} pieces of text; give at least --pieces {FOLDS}, or a longer --text")
    generator = np.random.default_rng(seed_of(setup.seed, "places of later tokens"))
    order = generator.permutation(len(ids) * (PIECE - CLEAR))
    _, chosen = np.unique(ids[:, CLEAR:].flatten()[order], return_index=True)  # one place of each token
    row, pos = np.divmod(order[generator.permutation(chosen)[:count]], PIECE - CLEAR)
    places = row, pos + CLEAR
    values = {"plane": samples(setup, ids, places, f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out")}
    for name, site in (("neuron", "mlp.hook_pre"), ("up factor", "mlp.hook_pre_linear")):
        with suppress(UnsupportedError):
            values[name] = samples(setup, ids, places, f"blocks.{layer}.{site}")
    probes = []
    for name, inputs in values.items():
        if name != "plane" and neuron is not None:
            inputs = inputs[:, [neuron]]
        probes.append(fitted(name, neuron, inputs, np.tile(row, 2), setup.seed))
    return Separation(layer=layer, probes=tuple(probes))


def samples(
    setup: Setup, ids: Int[Tensor, "row pos"], places: tuple[np.ndarray, np.ndarray], *sites: str
) -> Float[np.ndarray, "sample d"]:
    """The sum of some sites at tokens that stand alone, then at the same tokens in text."""
    alone = trace(setup.target, ids[places][:, None], sites, lambda value: value[:, 0], batch_size=256)
    text = trace(setup.target, ids, sites, batch_size=32)
    parts = [torch.cat([alone[site], text[site][places]]).float() for site in sites]
    return torch.stack(parts).sum(0).numpy()


def fitted(name: str, neuron: int | None, inputs: Float[np.ndarray, "sample d"], texts: np.ndarray, seed: int) -> Probe:
    """A probe by cross-validation over texts, and with labels that are shuffled within each text."""
    first = np.arange(len(inputs)) < len(inputs) // 2
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    if name != "plane":
        model.steps.insert(0, ("best", SelectKBest(k=1)))
        neuron = int(SelectKBest(k=1).fit(inputs, first).scores_.argmax()) if neuron is None else neuron
    folds, draw = GroupKFold(FOLDS), seed_of(seed, "labels of first and later tokens") % 2**32
    areas = cross_val_score(model, inputs, first, groups=texts, cv=folds, scoring="roc_auc")
    _, chance, _ = permutation_test_score(
        model, inputs, first, groups=texts, cv=folds, scoring="roc_auc", n_permutations=SHUFFLES, random_state=draw
    )
    return Probe(
        probe=name,
        neuron=None if name == "plane" else neuron,
        auroc=float(areas.mean()),
        error=float(areas.std(ddof=1) / FOLDS**0.5),
        shuffled=float(chance.mean()),
    )
