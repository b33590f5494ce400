"""What find_sinks found, as a reader would say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkscope.sinks.first_token.find import FindSinks


def summary(found: FindSinks) -> str:
    """Some lines of plain text."""
    m = found.model
    read = f"{found.layers_read} of {m.n_layers} layers read"
    lines = [f"{m.name} ({m.family}, {m.n_layers} layers, d_model {m.d_model}, d_mlp {m.d_mlp}); {read}"]
    if found.sink_layer is None:
        lines.append("No attention sink: no MLP lifts the first token's norm above that of typical text.")
        lines += _rest(found)
        return "\n".join(lines)
    i = found.sink_layer
    norm, typical = found.first_token_norm[i], found.typical_norm[i]
    lines.append(f"Sink layer {i}, made by {_names(found)}.")
    if norm is not None and typical is not None:
        lines.append(f"First token's norm there {norm:.4g}, typical {typical:.4g}: {norm / typical:.0f} x.")
    if found.set_drop is not None and found.set_control_drop is not None:
        lines.append(
            f"Zeroing them takes {found.set_drop:.1%} of it; the largest of 20 random draws of as many takes "
            f"{found.set_control_drop:.1%}."
        )
    if len(found.stages) > 1:
        lines.append("Stages: " + ", ".join(f"layer {s.layer} adds {s.share:.1%}" for s in found.stages) + ".")
    if found.attention is not None:
        a = found.attention
        first, last = min(a.layers), max(a.layers)
        where = f"layer {first}" if first == last else f"layers {first} to {last}"
        lines.append(
            f"Attention to the first token in {where}: {a.intact:.3f}, without them "
            f"{a.ablated:.3f}, without random ones {a.control:.3f}."
        )
    if found.residual_dims:
        lines.append("Massive activations in residual dimensions " + ", ".join(map(str, found.residual_dims)) + ".")
    r = found.repeats
    if r.tokens:
        if r.median is None:
            lines.append(f"None of {len(r.tokens)} tokens becomes a sink within {r.max_repeats} repetitions.")
        else:
            never = f"; {r.unreached} of {len(r.tokens)} never do within {r.max_repeats}" if r.unreached else ""
            reached = len(r.tokens) - r.unreached
            lines.append(f"Repeats until a sink: {r.median:.0f} (median over {reached} tokens{never}).")
    return "\n".join([*lines, *_rest(found)])


def _names(found: FindSinks) -> str:
    causal = found.causal
    if not causal:
        return "no single neuron (no candidate is causal by itself)"
    names = [
        (f"layer {n.layer} " if n.layer != found.sink_layer else "")
        + (f"expert {n.expert} " if n.expert is not None else "")
        + f"neuron {n.neuron}"
        for n in causal
    ]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _rest(found: FindSinks) -> list[str]:
    lines: list[str] = []
    unknown = found.settings.get("unknown_tokens") or 0.0
    if unknown > 0.1:
        lines.append(
            f"Mind: {unknown:.0%} of the typical text is unknown to this tokenizer, so it is no typical text for it; "
            "give text of its kind with --text."
        )
    if found.sink_rate is not None:
        s = found.sink_rate
        lines.append(f"Sink rate {s.value:.1%} (eps {s.eps}, {s.samples} texts of {s.length} tokens).")
    if found.learned_sinks:
        lines.append("The model has learned sink logits; they took part in every attention row.")
    if found.published is not None:
        verdict = "matches" if found.published.matches else "differs from"
        lines.append(f"This {verdict} what is published ({found.published.source}).")
    return lines
