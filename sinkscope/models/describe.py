"""A model as a tree: what was found in its layers and proved, with the sites that are read there.

Layers that are alike are shown once.
"""

from __future__ import annotations

import html
from typing import Any

from torch import nn

Model = Any
"""A `Target`, which describes itself by this module and so stands above it."""

SITES: dict[str, tuple[str, ...]] = {
    "": ("hook_resid_pre", "hook_resid_post"),
    "attn": ("hook_attn_out", "attn.hook_pattern"),
    "attn_out": ("hook_attn_out",),
    "q": ("attn.hook_q",),
    "k": ("attn.hook_k",),
    "v": ("attn.hook_v",),
    "fused_qkv": ("attn.hook_q", "attn.hook_k", "attn.hook_v"),
    "o": ("attn.hook_z",),
    "mid": ("hook_resid_mid",),
    "mlp": ("hook_mlp_out",),
    "post_mlp_norm": ("hook_mlp_out",),
    "gate": ("mlp.hook_pre",),
    "up": ("mlp.hook_pre", "mlp.hook_pre_linear"),
    "down": ("mlp.hook_post",),
}
"""The sites at each part of a layer; a part that another one replaces has none (see `sites_of_part`)."""
REPLACED = {
    ("attn", "hook_attn_out"): "attn_out",
    ("mlp", "hook_mlp_out"): "post_mlp_norm",
    ("up", "mlp.hook_pre"): "gate",
}
"""Where a site is at another part instead, if a layer has that one."""


def sites_of_part(target: Model, layer: int, part: str) -> list[str]:
    """Return the sites at a part of a layer; of a mixture, neurons are those of single experts, and have none."""
    sites: list[str] = []
    for site in SITES.get(part, ()):
        is_elsewhere = REPLACED.get((part, site)) in target.paths[layer]
        is_of_experts = layer in target.mixtures and site.startswith("mlp.")
        is_missing = site == "mlp.hook_pre_linear" and not target.is_gated(layer)
        is_mixed_in = not target.adapter.adds and site == "hook_mlp_out"  # the layer does more than add it
        if not (is_elsewhere or is_of_experts or is_missing or is_mixed_in):
            sites.append(site)
    return sites


def describe(target: Model) -> str:
    """Return a model as a tree of its modules: what each is, its size, and the sites that are read there.

    A site that could not be proved stands below, with what did not hold.
    """
    heads = f"{target.n_heads} heads"
    if target.n_kv_heads != target.n_heads:
        heads += f" on {target.n_kv_heads} kv heads"
    name = type(target.hf).__name__
    lines = [f"{target.name} ({name}): {target.n_layers} layers of width {target.d_model}, {heads}"]
    path = _path_in(target, target.embedding)
    lines.append(f"{path}: {type(target.embedding).__name__} {_size(target.embedding)}: hook_embed")
    for layers in _alike(target):
        first = layers[0]
        numbers = str(first) if len(layers) == 1 else f"{first}-{layers[-1]}"
        if layers != [*range(first, layers[-1] + 1)]:
            numbers = ", ".join(map(str, layers))
        lines.append(f"{target.adapter.layers}: {numbers}")
        lines += _lines(_rows(target, first))
        for site, reason in _unproved(target, first).items():
            lines.append(f"  not offered: {site}: {reason}")
    return "\n".join(lines)


def as_page(target: Model) -> str:
    """Return the tree for a notebook."""
    return f"<pre>{html.escape(describe(target))}</pre>"


def _alike(target: Model) -> list[list[int]]:
    """The numbers of layers that have the same parts and sizes, and lack the same sites."""
    groups: dict[Any, list[int]] = {}
    for layer in range(target.n_layers):
        rows = [(path, type(module), _size(module), tuple(sites)) for path, module, sites in _rows(target, layer)]
        groups.setdefault((*rows, *_unproved(target, layer).items()), []).append(layer)
    return [*groups.values()]


def _rows(target: Model, layer: int) -> list[tuple[str, nn.Module, list[str]]]:
    """The path, the module and the sites of each part of a layer, in the order of its modules."""
    paths = target.paths[layer]
    sites: dict[str, list[str]] = {}
    for part, path in paths.items():
        offered = [site for site in sites_of_part(target, layer, part) if site not in _unproved(target, layer)]
        sites.setdefault(path, []).extend(offered)
    order = [path for path, _ in target.layers[layer].named_modules() if path in sites]
    return [(path, target.layers[layer].get_submodule(path), sites[path]) for path in order]


def _unproved(target: Model, layer: int) -> dict[str, str]:
    """The sites of a layer that could not be proved, and why."""
    begin = f"blocks.{layer}."
    return {site.removeprefix(begin): why for site, why in target.unproved.items() if site.startswith(begin)}


def _lines(rows: list[tuple[str, nn.Module, list[str]]]) -> list[str]:
    """Rows in columns."""
    cells: list[tuple[str, str, str, str]] = []
    for path, module, sites in rows:
        indent = "  " * (1 + (path.count(".") + 1 if path else 0))
        label = indent + (path.rpartition(".")[2] or "(layer)")
        cells.append((label, type(module).__name__, _size(module), ", ".join(sites)))
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines: list[str] = []
    for row in cells:
        columns = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        lines.append("  ".join([*columns, row[3]]).rstrip())
    return lines


def _size(module: nn.Module) -> str:
    """The shape of the weight of a module; nothing of one that has none of its own."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return "" if weight is None else " x ".join(map(str, weight.shape))


def _path_in(target: Model, module: nn.Module) -> str:
    """The path of a module in the model."""
    return next((path for path, part in target.hf.named_modules() if part is module), "")
