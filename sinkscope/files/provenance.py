"""Which model was measured, and how, when and on which device."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from sinkscope import __version__
from sinkscope.files.plain import pathless

CHECKOUT = Path(__file__).parents[2]
CODE = ("sinkscope", "experiments")
"""The folders of a checkout whose code makes results."""
LIBRARIES = ("torch", "transformers", "transformer_lens", "nnsight")


@dataclass(frozen=True)
class ModelInfo:
    """The model that was measured. The fingerprint is computed from the configuration and all weights."""

    name: str
    family: str
    n_layers: int
    d_model: int
    d_mlp: int
    fingerprint: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", pathless(self.name))


@dataclass(frozen=True)
class Provenance:
    """How a result was made.

    Attributes:
        argv: The command, with relative paths or base names.
        versions: Versions of python, sinkscope, and of torch, transformers, transformer_lens and nnsight if they were
            used.
        device: Device name in torch's notation.
        dtype: Data type of the model.
        attention: Attention implementation that the model ran with.
        bos: Whether sequences began with BOS. None if that has no meaning.
        seed: Seed of every random choice.
        seconds: Time from start to result.
        commit: Commit of the git checkout that holds this code, with a "+" if the code was changed since. None where
            there is no checkout, as for an installed package.
        first_ids: The first token ids that were read. Empty if there were no texts.
        bos_added: Whether BOS stands first although the tokenizer puts none before a text.
    """

    argv: tuple[str, ...]
    versions: dict[str, str]
    device: str
    dtype: str
    attention: str
    bos: bool | None
    seed: int
    seconds: float
    commit: str | None = None
    first_ids: tuple[int, ...] = ()
    bos_added: bool | None = None


UNKNOWN_MODEL = ModelInfo("unknown", "unknown", 0, 0, 0, "")
UNKNOWN_PROVENANCE = Provenance((), {}, "unknown", "unknown", "unknown", None, 0, 0.0)


def provenance(
    *,
    started: float,
    device: object = "cpu",
    dtype: object = "float32",
    attention: str = "none",
    bos: bool | None = None,
    seed: int = 0,
    **texts: Any,
) -> Provenance:
    """Collect the provenance at the end of a measurement.

    Args:
        started: `time.perf_counter()` at the beginning of the measurement.
        device: Torch device, or its name.
        dtype: Torch dtype, or its name.
        attention: Attention implementation that the model ran with; "none" without a model.
        bos: Whether sequences began with BOS.
        seed: Seed of every random choice.
        texts: `first_ids` and `bos_added`, where texts were read.
    """
    return Provenance(
        argv=tuple(map(pathless, sys.argv)),
        versions=versions(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        bos=bos,
        seed=seed,
        seconds=round(time.perf_counter() - started, 3),
        commit=commit_of(CHECKOUT),
        **texts,
    )


@cache
def commit_of(checkout: Path) -> str | None:
    """Return the commit of a git checkout, with a "+" if its code differs from it.

    Args:
        checkout: Folder with the packages `sinkscope` and `experiments`.

    Returns:
        None where the folder is no checkout, or where git cannot tell.
    """
    if not (checkout / ".git").exists():
        return None
    git = partial(subprocess.run, cwd=checkout, capture_output=True, text=True, check=False)
    try:
        head = git(["git", "rev-parse", "HEAD"])
        changed = git(["git", "diff", "--quiet", "HEAD", "--", *CODE])
    except OSError:  # git is not installed
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + "+" * bool(changed.returncode)


def versions() -> dict[str, str]:
    """Return the versions of python, sinkscope, and the libraries that were used."""
    used = {name: metadata.version(name) for name in LIBRARIES if name in sys.modules}
    return {"python": platform.python_version(), "sinkscope": __version__, **used}


def documented_at(page: str, section: str = "") -> str:
    """Return the file in which something is documented: of the checkout, or below the environment of Python.

    Args:
        page: Path below docs/, without .md.
        section: Heading on the page, as its link spells it.
    """
    folder = "docs"
    if not (CHECKOUT / "docs").is_dir():  # a wheel has the pages inside the package
        folder = os.path.relpath(Path(__file__).parents[1] / "docs", sys.prefix)
    return f"{folder}/{page}.md#{section}".rstrip("#")
