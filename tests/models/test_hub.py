"""Models from a hub, through the real download path, against a server on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from checkpoints import checkpoint
from hub_server import TOKEN, hub
from organisms import tiny_model
from refusals import refused

from sinkscope import load
from sinkscope.opening.load import open_target

DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two revisions of a model, saved in several shards."""
    other = tmp_path_factory.mktemp("saved")
    tiny_model("llama", 1)[0].save_pretrained(other, max_shard_size="20KB")
    tiny_model("llama")[1].save_pretrained(other)
    return {"main": checkpoint("llama", "20KB"), "v2": other}


@pytest.fixture
def no_waiting(monkeypatch):
    """The hub's client waits between its retries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def cached(cache: Path) -> list[Path]:
    return [f for f in (cache / "hub").rglob("*") if f.is_file() and "models--" in str(f) and ".lock" not in f.name]


@pytest.mark.parametrize(
    ("name", "options", "server_options", "says"),
    [
        ("org/none", {}, {}, "org/none could not be loaded: OSError: org/none is not a .*check name"),
        ("org/name", {"revision": "v9"}, {}, "org/name could not be loaded: OSError: v9 is not a valid git identifier"),
        ("org/gated", {}, {}, "You are trying to access a gated repo.*hf auth login"),
        ("org/gated", {}, {"token": "hf_of_somebody_else"}, "You are trying to access a gated repo"),
        ("org/gated", {}, {"token": TOKEN}, None),
        ("org/name", {}, {"reachable": False}, "We couldn't connect to"),
        ("org/name", {}, {"offline": True}, "We couldn't connect to"),
    ],
)
def test_failing_downloads_are_refused(saved, tmp_path, no_waiting, name, options, server_options, says):
    with hub(tmp_path, **server_options) as server:
        server.add("org/name", saved["main"])
        server.add("org/gated", saved["main"], gated=True)
        for opened in (open_target, load):
            if says is None:
                opened(name, **options)
                continue
            with refused(says.format(url=server.url)):
                opened(name, **options)
            assert not cached(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "shard"])
def test_a_download_that_is_cut_is_refused(saved, tmp_path, no_waiting, name):
    """One line; nothing of it stays in the cache, and the next attempt goes on."""
    if name == "shard":
        name = next(file.name for file in saved["main"].glob("model-*.safetensors"))
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        server.breaks[name] = [100, 0]
        with refused("org/name could not be loaded: .*check name, revision, access .* and connection"):
            load("org/name")
        assert not [file for file in cached(tmp_path) if file.name == name], "nothing half-written is taken for it"
        server.breaks.clear()
        load("org/name")
