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
from transformers import PretrainedConfig

import sinkscope as ss
from sinkscope.models.checkpoints.checkpoint import Files
from sinkscope.models.checkpoints.config import TOKENIZER_FILES
from sinkscope.models.checkpoints.fingerprint import fingerprint

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
        (folder / name).parent.mkdir(exist_ok=True)
        if end is None:
            shutil.copy(folder.parent / "other" / WEIGHTS, folder / name)
        else:
            (folder / name).symlink_to(end)


# -- outside -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("../other/w.safetensors", {}),
        ("{other}/w.safetensors", {}),
        ("../model/w", {"w": None}),  # it ends inside, and does not stay there
        ("below/w.safetensors", {"below": "../other"}),
        ("w", {"w": "../other/w.safetensors"}),
        ("w", {"first": "../other/w.safetensors", "w": "first"}),
        ("C:\\w.safetensors", {}),
        ("..\\other\\w.safetensors", {}),
    ],
)
def test_weights_outside_the_folder_are_not_read(name, files, folder, other):
    placed(folder, files)
    named(folder, name.format(other=other))
    for use in (ss.load, ss.find_sinks):
        with refused(r"^model.safetensors.index.json names '.*', which leads out of model"):
            use(str(folder))


@pytest.mark.parametrize(
    ("name", "files"),
    [(SHARD, {SHARD: None}), (f"below/{SHARD}", {f"below/{SHARD}": None}), (SHARD, {"whole": None, SHARD: "whole"})],
)
def test_weights_inside_the_folder_are_read(name, files, folder, other):
    placed(folder, files)
    named(folder, name)
    ss.load(str(folder))


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
        ("tokenizer_config.json", "tokenizer_file", "../other/w.safetensors"),
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


# -- files that wait, have no end, or are damaged ----------------------------------------------------------------------

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
    with refused() as caught:
        ss.load(str(folder))
    assert "\n" not in str(caught.value)


def test_no_pipe_may_stand_beside_the_weights(folder):
    os.mkfifo(folder / "own.jinja")
    with refused("cannot read own.jinja: .* not a regular file"):
        ss.load(str(folder))


DAMAGES = [None, b"", b"null", b"[]", b'{"a": "\xff\xfe"}', b"[" * 100_000]
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize(("name", "damage"), each_other(FILES, DAMAGES, 3))
def test_a_damaged_file_beside_the_weights_is_refused(name, damage, folder):
    """None: it is cut."""
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2] if damage is None else damage)
    with refused(name.partition(".")[0] if "config" in name and not name.startswith("tok") else "tokenizer|special"):
        ss.load(folder)
    if name == "generation_config.json":  # also of a model that is read layer by layer
        with refused(name):
            ss.find_sinks(folder)


# -- what is missing ---------------------------------------------------------------------------------------------------


def bin_index(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read config.json.*give the folder of"),
        (lambda f: (f / "q4.gguf").write_bytes(b"GGUF"), "lacks its weights.* or give a .gguf file itself"),
        (lambda f: named(f, "w-2"), "lacks its weights, such as w-2"),
        (bin_index, "lacks its weights, such as pytorch_model-00001-of-00001.bin"),
        (lambda f: (f / INDEX).write_text("[]"), "model.safetensors.index.json is no JSON object; download it again"),
        (lambda f: named(f, "w", weight_map={}), "lacks its weights"),
        (lambda f: (placed(f, {SHARD: None}), named(f, SHARD, metadata=[1])), "could not be loaded: .*files are whole"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 99), "SafetensorError: .*that the files are whole"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs"),
            "SafetensorError: .*git lfs pull",
        ),
    ],
)
def test_what_is_missing_is_named(change, message, folder, other):
    change(folder)
    with refused(message):
        ss.load(folder)


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "live"])
def test_a_fingerprint_changes_with_the_weights_of_every_kind_of_source(kind, tmp_path):
    weight = torch.zeros(1 << 11, 1 << 10)

    def of(values: torch.Tensor) -> str:
        if kind == "live":
            model = torch.nn.Linear(1 << 10, 1 << 11, bias=False)
            model.weight.data = values
            model.config = PretrainedConfig()
            return fingerprint(model)
        if kind == "gguf":
            (tmp_path / "x.gguf").write_bytes(values.numpy().tobytes())
            return fingerprint(Files(tmp_path / "x.gguf"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({"w": values}, tmp_path / "model.safetensors")
        return fingerprint(Files(tmp_path))

    first = of(weight)
    assert of(weight + 1e-3) != first == of(weight)
