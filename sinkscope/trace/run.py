"""`trace`: run a model once and stream what is requested; raw tensors are kept only if requested."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import Adapter
from sinkscope.models.inputs import read_inputs
from sinkscope.models.target import Target, first_tensor, on_input, on_output
from sinkscope.trace.attention import attention_rows


@dataclass(frozen=True)
class Site:
    """One place in the model: `cut` maps the module's input or output to `[batch pos ...]`.

    After the last layer, `layer` is the number of layers.
    """

    name: str
    layer: int | None
    module: nn.Module | None  # None: attention rows, which no module returns
    when: str = "post"
    cut: Callable[[Any], Tensor] = first_tensor


@dataclass(frozen=True)
class _Place:
    """Where a site of a layer is: an adapter path, and which part of its input or output."""

    path: Callable[[Adapter], str | None]
    when: str = "post"
    cut: Callable[[Target, Tensor], Tensor] = lambda _, tensor: tensor


def _half(which: int) -> Callable[[Target, Tensor], Tensor]:
    """Gate or up, if one projection computes both."""
    return lambda target, tensor: tensor.chunk(2, -1)[which] if target.adapter.fused_gate_up else tensor


_PLACES = {
    "hook_resid_pre": _Place(lambda a: "", "pre"),
    "hook_attn_out": _Place(lambda a: a.post_attn_norm or a.attn),
    "hook_resid_mid": _Place(lambda a: a.mid, "pre"),
    "hook_mlp_out": _Place(lambda a: a.post_mlp_norm or a.mlp),
    "hook_resid_post": _Place(lambda a: ""),
    "mlp.hook_pre": _Place(lambda a: a.up if a.fused_gate_up else a.gate or a.up, cut=_half(0)),
    "mlp.hook_pre_linear": _Place(lambda a: a.up if a.fused_gate_up or a.gate else None, cut=_half(1)),
    "mlp.hook_post": _Place(lambda a: a.down, "pre"),
    "attn.hook_q": _Place(lambda a: a.q or a.fused_qkv, cut=lambda target, tensor: _projected(target, "q", tensor)),
    "attn.hook_k": _Place(lambda a: a.k or a.fused_qkv, cut=lambda target, tensor: _projected(target, "k", tensor)),
    "attn.hook_v": _Place(lambda a: a.v or a.fused_qkv, cut=lambda target, tensor: _projected(target, "v", tensor)),
    "attn.hook_z": _Place(lambda a: a.o, "pre", lambda target, tensor: tensor.unflatten(-1, (target.n_heads, -1))),
    "attn.hook_pattern": _Place(lambda a: ""),
}
_LAST = ("ln_final", "logits")  # what the unembedding reads, and what it gives


def site_names(n_layers: int) -> list[str]:
    """All site names that `trace` accepts, for a model of `n_layers` layers, in the order of the forward pass."""
    return ["hook_embed", *(f"blocks.{i}.{name}" for i in range(n_layers) for name in _PLACES), *_LAST]


def resolve(target: Target, patterns: list[str]) -> list[Site]:
    """Sites matched by names or `fnmatch` patterns ("blocks.*.hook_resid_post"), in the order of the forward pass.

    Raises:
        SinkscopeError: A pattern matches nothing; the message shows names that exist.
        UnsupportedError: This architecture has no such site.
    """
    known = site_names(target.n_layers)
    chosen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(known, pattern)
        if not matched:
            shown = ", ".join(["hook_embed", *(f"blocks.L.{name}" for name in _PLACES), *_LAST])
            raise SinkscopeError(
                f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; there are {shown}"
            )
        chosen.update(matched)
    return [_site(target, name) for name in known if name in chosen]


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, None, target.embedding)
    if name == "ln_final":
        return Site(name, target.n_layers, target.base, cut=lambda out: out[0])
    if name == "logits":
        if not target.resident:
            raise UnsupportedError(
                f"site 'logits': {target.name} is read layer by layer, without its unembedding; load it whole with "
                "sinkscope.load(...)"
            )
        return Site(name, target.n_layers, target.hf, cut=lambda out: out.logits)
    _, number, part = name.split(".", 2)
    layer, place, a = int(number), _PLACES[part], target.adapter
    if part == "attn.hook_pattern":
        return Site(name, layer, None)
    if part.startswith("mlp.") and target.is_mixture(layer):
        raise UnsupportedError(
            f"site {name!r} is per expert on {a.model_type}: layer {layer} is a mixture of experts; "
            "use find_sinks for its neurons, or hook_mlp_out"
        )
    if a.model_type == "falcon" and part in ("attn.hook_q", "attn.hook_k", "attn.hook_v"):
        raise UnsupportedError(f"site {name!r} is not offered on falcon, whose layout of q, k, v has three variants")
    path = place.path(a)
    if path is None or (part == "hook_resid_mid" and getattr(target.config, "use_parallel_residual", False)):
        raise UnsupportedError(
            f"site {name!r} does not exist on {a.model_type}: that architecture has no separate place for it; "
            "leave it out of sites"
        )
    return Site(name, layer, target.sub(layer, path), place.when, lambda out: place.cut(target, first_tensor(out)))


def _projected(target: Target, which: str, tensor: Tensor) -> Tensor:
    """q, k or v before rotary, `[batch pos head d_head]`, from the output of its own or a shared projection."""
    a, index = target.adapter, "qkv".index(which)
    counts = [target.n_heads, target.n_kv_heads, target.n_kv_heads]
    if getattr(a, which) is not None:
        return tensor.unflatten(-1, (counts[index], -1))
    if a.model_type == "gpt_neox":  # q, k, v of one head lie side by side
        return tensor.unflatten(-1, (target.n_heads, 3, -1))[..., index, :]
    return tensor.split([count * target.head_width for count in counts], -1)[index].unflatten(-1, (counts[index], -1))


Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""


@runtime_checkable
class Observer(Protocol):
    """Sees tensors as they pass and keeps whatever it needs."""

    sites: Sequence[str]

    def observe(self, site: str, tensor: Tensor, first_row: int) -> None:
        """Called once per site and batch; `first_row` is the row of `tokens` at which the batch starts."""


REDUCERS: dict[str, Reducer] = {
    "raw": lambda t: t,
    "norm": lambda t: torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32),
    "mean": lambda t: t.float().mean(1),
    "last": lambda t: t[:, -1],
    "first": lambda t: t[:, 0],
}


def _of_real(reduce: str | Reducer, mask: Int[Tensor, "batch pos"] | None) -> Reducer | None:
    """The reducer over positions if some are padding; None for reducers that padding does not affect."""
    if mask is None or not isinstance(reduce, str):
        return None
    real, rows = mask.bool(), torch.arange(len(mask))

    def mean(t: Tensor) -> Tensor:
        shape = (*real.shape, *[1] * (t.ndim - 2))
        kept = torch.where(real.view(shape).to(t.device), t.float(), 0).sum(1)
        return kept / real.sum(1).view(-1, *shape[2:]).to(t.device)

    at = {"first": real.int().argmax(1), "last": real.shape[1] - 1 - real.int().flip(1).argmax(1)}
    if reduce in at:
        return lambda t: t[rows.to(t.device), at[reduce].to(t.device)]
    return mean if reduce == "mean" else None


def trace(
    model: object,
    tokens: Any = None,
    sites: Sequence[str] = (),
    reduce: str | Reducer = "raw",
    *,
    observers: Sequence[Observer] = (),
    attention_mask: Any = None,
    batch_size: int | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
    **inputs: Any,
) -> dict[str, Tensor]:
    """Run the model once and return each site's reduced tensor, on the CPU.

    Args:
        model: Plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: Ids `[batch pos]`, also as a list or lists; one or several texts; or a tokenizer's output. Rows of
            different lengths are padded on the right.
        sites: TransformerLens names, or patterns such as `"blocks.*.hook_resid_post"`;
            `attn.hook_pattern` is recomputed in query chunks while fast attention runs. `ln_final` is the
            input of the unembedding, `logits` its output.
        reduce: "raw", "norm" (L2 over the last dimension), "mean" over positions, "first" or "last" position, or a
            function of one tensor. It runs inside the hook, so only its result is kept. Chunks of attention rows are
            reduced one by one and joined along the query dimension. At other sites "mean", "first" and "last"
            ignore padding; a function receives it with the rest.
        observers: Objects with `sites` and `observe(site, tensor, first_row)`.
        attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`.
        batch_size: Rows per forward pass. None runs all at once.
        tokenizer: Tokenizer for texts, if the model carries none.
        bos: Whether texts begin with BOS. By default the tokenizer decides.
        inputs: `input_ids` instead of tokens, as in `trace(model, sites=[...], **tokenizer(texts))`.

    Returns:
        A mapping from site name to tensor; the first dimension is the batch.

    The pass ends after the deepest site. The model is left unchanged.

    Raises:
        SinkscopeError: Tokens are invalid for this model, or a site or reduction is unknown.
        UnsupportedError: This architecture has no such site.
    """
    target = Target.of(model, tokenizer)
    sites = [sites] if isinstance(sites, str) else sites
    if not sites and not observers:
        raise SinkscopeError('no site is given: expected names such as sites=["blocks.*.hook_resid_post"]')
    reducer = REDUCERS.get(reduce) if isinstance(reduce, str) else reduce
    if reducer is None:
        raise SinkscopeError(f"reduce {reduce!r} is unknown; expected a function or one of {', '.join(REDUCERS)}")
    read = read_inputs(target, tokens, {**inputs, "attention_mask": attention_mask}, bos=bos)
    ids, masks = read.ids, read.mask
    kept: dict[str, list[Tensor]] = {}
    wanted = resolve(target, list(sites))
    watched = [(observer, resolve(target, list(observer.sites))) for observer in observers]
    step = batch_size or len(ids)
    for start in range(0, len(ids), step):
        batch: dict[str, list[Tensor]] = {}
        mask = None if masks is None else masks[start : start + step]
        real = _of_real(reduce, mask)

        def keep(
            name: str, tensor: Tensor, batch: dict[str, list[Tensor]] = batch, real: Reducer | None = real
        ) -> None:
            by = reducer if real is None or name.endswith("hook_pattern") else real
            # A copy: Falcon adds into its MLP's output in place after the hook has seen it.
            batch.setdefault(name, []).append(by(tensor).detach().to("cpu", copy=True))

        takers: list[tuple[Site, Callable[[str, Tensor], None]]] = [(site, keep) for site in wanted]
        for observer, its_sites in watched:
            takers += [(site, lambda n, x, o=observer, row=start: o.observe(n, x, row)) for site in its_sites]
        _run(target, ids[start : start + step], None if mask is None else mask.to(target.device), takers)
        for site in wanted:
            chunks = batch.get(site.name) or _never_reached(site, target)
            kept.setdefault(site.name, []).append(chunks[0] if len(chunks) == 1 else torch.cat(chunks, 2))
    return {name: torch.cat(parts) for name, parts in kept.items()}


def _never_reached(site: Site, target: Target) -> NoReturn:
    raise UnsupportedError(
        f"site {site.name!r} was never reached on this {target.kind} model: a bridge replaces modules that fuse "
        "several projections; trace the plain Hugging Face model (backend='hf')"
    )


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
    upto = deepest if 0 <= deepest < target.n_layers else None

    def show(layer: int, _first: int, chunk: Tensor) -> None:
        for name, take in rows[layer]:
            take(name, chunk)

    with attention_rows(target, show, layers=list(rows)) if rows else nullcontext(), target.hooks(*hooks):
        target.forward(ids, mask, unembed=any(site.module is target.hf for site, _ in takers), upto=upto)


def _hook(site: Site, take: Callable[[str, Tensor], None], shape: tuple[int, ...]) -> Any:
    def see(value: Any) -> None:
        tensor = site.cut(value)
        take(site.name, tensor if tensor.shape[:2] == shape else tensor.reshape(*shape, *tensor.shape[1:]))

    return on_input(see) if site.when == "pre" else on_output(see)
