"""Models from a hub, through the real download path, against a server on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from checkpoints import spoiled
from covering import each_other
from hub_server import TOKEN, hub
from organisms import tiny_model
from refusals import refused

from sinkscope import find_sinks, load
from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoint import SafetensorsSource
from sinkscope.models.fingerprint import fingerprint
from sinkscope.models.open import open_stream
from sinkscope.models.target import first_tensor
from sinkscope.models.wrapped import target_of

DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two revisions of a model, saved in several shards."""
    folders = {}
    for revision, seed in (("main", 0), ("v2", 1)):
        folders[revision] = tmp_path_factory.mktemp("saved")
        model, tokenizer = tiny_model("llama", seed)
        model.save_pretrained(folders[revision], max_shard_size="20KB")
        tokenizer.save_pretrained(folders[revision])
    return folders


@pytest.fixture
def no_waiting(monkeypatch):
    """The hub's client waits between its retries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def cached(cache: Path) -> list[Path]:
    return [f for f in (cache / "hub").rglob("*") if f.is_file() and "models--" in str(f) and ".lock" not in f.name]


def test_full_download(saved, tmp_path):
    with hub(tmp_path) as server:
        commit = server.add("org/name", saved["main"])
        model = load("org/name", backend="hf")
        assert {f for f in server.fetched() if "safetensors" in f} == {
            f.name for f in saved["main"].iterdir() if "safetensors" in f.name
        }
        server.log.clear()
        again = load("org/name", backend="hf")
        assert not server.fetched(), "a second load comes from the cache"
    original = tiny_model("llama", 0)[0].state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, original[name]) and torch.equal(again.state_dict()[name], weight)
    with hub(tmp_path, offline=True) as server:
        offline = load("org/name", backend="hf")
        assert not server.log
        assert fingerprint(SafetensorsSource("org/name")) == commit
    assert torch.equal(offline.lm_head.weight, model.lm_head.weight)


def test_revision(saved, tmp_path):
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        commit = server.add("org/name", saved["v2"], revision="v2")
        by_name, by_commit = (load("org/name", backend="hf", revision=r) for r in ("v2", commit))
        source = SafetensorsSource("org/name", revision="v2")
        assert source.commit == commit == fingerprint(source)
        streamed = source.tensors([DOWN])[DOWN]
        main = load("org/name", backend="hf")
    expected = tiny_model("llama", 1)[0].get_parameter(DOWN)
    assert torch.equal(by_name.get_parameter(DOWN), expected) and torch.equal(by_commit.get_parameter(DOWN), expected)
    assert torch.equal(streamed, expected)
    assert not torch.equal(main.get_parameter(DOWN), expected)


@pytest.mark.parametrize(
    "opened", [SafetensorsSource, lambda *a, **k: load(*a, backend="hf", **k)], ids=["stream", "load"]
)
def test_what_cannot_be_had(saved, tmp_path, opened, no_waiting):
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        server.add("org/gated", saved["main"], gated=True)
        for args, message in (
            ({"where": "org/none"}, f"there is no model 'org/none' at {server.url}, or it is private: check the spell"),
            ({"where": "org/name", "revision": "v9"}, "org/name has no revision 'v9'; give a branch, tag or commit"),
            ({"where": "org/gated"}, rf"org/gated is gated: accept its terms at {server.url}/org/gated, then log in"),
        ):
            with pytest.raises(SinkscopeError, match=message) as caught:
                opened(args.pop("where"), **args)
            assert "\n" not in str(caught.value) and caught.value.page
        assert not cached(tmp_path)
    with hub(tmp_path, token="hf_of_somebody_else") as server:
        server.add("org/gated", saved["main"], gated=True)
        with pytest.raises(SinkscopeError, match="org/gated is gated"):
            opened("org/gated")
    with hub(tmp_path, token=TOKEN) as server:
        server.add("org/gated", saved["main"], gated=True)
        opened("org/gated")
    with hub(tmp_path / "empty", reachable=False) as server:
        with pytest.raises(
            SinkscopeError, match=f"{server.url} cannot be reached: check the connection, or give a fol"
        ):
            opened("org/name")
    with hub(tmp_path / "empty", offline=True), pytest.raises(SinkscopeError, match="HF_HUB_OFFLINE is set: unset it"):
        opened("org/name")


def test_find_sinks_from_a_hub_and_from_its_cache(saved, tmp_path):
    """The cache of a finished download serves without a network, whether that is said or only so."""
    with hub(tmp_path) as server:
        commit = server.add("org/name", saved["main"])
        online = find_sinks("org/name")
    assert online.model.fingerprint == commit
    for no_network in ({"offline": True}, {"reachable": False}):
        with hub(tmp_path, **no_network) as server:
            again = find_sinks("org/name")
            assert (again.first_token_norm, again.model) == (online.first_token_norm, online.model)


def test_another_kind_of_model_is_refused_before_its_weights_are_fetched(tmp_path):
    folder = spoiled(tmp_path / "bert", model_type="bert", architectures=["BertForMaskedLM"])
    with hub(tmp_path / "cache") as server:
        server.add("org/bert", folder)
        for opened in (find_sinks, load):
            with pytest.raises(SinkscopeError, match="org/bert is an encoder-only model"):
                opened("org/bert")
        assert set(server.fetched()) == {"config.json"}


def test_one_file_and_then_offline(tmp_path):
    model, _ = tiny_model("llama", 0)
    model.save_pretrained(tmp_path / "model")
    with hub(tmp_path / "cache") as server:
        server.add("org/single", tmp_path / "model")
        open_stream("org/single")
    with hub(tmp_path / "cache", offline=True):
        found = SafetensorsSource("org/single").tensors([DOWN])[DOWN]
    assert torch.equal(found, model.get_parameter(DOWN))


def test_repo_without_config_or_weights(saved, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("words")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((saved["main"] / "config.json").read_bytes())
    with hub(tmp_path / "cache") as server:
        server.add("org/notes", tmp_path / "notes")
        server.add("org/bare", tmp_path / "bare")
        with pytest.raises(SinkscopeError, match=r"org/notes has no config.json"):
            SafetensorsSource("org/notes")
        with pytest.raises(SinkscopeError, match=r"org/bare has no safetensors weights"):
            open_stream("org/bare")


@pytest.mark.parametrize(
    ("name", "way"),
    each_other(["config.json", "model.safetensors.index.json", "tokenizer.json", "shard"], ["cut", "slow"], 3),
)
def test_an_answer_that_is_cut_or_slow(saved, tmp_path, monkeypatch, no_waiting, name, way):
    """One line; nothing of it stays in the cache, and the next attempt goes on."""
    from huggingface_hub import constants

    for timeout in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, timeout, 0.1)
    if name == "shard":
        name = next(file.name for file in saved["main"].glob("model-*.safetensors"))
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        if way == "cut":
            server.breaks[name] = [100, 0]
        else:
            server.pauses[name] = 1.0
        with refused(f"{name}.* of org/name.*; run it again"):
            load("org/name", backend="hf")
        assert not [file for file in cached(tmp_path) if file.name == name], (
            "nothing half-written is taken for the file"
        )
        server.breaks.clear()
        server.pauses.clear()
        load("org/name", backend="hf")


def test_streaming_downloads_only_needed_shards(saved, tmp_path):
    with hub(tmp_path) as server:
        server.add("org/name", saved["main"])
        target = open_stream("org/name")
        source = target.store.source
        outputs = []

        def keep(_module, _args, _kwargs, output):
            outputs.append(first_tensor(output))
            target.stop()

        ids = torch.tensor([[1, 5, 6]])
        with target.hooks((target.layers[0], "post", keep)):
            target.forward(ids)
        arrived = {name for name in server.fetched() if name.endswith(".safetensors")}
        assert arrived == {source.weight_map[name] for name in source.read}
        assert arrived < set(source.weight_map.values())
        assert not [name for name in source.read if ".1." in name or ".2." in name or "lm_head" in name]
    resident = target_of(tiny_model("llama", 0)[0])
    with resident.hooks((resident.layers[0], "post", lambda m, a, k, out: outputs.append(first_tensor(out)))):
        resident.forward(ids)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=0)
