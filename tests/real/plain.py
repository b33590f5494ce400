"""What real models do, read with plain torch hooks: nothing of sinkscope is imported here.

For models in the form of Llama and Gemma 3 in transformers: `self_attn`, `mlp.down_proj`, and a norm behind the MLP
where the layer has `post_feedforward_layernorm`; residual streams also of other families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Site = tuple[int, int]
"""A neuron: its layer and its column of the down projection."""


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


def ids_of(tokenizer: Any, text: str, n_tokens: int, *, bos: bool) -> Tensor:
    """The first `n_tokens` ids of a text, with or without BOS in front: [1, n_tokens]."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if bos:
        ids = [tokenizer.bos_token_id, *ids]
    assert len(ids) >= n_tokens, f"the text has {len(ids)} tokens, and not {n_tokens}"
    return torch.tensor([ids[:n_tokens]])


# ---- what is read


def first(value: Any) -> Tensor:
    """What a module gives, or the first of several."""
    return value[0] if isinstance(value, tuple) else value


@contextmanager
def reading(modules: Iterable[nn.Module], what: str) -> Iterator[list[Tensor]]:
    """The inputs or the outputs of modules during the block, in the order in which they run."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        read = (args[0] if args else kwargs["hidden_states"]) if what == "input" else first(output)
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
def activations(model: Any, ids: Tensor, layer: int) -> Tensor:
    """What the neurons of a layer hold, which is the input of its down projection: [row, position, neuron]."""
    with reading([blocks(model)[layer].mlp.down_proj], "input") as seen:
        model.model(ids, use_cache=False)
    return seen[0]


@torch.no_grad()
def contributions(model: Any, ids: Tensor, layer: int, position: int = 0) -> Tensor:
    """Norm of what each neuron of a layer adds to the residual stream at a position, averaged over rows: [neuron].

    A norm behind the MLP (Gemma) divides the sum of all neurons by one number and multiplies each dimension by its
    weight, so it acts on each neuron alone as well.
    """
    block = blocks(model)[layer]
    post = activations(model, ids, layer)[:, position]
    written = post[:, :, None] * block.mlp.down_proj.weight.T[None]
    norm = getattr(block, "post_feedforward_layernorm", None)
    if norm is not None:
        size = written.sum(1).square().mean(-1).add(norm.eps).sqrt()
        written = written / size[:, None, None] * (1 + norm.weight)
    return written.norm(dim=-1).mean(0)


@torch.no_grad()
def attentions(model: Any, ids: Tensor) -> Tensor:
    """The model's own eager attention: [layer, row, head, query, key]."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = "eager"  # `set_attn_implementation` leaves some models, Falcon, as they are
    rows = model(ids, output_attentions=True, use_cache=False).attentions
    model.config._attn_implementation = usual
    return torch.stack(rows)


def attention_received(model: Any, ids: Tensor, position: int = 0) -> Tensor:
    """Mean attention that each head gives a position, over all later queries and all rows: [layer, head].

    Where a window hides the position, only queries that see it count.
    """
    received: list[Tensor] = []
    for layer, probs in zip(blocks(model), attentions(model, ids), strict=True):
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


# ---- what is edited


@contextmanager
def inputs_edited(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module read its input as it is after an edit."""
    handle = module.register_forward_pre_hook(lambda _module, args: (edit(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def zeroed(model: Any, sites: Iterable[Site]) -> AbstractContextManager[None]:
    """Set neurons to zero at every position."""
    return held(model, dict.fromkeys(sites, 0.0), first=0)


@contextmanager
def listing_1(model: Any, sites: Iterable[Site]) -> Iterator[None]:
    """Let the linear factor of neurons hold its value at the second token from there on (Yona et al., Listing 1)."""
    with ExitStack() as stack:
        for layer, neuron in sites:

            def hold(_module: nn.Module, _args: Any, output: Tensor, neuron: int = neuron) -> Tensor:
                output = output.clone()
                output[:, 1:, neuron] = output[:, 1:2, neuron]
                return output

            stack.callback(blocks(model)[layer].mlp.up_proj.register_forward_hook(hold).remove)
        yield


@contextmanager
def held(model: Any, sites: dict[Site, float], first: int = 1) -> Iterator[None]:
    """Let neurons hold a value each at every position from `first` on."""
    with ExitStack() as stack:
        for (layer, neuron), value in sites.items():

            def hold(post: Tensor, neuron: int = neuron, value: float = value) -> Tensor:
                post = post.clone()
                post[:, first:, neuron] = value
                return post

            stack.enter_context(inputs_edited(blocks(model)[layer].mlp.down_proj, hold))
        yield


def heads_replaced(model: Any, layer: int, heads: Iterable[int], means: Tensor) -> AbstractContextManager[None]:
    """Let heads of a layer write their mean at every position, before the output projection: [heads * d_head]."""
    chosen = torch.zeros(model.config.num_attention_heads, dtype=torch.bool)
    chosen[list(heads)] = True
    columns = chosen.repeat_interleave(means.numel() // len(chosen))
    return inputs_edited(blocks(model)[layer].self_attn.o_proj, lambda z: torch.where(columns, means, z))


@torch.no_grad()
def heads_mean(model: Any, ids: Tensor, layer: int) -> Tensor:
    """What the heads of a layer write at later positions, on average, before the output projection."""
    with reading([blocks(model)[layer].self_attn.o_proj], "input") as seen:
        model.model(ids, use_cache=False)
    return seen[0][:, 1:].mean((0, 1))


# ---- lines, and loops


def heaviest_lines(probs: Tensor, eta: float, length: int | None = None) -> set[int]:
    """The `eta * 2 * length` heaviest lines of attention [query, key]: key k is line k, distance d line -1 - d.

    A vertical line is one key, a slash line one distance between query and key. Queries are the last ones.
    """
    queries, keys = probs.shape
    slash = torch.zeros(keys)
    for number in range(queries):
        last = keys - queries + number  # the query's position, if keys begin at 0 and the queries end with them
        slash[: last + 1] += probs[number, : last + 1].flip(0)
    weights = torch.cat([probs.sum(0), slash])
    most = max(1, int(eta * 2 * (length or keys) + 1e-9))
    chosen = weights.argsort(descending=True, stable=True)[:most].tolist()
    return {line if line < keys else keys - 1 - line for line in chosen if weights[line] > 0}


def lines_mass(probs: Tensor, eta: float) -> tuple[float, float]:
    """Share of a head's attention [query, key], and of its cells, on its heaviest lines."""
    length = len(probs)
    distances = torch.arange(length)[:, None] - torch.arange(length)
    on_lines = torch.zeros_like(probs, dtype=torch.bool)
    for line in heaviest_lines(probs, eta):
        if line >= 0:
            on_lines[line:, line] = True
        else:
            on_lines |= distances == -1 - line
    return float(probs[on_lines].sum() / probs.sum()), float(on_lines[distances >= 0].float().mean())


def covered_at_end(ids: list[int], copies: int = 3) -> int:
    """How many of the last ids are copies of at least three, of the smallest period; 0 if there are none."""
    for period in range(1, len(ids) // copies + 1):
        covered = period
        while covered < len(ids) and ids[-covered - 1] == ids[-covered - 1 + period]:
            covered += 1
        if covered >= copies * period:
            return covered
    return 0


@torch.no_grad()
def greedy(model: Any, ids: Tensor, n_new: int) -> list[int]:
    """The likeliest next tokens, one after another, by whole passes without a cache; it does not end at EOS."""
    for _ in range(n_new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -n_new:].tolist()
