"""`trace`: run a model once and stream what is requested; raw tensors are kept only if requested."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import Adapter
from sinkscope.models.heads import projected
from sinkscope.models.inputs import read_inputs
from sinkscope.models.target import Target, first_tensor, norms_of, on_input, on_output
from sinkscope.models.wrapped import target_of
from sinkscope.trace.attention import attention_rows

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Site:
    """One place in the model: `cut` maps the module's input or output to `[batch pos ...]`.

    After the last layer, `layer` is the number of layers. Where a layer adds what the module gives, it multiplies it by
    `factor`, and `cut` does so, too.
    """

    name: str
    layer: int | None
    module: nn.Module | None  # None: attention rows, which no module returns
    when: str = "post"
    cut: Callable[[Any], Tensor] = first_tensor
    factor: float = 1.0


def _half(number: int, target: Target, tensor: Tensor) -> Tensor:
    """Gate (0) or up (1) of a module that may return both."""
    if target.adapter.fused_gate_up:
        return tensor.chunk(2, -1)[number]
    return tensor


def _heads(target: Target, tensor: Float[Tensor, "*n width"]) -> Float[Tensor, "*n head d_head"]:
    return rearrange(tensor, "... (head d_head) -> ... head d_head", head=target.n_heads)


@dataclass(frozen=True)
class _Place:
    """Where a site of a layer is: an adapter path, and which part of its input or output."""

    path: Callable[[Adapter], str | None]
    when: str = "post"
    cut: Callable[[Target, Tensor], Tensor] = lambda _target, tensor: tensor
    factor: Callable[[Adapter], float] = lambda _adapter: 1.0


_PLACES = {
    "hook_resid_pre": _Place(lambda a: "", "pre"),
    "hook_attn_out": _Place(lambda a: a.behind_attn, factor=lambda a: a.attn_factor),
    "hook_resid_mid": _Place(lambda a: a.mid, "pre"),
    "hook_mlp_out": _Place(lambda a: a.behind_mlp, factor=lambda a: a.write_factor),
    "hook_resid_post": _Place(lambda a: ""),
    "mlp.hook_pre": _Place(lambda a: a.up if a.fused_gate_up else a.gate or a.up, cut=partial(_half, 0)),
    "mlp.hook_pre_linear": _Place(lambda a: a.up if a.fused_gate_up or a.gate else None, cut=partial(_half, 1)),
    "mlp.hook_post": _Place(lambda a: a.down, "pre"),
    "attn.hook_q": _Place(lambda a: a.q or a.fused_qkv, cut=partial(projected, "q")),
    "attn.hook_k": _Place(lambda a: a.k or a.fused_qkv, cut=partial(projected, "k")),
    "attn.hook_v": _Place(lambda a: a.v or a.fused_qkv, cut=partial(projected, "v")),
    "attn.hook_z": _Place(lambda a: a.o, "pre", _heads),
    "attn.hook_pattern": _Place(lambda a: ""),
}
_PROVED = {
    "hook_attn_out",
    "hook_resid_mid",
    "hook_mlp_out",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
}
"""Places that are proved by sums and products when a model is loaded, or first used."""
_LAST = ("ln_final", "logits")  # what the unembedding reads, and what it gives


def site_names(n_layers: int) -> list[str]:
    """All site names that `trace` accepts, for a model of `n_layers` layers, in the order of the forward pass."""
    names = ["hook_embed"]
    for layer in range(n_layers):
        names += [f"blocks.{layer}.{place}" for place in _PLACES]
    return [*names, *_LAST]


Pattern = str | Callable[[str], bool]
"""Which sites are meant: a name, an `fnmatch` pattern of names, or a function that is true for their names."""


def resolve(target: Target, patterns: Pattern | Sequence[Pattern]) -> list[Site]:
    """Sites that are meant by one or several patterns, in the order of the forward pass.

    Raises:
        SinkscopeError: A pattern matches nothing; the message shows names that exist.
        UnsupportedError: This architecture has no such site.
    """
    names = site_names(target.n_layers)
    if isinstance(patterns, str) or callable(patterns):
        patterns = [patterns]
    chosen: set[str] = set()
    for pattern in patterns:
        if isinstance(pattern, str):
            matches = fnmatch.filter(names, pattern)
        else:
            matches = list(filter(pattern, names))
        if not matches:
            raise _no_such_site(pattern, target)
        chosen.update(matches)
    return [_site(target, name) for name in names if name in chosen]


def _no_such_site(pattern: Pattern, target: Target) -> SinkscopeError:
    kinds = ", ".join(["hook_embed", *(f"blocks.L.{place}" for place in _PLACES), *_LAST])
    return SinkscopeError(f"site {pattern!r} matches nothing in a model of {target.n_layers} layers; there are {kinds}")


def _site(target: Target, name: str) -> Site:
    if name == "hook_embed":
        return Site(name, None, target.embedding)
    if name == "ln_final":
        return Site(name, target.n_layers, target.base, cut=lambda output: output[0])
    if name == "logits":
        if not target.resident:
            raise UnsupportedError(
                f"site 'logits': {target.name} is read layer by layer, without its unembedding; load it whole with "
                "sinkscope.load(...)"
            )
        return Site(name, target.n_layers, target.hf, cut=lambda output: output.logits)
    _, number, part = name.split(".", 2)
    layer = int(number)
    if part.startswith("attn.") and not target.has_attention(layer):
        attending = [str(other) for other in range(target.n_layers) if target.has_attention(other)]
        raise UnsupportedError(
            f"site {name!r} is not offered: layer {layer} of {target.name} has no softmax attention; it is in layers "
            f"{', '.join(attending)}"
        )
    if part == "attn.hook_pattern":
        return Site(name, layer, None)
    place = _PLACES[part]
    module = target.sub(layer, _path(target, layer, part))
    factor = place.factor(target.adapter)

    def cut(value: Any) -> Tensor:
        part = place.cut(target, first_tensor(value))
        if factor == 1:
            return part
        return part * factor

    return Site(name, layer, module, place.when, cut, factor)


def _path(target: Target, layer: int, part: str) -> str:
    """Path of a site's module below its layer."""
    adapter = target.adapter
    path = _PLACES[part].path(adapter)
    is_projection = part in ("attn.hook_q", "attn.hook_k", "attn.hook_v")
    unproved = dict(adapter.unproved)
    reason = unproved.get(f"blocks.{layer}.{part}", unproved.get("*") if part in _PROVED else None)
    if reason is not None:
        raise UnsupportedError(
            f"site 'blocks.{layer}.{part}' is not offered on {adapter.model_type}, because its place could not be "
            f"proved: {reason}; leave it out of sites"
        )
    problem = ""
    if part.startswith("mlp.") and target.is_mixture(layer):
        problem = f"layer {layer} is a mixture, so it is per expert: use find_sinks for its neurons, or hook_mlp_out"
    elif is_projection and adapter.fused_qkv is not None and adapter.qkv_layout is None:
        problem = "the layout of q, k and v in one module varies"
    elif not adapter.adds and (part == "hook_mlp_out" or (part == "hook_attn_out" and adapter.mid is None)):
        problem = "layers do more than add their parts"
    elif part == "hook_mlp_out" and target.has_neurons(layer) and len(target.mlp_writers(layer)) > 1:
        problem = "a shared expert is beside the mixture, and no module gives their sum"
    elif path is None:
        problem = "there is no separate place for it"
    if path is None or problem:
        raise UnsupportedError(
            f"site 'blocks.{layer}.{part}' does not exist on {adapter.model_type}: {problem}; leave it out of sites"
        )
    return path


Reducer = Callable[[Tensor], Tensor]
"""Takes a site's tensor `[batch pos ...]` (rows of attention: `[batch head query key]`), keeps the batch dimension."""
Mask = Bool[Tensor, "batch pos"]


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

    def to_frame(self) -> pd.DataFrame:
        """One row per number: its site, the row of the batch, its index along each further axis, and its value."""
        import pandas as pd

        frames: list[pd.DataFrame] = []
        for name, tensor in self.items():
            axes = ["batch", *[f"axis_{axis}" for axis in range(1, tensor.ndim)]]
            index = pd.MultiIndex.from_product([range(size) for size in tensor.shape], names=axes)
            frame = pd.DataFrame({"value": tensor.float().numpy().ravel()}, index).reset_index()
            frame.insert(0, "site", name)
            frames.append(frame)
        if not frames:
            return pd.DataFrame(columns=["site", "batch", "value"])
        return pd.concat(frames, ignore_index=True)


def trace(
    model: object,
    tokens: Any = None,
    sites: Pattern | Sequence[Pattern] = (),
    reduce: str | Reducer = "raw",
    *,
    observers: Sequence[Observer] = (),
    attention_mask: Any = None,
    batch_size: int | None = None,
    tokenizer: Any = None,
    bos: bool | None = None,
    **inputs: Any,
) -> Trace:
    """Run the model once and return each site's reduced tensor, on the CPU.

    Args:
        model: Plain Hugging Face, TransformerBridge, nnsight, or a Target.
        tokens: Ids `[batch pos]`, also as a list or lists; one or several texts; or a tokenizer's output. Rows of
            different lengths are padded on the right.
        sites: TransformerLens names, patterns such as `"blocks.*.hook_resid_post"`, or a function of a name,
            `lambda name: name.endswith("hook_z")`. `site_names(n_layers)` lists all: `hook_embed`; in each layer
            `blocks.L.` with `hook_resid_pre`, `hook_attn_out`, `hook_resid_mid`, `hook_mlp_out`, `hook_resid_post`,
            `mlp.hook_pre`, `mlp.hook_pre_linear`, `mlp.hook_post`, `attn.hook_q`, `attn.hook_k`, `attn.hook_v`,
            `attn.hook_z` and `attn.hook_pattern`; `ln_final`, the input of the unembedding, and `logits`, its output.
            `attn.hook_pattern` is recomputed in query chunks while fast attention runs.
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
        The tensor of each site by its name; the first dimension is the batch.

    The pass ends after the deepest site. The model is left unchanged.

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
    watched = [(observer, resolve(target, observer.sites)) for observer in observers]
    batches: dict[str, list[Tensor]] = {site.name: [] for site in wanted}
    step = batch_size or len(rows.ids)
    for start in range(0, len(rows.ids), step):
        ids = rows.ids[start : start + step]
        mask = None
        real = torch.ones(ids.shape, dtype=torch.bool)
        if rows.mask is not None:
            mask = rows.mask[start : start + step].to(target.device)
            real = mask.bool()
        chunks: dict[str, list[Tensor]] = {}
        readers: list[_Reader] = [(site, partial(_keep, chunks, reduce, real, site.name)) for site in wanted]
        for observer, its_sites in watched:
            readers += [(site, partial(observer.observe, site.name, first_row=start)) for site in its_sites]
        _run(target, ids, mask, readers)
        for site in wanted:
            if site.name not in chunks:
                raise _not_reached(target, site.name)
            # Rows of attention come in chunks of queries; every other site has one chunk.
            own = chunks[site.name]
            batches[site.name].append(own[0] if len(own) == 1 else torch.cat(own, 2))
    return Trace({name: torch.cat(tensors) for name, tensors in batches.items()})


def _not_reached(target: Target, name: str) -> UnsupportedError:
    reason = "its module did not run in this pass; leave it out of sites"
    if target.kind == "bridge":
        reason = (
            "a bridge replaces modules that fuse several projections; trace the plain Hugging Face model (backend='hf')"
        )
    return UnsupportedError(f"site {name!r} was never reached on this {target.kind} model: {reason}")


def _keep(chunks: dict[str, list[Tensor]], reduce: str | Reducer, real: Mask, name: str, tensor: Tensor) -> None:
    """Reduce and keep what passes a site."""
    if not isinstance(reduce, str):
        reduced = reduce(tensor)
    elif name.endswith("hook_pattern"):  # no dimension of it is that of the positions in `real`
        reduced = REDUCERS[reduce](tensor, torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device))
    else:
        reduced = REDUCERS[reduce](tensor, real.to(tensor.device))
    # A copy: Falcon adds into its MLP's output in place after the hook has seen it.
    chunks.setdefault(name, []).append(reduced.detach().to("cpu", copy=True))


_Reader = tuple[Site, Callable[[Tensor], None]]
"""A site, and the function that is called with its tensor."""


def _run(target: Target, ids: Int[Tensor, "batch pos"], mask: Tensor | None, readers: list[_Reader]) -> None:
    hooks: list[tuple[nn.Module, str, Any]] = []
    of_rows: dict[int, list[Callable[[Tensor], None]]] = {}
    layers = [-1]
    for site, take in readers:
        if site.layer is not None:
            layers.append(site.layer)
        if site.module is not None:
            hooks.append((site.module, site.when, _hook(site, take, ids.shape)))
        else:
            of_rows.setdefault(layers[-1], []).append(take)

    def show(layer: int, _first: int, rows: Tensor) -> None:
        for take in of_rows[layer]:
            take(rows)

    upto = None
    if 0 <= max(layers) < target.n_layers:
        upto = max(layers)
    unembed = any(module is target.hf for module, _, _ in hooks)
    with attention_rows(target, show, layers=list(of_rows)) if of_rows else nullcontext(), target.hooks(*hooks):
        target.forward(ids, mask, unembed=unembed, upto=upto)


def _hook(site: Site, take: Callable[[Tensor], None], shape: torch.Size) -> Any:
    def read(value: Any) -> None:
        tensor = site.cut(value)
        if tensor.shape[:2] != shape:  # OPT runs batch and position together
            tensor = rearrange(tensor, "(batch pos) ... -> batch pos ...", batch=shape[0])
        take(tensor)

    if site.when == "pre":
        return on_input(read)
    return on_output(read)
