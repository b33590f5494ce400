"""Progressive selection while decoding: steps read a part of the cache, which is chosen again every few tokens.

LoopServe (Li et al. 2025), section 5.2 and algorithm 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from jaxtyping import Float
from torch import Tensor

from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.files.records import Natural, Whole
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import register_policy
from sinkscope.kv.watch import keep_queries
from sinkscope.models.layers import in_groups


@register_policy("progressive")
@dataclass(frozen=True, kw_only=True)
class Progressive(Policy):
    """Read only the part of the cache that the latest queries attend to; choose it again every `every` tokens.

    The selected keys and values are copied once per selection, so that the steps in between read and extend only the
    copy. `run.usage` counts the tokens of the whole cache, and the bytes of both. The cache is restored at the next
    turn and when the run ends.

    Attributes:
        every: Tokens between selections, and number of queries that vote in each (n_d).
        after: Decoding steps before the first selection. With 16, these steps read everything, as in the paper's
            text. With 0, the last queries of the prompt select as soon as it has been read.

    Raises:
        SinkscopeError: The interval is below 1, `after` is negative, or a setting of the base policy is invalid.
        UnsupportedError: Beam search reorders rows.

    Example:
        >>> Progressive(budget=1024).every
        16
    """

    every: Natural = 16
    after: Whole = 16

    def summary(self, run: Run) -> str:
        """Return the tokens that a decoding step read, and those held in the cache; "" if there was no step."""
        read = [number for usage in run.usage for number in usage.mean_read]
        held = [number for usage in run.usage for number in usage.mean_held]
        if not read:
            return ""
        name = self.shown_name
        return f"A decoding step under {name} read {fmean(read):,.0f} of {fmean(held):,.0f} tokens on average."

    def watch(self, run: Run) -> None:
        """Keep the latest queries, also those of generated tokens."""
        keep_queries(run, self.every, decoding=True)

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Return the attention of the latest queries; padding does not vote."""
        votes = at.window_rows(self.every).sum(2)
        return in_groups(votes, at.kv.pos.shape[1]).mean(2)

    def pays(self, layer: CacheLayer) -> bool:
        """Return whether to select from a layer that holds more than the budget."""
        return True

    def act(self, step: Step) -> None:
        """Choose what is read of every layer, if it is time to.

        Hiding the other slots would save no time: every step would still copy all keys to append one, and read them all
        in order to mask most. With a copy, the cost of a step grows with the length of the copy; only restoring the
        whole layer costs time in proportion to its full length.
        """
        steps = step.state.decoded - self.after
        if steps < 0 or steps % self.every:
            return
        rows = self.kept_per_row(step)
        for kv in step.layers:
            kv.settle()
            if kv.slots <= min(rows.total) or not self.pays(kv):
                continue
            untouched = kv.copy()
            kv.evict(self.chosen(LayerMoment(kv, step, rows)))
            kv.whole_layer = untouched
