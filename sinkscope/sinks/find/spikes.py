"""The norm spike at each kind of place, and what makes it: neurons of MLPs or, if these do not, a component."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.find.context import SinkContext, Survey
from sinkscope.sinks.find.layer_scan import STEP_SHARE
from sinkscope.sinks.find.places import Rule
from sinkscope.sinks.find.records import NormSpike, PlacedSpike
from sinkscope.sinks.find.sets import CANDIDATES, CausalSets, causal_sets
from sinkscope.sinks.removal.components import one_by_one, writers
from sinkscope.sinks.removal.effects import effects

MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched


@dataclass(frozen=True, eq=False)
class MadeSpike:
    """The spike at one kind of place.

    Attributes:
        rule: The places.
        context: The model at these places.
        sets: The smallest sets of neurons that make the spike; none if no set that was tried does.
        spike: Its layers and its height, and what makes it.
    """

    rule: Rule
    context: SinkContext
    sets: CausalSets
    spike: NormSpike

    @property
    def placed(self) -> PlacedSpike:
        """The spike of a further kind of place, as results hold it."""
        spike = self.spike
        position = spike.positions[spike.place.rules.index(self.rule)]
        return PlacedSpike(self.rule.words, position, self.rule.token, spike.ratio, spike.made_by, self.sets.minimal)


def made_spikes(survey: Survey, top_k: int = CANDIDATES) -> list[MadeSpike]:
    """The spike at each kind of place, and what makes it; none if no norm stands out at the first kind.

    Args:
        survey: Where the spikes are.
        top_k: Number of candidate neurons of a sink layer.
    """
    made: list[MadeSpike] = []
    for rule in survey.spike.rules if survey.spike is not None else ():
        context = survey.context(rule)
        if context.scan.spike_layers:
            sets = causal_sets(context, survey.received.readers(rule), top_k)
            made.append(MadeSpike(rule, context, sets, norm_spike(survey, context)))
        elif not made:
            break
    return made


def norm_spike(survey: Survey, context: SinkContext) -> NormSpike:
    """The places whose norm stands out, and what makes the spike of the kind that a context looks at."""
    scan = context.scan
    assert survey.spike is not None
    stages = scan.stages
    maker = None
    if not stages or scan.norm_before:
        maker = spike_maker(context)
    return NormSpike(
        place=survey.spike,
        positions=tuple(survey.spikes.of(rule).earliest for rule in survey.spike.rules),
        step_up=tuple(stages or (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        runs=tuple(scan.spike_runs),
        made_by="MLP" if stages else maker,
        begun_by=maker if stages else None,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def spike_maker(context: SinkContext) -> str | None:
    """The component without which the spike is gone; None if there is no single one."""
    scan = context.scan
    layer = scan.spike_layers[0]
    at = context.at[:MAKER_TEXTS]
    ids = context.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, context.up_to_place + 4)]
    candidates = writers(context.target, layer + 1)
    edits = one_by_one(candidates)
    source = (at + ids.shape[1]) // 2
    edited = effects(context.target, ids, edits, at=at, source=source, upto=layer, without=scan.shared_dims)
    drops = edited.drops(layer)
    best = int(drops.argmax())
    if float(drops[best]) < NEEDED:
        return None
    return str(candidates[best])
