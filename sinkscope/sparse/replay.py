"""Work that is the same in every layer of a prompt: recorded once as a CUDA graph, then launched as a whole.

The choice of columns and bands is over a hundred small launches, which take the host of a GPU several times as long as
the device. The layers of a prompt have equal shapes, so their tensors are copied into the same buffers, and

1. the first layer does the work from these buffers, which compiles kernels and fills caches,
2. the second records it,
3. all later layers launch what was recorded.

Everything but `first` and `record` is the same on a CPU, where tests put others in their place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from sinkscope.errors import warn

Results = tuple[Tensor, ...]


class Replayed:
    """Work on tensors of given shapes, which each call copies into buffers.

    The work must launch the same in every call: it waits for nothing, and makes no tensor from numbers of the host.

    Args:
        work: Called with the buffers; returns the results.
        like: Tensors of the shapes and dtypes of the arguments, the first on the GPU.
    """

    def __init__(self, work: Callable[..., Results], like: Sequence[Tensor]) -> None:
        self._device = like[0].device
        self._buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in like]
        self._work, self._calls = work, 0
        self._replay: Callable[[], None] | None = None
        self._results: Results = ()

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> Results:
        """Return the results for these arguments; the next call overwrites them."""
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self._calls += 1
        if self._calls == 2:
            try:
                self._replay, self._results = self.record()
            except RuntimeError as error:  # then every layer launches its work
                reason = str(error).partition("\n")[0]
                warn(f"lines are chosen step by step, because no CUDA graph of the choice was recorded: {reason}")
        if self._replay is None:
            return self.first()
        self._replay()
        return self._results

    def work(self) -> Results:
        """Do the work from the buffers."""
        return self._work(*self._buffers)

    def first(self) -> Results:
        """Do the work on the stream on which it is recorded later, as PyTorch asks for."""
        current, own = torch.cuda.current_stream(self._device), _stream_of(self._device)
        own.wait_stream(current)
        with torch.cuda.stream(own):
            results = self.work()
        current.wait_stream(own)
        return results

    def record(self) -> tuple[Callable[[], None], Results]:
        """Record a graph; return what launches it, and the tensors in which its results then are."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a kernel that is unloaded meanwhile would break the recording
        try:
            # Other threads may go on, as those that load data or watch a server.
            with torch.cuda.graph(graph, stream=_stream_of(self._device), capture_error_mode="thread_local"):
                results = self.work()
        finally:
            if collects:
                gc.enable()
        return graph.replay, results


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings on a device."""
    return torch.cuda.Stream(device)
