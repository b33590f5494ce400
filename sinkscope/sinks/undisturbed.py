"""Measuring inside a training loop, which leaves the run as it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from sinkscope.models.hooks import evaluating


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; afterwards modes and random numbers are as before.

    Args:
        model: The model.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
