"""Repeated tokens projected on each spike, also without the neurons that it needs (Yona et al. 2025, Fig. 2, 3, 7, 9).

Of every token of the vocabulary, it says after how many repetitions the token reaches half of the first token (Fig. 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.measure import Setup
from sinkscope.results.claims import Claim, Outcome
from sinkscope.sinks.chunks import Resume, TableColumns, hold_layers, in_chunks, token_texts
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import Sweep, claim_of_cases, claim_of_copies
from sinkscope.sinks.spikes.controls import random_neurons
from sinkscope.sinks.spikes.copies import along_spikes, copies_of, half_reached
from sinkscope.sinks.spikes.sentences import run
from sinkscope.sinks.spikes.spike import Measured, Spike
from sinkscope.sinks.tokens import TokenRows, prefix_of, sample_tokens, vocabulary

TOKENS = 64  # tokens of a vocabulary in one chunk


def read_norms(sweep: Sweep, spikes: Sequence[Measured], ablate: bool) -> Repeat:
    """Project repeated tokens on the spikes of the first token.

    Args:
        sweep: What is repeated.
        spikes: The spikes.
        ablate: Read them also with the neurons zeroed that each spike needs, and with as many random ones.
    """
    setup, target, claims = sweep.setup, sweep.setup.target, list[Claim]()
    directions, names = [one.spike for one in spikes], [name_of(one.spike) for one in spikes]

    def read(rows: TokenRows, of: Sequence[Spike]) -> Float[Tensor, "spike token n"]:
        return torch.stack(along_spikes(target, of, rows))[:, :, sweep.before :]

    copies, *contrasts = (read(rows, directions) for rows in (sweep.rows, *sweep.contrasts()))
    for number, spike in enumerate(directions):
        gives = f"reach {{}} of the spike of {names[number]} at the first token"
        last = torch.stack([each[number, :, -1] for each in (copies, *contrasts)])
        claims.append(claim_of_copies(sweep.count, Outcome("norm", (spike.peak,), gives=gives), last))
    conditions, values = list(names), list(copies)
    for name, one, intact in zip(names, spikes, copies, strict=True):
        if not ablate or not one.needed_neurons:
            continue
        random = random_neurons(target, one.needed_neurons, setup.seed)
        for words, neurons in {"needed": one.needed_neurons, "random": random}.items():
            with Ablate(sites=neurons).on(target):
                values.append(read(sweep.rows, [one.spike])[0])
            conditions.append(f"{name}, {words} neurons zeroed")
            setup.progress("repetitions", len(values), 3 * len(spikes))
        converging = torch.tensor([half_reached(row) is not None for row in intact])
        if bool(converging.any()):
            last = torch.stack([values[-2], intact, values[-1]])[:, converging, -1]
            outcome = Outcome("norm", (one.spike.peak,), effect="the copies' projection at {}")
            claims.insert(0, claim_of_cases(one.needed_neurons, claims[-1].place, outcome, last / last[1]))
    return Repeat(
        quantity="norm",
        claims=tuple(claims),
        conditions=tuple(conditions),
        repeats=np.array([[half_reached(row) or np.nan for row in rows] for rows in values], dtype=float),
        values=torch.stack(values)[:, :, sweep.counts - 1].numpy(),
        **sweep.fields(),
    )


def name_of(spike: Spike) -> str:
    """Name a spike of the first token by its layers."""
    return f"layer{run(spike.first, spike.last)}"


def read_vocabulary(setup: Setup, spikes: Sequence[Measured], limit: int, sample: int | None, resume: Resume) -> Repeat:
    """Find the number of repetitions with which every token reaches half of the first token in each spike."""
    target, directions = setup.target, [one.spike for one in spikes]
    ids = vocabulary(target, None)
    if sample is not None:
        ids = sample_tokens(ids, sample, setup.seed)
    hold_layers(target, max(spike.peak for spike in directions))

    def work(tokens: list[int]) -> TableColumns:
        each = copies_of(target, directions, tokens, prefix_of(setup, tokens), limit)
        return {name_of(spike): [one.half for one in found] for spike, found in zip(directions, each, strict=True)}

    names = [name_of(spike) for spike in directions]
    columns = in_chunks(setup, work, ids, resume, what="vocabulary", size=TOKENS, layers=names, max_repeats=limit)
    repeats = np.array([columns[name] for name in names], dtype=float)
    return Repeat(
        quantity="norm", conditions=tuple(names), ids=tuple(ids), tokens=token_texts(target, ids), repeats=repeats
    )
