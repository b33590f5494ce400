"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions import Ablate
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.models.names import published_for
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import DRAWS, Neuron, Proof, prove, view_layer
from sinkscope.sinks.first_token.tokens import at_once_line, pick_tokens
from sinkscope.sinks.first_token.walk import (
    Walk,
    first_token_attention,
    prefixes,
    repeat_limit,
    repeat_until_half,
    sink_rate,
    spike_dims,
    walk_far_enough,
)
from sinkscope.text import text_rows

RATE_EPS, RATE_LENGTH, RATE_TEXTS = 0.3, 64, 100  # Gu et al. 2024


@dataclass(frozen=True)
class Stage:
    """A layer whose MLP builds the spike; share is what it adds over the first token's largest norm."""

    layer: int
    share: float


@dataclass(frozen=True)
class RepeatedToken:
    """A token and the first number of repetitions whose norm reaches half of the first token's; None: never."""

    token: str
    id: int
    repeats: int | None


@dataclass(frozen=True)
class Repeats:
    """Repetitions until a sink; median over the tokens that repetition made one, and how many never did."""

    tokens: tuple[RepeatedToken, ...]
    median: float | None
    unreached: int
    max_repeats: int

    @property
    def at_once(self) -> tuple[RepeatedToken, ...]:
        """Tokens of the first token's own cluster: their first occurrence is a sink, so the median leaves them out."""
        return tuple(t for t in self.tokens if t.repeats == 1)


@dataclass(frozen=True)
class SinkRate:
    """Share of (layer, head) whose mean attention to position 0 exceeds eps (Gu et al. 2024)."""

    eps: float
    length: int
    samples: int
    value: float


@dataclass(frozen=True)
class FirstTokenAttention:
    """Mean attention to the first token behind the sink: intact, causal neurons zeroed, random ones zeroed."""

    layers: tuple[int, ...]
    intact: float
    ablated: float
    control: float


@dataclass(frozen=True)
class Published:
    """What the literature says of this model, and whether the same was found."""

    source: str
    matches: bool


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """Where the attention sink of a model is made. Lists over layers are None where a layer was not read.

    Attributes:
        sink_layer: the stage that adds most; None: the model has no sink.
        neurons: candidates, largest contribution first, with their proof.
        set_drop: share of the first token's norm that goes with all causal neurons together.
        set_control_drop: largest drop among 20 random draws of as many neurons.
        stages: every layer that builds the spike.
        residual_dims: massive activations of the first token at the sink layer, largest first (Sun et al. 2024).
        first_token_norm: L2 of the residual stream after each layer, first token (median over texts).
        typical_norm: median over later positions of typical text.
        typical_low: 5 % of the same.
        typical_high: 95 % of the same.
        layers_read: number of layers read.
        notebook_rule_layer: first layer with MLP norm above mean + 2 sd; None if none, or if not all were read.
        repeats: repetitions that make a repeated token a sink.
        attention: what zeroing does to the attention behind the sink layer.
        learned_sinks: the model has learned sink logits, which took part in every attention row.
        sink_rate: None where not all layers were read; over 100 texts, over 25 where layers are read from disk.
        published: None where nothing is published for the model.
    """

    percent: ClassVar[tuple[str, ...]] = ("share", "ablation_drop", "repeat_drop", "control_drop")

    sink_layer: int | None
    neurons: tuple[Neuron, ...]
    set_drop: float | None
    set_control_drop: float | None
    stages: tuple[Stage, ...]
    residual_dims: tuple[int, ...]
    first_token_norm: tuple[float | None, ...]
    typical_norm: tuple[float | None, ...]
    typical_low: tuple[float | None, ...]
    typical_high: tuple[float | None, ...]
    layers_read: int
    notebook_rule_layer: int | None
    repeats: Repeats
    attention: FirstTokenAttention | None
    learned_sinks: bool
    sink_rate: SinkRate | None
    published: Published | None

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons proven to make the sink."""
        return tuple(n for n in self.neurons if n.causal)

    def rows(self) -> list[dict[str, Any]]:
        """One row per candidate neuron."""
        return [{name: value for name, value in vars(n).items() if "neutral" not in name} for n in self.neurons]

    def conclusion(self) -> str:
        """Which neurons make the sink, and what zeroing them and random ones takes away."""
        if self.sink_layer is None:
            return "No attention sink: no MLP raises the first token's norm above that of typical text."
        if self.set_drop is None or self.set_control_drop is None:
            largest = max((n.ablation_drop for n in self.neurons), default=0.0)
            control = max((n.control_drop for n in self.neurons), default=0.0)
            return (
                f"Layer {self.sink_layer} makes the attention sink, but no single neuron of it is causal: zeroing one "
                f"takes away at most {largest:.1%} of the first token's norm, and zeroing a random one {control:.1%}."
            )
        return (
            f"The attention sink of layer {self.sink_layer} is made by {_names(self)}: zeroing "
            f"{'it' if len(self.causal) == 1 else 'them'} takes away {self.set_drop:.1%} of the first token's norm, "
            f"and zeroing as many random neurons takes away at most {self.set_control_drop:.1%} (largest of {DRAWS} "
            "draws)."
        )

    def details(self) -> list[str]:
        """The model, the norms, and what repetition and the first token's attention show."""
        m = self.model
        read = f"{self.layers_read} of {m.n_layers} layers read"
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers, d_model {m.d_model}, d_mlp {m.d_mlp}); {read}."]
        if self.sink_layer is not None:
            lines += self._sink(self.sink_layer)
        unknown = self.settings.get("unknown_tokens") or 0.0
        if unknown > 0.1:
            lines.append(
                f"Warning: {unknown:.0%} of the reference text is unknown to this tokenizer; supply suitable text with "
                "--text."
            )
        if self.sink_rate is not None:
            s = self.sink_rate
            lines.append(f"Sink rate {s.value:.1%} (eps {s.eps}, {s.samples} texts of {s.length} tokens).")
        if self.learned_sinks:
            lines.append("The model has learned sink logits, which took part in every attention row.")
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            lines.append(f"This {verdict} what is published ({self.published.source}).")
        return lines

    def _sink(self, layer: int) -> list[str]:
        norm, typical, r = self.first_token_norm[layer], self.typical_norm[layer], self.repeats
        lines: list[str] = []
        if norm is not None and typical is not None:
            lines.append(
                f"Sink layer {layer}: the first token's norm is {norm:.4g}, {norm / typical:.0f} times the typical one "
                f"of {typical:.4g}."
            )
        if len(self.stages) > 1:
            lines.append("Stages: " + ", ".join(f"layer {s.layer} adds {s.share:.1%}" for s in self.stages) + ".")
        if self.attention is not None:
            a = self.attention
            first, last = min(a.layers), max(a.layers)
            where = f"layer {first}" if first == last else f"layers {first} to {last}"
            lines.append(
                f"Attention to the first token in {where}: {a.intact:.3f}, without these neurons {a.ablated:.3f}, "
                f"without random ones {a.control:.3f}."
            )
        if self.residual_dims:
            dims = ", ".join(map(str, self.residual_dims))
            lines.append(f"Massive activations are in residual dimensions {dims}.")
        tried = len(r.tokens) - len(r.at_once)
        if tried and r.median is None:
            lines.append(f"None of {tried} tokens becomes a sink by repetition within {r.max_repeats} repetitions.")
        elif tried:
            never = f"; {r.unreached} of {tried} never do within {r.max_repeats}" if r.unreached else ""
            lines.append(f"Repeats until a sink: {r.median:.0f} (median over {tried - r.unreached} tokens{never}).")
        return lines + at_once_line([t.token for t in r.at_once])


def _names(found: FindSinks) -> str:
    names = [
        (f"layer {n.layer} " if n.layer != found.sink_layer else "")
        + (f"expert {n.expert} " if n.expert is not None else "")
        + f"neuron {n.neuron}"
        for n in found.causal
    ]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


@measurement(
    group="Sinks", figure="sinkscope.figures.first_token:draw_find_sinks", loading="enough", quick={"max_repeats": 64}
)
def find_sinks(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    top_k: Positive = 8,
    max_repeats: Positive | None = None,
) -> FindSinks:
    """Find the layer and the neurons that make the attention sink, and verify each by ablation against a control.

    A model given by name is streamed: its layers are read upward, a few in memory at a time, until the first token's
    norm has stayed flat for a third of the layers. A model without a sink is an answer: `sink_layer` is None.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        all_layers: Read every layer of a model that is not in memory, too: late stages, sink rate, the notebook's rule.
        top_k: Candidate neurons of the sink layer, each of which is ablated.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
    """
    ids = setup.ids
    if top_k > (width := setup.target.d_mlp):
        raise SinkscopeError(f"--top-k {top_k} is more than the {width} neurons of a layer; give at most that")
    limit = repeat_limit(setup.target, max_repeats)
    words = pick_tokens(setup.tokenizer, ids, tokens, setup.seed)
    setup.record(max_repeats=limit, unknown_tokens=_unknown(setup))
    whole = all_layers or setup.target.resident
    seen = walk_far_enough(setup, whole=whole)
    target = setup.target
    layer = seen.sink_layer()

    proof, repeats, attention, dims = Proof((), None, None, ()), Repeats((), None, 0, limit), None, []
    if layer is not None:
        found = repeat_until_half(target, layer, words, prefixes(setup, words), limit, setup.progress)
        repeats = _repeats(target, words, found.repeats, limit)
        generator = torch.Generator().manual_seed(setup.seed)
        proof = prove(target, ids, layer, top_k, generator, found.view, seen.stages())
        attention = _attention(target, ids, layer, proof)
        view = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool))
        dims = spike_dims(view.resid.unflatten(0, tuple(ids.shape))[:, 0].median(0).values, view.resid)
    return FindSinks(
        sink_layer=layer,
        neurons=proof.neurons,
        set_drop=proof.set_drop,
        set_control_drop=proof.set_control_drop,
        stages=tuple(Stage(i, seen.mlp_first[i] / max(seen.first)) for i in seen.stages()),
        residual_dims=tuple(dims),
        first_token_norm=_padded(seen, seen.first),
        typical_norm=_padded(seen, [t[1] for t in seen.typical]),
        typical_low=_padded(seen, [t[0] for t in seen.typical]),
        typical_high=_padded(seen, [t[2] for t in seen.typical]),
        layers_read=len(seen.first),
        notebook_rule_layer=seen.notebook_layer(),
        repeats=repeats,
        attention=attention,
        learned_sinks=target.adapter.learned_sinks,
        sink_rate=_rate(setup) if whole else None,
        published=_published(target, layer, proof.causal, dims),
    )


def _repeats(target: Target, words: list[int], found: list[int | None], limit: int) -> Repeats:
    rows = tuple(RepeatedToken(target.tokenizer.decode([w]), w, n) for w, n in zip(words, found, strict=True))
    got = [n for n in found if n is not None and n > 1]
    return Repeats(rows, float(median(got)) if got else None, found.count(None), limit)


def _attention(target: Target, ids: Int[Tensor, "row pos"], layer: int, proof: Proof) -> FirstTokenAttention | None:
    layers = list(range(layer + 1, min(layer + 4, target.n_layers)))
    sites = [n.site for n in proof.causal]
    if not layers or not sites:
        return None
    edits = (None, Ablate(sites=sites), Ablate(sites=list(proof.controls)))
    return FirstTokenAttention(tuple(layers), *(first_token_attention(target, ids[:1], layers, edit) for edit in edits))


def _rate(setup: Setup) -> SinkRate | None:
    target = setup.target
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return None
    # A batch holds 128 MB in the widest place. Layers that are read from disk are read once: one, smaller batch.
    fitting = max(1, (1 << 25) // (RATE_LENGTH * target.d_mlp))
    texts, batch = (RATE_TEXTS, fitting) if target.resident else (RATE_TEXTS // 4, RATE_TEXTS)
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    return SinkRate(RATE_EPS, RATE_LENGTH, len(ids), sink_rate(target, ids, RATE_EPS, setup.progress, batch))


def _published(target: Target, layer: int | None, causal: tuple[Neuron, ...], dims: list[int]) -> Published | None:
    known = published_for(target.name)
    if known is None:
        return None
    if known.neurons:
        found = {(n.layer, n.neuron) for n in causal}
        return Published(known.source, layer in known.layers and set(known.neurons) <= found)
    if known.residual_dims:
        return Published(known.source, set(known.residual_dims) <= set(dims))
    return None


def _unknown(setup: Setup) -> float:
    """Share of the typical text that the tokenizer does not know: repeated unknowns would be a repeated token."""
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    return 0.0 if unknown is None else float((setup.ids[:, 1:] == unknown).float().mean())


def _padded(seen: Walk, values: list[float]) -> tuple[float | None, ...]:
    return (*values, *[None] * (seen.n_layers - len(values)))
