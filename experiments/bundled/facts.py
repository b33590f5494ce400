"""Measure one training run and keep the answer beside it: everything the model card states comes from here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from experiments.bundled import corpus, entry, measure
from experiments.bundled.training import Settings, Trainer
from experiments.record import Row

TYPICAL = Path(__file__).resolve().parents[2] / "sinkscope" / "models" / "text" / "typical.txt"


def read_log(run: Path) -> list[Row]:
    rows = []
    for line in (run / "log.jsonl").read_text().splitlines():
        rows.append(json.loads(line))
    return rows


def training_facts(run: Path) -> Row:
    """Settings and time of a run, from its log (a resumed run has several stretches of seconds)."""
    log = read_log(run)
    seconds = []
    for record in log:
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
    ids = np.asarray(
        tokenizer(TYPICAL.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    )
    return corpus.windows(ids, length=length, bos_id=tokenizer.bos_token_id)


def measure_run(run: Path, *, loops: bool = True) -> Row:
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
    layer = 1
    count = 0
    for p in model.parameters():
        count += p.numel()
    facts: Row = {
        "parameters": count,
        "training": training_facts(run),
        "corpus": about,
        "valid_loss": measure.validation_loss(model, corpus.windows(valid, length=512, bos_id=bos)),
        "loss_by_position": measure.loss_by_position(
            model, corpus.windows(valid, length=settings.context, bos_id=bos), (512, 1024, 2048, settings.context - 1)
        ),
        "norms": measure.norms_by_layer(model, texts),
        "head_share": measure.head_share(model, texts, after=layer),
        "heads_per_layer": _heads_per_layer(model, texts),
        "sink_rate": {"eps": 0.3, "length": 64, "samples": len(short), "value": measure.sink_rate(model, short)},
    }
    if settings.planted:
        facts |= _planted_facts(run, settings, model, texts)
    facts["conditions"] = entry.conditions(model, tokenizer, tokens["valid_stories"], loops=loops)
    return facts


def _heads_per_layer(model: LlamaForCausalLM, texts: np.ndarray) -> list[int]:
    mean = measure.first_token_attention(model, texts, skip_first=True).mean(0)
    rows = []
    for n in (mean > 0.3).sum(-1):
        rows.append(int(n))
    return rows


def _planted_facts(run: Path, settings: Settings, model: LlamaForCausalLM, texts: np.ndarray) -> Row:
    truth = json.loads((run / "circuit.json").read_text())
    groups = np.asarray(truth["group_of_token"])
    bare = texts[:, 1:]
    grouped = bare[groups[bare[:, 0]] >= 0]
    loose = bare[groups[bare[:, 0]] < 0]
    first_in_a_group = None
    if len(grouped):
        first_in_a_group = measure.norms_by_layer(model, grouped)["ratio"]
    first_in_no_group = None
    if len(loose):
        first_in_no_group = measure.norms_by_layer(model, loose)["ratio"]
    return {
        "fixed": fixed_weights(run, settings, model),
        "without_bos": {
            "first_in_a_group": first_in_a_group,
            "first_in_no_group": first_in_no_group,
        },
    }
