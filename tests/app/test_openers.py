"""What a user names is opened by one opener, and what a token, a file or a model is called steers no terminal."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sinkscope.files.plain import in_one_line, visible
from sinkscope.results.result import Result

pytestmark = [pytest.mark.few_texts, pytest.mark.timeout(60)]

COMMANDS = (
    "find-sinks --text {}",
    "generate --prompt-file {}",
    "generate hi --patch {}",
    "patch --file {}",
    "loops {}",
    "loops --follow {}",
    "why-loop hello --answer-file {}",
    "lines --data {}",
    "bench --task {}",
    "bench --task loops:{}",
    "bench {}",
    "compare {} words.txt",
    "report {}",
    "find-sinks {}",
    "check-cache {}:f",
)
STEERING = "\x1b[2J\u202ecod\u2066\x9b\x07"
PLAIN = r"\x1b[2J\u202ecod\u2066\x9b\x07"


@pytest.mark.parametrize("kind", ["link to a pipe", "link to itself", "device", "folder", "output of a process"])
def test_nothing_that_waits_or_has_no_end_is_opened(kind, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("hello world, this is a text.\n" * 40)
    name, reading = "given", -1
    if kind == "folder":
        Path(name).mkdir()
    elif kind == "output of a process":  # as a shell names it: <(command); nobody writes to it
        reading, _ = os.pipe()
        name = f"/dev/fd/{reading}"
    else:
        os.mkfifo("pipe")
        Path(name).symlink_to({"link to a pipe": "pipe", "link to itself": name, "device": "/dev/zero"}[kind])
    opened, own = [], open
    monkeypatch.setattr("builtins.open", lambda file, *given, **more: opened.append(file) or own(file, *given, **more))
    for command in COMMANDS:
        assert len(refusal(command.format(name))) < 600
        assert kind != "device" or name not in map(str, opened), "some devices take it as an act"
    if kind not in ("link to itself", "output of a process"):
        said = refusal(f"generate --prompt-file {name}")
        assert said.startswith("cannot read given: it is a folder, a pipe or a device")


def test_a_regular_file_is_read_through_links_but_not_beyond_a_bound(monkeypatch, tmp_path, typed, refusal):
    monkeypatch.chdir(tmp_path)
    Path("real.jsonl").write_text('{"text": "one two three four five"}\n')
    Path("link").symlink_to("real.jsonl")
    Path("a link to a link").symlink_to("link")
    typed(["loops", "a link to a link"])
    monkeypatch.setattr("sinkscope.files.output.MOST", 30)
    assert "longer than" in refusal("find-sinks --text real.jsonl")


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


def test_control_characters_of_generated_text_are_written_out(monkeypatch, typed):
    answer = SimpleNamespace(text=STEERING, summary=STEERING)
    monkeypatch.setattr("sinkscope.app.generate.generate", lambda *_, **__: [answer])
    assert typed(["generate", "a", "--guard"]) == (f"{PLAIN}\n", f"{PLAIN}\n")


@pytest.mark.parametrize("name", ["a\r\nb.txt", "a\u202eb\x1b[2J.txt"])
def test_names_tables_figures_and_pages_hold_no_control_characters(name, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(f"loop {STEERING} " * 40)
    for files in (["--json", "x.json", "--html", "x.html"], ["--csv", "-"]):
        out, err = typed(["loops", name, *files], 3)
        assert visible(out) == out and visible(err) == err and name not in out + err
    assert Result.load("x.json").conclusion().startswith(f"{in_one_line(name)} loops")
    assert not {"\x1b", "\u202e", "\u2066", "\x07"} & {*Path("x.html").read_text()}
