"""Which model was measured, and how, when and on which device."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
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

    argv: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "unknown"
    dtype: str = "unknown"
    attention: str = "unknown"
    bos: bool | None = None
    seed: int = 0
    seconds: float = 0.0
    commit: str | None = None
    first_ids: tuple[int, ...] = ()
    bos_added: bool | None = None


UNKNOWN_MODEL = ModelInfo("unknown", "unknown", 0, 0, 0, "")


def provenance(started: float, **about: Any) -> Provenance:
    """Collect the provenance at the end of a measurement.

    Args:
        started: `time.perf_counter()` at the beginning of the measurement.
        about: Other fields. By default no model was used.
    """
    no_model: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention": "none"}
    return Provenance(
        tuple(map(pathless, sys.argv)),
        versions(),
        seconds=round(time.perf_counter() - started, 3),
        commit=commit_of(CHECKOUT),
        **no_model | about,
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


def documented_at(page: str) -> str:
    """Return the file in which something is documented: of the checkout, or below the environment of Python.

    Args:
        page: File below docs/, with or without the heading on it as links spell it.
    """
    folder = "docs"
    if not (CHECKOUT / folder).is_dir():  # a wheel has the pages inside the package
        folder = os.path.relpath(CHECKOUT / "sinkscope/docs", sys.prefix)
    return f"{folder}/{page}"
