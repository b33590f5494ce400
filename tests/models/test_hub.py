"""Models of the hub, as huggingface_hub leaves them in its cache; downloads are its own."""

from __future__ import annotations

import pytest
from checkpoints import checkpoint, in_cache
from refusals import refused

from sinkscope import load
from sinkscope.models.checkpoints.checkpoint import fingerprint_of
from sinkscope.opening.load import open_target, target_of


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("org/name", "v9", "org/name could not be loaded: LocalEntryNotFoundError: .*check name, .*connection"),
        ("org/adapter", None, "org/adapter holds an adapter"),
    ],
)
def test_what_is_not_there_or_no_model_is_refused(tmp_path, monkeypatch, name, revision, says):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    in_cache(monkeypatch, tmp_path, {("org/name", "main"): checkpoint("llama"), ("org/adapter", "main"): folder})
    for opened in (open_target, load):
        with refused(says):
            opened(name, revision=revision)


def test_a_revision_is_loaded_and_known_by_its_commit(tmp_path, monkeypatch):
    revisions = {"main": checkpoint("llama"), "v2": checkpoint("llama", "20KB")}
    commits = in_cache(monkeypatch, tmp_path, {("org/name", revision): revisions[revision] for revision in revisions})
    for revision, commit in zip((None, "v2"), commits, strict=True):
        model = load("org/name", revision=revision)
        assert fingerprint_of(target_of(model)) == model.config._commit_hash == commit
        model.model.norm.weight.data *= 2
        assert fingerprint_of(target_of(model)) != commit
        source = open_target("org/name", revision=revision).store.source
        assert (source.name, source.commit) == ("org/name", commit)
    assert len({*commits}) == 2
