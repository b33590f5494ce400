"""Calls of torch that compute something: where a GPU is faster than its host, they are what an edit costs."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = "view _unsafe_view t transpose slice select unsqueeze expand alias detach as_strided".split()


class Launches(TorchDispatchMode):
    """Counts calls that compute something."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.count[name] += 1
        return function(*args, **(kwargs or {}))
