"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` goes one way. A survey of typical text says where heads attend and where norms stand out (`survey`).
The layers that build a spike are read at its places (`layer_scan`), and their neurons are zeroed one by one
(`neurons`) and in sets (`sets`). Then parts are removed to see what the heads need (`sinks`). All edits are rows of
one pass (`effects`), and what they show is a claim (`sinkscope.results.claims`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.sinks.find.records import RepeatsNeeded, RepetitionSpike
from sinkscope.sinks.find.repetitions import Entered, repeat_until_half, repetition_spike
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.find.sinks import attention_sinks
from sinkscope.sinks.find.spikes import MadeSpike, surveyed
from sinkscope.sinks.tokens import pick_tokens, prefix_of, repetition_limit


@measurement(
    group="Sinks",
    help="Find the layer and the neurons that make the sink.",
)
def find_sinks(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    max_repeats: Natural | None = None,
) -> FindSinks:
    """Find the layer and the neurons that make the attention sink, and verify each by ablation against a control.

    A model given by name is streamed: its layers are read upward, a few in memory at a time, until the first token's
    norm has stayed flat for a third of the layers. If the model has no sink, `sink_layer` is None.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        all_layers: Read every layer even if the model is not in memory: late stages, and the sink rate.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope find-sinks --model llama-2-7b --json sinks.json
    """
    words, limit = pick_tokens(setup, tokens), repetition_limit(setup.target, max_repeats)
    setup.record(max_repeats=limit)

    survey, made = surveyed(setup, all_layers=all_layers)
    scan, neurons = (made[0].scan, made[0].candidates) if made else (survey.first, ())
    # Other measurements on the same setup ask for the same again.
    sinks = setup.once((attention_sinks, survey), lambda: attention_sinks(setup, survey, made))
    repeats, repetition = setup.once(
        (repetition_spike, survey, *words, limit), lambda: _repetition(setup, made, words, limit)
    )
    return FindSinks(
        spikes=tuple(each.spike for each in made),
        sinks=sinks,
        other_spikes=survey.other_spikes,
        other_sinks=survey.other_sinks,
        most_attended=survey.received.most_attended,
        repetition=repetition,
        shared_dims=tuple(scan.shared_dims),
        sink_layer=scan.sink_layer if made else None,
        neurons=neurons,
        spike_norm=tuple(scan.spike_norm),
        typical_norm=tuple(scan.typical_norm),
        layers_read=len(survey.first.layers),
        repeats=repeats,
        sink_rate=survey.rate,
    )


def _repetition(
    setup: Setup, made: Sequence[MadeSpike], words: Sequence[int], limit: int
) -> tuple[RepeatsNeeded, RepetitionSpike | None]:
    """After how many copies tokens become sinks, and whether the neurons of the first spike make that, too."""
    if not made or not made[0].scan.stages:
        return RepeatsNeeded((), None, limit), None
    scan, neurons, before = made[0].scan, made[0].spike.set, prefix_of(setup, words)
    entered = Entered(scan.entering.at(min((neuron.layer for neuron in neurons), default=0)))
    repeats = repeat_until_half(scan, words, before, limit, setup.progress, entered)
    return repeats, repetition_spike(setup, scan, repeats, before, neurons, entered)
