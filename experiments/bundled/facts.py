"""Measure one training run and keep the answer beside it: everything the model card states comes from here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from experiments.bundled import corpus, measure
from experiments.bundled.training import Settings, Trainer
from experiments.record import Row
from sinkscope.models.text import typical_text

SINK_LAYER = 1


def training_facts(run: Path) -> Row:
    """Settings and time of a run, from its log (a resumed run has several stretches of seconds)."""
    seconds = []
    for line in (run / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "seconds" in record:
            seconds.append(record["seconds"])
    ends = [a for a, b in pairwise(seconds) if b < a] + seconds[-1:]
    return {
        "settings": json.loads((run / "training.json").read_text())["settings"],
        "seconds": round(sum(ends)),
    }


def fixed_weights(run: Path, settings: Settings, model: LlamaForCausalLM) -> Row:
    """How many weights were held fixed, and whether the trained model still has exactly the planted values there."""
    tokens = np.load(run / "tokens.npz")
    texts = {}
    for kind in tokens.files:
        if not kind.startswith("valid"):
            texts[kind] = tokens[kind]
    frozen = Trainer(settings, texts, run).frozen
    assert frozen is not None
    trained = dict(model.named_parameters())
    exact = all(torch.equal(trained[name][mask], frozen.values[name][mask]) for name, mask in frozen.masks.items())
    count = 0
    for mask in frozen.masks.values():
        count += int(mask.sum())
    return {"count": count, "unchanged": exact}


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
    about = json.loads((run / "corpus.json").read_text())
    bos = tokenizer.bos_token_id
    texts = typical_windows(tokenizer, 256)
    short = typical_windows(tokenizer, 64)[:100]
    heads = measure.sink_heads(model, texts)
    facts: Row = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": training_facts(run),
        "corpus": about,
        "valid_loss": measure.validation_loss(model, corpus.windows(valid, length=512, bos_id=bos)),
        "loss_by_position": measure.loss_by_position(
            model, corpus.windows(valid, length=settings.context, bos_id=bos), (512, 1024, 2048, settings.context - 1)
        ),
        "norms": measure.norms_by_layer(model, texts),
        "head_share": float(heads[SINK_LAYER + 1 :].mean()),
        "heads_per_layer": heads.sum(-1).tolist(),
        "sink_rate": {
            "eps": measure.EPS,
            "length": 64,
            "samples": len(short),
            "value": measure.sink_rate(model, short),
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
        without_bos[name] = measure.norms_by_layer(model, rows)["ratio"] if len(rows) else None
    return {"fixed": fixed_weights(run, settings, model), "without_bos": without_bos}
