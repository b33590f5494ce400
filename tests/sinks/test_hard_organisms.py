"""Hard models do what their truth says, seen with plain torch hooks only: nothing of sinkscope is used here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange, reduce
from organisms.hard import HARD, HardModel, Marking, Site, hard
from organisms.tokens import BOS, N_SPECIAL
from organisms.views import views
from raw_kit import blocks, head_outputs, inputs_edited, zeroed
from torch import Tensor, nn

CASES = [(name, family) for name, families in HARD.items() for family in families]
# Every fourth kind, each in another family. test_hard_models.py builds one of every kind and would not find what is not
# there; the rest is slow.
FAST = [(name, families[k % len(families)]) for k, (name, families) in enumerate(HARD.items()) if k % 4 == 0]


@dataclass(frozen=True)
class Pass:
    """What one pass shows.

    Attributes:
        ratio: Norm over the typical one, shared dimensions left out; `[layer position]`, median over rows.
        attention: Mean attention of later queries, `[layer head position]`.
        to_tokens: Mean share of a query's attention that goes to tokens, `[layer head]`.
    """

    ratio: Tensor
    attention: Tensor
    to_tokens: Tensor

    @property
    def peak(self) -> float:
        """The first token's largest ratio."""
        return float(self.ratio[:, 0].max())

    def on_reading(self, h: HardModel) -> float:
        """Mean attention to the first token of the heads that are planted to attend to it."""
        return float(torch.stack([self.attention[layer, head, 0] for layer, head in h.truth.reading]).mean())


@torch.no_grad()
def run(h: HardModel, rows: Tensor) -> Pass:
    h.model.set_attn_implementation("eager")
    kept = [dim for dim in range(views(h.model).embed.shape[1]) if dim not in h.truth.shared_dims]
    norms: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        resid = output[0] if isinstance(output, tuple) else output
        norms.append(resid.reshape(*rows.shape, -1)[..., kept].norm(dim=-1))

    handles = [block.register_forward_hook(keep) for block in blocks(h.model)]
    output = h.model(rows, output_attentions=True, use_cache=False)
    for handle in handles:
        handle.remove()
    norm = torch.stack(norms)
    typical = rearrange(norm[:, :, 1:], "layer row pos -> layer (row pos)").median(1).values
    attention = torch.stack(output.attentions)
    to_tokens = reduce(attention.sum(-1), "layer row head query -> layer head", "mean")
    later = reduce(attention.tril(-1), "layer row head query key -> layer head key", "sum")
    queries = len(rows) * torch.arange(rows.shape[1] - 1, -1, -1).clamp(min=1)
    return Pass((norm / typical[:, None, None]).median(1).values, later / queries, to_tokens)


def without(h: HardModel, sites: Iterable[Site], rows: Tensor) -> Pass:
    with zeroed(h.model, tuple(sites)):
        return run(h, rows)


def natural(h: HardModel) -> Tensor:
    """Rows whose later sinks stand at the same places, so that means over rows mean something."""
    rows = h.natural(1, 32).repeat(4, 1)
    free = [i for i in range(1, 32) if int(rows[0, i]) not in h.truth.later]
    ordinary = [token for token in range(N_SPECIAL, h.model.config.vocab_size) if token not in h.truth.later]
    picks = torch.randint(len(ordinary), (4, len(free)), generator=torch.Generator().manual_seed(1))
    rows[:, free] = torch.tensor(ordinary)[picks]
    return rows


@contextmanager
def weights_changed(*changes: tuple[Tensor | None, Any]) -> Iterator[None]:
    saved = [(weight, weight.detach().clone()) for weight, _ in changes if weight is not None]
    with torch.no_grad():
        for weight, new in changes:
            if weight is not None:
                weight.copy_(torch.as_tensor(new).expand_as(weight))
        try:
            yield
        finally:
            for weight, old in saved:
                weight.copy_(old)


@contextmanager
def unmarked(h: HardModel, marking: Marking) -> Iterator[None]:
    """Heads write nothing at the first token."""

    def silence(heads: tuple[int, ...], width: int) -> Callable[[Tensor], Tensor]:
        def edit(z: Tensor) -> Tensor:
            z = z.clone()
            for head in heads:
                z[:, 0, head * width : (head + 1) * width] = 0.0
            return z

        return edit

    with ExitStack() as stack:
        for layer, heads in marking:
            width = views(h.model).layers[layer].q.shape[1]
            stack.enter_context(inputs_edited(head_outputs(blocks(h.model)[layer]), silence(heads, width)))
        yield


def check(h: HardModel) -> None:
    rows = natural(h)
    intact = run(h, rows)
    check_verdicts(h, intact)
    check_sets(h, rows, intact)
    check_carrier(h, rows)
    check_later(h, rows, intact)


def check_verdicts(h: HardModel, intact: Pass) -> None:
    truth = h.truth
    assert torch.isfinite(intact.ratio).all()
    least = 4.5 if h.name == "weak_spike" else 12
    assert intact.peak > least if truth.spike else intact.peak < 2
    if truth.sink:
        assert min(float(intact.attention[layer, head, 0]) for layer, head in truth.reading) > 0.3
    else:
        assert not truth.reading and float(intact.attention[..., 0].max()) < 0.3
    if truth.sink_layer is not None:
        assert (intact.ratio[: min(truth.step_up), 0] < 2).all()
    if truth.step_down and h.name != "two_rises":
        assert intact.ratio[truth.step_down[-1] :, 0].max() < 2


def check_sets(h: HardModel, rows: Tensor, intact: Pass) -> None:
    """Without a set there is neither spike nor sink; with any one of its neurons left, both stay."""
    truth = h.truth
    for sites in truth.sets:
        gone = without(h, sites, rows)
        begin = truth.sink_layer if h.name == "small_stages" else 0
        limit = 3 if h.name == "small_stages" else 2  # small stages stay
        assert gone.ratio[begin:, 0].max() < limit
        if truth.carried_by == "spike":
            assert gone.on_reading(h) < 0.15 < 0.5 < intact.on_reading(h)
        for left_out in sites if len(sites) > 1 else ():
            kept = without(h, sites - {left_out}, rows)
            assert kept.peak > 4 and (not truth.sink or kept.on_reading(h) > 0.2)
    if truth.backup:
        (sites,) = truth.sets
        assert without(h, truth.backup, rows).peak == pytest.approx(intact.peak, rel=0.01)
        repaired = without(h, sites - {*truth.backup}, rows)
        assert repaired.ratio[truth.sink_layer, 0] < 2 and repaired.ratio[-1, 0] > 10


def check_carrier(h: HardModel, rows: Tensor) -> None:
    """What is said to carry the attention is taken away, and the attention goes with it."""
    truth, model = h.truth, views(h.model)
    other = model.embed[N_SPECIAL + 40].detach().clone()
    embedding = [(model.embed[token], other) for token in (BOS, *truth.later)]
    if truth.carried_by == "mark" or (truth.spike and truth.sink_layer is None and truth.marking):
        changes = embedding if h.name == "mlp_mark" else []
        with unmarked(h, truth.marking), weights_changed(*changes):
            assert run(h, rows).on_reading(h) < 0.15
    elif truth.carried_by == "position embedding":
        assert model.positions is not None
        with weights_changed((model.positions[0], model.positions[1].detach().clone())):
            assert run(h, rows).on_reading(h) < 0.15
    elif truth.carried_by == "token embedding" or (truth.bos_only and truth.sink_layer is None):
        with weights_changed(*embedding):
            gone = run(h, rows)
        assert gone.ratio.max() < 2 and (not truth.sink or gone.on_reading(h) < 0.15)
    elif truth.carried_by == "key bias":
        with weights_changed(*((layer.k_bias, 0.0) for layer in model.layers)):
            assert run(h, rows).on_reading(h) < 0.15
    elif truth.carried_by == "learned logits":
        assert (run(h, rows).to_tokens[1:].min(1).values < 0.1).all()
        with weights_changed(*((layer.attn_sinks, -20.0) for layer in model.layers)):
            freed = run(h, rows)
        assert torch.allclose(freed.to_tokens, torch.ones(()), atol=1e-4) and freed.attention[..., 0].max() < 0.35
    for place in truth.marking if truth.rule is not None else ():
        with unmarked(h, (place,)):
            one = run(h, rows)
        assert (float(one.ratio[truth.sink_layer, 0]) > 5) == (truth.rule == "or")


def check_later(h: HardModel, rows: Tensor, intact: Pass) -> None:
    for token, sites in h.truth.later.items():
        (place,) = (rows[0] == token).nonzero().flatten().tolist()
        assert intact.attention[..., place].max() > 0.4
        assert (float(intact.ratio[:, place].max()) > 12) == bool(sites)
        if sites:
            gone = without(h, sites, rows)
            assert gone.ratio[:, place].max() < 2 and gone.attention[..., place].max() < 0.25
    ordinary = [i for i in range(1, 24) if int(rows[0, i]) not in h.truth.later]
    assert intact.ratio[:, ordinary].max() < 2.5 and intact.attention[..., ordinary].max() < 0.35


@pytest.mark.parametrize(("name", "family"), FAST)
def test_truth(name: str, family: str) -> None:
    check(hard(name, family, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_truth_of_more_seeds(name: str, family: str) -> None:
    for seed in range(4):
        check(hard(name, family, seed))
