"""Where the time of a token goes: launches, kernels and calls of torch, by torch.profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from experiments.record import Row
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.target import Target

TOKENS = 3  # that are profiled; as many are read before them, in which policies cut and kernels are compiled
MOST = 12  # names of each list
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _counted(events: list[Any], names: tuple[str, ...]) -> float:
    """How often a token calls one of these; cudaLaunchKernelExC is a launch, too."""
    return sum(event.count for event in events if event.key.startswith(names)) / TOKENS


def _largest(events: list[Any], time: str) -> dict[str, list[float]]:
    """Calls and milliseconds of a token, of the names that take longest."""
    told: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda event: -getattr(event, time))[:MOST]:
        if getattr(event, time) > 0:
            told[event.key[:80]] = [round(event.count / TOKENS, 2), round(getattr(event, time) / 1e3 / TOKENS, 4)]
    return told


@torch.no_grad()
def profiled(target: Target, edit: Intervention | None, ids: Tensor, context: int) -> Row:
    """What a token launches and waits for, and what takes longest on the device and on the host.

    Returns:
        Of a token: "launches", "waits" (for the device), "device_ms", "host_ms", and of the slowest "kernels" and
        "calls" of torch the number and the milliseconds.
    """
    cache = DynamicCache(config=target.hf.config)
    with under(edit, target):

        def read(begin: int, end: int) -> None:
            target.hf(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, logits_to_keep=1)

        read(0, context)
        for number in range(context, context + TOKENS):
            read(number, number + 1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ids.is_cuda else [])]
        with profile(activities=activities) as profiler:
            for number in range(context + TOKENS, context + 2 * TOKENS):
                read(number, number + 1)
            if ids.is_cuda:
                torch.cuda.synchronize()
    events: list[Any] = list(profiler.key_averages())
    kernels = [event for event in events if "CUDA" in str(event.device_type)]
    calls = [event for event in events if "CPU" in str(event.device_type)]
    row: Row = {"launches": _counted(calls, LAUNCHES), "waits": _counted(calls, WAITS)}
    row["device_ms"] = sum(event.self_device_time_total for event in kernels) / 1e3 / TOKENS
    row["host_ms"] = sum(event.self_cpu_time_total for event in calls) / 1e3 / TOKENS
    row["kernels"] = _largest(kernels, "self_device_time_total")
    return {**row, "calls": _largest(calls, "self_cpu_time_total")}
