"""How a result was made: command, versions, device, time, memory. No folder and no machine is named."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sinkscope._plain import pathless

_PACKAGES = ("torch", "transformers", "transformer_lens", "nnsight")


@dataclass(frozen=True)
class Provenance:
    """How a result was made.

    Attributes:
        argv: the command, paths relative or base names.
        versions: of python, sinkscope, and those of torch, transformers, transformer_lens, nnsight that took part.
        device: as torch names it.
        dtype: of the model.
        attention: implementation the model ran with.
        bos: whether a beginning-of-sequence token stood first; None where that has no meaning.
        seed: of every random choice.
        seconds: from start to result.
        peak_memory_bytes: largest memory of this process so far, on cuda largest memory allocated there.
    """

    argv: tuple[str, ...]
    versions: dict[str, str]
    device: str
    dtype: str
    attention: str
    bos: bool | None
    seed: int
    seconds: float
    peak_memory_bytes: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", tuple(pathless(word) for word in self.argv))


def versions() -> dict[str, str]:
    """Versions of python, sinkscope, and the libraries that took part."""
    own = {"python": platform.python_version(), "sinkscope": _version("sinkscope")}
    return own | {name: _version(name) for name in _PACKAGES if name in sys.modules}


def provenance(
    *,
    started: float,
    device: object,
    dtype: object,
    attention: str,
    bos: bool | None,
    seed: int,
    argv: Sequence[str] | None = None,
) -> Provenance:
    """Collect the provenance at the end of a measurement.

    Args:
        started: `time.perf_counter()` at its beginning.
        device: torch device, or its name.
        dtype: torch dtype, or its name.
        attention: implementation the model ran with.
        bos: whether a BOS token stood first.
        seed: of every random choice.
        argv: the command; by default that of this process.
    """
    return Provenance(
        argv=tuple(sys.argv if argv is None else argv),
        versions=versions(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        bos=bos,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        peak_memory_bytes=peak_memory(str(device)),
    )


def peak_memory(device: str = "cpu") -> int | None:
    """Largest memory so far in bytes: resident memory of this process, or allocated on a cuda device."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:  # unlike getrusage, not inherited from the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _version(name: str) -> str:
    if name == "sinkscope":  # a source tree may not be installed
        from sinkscope import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules[name], "__version__", "unknown"))
