"""Models from a hub, through the real download path, against a server on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, spoiled
from hub_server import TOKEN, hub
from organisms import tiny_model
from refusals import refused
from torch.testing import assert_close

from sinkscope import find_sinks, load
from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.opening.live import target_of
from sinkscope.opening.load import open_stream

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


def test_full_download(tmp_path):
    """By hub id and by short name; what came once is there offline, and is enough for a stream."""
    repo, folder = "meta-llama/Llama-2-7b-hf", checkpoint("llama", "20KB")
    with hub(tmp_path) as server:
        commit = server.add(repo, folder)
        models = [load(repo, device="cpu")]
        assert {file for file in server.fetched() if "safetensors" in file} == {
            file.name for file in folder.glob("*safetensors*")
        }
        server.log.clear()
        models.append(load("llama-2-7b", device="cpu"))
        assert not server.fetched(), "a second load comes from the cache"
        assert not [path for _, path in server.log if ".bin" in path]
    with hub(tmp_path, offline=True) as server:
        models.append(load("llama-2-7b", device="cpu"))
        source = SafetensorsSource(repo)
        assert fingerprint(source) == commit
        expected = tiny_model("llama")[0]
        assert torch.equal(source.tensors([DOWN])[DOWN], expected.get_parameter(DOWN))
        assert not server.log
    for model, name in zip(models, (repo.split("/")[1], "llama-2-7b", "llama-2-7b"), strict=True):
        assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)
        assert (model.config._name_or_path, model.config._commit_hash) == (repo, commit)
        assert target_of(model).name == name and model.tokenizer("poem")["input_ids"][0] == 1


def test_revisions_are_downloaded_and_streamed(saved, tmp_path):
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        commit = server.add("org/name", saved["v2"], revision="v2")
        models = {name: load("org/name", revision=name, device="cpu") for name in (None, "v2", commit)}
        source = SafetensorsSource("org/name", revision="v2")
        assert source.commit == commit == fingerprint(source)
        found = {"streamed": source.tensors([DOWN])[DOWN]}
    found |= {name: model.get_parameter(DOWN) for name, model in models.items()}
    expected = tiny_model("llama", 1)[0].get_parameter(DOWN)
    assert {name for name, weight in found.items() if torch.equal(weight, expected)} == {"streamed", "v2", commit}


@pytest.mark.parametrize(
    ("name", "options", "server_options", "says"),
    [
        ("org/none", {}, {}, "config.json of org/none was not downloaded .org/none is not a .*check name"),
        ("org/name", {"revision": "v9"}, {}, "org/name was not downloaded .v9 is not a valid git identifier"),
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
        for opened in (SafetensorsSource, load):
            if says is None:
                opened(name, **options)
                continue
            with refused(says.format(url=server.url)):
                opened(name, **options)
            assert not cached(tmp_path)


def test_another_kind_of_model_is_refused_before_its_weights_are_fetched(tmp_path):
    folder = spoiled(tmp_path / "bert", model_type="bert", architectures=["BertForMaskedLM"])
    with hub(tmp_path / "cache") as server:
        server.add("org/bert", folder)
        for opened in (find_sinks, load):
            with pytest.raises(SinkscopeError, match="org/bert is another kind of model"):
                opened("org/bert")
        assert set(server.fetched()) == {"config.json"}


@pytest.mark.parametrize("name", ["config.json", "shard"])
def test_a_download_that_is_cut_is_refused(saved, tmp_path, no_waiting, name):
    """One line; nothing of it stays in the cache, and the next attempt goes on."""
    if name == "shard":
        name = next(file.name for file in saved["main"].glob("model-*.safetensors"))
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        server.breaks[name] = [100, 0]
        with refused(f"{name}.* of org/name.* run it again"):
            load("org/name")
        assert not [file for file in cached(tmp_path) if file.name == name], "nothing half-written is taken for it"
        server.breaks.clear()
        load("org/name")


def test_streaming_downloads_only_needed_shards(saved, tmp_path):
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        target = open_stream("org/name")
        with target.hooks((target.layers[0], "post", lambda *_: target.stop())):
            target.forward(torch.tensor([[1, 5, 6]]))
        source = target.store.source
        arrived = {name for name in server.fetched() if name.endswith(".safetensors")}
        assert arrived == {source.weight_map[name] for name in source.read}
        assert arrived < set(source.weight_map.values())
        assert not [name for name in source.read if ".1." in name or ".2." in name or "lm_head" in name]
