"""What is known of a planted model, whose circuit was written into the weights of a causal language model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tokens import BOS, N_SPECIAL

Site = tuple[int, ...]  # (layer, neuron) or (layer, expert, neuron)
Heads = tuple[tuple[int, int], ...]  # (layer, query head)
Place = str | int
Parts = frozenset[str]  # names of neurons and components in the JSON
FIRST, SECOND = "first", "second"


@dataclass(frozen=True, kw_only=True)
class PlantedSpike:
    """A spike that was planted.

    Attributes:
        place: Where; a token is meant wherever it stands.
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
    """What is so. A place is FIRST, SECOND, or the id of a token, which is meant wherever it stands.

    Attributes:
        spike: Places whose norm stands out after some layer.
        sink: Places that heads attend to.
        sets: Each a smallest set of sites whose zeroing removes a spike and, with it, the attention.
        planted: All that is known of each spike, in the kinds of `blind.py`.
        delimiters: Tokens that stand a few times in every text.
        before: Ids that the tokenizer puts before every text.
        bos: Texts begin with BOS.
        share: Share of the vocabulary that is a sink where it stands first.
        sink_layer: The layer whose MLP makes the sink, of an organism; None: there is no sink.
        neurons: Its neurons, largest first: (layer, neuron) or (layer, expert, neuron).
        residual_dims: Dimensions of the spike.
        marking_layer: The layer whose heads mark the first token; None: none does.
        group_heads: The query heads that mark each group.
        groups: The group of each token; -1: none.
        factor: The factor of the gated MLP that carries the mark, "gate" or "up"; None: no gate.
        reading_heads: (layer, query head) planted to attend to the sink.
        repeats_expected: Copies of a grouped token after BOS until half of BOS's norm; measured: 0.6 to 1.3 times this.
    """

    spike: tuple[Place, ...] = ()
    sink: tuple[Place, ...] = ()
    sets: tuple[frozenset[Site], ...] = ()
    planted: tuple[PlantedSpike, ...] = ()
    delimiters: tuple[int, ...] = ()
    before: tuple[int, ...] = (BOS,)
    bos: bool = True
    share: float = 1.0
    sink_layer: int | None = None
    neurons: tuple[Site, ...] = ()
    residual_dims: tuple[int, ...] = ()
    marking_layer: int | None = None
    group_heads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    factor: str | None = None
    reading_heads: Heads = ()
    repeats_expected: int | None = None


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
        """`n` rows of mixed tokens as the tokenizer puts them; delimiters stand twice in the first half of each.

        Without BOS never two of a group stand first: that is a cluster attack.
        """
        rows = mixed(self.model.config.vocab_size, self.truth.groups, self.bos, n, length, seed)
        before, delimiters = self.truth.before, self.truth.delimiters
        rng = random.Random(f"delimiters {seed}")
        for row in rows:
            for planted in sorted((*before[1:], *delimiters)):
                row[row == planted] += 1
            for number, token in enumerate(before):
                row[number] = token
            if delimiters:
                row[rng.sample(range(2, length // 2), 2 * len(delimiters))] = torch.tensor(delimiters * 2)
        return rows

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
