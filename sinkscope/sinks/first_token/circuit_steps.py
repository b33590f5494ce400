"""The steps of a circuit in order, each with its share, its evidence and its control.

The evidence is path patching in both directions: what an effect at a position needs, and what transfers it to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.notation import head_name, neuron_name
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attribution import Attribution, Inputs, Keys, attribute
from sinkscope.sinks.first_token.effects import Component, Edit, effects, has_key_bias, writers
from sinkscope.sinks.first_token.result import CONTROL_DRAWS, Sites
from sinkscope.sinks.tokens import in_words, prefixes
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

HALF = 0.5  # share of an effect from which a component is needed, or suffices
NEARLY = 0.75  # several are needed if each loses at least this share of the largest loss
ENOUGH = 0.9  # the search for a set ends when this share is lost,
GAIN = 0.05  # or where one more component adds less than this
MOST = 8  # largest number of components replaced together in the search for a set
UNSWAPPED = ("attention bias", "sink neurons", "norm bias", "input bias")


class Proof(NamedTuple):
    """For one edit: the share of the effect that it removes, and the share that it gives to the typical position."""

    necessity: float | None
    sufficiency: float | None


class Group(NamedTuple):
    """Components that make an effect, and how they combine.

    Attributes:
        members: The components.
        relation: "alone": there is one; "all needed": each is necessary and none suffices; "in series": each is
            necessary and some suffice, because the effect passes through them one after another; "any suffices": none
            is necessary and each suffices; "together": neither.
    """

    members: tuple[Component, ...]
    relation: str


@dataclass(frozen=True)
class Bench:
    """An effect at a position, scaled so that a typical position has 0 and this position has 1.

    Attributes:
        target: The model.
        ids: The texts.
        at: The position.
        other: The typical position.
        layer: The effect is the norm after this layer, unless `heads` are given.
        heads: If given, the effect is the attention that these heads pay to the position.
        without: Residual dimensions that norms leave out.
    """

    target: Target
    ids: Int[Tensor, "text pos"]
    at: int
    other: int
    layer: int | None = None
    heads: Bool[Tensor, "layer head"] | None = None
    without: tuple[int, ...] = ()

    def necessity(self, edits: Sequence[Edit], each: bool = False) -> list[Any]:
        """The share of the effect that each edit at the position removes; with `each`, the share for every head."""
        edited, top = self.values(edits, self.at, self.other)
        return shares_of(top - edited, self.span, each)

    def sufficiency(self, edits: Sequence[Edit], each: bool = False) -> list[Any]:
        """The share of the effect that each edit gives to the typical position."""
        edited, floor = self.values(edits, self.other, self.at)
        return shares_of(edited - floor, self.span, each)

    @cached_property
    def span(self) -> Float[Tensor, "text part"]:
        """The whole effect."""
        return self.values([], self.at, self.other)[1] - self.values([], self.other, self.at)[1]

    def proofs(self, sets: Sequence[Sequence[Component]]) -> list[Proof]:
        """Necessity and sufficiency of components replaced together; None where that cannot be done."""
        swapped = [all(c.kind not in UNSWAPPED for c in some) for some in sets]
        given = [ok and all(c.kind != "key bias" for c in some) for ok, some in zip(swapped, sets, strict=True)]
        found: list[list[float | None]] = []
        for measure, allowed in ((self.necessity, swapped), (self.sufficiency, given)):
            edits = [self.edit(some) for some, ok in zip(sets, allowed, strict=True) if ok]
            values = iter(measure(edits) if edits else [])
            found.append([next(values) if ok else None for ok in allowed])
        return [Proof(*both) for both in zip(*found, strict=True)]

    def needed(
        self, candidates: Sequence[Component], base: tuple[Component, ...] = (), judge: Bench | None = None
    ) -> Group:
        """The components that make the effect, and how they combine.

        Args:
            candidates: Components that may be replaced.
            base: Components that are replaced all the time.
            judge: The effect by which the relation is decided, if it is a different one.
        """
        alone = self.necessity([self.edit((*base, c)) for c in candidates])
        bar = max(HALF, NEARLY * max(alone))
        chosen = [c for c, lost in zip(candidates, alone, strict=True) if lost >= bar]
        gone = self.necessity([self.edit((*base, *chosen))])[0] if chosen else 0.0
        while gone < ENOUGH and len(chosen) < MOST and (rest := [c for c in candidates if c not in chosen]):
            lost = self.necessity([self.edit((*base, *chosen, c)) for c in rest])
            best = max(range(len(rest)), key=lost.__getitem__)
            if chosen and lost[best] < gone + GAIN:
                break
            chosen, gone = [*chosen, rest[best]], lost[best]
        members = tuple(c for c in candidates if c in chosen)
        return Group(members, self._relation(members, base, judge or self))

    def _relation(self, members: tuple[Component, ...], base: tuple[Component, ...], judge: Bench) -> str:
        if len(members) == 1:
            return "alone"
        if min(judge.necessity([self.edit((*base, c)) for c in members])) >= HALF:
            given = [proof.sufficiency or 0.0 for proof in self.proofs([(c,) for c in members])]
            return "in series" if max(given) >= HALF else "all needed"
        only = judge.necessity([self.edit((*base, *(c for c in members if c != one))) for one in members])
        return "any suffices" if max(only) < HALF else "together"

    def edit(self, some: Sequence[Component]) -> Edit:
        """An edit that replaces all of these components."""
        biases = [Component("key bias", i) for i in range(self.target.n_layers) if has_key_bias(self.target, i)]
        return Edit(swap=tuple(d for c in some for d in (biases if c == ("key bias", None, None) else [c])))

    def candidates(self, depth: int) -> list[Component]:
        """Everything that writes into the stream before the MLP of a layer, or before its keys if heads are given.

        A key bias without a layer stands for the key biases of all layers.
        """
        found = writers(self.target, depth)
        if self.heads is None:
            return [*found, Component("attention", depth)]
        return found + ([Component("key bias")] if has_key_bias(self.target, depth) else [])

    def values(self, edits: Sequence[Edit], at: int, source: int) -> tuple[Tensor, Tensor]:
        """Norms, or the attention of each head, as `[edit text part]`, and the intact values as `[text part]`."""
        asked = self.heads is not None
        ids = self.ids if asked else self.ids[:, : max(at, source) + 1]  # later tokens do not change norms
        seen = effects(
            self.target, ids, edits, at=at, source=source, upto=self.layer, attention=asked, without=self.without
        )
        if self.heads is None:
            return seen.norms[..., -1:], seen.intact_norms[..., -1:]
        return seen.attention[..., self.heads], seen.intact_attention[..., self.heads]


def shares_of(
    change: Float[Tensor, "edit text part"], span: Float[Tensor, "text part"], each: bool = False
) -> list[Any]:
    """Changes divided by the whole effect, for all parts together or for each part."""
    over = 1 if each else (1, 2)
    return (change.mean(over) / span.mean(0 if each else (0, 1))).tolist()


WRITES = 0.01  # neurons that write less of the spike are backups or not involved
LARGE = 0.25  # share from which another part of a reading head's key is reported
SHOWN = 0.1  # a component without a role gets its own row from this share on
READS = 0.3  # mean attention from which a head reads the first token (Gu et al. 2024)
TEXTS = 2  # number of pieces of typical text
TYPICAL = 6  # positions of each piece that the first token is compared with


@dataclass(frozen=True)
class Step:
    """One edge of the circuit.

    Attributes:
        step: The kind of edge: "first token" (what marks it), "repetition" (what marks the last of many), "gate and up"
            of the sink neurons, their "column", or "keys" of heads.
        source: The component that writes.
        target: The component that reads.
        layer: Layer of the source; for keys, of the head. None for the embeddings.
        share: Exact share of the source in what distinguishes the first token from typical ones in the input that is
            read; shares of everything that writes into it sum to one. For a column: share of the first token's residual
            stream.
        necessity: Share of the effect that is lost if the source writes at the first token what it writes at a typical
            one (a neuron: nothing). The effect is the norm at the sink layer; for keys, the attention that the head
            pays to the first token; for gate and up, the neuron's activation.
        necessity_control: Largest loss with the same number of random heads or neurons instead. None if there are too
            few.
        sufficiency: Share of the effect that a typical position gains if the source writes there what it writes at the
            first token.
        sufficiency_control: The same gain with the same number of random heads or neurons.
    """

    step: str
    source: str
    target: str
    layer: int | None
    share: float | None
    necessity: float | None
    necessity_control: float | None = None
    sufficiency: float | None = None
    sufficiency_control: float | None = None


@dataclass(frozen=True)
class Marking:
    """Components that together mark a position.

    Attributes:
        place: What the mark belongs to: "first token" or "repetition"; "keys" is what heads read without a spike.
        components: Attention layers, MLPs and embeddings; or heads of one layer.
        by: The same components, with heads instead of their layers where the heads are known.
        relation: How they combine. "alone": there is one; "all needed": each is necessary and none suffices; "in
            series": each is necessary, and the mark passes through them one after another; "any suffices": none is
            necessary and each suffices; "together": neither.
        necessity: Share of the mark that is lost with all of them replaced.
        necessity_control: Largest loss with the same number of random heads replaced.
        sufficiency: Share of the mark that all of them give to a typical position.
        sufficiency_control: Largest share that the same number of random heads gives.
    """

    place: str
    components: tuple[str, ...]
    by: tuple[str, ...]
    relation: str
    necessity: float | None
    necessity_control: float | None
    sufficiency: float | None
    sufficiency_control: float | None


@dataclass(frozen=True)
class Attended:
    """Mean attention of the reading heads to the first token.

    Attributes:
        heads: The (layer, head) pairs that give the first token at least 0.3 of their attention, most first.
        intact: Attention in the unmodified model.
        without: Attention without what carries it: the sink neurons are silent, or the components that the keys need
            are replaced.
        control: The lowest attention when the same number of random neurons or heads is silenced or replaced instead.
    """

    heads: tuple[tuple[int, int], ...]
    intact: float
    without: float
    control: float | None


def told(component: Component) -> str:
    """The component as it is named in a sentence."""
    return str(component) if component.kind == "head" else f"the {component}"


@dataclass
class Steps:
    """The circuit of one model while it is being built.

    Attributes:
        setup: The model and its text.
        ids: Pieces of text that share one first token.
        other: The typical position that the first token trades places with.
        places: The (text, position) of first tokens, of `other`, and of more typical positions.
        layer: The sink layer. None if no MLP makes a spike.
        sites: The sink neurons. If there are none, the whole MLP of the sink layer stands for them.
        shared: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    ids: Int[Tensor, "text pos"]
    other: int
    places: Int[Tensor, "place 2"]
    layer: int | None
    sites: Sites
    shared: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    marking: list[Marking] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, setup: Setup, layer: int | None, sites: Sites, shared: tuple[int, ...]) -> Steps:
        """Chooses as typical positions those whose norms are nearest to the median of their text."""
        ids = setup.ids[:TEXTS].clone()
        ids[:, 0] = ids[0, 0]
        kept = [i for i in range(setup.target.d_model) if i not in shared]
        name = f"blocks.{setup.n_layers - 1 if layer is None else layer}.hook_resid_post"
        size = trace(setup.target, ids, [name], lambda resid: resid[..., kept].float().norm(dim=-1))[name]
        away = (size / size[:, 1:].median(1, keepdim=True).values).log().abs()
        length = ids.shape[1]
        low, high = length // 8, max(length // 2, length // 8 + 1)
        other = low + int(away[:, low:high].amax(0).argmin())
        places: list[tuple[int, int]] = []
        for text in range(len(ids)):
            usual = [p for p in away[text].argsort().tolist() if p not in (0, other, length - 1)][: length // 2]
            places += [(text, 0), (text, other), *((text, p) for p in sorted(usual)[:: max(1, len(usual) // TYPICAL)])]
        return cls(setup, ids, other, torch.tensor(places), layer, sites, shared)

    @property
    def target(self) -> Target:
        """The model."""
        return self.setup.target

    @property
    def first(self) -> Int[Tensor, " text"]:
        """Indices of the places of first tokens."""
        return (self.places[:, 1] == 0).nonzero().flatten()

    @property
    def pairs(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """Indices of the typical places, each preceded by the first token of the same text, as two matching vectors."""
        typical = (self.places[:, 1] > 0).nonzero().flatten()
        return self.first[self.places[typical, 0]], typical

    def sets(self, pool: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
        """Random sets of a given size, as controls; none if the pool is too small."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        draws = CONTROL_DRAWS if 0 < size <= len(pool) else 0
        return [
            tuple(pool[int(i)] for i in torch.randperm(len(pool), generator=generator)[:size]) for _ in range(draws)
        ]

    def heads(self, depth: int, without: Sequence[Component]) -> list[Component]:
        """Heads of the layers up to one, except these."""
        every = [Component("head", i, h) for i in range(depth + 1) for h in range(self.target.n_heads)]
        return [head for head in every if head not in without]

    def pruned(self, backups: Sites) -> Steps:
        """The set without neurons that write nothing of the spike and are not backups."""
        if self.layer is None or not self.sites:
            return self
        inputs = self.own.inputs
        way = inputs[max(inputs)].stream[self.first].mean(0)
        kept = []
        for found in inputs.values():
            along = found.written[:, self.first].mean(1) @ way / way.square().sum()
            kept += [s for s, share in zip(found.sites, along.tolist(), strict=True) if share >= WRITES or s in backups]
        return self if len(kept) == len(self.sites) else replace(self, sites=tuple(kept))

    # -- what marks ------------------------------------------------------------------------------------------------

    def mark(
        self,
        bench: Bench,
        place: str,
        depth: int,
        shares: dict[str, dict[Component, float]],
        judge: Bench | None = None,
    ) -> tuple[Component, ...]:
        """The components that an effect needs, first by layer and then by head; they become steps.

        Args:
            bench: The effect.
            place: Name of the place, for the steps and the groups.
            depth: The layer that reads: by its MLP or, if the effect is attention, by its keys.
            shares: Share of each component, for each input that is written into.
            judge: The effect that decides how they combine, if it is a different one.
        """
        final, groups = self.groups(bench, depth, judge)
        pool = self.heads(depth, final)
        for group in groups:
            by = tuple(final) if group is groups[0] else group.members
            proof, control = bench.proofs([group.members])[0], _largest(bench.proofs(self.sets(pool, len(by))))
            names = tuple(map(told, group.members)), tuple(map(told, by))
            self.marking.append(
                Marking(place if bench.heads is None else "keys", *names, group.relation, *_interleaved(proof, control))
            )
        written = {c for of in shares.values() for c, share in of.items() if abs(share) >= SHOWN}
        control = _largest(bench.proofs(self.sets(pool, 1)))
        rows = [*final, *sorted(written - set(final), key=str)]
        for component, proof in zip(rows, bench.proofs([(c,) for c in rows]), strict=True):
            into = {name: of.get(component, 0.0) for name, of in shares.items()}
            chance = control if proof.necessity is not None else Proof(None, None)
            main = max(into, key=lambda name: abs(into[name]), default=None)
            for name in [n for n in into if n == main or abs(into[n]) >= SHOWN] or ["spike"]:
                about = (place, str(component), name, component.layer, into.get(name))
                self.steps.append(Step(*about, *_interleaved(proof, chance)))
        return tuple(final)

    def groups(self, bench: Bench, depth: int, judge: Bench | None) -> tuple[list[Component], list[Group]]:
        """Components with heads in place of their layers, and the groups: of layers first, then of heads in a layer."""
        whole = bench.needed(bench.candidates(depth), judge=judge)
        final: list[Component] = []
        groups = [whole]
        for member in whole.members:
            own: tuple[Component, ...] = (member,)
            if member.kind == "attention":
                each = [Component("head", member.layer, head) for head in range(self.target.n_heads)]
                base = tuple(m for m in whole.members if m != member) if whole.relation == "any suffices" else ()
                inner = bench.needed(each, base, judge)
                own = inner.members if len(inner.members) < MOST else own
                groups += [inner] if 1 < len(inner.members) < MOST else []
            final += own
        return final, groups

    # -- the spike -------------------------------------------------------------------------------------------------

    @cached_property
    def own(self) -> Attribution:
        """The inputs of the sink neurons, and what they write."""
        return attribute(self.target, self.ids, self.places, self.sites)

    @cached_property
    def controls(self) -> tuple[list[Sites], Attribution]:
        """Random sets of as many neurons of the same layers (and experts), and what they write."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        sets: list[Sites] = []
        width = min(self.target.width(site[0], *site[1:-1]) for site in self.sites)
        for _ in range(CONTROL_DRAWS):
            order = torch.randperm(width, generator=generator).tolist()
            free = iter(order)
            sets.append(tuple(next(o for n in free if (o := (*site[:-1], n)) not in self.sites) for site in self.sites))
        chosen = sorted({site for some in sets for site in some})
        return sets, attribute(self.target, self.ids, self.places, chosen)

    def spike(self, layer: int, judge: Bench | None) -> None:
        """Steps from the first token to the stream after the sink layer; `judge` is the attention the spike causes."""
        bench = Bench(self.target, self.ids, 0, self.other, layer, without=self.shared)
        if not self.sites:
            self.mark(bench, "first token", layer, {}, judge)
            proof = bench.proofs([(Component("mlp", layer),)])[0]
            self.steps.append(Step("column", f"MLP of layer {layer}", "spike", layer, None, *_interleaved(proof)))
            return
        seen, (sets, others) = self.own, self.controls
        self.errors += [found.error for found in seen.inputs.values()]
        self.mark(bench, "first token", layer, self.shares(seen, *self.pairs), judge)
        for at, inputs in seen.inputs.items():
            if _writes(inputs, self.first):
                self.factors(at, inputs)
        control = _largest(self.transplants(bench, sets, others))
        final = seen.inputs[max(seen.inputs)].stream[self.first].mean(0)
        total = 0.0
        for at, inputs in seen.inputs.items():
            for site, written in zip(inputs.sites, inputs.written[:, self.first].mean(1), strict=True):
                share = float(written @ final / final.square().sum())
                total += share
                proof = _interleaved(self.transplants(bench, [(site,)], seen)[0], control)
                self.steps.append(Step("column", neuron_name(*site), "spike", at, share, *proof))
        if len(self.sites) > 1:
            proof = _interleaved(self.transplants(bench, [self.sites], seen)[0], control)
            self.steps.append(Step("column", "all of them", "spike", layer, total, *proof))

    def transplants(self, bench: Bench, sets: Sequence[Sites], seen: Attribution) -> list[Proof]:
        """Necessity of neurons, and what their writing alone gives the typical position while they are silent there."""
        silent = [Edit(zero=some) for some in sets]
        given = [Edit(zero=some, add=self.written(some, seen)) for some in sets]
        return [Proof(*both) for both in zip(bench.necessity(silent), bench.sufficiency(given), strict=True)]

    def written(self, sites: Sites, seen: Attribution) -> tuple[tuple[int, Tensor], ...]:
        """What these neurons write at the first tokens, by layer."""
        chosen = {at: [i for i, s in enumerate(found.sites) if s in sites] for at, found in seen.inputs.items()}
        return tuple((at, seen.inputs[at].raw[some][:, self.first].sum(0)) for at, some in chosen.items() if some)

    def shares(self, seen: Attribution, first: Tensor, typical: Tensor) -> dict[str, dict[Component, float]]:
        """What each component adds to the neurons' activation through the gate and up factors; sums to 1 per layer."""
        found: dict[str, dict[Component, float]] = {}
        for layer, inputs in seen.inputs.items():
            if not _writes(inputs, first.unique()):
                continue  # backups that are silent here
            contrast = inputs.contrast(first, typical) * self.weights(inputs, first)
            contrast /= contrast.sum()
            for name, of in zip(_factors(inputs, layer), contrast.sum(-1), strict=True):
                found[name] = dict(zip(inputs.parts, of.tolist(), strict=True))
        return found

    def weights(self, inputs: Inputs, first: Tensor) -> Float[Tensor, " neuron"]:
        """How much of the residual stream at the first token a neuron writes when its activation is 1."""
        at = first.unique()
        gate = None if inputs.gate is None else inputs.gate.sum(0)[at]
        size = inputs.post(gate, inputs.up.sum(0)[at]).mean(0)
        along = inputs.written[:, at].mean(1) @ inputs.stream[at].mean(0)
        return torch.where(size.abs() > 1e-9, along / size, 0.0)

    def factors(self, layer: int, inputs: Inputs) -> None:
        """Which factor of the neurons responds to the mark; exact, from the neurons' own activation function."""
        first, typical = self.pairs
        contrast = (inputs.contrast(first, typical) * self.weights(inputs, first)).sum(1)
        contrast /= contrast.sum()
        g1, g0 = (None if inputs.gate is None else inputs.gate.sum(0)[at] for at in (first, typical))
        u1, u0 = inputs.up.sum(0)[first], inputs.up.sum(0)[typical]
        whole, none, only_gate, only_up = (
            inputs.post(g, u).mean(0) for g, u in ((g1, u1), (g0, u0), (g1, u0), (g0, u1))
        )
        edited = [(only_up, only_gate), (only_gate, only_up)] if g1 is not None else [(none, whole)]
        for name, share, (without, alone) in zip(_factors(inputs, layer), contrast, edited, strict=True):
            lost, given = (whole - without) / (whole - none), (alone - none) / (whole - none)
            for j, site in enumerate(inputs.sites):
                if not abs(share[j]) >= WRITES:
                    continue
                about = ("gate and up", name, neuron_name(*site), layer, float(share[j]))
                self.steps.append(Step(*about, float(lost[j]), None, float(given[j]), None))

    def repetition(self, word: int, reached: int) -> int:
        """Repeat the analysis at the last of 1.5 times as many repetitions as a sink needs; returns their number."""
        layer, start = self.layer, prefixes(self.setup, [word])
        assert layer is not None
        repeats = min(reached + reached // 2, (self.target.max_positions or 1 << 30) - 1)
        ids = torch.tensor([[start[0], *[word] * repeats]])
        shares: dict[str, dict[Component, float]] = {}
        if self.sites:
            seen = attribute(self.target, ids, torch.tensor([[0, repeats], [0, 1]]), self.sites)
            self.errors += [found.error for found in seen.inputs.values()]
            shares = self.shares(seen, torch.tensor([0]), torch.tensor([1]))
        self.mark(Bench(self.target, ids, repeats, 1, layer, without=self.shared), "repetition", layer, shares)
        return repeats

    # -- the heads that read ---------------------------------------------------------------------------------------

    def reader(self) -> Bench | None:
        """The attention to the first token of the heads that read it; None if there are none.

        Only heads behind the sink layer count. If there are none, all heads count, and these cannot read the spike.
        """
        paid = effects(self.target, self.ids, [], attention=True).intact_attention
        reading = paid.mean(0) >= READS
        behind = 0 if self.layer is None else self.layer + 1
        if bool(reading[behind:].any()):
            reading[:behind] = False
        return Bench(self.target, self.ids, 0, self.other, heads=reading) if bool(reading.any()) else None

    def carries(self, bench: Bench) -> bool:
        """Whether the attention to the first token needs the spike."""
        return self.layer is not None and bench.necessity(self.spike_edits()[0][:1])[0] >= HALF

    def keys(self, bench: Bench, by_spike: bool, listed: int) -> tuple[str, Attended]:
        """Steps from the spike, or from other components, to the keys of the heads that attend to the first token."""
        assert bench.heads is not None
        layers = bench.heads.any(1).nonzero().flatten().tolist()
        seen = attribute(self.target, self.ids, self.places, self.sites, layers)
        self.errors += [found.error for found in seen.keys.values()]
        split = {layer: self.contrast(found) for layer, found in seen.keys.items()}
        order = [(layer, head) for layer, head in bench.heads.nonzero().tolist()]
        if by_spike:
            carried, source, (edits, given) = "spike", "spike", self.spike_edits()
            parts = {c for found in seen.keys.values() for c in found.parts if self.makes_spike(c)}
        else:
            shares = _together([split[i][h] for i, h in order if i in split])
            final = self.mark(bench, "first token", max(layers), {"keys": shares} if shares else {})
            sets = self.sets(self.heads(max(layers) - 1, final), len(final))
            carried, source, edits = in_words(tuple(map(told, final))), "keys", list(map(bench.edit, (final, *sets)))
            parts = {*final}
            given = [] if any(c.kind == "key bias" for c in final) else edits
        edited, top = bench.values(edits, 0, self.other)
        lost, gain = shares_of(top - edited, bench.span, True), bench.sufficiency(given, True) if given else []
        ranked = sorted(range(len(order)), key=lambda at: -float(top[:, at].mean()))
        for at in ranked[:listed]:
            layer, head = order[at]
            proof = Proof(lost[0][at], gain[0][at] if gain else None)
            control = _largest([Proof(a[at], b[at] if b else None) for a, b in zip_longest(lost[1:], gain[1:])])
            of = _together([split[layer][head]] if layer in split else [])
            self.key(order[at], source, of, parts, _interleaved(proof, control))
        left = edited.mean((1, 2)).tolist()
        attended = tuple(order[at] for at in ranked)
        return carried, Attended(attended, float(top.mean()), left[0], min(left[1:], default=None))

    def key(
        self,
        place: tuple[int, int],
        source: str,
        of: dict[Component, float],
        parts: set[Component],
        proof: tuple[float | None, ...],
    ) -> None:
        """The step to the key of one head, and what else its key holds in large part."""
        target = head_name(*place)
        share = sum(of.get(part, 0.0) for part in parts) if of else None
        self.steps.append(Step("keys", source, target, place[0], share, *proof))
        best = max(of.keys() - parts, key=lambda part: abs(of[part]), default=None)
        if best is not None and abs(of[best]) >= LARGE:
            self.steps.append(Step("keys", str(best), target, place[0], of[best], None))

    def makes_spike(self, component: Component) -> bool:
        """Whether this component writes the spike."""
        return component.kind == "sink neurons" or (not self.sites and component == ("mlp", self.layer, None))

    def spike_edits(self) -> tuple[list[Edit], list[Edit]]:
        """Edits that remove the spike, and edits that write it elsewhere; then the same for random neurons."""
        if not self.sites:
            whole = [Edit(swap=(Component("mlp", self.layer),))]
            return whole, whole
        sets, others = self.controls
        given = [Edit(zero=self.sites, add=self.written(self.sites, self.own))]
        given += [Edit(zero=some, add=self.written(some, others)) for some in sets]
        return [Edit(zero=some) for some in (self.sites, *sets)], given

    def contrast(self, found: Keys) -> dict[int, dict[Component, float]]:
        """For each head, what each component adds to the first token's score beyond that of typical keys."""
        first, typical = self.pairs
        by = (found.scores[:, first] - found.scores[:, typical]).mean(1)
        parts = [Component("key bias") if part.kind == "key bias" else part for part in found.parts]
        return {head: dict(zip(parts, by[:, head].tolist(), strict=True)) for head in range(by.shape[1])}

    def learned(self) -> float | None:
        """Mean share of the attention of all heads that goes to learned sink logits; None if the model has none."""
        if not self.target.adapter.learned_sinks:
            return None
        kept: list[float] = []
        with attention_rows(self.target, lambda _l, _f, probs: kept.append(1 - float(probs.sum(-1).mean()))):
            self.target.forward(self.ids)
        return sum(kept) / len(kept)


def _together(scores: Sequence[dict[Component, float]]) -> dict[Component, float]:
    """Shares of the components in the scores of several heads."""
    total = sum(sum(of.values()) for of in scores)
    found: dict[Component, float] = {}
    for of in scores:
        for part, value in of.items():
            found[part] = found.get(part, 0.0) + value / total
    return found


def _writes(inputs: Inputs, first: Int[Tensor, " text"]) -> bool:
    """Whether these neurons write anything of the spike."""
    way = inputs.stream[first].mean(0)
    return float(inputs.written[:, first].mean(1).sum(0) @ way) >= WRITES * float(way.square().sum())


def _factors(inputs: Inputs, layer: int) -> list[str]:
    return [f"input of layer {layer}"] if inputs.gate is None else [f"gate of layer {layer}", f"up of layer {layer}"]


def _largest(proofs: Sequence[Proof]) -> Proof:
    known = [[value for value in column if value is not None] for column in zip(*proofs, strict=True)] or [[], []]
    return Proof(*(max(values, default=None) for values in known))


def _interleaved(proof: Proof, control: Proof = Proof(None, None)) -> tuple[float | None, ...]:  # noqa: B008
    return proof.necessity, control.necessity, proof.sufficiency, control.sufficiency
