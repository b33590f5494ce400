"""What the files of a checkpoint name stays inside its folder, and nothing in it waits or has no end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import spoiled
from safetensors.torch import load_file

import sinkscope as ss
from sinkscope.models.checkpoints.config import TOKENIZER_FILES

pytestmark = [pytest.mark.few_texts, pytest.mark.timeout(60)]

SHARD = "shard.safetensors"


def out(here: Path, other: Path) -> str:
    return f"../{other.parent.name}/{other.name}"


def absolute(here: Path, other: Path) -> str:
    return str(other)


def back_and_forth(here: Path, other: Path) -> str:
    """It ends inside, and does not stay there."""
    shutil.copy(other, here / SHARD)
    return f"../{here.name}/{SHARD}"


def through_a_folder(here: Path, other: Path) -> str:
    (here / "below").symlink_to(other.parent)
    return f"below/{other.name}"


def link_out(here: Path, other: Path) -> str:
    (here / SHARD).symlink_to(other)
    return SHARD


def link_to_a_link_out(here: Path, other: Path) -> str:
    (here / "first").symlink_to(other)
    (here / SHARD).symlink_to("first")
    return SHARD


def of_windows(here: Path, other: Path) -> str:
    return f"C:\\{other.name}"


def backwards(here: Path, other: Path) -> str:
    return f"..\\{other.parent.name}\\{other.name}"


def plain(here: Path, other: Path) -> str:
    shutil.copy(other, here / SHARD)
    return SHARD


def below(here: Path, other: Path) -> str:
    (here / "below").mkdir()
    shutil.copy(other, here / "below" / SHARD)
    return f"below/{SHARD}"


def link_inside(here: Path, other: Path) -> str:
    shutil.copy(other, here / "whole.safetensors")
    (here / SHARD).symlink_to("whole.safetensors")
    return SHARD


OUTSIDE: tuple[Callable[[Path, Path], str], ...] = (
    *(out, absolute, back_and_forth, through_a_folder, link_out, link_to_a_link_out, of_windows, backwards),
)
INSIDE: tuple[Callable[[Path, Path], str], ...] = (plain, below, link_inside)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint whose weights lie in another folder; its index names nothing yet."""
    folder = spoiled(tmp_path / "model")
    (tmp_path / "other").mkdir()
    shutil.move(folder / "model.safetensors", tmp_path / "other/model.safetensors")
    return folder


def write_index(folder: Path, name: str, **entries: object) -> None:
    tensors = load_file(folder.parent / "other/model.safetensors")
    content = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name), **entries}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("use", [ss.load, ss.find_sinks], ids=["loaded", "read layer by layer"])
@pytest.mark.parametrize("name", OUTSIDE, ids=lambda make: make.__name__)
def test_weights_outside_the_folder_are_not_read(name, use, checkpoint):
    write_index(checkpoint, name(checkpoint, checkpoint.parent / "other/model.safetensors"))
    with pytest.raises(ss.SinkscopeError, match=r"^model.safetensors.index.json names '.*', which leads out of model"):
        use(str(checkpoint))


@pytest.mark.parametrize("name", INSIDE, ids=lambda make: make.__name__)
def test_weights_inside_the_folder_are_read(name, checkpoint):
    write_index(checkpoint, name(checkpoint, checkpoint.parent / "other/model.safetensors"))
    ss.load(str(checkpoint))


def test_links_of_the_cache_of_the_hub_are_followed(checkpoint):
    """It keeps files as links to blobs, which are not in the folder of a snapshot."""
    repo = checkpoint.parent / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    shutil.copy(checkpoint.parent / "other/model.safetensors", repo / "blobs/0123")
    write_index(checkpoint, SHARD)
    (checkpoint / SHARD).symlink_to("../../blobs/0123")
    ss.load(str(shutil.move(checkpoint, repo / "snapshots/commit")))


@pytest.mark.parametrize("entries", [{"metadata": None}, {"metadata": [1]}])
def test_an_index_without_metadata_is_refused(entries, checkpoint):
    write_index(checkpoint, plain(checkpoint, checkpoint.parent / "other/model.safetensors"), **entries)
    with pytest.raises(ss.SinkscopeError, match=r"could not be loaded: .*that the files are whole"):
        ss.load(str(checkpoint))


@pytest.mark.parametrize("field", ["tokenizer_file", "vocab_file", "fast_tokenizer_files"])
@pytest.mark.parametrize("name", [out, absolute, link_out], ids=lambda make: make.__name__)
def test_the_files_of_a_tokenizer_stay_inside(name, field, tmp_path):
    folder = spoiled(tmp_path / "model")
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "other/tokenizer.json")
    named = name(folder, tmp_path / "other/tokenizer.json")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings[field] = [named] if field.endswith("s") else named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ss.SinkscopeError, match=f"^{field} in tokenizer_config.json names .*, which leads out of model"
    ):
        ss.load(str(folder))


def test_a_name_left_by_another_machine_is_not_followed(tmp_path):
    folder = spoiled(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "vocab_file": "/elsewhere/vocab.json"}))
    ss.load(str(folder))


def test_a_configuration_names_no_weights_outside(tmp_path):
    folder = spoiled(tmp_path / "model", transformers_weights="../other/model.safetensors")
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "model.safetensors", tmp_path / "other/model.safetensors")
    with pytest.raises(ss.SinkscopeError, match=r"^transformers_weights in config.json names"):
        ss.load(str(folder))


def as_pipe(place: Path) -> None:
    os.mkfifo(place)


def as_device(place: Path) -> None:
    place.symlink_to("/dev/zero")


def as_folder(place: Path) -> None:
    place.mkdir()


def as_broken_link(place: Path) -> None:
    place.symlink_to("nowhere")


@pytest.mark.parametrize("kind", [as_pipe, as_device, as_folder, as_broken_link], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_that_waits_or_has_no_end_is_refused(name, kind, tmp_path):
    folder = spoiled(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    with pytest.raises(ss.SinkscopeError) as refused:
        ss.load(str(folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["vocab.txt", "processor_config.json", "own.jinja"])
def test_no_pipe_may_stand_beside_the_weights(name, tmp_path):
    folder = spoiled(tmp_path / "model")
    as_pipe(folder / name)
    with pytest.raises(ss.SinkscopeError, match=f"cannot read {name}: it is a pipe, not a regular file"):
        ss.load(str(folder))
