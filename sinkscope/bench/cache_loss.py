"""Loss of every registered cache policy at several budgets, compared with full attention and with random slots."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Annotated, Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.bench.dialogues.run import AskedTurn, answer_along
from sinkscope.bench.dialogues.tables import Near
from sinkscope.bench.methods import Method, kind_of
from sinkscope.bench.runner import Batch, ask, check_can
from sinkscope.errors import SinkscopeError
from sinkscope.kv import policy as kv
from sinkscope.kv.policy import At, Policy
from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.measure.style import COLOURS, GREY, axes, finished, powers, shares
from sinkscope.models.text import text_rows

RANDOM = f"{__name__}:RandomSlots"


@dataclass(frozen=True, kw_only=True)
class RandomSlots(Policy):
    """Keeps random slots, chosen separately in every layer and head: the baseline that a policy has to beat."""

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score a position by its hash, so that a slot that was kept stays."""
        heads = torch.arange(at.kv.pos.shape[1], device=at.kv.pos.device)[:, None]
        return torch.sin(at.kv.pos.double() * 12.9898 + heads * 78.233 + at.layer * 37.719).mul(43758.5453).frac().abs()


@dataclass(frozen=True)
class PolicyLoss:
    """One policy at one budget, compared with full attention on the same text; means over tokens, then over texts.

    Attributes:
        policy: Name of the policy.
        budget: Share of the prompt that stays in the cache; 1.0 for a policy without a budget.
        kl: KL(full || policy) of the next token, in nats.
        kl_error: Standard error of `kl` over texts; None for a single text.
        top_1: Share of tokens for which both have the same top prediction.
        mass_lost: Share of full attention's mass that lies on positions that the policy cannot read.
        random_kl: `kl` of random slots at this budget, the control.
        random_top_1: `top_1` of random slots.
        random_lost: `mass_lost` of random slots.
    """

    policy: str
    budget: float
    kl: float
    kl_error: float | None
    top_1: float
    mass_lost: float
    random_kl: float | None = None
    random_top_1: float | None = None
    random_lost: float | None = None

    @property
    def margin(self) -> float | None:
        """Two standard errors of `kl`."""
        return None if self.kl_error is None else 2 * self.kl_error


@dataclass(frozen=True, kw_only=True)
class CacheLoss(Result):
    """What each cache policy loses.

    Attributes:
        texts: Number of texts.
        prompt_tokens: Length of each prompt.
        answer_tokens: Number of tokens after the prompt that are compared.
        losses: Results, largest budget first; at each budget the policy with the smallest divergence first.
        refused: Policies that could not be measured, with the reason.
    """

    percent = ("top_1", "mass_lost", "random_top_1", "random_lost")

    texts: int
    prompt_tokens: int
    answer_tokens: int
    losses: tuple[PolicyLoss, ...]
    refused: tuple[str, ...] = ()

    @property
    def best(self) -> tuple[PolicyLoss, ...]:
        """The policy with the smallest divergence at each budget, among those that act; smallest budget first."""
        acting = [loss for loss in self.losses if loss.random_kl is not None and loss.policy not in self.idle]
        found = {loss.budget: loss for loss in reversed(acting)}
        return tuple(found[budget] for budget in sorted(found))

    @property
    def idle(self) -> tuple[str, ...]:
        """Policies that removed nothing within these tokens because they start to act later."""
        lost = {name: sum(x.mass_lost + x.kl for x in self.losses if x.policy == name) for name in _names(self)}
        return tuple(name for name, all_of_it in lost.items() if all_of_it == 0)

    def conclusion(self) -> str:
        """The best policy at the smallest budget, compared with random slots."""
        if not self.best:
            return f"No policy could be measured: {'; '.join(self.refused) or 'none is registered'}."
        b = self.best[0]
        return (
            f"With {b.budget:.1%} of the prompt in the cache, {b.policy} stays nearest to full attention: it diverges "
            f"by {b.kl:.3g} nats a token and loses {b.mass_lost:.0%} of the attention mass; random slots diverge by "
            f"{b.random_kl:.3g} nats and lose {b.random_lost:.0%}."
        )

    def details(self) -> list[str]:
        """What was read, and which policies could not be measured."""
        read = f"{self.texts} texts; prompts of {self.prompt_tokens} tokens, and the {self.answer_tokens} that follow."
        idle = [f"{name} takes nothing away within the first {self.answer_tokens} tokens." for name in self.idle]
        return [read, *idle, *(f"Not measured: {reason}" for reason in self.refused)]


def _names(result: CacheLoss) -> list[str]:
    return list(dict.fromkeys(loss.policy for loss in result.losses))


def draw(result: CacheLoss) -> go.Figure:
    """Draw divergence against the budget: one line for each policy that acts, and random slots in grey."""
    fig, names = go.Figure(), [name for name in _names(result) if name not in result.idle]
    budgets = {loss.budget: loss.random_kl for loss in result.losses if loss.random_kl is not None}
    lines = {name: {o.budget: o.kl for o in result.losses if o.policy == name} for name in names}
    for i, (name, at) in enumerate([*lines.items(), ("random slots", budgets)]):
        colour = GREY if i == len(lines) else COLOURS[i % len(COLOURS)]
        fig.add_scatter(
            x=list(at), y=list(at.values()), name=html.escape(name), mode="lines+markers", line_color=colour
        )
    axes(fig, None, None, x=shares("share of the prompt in the cache"), y=powers("KL from full attention, nats"))
    return finished(fig, result, width=800, height=480)


@measurement(
    group="Dialogues",
    figure=draw,
    loading="whole",
    quick={"count": 2, "prompt": 96, "answer": 4, "budgets": [0.75, 0.7]},
    scan={
        "order": 80,
        "seconds": [5.4, 25.0],
        "quick": {"count": 2, "prompt": 512, "answer": 10},
        "numbers": {
            "nats lost by the best policy, low budget": [
                "best.0.kl",
                "best.0.random_kl",
                "best.0.margin",
            ],
            "mass lost by the best policy, low budget": ["best.0.mass_lost", "best.0.random_lost"],
            "nats lost by the best policy, high budget": [
                "best.-1.kl",
                "best.-1.random_kl",
                "best.-1.margin",
            ],
        },
        "facts": {"best cache policy at the low budget": "best.0.policy"},
    },
)
def cache_loss(
    setup: Setup,
    *,
    policies: Annotated[Sequence[str] | None, Option("--policy", metavar="NAME")] = None,
    budgets: Sequence[Annotated[float, Option(min=0.01, max=1)]] = (0.5, 0.25, 0.125),
    count: Positive = 4,
    prompt: Annotated[int, Option(min=32)] = 768,
    answer: Annotated[int, Option(min=2)] = 32,
) -> CacheLoss:
    """Measure the loss of each cache policy at several budgets: divergence, top-1 agreement, attention mass.

    Every policy reads the same pieces of the typical text and is then fed their actual continuation. The control keeps
    random slots at the same budget. A policy that rejects a budget is listed with the reason.

    Args:
        policies: Names, or package.module:Class. By default every registered policy.
        budgets: Share of the prompt that stays in the cache.
        count: Number of pieces of text.
        prompt: Tokens per prompt; fewer if the context or the text is shorter.
        answer: Number of tokens to compare after the prompt.

    Example:
        sinkscope cache-loss --policy h2o --policy snapkv --budget 0.25
    """
    for name in policies or ():
        kind_of(name)  # a requested policy must exist
    room = min(prompt, (setup.target.max_positions or prompt + answer) - answer)
    length = min(room + answer, len(setup.tokenizer(setup.text, add_special_tokens=False, verbose=False)["input_ids"]))
    ids = text_rows(setup.tokenizer, setup.text, count, length, setup.bos).tolist()
    setup.record(prompt=length - answer)
    to = ask(setup.target, setup.tokenizer, answer, 1.0)
    rows = [(AskedTurn(f"text-{i}", "end", 0, row[:-answer]), row[-answer:]) for i, row in enumerate(ids)]
    ready, refused = dict[Method, tuple[str, float]](), dict[str, None]()
    for name in (RANDOM, *(policies or (name for name in kv.policies() if name != "full"))):
        try:
            for method, budget in _methods(name, budgets):
                check_can(to, [method], [length - answer])
                ready[method] = name, budget
        except SinkscopeError as error:
            refused[f"{name}: {error}"] = None
    near = answer_along(to, Batch(to.fingerprint, tuple(ready), tuple(rows)))
    found = {key: _loss([one for one in near if one.method == m.spec], *key) for m, key in ready.items()}
    own = [_beside(one, found.get((RANDOM, one.budget))) for (name, _), one in found.items() if name != RANDOM]
    own.sort(key=lambda one: (-one.budget, one.kl))
    return CacheLoss(
        texts=len(ids),
        prompt_tokens=length - answer,
        answer_tokens=answer,
        losses=tuple(own),
        refused=tuple(refused),
    )


def _methods(name: str, budgets: Sequence[float]) -> Iterator[tuple[Method, float]]:
    """The policy at every budget; once where it has none."""
    if not kind_of(name).sized:
        yield Method(name), 1.0
        return
    yield from ((Method(name, (("budget", float(budget)),)), float(budget)) for budget in budgets)


def _loss(near: list[Near], name: str, budget: float) -> PolicyLoss:
    each = [fmean(one.kl) for one in near]
    error = stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    agree = fmean(fmean(one.agree) for one in near)
    return PolicyLoss(name, budget, fmean(each), error, agree, 1 - fmean(fmean(one.kept) for one in near))


def _beside(one: PolicyLoss, control: PolicyLoss | None) -> PolicyLoss:
    if control is None:
        return one
    more: dict[str, Any] = {"random_top_1": control.top_1, "random_lost": control.mass_lost}
    return replace(one, random_kl=control.kl, **more)
