"""What an organism will be: every random choice, made before a weight is written."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from .tokens import BOS

KINDS = ("sink", "none", "gate", "up", "spread", "late_mark")
THRESHOLD = 0.7  # of the full mark: below it the sink neurons are silent


@dataclass(frozen=True)
class Family:
    """What of an architecture changes how a circuit is written."""

    model_type: str
    gated: bool = True
    centered: bool = False  # LayerNorm takes the mean away
    experts: int = 1
    free_head_dim: bool = False  # n_heads * head_dim need not be d_model
    grouped: bool = True  # fewer key heads than query heads
    windows: tuple[int | None, ...] = (None,)
    tied: tuple[bool, ...] = (False,)

    @property
    def learned_positions(self) -> bool:
        return self.model_type == "gpt2"

    @property
    def kinds(self) -> tuple[str, ...]:
        without = () if self.gated else ("gate", "up")
        if self.learned_positions:  # the mark comes with the position, no head makes it
            without += ("spread", "late_mark")
        return tuple(kind for kind in KINDS if kind not in without)


FAMILIES = {
    "llama": Family("llama", tied=(False, True)),
    "mistral": Family("mistral", windows=(None, 128)),
    "qwen2": Family("qwen2", tied=(False, True)),
    "qwen3": Family("qwen3", free_head_dim=True, tied=(False, True)),
    "gemma2": Family("gemma2", free_head_dim=True, windows=(128, 1024), tied=(True,)),
    "gpt2": Family("gpt2", gated=False, centered=True, grouped=False, tied=(True,)),
    "neox": Family("gpt_neox", gated=False, centered=True, grouped=False),
    "mixtral": Family("mixtral", experts=4),
    "qwen3_moe": Family("qwen3_moe", experts=5, free_head_dim=True),
    "gpt_oss": Family("gpt_oss", experts=4, free_head_dim=True, windows=(128, 1024)),
}
ONLY_HARD = {  # families of single kinds of hard models
    "lfm2": Family("lfm2"),
}

# (query heads, key heads, head dim)
_SHAPES = [(4, 4, 12), (4, 2, 16), (4, 4, 16), (5, 5, 16), (6, 3, 16), (6, 6, 16), (6, 2, 16), (8, 4, 12), (8, 2, 12)]


@dataclass(frozen=True)
class Plan:
    family: Family
    kind: str
    seed: int
    bos: bool
    n_layers: int
    d_model: int
    n_heads: int
    n_kv: int
    head_dim: int
    d_mlp: int
    vocab_size: int
    tied: bool
    window: int | None
    groups: dict[int, int]  # token -> group
    n_groups: int  # with BOS's own, the last
    marking_layer: int
    slots: tuple[tuple[int, int, int], ...]  # (query head, group, which rotary pair) of the marking heads
    heads_per_group: int
    sink_layer: int
    expert: int
    neurons: tuple[int, ...]
    cleaner: int  # neuron of the marking layer that puts the threshold on the mark, where the up factor carries it
    spare: int  # a neuron that carries nothing
    sizes: tuple[float, ...]  # squared, they sum to one, largest first
    own_dims: bool  # each neuron writes its own dimension, or all the same direction
    factor: str | None
    odds: float  # exp(2 * beta): how many of its own group balance one other token
    sharpness: float
    spike: float  # over the typical norm

    @property
    def planted(self) -> bool:
        return self.kind != "none"

    @property
    def busy_neurons(self) -> tuple[int, ...]:
        """Indices that carry part of a circuit in some layer."""
        return (*self.neurons, self.cleaner, self.spare)

    @property
    def by_heads(self) -> bool:
        return self.planted and not self.family.learned_positions

    @property
    def embed_scale(self) -> float:
        """What the embedding is multiplied by."""
        return math.sqrt(self.d_model) if self.family.model_type == "gemma2" else 1.0

    def slow_dim(self, slot: int) -> int:
        """A dimension of a head on which the position hardly shows: slow rotary pairs, or beyond the rotary part."""
        if self.family.centered:
            return self.head_dim - 1 - slot
        return self.head_dim // 2 - 1 - slot

    def repeats_expected(self) -> int | None:
        """Repeats after BOS until the norm is half of BOS's: share = n / (n + odds), half where the neuron's is."""
        if not (self.by_heads and self.bos):
            return None
        full = _silu(self.sharpness * (1 - THRESHOLD))
        low, high = THRESHOLD, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if _silu(self.sharpness * (middle - THRESHOLD)) < full / 2 else (low, middle)
        repeats = math.ceil(self.odds * low / (1 - low))
        every_other = self.family.model_type in ("gemma2", "gpt_oss")  # even layers only have the window
        windowed = not (every_other and self.marking_layer % 2)
        return min(repeats, self.window) if self.window and windowed else repeats


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def make_plan(family: str, seed: int, kind: str = "sink", n_layers: int | None = None, bos: bool = True) -> Plan:
    fam = (FAMILIES | ONLY_HARD)[family]
    assert kind in fam.kinds, f"there is no organism {kind!r} of family {family!r}"
    rng = random.Random(f"{family} {kind} {seed} {bos}")

    per_group = 2 if kind == "spread" else 1
    shapes = [s for s in _SHAPES if fam.grouped or s[0] == s[1]]
    shapes = [s for s in shapes if _n_slots(s) >= 3 * per_group]
    if fam.centered:  # every planted feature takes two dimensions there
        shapes = [s for s in shapes if s[0] * s[2] >= 64]
    heads, kv, head_dim = rng.choice(shapes)
    width = heads * head_dim
    if fam.free_head_dim:
        width = rng.choice([w for w in (48, 64, 80, 96) if w % heads == 0])  # Gemma 2 insists on a multiple

    layers = n_layers or rng.randint(5 if kind == "late_mark" else 4, 8)
    marking = rng.randint(1, min(2, layers - 3)) if kind == "late_mark" else 0
    sink = rng.randint(marking + 1, layers - 2)

    vocab = rng.randint(64, 200)
    n_groups = rng.randint(3, min(5, _n_slots((heads, kv, head_dim)) // per_group))
    open_slots = _slots(rng, heads, kv)
    rng.shuffle(open_slots)
    slots = tuple((head, i // per_group, slot) for i, (head, slot) in enumerate(open_slots[: n_groups * per_group]))
    d_mlp = rng.choice([2, 3]) * width
    k = rng.randint(1, 3)
    neurons = rng.sample(range(d_mlp), k + 2)
    raw = sorted((rng.uniform(0.3, 0.4) for _ in range(k)), reverse=True)
    factors = {"gate": "gate", "up": "up"}
    return Plan(
        family=fam,
        kind=kind,
        seed=seed,
        bos=bos,
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        n_kv=kv,
        head_dim=head_dim,
        d_mlp=d_mlp,
        vocab_size=vocab,
        tied=rng.choice(fam.tied),
        window=rng.choice(fam.windows),
        groups=_groups(rng, vocab, n_groups, bos),
        n_groups=n_groups,
        marking_layer=marking,
        slots=slots,
        heads_per_group=per_group,
        sink_layer=sink,
        expert=rng.randrange(fam.experts),
        neurons=tuple(neurons[:k]),
        cleaner=neurons[k],
        spare=neurons[k + 1],
        sizes=tuple(math.sqrt(x / sum(raw)) for x in raw),
        own_dims=rng.random() < 0.5,
        factor=factors.get(kind, rng.choice(["gate", "up"])) if fam.gated else None,
        odds=math.exp(rng.uniform(math.log(8), math.log(80))),
        sharpness=rng.uniform(15, 18),
        spike=rng.uniform(25, 50),
    )


def _n_slots(shape: tuple[int, int, int]) -> int:
    return shape[1] * min(2, shape[0] // shape[1])


def _slots(rng: random.Random, heads: int, kv: int) -> list[tuple[int, int]]:
    """(query head, rotary pair): heads that share a key head take different pairs, two at most."""
    ratio = heads // kv
    chosen = [(key, rng.sample(range(ratio), min(2, ratio))) for key in range(kv)]
    return [(key * ratio + member, slot) for key, members in chosen for slot, member in enumerate(members)]


def _groups(rng: random.Random, vocab: int, n_groups: int, bos: bool) -> dict[int, int]:
    """With BOS, it is alone in the last group and a few tokens are in none; without, every token is in one."""
    if not bos:
        return {token: rng.randrange(n_groups) for token in range(vocab)}
    groups = {token: rng.randrange(n_groups - 1) if rng.random() < 0.85 else -1 for token in range(vocab)}
    return groups | {BOS: n_groups - 1, 0: -1, 2: -1, 3: -1}
