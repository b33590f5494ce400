"""A body of noise, and the tools that plant sinks in it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from ways.model_copies import Original

from .noise import Space, fill, make_body, make_space
from .organism import Heads, Organism, Site, Truth, mixed
from .plan import Plan, make_plan
from .plant import MARK, Rows, Surgeon, unit
from .tokens import BOS, N_SPECIAL, tokenizer_for
from .views import Probe, views

USER, SYSTEM = 4, 5  # ids of further tokens, where the tokenizer puts several before a text

LAYERS = (5, 8)  # least and most, where a kind does not say otherwise


@dataclass(frozen=True)
class Kind:
    make: Callable[[HardBuild], Truth]
    word: str
    settings: dict[str, Any]


KINDS: dict[str, Kind] = {}


def kinds(table: dict[str, tuple[str, ...]], word: str = "") -> Callable[..., Any]:
    """A decorator that enters a kind with its families in a table; `hard` builds it by its name.

    Args:
        table: The families of each kind.
        word: What stands before the names where random numbers are drawn from them.
    """

    def kind(*families: str, **settings) -> Callable[..., Any]:
        def register(make: Callable[[HardBuild], Truth]) -> Callable[[Build], Truth]:
            name = make.__name__.strip("_")
            assert name not in KINDS, name
            table[name], KINDS[name] = families, Kind(make, word, settings)
            return make

        return register

    return kind


class Build:
    """A body of noise, and the tools that plant things in it."""

    def __init__(self, plan: Plan, words: str, seed: int, *, features: int = 0):
        """Fill a body with noise, whose generator `words` seed; sizes are measured on rows that `seed` draws."""
        self.plan = plan
        self.space, self.features = _with_features(make_space(plan), plan, features)
        self.model = make_body(plan)
        self.noise = torch.Generator().manual_seed(zlib.crc32(words.encode()))
        with torch.no_grad():
            self.views = views(self.model)
            self.measure_on(mixed(plan.vocab_size, plan.groups, plan.bos, 8, 24, seed))
            fill(plan, self.space, self.views, self.noise)

    def measure_on(self, tokens: Tensor):
        """Other rows to measure on."""
        self.tokens, self.probe = tokens, Probe(self.model, tokens)

    @property
    def at(self) -> int:
        """The sink layer."""
        return self.plan.sink_layer

    @property
    def way(self) -> Tensor:
        """The direction of the first token's spike."""
        return self.space.sinks[0]

    @property
    def behind(self) -> range:
        """Layers that can read what the sink layer writes."""
        return range(self.at + 1, self.plan.n_layers)

    @property
    def spare(self) -> tuple[int, int]:
        """Two neurons that are no sink neurons, in any layer."""
        return self.plan.cleaner, self.plan.spare

    @property
    def surgeon(self) -> Surgeon:
        return Surgeon(self.plan, self.space, self.views, self.probe)

    def site(self, layer: int, neuron: int) -> Site:
        if self.plan.family.experts == 1:
            return layer, neuron
        return layer, self.plan.expert, neuron

    def sites(self) -> frozenset[Site]:
        return frozenset(self.site(self.at, neuron) for neuron in self.plan.neurons)

    def mark(self):
        """Heads of layer 0 mark the first token; in GPT-2 its position does."""
        self.surgeon.mark_first()

    def const(self, layer: int) -> float:
        return float(self.surgeon.mlp_input(layer) @ self.space.const)

    def write(
        self,
        rows: Rows,
        way: Tensor,
        size: float | None = None,
        *,
        layer: int | None = None,
        neuron: int | None = None,
        **more,
    ) -> Site:
        """A neuron that reads `rows` and writes along `way`: a spike of the usual size, or `size`.

        It is the first sink neuron of the sink layer, unless others are given; `more` as in `Surgeon.write`.
        """
        layer = self.at if layer is None else layer
        neuron = self.plan.neurons[0] if neuron is None else neuron
        size = self.surgeon.size(layer) if size is None else size
        self.surgeon.write(layer, (neuron,), [rows], [way], [1.0], size, **more)
        return self.site(layer, neuron)

    def fire(self, mark: Tensor, way: Tensor, size: float | None = None, *, where=None, **more) -> Site:
        """A neuron that is on where `mark` is, and writes along `way`; `more` as in `write`."""
        rows = self.surgeon.on(more.get("layer", self.at), mark, where)
        return self.write(rows, way, size, where=where, route=mark, **more)

    def take_away(self, layer: int):
        """A neuron that reads the spike and writes it with the other sign."""
        way = self.spike_way()
        end = float(self.surgeon.seen(self.views.layers[layer].block) @ way)
        gate, _ = self.surgeon.on(layer, way)
        rows = gate, self.full(layer, way)
        self.write(rows, -way, end, layer=layer, neuron=self.spare[0], route=way)

    def spike_way(self) -> Tensor:
        """The direction of the first token's spike in the residual stream."""
        end = self.surgeon.seen(self.views.layers[self.at].block)
        way = torch.where(self.space.sinks.any(0), end, 0.0)
        return way / way.norm()

    def full(self, layer: int, way: Tensor) -> Tensor:
        """One where `way` is as large as it now is at the first token."""
        return unit(way, self.surgeon.mlp_input(layer))

    def copy(self, source: int, neuron: int, factor: float = 1.0) -> Site:
        """A neuron of the sink layer that reads what `source` reads and writes `factor` times what it writes."""
        layer, expert = self.at, self.plan.expert
        view = self.views.layers[layer]
        for rows in (view.gate, view.up, view.gate_bias, view.up_bias):
            if rows is not None:
                rows[expert, neuron] = rows[expert, source].clone()
        view.down[expert, neuron] = factor * view.down[expert, source]
        return self.site(layer, neuron)

    def read(
        self,
        layers: Iterable[int],
        way: Tensor,
        *,
        where: Tensor | None = None,
        other: bool = False,
    ) -> Heads:
        """Heads that attend to where `way` is large: half of them in each layer, or the `other` half."""
        plan, planted = self.plan, []
        half = max(1, plan.n_kv // 2)
        for index in layers:
            if not len(self.views.layers[index].k):  # no attention
                continue
            order = random.Random(f"reading {plan.seed} {index}").sample(range(plan.n_kv), plan.n_kv)
            chosen = order[half:] if other else order[:half]
            planted += self.surgeon.read(index, way, chosen, self.rng.uniform(6, 7), where)
        return tuple(sorted(planted))

    @property
    def later_layers(self) -> range:
        """All layers but the first."""
        return range(1, self.plan.n_layers)

    def flag(self, token: int, at: int = 5) -> Tensor:
        """Give the embedding of a token the feature `flag`; returns where it stands in the rows to measure on.

        BOS stands first, and any other token at the position `at` and nowhere else.
        """
        self.views.embed[token] += MARK * self.feature / self.plan.embed_scale
        if token != BOS:
            rows = torch.where(self.tokens == token, token + 1, self.tokens)
            rows[:, at] = token
            self.measure_on(rows)
        return self.tokens == token


def organism(
    family: str = "llama",
    seed: int = 0,
    *,
    kind: str = "sink",
    n_layers: int | None = None,
    bos: bool = True,
) -> Organism:
    """Build the organism of `family` and `kind` that `seed` stands for: the same call gives the same weights."""
    built, original = _built(family, seed, kind, n_layers, bos)
    tokenizer = tokenizer_for(built.model.config.model_type, built.model.config.vocab_size, bos=bos)
    return replace(built, model=original.copy(), tokenizer=tokenizer)


@cache
def _built(family: str, seed: int, kind: str, n_layers: int | None, bos: bool) -> tuple[Organism, Original]:
    """An organism that nobody changes, and what copies its model."""
    plan = make_plan(family, seed, kind, n_layers, bos)
    b = Build(plan, f"{family} {kind} {seed} {bos}", seed)
    spike, reading = torch.zeros(plan.d_model), ()
    with torch.no_grad():
        if plan.planted:
            b.mark()
            spike = b.surgeon.make_sink()
            reading = b.surgeon.read_sink(spike)
    tokenizer = tokenizer_for(plan.family.model_type, plan.vocab_size, bos=bos)
    heads = plan.by_heads
    slots = plan.slots if heads else ()
    truth = Truth(
        before=(BOS,) if bos else (),
        bos=bos,
        sink_layer=plan.sink_layer if plan.planted else None,
        neurons=tuple(b.site(plan.sink_layer, neuron) for neuron in plan.neurons) if plan.planted else (),
        residual_dims=tuple(spike.nonzero().flatten().tolist()),
        marking_layer=plan.marking_layer if heads else None,
        group_heads={g: tuple(sorted(h for h, group, _ in slots if group == g)) for _, g, _ in slots},
        groups=plan.groups if heads else dict.fromkeys(plan.groups, -1),
        factor=plan.factor if plan.planted else None,
        reading_heads=reading,
        repeats_expected=plan.repeats_expected(),
    )
    return Organism(b.model, tokenizer, truth, family, kind, seed, bos), Original(b.model)


class HardBuild(Build):
    """A body for a kind of `hard.py`: drawn by the kind's name, with two more features and a delimiter."""

    def __init__(
        self,
        name: str,
        family: str,
        seed: int,
        *,
        layers: tuple[int, int] = LAYERS,
        behind: tuple[int, int] = (2, 3),  # layers after the sink layer, least and most
        at: int | None = None,  # the sink layer, where it is not to be drawn
        count: int | None = None,  # of sink neurons
        marked: float | None = None,  # share of the tokens that are marked where they stand first; BOS is not
        window: int | None = None,  # 1024, where it is not given and the family draws that it has one
        **changes,
    ):
        words = f"hard {name} {family} {seed}"
        self.rng = rng = random.Random(words)
        n = rng.randint(*layers)
        number = rng.getrandbits(30)
        plan = make_plan(family, number, n_layers=n)
        if count is not None:
            free = [i for i in range(plan.d_mlp) if i not in plan.busy_neurons]
            neurons = (*plan.neurons, *free)[:count]
            plan = replace(plan, neurons=neurons, sizes=(count**-0.5,) * count)
        groups = plan.groups
        if marked is not None:
            draws = random.Random(f"marked {number}")
            groups = {token: draws.randrange(plan.n_groups) if draws.random() < marked else -1 for token in groups}
            groups[BOS] = -1
        if window is None and plan.window is not None:
            window = 1024
        plan = replace(
            plan,
            marking_layer=0,
            sink_layer=max(1, n - 1 - rng.randint(*behind)) if at is None else at,
            factor="gate" if plan.family.gated else None,
            window=window,
            groups=groups,
            **changes,
        )
        super().__init__(plan, words, number, features=2)
        self.feature, self.side = self.features
        self.delimiter = N_SPECIAL + rng.randrange(20)
        if marked is not None:  # what a marked token reads and writes is measured where one stands first
            in_group = [token for token in range(N_SPECIAL, plan.vocab_size) if groups[token] >= 0]
            self.tokens[:, 0] = torch.tensor(rng.choices(in_group, k=8))


def _with_features(space: Space, plan: Plan, count: int) -> tuple[Space, list[Tensor]]:
    """The space with `count` more features, on dimensions taken from the noise."""
    free, features = space.content.tolist(), []
    for _ in range(count):
        vector = torch.zeros(plan.d_model)
        vector[free.pop()] = 1.0
        if plan.family.centered:
            vector[free.pop()] = -1.0
        features.append(vector / vector.norm())
    return replace(space, content=torch.tensor(free)), features
