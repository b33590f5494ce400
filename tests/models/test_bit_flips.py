"""A bit of a checkpoint is wrong: it is loaded, or refused in one line, and nothing else happens."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, spoiled
from covering import slow
from gguf_file import write_gguf
from organisms.tiny import tiny_model
from safetensors.torch import load_file

import sinkscope as ss
from sinkscope.errors import SinkscopeError

QUICK, ALL = 3, 60


@cache
def gguf_bytes() -> bytes:
    pytest.importorskip("gguf")
    file = checkpoint("llama").parent / "whole.gguf"
    write_gguf(file, *tiny_model("llama"))
    return file.read_bytes()


def as_gguf(folder: Path) -> tuple[Path, Path]:
    file = folder / "m.gguf"
    file.write_bytes(gguf_bytes())
    return file, file


def as_pickle(folder: Path) -> tuple[Path, Path]:
    model = spoiled(folder / "m")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    return model, model / "pytorch_model.bin"


def as_shards(folder: Path) -> tuple[Path, Path]:
    import shutil

    model = folder / "m"
    shutil.copytree(checkpoint("llama", "40KB"), model)
    return model, model / "model.safetensors.index.json"


def as_header(folder: Path) -> tuple[Path, Path]:
    model = spoiled(folder / "m")
    return model, model / "model.safetensors"


@pytest.mark.parametrize("number", [*range(QUICK), *map(slow, range(QUICK, ALL))])
@pytest.mark.parametrize("form", [as_gguf, as_pickle, as_shards, as_header])
def test_a_flipped_bit(tmp_path, form, number):
    model, file = form(tmp_path)
    content = bytearray(file.read_bytes())
    draw = random.Random(number)
    at = draw.randrange(min(len(content), 4096))  # most of what is no number stands at the beginning
    if form is as_pickle and number % 2:
        at = len(content) - 1 - at  # the list of a zip archive stands at the end
    content[at] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    try:
        loaded = ss.load(model, backend="hf")
    except SinkscopeError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
    else:
        assert ss.generate(loaded, [[5, 6, 7]], max_new_tokens=1, tokenizer=tiny_model("llama")[1])
