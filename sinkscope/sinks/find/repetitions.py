"""After how many repetitions a token becomes a sink, and what makes its spike then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.hooks import Hook, on_input
from sinkscope.models.target import NOT_READ, Entering, LayerInput, Target
from sinkscope.results.claims import Outcome, Search
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.left import INTACT, by_chance, claim_of
from sinkscope.sinks.find.records import RepeatedToken, RepeatsNeeded, RepetitionSpike
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.removal.effects import BATCH_ELEMENTS, Trial, side_by_side
from sinkscope.sinks.removal.search import random_neurons
from sinkscope.sinks.repetition.sweep import beside_copies, claim_of_copies, norms_at, norms_at_sink
from sinkscope.sinks.tokens import repeated

RANDOM = 3  # sets of random neurons beside those that make the spike
TIMES = 1.25  # copies that are looked at, of those that are needed
FIRST_LENGTH = 128  # repetitions of the first pass; their number doubles


def repeats_until_half(norms: Float[Tensor, " repetition"], spike: float) -> int | None:
    """The first number of repetitions whose norm reaches half of the spike's, as does one more; None if it never does.

    A spike at one position of any text is not made by repetition.
    """
    reaches = norms >= spike / 2
    reaches[1:-1] &= reaches[2:].clone()
    reached = reaches.nonzero().flatten()
    if not len(reached):
        return None
    return int(reached[0]) + 1


@dataclass(frozen=True)
class Entered:
    """What entered a layer in the first sequence of a pass over copies; a later pass over that sequence begins there.

    Attributes:
        start: What entered the layer in typical text. None: no pass may begin there.
        of: What entered it in the sequence of a token.
    """

    start: LayerInput | None
    of: dict[int, LayerInput] = field(default_factory=dict)

    def hooks(self, target: Target, token: int) -> list[Hook]:
        """The hook that takes down what enters the layer in a pass whose first sequence repeats a token."""
        start = self.start
        if start is None:
            return []
        self.of.pop(token, None)  # of a shorter pass

        def take(hidden: Tensor) -> None:
            self.of.setdefault(token, replace(start, hidden=hidden[:1].detach().clone()))

        return [(target.layers[start.layer], "first", on_input(take))]

    def before(self, token: int, length: int) -> Entering:
        """Where a pass over so many tokens of a token's sequence may begin."""
        start = self.of.get(token)
        if start is None or start.hidden.shape[1] < length:
            return NOT_READ
        return Entering({start.layer: start}).part(slice(None), length)


NOWHERE = Entered(None)


@torch.no_grad()
def repeat_until_half(
    scan: LayerScan,
    tokens: Sequence[int],
    before: Sequence[int],
    limit: int,
    progress: Progress = silent,
    entered: Entered = NOWHERE,
) -> RepeatsNeeded:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Reading layers from disk costs more than long rows, so a streamed model gets all repetitions in the second pass.

    Args:
        scan: The model and its sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        before: The first token of each row (BOS, or a token that stands in for it).
        limit: Largest n.
        progress: Called after each pass.
        entered: Gets what enters a layer, up to the sink layer.

    Returns:
        For each token, the first n whose norm reaches half of the spike's.
    """
    target, length = scan.target, min(FIRST_LENGTH, limit)
    repeats: list[int | None] = [None] * len(tokens)
    rows = repeated(before, tokens, limit)
    while True:
        waiting = [number for number, count in enumerate(repeats) if count is None]
        with target.hooks(*entered.hooks(target, tokens[waiting[0]])):
            size = max(1, BATCH_ELEMENTS // ((length + 1) * target.d_mlp))
            norms = norms_at_sink(scan, rows[waiting, : length + 1], size=size)
        for number, row in zip(waiting, norms, strict=True):
            repeats[number] = repeats_until_half(row[1:], scan.spike_norm[scan.layer])
        progress("repetitions", length, limit)
        if None not in repeats or length == limit:
            break
        length = min(2 * length, limit) if target.resident else limit
    read = []
    for token, count in zip(tokens, repeats, strict=True):
        read.append(RepeatedToken(target.tokenizer.decode([token]), token, count))
    by_repetition = [token.repeats for token in read if token.by_repetition]  # the others are sinks already
    middle = float(median(by_repetition)) if by_repetition else None
    return RepeatsNeeded(tuple(read), middle, limit)


@torch.no_grad()
def repetition_spike(
    setup: Setup,
    scan: LayerScan,
    needed: RepeatsNeeded,
    before: Sequence[int],
    neurons: Neurons,
    entered: Entered = NOWHERE,
) -> RepetitionSpike | None:
    """Whether copies of a token make a norm as high as that of a spike, and whether the same neurons do.

    A quarter more copies than the first token needs are looked at, which is inside the sink. The contrasts are one copy
    behind other tokens at the same position, and the last of these other tokens.

    Args:
        setup: The model and its text.
        scan: The model at the places of the spike.
        needed: The repeated tokens, and when the norm of each reaches half of the spike's at the sink layer.
        before: The token before each.
        neurons: The neurons that make the spike.
        entered: What entered a layer when the copies were read.

    Returns:
        None if no token reaches that by repetition.
    """
    token = next((token for token in needed.tokens if token.by_repetition), None)
    if token is None:
        return None
    copies, tried = min(round(TIMES * (token.repeats or 0)), needed.max_repeats), len(needed.tokens)
    rows = repeated(before, [token.id], copies)
    layer = max([scan.layer, *(neuron.layer for neuron in neurons)])
    drawn = [random_neurons(scan.target, neurons, setup.seed, number) for number in range(RANDOM)]
    trial = Trial(
        rows,
        [neurons, *drawn] if neurons else [],
        at=torch.tensor([copies]),
        source=torch.tensor([0]),
        upto=layer,
        without=scan.shared_dims,
        entering=entered.before(token.id, copies + 1),
    )
    (read,) = side_by_side(scan.target, [trial])
    edited = read.norms[..., layer]
    intact = edited[0]
    behind_others, _ = beside_copies(setup, rows, 1)  # before the copy stand the other tokens
    (others,) = norms_at(scan, [layer], behind_others, 1)[..., 0]
    heights = torch.stack([intact[0], others[-1], others[-2]]) / scan.spike_norm[layer]
    outcome = Outcome("norm", layers=(layer,), gives="reach {} of the spike's norm at {}")
    by_copies = claim_of_copies(copies, outcome, heights[:, None], tried)
    by_copies = replace(by_copies, role="repeats", place=repr(token.token), margin=0.0)
    claims = [by_copies]
    if neurons:
        left = edited[1:] / intact
        place = f"the last of {copies} copies of {token.token!r}"
        contrasts, search = [INTACT, by_chance(neurons, left[1:, 0])], Search("repeated tokens", tried)
        claims.append(claim_of("repeats", neurons, outcome, place, left[0], contrasts, search, exact=True))
    return RepetitionSpike(token.token, token.id, copies, tuple(claims))
