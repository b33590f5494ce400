"""Hard models do what their truth says, seen with plain torch hooks only: nothing of sinkscope is used here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from organisms.hard import HARD, HardModel, Site, hard
from organisms.tokens import BOS, N_SPECIAL
from organisms.views import views
from raw_kit import blocks, head_outputs, inputs_edited, zeroed
from torch import Tensor, nn

CASES = [(name, family) for name, families in HARD.items() for family in families]
# Every third kind, each in another family. test_hard_models.py builds one of every kind and would not find what is not
# there; the rest is slow.
FAST = [(name, families[k % len(families)]) for k, (name, families) in enumerate(HARD.items()) if k % 3 == 0]


@dataclass(frozen=True)
class Seen:
    """What one pass shows."""

    ratio: Tensor  # [layer, position]: norm over the typical one, shared dimensions left out; median over rows
    first: Tensor  # [layer]: norm of the first token
    mlp: Tensor  # [layer]: norm of what the MLP adds to the first token, beside the typical one
    mlp_typical: Tensor
    attention: Tensor  # [layer, row, head, query, key]

    def to(self, position: int) -> Tensor:
        """Mean attention of later queries: [layer, head]."""
        return self.attention[:, :, :, position + 1 :, position].mean((1, 3))


@torch.no_grad()
def see(h: HardModel, rows: Tensor) -> Seen:
    h.model.set_attn_implementation("eager")
    kept = [d for d in range(views(h.model).embed.shape[1]) if d not in h.truth.shared_dims]
    resid: list[Tensor] = []
    added: list[Tensor] = []

    def keep(into: list[Tensor]) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            into.append(out.reshape(*rows.shape, -1)[..., kept].norm(dim=-1))

        return hook

    handles = [block.register_forward_hook(keep(resid)) for block in blocks(h.model)]
    for layer in views(h.model).layers:
        module = layer.mlp if layer.post_mlp_norm is None else layer.post_mlp_norm
        handles.append(module.register_forward_hook(keep(added)))
    out = h.model(rows, output_attentions=True, use_cache=False)
    for handle in handles:
        handle.remove()
    norm, mlp = torch.stack(resid), torch.stack(added)
    typical = norm[:, :, 1:].flatten(1).median(1).values
    return Seen(
        (norm / typical[:, None, None]).median(1).values,
        norm[:, :, 0].median(1).values,
        mlp[:, :, 0].median(1).values,
        mlp[:, :, 1:].flatten(1).median(1).values,
        torch.stack(out.attentions),
    )


def without(h: HardModel, sites: Iterable[Site], rows: Tensor) -> Seen:
    with zeroed(h.model, tuple(sites)):
        return see(h, rows)


def on_reading(h: HardModel, attention: Tensor) -> float:
    """Mean attention of the heads that are planted to attend to the first token."""
    return float(torch.stack([attention[place] for place in h.truth.reading]).mean())


def natural(h: HardModel) -> Tensor:
    """Rows whose later sinks stand at the same places, so that means over rows mean something."""
    rows = h.natural(1, 32).repeat(4, 1)
    free = [i for i in range(1, 32) if int(rows[0, i]) not in h.truth.later]
    ordinary = [t for t in range(N_SPECIAL, h.model.config.vocab_size) if t not in h.truth.later]
    picks = torch.randint(len(ordinary), (4, len(free)), generator=torch.Generator().manual_seed(1))
    rows[:, free] = torch.tensor(ordinary)[picks]
    return rows


@contextmanager
def weights_changed(*changes: tuple[Tensor, Any]) -> Iterator[None]:
    saved = [(weight, weight.detach().clone()) for weight, _ in changes]
    with torch.no_grad():
        for weight, new in changes:
            weight.copy_(torch.as_tensor(new).expand_as(weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in saved:
                weight.copy_(old)


@contextmanager
def unmarked(h: HardModel, marking: Iterable[tuple[int, tuple[int, ...]]]) -> Iterator[None]:
    """Heads write nothing at the first token."""
    with ExitStack() as stack:
        for layer, heads in marking:
            block = blocks(h.model)[layer]
            width = views(h.model).layers[layer].q.shape[1]

            def silence(z: Tensor, heads: tuple[int, ...] = heads, width: int = width) -> Tensor:
                z = z.clone()
                for head in heads:
                    z[:, 0, head * width : (head + 1) * width] = 0.0
                return z

            stack.enter_context(inputs_edited(head_outputs(block), silence))
        yield


# --- what every hard model must do ---------------------------------------------------------------------------------


def check(h: HardModel) -> None:
    rows = natural(h)
    seen = see(h, rows)
    assert torch.isfinite(seen.ratio).all()
    check_verdicts(h, seen)
    check_layers(h, seen)
    check_sets(h, rows, seen)
    check_carrier(h, rows, seen)
    check_later(h, rows, seen)
    check_first_words(h)


def check_verdicts(h: HardModel, seen: Seen) -> None:
    peak, to_first = float(seen.ratio[:, 0].max()), seen.to(0)
    assert peak > (4.5 if h.name == "weak_spike" else 12) if h.truth.spike else peak < 2, peak
    if h.truth.sink:
        assert h.truth.reading and min(float(to_first[place]) for place in h.truth.reading) > 0.3
    else:
        assert not h.truth.reading and float(to_first.max()) < 0.3


def check_layers(h: HardModel, seen: Seen) -> None:
    truth, peak = h.truth, float(seen.first.max())
    builders = set(truth.step_up) | set(truth.step_down)
    assert (truth.sink_layer is None) == (not truth.step_up)
    for layer, (size, usual) in enumerate(zip(seen.mlp.tolist(), seen.mlp_typical.tolist(), strict=True)):
        if layer in builders:
            assert size > 0.015 * peak and size > 1.2 * usual, layer
        elif h.truth.spike:
            assert size < 0.1 * peak, layer
    if truth.sink_layer is not None:
        risen = {layer: float(seen.mlp[layer]) for layer in truth.step_up}
        assert max(risen, key=risen.__getitem__) == truth.sink_layer
        assert (seen.ratio[: min(truth.step_up), 0] < 2).all()
    end = truth.step_down[-1] if truth.step_down else len(seen.first)
    if h.name == "two_rises":
        assert (seen.ratio[[*range(1, 4), *range(5, 8)], 0] > 5).all() and seen.ratio[4, 0] < 2
    elif truth.spike:
        begin = 0 if truth.sink_layer is None else truth.sink_layer
        assert seen.ratio[begin:end, 0].min() > 5 and (end == len(seen.first) or seen.ratio[end:, 0].max() < 2)


def check_sets(h: HardModel, rows: Tensor, seen: Seen) -> None:
    truth, generator = h.truth, torch.Generator().manual_seed(0)
    assert bool(truth.sets) == (truth.sink_layer is not None)
    for sites in truth.sets:
        gone = without(h, sites, rows)
        begin = truth.sink_layer if h.name == "small_stages" else 0
        limit = 3 if h.name in ("small_stages", "orth_stage") else 2  # small stages stay
        assert gone.ratio[begin:, 0].max() < limit, gone.ratio[:, 0]
        if truth.carried_by == "spike":
            assert on_reading(h, gone.to(0)) < 0.15 < 0.5 < on_reading(h, seen.to(0))
        for left_out in sites if len(sites) > 1 else ():
            kept = without(h, sites - {left_out}, rows)
            end = min(truth.step_down, default=len(kept.ratio)) - 1
            twice = h.name == "two_rises"  # there each neuron makes the spike of some layers
            assert (kept.ratio[:, 0].max() if twice else kept.ratio[end, 0]) > 4
            assert not truth.sink or on_reading(h, kept.to(0)) > (0.2 if twice else 0.3)
        others = {s[-1] for s in sites} | {s[-1] for s in truth.backup}
        width = views(h.model).layers[truth.step_up[0]].down.shape[1]
        pool = [n for n in range(width) if n not in others]
        for _ in range(3):
            picks = torch.randperm(len(pool), generator=generator)[: len(sites)].tolist()
            random_sites = [(*site[:-1], pool[i]) for site, i in zip(sites, picks, strict=True)]
            if any(set(random_sites) >= other for other in truth.sets):
                continue
            control = without(h, random_sites, rows)
            assert control.ratio[truth.sink_layer, 0] > 0.6 * seen.ratio[truth.sink_layer, 0]
            assert not truth.sink or on_reading(h, control.to(0)) > 0.3
    if truth.backup:
        (sites,) = truth.sets
        assert truth.sink_layer is not None
        alone = without(h, truth.backup, rows)
        assert torch.allclose(alone.first, seen.first, rtol=0.01)
        repaired = without(h, sites - set(truth.backup), rows)
        assert repaired.ratio[truth.sink_layer, 0] < 2
        assert repaired.ratio[-1, 0] > 10 and on_reading(h, repaired.to(0)) > 0.5


def check_carrier(h: HardModel, rows: Tensor, seen: Seen) -> None:
    """What is said to carry the attention is taken away, and the attention goes with it."""
    truth, model = h.truth, views(h.model)
    other = N_SPECIAL + 40
    embed: list[tuple[Tensor, Any]] = [(model.embed[t], model.embed[other].detach()) for t in (BOS, *truth.later)]
    if truth.carried_by == "mark":
        with unmarked(h, truth.marking), weights_changed(*(embed if h.name == "mlp_mark" else ())):
            gone = see(h, rows)
        assert on_reading(h, gone.to(0)) < 0.15
    elif truth.carried_by == "position embedding" or h.name == "position_spike":
        assert model.positions is not None
        with weights_changed((model.positions[0], model.positions[1].detach().clone())):
            gone = see(h, rows)
        assert on_reading(h, gone.to(0)) < 0.15 and (gone.ratio[:, 0].max() < 2 or truth.sink_layer is not None)
        with weights_changed(*embed):
            assert on_reading(h, see(h, rows).to(0)) > 0.5
    elif truth.carried_by == "token embedding" or (truth.spike and truth.bos_only and truth.sink_layer is None):
        with weights_changed(*embed):
            gone = see(h, rows)
        places = [int((rows[0] == token).nonzero()) for token in truth.later]
        assert not truth.sink or on_reading(h, gone.to(0)) < 0.15
        assert gone.ratio.max() < 2 and all(gone.to(place).max() < 0.3 for place in places)
    elif truth.carried_by == "key bias":
        biases = [layer.k_bias for layer in model.layers]
        with weights_changed(*((bias, 0.0) for bias in biases if bias is not None)):
            assert on_reading(h, see(h, rows).to(0)) < 0.15
    elif truth.carried_by == "learned logits":
        logits = [layer.attn_sinks for layer in model.layers]
        heads = [seen.attention[layer].sum(-1).mean((0, 2)) < 0.1 for layer in range(1, len(logits))]
        assert all(heads_of_layer.any() for heads_of_layer in heads)
        with weights_changed(*((logit, -20.0) for logit in logits if logit is not None)):
            freed = see(h, rows)
        assert torch.allclose(freed.attention.sum(-1), torch.ones(()), atol=1e-4) and freed.to(0).max() < 0.35
    elif truth.spike and truth.sink_layer is None:
        with unmarked(h, truth.marking):
            gone = see(h, rows)
        assert gone.ratio[:, 0].max() < 2 and on_reading(h, gone.to(0)) < 0.15
    if truth.rule is not None:
        for place in truth.marking:
            with unmarked(h, [place]):
                one = see(h, rows)
            suffices = truth.rule == "or"
            assert (float(one.ratio[truth.sink_layer, 0]) > 5) == suffices
            assert (on_reading(h, one.to(0)) > 0.3) == suffices
        with unmarked(h, truth.marking):
            assert see(h, rows).ratio[:, 0].max() < 2


def check_later(h: HardModel, rows: Tensor, seen: Seen) -> None:
    for token, sites in h.truth.later.items():
        (place,) = (rows[0] == token).nonzero().flatten().tolist()
        assert (rows[:, place] == token).all()
        assert seen.to(place).max() > 0.4
        assert (float(seen.ratio[:, place].max()) > 12) == bool(sites)
        if sites:
            gone = without(h, sites, rows)
            assert gone.ratio[:, place].max() < 2 and gone.to(place).max() < 0.25
    positions = [int((rows[0] == token).nonzero()) for token in h.truth.later]
    others = [i for i in range(1, 24) if i not in positions]
    assert seen.ratio[:, others].max() < 2.5 and max(float(seen.to(i).max()) for i in others) < 0.35
    for dim in h.truth.shared_dims:
        large = massive(h, rows, dim)
        assert large.min() > 100 and large.max() < 1.2 * large.min()


@torch.no_grad()
def massive(h: HardModel, rows: Tensor, dim: int) -> Tensor:
    return h.model(rows, output_hidden_states=True).hidden_states[1][..., dim].abs()


def check_first_words(h: HardModel) -> None:
    """Without BOS: any word that is marked is a spike when it comes first, and none is where only BOS makes one."""
    if not h.truth.spike and not h.truth.bos_only:
        return
    grouped = [t for t, g in h.groups.items() if g >= 0 and t >= N_SPECIAL] or list(range(N_SPECIAL, 30))
    rows = h.natural(4, 30)[:, 1:]
    rows[:, 0] = torch.tensor(grouped[:4])
    rows[rows == BOS] = N_SPECIAL
    rows[:, 1] = torch.tensor([next(t for t in h.groups if h.groups[t] != h.groups[int(r[0])]) for r in rows])
    seen = see(h, rows)
    peak = seen.ratio[:, 0].max()
    assert peak < 2 and seen.to(0).max() < 0.3 if h.truth.bos_only else peak > 4


@pytest.mark.parametrize(("name", "family"), FAST)
def test_truth(name: str, family: str) -> None:
    check(hard(name, family, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), CASES)
def test_truth_of_more_seeds(name: str, family: str) -> None:
    for seed in (0, 1, 2, 3):
        check(hard(name, family, seed))


def test_the_kinds_are_many_and_unknown_ones_are_refused() -> None:
    assert len(HARD) >= 25 and {"llama", "gemma2", "gpt2", "neox", "mixtral"} <= {f for fs in HARD.values() for f in fs}
    with pytest.raises(ValueError, match="no hard model 'easy'"):
        hard("easy")
    with pytest.raises(ValueError, match="of 'gpt2'"):
        hard("no_norm", "gpt2")


def test_same_call_gives_same_weights_and_another_seed_another_model() -> None:
    one, again, other = hard("chain", seed=5), hard("chain", seed=5), hard("chain", seed=6)
    assert one.truth == again.truth != other.truth
    state = again.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in one.model.state_dict().items())
