"""Whether a plane, or one neuron, tells first tokens from later ones after an attention layer (Yona et al., Fig. 4).

    python -m experiments.repeated_token.separate [--model NAME|FOLDER] [--name separate]

Each token is read once in text, at position 8 or later, and once alone, without BOS. A fifth of the texts at a time is
held out, with their tokens alone. The control has labels that are shuffled within each text.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float, Int
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_score, permutation_test_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from experiments.drawn import draw
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.trace import trace
from sinkscope.measure.setup import PIECE, Setup
from sinkscope.models.draws import draws
from sinkscope.models.inputs import check_site
from sinkscope.models.text import text_rows
from sinkscope.results.style import figure_of

CLEAR = 8  # later tokens begin here: without BOS, the first few of a text can be marked like the first one
TOKENS = 1024  # tokens at most
FOLDS = 5
PIECES = 128  # of typical text, 64 tokens each


def measure(setup: Setup, layer: int, pieces: int) -> list[Row]:
    """Fit the plane, and the best neuron by each factor of the MLP; a mixture of experts has no neurons here.

    Raises:
        SinkscopeError: The layer is not in the model, or the text is too short.
    """
    check_site(setup.target, layer)
    ids = text_rows(setup.tokenizer, setup.text, pieces, PIECE, setup.bos)
    if len(ids) < FOLDS:
        raise SinkscopeError(f"there are {len(ids)} pieces of text; expected {FOLDS} or more")
    generator = np.random.default_rng(draws(setup.seed, "places of later tokens").initial_seed())
    order = generator.permutation(len(ids) * (PIECE - CLEAR))
    _, chosen = np.unique(ids[:, CLEAR:].flatten()[order], return_index=True)  # one place of each token
    row, pos = np.divmod(order[generator.permutation(chosen)[:TOKENS]], PIECE - CLEAR)
    places = row, pos + CLEAR
    values = {"plane": samples(setup, ids, places, f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.hook_attn_out")}
    for name, site in (("neuron", "mlp.hook_pre"), ("up factor", "mlp.hook_pre_linear")):
        with suppress(UnsupportedError):
            values[name] = samples(setup, ids, places, f"blocks.{layer}.{site}")
    return [probe(name, inputs, np.tile(row, 2), setup.seed) for name, inputs in values.items()]


def samples(
    setup: Setup, ids: Int[Tensor, "row pos"], places: tuple[np.ndarray, np.ndarray], *sites: str
) -> Float[np.ndarray, "sample d"]:
    """Return the sum of some sites at tokens that stand alone, then at the same tokens in text."""
    alone = trace(setup.target, ids[places][:, None], sites, lambda value: value[:, 0], batch_size=256)
    text = trace(setup.target, ids, sites, batch_size=32)
    parts = [torch.cat([alone[site], text[site][places]]).float() for site in sites]
    return torch.stack(parts).sum(0).numpy()


def probe(name: str, inputs: Float[np.ndarray, "sample d"], texts: np.ndarray, seed: int) -> Row:
    """Fit a probe by cross-validation over texts, and with labels that are shuffled within each text.

    Returns:
        The neuron that separates all texts best; the area under the ROC curve on what was held out, mean over folds;
        and the same with shuffled labels.
    """
    first = np.repeat([True, False], len(inputs) // 2)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    neuron = None
    if name != "plane":
        model.steps.insert(0, ("best", SelectKBest(k=1)))
        neuron = int(SelectKBest(k=1).fit(inputs, first).scores_.argmax())
    folds = GroupKFold(FOLDS)
    draw = draws(seed, "labels of first and later tokens").initial_seed() % 2**32
    areas = cross_val_score(model, inputs, first, groups=texts, cv=folds, scoring="roc_auc")
    _, chance, _ = permutation_test_score(
        model, inputs, first, groups=texts, cv=folds, scoring="roc_auc", n_permutations=FOLDS, random_state=draw
    )
    return {
        "probe": name,
        "neuron": neuron,
        "auroc": float(areas.mean()),
        "shuffled": float(chance.mean()),
    }


def figure(data: Row) -> Any:
    """Draw how well each probe separates, beside shuffled labels."""
    fig = px.scatter(data["result"]["probes"], x="probe", y=["auroc", "shuffled"])
    return figure_of(fig, None, "How well each probe separates first tokens from later ones", width=900, height=460)


def main(*, model: str | None = None, name: str = "separate", out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
        name: Name of the files.
    """
    setup = Setup.open(model)
    settings = {"model": setup.target.name, "layer": 0, "pieces": PIECES}
    draw(write_record(out / f"{name}.json", "separate", {"probes": measure(setup, 0, PIECES)}, settings), figure)


if __name__ == "__main__":
    run(main)
