"""What the heads of a sink need, and what makes a spike that no MLP makes: components replaced one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.measure.evidence import NEEDED
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import (
    At,
    Component,
    Edit,
    effects,
    has_key_bias,
    heads_lost,
    one_by_one,
    writers,
)
from sinkscope.sinks.first_token.members import Heads
from sinkscope.sinks.first_token.records import Carrier
from sinkscope.sinks.tokens import TokenRows

MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched


def carriers(target: Target, ids: TokenRows, heads: Heads, at: At = 0) -> tuple[Carrier, ...]:
    """Replace each component at the position by what it writes at a later one, to see whose absence ends the sink.

    "position" is what remains when everything written at the position is replaced.
    """
    last = max(layer for layer, _ in heads)
    written = writers(target, last)
    components = list(written)
    if has_key_bias(target):
        components.append(Component("key bias"))
    edits = [*one_by_one(components), Edit(swap=tuple(written))]
    source = (at + ids.shape[1]) // 2
    edited = effects(target, ids, edits, at=at, source=source, upto=last, attention=True)
    *lost, lost_without_all = heads_lost(edited.attention_drops(heads))
    return (*map(Carrier, map(str, components), lost), Carrier("position", 1 - lost_without_all))


def carried_by(tried: Sequence[Carrier]) -> str | None:
    """The component that most heads of the sink need; of several, the one nearest to the heads. None if no single one.

    What an attention layer or an MLP writes without making a spike is called the mark.
    """
    needed = [carrier.name for carrier in tried if carrier.needed]
    if "key bias" in needed:
        return "key bias"
    if any(carrier.needed and carrier.is_mark for carrier in tried):
        return "mark"
    embeddings = [name for name in needed if "embed" in name]
    nearest_first = [*embeddings, *needed, None]
    return nearest_first[0]


def spike_maker(context: SinkContext) -> str | None:
    """The component without which the spike is gone; None if there is no single one."""
    target = context.target
    scan = context.scan
    layer = scan.spike_layers[0]
    at = context.at[:MAKER_TEXTS]
    ids = context.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, context.up_to_place + 4)]
    candidates = writers(target, layer + 1)
    source = (at + ids.shape[1]) // 2
    edited = effects(target, ids, one_by_one(candidates), at=at, source=source, upto=layer, without=scan.shared_dims)
    drops = edited.drops(layer)
    best = int(drops.argmax())
    if float(drops[best]) < NEEDED:
        return None
    return str(candidates[best])
