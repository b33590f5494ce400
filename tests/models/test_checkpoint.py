"""Is a folder a whole checkpoint? What is missing is named; what is whole passes; no weights are read for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from organisms import tiny_model
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource, check_folder, read_header
from sinkscope.models.checkpoints.fingerprint import fingerprint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(checkpoint("llama", "20KB"), tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(keep: int) -> Callable[[Path], Any]:
    """The first bytes of a file, or all but the last ones."""

    def change(folder: Path):
        file = shards(folder)[1]
        file.write_bytes(file.read_bytes()[:keep])

    return change


def rewrite(content: bytes, name: str = "") -> Callable[[Path], Any]:
    return lambda folder: (folder / name if name else shards(folder)[0]).write_bytes(content)


def only_weights(*names: str) -> Callable[[Path], Any]:
    def change(folder: Path):
        for file in folder.glob("model*"):
            file.unlink()
        for name in names:
            (folder / name).write_bytes(b"GGUF")

    return change


def indexed(shards: Any) -> Callable[[Path], Any]:
    return rewrite(json.dumps({"weight_map": shards}).encode(), INDEX)


def drop_one_shard(folder: Path):
    shards(folder)[2].unlink()


def bin_without_shard(folder: Path):
    only_weights()(folder)
    index = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message", "page"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json; give the folder of", "no-config"),
        (rewrite(b"{oops", "config.json"), "config.json is not a JSON file", "no-config"),
        (only_weights(), "has no weights .* download the weights, not only", "no-weights"),
        (only_weights("q4.gguf"), r"has no weights .* give the file itself: .*q4\.gguf", "no-weights"),
        (lambda f: (f / INDEX).unlink(), "has no weights .*model.safetensors.index.json", "no-weights"),
        (drop_one_shard, r"lacks model-00003-of-\d+.safetensors, named in .*1 of \d+ shards", "missing-shard"),
        (bin_without_shard, "lacks pytorch_model-00001-of-00001.bin, .*1 of 1 shards", "missing-shard"),
        (rewrite(b"[]", INDEX), "has no weight_map", "missing-shard"),
        *((indexed(shards), "has no weight_map", None) for shards in (["a"], {"a": 1}, {"a": ["b"]}, {"a": None}, {})),
        (cut(-100), r"model-00002-of-.* is damaged: it has .* bytes, expected ", "truncated-safetensors"),
        (cut(100), r"model-00002-of-.* is damaged: it has \d+ bytes, expected at least \d+", "truncated-safetensors"),
        (cut(8), r"model-00002-of-.* is damaged: it has \d+ bytes, expected at least \d+", "truncated-safetensors"),
        (cut(0), r"model-00002-of-.* is damaged: it has 0 bytes, expected at least 8", "truncated-safetensors"),
        (rewrite(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer.*git lfs pull", None),
        (rewrite(b"<!doctype html><html>no such page</html>"), "header is not JSON", "bad-safetensors-header"),
        (rewrite((7).to_bytes(8, "little") + b"{'a':1}"), "header is not JSON", "bad-safetensors-header"),
        (rewrite((2).to_bytes(8, "little") + b"[]"), "header is not JSON", "bad-safetensors-header"),
    ],
)
def test_what_is_wrong_is_named(folder, change, message, page):
    check_folder(folder)
    change(folder)
    with refused(message) as caught:
        check_folder(folder)
    assert page is None or caught.value.page == page
    assert caught.value.page is None or (Path("docs/errors") / f"{caught.value.page}.md").is_file()


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    change=st.integers(-40, 40).filter(bool),
)
def test_size_is_held_against_the_header(tmp_path_factory, shapes, change):
    """Our reading of the header against the safetensors library's; one byte more or less is noticed and counted."""
    file = tmp_path_factory.mktemp("any") / "x.safetensors"
    save_file({f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}, file)
    header = read_header(file)
    with safe_open(file, "pt") as opened:
        assert sorted(header) == sorted(opened.keys())
        assert all(header[k]["shape"] == opened.get_slice(k).get_shape() for k in header)
    whole = file.read_bytes()
    change = max(change, -(sum(torch.Size(s).numel() for s in shapes) * 4))
    if not change:
        return
    file.write_bytes((whole + b"x" * max(change, 0))[: len(whole) + change])
    with pytest.raises(
        SinkscopeError, match=f"damaged: it has {len(whole) + change:,} bytes, expected {len(whole):,};"
    ):
        read_header(file)


def test_fingerprint_is_of_config_headers_and_some_weights(folder):
    first = fingerprint(folder)
    assert first == fingerprint(checkpoint("llama", "20KB")) == fingerprint(SafetensorsSource(folder))
    assert len(first) == 16
    config = json.loads((folder / "config.json").read_text())
    file = shards(folder)[-1]

    def with_config(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        return fingerprint(folder)

    assert with_config(transformers_version="0.0.1", _name_or_path="elsewhere") == first
    assert with_config(rms_norm_eps=0.5) != first
    assert with_config() == first
    tensors = load_file(file)
    save_file({n: t.half() for n, t in tensors.items()}, file)
    assert fingerprint(folder) != first
    for name in tensors:  # a fine-tune of any single tensor is another model
        save_file({n: t * 1.001 if n == name else t for n, t in tensors.items()}, file, {"format": "pt"})
        assert fingerprint(folder) != first, name
    save_file(tensors, file, {"format": "pt"})
    assert fingerprint(folder) == first


def test_fingerprint_of_a_large_file_reads_little_of_it(tmp_path):
    """Of 32 MB, by what the system says that this process has read."""

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    save_file({f"layers.{i}.w": torch.zeros(1 << 20) for i in range(8)}, tmp_path / "model.safetensors")
    before = bytes_read()
    fingerprint(tmp_path)
    assert 500 < bytes_read() - before < 1 << 21


def test_fingerprint_of_live_models():
    first = fingerprint(tiny_model("llama")[0])
    assert first == fingerprint(tiny_model("llama")[0])
    changed = tiny_model("llama")[0]
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    smaller = tiny_model("llama", num_hidden_layers=2)[0]
    for other in (changed, smaller, tiny_model("llama", seed=3)[0], tiny_model("llama")[0].half()):
        assert fingerprint(other) != first
