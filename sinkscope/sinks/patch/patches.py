"""The patch that a measurement runs under: the given one, that of the sink neurons, or one of random neurons."""

from __future__ import annotations

import os

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.sinks.spikes.controls import Others

PatchArgument = SinkPatch | str | os.PathLike[str] | None
"""A patch, or its file."""


def read_patch_argument(patch: PatchArgument, **_: object) -> SinkPatch:
    """Return the patch itself, or load the one in the file; it is read before a model is loaded.

    Raises:
        SinkscopeError: There is none, or the file is not a patch.
    """
    if patch is None:
        raise SinkscopeError("no patch given: make one with `sinkscope patch make --out patch.json`")
    if isinstance(patch, SinkPatch):
        return patch
    return SinkPatch.load(patch)


def random_patch(setup: Setup, patch: SinkPatch) -> SinkPatch:
    """Make a patch of as many random neurons of the same layers and experts, held at their second token's values."""
    neurons = patch.checked_sites
    return SinkPatch(sites=Others.of(setup.target, setup.ids, neurons).draw(neurons, setup.seed), site=patch.site)
