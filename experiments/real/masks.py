"""What sinks do to a sparse autoencoder, a probe and a steering vector on a real model, and what the mask changes.

    pip install sae-lens "transformer-lens<4"      # in an environment of its own
    python -m experiments.real.masks --real FOLDER [--out figures/real_masks.json]

Texts of prose, dialogue, code and tables, 64 tokens with BOS, are read at one layer inside the largest spike.
Everything is fitted on half of the texts: with all positions, without sinks (`sink_mask` of this site), and without
the dimensions of spikes (`sink_dims`) but with all positions. It is judged at ordinary positions of the other half.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import sinkscope as ss
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.measure.margin import margin_of
from sinkscope.opening.load import load
from tests.real import texts

LAYERS = {"smollm2-135m": 14, "gemma3-270m": 9}
"""A layer inside the largest spike."""
LENGTH = 64  # tokens of a text
FEATURES, STEPS, BATCH, SEEDS = 512, 300, 256, 3
Activations = Float[Tensor, "token d_model"]


def texts_of(tokenizer: Any) -> Int[Tensor, "text pos"]:
    """Texts of four kinds, which take turns, BOS before each."""
    kinds: list[list[int]] = []
    for kind in texts.KINDS.values():
        kinds.append(tokenizer(kind(), add_special_tokens=False, verbose=False)["input_ids"])
    each = min(map(len, kinds)) // (LENGTH - 1)
    cut = [torch.tensor(ids[: each * (LENGTH - 1)]).reshape(each, LENGTH - 1) for ids in kinds]
    rows = torch.stack(cut, 1).flatten(0, 1)
    return torch.cat([torch.full((len(rows), 1), tokenizer.bos_token_id), rows], 1)


def first_component(activations: Activations) -> float:
    """Share of the variance along the first principal component."""
    squares = torch.linalg.svdvals(activations - activations.mean(0)).square()
    return float(squares[0] / squares.sum())


def batches(activations: Activations, seed: int) -> Iterator[Activations]:
    """Activations in random order, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield activations[torch.randint(len(activations), (BATCH,), generator=generator)]


def unexplained(activations: Activations, ordinary: Activations, seed: int) -> float:
    """Share of the variance of other activations that an autoencoder trained on these leaves."""
    sae_lens = import_module("sae_lens")  # no other script needs it

    torch.manual_seed(seed)
    size = activations.norm(dim=1).mean() / activations.shape[1] ** 0.5  # as SAELens' expected_average_only_in
    shape = {"d_in": activations.shape[1], "d_sae": FEATURES, "l1_coefficient": 0.1}
    sae = sae_lens.StandardTrainingSAE(sae_lens.StandardTrainingSAEConfig(**shape))
    logger = sae_lens.LoggingConfig(log_to_wandb=False)
    settings = {"train_batch_size_samples": BATCH, "lr": 1e-3, "lr_end": 1e-3, "logger": logger}
    config = import_module("sae_lens.config").SAETrainerConfig(BATCH * STEPS, **settings)
    sae_lens.SAETrainer(cfg=config, sae=sae, data_provider=batches(activations / size, seed)).fit()
    with torch.no_grad():
        left = (sae(ordinary / size) * size - ordinary).square().sum()
    return float(left / (ordinary - ordinary.mean(0)).square().sum())


def accuracy(activations: Activations, labels: Bool[Tensor, " token"], held: Activations, right: Any) -> float:
    """Share of other tokens of which a probe says rightly whether they begin a word."""
    with warnings.catch_warnings(category=ConvergenceWarning, action="ignore"):
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(activations, labels)
    return float(probe.score(held, right))


def steering(resid: Float[Tensor, "text pos d_model"], keep: Bool[Tensor, "text pos"]) -> Tensor:
    """The difference of the means of short and of long texts, which a steering vector should not contain."""
    half = len(resid) // 2
    short, long = resid[:half, : LENGTH // 4], resid[half:]
    return short[keep[:half, : LENGTH // 4]].mean(0) - long[keep[half:]].mean(0)


def measured(file: Path) -> Row:
    """All numbers of one model."""
    model: Any = load(str(file))
    layer = LAYERS[file.stem]
    rows = texts_of(model.tokenizer)
    site = f"blocks.{layer}.hook_resid_post"
    anywhere = ss.sink_mask(model, rows)
    sinks, dims = ss.sink_mask(model, rows, site=site), list(ss.sink_dims(model))
    resid = torch.cat([ss.trace(model, part, [site])[site] for part in rows.split(32)]).float()
    words = model.tokenizer.convert_ids_to_tokens(range(len(model.tokenizer)))
    begins = torch.tensor([word.startswith(("Ġ", "▁")) for word in words])[rows]
    half = len(rows) // 2
    ordinary, right = resid[half:][~sinks[half:]], begins[half:][~sinks[half:]]
    without_dims, held_without_dims = resid.clone(), ordinary.clone()
    without_dims[..., dims] = 0
    held_without_dims[..., dims] = 0
    everywhere = torch.ones_like(sinks)
    kinds = {
        "all positions": (resid, everywhere, ordinary),
        "without sinks": (resid, ~sinks, ordinary),
        "without dimensions": (without_dims, everywhere, held_without_dims),
    }
    fitted: Row = {}
    for name, (values, keep, held) in kinds.items():
        train, labels = values[:half][keep[:half]], begins[:half][keep[:half]]
        left = np.array([unexplained(train, held, seed) for seed in range(SEEDS)])
        vector = steering(values, keep)
        fitted[name] = {
            "norm": float(train.norm(dim=1).mean()),
            "first_ratio": float(values[:, 0].norm(dim=1).median() / held.norm(dim=1).median()),
            "first_component": first_component(train),
            "unexplained": float(left.mean()),
            "unexplained_margin": margin_of(left),
            "accuracy": accuracy(train, labels, held, right),
            "vector": float(vector.norm()),
            "vector_in_dims": float(vector[dims].norm() / vector.norm()),
        }
    norms = resid.norm(dim=-1)
    is_ordinary = norms < 3 * norms[:, 1:].median(1, keepdim=True).values
    return {
        "layer": layer,
        "texts": len(rows),
        "dims": dims,
        "sinks": int(sinks.sum()),
        "of": sinks.numel(),
        "ordinary_of_sinks": int((sinks & is_ordinary).sum()),
        "anywhere": int(anywhere.sum()),
        "ordinary_of_anywhere": int((anywhere & is_ordinary).sum()),
        "beyond_first": int(sinks[:, 1:].sum()),
        "fitted": fitted,
    }


def main(*, real: Path, out: Path = Path("figures/real_masks.json")) -> None:
    """Make what the module describes.

    Args:
        real: Folder of the files of real models.
        out: The JSON.
    """
    result: Row = {}
    for file in sorted(real.glob("*.gguf")):
        result[file.stem.split("-")[0]] = measured(file)
    settings = {"length": LENGTH, "features": FEATURES, "steps": STEPS, "batch": BATCH, "seeds": SEEDS}
    write_record(out, "real-masks", result, settings)


if __name__ == "__main__":
    run(main)
