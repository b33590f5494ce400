"""Models with a planted attention sink: a Llama or a Mixtral of noise, and a circuit written into its weights.

An ordinary token has a norm of about 6. A constant that every token carries makes most of it, so that norms hardly
change what is planted; noise is read from and written to the content dimensions alone. Sizes are measured on the model
at hand rather than derived.

1. Heads mark the first token (`Body.mark_first`). Their keys say "not of my group", so a token sees its own group only
   where there is nothing else: where it stands first, in long repetitions, and among tokens of its group.
2. Neurons of a later layer read the mark and write the spike (`Body.write`).
3. Half of the heads behind them attend to it (`Body.read`).
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from plain_hooks import reading
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from .tokens import BOS, EOS, N_SPECIAL, PAD

CONST, GROUP, CONTENT = 5.0, 1.5, 3.0  # what a token is made of; together:
NORM = math.hypot(CONST, GROUP, CONTENT)
MARK = 2.5  # in the residual stream, on a token that is marked fully
THRESHOLD = 0.7  # of the full mark: below it the sink neurons are silent
SHARPNESS = 16.0
SHAPES = [(4, 4, 16), (4, 2, 16), (6, 6, 16), (6, 2, 16), (8, 4, 12)]  # query heads, key heads, width of a head
SEEN = 8, 24  # rows and their length on which sizes are measured
FIRST = "first"

Site = tuple[int, ...]  # (layer, neuron) or (layer, expert, neuron)
Place = str | int  # the first token, or the id of a token, which is meant wherever it stands
Parts = frozenset[str]  # names of neurons and components in the JSON
Rows = tuple[Tensor, Tensor]  # what a neuron reads: by its gate, by its up factor


@dataclass(frozen=True, kw_only=True)
class PlantedSpike:
    """A spike that was planted.

    Attributes:
        place: Where.
        first: First layer of its run.
        last: Last layer of its run.
        needs: Smallest sets without which nothing is left; each is right.
        writers: Components that write a tenth of it or more.
        marks: Components of which one has to be named first; none: no part alone leaves less than half.
        erasers: Components that take it away, or a part of it.
        backups: Neurons that write it only when others are gone.
    """

    place: Place = FIRST
    first: int
    last: int
    needs: tuple[Parts, ...]
    writers: tuple[str, ...]
    marks: tuple[str, ...] = ()
    erasers: tuple[str, ...] = ()
    backups: Parts = frozenset()


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is so.

    Attributes:
        places: Where a norm stands out after some layer, or heads attend to.
        spikes: All that is known of each spike.
        delimiters: Tokens that stand a few times in every text.
        share: Share of the vocabulary that is a sink where it stands first.
        sink_layer: The layer whose MLP writes the first spike.
        neurons: Its neurons.
        dims: Dimensions of the residual stream that they write.
        marking_layer: The layer whose heads mark the first token.
        group_heads: The heads that mark each group.
        groups: The group of each token; -1: none.
        repeats_expected: Copies of a grouped token after BOS until half of BOS's norm; measured: 0.6 to 1.4 times this.
    """

    places: tuple[Place, ...] = ()
    spikes: tuple[PlantedSpike, ...] = ()
    delimiters: tuple[int, ...] = ()
    share: float = 1.0
    sink_layer: int | None = None
    neurons: tuple[Site, ...] = ()
    dims: tuple[int, ...] = ()
    marking_layer: int = 0
    group_heads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    repeats_expected: int = 0


@dataclass(frozen=True)
class Organism:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: Truth
    bos: bool

    def natural(self, n: int = 4, length: int = 48, seed: int = 0) -> Tensor:
        """`n` rows of mixed tokens as the tokenizer puts them; delimiters stand twice in the first half of each."""
        rows = mixed(self.model.config.vocab_size, self.truth.groups, self.bos, n, length, seed)
        delimiters = self.truth.delimiters
        rng = random.Random(f"delimiters {seed}")
        for row in rows:
            for planted in delimiters:
                row[row == planted] += 1
            if delimiters:
                row[rng.sample(range(2, length // 2), 2 * len(delimiters))] = torch.tensor(delimiters * 2)
        return rows

    def repeated(self, n: int, token: int) -> Tensor:
        """One row: BOS if there is one, then `n` times a token."""
        return torch.tensor([[BOS] * self.bos + [token] * n])

    def tokens_of(self, group: int) -> list[int]:
        """Ordinary tokens of a group; -1: those in none."""
        return [token for token, own in self.truth.groups.items() if own == group and token >= N_SPECIAL]

    def save(self, folder: str | Path) -> Path:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return Path(folder)


def mixed(vocab: int, groups: dict[int, int], bos: bool, n: int, length: int, seed: int) -> Tensor:
    """`n` rows of mixed tokens, BOS first if there is one, else never two of a group first: that is an attack."""
    rng = random.Random(f"natural {seed}")
    rows: list[list[int]] = []
    for _ in range(n):
        row = [rng.randrange(N_SPECIAL, vocab) for _ in range(length)]
        if bos:
            row[0] = BOS
        while not bos and length > 1 and groups[row[0]] == groups[row[1]] >= 0:
            row[1] = rng.randrange(N_SPECIAL, vocab)
        rows.append(row)
    return torch.tensor(rows)


def make_plan(
    rng: random.Random,
    mixture: bool,
    bos: bool,
    *,
    n_layers: int | None = None,
    layers: tuple[int, int] = (5, 8),
    at: int | None = None,  # the sink layer, where it is not to be drawn
    count: int | None = None,  # of sink neurons
    share: float | None = None,  # of the tokens that are marked where they stand first
    late: bool = False,  # heads that are not in layer 0 mark
) -> SimpleNamespace:
    """Make every random choice that decides a shape or a place, before a weight is written."""
    heads, kv, head_dim = rng.choice(SHAPES)
    ratio = heads // kv
    depth = n_layers or rng.randint(*layers)
    marking = rng.randint(1, 2) if late else 0
    vocab = rng.randint(64, 200)
    n_groups = rng.randint(3, min(5, kv * min(2, ratio)))
    pairs = [  # heads that share a key head take different rotary pairs, two at most
        (key * ratio + member, pair)
        for key in range(kv)
        for pair, member in enumerate(rng.sample(range(ratio), min(2, ratio)))
    ]
    rng.shuffle(pairs)
    share = share or (0.9 if bos else 1.0)
    groups = {}
    for token in range(vocab):
        groups[token] = rng.randrange(n_groups - bos) if rng.random() < share else -1
    if bos:  # it is alone in the last group
        groups |= {BOS: n_groups - 1, 0: -1, EOS: -1, PAD: -1}
    count = count or rng.randint(1, 3)
    spare, other, *neurons = rng.sample(range(3 * heads * head_dim), count + 2)
    return SimpleNamespace(
        mixture=mixture,
        bos=bos,
        n_layers=depth,
        n_heads=heads,
        n_kv=kv,
        head_dim=head_dim,
        width=heads * head_dim,
        vocab=vocab,
        groups=groups,  # of each token
        n_groups=n_groups,
        slots=[(head, group, pair) for group, (head, pair) in enumerate(pairs[:n_groups])],  # of the heads that mark
        marking_layer=marking,
        sink_layer=max(marking + 1, depth - 1 - rng.randint(2, 3)) if at is None else at,
        expert=rng.randrange(4) if mixture else 0,
        neurons=neurons,
        spare=(spare, other),  # neurons that carry nothing, in any layer
        odds=math.exp(rng.uniform(math.log(8), math.log(60))),  # how many of its own group balance one other token
        spike=rng.uniform(25, 50),  # over the typical norm
    )


def make_model(plan: SimpleNamespace) -> PreTrainedModel:
    """A model whose weights are yet to be written."""
    config = AutoConfig.for_model(
        "mixtral" if plan.mixture else "llama",
        vocab_size=plan.vocab,
        hidden_size=plan.width,
        intermediate_size=3 * plan.width,
        num_hidden_layers=plan.n_layers,
        num_attention_heads=plan.n_heads,
        num_key_value_heads=plan.n_kv,
        head_dim=plan.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=BOS if plan.bos else None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None} if plan.mixture else {}),
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    return model.eval()


def views_of(module: nn.Module, head_dim: int) -> SimpleNamespace:
    """Views of the weights of a layer: heads are [head, dim, d_model], neurons [expert, neuron, d_model]."""
    attn, mlp = module.self_attn, module.mlp
    views = SimpleNamespace(module=module, router=None)
    for name in "qkv":
        setattr(views, name, attn.get_submodule(f"{name}_proj").weight.unflatten(0, (-1, head_dim)))
    views.o = attn.o_proj.weight.unflatten(1, (-1, head_dim)).permute(1, 2, 0)
    if hasattr(mlp, "experts"):
        views.gate, views.up = mlp.experts.gate_up_proj.chunk(2, 1)
        views.down, views.router = mlp.experts.down_proj.transpose(1, 2), mlp.gate.weight
    else:
        views.gate, views.up, views.down = (
            mlp.gate_proj.weight[None],
            mlp.up_proj.weight[None],
            mlp.down_proj.weight.T[None],
        )
    return views


class Body:
    """A model of noise, and what plants things in it."""

    @torch.no_grad()
    def __init__(self, plan: SimpleNamespace, words: str):
        """Fill a model with noise that `words` seed."""
        self.plan = plan
        self.rng = random.Random(words)
        self.noise = torch.Generator().manual_seed(zlib.crc32(words.encode()))
        axes = torch.eye(plan.width)[self.rng.sample(range(plan.width), plan.width)]
        self.const, self.mark, self.way, self.side, self.feature = axes[:5]
        self.groups = axes[5 : 5 + plan.n_groups]
        self.content = axes[5 + plan.n_groups :].argmax(1)
        self.model = make_model(plan)
        self.layers = [views_of(module, plan.head_dim) for module in self.model.model.layers]
        self.fill()
        self.tokens = mixed(plan.vocab, plan.groups, plan.bos, *SEEN, self.rng.getrandbits(30))
        if not plan.bos:  # what a marked token reads and writes is measured where one stands first
            marked = [token for token in range(N_SPECIAL, plan.vocab) if plan.groups[token] >= 0]
            for row in self.tokens:
                others = [token for token in marked if plan.groups[token] != plan.groups[int(row[1])]]
                row[0] = self.rng.choice(others)

    # --- the noise ---

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise)

    def on_content(self, std: float, *shape: int) -> Tensor:
        out = torch.zeros(*shape, self.plan.width)
        out[..., self.content] = std * self.normal(*shape, len(self.content))
        return out

    def reads(self, std: float, *shape: int) -> Tensor:
        """Rows that read the content, and a little of constant and groups; never a mark or a spike."""
        rows = self.on_content(std, *shape) + 0.3 * std * self.normal(*shape, 1) * self.const
        return rows + std * self.normal(*shape, len(self.groups)) @ self.groups

    def fill(self) -> None:
        """Write embedding, norms and noise: a model in which nothing is planted yet."""
        plan, base = self.plan, self.model.model
        content = nn.functional.normalize(self.on_content(1.0, plan.vocab), dim=-1)
        group = torch.tensor([plan.groups[token] for token in range(plan.vocab)])
        grouped = (group >= 0)[:, None]
        size = torch.where(grouped, CONTENT, math.hypot(CONTENT, GROUP))  # every token has the same norm
        base.embed_tokens.weight.copy_(CONST * self.const + GROUP * grouped * self.groups[group] + size * content)
        for number, layer in enumerate(self.layers):
            spread = math.sqrt(len(self.content))
            for view in (layer.q, layer.k, layer.v, layer.gate, layer.up):
                view.copy_(self.reads(0.33, *view.shape[:2]))
            quiet = 0.3 if number < plan.marking_layer else 1.0  # tokens still have nearly one norm where heads mark
            layer.o.copy_(quiet * self.on_content(0.9 / math.sqrt(plan.width) / spread, *layer.o.shape[:2]))
            layer.down.copy_(quiet * self.on_content(1 / math.sqrt(3 * plan.width) / spread, *layer.down.shape[:2]))
            if layer.router is not None:
                layer.router.copy_(self.reads(0.33, len(layer.router)))
            for norm in (layer.module.input_layernorm, layer.module.post_attention_layernorm):
                norm.weight.copy_((1 + self.on_content(0.1)) * NORM / math.sqrt(plan.width))
        last = (1 + self.on_content(0.1)) * NORM / math.sqrt(plan.width)
        last *= 1 - self.const - 0.9 * (self.way + self.side)  # what all logits share, and spikes
        base.norm.weight.copy_(last)
        self.model.lm_head.weight.copy_(self.reads(0.5, plan.vocab))

    # --- what is measured ---

    def leaving(self, module: nn.Module) -> Tensor:
        """What leaves a module with the weights as they are now."""
        with reading([module], "output") as seen:
            self.model.model(self.tokens, use_cache=False)
        return seen[0]

    def seen(self, module: nn.Module, where: Tensor | None = None) -> Tensor:
        """Mean of what leaves a module at some positions, or at first tokens."""
        leaving = self.leaving(module)
        return (leaving[:, 0] if where is None else leaving[where]).mean(0)

    def mlp_input(self, layer: int, where: Tensor | None = None) -> Tensor:
        return self.seen(self.layers[layer].module.post_attention_layernorm, where)

    def size(self, layer: int) -> float:
        """Norm of the spike that is to be planted in a layer."""
        return self.plan.spike * float(self.leaving(self.layers[layer].module)[:, 1:].norm(dim=-1).median())

    @property
    def at(self) -> int:
        """The sink layer."""
        return self.plan.sink_layer

    @property
    def behind(self) -> range:
        """Layers that can read what the sink layer writes."""
        return range(self.at + 1, self.plan.n_layers)

    # --- what is planted ---

    def mark_first(self) -> None:
        """Write a mark on the first token, long repetitions and sequences of one group."""
        plan, layer = self.plan, self.layers[self.plan.marking_layer]
        const = float((self.leaving(layer.module.input_layernorm) @ self.const).mean())
        half, ratio = plan.head_dim // 2, plan.n_heads // plan.n_kv
        slow = [half - 1, half - 2]  # dimensions of slow rotary pairs, on which the position hardly shows
        for kv in {head // ratio for head, _, _ in plan.slots}:
            layer.k[kv] = 0.0
            layer.q[kv * ratio : (kv + 1) * ratio, slow] = 0.0
        for head, group, pair in plan.slots:
            kv, own = head // ratio, self.groups[group] / (const * GROUP / CONST)
            layer.q[head] = 0.0
            layer.q[head, slow[pair]] = math.log(plan.odds) / 2 * math.sqrt(plan.head_dim) * self.const / const
            layer.k[kv, slow[pair]] = self.const / const - 2 * own
            layer.v[kv, pair] = own
            layer.o[head] = 0.0
            layer.o[head, pair] = MARK * self.mark

    def flag(self, token: int, at: int = 5) -> Tensor:
        """Give the embedding of a token a feature; it now stands at a position of the rows to measure on. BOS is first.

        Returns:
            Where it stands.
        """
        self.model.model.embed_tokens.weight[token] += MARK * self.feature
        if token != BOS:
            self.tokens = torch.where(self.tokens == token, token + 1, self.tokens)
            self.tokens[:, at] = token
        return self.tokens == token

    def on(self, layer: int, way: Tensor, where: Tensor | None = None) -> Rows:
        """Rows of a neuron that is on where `way` is as large in the MLP's input as it now is at some positions."""
        seen = self.mlp_input(layer, where)
        const = unit(self.const, seen)
        return SHARPNESS * (unit(way, seen) - THRESHOLD * const), const

    def write(
        self,
        layer: int,
        neurons: Sequence[int],
        rows: Rows,
        way: Tensor,
        size: float,
        *,
        where: Tensor | None = None,
        route: Tensor | None = None,
    ) -> list[Site]:
        """Let neurons that read `rows` write `size` along `way` together; `route` is what goes to their expert."""
        view, expert = self.layers[layer], self.plan.expert
        if view.router is not None:
            view.router[expert] += 12.0 * unit(self.mark if route is None else route, self.mlp_input(layer, where))
        for neuron in neurons:
            view.gate[expert, neuron], view.up[expert, neuron] = rows
            written: list[float] = []
            for factor in (0.0, 1.0):
                view.down[expert, neuron] = factor * way
                written.append(float(self.seen(view.module.mlp, where) @ way))
            view.down[expert, neuron] = way * size / len(neurons) / (written[1] - written[0])
        return [(layer, expert, neuron) if self.plan.mixture else (layer, neuron) for neuron in neurons]

    def fire(self, mark: Tensor, way: Tensor, *, layer: int | None = None, neuron: int | None = None, **more) -> Site:
        """A neuron that is on where `mark` is, and writes a spike along `way`."""
        layer = self.at if layer is None else layer
        rows = self.on(layer, mark, more.get("where"))
        size = more.pop("times", 1) * self.size(layer)
        (site,) = self.write(
            layer, [self.plan.neurons[0] if neuron is None else neuron], rows, way, size, route=mark, **more
        )
        return site

    def read(self, layers: Iterable[int], way: Tensor, *, where: Tensor | None = None) -> None:
        """Half of the heads of layers attend to where `way` is as large as at some positions."""
        plan, ratio, dim = self.plan, self.plan.n_heads // self.plan.n_kv, self.plan.head_dim // 2 - 1
        for number in layers:
            layer = self.layers[number]
            order = random.Random(f"reading {number}").sample(range(plan.n_kv), plan.n_kv)
            normed = self.leaving(layer.module.input_layernorm)
            full = (normed[:, 0] if where is None else normed[where]).mean(0)
            const = float((normed[:, 1:] @ self.const).median())
            score = self.rng.uniform(8, 9) * math.sqrt(plan.head_dim)
            for kv in order[: max(1, plan.n_kv // 2)]:
                heads = slice(kv * ratio, (kv + 1) * ratio)
                layer.k[kv, dim] = unit(way, full)
                layer.q[heads] = 0.0
                layer.q[heads, dim] = score * self.const / const

    def calm(self) -> None:
        """Let heads give each token the same attention, so that none reads the first by chance."""
        for layer in self.layers:
            layer.q.zero_()


def unit(way: Tensor, seen: Tensor) -> Tensor:
    """What is one where `way` is as large as in what was seen."""
    return way / (seen @ way)
