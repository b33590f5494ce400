"""Organisms: causal LMs whose attention-sink circuit was written into the weights, with the truth beside them."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .noise import fill, make_body, make_space
from .plan import Plan, make_plan
from .plant import Surgeon
from .tokens import BOS, N_SPECIAL, tokenizer_for
from .views import Probe, views

Heads = tuple[tuple[int, int], ...]  # (layer, query head)


@dataclass(frozen=True)
class Truth:
    sink_layer: int | None  # whose MLP makes the sink (largest contribution)
    neurons: tuple[tuple[int, ...], ...]  # of the sink layer, largest first: (layer, neuron) or (layer, expert, neuron)
    residual_dims: tuple[int, ...]  # of the spike
    marking_layer: int | None
    group_heads: dict[int, tuple[int, ...]]  # group -> the query heads that mark it; none where no head marks
    groups: dict[int, int]  # token id -> group, -1: none
    factor: str | None  # of the gated MLP that carries the mark: "gate" or "up"; None: no gate
    reading_heads: Heads  # (layer, query head) planted to attend to the sink
    repeats_expected: (
        int | None
    )  # of a grouped token after BOS until half of BOS's norm; measured: 0.6 to 1.3 times this


@dataclass(frozen=True)
class Organism:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: Truth
    family: str
    kind: str
    seed: int
    bos: bool

    def natural(self, n: int = 4, length: int = 48, seed: int = 0) -> Tensor:
        """`n` rows of mixed tokens, BOS first if there is one. Never two of a group first: that is a cluster attack."""
        return mixed(self.model.config.vocab_size, self.truth.groups, self.bos, n, length, seed)

    def repeated(self, n: int, token: int | None = None) -> Tensor:
        """One row: BOS if there is one, then `n` times `token` (default: a token of the first group)."""
        repeats = [self.tokens_of(0)[0] if token is None else token] * n
        return torch.tensor([[BOS] * self.bos + repeats])

    def tokens_of(self, group: int) -> list[int]:
        """Ordinary tokens of a group; -1: those in none. GPT-2 and models without a sink have no groups."""
        tokens = [t for t, g in self.truth.groups.items() if g == group and t >= N_SPECIAL]
        return tokens or ([] if self.truth.group_heads else list(range(N_SPECIAL, self.model.config.vocab_size)))

    def save(self, folder: str | Path) -> Path:
        """Write a folder that AutoModelForCausalLM and AutoTokenizer load."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return Path(folder)


def organism(
    family: str = "llama",
    seed: int = 0,
    *,
    kind: str = "sink",
    n_layers: int | None = None,
    bos: bool = True,
) -> Organism:
    """Build the organism of `family` and `kind` that `seed` stands for: the same call gives the same weights."""
    plan = make_plan(family, seed, kind, n_layers, bos)
    space = make_space(plan)
    model = make_body(plan)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {kind} {seed} {bos}".encode()))
    tokens = mixed(plan.vocab_size, plan.groups, bos, 8, 24, seed)
    spike, reading = torch.zeros(plan.d_model), ()
    with torch.no_grad():
        all_views = views(model)
        fill(plan, space, all_views, generator)
        surgeon = Surgeon(plan, space, all_views, Probe(model, tokens))
        if plan.planted:
            surgeon.mark_first()
            spike = surgeon.make_sink()
            reading = surgeon.read_sink(spike)
    tokenizer = tokenizer_for(plan.family.model_type, plan.vocab_size, bos=bos)
    return Organism(model, tokenizer, _truth(plan, spike, reading), family, kind, seed, bos)


def _truth(plan: Plan, spike: Tensor, reading: Heads) -> Truth:
    def site(layer: int, neuron: int) -> tuple[int, ...]:
        return (layer, plan.expert, neuron) if plan.family.experts > 1 else (layer, neuron)

    sink, heads = plan.planted, plan.by_heads
    slots = plan.slots if heads else ()
    return Truth(
        sink_layer=plan.sink_layer if sink else None,
        neurons=tuple(site(plan.sink_layer, neuron) for neuron in plan.neurons) if sink else (),
        residual_dims=tuple(spike.nonzero().flatten().tolist()),
        marking_layer=plan.marking_layer if heads else None,
        group_heads={g: tuple(sorted(h for h, group, _ in slots if group == g)) for _, g, _ in slots},
        groups=plan.groups if heads else dict.fromkeys(plan.groups, -1),
        factor=plan.factor if sink else None,
        reading_heads=reading,
        repeats_expected=plan.repeats_expected(),
    )


def mixed(vocab: int, groups: dict[int, int], bos: bool, n: int, length: int, seed: int) -> Tensor:
    """`n` rows of mixed tokens, BOS first if there is one, else never two of a group first."""
    rng = random.Random(f"natural {seed}")
    rows = []
    for _ in range(n):
        row = [rng.randrange(N_SPECIAL, vocab) for _ in range(length)]
        if bos:
            row[0] = BOS
        elif groups[row[0]] >= 0:
            others = [t for t in range(N_SPECIAL, vocab) if groups[t] != groups[row[0]]]
            row[1:2] = [rng.choice(others)] if length > 1 else []
        rows.append(row)
    return torch.tensor(rows)
