"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` works in this order: the layers are walked upward (`walk`), the attention that positions receive is read
(`anatomy`), the neurons of the stages are ablated one by one and in sets (`ablation`, in passes of `effects`), and the
component that makes and the one that carries the sink are determined (`anatomy`). This module puts the results into
words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.models.names import published_for
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import DRAWS, CausalSet, Found, Neuron, Proof, causal_sets, later_set, prove
from sinkscope.sinks.first_token.anatomy import (
    HEADS,
    LOST,
    Carrier,
    Normalised,
    Received,
    Trigger,
    carried_by,
    carriers,
    maker,
    normalised,
    received,
    triggers,
)
from sinkscope.sinks.first_token.effects import Edit, effects
from sinkscope.sinks.first_token.walk import (
    SINK_RATIO,
    Repetition,
    Walk,
    repeat_until_half,
    walk_far_enough,
)
from sinkscope.sinks.tokens import and_, at_once_line, pick_tokens, prefixes, room
from sinkscope.text import text_rows

RATE_EPS, RATE_LENGTH, RATE_TEXTS = 0.3, 64, 100  # Gu et al. 2024
LEAST = 1e-9  # lower limit of a typical norm: in a hand-made model it can be 0, and it is a divisor
LATER = 3  # tokens behind the first position whose spikes are examined


@dataclass(frozen=True)
class Stage:
    """A layer whose MLP builds the spike. `share` is what it adds, relative to the first token's largest norm."""

    layer: int
    share: float


@dataclass(frozen=True)
class RepeatedToken:
    """A token and the first number of repetitions whose norm reaches half of the first token's; None if never."""

    token: str
    id: int
    repeats: int | None


@dataclass(frozen=True)
class Repeats:
    """Repetitions until a token becomes a sink: the median over the tokens that did, and how many never did."""

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
    """Share of (layer, head) pairs whose mean attention to position 0 exceeds eps (Gu et al. 2024)."""

    eps: float
    length: int
    samples: int
    value: float


@dataclass(frozen=True)
class FirstTokenAttention:
    """Mean attention to the first token behind the sink: intact, causal neurons zeroed, random neurons zeroed."""

    layers: tuple[int, ...]
    intact: float
    ablated: float
    control: float


@dataclass(frozen=True)
class NormSpike:
    """Positions whose norm stands out (massive activations).

    Attributes:
        positions: Positions in pieces of typical text whose norm stands out. Position 0 is the first token.
        step_up: Layers that build the spike of the first token.
        step_down: Layers that reduce it by at least 5 %.
        ratio: The largest ratio of the spike's norm to the typical norm.
        plateau: The first and last layer after which the norm stands out.
        made_by: "MLP", or the component without which the first token's spike is gone. None if there is no single one.
        triggers: Quadratic forms of the causal neurons in gated MLPs.
        normalised: What the norms in front of the attention do to the first token. None if no layer exposes it.
    """

    positions: tuple[int, ...]
    step_up: tuple[int, ...]
    step_down: tuple[int, ...]
    ratio: float
    plateau: tuple[int, int] | None
    made_by: str | None
    triggers: tuple[Trigger, ...] = ()
    normalised: Normalised | None = None


@dataclass(frozen=True)
class SinkPosition:
    """A position that heads attend to. For a token other than the first, the position where it was first seen.

    Attributes:
        position: Position in pieces of typical text.
        token: The token there. Empty if the position receives attention regardless of its token.
        rate: Share of (layer, head) pairs that attend to it.
    """

    position: int
    token: str
    rate: float


@dataclass(frozen=True)
class AttentionSink:
    """Positions that heads attend to.

    Attributes:
        rate: Share of (layer, head) pairs whose mean attention to position 0 exceeds eps (Gu et al. 2024). If no
            position receives it, the share for the learned sink logits.
        eps: Threshold on mean attention.
        positions: The first token and later positions, if they receive attention.
        layers_read: Number of layers whose attention was read.
        carried_by: What the heads need, found by ablation: "spike", "mark" (what an attention layer or MLP writes there
            without a spike), "token embedding", "position embedding", "key bias", "position" (rotary alone), "learned
            logits". None if no single one of them.
        by_layer: Share of heads that attend to the first token, for each layer read.
        carriers: The evidence for each component that was tried.
    """

    rate: float
    eps: float
    positions: tuple[SinkPosition, ...]
    layers_read: int
    carried_by: str | None
    by_layer: tuple[float, ...] = ()
    carriers: tuple[Carrier, ...] = ()


@dataclass(frozen=True)
class LaterSink:
    """A token that is a sink behind the first position, and the neurons that make it one.

    Attributes:
        token: The token as text.
        position: The position where it was examined.
        ratio: Its largest norm divided by the typical one.
        set: The smallest set of neurons whose ablation removes its spike. None if no MLP makes the spike.
    """

    token: str
    position: int
    ratio: float
    set: CausalSet | None


@dataclass(frozen=True)
class Published:
    """What the literature reports for this model, and whether the result agrees."""

    source: str
    matches: bool


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """Where the attention sink of a model is made. Lists over layers are None where a layer was not read.

    Attributes:
        norm_spike: Positions whose norm stands out. None if there are none.
        attention_sink: Positions that heads attend to. None if there are none among the layers read.
        causal_sets: The smallest set found whose ablation removes the spike, and its backups.
        later_sinks: Tokens behind the first position whose norm stands out.
        shared_dims: Residual dimensions that are massive on all tokens alike; the verdicts leave them out.
        not_tried: What the search for the smallest set left out.
        sink_layer: The stage that adds most to the norm. None if no MLP makes a spike of the first token.
        neurons: Candidate neurons, largest contribution first, with the effect of zeroing each.
        set_drop: Share of the first token's norm that is lost when all causal neurons are zeroed together.
        set_control_drop: Largest drop when the same number of random neurons is zeroed, over 20 draws.
        stages: All layers that build the spike.
        residual_dims: Massive activations of the first token at the sink layer, largest first (Sun et al. 2024).
        first_token_norm: L2 norm of the first token's residual stream after each layer (median over texts).
        typical_norm: Median norm over later positions of typical text.
        typical_low: The 5 % quantile of these norms.
        typical_high: The 95 % quantile of these norms.
        layers_read: Number of layers read.
        notebook_rule_layer: First layer with an MLP norm above mean + 2 sd. None if there is none, or if not all layers
            were read.
        repeats: Repetitions after which a repeated token becomes a sink.
        attention: Effect of zeroing neurons on the attention behind the sink layer.
        learned_sinks: Whether the model has learned sink logits, which are then included in every attention row.
        sink_rate: Sink rate over 100 texts, or over 25 if layers are read from disk. None if not all layers were read.
        published: What the literature reports. None if nothing is published for the model.
    """

    percent: ClassVar[tuple[str, ...]] = ("share", "ablation_drop", "repeat_drop", "control_drop")
    table_of: ClassVar[str] = "neurons"
    table_without: ClassVar[tuple[str, ...]] = ("neutral_post", "neutral_up")

    norm_spike: NormSpike | None = None
    attention_sink: AttentionSink | None = None
    causal_sets: tuple[CausalSet, ...] = ()
    later_sinks: tuple[LaterSink, ...] = ()
    shared_dims: tuple[int, ...] = ()
    not_tried: tuple[str, ...] = ()
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
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set of neurons found whose ablation removes the spike."""
        return next((s for s in self.causal_sets if s.kind == "minimal"), None)

    @property
    def typical_ratio(self) -> float | None:
        """The 95 % quantile of typical norms at the sink layer divided by their median."""
        high = None if self.sink_layer is None else self.typical_high[self.sink_layer]
        return high and high / (self.typical_norm[self.sink_layer or 0] or high)

    def conclusion(self) -> str:
        """Whether there is a norm spike and an attention sink, and what makes and carries them."""
        spike, sink, minimal = self.norm_spike, self.attention_sink, self.minimal
        if spike is None and sink is None:
            return f"Neither a norm spike nor an attention sink: no position stands out{self._among()}."
        if sink is None:
            return f"Norm spike without an attention sink{self._among()}: {self._made()}."
        rate = f"{sink.rate:.0%} of the heads attend to " + (
            "their learned sink logits" if sink.carried_by == "learned logits" else _place(sink.positions[0])
        )
        if spike is None:
            return f"Attention sink without a norm spike: {rate}, and {_carried(sink)}."
        if sink.carried_by != "spike":
            some = minimal is not None and (minimal.heads_lost or 0.0) > 0  # heads behind the sink layer
            return (
                f"Norm spike and attention sink, but {'most ' * some}heads do not need the spike: {self._made()}; "
                f"{rate}, and {_carried(sink)}."
            )
        if minimal is None:
            return f"Norm spike and attention sink: {rate}; {self._made()}."
        one = len(minimal.sites) == 1
        lost = (
            ""
            if minimal.drop_attention is None
            else f" and {minimal.drop_attention:.1%} of the attention to it in later layers"
        )
        return (
            f"Norm spike and attention sink: {_members(minimal)} make{'s' * one} the spike that the heads attend to. "
            f"Zeroing {'it' if one else 'them'} takes away {minimal.drop_sink_layer:.1%} of the first token's "
            f"norm{lost}; zeroing as many random neurons takes away at most {minimal.control:.1%} (largest of {DRAWS} "
            "draws)."
        )

    def _among(self) -> str:
        return "" if self.layers_read == self.model.n_layers else f" in the {self.layers_read} layers read"

    def _made(self) -> str:
        """What makes the spike, as the middle of a sentence."""
        spike, minimal = self.norm_spike, self.minimal
        assert spike is not None
        if 0 not in spike.positions:
            return f"norms stand out at {', '.join(repr(s.token) for s in self.later_sinks)}, not at the first token"
        size = f"the first token's norm reaches {spike.ratio:.0f} times the typical one"
        if minimal is not None:
            return (
                f"{size}, and {_members(minimal)} make{'s' * (len(minimal.sites) == 1)} it (zeroing takes away "
                f"{minimal.drop_sink_layer:.1%} of the norm, random neurons at most {minimal.control:.1%})"
            )
        if self.sink_layer is not None:
            part = next(
                (f"; the best set of {len(s.sites)} takes away {s.drop_last_layer:.1%}" for s in self.causal_sets), ""
            )
            return (
                f"{size}; layer {self.sink_layer} builds it, but no set of neurons that was tried takes it away{part}"
            )
        return f"{size}, made by {'the ' + spike.made_by if spike.made_by else 'no single component'}"

    def details(self) -> list[str]:
        """The model, the norms, the evidence, and what repetition shows."""
        lines = [f"{self.layers_read} of {self.model.n_layers} layers were read.", *self._spike_lines()]
        lines += self._set_lines() + self._sink_lines()
        if self.sink_layer is not None:
            lines += self._repeat_lines()
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            lines.append(f"This {verdict} what is published ({self.published.source}).")
        return lines

    def _spike_lines(self) -> list[str]:
        lines: list[str] = []
        spike, layer = self.norm_spike, self.sink_layer
        if self.shared_dims:
            dims = ", ".join(map(str, self.shared_dims))
            lines.append(f"Residual dimensions {dims} are massive on all tokens; the verdicts leave them out.")
        if spike is None:
            return lines
        if layer is not None and (norm := self.first_token_norm[layer]) and (typical := self.typical_norm[layer]):
            lines.append(
                f"The sink layer is layer {layer}: after it the first token's norm is {norm:.4g}, "
                f"{norm / typical:.0f} times the typical one of {typical:.4g}."
            )
        if len(self.stages) > 1:
            added = and_([f"layer {s.layer} adds {s.share:.1%}" for s in self.stages])
            lines.append(f"The spike is built in stages: {added}.")
        if spike.plateau is not None:
            down = f", and layers {and_(spike.step_down)} take it away again" if spike.step_down else ""
            first, last = spike.plateau
            lines.append(f"The norm stands out after layers {first} to {last}{down}.")
        if self.residual_dims:
            lines.append(f"The massive activations are in residual dimensions {and_(self.residual_dims)}.")
        if (n := spike.normalised) is not None:
            lines.append(
                f"After the next layer's normalization, {n.dims:.0f} dimensions hold 90 % of the first token (typical "
                f"tokens need {n.typical_dims:.0f}). Its direction has cosine {n.cosine:.2f} from layer to layer "
                f"(typical tokens have {n.typical_cosine:.2f})."
            )
        for later in self.later_sinks:
            made = (
                "no MLP makes it"
                if later.set is None
                else (
                    f"made by {_members(later.set)}, which take{'s' * (len(later.set.sites) == 1)} away "
                    f"{later.set.drop_last_layer:.1%} (random neurons at most {later.set.control:.1%})"
                )
            )
            lines.append(f"The norm of {later.token!r} reaches {later.ratio:.0f} times the typical one, {made}.")
        return lines

    def _set_lines(self) -> list[str]:
        lines: list[str] = []
        for s in self.causal_sets:
            if s.kind == "backup":
                lines.append(
                    f"{_members(s)} is a backup: it brings the spike back when the others are silent, and zeroing it "
                    f"as well takes away {s.drop_last_layer:.1%} of the norm at the last layer that has the spike."
                )
            elif len(s.sites) > 1 and not self.causal:
                lines.append("None of these neurons is needed alone, because the others make the spike without it.")
        return lines + [f"The search was limited: {text}." for text in self.not_tried]

    def _sink_lines(self) -> list[str]:
        lines: list[str] = []
        if (s := self.sink_rate) is not None:
            lines.append(
                f"The sink rate is {s.value:.1%}: this share of all heads gives position 0 more than {s.eps} of its "
                f"attention ({s.samples} texts of {s.length} tokens)."
            )
        if (sink := self.attention_sink) is None:
            lines.append(f"Fewer than {HEADS} heads attend to any one position{self._among()}.")
        else:
            for p in sink.positions[1:] if sink.positions and sink.positions[0].position == 0 else sink.positions:
                lines.append(f"{p.rate:.1%} of the heads attend to {_place(p)}.")
            if sink.carriers:
                needed = [f"{c.name} ({c.heads_lost:.0%} of the heads)" for c in sink.carriers if c.heads_lost >= 0.2]
                lines.append(f"Heads lose the sink without {and_(needed) if needed else 'no single component'}.")
        if (a := self.attention) is not None:
            first, last = min(a.layers), max(a.layers)
            where = f"layer {first}" if first == last else f"layers {first} to {last}"
            lines.append(
                f"In {where}, later tokens give the first one {a.intact:.3f} of their attention, {a.ablated:.3f} "
                f"without these neurons, and {a.control:.3f} without random ones."
            )
        if self.learned_sinks:
            lines.append("The model has learned sink logits, which took part in every attention row.")
        return lines

    def _repeat_lines(self) -> list[str]:
        r = self.repeats
        tried, lines = len(r.tokens) - len(r.at_once), list[str]()
        if tried and r.median is None:
            lines.append(f"None of {tried} tokens becomes a sink by repetition within {r.max_repeats} repetitions.")
        elif tried:
            never = f"; {r.unreached} of {tried} never do within {r.max_repeats}" if r.unreached else ""
            over = f"median over {tried - r.unreached} tokens{never}"
            lines.append(f"A repeated token becomes a sink after {r.median:.0f} repetitions ({over}).")
        return lines + at_once_line([t.token for t in r.at_once])


def _members(found: CausalSet) -> str:
    """The neurons of a set, such as "L1.N3 and L1.N4"."""
    return and_(found.sites)


def _place(found: SinkPosition) -> str:
    if found.position == 0:
        return "the first token"
    return f"{found.token!r} wherever it stands" if found.token else f"position {found.position}, whatever stands there"


def _carried(sink: AttentionSink) -> str:
    if sink.carried_by is None:
        return "no single component carries it"
    writer = next((c.name for c in reversed(sink.carriers) if c.heads_lost >= LOST and "layer" in c.name), "a layer")
    what = {
        "mark": f"a mark that the {writer} writes",
        "position": "the position alone, through the rotary embedding",
        "key bias": "the bias of their keys",
    }.get(sink.carried_by, f"the {sink.carried_by}")
    return f"they read {what}"


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_find_sinks",
    loading="enough",
    quick={"max_repeats": 64},
    scan={
        "order": 0,
        "seconds": [1.2, 1.5],
        "full": {"all_layers": True},
        "numbers": {
            "norm lost without the neurons": [
                "minimal.drop_sink_layer",
                "minimal.control",
                "minimal.control",
            ],
            "attention to the first token without them": [
                "attention.ablated",
                "attention.control",
                "attention.intact - attention.control",
            ],
            "first token's norm over the typical one": ["norm_spike.ratio", "typical_ratio", "typical_ratio"],
        },
        "facts": {
            "sink layer": "sink_layer",
            "neurons that make the spike": "minimal.sites",
            "what carries the attention sink": "attention_sink.carried_by",
            "matches what is published": "published.matches",
        },
    },
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
    norm has stayed flat for a third of the layers. If the model has no sink, `sink_layer` is None.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        all_layers: Read every layer even if the model is not in memory: late stages, sink rate, the notebook's rule.
        top_k: Number of candidate neurons of the sink layer; each is ablated.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope find-sinks --model llama-2-7b --json sinks.json
    """
    ids = setup.ids
    if top_k > (width := setup.target.d_mlp):
        raise SinkscopeError(f"--top-k {top_k} is more than the {width} neurons of a layer; give at most that")
    limit = room(setup.target, max_repeats)
    words = pick_tokens(setup.tokenizer, ids, tokens, setup.seed)
    unknown = getattr(setup.tokenizer, "unk_token_id", None)  # repeated unknown tokens would act as a repeated token
    share = 0.0 if unknown is None else float((ids[:, 1:] == unknown).float().mean())
    setup.record(max_repeats=limit, unknown_tokens=share)
    whole = all_layers or setup.target.resident
    proof, sets, repeated, at = Proof((), None, None, ()), Found((), (), ()), None, None
    while True:
        seen = walk_far_enough(setup, whole=whole)
        target, layer, depth, stages = setup.target, seen.sink_layer(), len(seen.first), seen.stages()
        heard, rate = _received(setup, depth) if whole else (received(target, ids, RATE_EPS, layers=depth), None)
        generator = torch.Generator().manual_seed(setup.seed)
        if layer is not None and at != stages:  # after reading further layers these are often the same
            at = stages
            repeated = repeat_until_half(
                target, layer, words, prefixes(setup, words), limit, setup.progress, seen.shared
            )
            proof = prove(target, ids, layer, top_k, generator, repeated.view, stages, seen.shared)
        if layer is not None:
            sets = causal_sets(target, ids, seen, proof.neurons, heard.heads(), generator)
        lost = sets.minimal.heads_lost if sets.minimal is not None else None
        if whole or depth == target.n_layers or (lost or 0.0) >= LOST:
            break
        whole = True  # the stages found do not carry the attention to the first token: read on
    known = {n.site for n in proof.neurons}
    unread = [None] * (seen.n_layers - depth)
    first, low, typical, high = ((*norms, *unread) for norms in (seen.first, *zip(*seen.typical, strict=True)))
    later = _later(setup, seen, heard, generator)
    spike = _spike(setup, seen, sets, later)
    return FindSinks(
        norm_spike=spike,
        attention_sink=_attention_sink(setup, heard, spike, sets, later, depth),
        causal_sets=sets.sets,
        later_sinks=later,
        shared_dims=tuple(seen.shared),
        not_tried=sets.not_tried,
        sink_layer=layer,
        neurons=(*proof.neurons, *(n for n in sets.added if n.site not in known)),
        set_drop=proof.set_drop,
        set_control_drop=proof.set_control_drop,
        stages=tuple(Stage(i, seen.mlp_first[i] / max(seen.first)) for i in stages),
        residual_dims=proof.dims,
        first_token_norm=first,
        typical_norm=typical,
        typical_low=low,
        typical_high=high,
        layers_read=depth,
        notebook_rule_layer=seen.notebook_layer(),
        repeats=_repeats(target, words, repeated, limit),
        attention=None if layer is None else _attention(target, ids, layer, proof),
        learned_sinks=target.adapter.learned_sinks,
        sink_rate=rate,
        published=_published(target, layer, proof),
    )


def _received(setup: Setup, depth: int) -> tuple[Received, SinkRate | None]:
    """Attention over many short texts, as the sink rate is defined; over the typical text where these do not fit."""
    target = setup.target
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return received(target, setup.ids, RATE_EPS, layers=depth), None
    # A batch takes 128 MB at its widest activation. Layers read from disk are read once, so there is one smaller batch.
    fitting = max(1, (1 << 25) // (RATE_LENGTH * target.d_mlp))
    texts, batch = (RATE_TEXTS, fitting) if target.resident else (RATE_TEXTS // 4, RATE_TEXTS)
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    heard = received(target, ids, RATE_EPS, progress=setup.progress, batch=batch)
    return heard, SinkRate(RATE_EPS, RATE_LENGTH, len(ids), heard.rate)


def _spike(setup: Setup, seen: Walk, sets: Found, later: tuple[LaterSink, ...]) -> NormSpike | None:
    standing = seen.standing()
    places = {later_sink.position for later_sink in later} | ({0} if standing else set())
    if not places:
        return None
    if not standing:
        return NormSpike(tuple(sorted(places)), (), (), max(one.ratio for one in later), None, None)
    stages = seen.stages()
    return NormSpike(
        positions=tuple(sorted(places)),
        step_up=tuple(stages or seen.steps(1)),
        step_down=tuple(seen.steps(-1)),
        ratio=max(a / max(b, LEAST) for a, b in zip(seen.spike, seen.usual, strict=True)),
        plateau=(standing[0], standing[-1]),
        made_by="MLP" if stages else maker(setup.target, setup.ids[:2, :32], standing[0], seen.shared),
        triggers=triggers(setup.target, setup.ids, () if sets.minimal is None else sets.minimal.numbers),
        normalised=normalised(setup.target, setup.ids, standing, len(seen.first)),
    )


def _later(setup: Setup, seen: Walk, heard: Received, generator: torch.Generator) -> tuple[LaterSink, ...]:
    """Tokens behind the first position whose norm stands out most often, and what makes each of them."""
    high = torch.stack(
        [
            norms > SINK_RATIO * torch.maximum(norms[:, 1:].quantile(0.75), torch.tensor(usual))
            for norms, usual in zip(seen.norms, seen.usual, strict=True)
        ]
    ).any(0)
    high[:, 0] = False
    ids, found = setup.ids, list[LaterSink]()
    for token, _ in Counter(ids[high].tolist()).most_common(LATER):
        row, at = max((high & (ids == token)).nonzero().tolist(), key=lambda place: -place[1])
        ratio = max(float(n[row, at]) / max(u, LEAST) for n, u in zip(seen.norms, seen.usual, strict=True))
        heads = _attending(setup.target, ids[row], at, len(seen.first))
        made = later_set(setup.target, ids, (row, at), seen, heads, generator)
        found.append(LaterSink(setup.tokenizer.decode([token]), at, ratio, made))
    return tuple(found)


def _repeats(target: Target, words: list[int], repeated: Repetition | None, limit: int) -> Repeats:
    if repeated is None:
        return Repeats((), None, 0, limit)
    found = repeated.repeats
    rows = tuple(RepeatedToken(target.tokenizer.decode([w]), w, n) for w, n in zip(words, found, strict=True))
    got = [n for n in found if n is not None and n > 1]
    return Repeats(rows, float(median(got)) if got else None, found.count(None), limit)


def _attention(target: Target, ids: Int[Tensor, "row pos"], layer: int, proof: Proof) -> FirstTokenAttention | None:
    layers = list(range(layer + 1, min(layer + 4, target.n_layers)))
    sites = [n.site for n in proof.causal]
    if not layers or not sites:
        return None
    edits = [Edit(zero=tuple(sites)), Edit(zero=proof.controls)]
    seen = effects(target, ids[:1], edits, upto=layers[-1], attention=True)
    assert seen.attention is not None and seen.intact_attention is not None
    rows = (seen.intact_attention, *seen.attention)
    return FirstTokenAttention(tuple(layers), *(float(row[0, layers].mean()) for row in rows))


def _attending(target: Target, row: Int[Tensor, " pos"], at: int, layers: int) -> list[tuple[int, int]]:
    """(layer, head) that attend to one position of one text."""
    seen = effects(target, row[None], [], at=at, upto=layers - 1, attention=True).intact_attention
    return [] if seen is None else [(i, head) for i, head in (seen[0] > RATE_EPS).nonzero().tolist()]


def _attention_sink(
    setup: Setup, heard: Received, spike: NormSpike | None, sets: Found, later: tuple[LaterSink, ...], depth: int
) -> AttentionSink | None:
    """The positions that receive attention, and what carries it."""
    heads, learned, tokens = heard.heads(), heard.learned_heads(), heard.later()
    if not (heads or learned or tokens):
        return None
    decode = setup.tokenizer.decode
    positions = [SinkPosition(0, decode([int(heard.ids[0, 0])]), heard.rate)] if heads else []
    positions += [SinkPosition(at, "" if token is None else decode([token]), share) for token, at, share in tokens]
    rate, carried, tried = float(heard.learned.float().mean()), "learned logits", tuple[Carrier, ...]()
    if heads:
        rate, (carried, tried) = heard.rate, _carried_first(setup, heard, heads, spike, sets.minimal)
    elif tokens and not learned:
        rate, (carried, tried) = positions[0].rate, _carried_later(setup, heard, positions[0].token, later, depth)
    by_layer = heard.above[..., 0].float().mean((1, 2)).tolist()
    return AttentionSink(rate, RATE_EPS, tuple(positions), depth, carried, tuple(by_layer), tried)


def _carried_first(
    setup: Setup, heard: Received, heads: list[tuple[int, int]], spike: NormSpike | None, minimal: CausalSet | None
) -> tuple[str | None, tuple[Carrier, ...]]:
    """What carries the sink at the first token, and what was tried where its spike does not."""
    if minimal is not None:
        behind = sum(i > minimal.sites[0].layer for i, _ in heads) / len(heads)
        if (minimal.heads_lost or 0.0) * behind >= LOST:
            return "spike", ()
    tried = tuple(carriers(setup.target, heard.ids[:2, :48], heads))
    makes = spike is not None and 0 in spike.positions and _makes(tried, spike)
    return "spike" if makes else carried_by(tried), tried


def _carried_later(
    setup: Setup, heard: Received, name: str, later: tuple[LaterSink, ...], depth: int
) -> tuple[str | None, tuple[Carrier, ...]]:
    """The same of the first of the tokens behind the first position."""
    made = [s.set for s in later if s.token == name]
    if any(m is not None and (m.heads_lost or 0.0) >= LOST for m in made):
        return "spike", ()
    token, at, _ = heard.later()[0]
    row = 0 if token is None else int((heard.ids[:, at] == token).nonzero()[0])
    there = _attending(setup.target, heard.ids[row], at, depth)
    tried = tuple(carriers(setup.target, heard.ids[row : row + 1], there, at)) if there else ()
    return carried_by(tried), tried


def _makes(tried: tuple[Carrier, ...], spike: NormSpike) -> bool:
    """Whether what the heads need most is what makes the spike."""
    needed = [c.name for c in tried if c.heads_lost >= LOST]
    stages = [f"MLP of layer {i}" for i in spike.step_up] if spike.made_by == "MLP" else [spike.made_by]
    return any(name in stages for name in needed)


def _published(target: Target, layer: int | None, proof: Proof) -> Published | None:
    known = published_for(target.name)
    if known is None:
        return None
    if known.neurons:
        found = {(n.layer, n.neuron) for n in proof.causal}
        return Published(known.source, layer in known.layers and set(known.neurons) <= found)
    if known.residual_dims:
        return Published(known.source, set(known.residual_dims) <= set(proof.dims))
    return None
