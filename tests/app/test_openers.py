"""What a user names is opened by one opener: regular files and links to them are read; nothing waits or has no end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkscope.files.plain import in_one_line

pytestmark = [pytest.mark.few_texts, pytest.mark.timeout(60)]

COMMANDS = (
    "find-sinks --text {}",
    "generate --prompt-file {}",
    "generate hi --patch {}",
    "patch --file {}",
    "loops {}",
    "loops --follow {}",
    "why-loop --prompt-file {}",
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
ENDLESS = ("/dev/zero", "/dev/tty", "/dev/random", "/dev/stdin")


def pipe(place: Path) -> str:
    os.mkfifo(place)
    return str(place)


def link_to_pipe(place: Path) -> str:
    os.mkfifo(place.with_name(f"{place.name}.pipe"))
    place.symlink_to(f"{place.name}.pipe")
    return str(place)


def link_to_itself(place: Path) -> str:
    place.symlink_to(place.name)
    return str(place)


def link_to_a_device(place: Path) -> str:
    place.symlink_to("/dev/zero")
    return str(place)


def folder(place: Path) -> str:
    place.mkdir()
    return str(place)


def read_of_a_process(place: Path) -> str:
    """As a shell names the output of a process: `<(command)`; nobody writes to it."""
    reading, _writing = os.pipe()
    return f"/dev/fd/{reading}"


KINDS: dict[str, Callable[[Path], str]] = {
    "pipe": pipe,
    "link to a pipe": link_to_pipe,
    "link to itself": link_to_itself,
    "link to a device": link_to_a_device,
    "folder": folder,
    "output of a process": read_of_a_process,
    "device": lambda place: "/dev/zero",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_waits_or_has_no_end_is_opened(command, kind, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("hello world, this is a text.\n" * 40)
    name = KINDS[kind](tmp_path / "given")
    said = refusal(command.format(name))
    assert len(said) < 600


@pytest.mark.parametrize("name", ENDLESS)
def test_a_device_is_named_as_one(name, monkeypatch, tmp_path, refusal):
    if not Path(name).exists():
        pytest.skip("this machine has no such device")
    monkeypatch.chdir(tmp_path)
    assert refusal(f"generate --prompt-file {name}").startswith(f"cannot read {Path(name).name}: ")


@pytest.mark.parametrize("through", ["a file", "a link", "a link to a link"])
def test_a_regular_file_is_read_through_links(through, monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)
    Path("real.jsonl").write_text(json.dumps({"text": "one two three four five"}) + "\n")
    Path("a link").symlink_to("real.jsonl")
    Path("a link to a link").symlink_to("a link")
    Path("a file").write_text(Path("real.jsonl").read_text())
    typed(["loops", through], 0)


def test_a_file_beyond_the_bound_is_refused(monkeypatch, tmp_path, refusal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sinkscope.files.output.MOST", 1 << 20)
    with open("sparse.txt", "wb") as file:
        file.truncate(5 << 20)
    assert "longer than" in refusal("find-sinks --text sparse.txt")


@pytest.mark.parametrize("name", ["a\nb.txt", "a\r\tb.txt", "a\x1b[2Jb.txt", "a\u202eb.txt"])
def test_a_name_is_printed_in_one_line(name, monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("hello world " * 60)
    out, err = typed(["loops", name], 3)
    shown = in_one_line(name)
    assert f"Conclusion: {shown} loops" in out
    assert name not in out + err
