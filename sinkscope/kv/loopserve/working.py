"""A layer of the cache that works on a copy of some of its slots, while the whole waits beside it.

Hiding slots saves no time: every step would still copy all keys to append one, and read them all to mask most. With a
copy, a step costs what the copy is long, and putting the whole back costs once what it is long.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.kv.cache import CacheLayer

_GOES_ON = ("seen", "_columns", "reorders")  # counted on, whatever is held


def work_on(kv: CacheLayer, keep: Bool[Tensor, "batch kv_head slot"]) -> None:
    """Hold a copy of the kept slots only; `kv.settle()` puts the whole back, and behind it what came in since.

    Single tokens may come in between; anything else settles the layer by itself, or asks for it before.
    """
    kv.settle()
    whole = copy.copy(kv)
    kv.evict(keep)
    kv.aside, kv.before_edit = whole, _put_back


def _put_back(kv: CacheLayer) -> None:
    whole = kv.aside
    assert whole is not None
    new, slots = kv.seen - whole.seen, whole.slots
    assert kv.keys is not None and kv.values is not None
    keys, values = kv.keys[..., kv.slots - new :, :], kv.values[..., kv.slots - new :, :]
    names = list(vars(kv)["_extra"])
    extra = {name: kv.extra(name)[..., kv.slots - new :] for name in names}
    vars(kv).update({name: held for name, held in vars(whole).items() if name not in _GOES_ON})
    if not new:
        return
    assert kv.keys is not None and kv.values is not None
    kv.keys, kv.values = torch.cat([kv.keys, keys], 2), torch.cat([kv.values, values], 2)
    vars(kv)["_room"] = None
    for name in names:
        kv.set_extra(name, torch.cat([kv.extra(name)[..., :slots], extra[name]], -1))
