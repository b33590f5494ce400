"""What a folder of a checkpoint may hold: whole, regular files inside it; anything else is refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from covering import each_other
from refusals import refused
from safetensors.torch import load_file, save_file

import sinkscope as ss
from sinkscope.models.checkpoints.checkpoint import Files, fingerprint
from sinkscope.models.checkpoints.config import TOKENIZER_FILES

pytestmark = [pytest.mark.few_texts, pytest.mark.timeout(60)]

INDEX, WEIGHTS, SHARD = "model.safetensors.index.json", "w.safetensors", "shard.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    copy = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (copy / "special_tokens_map.json").write_text("{}")
    return copy


@pytest.fixture
def other(folder) -> Path:
    """Another folder, to which the weights went."""
    (folder.parent / "other").mkdir()
    shutil.move(folder / "model.safetensors", folder.parent / "other" / WEIGHTS)
    return folder.parent / "other"


def named(folder: Path, name: Any, **entries: Any) -> None:
    """Write an index that names a file for all tensors."""
    tensors = load_file(folder.parent / "other" / WEIGHTS)
    content = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name), **entries}
    (folder / INDEX).write_text(json.dumps(content))


def placed(folder: Path, files: dict[str, str | None]) -> None:
    """Put links into a folder, or copies of the weights (None)."""
    for name, end in files.items():
        if end is None:
            shutil.copy(folder.parent / "other" / WEIGHTS, folder / name)
        else:
            (folder / name).symlink_to(end)


@pytest.mark.parametrize(
    ("name", "files", "is_inside"),
    [
        ("{other}/w.safetensors", {}, False),
        ("../model/w", {"w": None}, False),  # it ends inside, and does not stay there
        ("below/w.safetensors", {"below": "../other"}, False),
        ("w", {"first": "../other/w.safetensors", "w": "first"}, False),
        ("..\\other\\w.safetensors", {}, False),
        (SHARD, {"whole": None, SHARD: "whole"}, True),
    ],
)
def test_weights_outside_the_folder_are_not_read(name, files, is_inside, folder, other):
    placed(folder, files)
    named(folder, name.format(other=other))
    for use in (ss.load, ss.find_sinks):
        if is_inside:
            use(str(folder))
            continue
        with refused(r"^model.safetensors.index.json names '.*', which leads out of model"):
            use(str(folder))


def test_links_of_the_cache_of_the_hub_are_followed(folder, other):
    """It keeps files as links to blobs, which are not in the folder of a snapshot."""
    repo = other / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    shutil.copy(other / WEIGHTS, repo / "blobs/0123")
    named(folder, SHARD)
    placed(folder, {SHARD: "../../blobs/0123"})
    ss.load(str(shutil.move(folder, repo / "snapshots/commit")))


@pytest.mark.parametrize(
    ("file", "field", "name"),
    [
        ("tokenizer_config.json", "vocab_file", "{other}/w.safetensors"),
        ("tokenizer_config.json", "fast_tokenizer_files", ["link"]),
        ("config.json", "transformers_weights", "../other/w.safetensors"),
        ("tokenizer_config.json", "vocab_file", "/elsewhere/vocab.json"),  # left by another machine, and not followed
    ],
)
def test_files_that_settings_name_stay_inside(file, field, name, folder, other):
    placed(folder, {"link": "../other/w.safetensors", "model.safetensors": None})
    if isinstance(name, str):
        name = name.format(other=other)
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, field: name}))
    if name == "/elsewhere/vocab.json":
        ss.load(str(folder))
        return
    with refused(f"^{field} in {file} names .*, which leads out of model"):
        ss.load(str(folder))


KINDS = {
    "pipe": os.mkfifo,
    "device": lambda place: place.symlink_to("/dev/zero"),
    "folder": lambda place: place.mkdir(),
    "broken link": lambda place: place.symlink_to("nowhere"),
}


@pytest.mark.parametrize(("name", "kind"), each_other([*TOKENIZER_FILES, "config.json", "model.safetensors"], KINDS, 3))
def test_a_file_that_waits_or_has_no_end_is_refused(name, kind, folder):
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    with refused():
        ss.load(str(folder))


DAMAGES = [b"", b"null", b'{"a": "\xff\xfe"}', b"[" * 100_000]
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize(("name", "damage"), each_other(FILES, DAMAGES, 3))
def test_a_damaged_file_beside_the_weights_is_refused(name, damage, folder):
    (folder / name).write_bytes(damage)
    with refused(name.partition(".")[0] if "config" in name and not name.startswith("tok") else "tokenizer|special"):
        ss.load(folder)
    if name == "generation_config.json":  # also of a model that is read layer by layer
        with refused(name):
            ss.find_sinks(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read config.json.*give the folder of"),
        (lambda f: (f / "q4.gguf").write_bytes(b"GGUF"), "lacks its weights.* or give a .gguf file itself"),
        (lambda f: named(f, "w-2"), "lacks its weights, such as w-2"),
        (lambda f: shutil.copy(f.parent / "other" / WEIGHTS, f / "pytorch_model.bin"), "convert pickles .* save_pre"),
        (lambda f: (f / INDEX).write_text("[]"), "model.safetensors.index.json is no JSON object; download it again"),
        (lambda f: (placed(f, {SHARD: None}), named(f, SHARD, metadata=[1])), "could not be loaded: .*files are whole"),
        (lambda f: os.mkfifo(f / "own.jinja"), "cannot read own.jinja: .* not a regular file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"version https"), "SafetensorError: .*git lfs pull"),
    ],
)
def test_what_is_missing_is_named(change, message, folder, other):
    change(folder)
    with refused(message):
        ss.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf"])
def test_a_fingerprint_changes_with_the_weights(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = []
    for number in (0.0, 1e-3, 0.0):
        save_file({"w": torch.full((1 << 11, 1 << 10), number)}, tmp_path / name)
        found.append(fingerprint(Files(tmp_path / name if name == "x.gguf" else tmp_path)))
    assert found[0] == found[2] != found[1]
