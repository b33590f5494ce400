"""Models from a hub, through the real download path, against a server on this machine."""

from __future__ import annotations

import shutil
import time

import pytest
from checkpoints import checkpoint
from hub_server import hub
from huggingface_hub import constants
from refusals import refused

from sinkscope import load
from sinkscope.opening.load import open_target

pytestmark = pytest.mark.usefixtures("no_waiting")
SHARD = "model-00001-of-"


@pytest.fixture
def no_waiting(monkeypatch):
    """The hub's client waits between its retries."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.parametrize(
    ("name", "revision", "reachable", "says"),
    [
        ("org/none", None, True, "org/none could not be loaded: OSError: org/none is not a .*check name"),
        ("org/name", "v9", True, "org/name could not be loaded: OSError: v9 is not a valid git identifier"),
        ("org/gated", None, True, "You are trying to access a gated repo.*hf auth login"),
        ("org/name", None, False, "We couldn't connect to"),
    ],
)
def test_failing_downloads_are_refused(tmp_path, name, revision, reachable, says):
    with hub(tmp_path, {("org/name", "main"): checkpoint("llama")}, reachable=reachable):
        for opened in (open_target, load):
            with refused(says):
                opened(name, revision=revision)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_download_that_is_cut_is_refused_and_the_next_attempt_goes_on(tmp_path, monkeypatch, name):
    folders = {("org/name", "main"): checkpoint("llama"), ("org/name", "v2"): checkpoint("llama", "20KB")}
    with hub(tmp_path, folders, cut=name):
        with refused("org/name could not be loaded: .*check name, revision, access .* and connection"):
            load("org/name")
        assert not [file for file in (tmp_path / "hub").rglob(name) if file.stat().st_size == 100]
    with hub(tmp_path, folders) as asked:
        commits = [load("org/name", revision=revision).config._commit_hash for revision in (None, "v2")]
        assert len({*commits}) == 2 and any(SHARD in one for one in asked)
        asked.clear()
        assert load("org/name").config._commit_hash == commits[0] and asked == []
        for noted in [*(tmp_path / "hub").rglob(".no_exist")]:  # which files the repo lacks
            shutil.rmtree(noted)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert load("org/name").config._commit_hash == commits[0]
