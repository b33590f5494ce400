"""Tiny checkpoints on disk, written once per test run."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants
from organisms.tiny import tiny_model

_ROOT = Path(tempfile.mkdtemp(prefix="sinkscope-tests-"))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)


@functools.cache
def checkpoint(model_type: str, shard_size: str = "1GB") -> Path:
    """Folder of a tiny model of `model_type`, called by that name. Nobody changes it."""
    folder = _ROOT / shard_size / model_type
    model, tokenizer = tiny_model(model_type)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def spoiled(folder: Path, base: str = "llama", /, **config) -> Path:
    """A copy of a tiny checkpoint in `folder`, to be spoiled; `config` changes entries of config.json (None: out)."""
    shutil.copytree(checkpoint(base), folder)
    file = folder / "config.json"
    entries = json.loads(file.read_text()) | config
    file.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    return folder


def in_cache(monkeypatch: pytest.MonkeyPatch, cache: Path, folders: Mapping[tuple[str, str], Path]) -> list[str]:
    """Put folders, by repo and revision, into a cache of the hub, which cannot be reached; the commits."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commits = []
    for (repo, revision), folder in folders.items():
        commits.append(hashlib.sha1(f"{repo} {revision}".encode(), usedforsecurity=False).hexdigest())
        root = cache / "hub" / f"models--{repo.replace('/', '--')}"
        shutil.copytree(folder, root / "snapshots" / commits[-1])
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / revision).write_text(commits[-1])
    return commits
