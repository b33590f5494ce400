"""What `find_sinks` finds, and the words in which it is told. The steps that find it are in `find`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sinkscope.files.notation import neuron_name
from sinkscope.measure import Result
from sinkscope.sinks.tokens import and_, at_once_line

DRAWS = 20  # random control sets of the same size for every ablation
HEADS = 2  # an attention sink needs at least this many heads
LOST = 0.5  # a head has lost a sink if this share of its attention is gone
RATE_EPS = 0.3  # mean attention above which a head attends to a position (Gu et al. 2024)
Sites = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Member:
    """A neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Member:
        """The neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        return cls(site[0], site[1] if len(site) == 3 else None, site[-1])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return (self.layer, self.neuron) if self.expert is None else (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Neuron(Member):
    """A candidate neuron. Drops are the share of the norm at the sink layer that is lost when the neuron is zeroed.

    Attributes:
        contribution_norm: Norm of what the neuron writes at the first token, `hook_post[j] * W_out[j]`.
        share: Contribution norm divided by the norm of the MLP's output at the first token.
        ablation_drop: Share of the first token's norm that is lost when the neuron is zeroed.
        repeat_drop: Share of the norm lost at the last of the repeated tokens; None if no token became a sink.
        control_drop: Largest loss when a random neuron of the layer is zeroed instead, over 20 draws.
        causal: Whether the ablation drop exceeds the control drop and is at least 0.1.
        neutral_post: Median `hook_post` on typical text, the value that SinkPatch writes instead.
        neutral_up: Median output of the up projection on typical text; None if the MLP has no such factor.
    """

    contribution_norm: float
    share: float
    ablation_drop: float
    repeat_drop: float | None
    control_drop: float
    causal: bool
    neutral_post: float
    neutral_up: float | None


@dataclass(frozen=True)
class CausalSet:
    """Neurons that together make the spike, and the effect of zeroing all of them.

    Attributes:
        sites: The neurons of the set.
        drop_sink_layer: Share of the first token's norm at the sink layer that is lost when the set is zeroed.
        drop_last_layer: The same share at the last layer after which the norm stands out.
        drop_attention: Share of the attention to the first token that is lost, over the heads of the sink behind the
            sink layer. None if there are no such heads among the layers read.
        heads_lost: Share of these heads that lose at least half of that attention.
        control: The largest of these drops among 20 random sets of the same number of neurons from the same layers.
        kind: "minimal": the smallest set found that removes the spike; "partial": the best set found, which does not
            remove it; "backup": neurons of the minimal set that write a spike only when the other neurons of the set
            are silent. The drops of a backup are relative to the state with the others silent.
    """

    sites: tuple[Member, ...]
    drop_sink_layer: float
    drop_last_layer: float
    drop_attention: float | None
    heads_lost: float | None
    control: float
    kind: Literal["minimal", "partial", "backup"]

    @property
    def verified(self) -> bool:
        """Whether the set's effect on the norm is larger than that of every random set."""
        return min(self.drop_sink_layer, self.drop_last_layer) > self.control

    @property
    def numbers(self) -> Sites:
        """The sites in the form that interventions take."""
        return tuple(member.site for member in self.sites)


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
class Trigger:
    """A neuron's gate times up as a quadratic form of its input, and how well tokens match its best direction.

    Where the activation function is close to linear, a neuron computes about `(g x)(u x)` for an input x. Over inputs
    of a fixed length its largest value is `(|g| |u| + g u) / 2` times the squared length. `first` and `typical` are the
    shares of that maximum that the first token and the median typical token reach.
    """

    layer: int
    neuron: int
    first: float
    typical: float


@dataclass(frozen=True)
class Normalised:
    """A token's residual stream after the norm in front of the attention, averaged over the layers of the plateau.

    Attributes:
        dims: Number of residual dimensions that hold 90 % of the squared norm at the first token.
        typical_dims: The same number at typical tokens.
        cosine: Cosine between neighbouring layers at the first token. Near 1 the normalised stream is constant.
        typical_cosine: The same cosine at typical tokens.
    """

    dims: float
    typical_dims: float
    cosine: float
    typical_cosine: float


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

    @property
    def makers(self) -> tuple[str, ...]:
        """The components that make the first token's spike, named as carriers are."""
        if self.made_by == "MLP":
            return tuple(f"MLP of layer {layer}" for layer in self.step_up)
        return () if self.made_by is None else (self.made_by,)


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
class Carrier:
    """A candidate for the signal that the heads of a sink read.

    Attributes:
        name: The component, such as "spike", "attention of layer 0" or "position embedding".
        heads_lost: Share of the sink's heads that lose at least half of their attention to the first token without it.
        drop: Share of the attention to the first token that is lost without it, averaged over these heads.
    """

    name: str
    heads_lost: float
    drop: float

    @property
    def needed(self) -> bool:
        """Whether most heads of the sink need it."""
        return self.heads_lost >= LOST


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
        lines = [f"{self.layers_read} of {self.model.n_layers} layers were read."]
        lines += [*self._spike_lines(), *self._set_lines(), *self._sink_lines()]
        if self.sink_layer is not None:
            lines += self._repeat_lines()
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            lines.append(f"This {verdict} what is published ({self.published.source}).")
        return lines

    def _spike_lines(self) -> Iterator[str]:
        spike, layer = self.norm_spike, self.sink_layer
        if self.shared_dims:
            dims = ", ".join(map(str, self.shared_dims))
            yield f"Residual dimensions {dims} are massive on all tokens; the verdicts leave them out."
        if spike is None:
            return
        if layer is not None and (norm := self.first_token_norm[layer]) and (typical := self.typical_norm[layer]):
            yield (
                f"The sink layer is layer {layer}: after it the first token's norm is {norm:.4g}, "
                f"{norm / typical:.0f} times the typical one of {typical:.4g}."
            )
        if len(self.stages) > 1:
            added = and_([f"layer {s.layer} adds {s.share:.1%}" for s in self.stages])
            yield f"The spike is built in stages: {added}."
        if spike.plateau is not None:
            down = f", and layers {and_(spike.step_down)} take it away again" if spike.step_down else ""
            first, last = spike.plateau
            yield f"The norm stands out after layers {first} to {last}{down}."
        if self.residual_dims:
            yield f"The massive activations are in residual dimensions {and_(self.residual_dims)}."
        if (n := spike.normalised) is not None:
            yield (
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
            yield f"The norm of {later.token!r} reaches {later.ratio:.0f} times the typical one, {made}."

    def _set_lines(self) -> Iterator[str]:
        for s in self.causal_sets:
            if s.kind == "backup":
                yield (
                    f"{_members(s)} is a backup: it brings the spike back when the others are silent, and zeroing it "
                    f"as well takes away {s.drop_last_layer:.1%} of the norm at the last layer that has the spike."
                )
            elif len(s.sites) > 1 and not self.causal:
                yield "None of these neurons is needed alone, because the others make the spike without it."
        yield from (f"The search was limited: {text}." for text in self.not_tried)

    def _sink_lines(self) -> Iterator[str]:
        if (s := self.sink_rate) is not None:
            yield (
                f"The sink rate is {s.value:.1%}: this share of all heads gives position 0 more than {s.eps} of its "
                f"attention ({s.samples} texts of {s.length} tokens)."
            )
        if (sink := self.attention_sink) is None:
            yield f"Fewer than {HEADS} heads attend to any one position{self._among()}."
        else:
            for p in sink.positions[1:] if sink.positions and sink.positions[0].position == 0 else sink.positions:
                yield f"{p.rate:.1%} of the heads attend to {_place(p)}."
            if sink.carriers:
                needed = [f"{c.name} ({c.heads_lost:.0%} of the heads)" for c in sink.carriers if c.heads_lost >= 0.2]
                yield f"Heads lose the sink without {and_(needed) if needed else 'no single component'}."
        if (a := self.attention) is not None:
            first, last = min(a.layers), max(a.layers)
            where = f"layer {first}" if first == last else f"layers {first} to {last}"
            yield (
                f"In {where}, later tokens give the first one {a.intact:.3f} of their attention, {a.ablated:.3f} "
                f"without these neurons, and {a.control:.3f} without random ones."
            )
        if self.learned_sinks:
            yield "The model has learned sink logits, which took part in every attention row."

    def _repeat_lines(self) -> Iterator[str]:
        r = self.repeats
        tried = len(r.tokens) - len(r.at_once)
        if tried and r.median is None:
            yield f"None of {tried} tokens becomes a sink by repetition within {r.max_repeats} repetitions."
        elif tried:
            never = f"; {r.unreached} of {tried} never do within {r.max_repeats}" if r.unreached else ""
            over = f"median over {tried - r.unreached} tokens{never}"
            yield f"A repeated token becomes a sink after {r.median:.0f} repetitions ({over})."
        yield from at_once_line([t.token for t in r.at_once])


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
    writer = next((c.name for c in reversed(sink.carriers) if c.needed and "layer" in c.name), "a layer")
    what = {
        "mark": f"a mark that the {writer} writes",
        "position": "the position alone, through the rotary embedding",
        "key bias": "the bias of their keys",
    }.get(sink.carried_by, f"the {sink.carried_by}")
    return f"they read {what}"
