"""No token, file or model steers a terminal, or turns the letters of a page around."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import spoiled

from sinkscope.files.plain import visible
from sinkscope.results.result import Result

STEERING = "\x1b[2J\u202ecod\u2066\x9b\x07"
PLAIN = r"\x1b[2J\u202ecod\u2066\x9b\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (STEERING, PLAIN),
        ("a\r\x00b\u2028\u200f\ud800", r"a\r\x00b\u2028\u200f\ud800"),
        ("tab\t and line\n", "tab\t and line\n"),
        ("caf\u00e9 \u65e5\u672c\u3000\u00a0 \U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u0634\u0648\u062f", None),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert visible(text) == (text if shown is None else shown) == visible(visible(text))


def steered(folder: Path) -> Path:
    """A model whose tokenizer writes steering characters for every word."""
    model = spoiled(folder)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {f"{word}{STEERING}" if i > 10 else word: i for word, i in vocabulary.items()}
    file.write_text(json.dumps(content))
    return model


def test_control_characters_of_generated_text_are_written_out(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    model = steered(tmp_path / f"m{STEERING}".replace("\x00", ""))
    Path("p.txt").write_text("a b c")
    words = ["generate", "--model", str(model), "--prompt-file", "p.txt", "--max-new-tokens", "8"]
    out, err = typed(words)
    assert visible(out) == out and PLAIN in out and visible(err) == err


def test_tables_figures_and_pages_hold_no_control_characters(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    name = "a\u202eb\x1b.txt"
    Path(name).write_text(f"loop {STEERING} " * 40)
    for files in (["--json", "x.json", "--html", "x.html", "--csv", "x.csv"], ["--csv", "-"]):
        out, err = typed(["loops", name, *files], 3)
        assert visible(out) == out and visible(err) == err
    result = Result.load("x.json")
    for text in (Path("x.html").read_text(), result.to_html()):
        assert text and not {"\x1b", "\u202e", "\u2066", "\x07"} & set(text)
