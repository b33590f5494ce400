"""Read two real models with plain torch hooks: what the pages of the papers and of the commands hold results against.

    python -m experiments.real.readings --real FOLDER --out figures/real_readings.json

Nothing here uses a measurement of sinkscope; `tests/real/plain.py` has the hooks. Texts are of four kinds (prose,
dialogue, code, a table), from what ships with Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from experiments.real.models import MODELS, opened
from experiments.record import Row, earlier, write_record
from experiments.script import run as run_script
from sinkscope.measure.margin import margin_of
from tests.real import plain, texts

WORDS = ("poem", "company", "cat", "dog", "the", "as", "of", "and", "time", "book")
SINK, HALF, LEAST, MOST, ETA = 0.3, 0.5, 0.1, 0.9, 0.1
COPIES, PIECE, LONG = 1024, 64, 256
REPEATED = ("poem", "company", "the")
ATTENDED, COUNTS = 400, (50, 400, COPIES)  # copies whose attention is read, and after which one more is likely


def main(*, real: Path, out: Path, parts: Sequence[str] = (), again: bool = False) -> None:
    """Read the models, and write what was read after each part.

    Args:
        real: The folder with the GGUF files.
        out: The file of the readings.
        parts: What is read again; by default what the file does not have.
        again: Whether everything is read again.
    """
    torch.set_num_threads(1)
    for name in MODELS:
        model = opened(name, real)
        for part, read in PARTS.items():
            readings = earlier(out).get(name, {})
            if part in readings and part not in parts and not again:
                continue
            made = read(model, readings)
            everything = earlier(out)  # which may have grown meanwhile
            everything.setdefault(name, {})[part] = made
            write_record(out, "real-readings", everything, {"seed": 0})


def rows_of(model: Any, length: int, *, bos: bool = True) -> list[Tensor]:
    """The beginning of a text of each kind."""
    return [plain.ids_of(model.tokenizer, text(), length, bos=bos) for text in texts.KINDS.values()]


def spike(model: Any, _: Row) -> Row:
    """Norms at the first token, the layer whose MLP adds most, and its neurons."""
    ids = torch.cat(rows_of(model, PIECE))
    norms = plain.norms(model, ids)
    first, typical = norms[:, :, 0].mean(1), norms[:, :, 1:].flatten(1).median(1).values
    rise = first.diff(prepend=torch.zeros(1))
    layer = int(rise.argmax())
    peak = int((first / typical).argmax())
    written = plain.contributions(model, ids, layer)
    top = written.topk(4)
    return {
        "n_layers": len(first),
        "n_heads": model.config.num_attention_heads,
        "n_kv_heads": model.config.num_key_value_heads,
        "layer": layer,
        "peak": peak,
        "norm": float(first[layer]),
        "ratio": float(first[layer] / typical[layer]),
        "peak_ratio": float(first[peak] / typical[peak]),
        "neurons": top.indices.tolist(),
        "contributions": top.values.tolist(),
        "norms": first.tolist(),
        "typical": typical.tolist(),
    }


def attention(model: Any, _: Row) -> Row:
    """How many heads give the first token more than 0.3 of their attention, with and without BOS."""
    counts: Row = {}
    for name, bos in (("bos", True), ("no_bos", False)):
        received = [plain.attention_received(model, row) for row in rows_of(model, PIECE, bos=bos)]
        counts[f"heads_{name}"] = int((torch.stack(received).mean(0) > SINK).sum())
        counts[f"heads_{name}_by_text"] = [int((one > SINK).sum()) for one in received]
    return counts


def ablation(model: Any, readings: Row) -> Row:
    """What is left without the neurons that the spike needs, without each alone, and without as many random ones.

    Candidates are the two neurons that write most in the layer of the spike, and the one that writes most in each layer
    up to it, if that is a tenth of the norm. The needed neurons are the two of the layer if they write nine tenths of
    the norm, or else the two candidates whose removal alone leaves least.
    """
    layer, ids = readings["spike"]["layer"], torch.cat(rows_of(model, PIECE))
    sites = [(layer, neuron) for neuron in readings["spike"]["neurons"][:2]]
    for other in range(layer):
        written = plain.contributions(model, ids, other)
        if written.max() >= LEAST * readings["spike"]["norms"][other]:
            sites.append((other, int(written.argmax())))
    left: dict[plain.Site, float] = {}
    for site in sites:
        with plain.zeroed(model, [site]):
            left[site] = float(plain.norms(model, ids)[layer, :, 0].mean() / readings["spike"]["norm"])
    order = sorted(sites, key=lambda site: left[site])
    needed = order[:2]
    if sum(readings["spike"]["contributions"][:2]) >= MOST * readings["spike"]["norm"]:
        needed = sites[:2]
    random = random_sites(model, needed)
    found: Row = {"neurons": needed, "alone": [{"neuron": site, "left": left[site]} for site in order]}
    for name, chosen in {"intact": [], "needed": needed, "random": random}.items():
        with plain.zeroed(model, chosen):
            found[name] = state(model, layer)
    for name in ("needed", "random"):
        more = found[name]["nll"] - found["intact"]["nll"]
        found[name]["perplexity_ratio"] = float(torch.tensor(more).exp())
    return found


def state(model: Any, layer: int) -> Row:
    """The norm at the first token over the typical one, the heads that attend to it, and the loss, as the model is."""
    rows = rows_of(model, PIECE)
    norms = plain.norms(model, torch.cat(rows))[layer]
    received = torch.stack([plain.attention_received(model, row) for row in rows]).mean(0)
    return {
        "ratio": float(norms[:, 0].mean() / norms[:, 1:].median()),
        "heads": int((received > SINK).sum()),
        "later_heads": int((received[layer + 1 :] > SINK).sum()),
        "nll": fmean([float(plain.nll(model, row).mean()) for row in rows]),
    }


def mark(model: Any, readings: Row) -> Row:
    """How much of its activation the first needed neuron keeps with every head of layer 0 at its mean."""
    layer, neuron = readings["ablation"]["neurons"][0]
    ids = torch.cat(rows_of(model, PIECE))
    intact = plain.activations(model, ids, layer)[:, 0, neuron].mean()
    heads = range(model.config.num_attention_heads)
    with plain.heads_replaced(model, 0, heads, plain.heads_mean(model, ids, 0)):
        left = plain.activations(model, ids, layer)[:, 0, neuron].mean()
    return {"left_without_heads_of_layer_0": float(left / intact)}


def copies(model: Any, readings: Row) -> Row:
    """At which copy the norm is half of the first token's, and that of the last of 1,024, for each word."""
    layer = readings["spike"]["layer"]
    found: Row = {}
    for word in WORDS:
        ids = model.tokenizer(f" {word}", add_special_tokens=False).input_ids
        if len(ids) == 1:
            row = torch.tensor([[model.tokenizer.bos_token_id, *COPIES * ids]])
            share = plain.norms(model, row)[layer, 0]
            reached = (share[1:] >= HALF * share[0]).nonzero()
            found[word] = {
                "first": int(reached[0]) + 1 if len(reached) else None,
                "last": float(share[-1] / share[0]),
                "last_512": float(share[512] / share[0]),
            }
    return found


def random_sites(model: Any, sites: Iterable[plain.Site]) -> list[plain.Site]:
    """A random neuron of the layer of each."""
    draw = torch.Generator().manual_seed(0)
    return [(layer, int(torch.randint(model.config.intermediate_size, (), generator=draw))) for layer, _ in sites]


def token_of(model: Any, word: str) -> int:
    """The id of a word that is one token after a space."""
    (token,) = model.tokenizer(f" {word}", add_special_tokens=False).input_ids
    return token


def neutral_values(model: Any, sites: Iterable[plain.Site], rows: list[Tensor]) -> dict[plain.Site, float]:
    """The median of each neuron at later positions of texts."""
    values: dict[plain.Site, float] = {}
    for layer, neuron in sites:
        posts = torch.cat([plain.activations(model, row, layer)[0, 1:, neuron] for row in rows])
        values[layer, neuron] = float(posts.median())
    return values


def patch(model: Any, readings: Row) -> Row:
    """Perplexity and copies where the needed neurons hold their median of later positions, but at the first token.

    The last copy is also read where the linear factor of the neurons holds its value at the second token, as printed.
    """
    spike_layer, rows = readings["spike"]["layer"], rows_of(model, LONG)
    values = neutral_values(model, readings["ablation"]["neurons"], rows)
    intact = torch.stack([plain.nll(model, row)[0] for row in rows])
    with plain.held(model, values):
        patched = torch.stack([plain.nll(model, row)[0] for row in rows])
        row = torch.tensor([[model.tokenizer.bos_token_id, *400 * [token_of(model, "company")]]])
        norms = plain.norms(model, row)[spike_layer, 0]
    with plain.listing_1(model, list(values)):
        printed = plain.norms(model, row)[spike_layer, 0]
    change = (patched - intact).mean(1)
    return {
        "perplexity": float(intact.mean().exp()),
        "change": float(change.mean().expm1()),
        "margin": margin_of(change.numpy()),
        "copies_left": float(norms[-1] / norms[0]),
        "copies_left_as_printed": float(printed[-1] / printed[0]),
    }


def repetition_attention(model: Any, readings: Row) -> Row:
    """Attention that 64 tokens of prose give to copies before them, to the first token and to each other.

    Shares of all attention, mean over the heads of the layers after the spike's. The control has prose in place of the
    copies.
    """
    layer, bos = readings["spike"]["layer"], model.tokenizer.bos_token_id
    prose = plain.ids_of(model.tokenizer, texts.prose(), COPIES, bos=True)
    begin = 1 + ATTENDED
    found: Row = {}
    for word in REPEATED:
        token = token_of(model, word)
        row = torch.tensor([[bos, *ATTENDED * [token], *prose[0, 1 : PIECE + 1].tolist()]])
        found[word] = classes(model, row, layer, begin)
    found["control"] = classes(model, prose[:, : begin + PIECE], layer, begin)
    return found


def classes(model: Any, row: Tensor, layer: int, begin: int) -> Row:
    """Attention from positions from `begin` on to the first token, to those before `begin`, and to those from it on."""
    probs = plain.attentions(model, row)[layer + 1 :, 0, :, begin:]
    given = probs.mean((0, 1, 2))
    return {"first": float(given[0]), "copies": float(given[1:begin].sum()), "text": float(given[begin:].sum())}


@torch.no_grad()
def repetition_output(model: Any, readings: Row) -> Row:
    """The probability of one more copy of a repeated word.

    Without a patch, with the needed neurons at their median of later positions, and with as many random neurons at
    theirs.
    """
    rows = rows_of(model, LONG)
    needed = neutral_values(model, readings["ablation"]["neurons"], rows)
    drawn = neutral_values(model, random_sites(model, needed), rows)
    found: Row = {}
    for name, values in {"intact": {}, "patched": needed, "random": drawn}.items():
        with plain.held(model, values):
            for word in REPEATED:
                token = token_of(model, word)
                row = torch.tensor([[model.tokenizer.bos_token_id, *COPIES * [token]]])
                chances = plain.log_probs(model, row)[0, :, token].exp()
                said = {str(count): float(chances[count]) for count in COUNTS}
                found.setdefault(word, {})[name] = {"one_more": said}
    return found


def lines(model: Any, _: Row) -> Row:
    """Attention on the heaviest tenth of the lines, and how many lines two texts and two halves share."""
    half = LONG // 2
    mass, cells, inputs, halves = [], [], [], []
    chosen: list[list[set[int]]] = []
    for row in rows_of(model, LONG):
        of_text: list[set[int]] = []
        for probs in plain.attentions(model, row):
            for head in probs[0]:
                carried, covered = plain.lines_mass(head, ETA)
                mass.append(carried)
                cells.append(covered)
                of_text.append(plain.heaviest_lines(head, ETA))
                first, second = plain.heaviest_lines(head[:half], ETA), plain.heaviest_lines(head[half:], ETA, half)
                halves.append(len(first & second) / len(second))
        chosen.append(of_text)
    for one, text in enumerate(chosen):
        for other in chosen[one + 1 :]:
            for here, there in zip(text, other, strict=True):
                inputs.append(len(here & there) / len(here | there))
    return {"mass": fmean(mass), "cells": fmean(cells), "inputs": fmean(inputs), "halves": fmean(halves)}


READS = (spike, attention, ablation, mark, copies, patch, repetition_attention, repetition_output, lines)
PARTS = {read.__name__: read for read in READS}


if __name__ == "__main__":
    run_script(main)
