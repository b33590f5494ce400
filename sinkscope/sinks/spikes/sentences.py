"""What `find_sinks` and `why_sink` say of a spike: their conclusions, and the lines that stand above tables."""

from __future__ import annotations

from collections.abc import Iterable

from sinkscope.results.headline import Headline, Verdict, verdict_of
from sinkscope.results.notation import Neuron, word_list
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.spike import layers_words
from sinkscope.sinks.spikes.tables import (
    AttendedKind,
    Attention,
    Brief,
    Done,
    Effect,
    Largest,
    parts_names,
    writes_enough,
)
from sinkscope.sinks.spikes.why_tables import AS_IT_IS, ONE_OTHER, Cause, Condition, Conditioned
from sinkscope.sinks.thresholds import HALF

NOT_SHOWN = "Not shown"
"""How a sentence begins whose control did as much."""


# --- what zeroing the needed parts does ---


def needed_sentence(spike: SpikeResult) -> str | None:
    """Return what the needed parts do at the place, then what the control does; None: it was not measured."""
    effect = spike.effect
    if effect is None or effect.left is None:
        return None
    verb = "Zeroing" if any(isinstance(part, Neuron) for part in spike.needed) else "Replacing"
    parts = parts_names(spike.needed, 2 if len(spike.needed) == 2 else 1)
    sentence = f"{verb} {parts} at {spike.place.words} leaves {effect.text('left')} of its norm spike"
    if effect.heads is not None and effect.intact is not None and effect.intact.value:
        sentence += f" and {effect.text('heads')} of the {effect.text('intact')} heads that attend to it"
    if effect.loss is not None:
        sentence += f", and adds {effect.text('loss').removeprefix('+')} nats a token to the loss of later tokens"
    if readers_stay(effect):
        sentence += "; most heads still attend, so the sink itself is not gone"
    return f"{sentence}. {control_sentence(spike, effect)}"


def readers_stay(effect: Effect) -> bool:
    """Return whether at least half of the heads that attend to a place do so after the change."""
    if effect.heads is None or effect.intact is None or not effect.intact.value:
        return False
    return effect.heads.value >= HALF * effect.intact.value


def strongest_control(spike: SpikeResult, effect: Effect) -> tuple[Effect, str] | None:
    """Return the control that adds most loss, or leaves least of the spike where none was read, and that column.

    None: there is no control.
    """
    controls = [row for row in spike.effects if row.is_control and row.left is not None]
    if not controls:
        return None
    if effect.loss is not None and all(row.loss is not None for row in controls):
        return max(controls, key=lambda row: row["loss"].value), "loss"
    return min(controls, key=lambda row: row["left"].value), "left"


def control_sentence(spike: SpikeResult, effect: Effect) -> str:
    """Return what the strongest control does; a control that does as much is said first."""
    strongest = strongest_control(spike, effect)
    if strongest is None:
        return "There is no control: no other part of these layers writes anything."
    control, number = strongest
    value = control.text(number, margin=False).removeprefix("+")
    does = f"add {value}" if number == "loss" else f"leave {value}"
    norm = control.norm
    if not is_fair(control):
        return "There is no fair control: no other neurons of these layers write as much."
    if control.key.done is Done.AS_MANY:
        return f"No other neurons write as much: the busiest write {control.text('norm')} as much and {does}."
    subject = (
        "replacing another component would"
        if norm is None
        else f"{control.text('size')} other neurons that write as much"
    )
    gap = effect[number].value - control[number].value
    if number == "left":
        gap = -gap
    if gap <= (effect[number].margin or 0.0):
        return f"{NOT_SHOWN} to matter more than others: as a control, {subject} {does}."
    return f"As a control, {subject} {does}."


def readers_sentence(row: Attention) -> str:
    """Return how many heads attend to a place, or to learned sink logits."""
    if row.key.kind is AttendedKind.LEARNED:
        to = "their learned sink logit, which is no token,"
        return f"{row.text('heads')} heads give {to} more than 0.3 of their attention."
    heads, total = row.text("heads"), row.text("total")
    return f"{heads} of {total} heads give {row.label} more than 0.3 of their attention."


def no_spike_sentence(largest: Largest) -> str:
    """Return that there is no spike, with the largest norm that was seen."""
    ratio = largest.ratio.value
    return f"No norm spike was found: the largest norm is {ratio:.1f} times that of other tokens, {largest.label}."


def needed_headlines(spike: SpikeResult) -> list[Headline]:
    """Return what zeroing the needed parts does to the heads and to the loss, beside the strongest control."""
    effect = spike.effect
    if effect is None:
        return []
    parts = parts_names(spike.needed, 1)
    fair = [row for row in spike.effects if row.is_control and row.left is not None and is_fair(row)]
    headlines: list[Headline] = []
    if effect.heads is not None and effect.intact is not None and effect.intact.value:
        lost = effect.intact.value - effect.heads.value
        by_control = [row.intact.value - row.heads.value for row in fair if row.intact and row.heads]
        most = max(by_control, default=None)
        headlines.append(
            Headline(
                subject=f"sink heads lost without {parts}",
                found=f"{lost:.0f} of {effect.text('intact', margin=False)}",
                control="no fair control" if most is None else f"{most:.0f} (others)",
                verdict=verdict_of(lost, most, effect.heads.margin),
            )
        )
    if effect.loss is not None:
        strongest = max((row for row in fair if row.loss is not None), key=lambda row: row["loss"].value, default=None)
        most = None if strongest is None else strongest["loss"].value
        control = "no fair control" if strongest is None else f"{strongest.text('loss', margin=False)} (others)"
        found = effect.text("loss")
        verdict = verdict_of(effect.loss.value, most, effect.loss.margin)
        headlines.append(Headline(f"loss without {parts}", found, control, verdict))
    return headlines


def is_fair(control: Effect) -> bool:
    """Return whether a control writes enough to be compared with: all but others that write hardly anything."""
    norm = 0.0 if control.norm is None else control.norm.value
    return writes_enough(norm, as_many=control.key.done is Done.AS_MANY)


# --- what makes a position the place, and what the place is for ---


def sufficient(rows: Iterable[Conditioned]) -> list[tuple[Cause, ...]]:
    """Return the smallest sets of causes that give an ordinary position half of the spike, beyond the margin."""
    enough: list[tuple[Cause, ...]] = []
    for row in rows:
        if row.key.gives and row.left.value - (row.left.margin or 0.0) >= HALF:
            enough.append(row.key.causes)
    return [causes for causes in enough if len(causes) == min(map(len, enough))]


def cause_sentence(spike: SpikeResult) -> str | None:
    """Return what makes a position such a place; None if it was not asked."""
    if not spike.conditions:
        return None
    enough = sufficient(spike.conditions)
    if not enough:
        rows = [row for row in spike.conditions if row.key.gives or row.key == AS_IT_IS]
        most = max(rows, key=lambda row: row.left.value).text("left", margin=False)
        return (
            "Neither its token, nor seeing only itself, nor position id 0 makes an ordinary token the sink: it gets at "
            f"most {most} of the spike."
        )
    best = max((spike.condition(Condition(causes)) for causes in enough), key=lambda row: row.left.value)
    causes_words: list[str] = []
    for causes in enough:
        causes_words.append(word_list([cause.given for cause in causes]))
    control = spike.condition(AS_IT_IS)
    words = "as it is"
    if any(Cause.ALONE in causes for causes in enough):
        control = spike.condition(ONE_OTHER)
        words = "that also sees one other token"
    verdict = f"{NOT_SHOWN}: an" if best.left.value - control.left.value <= (best.left.margin or 0.0) else "An"
    return (
        f"{verdict} ordinary token that {' or '.join(causes_words)} gets {best.text('left')} of the spike of "
        f"{spike.place.words} (as a control, a token {words}: {control.text('left')})."
    )


def purpose_sentence(spike: SpikeResult) -> str | None:
    """Return what hiding a place costs; None if it was not asked."""
    hidden = spike.hidden
    if hidden is None or hidden.loss is None:
        return None
    (control,) = (row for row in spike.purpose if row.is_control)
    assert control.loss is not None
    begin = "Hiding"
    if hidden.loss.value - control.loss.value <= (hidden.loss.margin or 0.0):
        begin = f"{NOT_SHOWN} to matter: hiding"
    loss = hidden.text("loss").removeprefix("+")
    return (
        f"{begin} {spike.place.words} from layer {hidden.since} on adds {loss} nats a token to the loss of later "
        f"tokens (as a control, hiding token {control.other}: {control.text('loss', margin=False).removeprefix('+')})."
    )


def answer_headlines(spike: SpikeResult) -> list[Headline]:
    """Return what makes an ordinary token the sink, and what hiding the place costs, each beside its control."""
    headlines: list[Headline] = []
    enough = sufficient(spike.conditions)
    if spike.conditions and not enough:
        headlines.append(Headline("spike of a token that gets a cause", "under 50%", "-", Verdict.NOT_SHOWN))
    if enough:
        best = max((spike.condition(Condition(causes)) for causes in enough), key=lambda row: row.left.value)
        control = spike.condition(ONE_OTHER if Cause.ALONE in best.key.causes else AS_IT_IS)
        verdict = verdict_of(best.left.value, control.left.value, best.left.margin)
        subject = f"spike if a token {best.key}"
        beside = "sees one more" if control.key == ONE_OTHER else "as it is"
        words = f"{control.text('left', margin=False)} ({beside})"
        headlines.append(Headline(subject, best.text("left"), words, verdict))
    hidden = spike.hidden
    if hidden is not None and hidden.loss is not None:
        (control,) = (row for row in spike.purpose if row.is_control)
        assert control.loss is not None
        verdict = verdict_of(hidden.loss.value, control.loss.value, hidden.loss.margin)
        beside = f"{control.text('loss', margin=False)} (token {control.other} hidden)"
        subject = f"loss without seeing {spike.place.words}"
        headlines.append(Headline(subject, hidden.text("loss"), beside, verdict))
    return headlines


# --- what stands above tables ---


def spike_title(spike: SpikeResult) -> str:
    """Return where a spike is: "Norm spike at the first token, layers 11-29"."""
    return f"Norm spike at {spike.place.words}, {layers_words(*spike.layers)}"


def spike_words(spike: SpikeResult, also: Iterable[SpikeResult]) -> tuple[tuple[str, str], ...]:
    """Return what is said of a spike beside its tables, by labels.

    Args:
        spike: The spike.
        also: The same spike at other places.
    """
    size = spike.size
    words = [("norm", norm_words(spike))]
    if spike.dims:
        words.append(
            ("along", f"dimension{'s' * (len(spike.dims) > 1)} {word_list(spike.dims)} of the residual stream")
        )
    if size.total is not None:
        heads = f"{size.text('heads')} of the {size.text('total')} heads of its layers"
        words.append(("attended by", f"{heads} (above 0.3, mean over texts)"))
    if not spike.needed:
        words.append(("needed", "no neurons or pair of components that was tried"))
    places = [f"{other.place.words} ({other.size.text('heads')} heads attend)" for other in also]
    if places:
        words.append(("also at", ", ".join(places)))
    if not spike.held_out:
        words.append(("texts", "the half that chose: the other half does not have this place"))
    return tuple(words)


def norm_words(spike: SpikeResult) -> str:
    """Return the size of a spike: each number with the layer to which it belongs."""
    size = spike.size
    start = f"{size.text('norm_before')} before layer {spike.layers[0]}"
    ratio = f"{size.text('ratio')} times other tokens"
    if size.norm_at_ratio is None:  # results of earlier versions
        return f"{start}, {size.text('norm_after')} after layer {spike.peak}; {ratio} after layer {spike.highest}"
    other = f"{size.text('ratio')} times that of other tokens ({size.text('typical')})"
    norm = f"{size.text('norm_at_ratio')} after layer {spike.highest}, {other}"
    if spike.peak == spike.highest or size.text("norm_after") == size.text("norm_at_ratio"):
        return f"{start}, {norm}"
    return f"{start}, {norm}; largest after layer {spike.peak}: {size.text('norm_after')}"


def brief_of(spike: SpikeResult) -> Brief:
    """Return a spike in one line."""
    effect = spike.effect
    if effect is None:
        return Brief(key=spike.key, parts=spike.needed, ratio=spike.size.ratio)
    strongest = strongest_control(spike, effect)
    control = None
    if strongest is not None and strongest[1] == "loss" and effect.loss is not None:
        control = strongest[0].loss
    return Brief(
        key=spike.key,
        parts=spike.needed,
        left=effect.left,
        loss=effect.loss,
        control=control,
        heads_before=effect.intact,
        heads=effect.heads,
        ratio=spike.size.ratio,
    )


def legend(n_texts: int) -> str:
    """Return what the labels mean, below the tables."""
    return (
        f"±: half of the 95% interval over {n_texts} texts, which did not choose the neurons. Needed: the smallest set "
        "without which less than a quarter of the spike is left. % of a writer or eraser: its share of the spike."
    )
