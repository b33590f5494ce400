"""`trace`: run a model once and stream what is requested; raw tensors are kept only if requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Natural
from sinkscope.hooks.trace.sites import Pattern, Site, resolve
from sinkscope.models.hooks import Hook, on_input, on_output
from sinkscope.models.inputs import Ids, read_inputs
from sinkscope.models.norms import norms_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.results.options import checks_arguments
from sinkscope.tap.observers import attention_rows

Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""
Mask = Bool[Tensor, "batch pos"]
_Reader = tuple[Site, Callable[[Tensor], None]]
"""A site, and the function that is called with its tensor."""


@runtime_checkable
class Observer(Protocol):
    """Sees tensors as they pass and keeps whatever it needs."""

    sites: Sequence[str]

    def observe(self, site: str, tensor: Tensor, first_row: int) -> None:
        """Called once per site and batch; `first_row` is the row of `tokens` at which the batch starts."""


def _mean(tensor: Tensor, real: Mask) -> Tensor:
    weights = real.view(*real.shape, *[1] * (tensor.ndim - 2))
    return torch.where(weights, tensor.float(), 0).sum(1) / weights.sum(1)


def _first(tensor: Tensor, real: Mask) -> Tensor:
    return tensor[torch.arange(len(tensor)), real.int().argmax(1)]


def _last(tensor: Tensor, real: Mask) -> Tensor:
    return tensor[torch.arange(len(tensor)), real.shape[1] - 1 - real.int().flip(1).argmax(1)]


REDUCERS: dict[str, Callable[[Tensor, Mask], Tensor]] = {
    "raw": lambda tensor, _real: tensor,
    "norm": lambda tensor, _real: norms_of(tensor),
    "mean": _mean,
    "last": _last,
    "first": _first,
}
"""By name: called with the tensor, and with which of its positions hold tokens."""


class Trace(dict[str, Tensor]):
    """What `trace` returns: the tensor of each site, by its name, in the order of the forward pass."""

    def __repr__(self) -> str:
        lines: list[str] = []
        for name, tensor in self.items():
            lines.append(f"  {name}: {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return "\n".join([f"Trace of {len(self)} sites", *lines])


class _Kept:
    """The observer that reduces and keeps what passes sites, by their names and the first row of each batch.

    Args:
        reduce: As `trace` takes it.
        mask: Which positions of all rows hold tokens; None: all.
    """

    sites: Sequence[str] = ()

    def __init__(self, reduce: str | Reducer, mask: Ids | None) -> None:
        self.batches: dict[str, dict[int, list[Tensor]]] = {}
        self._reduce, self._mask = reduce, mask

    def observe(self, site: str, tensor: Tensor, first_row: int) -> None:
        """Reduce and keep a tensor."""
        real = torch.ones(tensor.shape[:2], dtype=torch.bool)
        if self._mask is not None and not site.endswith("hook_pattern"):  # the second dimension there is that of heads
            real = self._mask[first_row : first_row + len(tensor)].bool()
        if isinstance(self._reduce, str):
            reduced = REDUCERS[self._reduce](tensor, real.to(tensor.device))
        else:
            reduced = self._reduce(tensor)
        # A copy: Falcon adds into its MLP's output in place after the hook has seen it.
        chunks = self.batches.setdefault(site, {}).setdefault(first_row, [])
        chunks.append(reduced.detach().to("cpu", copy=True))

    def joined(self, site: str) -> Tensor:
        """What was kept of a site. Rows of attention come in chunks of queries; every other site has one chunk."""
        chunks = self.batches[site].values()
        return torch.cat([own[0] if len(own) == 1 else torch.cat(own, 2) for own in chunks])


@checks_arguments()
def trace(
    model: object,
    tokens: Any = None,
    sites: Pattern | Sequence[Pattern] = (),
    reduce: str | Reducer = "raw",
    *,
    observers: Sequence[Observer] = (),
    attention_mask: Any = None,
    batch_size: Natural | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
    **inputs: Any,
) -> Trace:
    """Run the model once, up to the deepest site, and return each site's reduced tensor on the CPU, by its name.

    Args:
        model: Plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: Ids `[batch pos]`, also as lists; one or several texts; or a tokenizer's output. Rows are padded.
        sites: TransformerLens names, patterns such as `"blocks.*.hook_resid_post"`, or a function of a name,
            `lambda name: name.endswith("hook_z")`. `site_names(n_layers)` lists all: `hook_embed`; in each layer
            `blocks.L.` with `hook_resid_pre`, `hook_attn_out`, `hook_resid_mid`, `hook_mlp_out`, `hook_resid_post`,
            `mlp.hook_pre`, `mlp.hook_pre_linear`, `mlp.hook_post`, `attn.hook_q`, `attn.hook_k`, `attn.hook_v`,
            `attn.hook_z` and `attn.hook_pattern`; `ln_final`, the input of the unembedding, and `logits`, its output.
        reduce: "raw", "norm" (L2 over the last dimension), "mean" over positions, "first" or "last" position, or a
            function of one tensor, which receives padding with the rest. Only the result is kept. Chunks of attention
            rows are reduced one by one and joined along the query dimension; at other sites padding is ignored.
        observers: Objects with `sites` and `observe(site, tensor, first_row)`.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        batch_size: Rows per forward pass. None runs all at once.
        tokenizer: Tokenizer for texts, if the model carries none.
        bos: Whether texts begin with BOS. By default the tokenizer decides.
        inputs: `input_ids` instead of tokens, as in `trace(model, sites=[...], **tokenizer(texts))`.

    Raises:
        SinkscopeError: Tokens are invalid for this model, or a site or reduction is unknown.
        UnsupportedError: This architecture has no such site.
    """
    target = target_of(model, tokenizer)
    if not sites and not observers:
        raise SinkscopeError('no site is given: expected names such as sites=["blocks.*.hook_resid_post"]')
    if isinstance(reduce, str) and reduce not in REDUCERS:
        raise SinkscopeError(f"reduce {reduce!r} is unknown; expected a function or one of {', '.join(REDUCERS)}")
    rows = read_inputs(target, tokens, {**inputs, "attention_mask": attention_mask}, bos=bos)
    wanted = resolve(target, sites)
    kept = _Kept(reduce, rows.mask)
    watched: list[tuple[Observer, list[Site]]] = [(kept, wanted)]
    watched += [(observer, resolve(target, observer.sites)) for observer in observers]
    step = batch_size or len(rows.ids)
    for start in range(0, len(rows.ids), step):
        part = slice(start, start + step)
        readers: list[_Reader] = []
        for observer, its_sites in watched:
            readers += [(site, partial(observer.observe, site.name, first_row=start)) for site in its_sites]
        _run(target, rows.ids[part], None if rows.mask is None else rows.mask[part].to(target.device), readers)
    found = Trace()
    for site in wanted:
        if site.name not in kept.batches:
            raise _not_reached(target, site.name)
        found[site.name] = kept.joined(site.name)
    return found


def _not_reached(target: Target, name: str) -> UnsupportedError:
    reason = "its module did not run in this pass; leave it out of sites"
    if target.kind == "bridge":
        reason = (
            "a bridge replaces modules that fuse several projections; trace the plain Hugging Face model (backend='hf')"
        )
    return UnsupportedError(f"site {name!r} was never reached on this {target.kind} model: {reason}")


def _run(target: Target, ids: Int[Tensor, "batch pos"], mask: Tensor | None, readers: list[_Reader]) -> None:
    hooks: list[Hook] = []
    layers = [-1]
    with ExitStack() as stack:
        for site, take in readers:
            if site.layer is not None:
                layers.append(site.layer)
            if site.module is not None:
                hooks.append((site.module, site.when, _hook(site, take, ids.shape)))
            else:
                stack.enter_context(attention_rows(target, partial(_show, take), layers=layers[-1:]))
        upto = None
        if 0 <= max(layers) < target.n_layers:
            upto = max(layers)
        unembed = any(module is target.hf for module, _, _ in hooks)
        stack.enter_context(target.hooks(*hooks))
        target.forward(ids, mask, unembed=unembed, upto=upto)


def _show(take: Callable[[Tensor], None], _layer: int, _first: int, rows: Tensor) -> None:
    take(rows)


def _hook(site: Site, take: Callable[[Tensor], None], shape: torch.Size) -> Any:
    def read(value: Any) -> None:
        take(site.shown(value, shape))

    if site.when == "pre":
        return on_input(read)
    return on_output(read)
