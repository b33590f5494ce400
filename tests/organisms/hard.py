"""Models that are not the textbook case of an attention sink, with the truth about each known by construction.

An organism of `organism.py` has one sink that one layer makes. Here the spike and the sink come apart, layers share the
work, neurons stand in for each other, tokens in the middle of a text become sinks, and other things than a spike carry
the attention. `HARD` names the kinds and the families that each is built in.

A **spike** is a first token whose residual stream has a norm far above the typical one; where a dimension is massive
on every token (`shared_dims`), it is left out of the norm. A **sink** is a first token that some heads attend to. A
**set** is what has to be zeroed together for both to vanish, with nothing of it left over.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .noise import NORM, Space, fill, make_body, make_space
from .organism import mixed
from .plan import Plan, make_plan
from .plant import MARK, Rows, Surgeon, unit
from .tokens import BOS, N_SPECIAL, tokenizer_for
from .views import Probe, views

Site = tuple[int, ...]
Head = tuple[int, int]  # (layer, query head)

ALL = ("llama", "gemma2", "gpt2", "neox", "mixtral")
BY_HEADS = ("llama", "gemma2", "neox", "mixtral")  # heads mark the first token; in GPT-2 its position does
PLAIN = ("llama", "gpt2", "neox", "mixtral")  # nothing divides what an MLP writes by its size
LAYERS = (5, 8)  # least and most, where a kind does not say otherwise


@dataclass(frozen=True)
class HardTruth:
    """What is so.

    Attributes:
        spike: the first token's norm stands out at some layer.
        sink: heads attend to the first token.
        carried_by: what these heads read.
        sink_layer: whose MLP makes most of the spike; None: no MLP does.
        sets: each a smallest set of sites whose zeroing removes the spike and, with it, the attention.
        step_up: layers whose MLP builds the spike.
        step_down: layers whose MLP takes it away again.
        shared_dims: residual dimensions that are massive on every token.
        reading: (layer, query head) planted to attend to the first token.
        repeated: neurons that make the spike of repeated tokens, where they are others than the first token's.
        bos: texts begin with BOS.
        share: share of the vocabulary that is a sink where it stands first.
        window: positions that the reading heads see.
        places: the same as sets of places, and what each group of heads needs.
    """

    spike: bool
    sink: bool
    carried_by: str | None
    sink_layer: int | None = None
    sets: tuple[frozenset[Site], ...] = ()
    step_up: tuple[int, ...] = ()
    step_down: tuple[int, ...] = ()
    shared_dims: tuple[int, ...] = ()
    reading: tuple[Head, ...] = ()
    repeated: tuple[Site, ...] = ()
    bos: bool = True
    share: float = 1.0
    window: int | None = None
    places: Any = None


@dataclass(frozen=True)
class HardModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: HardTruth
    name: str
    groups: dict[int, int]

    def natural(self, n: int = 4, length: int = 48, seed: int = 0) -> Tensor:
        """`n` rows of BOS and mixed tokens."""
        return mixed(self.model.config.vocab_size, self.groups, True, n, length, seed)

    def text(self, n: int = 6, length: int = 64) -> str:
        """The same as words: what a tokenizer cuts into rows of `length` with BOS before each."""
        return " ".join(self.tokenizer.decode(row[1:]) for row in self.natural(n, length))


def hard(name: str, family: str = "llama", seed: int = 0) -> HardModel:
    """Build a hard model: the same call gives the same weights."""
    kind = _KINDS[name]
    b = Build(kind.word + name, family, seed, **kind.settings)
    with torch.no_grad():
        truth = kind.make(b)
    tokenizer = tokenizer_for(b.plan.family.model_type, b.plan.vocab_size)
    return HardModel(b.model, tokenizer, truth, name, b.plan.groups)


# --- building ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Build], HardTruth]
    word: str
    settings: dict[str, Any]


_KINDS: dict[str, _Kind] = {}
HARD: dict[str, tuple[str, ...]] = {}
"""Every kind of hard model, and the families that it is built in."""


def kinds(table: dict[str, tuple[str, ...]], word: str = "") -> Callable[..., Any]:
    """A decorator that enters a kind with its families in a table; `hard` builds it by its name.

    Args:
        table: The families of each kind.
        word: What stands before the names where random numbers are drawn from them.
    """

    def kind(*families: str, **settings) -> Callable[..., Any]:
        def register(make: Callable[[Build], HardTruth]) -> Callable[[Build], HardTruth]:
            name = make.__name__.strip("_")
            assert name not in _KINDS, name
            table[name], _KINDS[name] = families, _Kind(make, word, settings)
            return make

        return register

    return kind


_kind = kinds(HARD)


class Build:
    """A body of noise, and the tools that plant things in it."""

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
        thin: bool = False,
        marked: float | None = None,  # share of the tokens that are marked where they stand first; BOS is not
        window: int | None = None,  # 1024, where it is not given and the family draws that it has one
        **changes,
    ):
        self.rng = rng = random.Random(f"hard {name} {family} {seed}")
        n = rng.randint(*layers)
        number = rng.getrandbits(30)
        width = None if not thin or family == "gemma2" else 64 if family in ("gpt2", "neox") else 48
        plan = make_plan(family, number, "sink", n, width, True)
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
        self.plan = replace(
            plan,
            marking_layer=0,
            sink_layer=max(1, n - 1 - rng.randint(*behind)) if at is None else at,
            factor="gate" if plan.family.gated else None,
            window=window,
            groups=groups,
            **changes,
        )
        self.space, (self.feature, self.side) = _with_features(make_space(self.plan), self.plan, 2)
        self.model = make_body(self.plan)
        self.delimiter = N_SPECIAL + rng.randrange(20)
        self.tokens = mixed(self.plan.vocab_size, groups, True, 8, 24, number)
        if marked is not None:  # what a marked token reads and writes is measured where one stands first
            in_group = [token for token in range(N_SPECIAL, self.plan.vocab_size) if groups[token] >= 0]
            self.tokens[:, 0] = torch.tensor(rng.choices(in_group, k=8))
        with torch.no_grad():
            self.views = views(self.model)
            self.probe = Probe(self.model, self.tokens)
            generator = torch.Generator().manual_seed(zlib.crc32(f"hard {name} {family} {seed}".encode()))
            fill(self.plan, self.space, self.views, generator)
        self.noise = generator

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
        return self.plan.cleaner, self.plan.early_neuron

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
    ) -> tuple[Head, ...]:
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

    def markers(self) -> tuple[str, ...]:
        """Names of the heads of layer 0 that mark BOS."""
        return tuple(f"L0.H{head}" for head in self.of_bos())

    def of_bos(self) -> tuple[int, ...]:
        """The heads that mark BOS, in the layer of heads that mark."""
        return tuple(sorted(head for head, group, _ in self.plan.slots if group == self.plan.groups[BOS]))

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


# --- the kinds -----------------------------------------------------------------------------------------------------


def spike(b: Build) -> HardTruth:
    """A spike that the neurons of the sink layer make, and that nothing reads."""
    layer = b.at
    return HardTruth(True, False, None, layer, (b.sites(),), step_up=(layer,))


def sink(b: Build, way: Tensor, layers: Iterable[int] | None = None, **more) -> HardTruth:
    """A spike along `way` that heads of `layers` now come to read."""
    reading = b.read(b.behind if layers is None else layers, way)
    return replace(spike(b), sink=True, carried_by="spike", reading=reading, **more)


def textbook(b: Build, **more) -> HardTruth:
    b.mark()
    return sink(b, b.surgeon.make_sink(), **more)


def read_by_later(b: Build, carrier: str, way: Tensor, **more) -> HardTruth:
    """Heads of all layers but the first read `way`; no norm stands out."""
    return replace(HardTruth(False, True, carrier, reading=b.read(b.later_layers, way)), **more)


def read_mark(b: Build, **more) -> HardTruth:
    """Later heads read the mark of the first token itself."""
    b.mark()
    return read_by_later(b, "mark" if b.plan.by_heads else "position embedding", b.space.mark, **more)


@_kind(*ALL, "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
def _plain(b: Build) -> HardTruth:
    """The textbook case, for comparison; in a mixture a routed expert makes the spike."""
    return textbook(b)


@_kind(*ALL, layers=(28, 30), behind=(11, 12), thin=True, count=1, spike=42.0)
def _small_stages(b: Build) -> HardTruth:
    """Layers 1 and 2 add 2.7 % each at right angles to what the heads read; the real layer is far behind."""
    b.mark()
    deep = b.at
    size, way = b.surgeon.size(deep), b.way
    before = {layer: b.const(layer) for layer in (2, deep)}
    b.fire(b.space.mark, b.side, 0.027 * size, layer=1, neuron=b.spare[0])
    rows = b.surgeon.steady(2, b.surgeon.on(2, b.space.mark), b.side, before[2])
    b.write(rows, b.side, 0.027 * size, layer=2, neuron=b.spare[1])
    b.write(b.surgeon.steady(deep, b.surgeon.on(deep, b.space.mark), b.side, before[deep]), way, size)
    return sink(b, way, step_up=(1, 2, deep))


@_kind(*ALL, spike=1.2, massive_layer=None)
def _both(b: Build) -> HardTruth:
    """One dimension is massive on every token, beside a real sink."""
    b.surgeon.make_massive()  # in the embedding
    dims = tuple(b.space.massive.nonzero().flatten().tolist())
    return textbook(b, shared_dims=dims)


@_kind(*ALL, "gpt_oss")
def _no_norm(b: Build) -> HardTruth:
    """Heads of layer 0 mark the first token, in GPT-2 its position does, and later heads read that mark."""
    return read_mark(b)


@_kind(*ALL)
def _spike_only(b: Build) -> HardTruth:
    b.mark()
    b.surgeon.make_sink()
    calm(b, marked=True)
    return spike(b)


@_kind(*ALL, count=2)
def _redundant_pair(b: Build) -> HardTruth:
    """Each of the neurons suffices; in Gemma 2 the norm after the MLP even keeps the spike's size."""
    b.mark()
    b.fire(b.space.mark, b.way, b.surgeon.size(b.at), ballast=8.0)
    b.copy(*b.plan.neurons)
    return sink(b, b.way)


@_kind(*ALL, layers=(6, 8), behind=(3, 4), count=1)
def _backup_next(b: Build) -> HardTruth:
    """A neuron of the next layer does the same where there is no spike yet; it is planted before the other one."""
    b.mark()
    size, neuron = b.surgeon.size(b.at), b.spare[0]
    site = b.fire(b.space.mark, b.way, size, layer=b.at + 1, neuron=neuron)
    view, expert = b.views.layers[b.at + 1], site[1] if len(site) == 3 else 0
    column = view.down[expert, neuron]
    saved = column.clone()
    column.zero_()  # out of the way while the other is measured
    b.fire(b.space.mark, b.way, size)
    column.copy_(saved)
    view.gate[expert, neuron] -= 12.0 * b.full(b.at + 1, b.way)
    return sink(b, b.way, range(b.at + 2, b.plan.n_layers), sets=(b.sites() | {site},))


@_kind("gpt_oss")
def _learned_logits(b: Build) -> HardTruth:
    """Half of the heads after layer 0 give nearly all of their attention to a learned logit."""
    calm(b)
    for layer in b.views.layers[1:]:
        layer.attn_sinks[b.rng.sample(range(b.plan.n_heads), max(1, b.plan.n_heads // 2))] = 8.0
    return HardTruth(False, False, "learned logits")


@_kind(*ALL)
def _token_embedding(b: Build) -> HardTruth:
    """Heads read a feature of BOS's embedding."""
    b.flag(BOS)
    return read_by_later(b, "token embedding", b.feature)


@_kind(*ALL)
def _embedding_spike(b: Build) -> HardTruth:
    """BOS's embedding itself is the spike: no MLP makes it."""
    b.views.embed[BOS] += b.plan.spike * NORM * b.way / b.plan.embed_scale
    return read_by_later(b, "spike", b.way, spike=True)


@_kind(*ALL, layers=(7, 8), behind=(4, 5))
def _rise_and_fall(b: Build) -> HardTruth:
    """The last layer but one takes the spike away again."""
    truth, fall = textbook(b), b.plan.n_layers - 2
    b.take_away(fall)
    reading = tuple(place for place in truth.reading if place[0] <= fall)
    return replace(truth, step_down=(fall,), reading=reading)


@_kind(*PLAIN, count=1)
def _many_decoys(b: Build) -> HardTruth:
    """Twenty pairs of neurons write more than the sink neuron does, and each pair cancels."""
    b.mark()
    rows, size = b.surgeon.on(b.at, b.space.mark), b.surgeon.size(b.at)
    b.write(rows, b.way, size)
    free = [n for n in range(b.plan.d_mlp) if n not in b.plan.busy_neurons]
    for plus, minus in zip(free[:20], free[20:40], strict=True):
        b.write(rows, b.side, 1.1 * size, neuron=plus)
        b.copy(plus, minus, -1.0)
    return sink(b, b.way)


@_kind("qwen2")
def key_bias(b: Build) -> HardTruth:
    """Heads attend to the farthest key, whatever it is: the first token of any text. The key is a bias on one rotary
    pair (in NeoX a part of a fused one); with the query turned, the farthest key scores most."""
    inverse = next(m.inv_freq for m in b.model.modules() if hasattr(m, "inv_freq"))
    pair = next(p for p, speed in enumerate(inverse.tolist()) if speed < 0.0122)
    turned, force = pair + len(inverse), 2.0 / float(inverse[pair]) * math.sqrt(b.plan.head_dim)
    reading = []
    for index in b.later_layers:
        layer = b.views.layers[index]
        ratio = b.plan.n_heads // b.plan.n_kv
        for kv in b.rng.sample(range(b.plan.n_kv), max(1, b.plan.n_kv // 2)):
            layer.k[kv, [pair, turned]] = 0.0
            layer.k_bias[kv, [pair, turned]] = torch.tensor([1.0, 0.0])
            for head in range(kv * ratio, (kv + 1) * ratio):
                layer.q[head], layer.q_bias[head] = 0.0, 0.0
                layer.q_bias[head, turned] = -force
                reading.append((index, head))
    return HardTruth(False, True, "key bias", reading=tuple(sorted(reading)))


@_kind(*ALL)
def _sharp(b: Build) -> HardTruth:
    """Noise with sharp attention: queries read content only, and heads that prefer BOS are turned round."""
    for layer in b.views.layers:
        layer.q.mul_(4.0 * (b.space.const == 0))
        if layer.q_bias is not None:
            layer.q_bias.zero_()
        if layer.k_bias is not None:
            layer.k_bias.zero_()
    calm(b)
    return HardTruth(False, False, None)


def calm(b: Build, marked: bool = False):
    """Draw the queries of heads anew that by chance attend to the first token; those that mark it stay."""
    stay = [[0, head] for head, _, _ in b.plan.slots if marked and b.plan.by_heads]
    for turn in range(20):
        places = [
            place
            for place in (attentions(b.model, b.tokens)[:, :, :, 4:, 0].mean((1, 3)) > 0.15).nonzero().tolist()
            if place not in stay
        ]
        if not places:
            return
        for index, head in places:
            query = b.views.layers[index].q[head]
            noise = torch.randn(query.shape, generator=b.noise)[:, b.space.content] * query.norm()
            noise *= 1.0 if turn < 8 else 0.5
            query.zero_()
            if (bias := b.views.layers[index].q_bias) is not None:
                bias[head] = 0.0
            query[:, b.space.content] = noise / query.shape[0] ** 0.5 / len(b.space.content) ** 0.5
    raise AssertionError("heads attend to the first token by chance, again and again")


@torch.no_grad()
def attentions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own eager attention, [layer, row, head, query, key]."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    rows = model(ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(usual)
    return torch.stack(rows)
