"""`trace`: run a model once and stream what is asked for; raw tensors are kept only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.target import Target
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.sites import Site, resolve

Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""


@runtime_checkable
class Observer(Protocol):
    """Sees tensors as they pass and keeps what it likes."""

    sites: Sequence[str]

    def observe(self, site: str, tensor: Tensor, first_row: int) -> None:
        """Called once per site and batch; `first_row` is the row of `tokens` that the first batch row is."""


REDUCERS: dict[str, Reducer] = {
    "raw": lambda t: t,
    "norm": lambda t: torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32),
    "mean": lambda t: t.float().mean(1),
    "last": lambda t: t[:, -1],
    "first": lambda t: t[:, 0],
}


def trace(
    model: object,
    tokens: Int[Tensor, "batch pos"],
    sites: Sequence[str],
    reduce: str | Reducer = "raw",
    *,
    observers: Sequence[Observer] = (),
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    batch_size: int | None = None,
) -> dict[str, Tensor]:
    """Run the model once and return each site's reduced tensor, on the CPU.

    Args:
        model: plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: ids `[batch pos]`.
        sites: names in TransformerLens' vocabulary, or patterns such as `"blocks.*.hook_resid_post"`;
            `attn.hook_pattern` is recomputed in query chunks while fast attention runs.
        reduce: "raw", "norm" (L2 over the last dimension), "mean" over positions, "first" or "last" position, or a
            function of one tensor. It runs inside the hook, so only its result is kept. Chunks of attention rows are
            reduced one by one and joined along the query dimension.
        observers: objects with `sites` and `observe(site, tensor, first_row)`.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        batch_size: rows per forward pass; None: all at once.

    Returns:
        Site name to tensor; the first dimension is the batch.

    The pass ends after the deepest site. The model is left as it was.
    """
    target = Target.of(model)
    reducer = REDUCERS.get(reduce) if isinstance(reduce, str) else reduce
    if reducer is None:
        raise SinkscopeError(f"reduce {reduce!r} is unknown; expected a function or one of {', '.join(REDUCERS)}")
    kept: dict[str, list[Tensor]] = {}
    wanted = resolve(target, list(sites))
    watched = [(observer, resolve(target, list(observer.sites))) for observer in observers]
    step = batch_size or len(tokens)
    for start in range(0, len(tokens), step):
        batch: dict[str, list[Tensor]] = {}

        def keep(name: str, tensor: Tensor, batch: dict[str, list[Tensor]] = batch) -> None:
            # A copy: Falcon adds into its MLP's output in place after the hook has seen it.
            batch.setdefault(name, []).append(reducer(tensor).detach().to("cpu", copy=True))

        takers: list[tuple[Site, Callable[[str, Tensor], None]]] = [(site, keep) for site in wanted]
        for observer, its_sites in watched:
            takers += [(site, _observing(observer, start)) for site in its_sites]
        mask = None if attention_mask is None else attention_mask[start : start + step].to(target.device)
        _run(target, tokens[start : start + step], mask, takers)
        if absent := [site.name for site in wanted if site.name not in batch]:
            raise UnsupportedError(
                f"site {absent[0]!r} was never reached on this {target.kind} model: a bridge replaces modules that "
                "fuse several projections; trace the plain Hugging Face model (backend='hf')"
            )
        for name, chunks in batch.items():
            kept.setdefault(name, []).append(chunks[0] if len(chunks) == 1 else torch.cat(chunks, 2))
    return {name: torch.cat(parts) for name, parts in kept.items()}


def _observing(observer: Observer, first_row: int) -> Callable[[str, Tensor], None]:
    return lambda name, tensor: observer.observe(name, tensor, first_row)


def _run(
    target: Target, ids: Tensor, mask: Tensor | None, takers: list[tuple[Site, Callable[[str, Tensor], None]]]
) -> None:
    shape = tuple(ids.shape)
    hooks = [(site.module, site.when, _hook(site, take, shape)) for site, take in takers if site.module is not None]
    rows: dict[int, list[tuple[str, Callable[[str, Tensor], None]]]] = {}
    for site, take in takers:
        if site.module is None and site.layer is not None:
            rows.setdefault(site.layer, []).append((site.name, take))
    deepest = max((site.layer if site.layer is not None else -1 for site, _ in takers), default=-1)
    if deepest >= 0:
        hooks.append((target.layers[deepest], "post", lambda *_: target.stop()))

    def show(layer: int, _first: int, chunk: Tensor) -> None:
        for name, take in rows[layer]:
            take(name, chunk)

    with ExitStack() as stack:
        if rows:
            stack.enter_context(attention_rows(target, show, layers=list(rows)))
        stack.enter_context(target.hooks(*hooks))
        target.forward(ids, mask)


def _hook(site: Site, take: Callable[[str, Tensor], None], shape: tuple[int, ...]) -> Any:
    def shaped(value: Any) -> Tensor:
        tensor = site.cut(value)
        return tensor if tensor.shape[:2] == shape else tensor.reshape(*shape, *tensor.shape[1:])

    def pre(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(site.name, shaped(args[0] if args else kwargs["hidden_states"]))

    def post(_module: object, _args: object, _kwargs: object, output: Any) -> None:
        take(site.name, shaped(output))

    return pre if site.when == "pre" else post
