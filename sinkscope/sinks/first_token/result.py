"""What `find_sinks` returns, and the words in which it reports it. The steps that find it are in `find`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from sinkscope.files.notation import agreeing, brief, counted, listed, neuron_name
from sinkscope.files.result import Number
from sinkscope.measure import Result
from sinkscope.measure.evidence import NEEDED, Evidence
from sinkscope.sinks.tokens import left_out_line

CONTROL_DRAWS = 20  # random control sets of the same size for every ablation
SINK_HEADS = 2  # an attention sink needs at least this many heads
SHORT = 64  # length of the texts in which attention is read first (Gu et al. 2024)
MOST_HEADS = 0.9  # of the attending heads lose half of their attention without a spike that "the heads" attend to
NAMED = (5, 3, 1)  # neurons that a conclusion names; as many of these numbers as fit into it
ATTENTION_LENGTH = 32  # longest text in which attention with and without neurons is compared
RATE_EPS = 0.3  # mean attention above which a head attends to a position (Gu et al. 2024)
Sites = tuple[tuple[int, ...], ...]
"""Neurons as interventions take them: (layer, neuron), or (layer, expert, neuron) in a mixture."""
Heads = Sequence[tuple[int, int]]
"""Heads as pairs of layer and head."""


@dataclass(frozen=True)
class Member:
    """A neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Member:
        """The neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        if len(site) == 2:
            return cls(site[0], None, site[1])
        return cls(site[0], site[1], site[2])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        if self.expert is None:
            return (self.layer, self.neuron)
        return (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


def members_of(sites: Sites) -> tuple[Member, ...]:
    """The neurons that interventions take in this form."""
    return tuple(Member.of(site) for site in sites)


def sites_of(members: Sequence[Member]) -> Sites:
    """Neurons in the form that interventions take."""
    return tuple(member.site for member in members)


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
        kind: "minimal": the smallest set found that removes the spike; "backup": neurons of the minimal set that write
            a spike only when the other neurons of the set are silent. The drops of a backup are relative to the state
            with the others silent.
        margin_norm: Two standard errors of the drop at the sink layer over texts; None for too few texts.
        margin_attention: The same of the drop in attention.
    """

    sites: tuple[Member, ...]
    drop_sink_layer: float
    drop_last_layer: float
    drop_attention: float | None
    heads_lost: float | None
    control: float
    kind: Literal["minimal", "backup"]
    margin_norm: float | None = None
    margin_attention: float | None = None

    @property
    def edit_sites(self) -> Sites:
        """The neurons in the form that interventions take."""
        return sites_of(self.sites)

    @property
    def names(self) -> str:
        """The neurons in words, such as "L1.N3 and L1.N4"."""
        return listed(self.sites)

    @property
    def makes_the_spike(self) -> bool:
        """Whether the set takes away at least half of the norm, and more than random neurons do."""
        return Evidence(self.drop_sink_layer, self.control).holds

    @property
    def carries_attention(self) -> bool:
        """Whether at least half of the heads lose the sink without these neurons."""
        return self.heads_lost is not None and self.heads_lost >= NEEDED


def few_heads(lengths: Sequence[int]) -> str:
    """That no position is an attention sink, in texts of which lengths, as part of a sentence."""
    return f"too few heads attend to any one position in texts of {listed(lengths)} tokens"


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
class RepeatsNeeded:
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
class NormSpike:
    """Positions whose norm stands out (massive activations).

    Attributes:
        positions: Positions in pieces of typical text whose norm stands out. Position 0 is the first token.
        step_up: Layers that build the spike of the first token.
        step_down: Layers that reduce it by at least 5 %.
        ratio: The largest ratio of the spike's norm to the typical norm.
        plateau: The first and last layer after which the norm stands out.
        made_by: "MLP", or the component without which the first token's spike is gone. None if there is no single one.
        begun_by: What makes a norm that stands out before an MLP amplifies it. None if there is no such norm, or no
            single component makes it.
        share: Share of the texts whose first token has the spike.
        margin: Two standard errors of the ratio over texts; None for too few texts.
    """

    positions: tuple[int, ...]
    step_up: tuple[int, ...]
    step_down: tuple[int, ...]
    ratio: float
    plateau: tuple[int, int] | None
    made_by: str | None
    begun_by: str | None = None
    share: float = 1.0
    margin: float | None = None

    @property
    def makers(self) -> tuple[str, ...]:
        """The components that make the first token's spike, named as carriers are."""
        makers = []
        if self.begun_by is not None:
            makers.append(self.begun_by)
        if self.made_by == "MLP":
            makers += [f"MLP of layer {layer}" for layer in self.step_up]
        elif self.made_by is not None:
            makers.append(self.made_by)
        return tuple(makers)


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

    def __str__(self) -> str:
        if self.position == 0:
            return "the first token"
        if self.token:
            return f"{self.token!r} wherever it stands"
        return f"position {self.position}, whatever stands there"


@dataclass(frozen=True)
class Carrier:
    """A candidate for the signal that the heads of a sink read.

    Attributes:
        name: The component, such as "attention of layer 0" or "position embedding".
        heads_lost: Share of the sink's heads that lose at least half of their attention to the first token without it.
    """

    name: str
    heads_lost: float

    @property
    def needed(self) -> bool:
        """Whether at least half of the heads of the sink need it."""
        return self.heads_lost >= NEEDED


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
        share: Share of the texts in which heads attend to the first token; `rate` is over these texts.
        length: Length of these texts, in tokens.
        window: Positions that the attending heads see, if a window hides others.
        learned_rate: Share of heads that attend to a learned sink logit, beside the position; 0 if too few do.
    """

    rate: float
    eps: float
    positions: tuple[SinkPosition, ...]
    layers_read: int
    carried_by: str | None
    by_layer: tuple[float, ...] = ()
    carriers: tuple[Carrier, ...] = ()
    share: float = 1.0
    length: int = SHORT
    window: int | None = None
    learned_rate: float = 0.0

    @property
    def who(self) -> str:
        """Which share of the heads attends where, as part of a sentence."""
        place = "their learned sink logits"
        if self.carried_by != "learned logits":
            place = str(self.positions[0])
        return f"{self.rate:.0%} of heads attend to {place}"

    @property
    def is_elsewhere(self) -> bool:
        """Whether heads attend to a later position, and not to the first."""
        return self.carried_by != "learned logits" and bool(self.positions) and self.positions[0].position > 0

    @property
    def texts(self) -> str:
        """In which texts heads attend, as part of a sentence; empty if they do in all short ones."""
        words = f" in {self.share:.0%} of texts" if self.share < 1 else ""
        if self.length > SHORT:
            words = f"{words or ' in texts'} of {self.length} tokens"
        return words

    @property
    def conditions(self) -> tuple[str, ...]:
        """What a sentence says of texts and windows, the shorter forms for where there is less room."""
        window = f" (window {self.window})" if self.window is not None else ""
        return window + self.texts, self.texts, ""

    @property
    def what(self) -> str:
        """What the heads read, as part of a sentence."""
        if self.carried_by == "mark":
            writers = [c.name for c in self.carriers if c.needed and "layer" in c.name]
            return f"they read a mark by the {writers[-1]}"
        words = {
            None: "no single component carries it",
            "position": "they read the position alone, through the rotary embedding",
            "key bias": "they read the bias of their keys",
            "learned logits": "these stand in for a token",
        }
        return words.get(self.carried_by, f"they read the {self.carried_by}")


@dataclass(frozen=True)
class RepetitionSpike:
    """What makes the spike of repeated tokens.

    Attributes:
        token: The repeated token.
        repeats: Number of repetitions; the last one was examined.
        drop: Share of its norm that is lost without the neurons that make the first token's spike.
        set: Other neurons that make it. None if the first token's do, or if no set was found.
        neurons: The neurons of this set, as they are on the last repetition.
    """

    token: str
    repeats: int
    drop: float
    set: CausalSet | None
    neurons: tuple[Neuron, ...]

    @property
    def same_neurons(self) -> bool:
        """Whether at least half of the repeated token's norm needs the first token's neurons."""
        return self.drop >= NEEDED

    def sentence(self, names: str) -> str:
        """Which other neurons repetition goes through.

        Args:
            names: The neurons that make the first token's spike.
        """
        share = f"{self.drop:.1%}".replace("-0.0%", "0.0%")
        lost = f"without {names}, {share} of the norm of the repeated token {self.token!r} is lost"
        if self.set is None:
            return f"Repetition goes another way: {lost}."
        return (
            f"Repetition trips other neurons: {lost}, and without {self.set.names}, {self.set.drop_sink_layer:.1%} "
            f"(random neurons at most {self.set.control:.1%})."
        )


@dataclass(frozen=True)
class LaterSink:
    """A sink behind the first position, and the neurons that make it one.

    Attributes:
        token: The token as text. Empty if the position is a sink whatever stands there.
        position: The position where it was examined.
        ratio: Its largest norm divided by the typical one.
        set: The smallest set of neurons whose ablation removes its spike. None if no set that was tried does.
    """

    token: str
    position: int
    ratio: float
    set: CausalSet | None

    def carries_attention_to(self, place: SinkPosition) -> bool:
        """Whether this is the position that heads attend to, and they lose it without the neurons."""
        if self.token != place.token or (not place.token and self.position != place.position):
            return False
        return self.set is not None and self.set.carries_attention

    def __str__(self) -> str:
        if self.token:
            return repr(self.token)
        return f"position {self.position} of any text"


@dataclass(frozen=True)
class PublishedSink:
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
        later_sinks: Positions and tokens behind the first position whose norm stands out.
        repetition: What makes the spike of repeated tokens. None if none has a spike, or the first token has none.
        lengths: Lengths of the texts in which attention was read.
        shared_dims: Residual dimensions that are massive on all tokens alike; the verdicts leave them out.
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
        sink_rate: Sink rate over 100 texts, or over 25 if layers are read from disk. None if not all layers were read.
        published: What the literature reports. None if nothing is published for the model.
    """

    percent = ("share", "ablation_drop", "repeat_drop", "control_drop")
    table_of = "neurons"
    table_without = ("neutral_post", "neutral_up")

    norm_spike: NormSpike | None = None
    attention_sink: AttentionSink | None = None
    causal_sets: tuple[CausalSet, ...] = ()
    later_sinks: tuple[LaterSink, ...] = ()
    repetition: RepetitionSpike | None = None
    lengths: tuple[int, ...] = (SHORT,)
    shared_dims: tuple[int, ...] = ()
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
    repeats: RepeatsNeeded
    sink_rate: SinkRate | None
    published: PublishedSink | None

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set of neurons found whose ablation removes the spike."""
        return next(iter(self.causal_sets), None)

    @property
    def typical_ratio(self) -> float | None:
        """The 95 % quantile of typical norms at the sink layer divided by their median."""
        if self.sink_layer is None or not self.typical_norm[self.sink_layer]:
            return None
        return (self.typical_high[self.sink_layer] or 0.0) / (self.typical_norm[self.sink_layer] or 1.0)

    def numbers(self) -> list[Number]:
        """What zeroing the neurons takes away, and how far the norm stands out."""
        numbers = []
        minimal = self.minimal
        if minimal is not None:
            control = minimal.control
            lost = minimal.drop_sink_layer
            numbers.append(Number("norm lost without the neurons", lost, control, minimal.margin_norm))
            lost = minimal.drop_attention
            numbers.append(Number("attention lost without the neurons", lost, control, minimal.margin_attention))
        spike = self.norm_spike
        if spike is not None:
            label = "first token's norm over the typical one"
            numbers.append(Number(label, spike.ratio, self.typical_ratio, spike.margin))
        if self.sink_layer is not None:
            numbers.append(Number("sink layer", str(self.sink_layer)))
        if self.minimal is not None:
            numbers.append(Number("neurons that make the spike", self.minimal.names))
        if self.attention_sink is not None:
            numbers.append(Number("what carries the attention sink", self.attention_sink.carried_by))
        return numbers

    def conclusion(self) -> str:
        """Whether there is a norm spike and an attention sink, and what makes and carries them."""
        spike = self.norm_spike
        sink = self.attention_sink
        if spike is None and sink is None:
            return f"Neither a norm spike nor an attention sink: no norm stands out, and {few_heads(self.lengths)}."
        if sink is None:
            return self._made("Norm spike without an attention sink", ("",))
        if spike is None:
            verdict = "Attention sink without a norm spike"
            return brief(f"{verdict}: {sink.who}{where}; {sink.what}." for where in sink.conditions)
        if 0 in spike.positions and sink.is_elsewhere:
            read = "they read its own spike" if sink.carried_by == "spike" else sink.what
            verdict = "Norm spike at the first token, attention sink elsewhere"
            return brief(f"{verdict}: {sink.who}{where}; {read}." for where in sink.conditions)
        if sink.carried_by != "spike":
            ignored = f"but most heads do not need the spike: {sink.what}"
            return brief(f"Norm spike and attention sink{where}, {ignored}." for where in sink.conditions)
        return self._made("Norm spike and attention sink", sink.conditions)

    def _made(self, verdict: str, conditions: Sequence[str]) -> str:
        """A verdict and who makes the spike, with as many conditions and names as there is room for."""
        choices = product(conditions, (" of its norm", ""), NAMED)
        return brief(f"{verdict}{where}: {self._who_makes_the_spike(norm, most)}." for where, norm, most in choices)

    def _who_makes_the_spike(self, of_norm: str, most: int) -> str:
        """What makes the spike, as the middle of a sentence that names at most so many neurons."""
        spike = self.norm_spike
        minimal = self.minimal
        sink = self.attention_sink
        assert spike is not None
        what = "the spike"
        if 0 not in spike.positions:
            later = self.later_sinks[0]
            what = f"the spike of {later}"
            minimal = later.set
            if minimal is None or not minimal.makes_the_spike:
                return f"norms stand out at {listed(self.later_sinks, most)}, not at the first token"
        elif sink is not None and not sink.conditions[0]:
            what = "the spike that the heads attend to"
            if minimal is not None and minimal.heads_lost is not None and minimal.heads_lost < MOST_HEADS:
                what = "the spike that at least half of the heads need"
        if minimal is not None and minimal.makes_the_spike:
            count = len(minimal.sites)
            makes = f"{agreeing(count, 'makes', 'make')} {what}"
            if spike.begun_by is not None:
                makes = f"{agreeing(count, 'amplifies', 'amplify')} the spike that the {spike.begun_by} begins"
            return (
                f"{listed(minimal.sites, most)} {makes}; zeroing {agreeing(count, 'it', 'them')} removes "
                f"{minimal.drop_sink_layer:.1%}{of_norm}, random neurons at most {minimal.control:.1%}"
            )
        size = f"{spike.ratio:.0f} times the typical one"
        if self.sink_layer is not None:
            return f"layer {self.sink_layer} builds a norm {size}, which no set of neurons tried removes"
        if spike.made_by is None:
            return f"no single component makes the first token's norm, {size}"
        return f"the {spike.made_by} makes the first token's norm, {size}"

    def details(self) -> list[str]:
        """The layers, the sets, tokens behind the first, the attention, the repetitions, and what is published."""
        groups = [
            [f"{self.layers_read} of {self.model.n_layers} layers were read.", *self._spike_sentences()],
            self._set_sentences(),
            self._later_sentences(),
            self._attention_sentences(),
            self._repeat_sentences(),
        ]
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            groups.append([f"This {verdict} what is published ({self.published.source})."])
        return [" ".join(group) for group in groups if group]

    def _spike_sentences(self) -> list[str]:
        spike = self.norm_spike
        layer = self.sink_layer
        sentences = []
        if self.shared_dims:
            dims = listed(self.shared_dims)
            sentences.append(f"The verdicts leave out residual dimensions that are massive on all tokens ({dims}).")
        if spike is not None and spike.share < 1:
            texts = f"{spike.share:.0%} of the texts"
            sentences.append(f"The first token's norm stands out in {texts}; its norms are of these.")
        if layer is not None:
            sentences.append(
                f"The sink layer is layer {layer}: after it the first token's norm is "
                f"{self.first_token_norm[layer]:.4g}, and the typical one is {self.typical_norm[layer]:.4g}."
            )
        if spike is not None and spike.plateau is not None:
            first, last = spike.plateau
            where = f"layers {first} to {last}" if first < last else f"layer {first}"
            sentences.append(f"The norm stands out after {where}.")
        return sentences

    def _set_sentences(self) -> list[str]:
        sentences = []
        for causal_set in self.causal_sets:
            names = causal_set.names
            if causal_set.kind == "backup":
                role = agreeing(len(causal_set.sites), "is a backup: it brings", "are backups: they bring")
                sentences.append(f"{names} {role} the spike back when the others are silent.")
            elif causal_set.drop_attention is not None and causal_set.heads_lost is not None:
                texts = f"texts of at most {ATTENTION_LENGTH} tokens"
                sentences.append(
                    f"Without {names}, the heads of later layers that attend to the first token lose "
                    f"{causal_set.drop_attention:.1%} of that attention ({texts}); {causal_set.heads_lost:.0%} of "
                    "these heads lose at least half."
                )
        return sentences

    def _later_sentences(self) -> list[str]:
        sentences = []
        for later in self.later_sinks:
            maker = "no set of neurons that was tried removes it"
            if later.set is not None:
                maker = f"zeroing {later.set.names} removes {later.set.drop_last_layer:.1%}"
            sentences.append(f"The norm of {later} reaches {later.ratio:.0f} times the typical one; {maker}.")
        return sentences

    def _attention_sentences(self) -> list[str]:
        sentences = []
        sink = self.attention_sink
        rate = self.sink_rate
        if rate is not None:
            sentences.append(
                f"The sink rate is {rate.value:.1%}: this share of all heads gives position 0 more than {rate.eps} of "
                f"its attention ({rate.samples} texts of {rate.length} tokens)."
            )
        if sink is None:
            return [*sentences, f"{few_heads(self.lengths).capitalize()}."]
        if sink.learned_rate:
            sentences.append(f"{sink.learned_rate:.1%} of the heads attend to their learned sink logits.")
        if sink.texts or sink.carriers:
            sentences.append(f"{sink.who}{sink.texts}.")
        later = [f"{place} ({place.rate:.1%})" for place in sink.positions if place.position != 0]
        if later:
            sentences.append(f"Behind the first token, heads attend to {listed(later)}.")
        needed = []
        for carrier in sink.carriers:
            if carrier.needed and carrier.name != "position":
                needed.append(f"the {carrier.name} ({carrier.heads_lost:.0%} of these heads)")
        if needed:
            sentences.append(f"At least half of that attention is lost without {listed(needed)}.")
        return sentences

    def _repeat_sentences(self) -> list[str]:
        repeats = self.repeats
        repeated = len(repeats.tokens) - len(repeats.at_once)
        sentences = []
        if repeated and repeats.median is None:
            within = counted(repeats.max_repeats, "repetition")
            reaches = "reaches half of the first token's norm at the sink layer"
            sentences.append(f"None of {counted(repeated, 'token')} {reaches} within {within}.")
        elif repeated:
            never = ""
            if repeats.unreached:
                do = agreeing(repeats.unreached, "does", "do")
                never = f"; {repeats.unreached} of {repeated} never {do} within {repeats.max_repeats}"
            over = f"median over {counted(repeated - repeats.unreached, 'token')}{never}"
            after = f"after {repeats.median:g} repetitions ({over})"
            sentences.append(f"A repeated token reaches half of the first token's norm {after}.")
        sentences += left_out_line([token.token for token in repeats.at_once])
        repetition = self.repetition
        if repetition is not None and self.minimal is not None and not repetition.same_neurons:
            sentences.append(repetition.sentence(self.minimal.names))
        return sentences
