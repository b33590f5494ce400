"""A damaged file beside the weights is refused in one line, and none is ignored."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import checkpoint
from covering import each_other
from refusals import refused

import sinkscope as ss


def content(data: bytes) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_bytes(data)

    return change


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "cut": cut,
    "empty": content(b""),
    "null": content(b"null"),
    "a list": content(b"[]"),
    "not UTF-8": content(b'{"a": "\xff\xfe"}'),
    "nested": content(b"[" * 100_000),
    "a folder": folder,
}
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.fixture
def model(tmp_path):
    copy = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (copy / "special_tokens_map.json").write_text("{}")
    return copy


@pytest.mark.parametrize(("name", "damage"), each_other(FILES, DAMAGES, 3))
def test_a_damaged_file_beside_the_weights_is_refused(model, name, damage):
    DAMAGES[damage](model / name)
    with refused(name.partition(".")[0] if "config" in name and not name.startswith("tok") else "tokenizer|special"):
        ss.load(model)


def test_a_model_read_layer_by_layer_is_held_against_the_same_files(model):
    (model / "generation_config.json").write_text("{")
    with refused("generation_config.json is not a JSON file"):
        ss.find_sinks(model)
