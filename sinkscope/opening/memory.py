"""How much memory is free: of the host, or of the container (control group) in which the process runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

GROUPS = Path("/proc/self/cgroup")
"""Where Linux names the control groups of this process, one in a line: number, controllers, path."""
MOUNT = Path("/sys/fs/cgroup")
"""Where it shows them."""


@dataclass(frozen=True)
class _Version:
    """Names of one version of control groups: its folder, and files of its limit and of what is used."""

    folder: str
    limit: str
    used: str
    reclaimable: str  # field of memory.stat: pages of files, which leave when room is needed


_FIRST = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("", "memory.max", "memory.current", "inactive_file")


def free_memory() -> int:
    """Return the bytes that this process may still take: what is free on the host, and within the limits on it."""
    return min([psutil.virtual_memory().available, *_free_in_groups()])


def _free_in_groups() -> list[int]:
    """What is free below the limit of each control group of this process and of those around it, in bytes."""
    free: list[int] = []
    with suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                version = _SECOND
            elif "memory" in controllers.split(","):
                version = _FIRST
            else:
                continue
            group = PurePosixPath(path)
            for around in (group, *group.parents):
                folder = MOUNT / version.folder / str(around).lstrip("/")
                with suppress(OSError, ValueError):  # there is no such file, or no limit ("max")
                    free.append(_free_in(folder, version))
    return free


def _free_in(folder: Path, version: _Version) -> int:
    """What is free below the limit of one control group, in bytes."""
    limit = int((folder / version.limit).read_text())
    used = int((folder / version.used).read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, size = line.partition(" ")
        if name == version.reclaimable:
            used -= int(size)
    return max(0, limit - used)
