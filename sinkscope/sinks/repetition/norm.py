"""Norm of repeated tokens at the sink layer, also with sink neurons zeroed (Yona et al. 2025, Fig. 2, 3, 7, 9).

Of every token of the vocabulary, it says after how many repetitions the token becomes a sink (Fig. 6).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.hooks.edit.base import Intervention
from sinkscope.measure import Setup
from sinkscope.models.draws import seed_of
from sinkscope.results.claims import Outcome
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.repetitions import repeat_until_half, repeats_until_half
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.removal.search import random_neurons
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import Sweep, norms_at_sink
from sinkscope.sinks.tokens import TokenRows, prefix_of, repeated, sample_tokens, vocabulary

TOKENS = 64  # tokens of a vocabulary in one chunk
COMPARED = 16  # of these whose copies are compared with one copy and with other tokens


def read_norms(sweep: Sweep, made: MadeSpike, ablate: bool) -> Repeat:
    """The norms of repeated tokens at the layer of a spike.

    Args:
        sweep: What is repeated.
        made: The spike.
        ablate: Read them also with the neurons that make the spike zeroed, and with as many random ones.
    """
    setup, scan = sweep.setup, made.scan
    spike, neurons = scan.spike_norm[scan.layer], Neurons()
    edits: dict[str, Intervention | None] = {"intact": None}
    if ablate and made.neurons:
        neurons = tuple(neuron.address for neuron in made.neurons)
        random = random_neurons(setup.target, neurons, setup.seed)
        edits |= {"sink neurons zeroed": Ablate(sites=neurons), "random neurons zeroed": Ablate(sites=random)}

    def shares(ids: TokenRows) -> Float[Tensor, "row n"]:
        return norms_at_sink(scan, ids)[:, sweep.before :] / spike

    outcome = Outcome("norm", (scan.layer,), gives=f"reach {{}} of the norm at {made.spike.place.words}")
    curves = sweep.curves(outcome, shares, partial(repeats_until_half, spike=1.0), edits, neurons)
    return Repeat(read="norm", **curves)


def read_vocabulary(setup: Setup, made: MadeSpike, limit: int, sample: int | None, resume: Resume) -> Repeat:
    """The repetitions that every token needs at the layer of a spike."""
    target, scan = setup.target, made.scan
    ids = vocabulary(target, None)
    if sample is not None:
        ids = sample_tokens(ids, sample, setup.seed)
    hold_layers(target, scan.layer)

    def work(tokens: list[int]) -> Columns:
        needed = repeat_until_half(scan, tokens, prefix_of(setup, tokens), limit)
        return {"repeats": [token.repeats for token in needed.tokens]}

    settings = {"layer": scan.layer, "max_repeats": limit, "place": made.spike.place.words}
    columns = in_chunks(setup, work, ids, resume, what="vocabulary", size=TOKENS, **settings)
    repeats = np.array(columns["repeats"], dtype=float)
    some = sample_tokens(ids, COMPARED, seed_of(setup.seed, "tokens to compare"))
    result = read_norms(Sweep(setup, 1, repeated(prefix_of(setup, some), some, limit)), made, ablate=False)
    every = {"ids": tuple(ids), "tokens": token_texts(target, ids), "repeats": repeats[None]}
    return replace(result, at=None, values=None, **every)
