"""Models read and changed by plain torch hooks: what tests hold the package against. Nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STANDS_OUT, SAME, READS = 3.0, 0.5, 0.3


# --- parts of a model ---


def part(block: nn.Module, *names: str) -> Any:
    """The first of these submodules (dotted) that a module has."""
    for name in names:
        try:
            return block.get_submodule(name)
        except AttributeError:
            continue
    raise AttributeError(names)


def blocks(model: nn.Module) -> nn.ModuleList:
    return part(model, "transformer.h", "gpt_neox.layers", "model.decoder.layers", "model.layers")


def down(block: nn.Module) -> nn.Module:
    shared = ("feed_forward.w2", "mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj")
    return part(block, "mlp.down_proj", "mlp.dense_4h_to_h", "mlp.c_proj", "mlp.fc2", "fc2", *shared)


def writer(block: nn.Module, kind: str) -> nn.Module:
    """The module whose output an MLP, attention or a mixer adds: a norm behind it, if there is one."""
    if hasattr(block, "pre_feedforward_layernorm"):
        return block.post_feedforward_layernorm if kind == "mlp" else block.post_attention_layernorm
    if kind == "mlp":
        return part(block, "mlp", "feed_forward")
    return part(block, "self_attn", "self_attention", "attn", "attention", "conv")


# --- what is read ---


@contextmanager
def reading(modules: Iterable[nn.Module], what: str) -> Iterator[list[Tensor]]:
    """The inputs or the outputs of modules during the block, in the order in which they run."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        if what == "input":
            output = args[0] if args else kwargs["hidden_states"]
        read = output[0] if isinstance(output, tuple) else output
        seen.append(read.detach().clone())  # some layers add to it in place

    with ExitStack() as stack:
        for module in modules:
            register = module.register_forward_pre_hook if what == "input" else module.register_forward_hook
            stack.callback(register(keep, with_kwargs=True).remove)
        yield seen


@torch.no_grad()
def residuals(model: Any, ids: Tensor) -> Tensor:
    """The residual stream after each layer: [layer, row, position, d_model]."""
    with reading(blocks(model), "output") as seen:
        model(ids.to(model.device), use_cache=False)
    return torch.stack(seen).cpu()


def norms(model: Any, ids: Tensor) -> Tensor:
    """L2 norm of the residual stream after each layer: [layer, row, position]."""
    return residuals(model, ids).norm(dim=-1)


@torch.no_grad()
def attention(model: Any, ids: Tensor) -> Tensor:
    """The model's own eager attention: [layer, row, head, query, key]."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = "eager"  # `set_attn_implementation` leaves some models, Falcon, as they are
    rows = model(ids, output_attentions=True, use_cache=False).attentions
    model.config._attn_implementation = usual
    return torch.stack(rows)


@torch.no_grad()
def losses(model: Any, ids: Tensor, **given: Any) -> Tensor:
    """The loss of each token but the first: [row, position]."""
    logits = model(ids, use_cache=False, **given).logits.float()
    return cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def written_norms(model: Any, ids: Tensor, layer: int) -> Tensor:
    """Norm of what each neuron of a layer adds, mean over all tokens; of models without a norm behind the MLP."""
    module = down(blocks(model)[layer])
    with reading([module], "input") as seen:
        model(ids, use_cache=False)
    return seen[0].abs().mean((0, 1)) * module.weight.norm(dim=0)


# --- what is edited ---


@contextmanager
def inputs_edited(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module read its input as it is after an edit."""
    handle = module.register_forward_pre_hook(lambda _module, args: (edit(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def outputs_edited(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module give its output, or the first of several, as it is after an edit."""

    def change(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    handle = module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def zeroed(model: Any, sites: Iterable[Sequence[int]], at: int | None = None) -> Iterator[None]:
    """Neurons give zero at one position, or everywhere; those of experts through their weights, the same thing."""
    with ExitStack() as stack:
        for layer, *expert, neuron in sites:
            block = blocks(model)[layer]
            if expert:
                weight = block.mlp.experts.down_proj.data[expert[0]]
                column = weight[neuron] if model.config.model_type == "gpt_oss" else weight[:, neuron]
                stack.callback(column.copy_, column.clone())
                column.zero_()
                continue

            def zero(post: Tensor, neuron: int = neuron) -> Tensor:
                post = post.clone()
                where = post if at is None else post[:, at]
                where[..., neuron] = 0
                return post

            stack.enter_context(inputs_edited(down(block), zero))
        yield


@contextmanager
def replaced(model: Any, ids: Tensor, name: str, ordinary: Tensor) -> Iterator[None]:
    """At the first position, the embedding, an attention layer, a mixer or an MLP writes its mean at ordinary ones."""
    kind, _, layer = name.partition(" ")
    module, what, edited = blocks(model)[0], "input", inputs_edited
    if kind != "embedding":
        module, what, edited = writer(blocks(model)[int(layer)], kind), "output", outputs_edited
    with reading([module], what) as seen, torch.no_grad():
        model(ids, use_cache=False)
    mean = seen[0].reshape(*ids.shape, -1)[ordinary].mean(0)

    def put(states: Tensor) -> Tensor:
        states = states.clone().reshape(*ids.shape, -1)
        states[:, 0] = mean
        return states

    with edited(module, put):
        yield


# --- spikes of the first token ---


@dataclass
class Pass:
    """One pass: states before and after each layer, what each MLP adds, attention, and loss."""

    states: Tensor  # [layer + 1, text, pos, d]
    mlp: Tensor  # [layer, text, pos, d]
    attention: Tensor  # [layer, text, head, query, key]
    loss: Tensor  # [text, pos - 1]


@torch.no_grad()
def run(model: Any, ids: Tensor) -> Pass:
    layers = blocks(model)
    mlps = [writer(block, "mlp") for block in layers]
    with (
        reading(layers[:1], "input") as before,
        reading(layers, "output") as after,
        reading(mlps, "output") as mlp,
    ):
        loss = losses(model, ids)
    added = torch.stack([one.reshape(*ids.shape, -1) for one in mlp])
    return Pass(torch.stack([*before, *after]).float(), added.float(), attention(model, ids).float(), loss)


def received(seen: Pass) -> Tensor:
    """Attention to position 0, mean over later queries: [layer, head, text]."""
    return seen.attention[:, :, :, 1:, 0].mean(-1).transpose(1, 2)


def ratios(states: Tensor) -> Tensor:
    """Norms over the typical one of each layer, without what massive dimensions hold everywhere."""
    later = states[:, :, 1:].flatten(1, 2)
    size = later.abs().median(1).values
    massive = size > 30 * size.median(1, keepdim=True).values
    away = (states - (later.median(1).values * massive)[:, None, None]).norm(dim=-1)
    return away / away[:, :, 1:].flatten(1).median(1).values[:, None, None]


@dataclass
class PlainSpike:
    """A spike of the first token: its layers, its direction, and the texts in which its size is read."""

    first: int
    last: int
    peak: int
    direction: Tensor
    seen: Pass

    @property
    def ordinary(self) -> Tensor:
        """Positions after the first at which nothing stands out: [text, pos]."""
        return ordinary_of(self.seen)

    @property
    def norm(self) -> float:
        return float(self.seen.states[self.peak + 1, :, 0].norm(dim=-1).mean())

    def along(self, seen: Pass) -> Tensor:
        """How far the first token of each text of a pass is from ordinary positions, along the direction."""
        mean = self.seen.states[self.peak + 1][self.ordinary].mean(0)
        return (seen.states[self.peak + 1, :, 0] - mean) @ self.direction


def ordinary_of(seen: Pass) -> Tensor:
    ordinary = ~(ratios(seen.states[1:]) > STANDS_OUT).any(0)
    ordinary[:, 0] = False
    return ordinary


def spikes(seen: Pass) -> list[PlainSpike]:
    """The spikes of the first token, those of the lowest layers first."""
    states = seen.states[1:]
    away = states[:, :, 0].mean(1) - states[:, ordinary_of(seen)].mean(1)
    size = away.norm(dim=-1)
    unit = away / size[:, None]
    free = {layer for layer, ratio in enumerate(ratios(states)[:, :, 0].mean(1)) if ratio > STANDS_OUT}
    found: list[PlainSpike] = []
    while free:
        first = last = peak = max(free, key=lambda layer: float(size[layer]))
        while last + 1 in free and unit[last + 1] @ unit[peak] >= SAME:
            last += 1
        while first - 1 in free and unit[first - 1] @ unit[peak] >= SAME:
            first -= 1
        found.append(PlainSpike(first, last, peak, unit[peak], seen))
        free -= {*range(first, last + 1)}
    return sorted(found, key=lambda one: one.first)


def mlp_shares(spike: PlainSpike) -> list[float]:
    """What each MLP adds along the direction, beyond its mean at ordinary positions."""
    along = spike.seen.mlp @ spike.direction
    added = along[:, :, 0].mean(1) - along[:, spike.ordinary].mean(1)
    return (added / spike.along(spike.seen).mean()).tolist()


def readers(seen: Pass, spike: PlainSpike, texts: int | None = None) -> int:
    """Heads of the layers behind a spike that read it, in the first texts or all."""
    given = received(seen)[spike.first + 1 : spike.last + 2, :, :texts]
    return int((given.mean(-1) > READS).sum())


@dataclass
class Left:
    left: float
    heads: int
    loss: float  # of tokens after the first position's own next token
    tokens: int


def left(model: Any, ids: Tensor, spike: PlainSpike, step: int = 1) -> Left:
    """What is left of a spike in the first of its texts under the edits that act now; of every so many tokens' loss."""
    edited, intact, texts = run(model, ids), spike.seen, len(ids)
    share = spike.along(edited).mean() / spike.along(intact)[:texts].mean()
    rise = (edited.loss - intact.loss[:texts])[:, max(1, step - 1) :: step]
    return Left(float(share), readers(edited, spike), float(rise.mean()), rise.numel())
