"""Whether a plane, or one neuron, tells first tokens from later ones after an attention layer (Fig. 4).

Each token is read once in text, at position 8 or later, and once alone, without BOS. A fifth of the texts at a time is
held out, with their tokens alone. The control has labels that are shuffled within each text.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_score, permutation_test_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Neuron, Result, Row, Setup, Whole, column, measurement, optional
from sinkscope.measure.setup import PIECE
from sinkscope.models.draws import draws
from sinkscope.models.inputs import check_site
from sinkscope.models.text import text_rows
from sinkscope.results.style import BLUE, GREY, figure_of
from sinkscope.sinks.tokens import TokenRows

CLEAR = 8  # later tokens begin here: without BOS, the first few of a text can be marked like the first one
TOKENS = 1024  # tokens at most
FOLDS = 5
Samples = Float[np.ndarray, "sample d"]


class ProbeKey(StrEnum):
    """What is asked."""

    PLANE = "plane"
    GATE = "gate"
    UP = "up"
    GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class Probe(
    Row,
    table="probes",
    title="what separates them",
    note="AUROC: the probability that a first token scores above a later one, on texts that were held out; 50% is "
    "chance. The best neuron is chosen on the other texts each time.",
):
    """How well something separates first tokens from later ones."""

    key: ProbeKey
    neuron: str | None = optional("neuron", "word", "The neuron that separates all texts best, or that was given.")
    auroc: Mean = column("AUROC", "fine_share", "Area under the ROC curve on held-out texts, mean over folds.")
    shuffled: Mean = column("control:\nshuffled labels", "fine_share", "The same with labels shuffled in each text.")

    @property
    def label(self) -> str:
        """What it is called."""
        names = {
            ProbeKey.PLANE: "a plane, after the attention",
            ProbeKey.GATE: "the best neuron's gate",
            ProbeKey.UP: "the best neuron's linear factor",
            ProbeKey.GIVEN: "the gate of the neuron that was given",
        }
        return names[self.key]


@dataclass(frozen=True, kw_only=True)
class Separability(Result):
    """How well a plane, and single neurons, separate first tokens from later ones after an attention layer."""

    probes: tuple[Probe, ...]

    def conclusion(self) -> str:
        """Return what the plane and the best neuron reach, beside shuffled labels."""
        plane, *neurons = self.probes
        layer = self.settings.get("layer", 0)
        words = (
            f"After the attention of layer {layer} a plane tells first tokens from later ones with an AUROC of "
            f"{plane.text('auroc')} on held-out texts (as a control, with shuffled labels: {plane.text('shuffled')})."
        )
        if not neurons:
            return words
        best = max(neurons, key=lambda row: row.auroc.value)
        return f"{words} One neuron alone, {best.neuron}, reaches {best.text('auroc')}."

    def figure(self) -> Any:
        """Draw how well each probe separates, beside shuffled labels."""
        names = [row.label for row in self.probes]
        fig: Any = go.Figure()
        for key, name, colour in (("auroc", "held-out texts", BLUE), ("shuffled", "shuffled labels", GREY)):
            fig.add_bar(x=names, y=[row[key].value for row in self.probes], name=name, marker_color=colour)
        fig.update_yaxes(title_text="AUROC", range=[0, 1.05])
        return figure_of(fig, self, width=900, height=460)


@measurement()
def separability(setup: Setup, *, layer: Whole = 0, pieces: Natural = 128, neuron: Whole | None = None) -> Separability:
    """Fit a plane and single neurons that tell first tokens from later ones; a mixture of experts has no neurons here.

    Args:
        layer: The layer.
        pieces: Pieces of typical text, 64 tokens each.
        neuron: Number of a neuron whose gate is asked, too, as the paper's 912.

    Raises:
        SinkscopeError: The model has no such layer or neuron, or the text is too short.
    """
    check_site(setup.target, layer)
    if neuron is not None and neuron >= setup.target.d_mlp:
        raise SinkscopeError(f"--neuron {neuron}: an MLP of this model has {setup.target.d_mlp}; give a number below")
    ids = text_rows(setup.tokenizer, setup.text, pieces, PIECE, setup.bos)
    if len(ids) < FOLDS:
        raise SinkscopeError(f"there are {len(ids)} pieces of text; expected {FOLDS} or more: give a longer --text")
    generator = np.random.default_rng(draws(setup.seed, "places of later tokens").initial_seed())
    order = generator.permutation(len(ids) * (PIECE - CLEAR))
    _, chosen = np.unique(ids[:, CLEAR:].flatten()[order], return_index=True)  # one place of each token
    row, pos = np.divmod(order[generator.permutation(chosen)[:TOKENS]], PIECE - CLEAR)
    places = row, pos + CLEAR
    texts = np.tile(row, 2)
    parts = f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out"
    probes = [probed(ProbeKey.PLANE, samples(setup, ids, places, *parts), texts, setup.seed, layer)]
    with suppress(UnsupportedError):
        gates = samples(setup, ids, places, f"blocks.{layer}.mlp.hook_pre")
        probes.append(probed(ProbeKey.GATE, gates, texts, setup.seed, layer))
        if neuron is not None:
            probes.append(given(gates[:, neuron], texts, setup.seed, Neuron(layer, None, neuron)))
        factors = samples(setup, ids, places, f"blocks.{layer}.mlp.hook_pre_linear")
        probes.append(probed(ProbeKey.UP, factors, texts, setup.seed, layer))
    return Separability(probes=tuple(probes))


def samples(setup: Setup, ids: TokenRows, places: tuple[np.ndarray, np.ndarray], *sites: str) -> Samples:
    """Return the sum of some sites at tokens that stand alone, then at the same tokens in text."""
    alone = trace(setup.target, ids[places][:, None], sites, lambda value: value[:, 0], batch_size=256)
    text = trace(setup.target, ids, sites, batch_size=32)
    values = [torch.cat([alone[site], text[site][places]]).float() for site in sites]
    return torch.stack(values).sum(0).numpy()


def probed(key: ProbeKey, inputs: Samples, texts: np.ndarray, seed: int, layer: int) -> Probe:
    """Fit a probe by cross-validation over texts, and with labels that are shuffled within each text.

    Args:
        key: What is asked; of neurons the best one is chosen.
        inputs: First tokens, then the same tokens in text.
        texts: The text of each.
        seed: Seed of the shuffled labels.
        layer: The layer.
    """
    first = labels(inputs)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    best = None
    if key is not ProbeKey.PLANE:
        model.steps.insert(0, ("best", SelectKBest(k=1)))
        best = str(Neuron(layer, None, int(SelectKBest(k=1).fit(inputs, first).scores_.argmax())))
    folds = GroupKFold(FOLDS)
    areas = cross_val_score(model, inputs, first, groups=texts, cv=folds, scoring="roc_auc")
    shuffle = draws(seed, "labels of first and later tokens").initial_seed() % 2**32
    _, chance, _ = permutation_test_score(
        model, inputs, first, groups=texts, cv=folds, scoring="roc_auc", n_permutations=FOLDS, random_state=shuffle
    )
    return Probe(key=key, neuron=best, auroc=Mean(float(areas.mean())), shuffled=Mean(float(chance.mean())))


def given(values: Float[np.ndarray, " sample"], texts: np.ndarray, seed: int, neuron: Neuron) -> Probe:
    """Return how well the gate of one neuron separates all tokens, in the better of both directions."""
    first = labels(values)
    generator = np.random.default_rng(draws(seed, "labels of a given neuron").initial_seed())
    shuffled: list[float] = []
    for _ in range(FOLDS):
        drawn = first.copy()
        for text in np.unique(texts):
            drawn[texts == text] = generator.permutation(drawn[texts == text])
        shuffled.append(better(drawn, values))
    area = Mean(better(first, values))
    return Probe(key=ProbeKey.GIVEN, neuron=str(neuron), auroc=area, shuffled=Mean(float(np.mean(shuffled))))


def labels(inputs: np.ndarray) -> Bool[np.ndarray, " sample"]:
    """Return which samples are first tokens: the first half."""
    return np.repeat([True, False], len(inputs) // 2)


def better(first: Bool[np.ndarray, " sample"], values: Float[np.ndarray, " sample"]) -> float:
    """Return the AUROC of a number, in the direction in which it is larger."""
    area = float(roc_auc_score(first, values))
    return max(area, 1 - area)
