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
from gguf_file import write_gguf
from organisms import tiny_model
from refusals import refused
from safetensors.torch import load_file, save_file

import sinkscope as ss
from sinkscope.opening.load import open_target

pytestmark = [pytest.mark.few_texts, pytest.mark.timeout(60)]

INDEX, WEIGHTS, SHARD = "model.safetensors.index.json", "model.safetensors", "shard.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint, and its weights once more in `other`, outside it."""
    (tmp_path / "other").mkdir()
    shutil.copy(checkpoint("llama") / WEIGHTS, tmp_path / "other/w.safetensors")
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def named(folder: Path, shard: str, **entries: Any) -> None:
    """Put an index in the place of the weights, which names a file for all tensors."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard), **entries}))


def setting(folder: Path, file: str, **entries: Any) -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | entries))


def linked(folder: Path, name: str, end: str) -> None:
    (folder / name).symlink_to(end)


OUTSIDE = {
    "and back": lambda f: (shutil.copy(f / WEIGHTS, f / "w"), named(f, "../model/w")),
    "by two links": lambda f: (linked(f, "a", "../other/w.safetensors"), linked(f, "w", "a"), named(f, "w")),
    "list": lambda f: (
        linked(f, "a", "../other/w.safetensors"),
        setting(f, "tokenizer_config.json", fast_tokenizer_files=["a"]),
    ),
}


@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE)
def test_what_is_outside_the_folder_is_not_read(change, folder):
    change(folder)
    for use in (ss.load, ss.find_sinks):
        with refused(r"json names '.*', which leads out of model"):
            use(str(folder))


def in_snapshot(folder: Path) -> Path:
    """As the cache of the hub keeps files: links to blobs, which are not in the folder of a snapshot."""
    repo = folder.parent / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    shutil.copy(folder / WEIGHTS, repo / "blobs/0123")
    named(folder, SHARD)
    linked(folder, SHARD, "../../blobs/0123")
    return Path(shutil.move(folder, repo / "snapshots/commit"))


INSIDE = {
    "snapshot": in_snapshot,
    "of another machine": lambda f: setting(f, "tokenizer_config.json", vocab_file="/elsewhere/vocab.json") or f,
}


@pytest.mark.parametrize("change", INSIDE.values(), ids=INSIDE)
def test_what_ends_inside_or_is_not_there_is_no_reason_to_refuse(change, folder):
    ss.load(str(change(folder)))


REFUSED = {  # what is wrong with a file, and what is said
    "pipe": (lambda f: os.mkfifo(f / "own.jinja"), "cannot read own.jinja: .* not a regular file"),
    "broken link": (lambda f: linked(f, "vocab.json", "nowhere"), "cannot read vocab.json: no such file"),
    "pickles": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "no file named model.safetensors"),
    "index": (
        lambda f: (f / INDEX).write_text("[]"),
        "model.safetensors.index.json is no JSON object; download it",
    ),
    "LFS": (lambda f: (f / WEIGHTS).write_bytes(b"version https"), "SafetensorError: .*git lfs pull"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_missing_or_no_file_is_named(change, says, folder):
    change(folder)
    with refused(says):
        ss.load(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_damaged_file_beside_the_weights_is_refused(name, folder):
    for damage in (b"", b'{"a": "\xff\xfe"}', b"[" * 100_000):
        (folder / name).write_bytes(damage)
        for use in (ss.load, ss.find_sinks):  # which reads layer by layer
            with refused(name.partition(".")[0]):
                use(folder)


def test_a_link_to_a_snapshot_of_the_hub_is_that_snapshot(tmp_path):
    """Its files are links among the blobs of its repo, which are found from where the link ends."""
    repo = tmp_path / "hub/models--me--tiny"
    snapshot = repo / "snapshots/abc123"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(checkpoint("llama", "20KB").iterdir())):
        shutil.copy(file, repo / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert (snapshot / INDEX).is_file()
    (tmp_path / "model").symlink_to(snapshot)
    want = ss.load(snapshot).lm_head.weight
    assert torch.equal(ss.load(tmp_path / "model").lm_head.weight, want)
    assert open_target(tmp_path / "model").store is not None
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "model-00009.safetensors").symlink_to(tmp_path / "elsewhere")
    index = json.loads((snapshot / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00009.safetensors")
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).write_text(json.dumps(index))
    with refused("leads out of model"):
        ss.load(tmp_path / "model")


def test_a_link_to_a_gguf_file_is_that_file(tmp_path):
    write_gguf(tmp_path / "a.gguf", *tiny_model("llama"), lambda _: None)
    (tmp_path / "model").symlink_to("a.gguf")
    for opened in (ss.load(tmp_path / "model"), open_target(str(tmp_path / "model")).hf):
        assert opened.sinkscope_name == "a.gguf"


@pytest.mark.parametrize("has_peft", [False, True])
def test_a_merged_model_beside_its_adapter_is_the_model(folder, has_peft, monkeypatch):
    """Also where transformers would put the adapter on it once more."""
    want = ss.load(folder).lm_head.weight
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    for module in ("integrations.peft", "models.auto.auto_factory"):
        monkeypatch.setattr(f"transformers.{module}.is_peft_available", lambda: has_peft)
    assert torch.equal(ss.load(folder).lm_head.weight, want)
    (folder / WEIGHTS).unlink()
    with refused("holds an adapter .*, and no weights of a model: load its base"):
        ss.load(folder)


@pytest.mark.parametrize(
    ("prefix", "inside"),
    [("_orig_mod.", "model._orig_mod"), ("module.", "model.module"), ("model._orig_mod.", "_orig")],
)
def test_a_prefix_of_a_wrapper_is_named(prefix, inside, folder):
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if prefix.startswith("model."):
            name = name.removeprefix("model.")
        tensors[prefix + name] = tensor
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    for use in (ss.load, ss.find_sinks):
        with refused(words=[f"have the prefix '{prefix.removeprefix('model.')}'", f"{inside}", "rename the tensors"]):
            use(folder)
