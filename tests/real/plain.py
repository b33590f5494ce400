"""What real models do, read with plain torch hooks: nothing of sinkscope is imported here.

For models in the form of Llama and Gemma 3 in transformers: `model.model.layers`, `self_attn`, `mlp.down_proj`, and a
norm behind the MLP where the layer has `post_feedforward_layernorm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Site = tuple[int, int]
"""A neuron: its layer and its column of the down projection."""


def layers(model: Any) -> nn.ModuleList:
    return model.model.layers


def ids_of(tokenizer: Any, text: str, n_tokens: int, *, bos: bool) -> Tensor:
    """The first `n_tokens` ids of a text, with or without BOS in front: [1, n_tokens]."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if bos:
        ids = [tokenizer.bos_token_id, *ids]
    assert len(ids) >= n_tokens, f"the text has {len(ids)} tokens, and not {n_tokens}"
    return torch.tensor([ids[:n_tokens]])


# ---- what is read


@contextmanager
def reading(modules: Iterable[nn.Module], what: str) -> Iterator[list[Tensor]]:
    """The inputs or the outputs of modules during the block, in the order in which they run."""
    seen: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].detach())

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).detach())

    with ExitStack() as stack:
        for module in modules:
            if what == "input":
                handle = module.register_forward_pre_hook(before)
            else:
                handle = module.register_forward_hook(after)
            stack.callback(handle.remove)
        yield seen


@torch.no_grad()
def residuals(model: Any, ids: Tensor) -> Tensor:
    """The residual stream after each layer: [layer, row, position, d_model]."""
    with reading(layers(model), "output") as seen:
        model(ids, use_cache=False)
    return torch.stack(seen)


def norms(model: Any, ids: Tensor) -> Tensor:
    """L2 norm of the residual stream after each layer: [layer, row, position]."""
    return residuals(model, ids).norm(dim=-1)


@torch.no_grad()
def activations(model: Any, ids: Tensor, layer: int) -> Tensor:
    """What the neurons of a layer hold, which is the input of its down projection: [row, position, neuron]."""
    with reading([layers(model)[layer].mlp.down_proj], "input") as seen:
        model(ids, use_cache=False)
    return seen[0]


@torch.no_grad()
def contributions(model: Any, ids: Tensor, layer: int, position: int = 0, *, behind_norm: bool = True) -> Tensor:
    """Norm of what each neuron of a layer adds to the residual stream at a position, averaged over rows: [neuron].

    A norm behind the MLP (Gemma) divides the sum of all neurons by one number and multiplies each dimension by its
    weight, so it acts on each neuron alone as well. `behind_norm=False` leaves it out.
    """
    block = layers(model)[layer]
    post = activations(model, ids, layer)[:, position]
    written = post[:, :, None] * block.mlp.down_proj.weight.T[None]
    norm = getattr(block, "post_feedforward_layernorm", None)
    if norm is not None and behind_norm:
        size = written.sum(1).square().mean(-1).add(norm.eps).sqrt()
        written = written / size[:, None, None] * (1 + norm.weight)
    return written.norm(dim=-1).mean(0)


@torch.no_grad()
def attentions(model: Any, ids: Tensor) -> list[Tensor]:
    """The attention probabilities of each layer: [row, head, query, key]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return list(model(ids, output_attentions=True, use_cache=False).attentions)
    finally:
        model.set_attn_implementation(before)


def attention_received(model: Any, ids: Tensor, position: int = 0) -> Tensor:
    """Mean attention that each head gives a position, over all later queries and all rows: [layer, head].

    Where a window hides the position, only queries that see it count.
    """
    received: list[Tensor] = []
    for layer, probs in zip(layers(model), attentions(model, ids), strict=True):
        window = getattr(layer.self_attn, "sliding_window", None) or probs.shape[-1]
        received.append(probs[:, :, position + 1 : position + window, position].mean((0, 2)))
    return torch.stack(received)


@torch.no_grad()
def log_probs(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of the next token: [row, position, vocabulary]."""
    return model(ids, use_cache=False).logits.float().log_softmax(-1)


def nll(model: Any, ids: Tensor) -> Tensor:
    """Negative log-probability of each token but the first, in nats: [row, position]."""
    return -log_probs(model, ids)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


def perplexity(model: Any, ids: Tensor) -> float:
    """Exponential of the mean `nll`."""
    return nll(model, ids).mean().exp().item()


def divergence(intact: Tensor, other: Tensor) -> Tensor:
    """KL(intact || other) of log-probabilities, in nats: [row, position]."""
    return (intact.exp() * (intact - other)).sum(-1)


# ---- what is edited


@contextmanager
def zeroed(model: Any, sites: Iterable[Site]) -> Iterator[None]:
    """Set neurons to zero at every position."""
    of_layer: dict[int, list[int]] = {}
    for layer, neuron in sites:
        of_layer.setdefault(layer, []).append(neuron)

    def zeroing(neurons: list[int]) -> Callable[..., Any]:
        def edit(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            post = args[0].clone()
            post[..., neurons] = 0
            return (post, *args[1:])

        return edit

    with ExitStack() as stack:
        for layer, neurons in of_layer.items():
            handle = layers(model)[layer].mlp.down_proj.register_forward_pre_hook(zeroing(neurons))
            stack.callback(handle.remove)
        yield


@contextmanager
def mlp_replaced(model: Any, layer: int, mean: Tensor, position: int = 0) -> Iterator[None]:
    """Let the MLP of a layer (with the norm behind it) write `mean` at a position: [d_model]."""
    block = layers(model)[layer]

    def edit(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, position] = mean
        return output

    handle = getattr(block, "post_feedforward_layernorm", block.mlp).register_forward_hook(edit)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def mlp_mean(model: Any, ids: Tensor, layer: int) -> Tensor:
    """What the MLP of a layer (with the norm behind it) writes at later positions, on average: [d_model]."""
    block = layers(model)[layer]
    with reading([getattr(block, "post_feedforward_layernorm", block.mlp)], "output") as seen:
        model(ids, use_cache=False)
    return seen[0][:, 1:].mean((0, 1))
