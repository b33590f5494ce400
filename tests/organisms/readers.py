"""Models whose reading heads and marking heads are planted: what each head needs, and which heads mark a token.

`places.py` says what a truth is and compares it with the plain model; `marking_lost` does so for marking heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .hard import Build, HardTruth, kinds, sink
from .places import PlacesModel, attention_module
from .placing import PLACES, placed
from .views import Probe, filled, views, weights_of

_kind = kinds(PLACES, "readers ")


# --- heads that mark ----------------------------------------------------------------------------------------


def _copied_marking_head(b: Build) -> int:
    """A second head of layer 0 that does what the marking head of BOS does."""
    layer, ratio = b.views.layers[0], b.plan.n_heads // b.plan.n_kv
    (head,) = b.of_bos()
    other = next(one for one in range(b.plan.n_heads) if one // ratio != head // ratio)
    for rows in (layer.q, layer.o, layer.q_bias):
        if rows is not None:
            rows[other] = rows[head].clone()
    for rows in (layer.k, layer.v, layer.k_bias, layer.v_bias):
        if rows is not None:
            rows[other // ratio] = rows[head // ratio].clone()
    return other


@_kind("neox", count=1)
def _silent_twin(b: Build) -> HardTruth:
    """One head of layer 0 marks BOS; another attends in the same way and writes nothing."""
    b.mark()
    other = _copied_marking_head(b)
    b.views.layers[0].o[other] = 0.0
    b.fire(b.space.mark, b.way)
    return placed(sink(b, b.way))


# --- the truth of marking heads, from the plain model -------------------------------------------------------


@torch.no_grad()
def marking_lost(m: PlacesModel, layer: int, heads: tuple[int, ...], token: int, sites: tuple) -> float:
    """Share of what neurons write together at a token that stands alone that is lost without some heads.

    The heads write there what they write on average at later positions of the texts.
    """
    seen = views(m.model)
    o_proj = _output(seen.layers[layer].block)
    n_heads = len(seen.layers[layer].q)
    kept: list[Tensor] = []
    hook = o_proj.register_forward_pre_hook(lambda _module, args: kept.append(args[0].detach()))
    m.model(m.ids(), use_cache=False)
    hook.remove()
    mean = kept[0].unflatten(-1, (n_heads, -1))[:, 1:].mean((0, 1))

    def swapped(_module, args):
        z = args[0].unflatten(-1, (n_heads, -1)).clone()
        z[:, 0, list(heads)] = mean[list(heads)]
        return (z.flatten(-2), *args[1:])

    intact = _written(m, token, sites)
    hook = o_proj.register_forward_pre_hook(swapped)
    left = _written(m, token, sites)
    hook.remove()
    return 1 - float(left @ intact / (intact @ intact))


def _output(block) -> torch.nn.Module:
    """The output projection of a block's attention."""
    attention = attention_module(block)
    return next(part for name, part in attention.named_children() if name in ("o_proj", "dense", "out_proj", "c_proj"))


def _written(m: PlacesModel, token: int, sites: tuple) -> Tensor:
    """What neurons of one layer write at a token that stands alone: the output of the MLP less that without them."""
    probe = Probe(m.model, torch.tensor([[token]]))
    mlp = views(m.model).layers[sites[0][0]].mlp
    intact = probe(mlp)
    with filled([tensor for site in sites for tensor in weights_of(m.model, site)]):
        return (intact - probe(mlp)).flatten()
