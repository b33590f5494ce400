"""A policy with a budget of its own in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.kv.policy import Policy
from sinkscope.kv.usage import held_summary


@dataclass(frozen=True)
class PerLayer(Intervention):
    """Let a policy keep another number of tokens in every layer.

    Attributes:
        policy: The policy; its own budget is not used.
        budgets: Budget of each decoder layer, from the first on: a number of tokens, or a fraction of the prompt.

    Raises:
        SinkscopeError: A budget is smaller than what is always kept, or there are other numbers of budgets and layers.

    Example:
        >>> from sinkscope.kv import SnapKV
        >>> PerLayer(SnapKV(), [512, 256]).of_layer(1).budget
        256
    """

    policy: Policy
    budgets: Sequence[Budget]

    def __post_init__(self) -> None:
        check_fields(self)
        for layer in range(len(self.budgets)):
            self.of_layer(layer)

    def of_layer(self, layer: int) -> Policy:
        """Return the policy with the budget of a layer."""
        return replace(self.policy, budget=self.budgets[layer])

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that is smaller than the tokens that are always kept."""
        for layer in range(len(self.budgets)):
            self.of_layer(layer).check_prompt(tokens)

    def summary(self, run: Run) -> str:
        """Return how many tokens the run's caches held, out of how many were read."""
        return held_summary(f"PerLayer({self.policy.shown_name})", run)

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache; in each layer the policy acts with the budget of that layer."""
        if len(self.budgets) != run.target.n_layers:
            raise SinkscopeError(
                f"PerLayer: budgets has {len(self.budgets)} numbers, and {run.target.name} has {run.target.n_layers} "
                "layers: give one for each"
            )
        keeper = CacheKeeper.of(run, self.policy.shown_name, self.policy.first)
        keeper.watch_decoding()
        replace(self.policy, budget=1.0).watch(run)  # what any budget of a layer may need
        policies = [self.of_layer(layer) for layer in range(len(self.budgets))]
        run.act(_ActorPerLayer(policies, keeper))


@dataclass(frozen=True, eq=False)
class _ActorPerLayer(Actor):
    """Lets a policy act in each layer."""

    policies: list[Policy]
    keeper: CacheKeeper

    def before(self, step: Step) -> None:
        """Choose what each layer keeps."""
        if step.decodes:
            for kv in step.layers:
                self.policies[kv.number].act(replace(step, layers=[kv]), self.keeper)
