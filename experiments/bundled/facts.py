"""Measure one training run and keep the answer beside it: everything the model card states comes from here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from experiments.bundled import corpus
from experiments.bundled.training import Settings, Trainer
from experiments.record import Row
from sinkscope.models.text import typical_text
from sinkscope.opening.load import target_of
from sinkscope.sinks.spikes.survey import Survey, read_survey
from sinkscope.sinks.thresholds import READS

SINK_LAYER = 1


def surveyed(model: LlamaForCausalLM, ids: np.ndarray) -> Survey:
    """Norms and attention of texts of equal length."""
    return read_survey(target_of(model), torch.from_numpy(ids))


def norm_ratios(survey: Survey) -> list[float]:
    """The norm of the first token, mean over texts, over the median of all others, per layer."""
    norms = survey.norms.numpy()
    typical = np.quantile(norms[:, :, 1:].reshape(len(norms), -1), 0.5, axis=1)
    return (norms[:, :, 0].mean(1) / typical).tolist()


def sink_heads(survey: Survey) -> torch.Tensor:
    """The heads whose mean first-token attention is above 0.3, `[layer head]`."""
    return survey.attention[..., 0].mean(-1) > READS


@torch.no_grad()
def position_losses(model: LlamaForCausalLM, windows: np.ndarray) -> np.ndarray:
    """Mean loss of the predictions made at each position but the last."""
    sums = np.zeros(windows.shape[1] - 1)
    for window in windows:
        ids = torch.from_numpy(window)
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        sums += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").numpy()
    return sums / len(windows)


def loss_by_position(model: LlamaForCausalLM, windows: np.ndarray, edges: tuple[int, ...]) -> dict[str, float]:
    """Mean loss of the predictions made at positions between the edges."""
    losses = position_losses(model, windows)
    return {f"{a}-{b}": float(losses[a:b].mean()) for a, b in pairwise((1, *edges))}


def fixed_weights(run: Path, settings: Settings, model: LlamaForCausalLM) -> Row:
    """How many weights were held fixed, and whether the trained model still has exactly the planted values there."""
    tokens = np.load(run / "tokens.npz")
    texts = {kind: tokens[kind] for kind in tokens.files if not kind.startswith("valid")}
    frozen = Trainer(settings, texts, run).frozen
    assert frozen is not None
    trained = dict(model.named_parameters())
    exact = all(torch.equal(trained[name][mask], frozen.values[name][mask]) for name, mask in frozen.masks.items())
    return {"count": sum(int(mask.sum()) for mask in frozen.masks.values()), "unchanged": exact}


def typical_windows(tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    ids = np.asarray(tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"])
    return corpus.windows(ids, length=length, bos_id=tokenizer.bos_token_id)


def measure_run(run: Path) -> Row:
    """All measurements of one finished run, in float32."""
    model = LlamaForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run)
    settings = Settings(**json.loads((run / "training.json").read_text())["settings"])
    tokens = np.load(run / "tokens.npz")
    valid = tokens["valid_python"]
    bos = tokenizer.bos_token_id
    texts = typical_windows(tokenizer, 256)
    short = typical_windows(tokenizer, 64)[:100]
    survey = surveyed(model, texts)
    heads = sink_heads(survey)
    facts: Row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": {"settings": vars(settings)},
        "corpus": json.loads((run / "corpus.json").read_text()),
        "valid_loss": float(position_losses(model, corpus.windows(valid, length=512, bos_id=bos))[1:].mean()),
        "loss_by_position": loss_by_position(
            model, corpus.windows(valid, length=settings.context, bos_id=bos), (512, 1024, 2048, settings.context - 1)
        ),
        "norms": {"ratio": norm_ratios(survey)},
        "head_share": float(heads[SINK_LAYER + 1 :].float().mean()),
        "heads_per_layer": heads.sum(-1).tolist(),
        "sink_rate": {
            "eps": READS,
            "length": 64,
            "samples": len(short),
            "value": float(surveyed(model, short).sink_rate.mean()),
        },
    }
    if settings.planted:
        facts |= _planted_facts(run, settings, model, texts)
    return facts


def _planted_facts(run: Path, settings: Settings, model: LlamaForCausalLM, texts: np.ndarray) -> Row:
    groups = np.asarray(json.loads((run / "circuit.json").read_text())["group_of_token"])
    bare = texts[:, 1:]
    grouped = groups[bare[:, 0]] >= 0
    without_bos: Row = {}
    for name, rows in (("first_in_a_group", bare[grouped]), ("first_in_no_group", bare[~grouped])):
        without_bos[name] = norm_ratios(surveyed(model, rows)) if len(rows) else None
    return {"fixed": fixed_weights(run, settings, model), "without_bos": without_bos}
