"""LoopServe (Li et al. 2025, section 5): sparse attention for a new turn's prompt, progressive selection after it.

Algorithm 4, whose turns are those of `Conversation`:

1. Join the turn's prompt, after the previous answer, to everything before it (line 3).
2. In every layer, for every head, choose lines from a sample of the new queries (line 5: `LoopServe.lines`).
3. Compute the new queries' attention along these lines (line 6: `SparsePrompts.read`).
4. Decode; from step 16 on, select `budget` tokens for each head from the latest queries' attention (line 7:
   `Progressive`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.records import Budget, Natural, PositiveShare, Whole, check_fields
from sinkscope.kv.cache import CacheLayer
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.bands import BlockGrid, Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.head_lines import select_lines
from sinkscope.sparse.progressive import Progressive
from sinkscope.sparse.sparse_prompts import SparsePrompts

Variant = Literal["bands", "faithful"]
SHORTEST = {"cpu": 8192, "cuda": 131072}
"""Keys from which on prompts are read along bands, by device. On a CPU, prompts of SmolLM2 with 8,192 tokens took less
time along bands, and those of 4,096 more (figures/loopserve.md). On a GPU it follows a trend: on an H100, those of a 7B
shape with 32,768 and 65,536 tokens took 1.53 and 1.06 times as long, with more cells (`experiments.gpu.bands`)."""
LEAST_NEW = 8
"""New tokens for each sampled query from which on the choice pays."""
TOLERATED = 0.02
"""How much less than alpha a head's lines may hold for 16 queries outside the sample before it counts."""
MEASURED_EVERY = 8
"""In one of so many layers it is measured what lines hold for queries outside the sample."""
HELD_OUT = 16
"""Queries outside the sample on which that is measured."""
GPU_LAYER_BYTES = 1 << 30
"""Keys and values of a layer on a GPU below which a token takes longer if it reads a part of them: on an H100 1.26 and
1.07 times as long as with stock attention at 134 and 537 MB a layer, and 0.7 times at 1,082 MB
(`experiments.gpu.overhead`). Where it reads everything, it took 1.14 and 0.88 times as long at the first two."""


@dataclass(frozen=True, kw_only=True)
class LoopServeDecoding(Progressive):
    """The decoding half of LoopServe, under the name that the user wrote.

    Attributes:
        everywhere: Whether to select even where that takes longer.
    """

    everywhere: bool = False

    def pays(self, layer: CacheLayer) -> bool:
        """Return whether reading less can save more than the choice costs."""
        return self.everywhere or not layer.keys.is_cuda or layer.keys.nbytes + layer.values.nbytes >= GPU_LAYER_BYTES

    @property
    def shown_name(self) -> str:
        """Name in messages."""
        return "LoopServe"


@dataclass(frozen=True, kw_only=True)
class LoopServe(SparsePrompts):
    """Choose columns and bands of attention for every prompt and head, compute these, and decode from parts of a cache.

    A prompt is any call with several tokens. In a dialogue on one cache it consists of the new turn's tokens, which
    attend to the whole context along their own lines. With `alpha=1` and a budget that covers everything, the model's
    output does not change.

    The defaults were chosen by what real models lose (figures/loopserve.md has the table, of texts that chose nothing).
    `LoopServe.paper()` uses the paper's settings.

    Every prompt logs an event of kind "prefill" per row and layer. Its `data` has "keys", "queries" and either "dense"
    (the reason why the model's own attention read it) or "attended", the share of the causal cells from which outputs
    are computed, mean over heads, and "dense_heads", the number of heads that need so many cells that everything is
    computed. In one layer of eight it also has what was lost: "recovered", the share of the attention weight that each
    head's lines hold for 16 queries that were not sampled. If a quarter of these heads hold clearly less than alpha, a
    warning says so at the end. `mean_read` of `run.usage` is the counterpart of "attended" for decoding.

    Attributes:
        alpha: Share of the sampled attention weight that the columns and bands of each head hold (0.955 in the paper's
            main results, which finds 0.99 to 1 best in its own sweep).
        budget: Tokens that each layer and kv head reads while decoding, besides those since the last selection.
        interval: Tokens between selections, and number of queries that vote (n_d).
        sample: Number of queries, drawn at random, whose attention decides which columns and bands are chosen.
        checked: Number of other queries of each head that are checked for a single key which they seek: those that
            score the first tokens lowest. A key that holds half of the attention of one is kept.
        dense_rows: Number of queries at the end of the prompt that attend to everything in bands, with those of the
            same 64. They are not sampled. With 0, as in the paper, keys to which only the end of the prompt attends may
            be lost, for instance the facts that a question is about.
        first: Number of initial decoding steps that read everything; 0 selects as soon as the prompt has been read.
        prefill: Read prompts sparsely. With `decode=False` this is the paper's "-P".
        decode: Select tokens progressively while decoding. With `prefill=False` this is the paper's "-D".
        variant: "bands" (`select_bands`), or "faithful", algorithm 5 as printed (`select_lines`), which is computed
            under a mask and saves no time.
        shortest: Prompts that attend to fewer keys are read by the model's own attention; None: 8,192 on a CPU and
            131,072 on a GPU, because shorter ones that were measured took longer. So are turns of fewer new tokens than
            eight for each sampled query, and decoding on a GPU reads everything in layers whose keys and values take
            less than 1 GB. With 0, lines are chosen whatever that costs.
        dense_above: Share of the causal cells above which a head is computed densely; alpha was chosen with 55 %.
        seed: Seed for drawing queries. Draws also depend on the layer and on the lengths of prompt and context, so they
            differ between the turns of a conversation.
        begin: Number of first tokens that all queries see in bands; algorithm 5 begins with two empty sets.

    Raises:
        SinkscopeError: alpha is outside (0, 1], an interval or sample is below 1, or a policy setting is wrong.

    Example:
        >>> LoopServe(alpha=0.99, budget=512).interval
        16
    """

    budget: Budget = field(default=1024, kw_only=False)
    alpha: PositiveShare = 0.99
    interval: Natural = 16
    sample: Natural = 64
    checked: Whole = 64
    dense_rows: Whole = 16
    first: Whole = 16
    prefill: bool = True
    decode: bool = True
    variant: Variant = "bands"
    shortest: Whole | None = None
    dense_above: Annotated[float, Field(ge=0)] = 0.55
    seed: int = 0
    begin: Whole = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prefill and not self.decode:
            raise SinkscopeError("prefill=False, decode=False: nothing would be done; leave one of them on")
        _ = self.decoding

    @classmethod
    def paper(cls, budget: int | float = 1024, **changed: Any) -> LoopServe:
        """Make the paper's algorithm 5 with the paper's settings; values given here override them.

        Every head is computed along its lines, however many these are, under a mask. Of what algorithm 5 chooses, only
        the main diagonal is added, so that each query has a key.

        Args:
            budget: As for the plain constructor.
            changed: Other fields to set.

        Example:
            >>> LoopServe.paper(budget=512).variant
            'faithful'
        """
        printed: dict[str, Any] = {"alpha": 0.955, "sample": 48, "variant": "faithful", "shortest": 0}
        printed |= {"checked": 0, "begin": 0, "dense_rows": 0}
        return cls(budget, **(printed | changed))

    @property
    def decoding(self) -> Progressive:
        """The policy of the decoding half."""
        everywhere = self.shortest == 0
        return LoopServeDecoding(budget=self.budget, every=self.interval, after=self.first, everywhere=everywhere)

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget of the decoding half that is too small for the prompt."""
        if self.decode:
            self.decoding.check_prompt(tokens)

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts, and own the cache."""
        if self.prefill and self.alpha < 1:
            super().enter(run, key)
            run.stack.callback(self._warn, run)
        if self.decode:
            self.decoding.enter(run, key)

    def lines(self, scores: Scores, layer: int) -> Lines:
        """Return columns and bands that hold `alpha` of the sampled attention, or what algorithm 5 chooses."""
        seed = self.seed_of(scores, layer)
        if self.variant == "faithful":
            return select_lines(scores, self.alpha, sample=self.sample, seed=seed)
        return select_bands(
            scores,
            self.alpha,
            sample=self.sample,
            seed=seed,
            begin=self.begin,
            checked=self.checked,
            dense_rows=self.dense_rows,
            dense_above=self.dense_above,
        )

    def seed_of(self, scores: Scores, layer: int) -> int:
        """Return the seed of one prompt in one layer: draws differ by layer, and by turn of a conversation."""
        return random.Random(f"{self.seed} {layer} {scores.queries} {scores.keys}").getrandbits(62)

    def too_short(self, queries: int, keys: int, device: torch.device) -> str | None:
        """Why a prompt is too short for lines, or its new part; None if it is not."""
        shortest = SHORTEST.get(device.type, 0) if self.shortest is None else self.shortest
        if keys < shortest:
            return f"fewer than {shortest} keys"
        if shortest and queries < LEAST_NEW * self.sample:
            return f"{queries} new tokens are too few to pay for a choice of lines"
        return None

    def held_out(self, scores: Scores, layer: int) -> Int[Tensor, " row"]:
        """Queries that did not choose the lines, in one layer of `MEASURED_EVERY`."""
        if layer % MEASURED_EVERY:
            return torch.arange(0)
        seed = self.seed_of(scores, layer)
        queries = BlockGrid(scores.queries, scores.keys).sparse_queries(self.dense_rows)
        drawn = sample_queries(queries, self.sample + HELD_OUT, seed)  # the sample and those drawn after it
        return drawn[~torch.isin(drawn, sample_queries(queries, self.sample, seed))]

    def summary(self, run: Run) -> str:
        """Return the share of attention that prompts computed, and the tokens that a decoding step read."""
        steps = self.decoding.summary(run) if self.decode else ""
        return f"{super().summary(run)} {steps}".strip()

    def _warn(self, run: Run) -> None:
        """Warn if lines of a run's prompts hold less than they should for queries that did not choose them."""
        shares = [share for event in run.events for share in event.data.get("recovered", ())]
        below = sum(share < self.alpha - TOLERATED for share in shares)
        if below > len(shares) / 4:
            warn(
                f"in {below} of {len(shares)} heads that were measured, LoopServe's lines hold less than alpha="
                f"{self.alpha} of other queries' attention, the least {min(shares):.2f}: give a larger alpha"
            )
