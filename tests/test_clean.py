"""What is committed speaks to its users: nothing of the machine it was made on, no talk of the work on it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {  # a pattern, and words in small letters of which each meeting has one: searching for them is quick
    "a home folder": (
        ("/home/", "/users/", "/root/", "users\\"),
        r"/(?:home|Users)/(?!me\b|you\b|user\b)[a-z_][\w.-]*/|/root/"
        r"|[A-Z]:\\{1,2}Users\\{1,2}(?!\\|me\b)",
    ),
    "a place of work": (("/work/", "shared/"), r"(?<![\w.<-])/work/|(?<![\w/.])shared/|\.\./shared/"),
    "talk of the work": (("issue ",), r"(?i:issue) #|\b(?i:issue) [0-9A-E]\b"),
    "a registry": (
        ("pypi", "artifactory", "nexus", "mirror", "proxy", "/simple/", "index", "trusted-host", "file:///"),
        r"(?i)https?://[^\s/\"')>]*(?:pypi|artifactory|nexus|mirror|proxy)(?<!//pypi)|/simple/"
        r"|index-url|extra-index|trusted-host|file:///\w",
    ),
    "an address": (
        ("10.", "192.168.", "172."),
        r"(?<![\d.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\d.])",
    ),
}


def _hits(what: str, text: str, small: str) -> Iterator[re.Match[str]]:
    """Where a text, which is given in small letters as well, has what is forbidden."""
    words, pattern = FORBIDDEN[what]
    return re.finditer(pattern, text) if any(word in small for word in words) else iter(())


@cache
def committed() -> dict[str, tuple[str, str]]:
    """Text files of the checkout but this one, which holds what it forbids: content, as it is and in small letters."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [
        path
        for name in names.split("\0")
        if name and (path := ROOT / name).is_file() and path.name != Path(__file__).name
    ]
    content = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    texts = {name: data.decode("utf-8", "replace") for name, data in content.items() if b"\0" not in data[:8192]}
    return {name: (text, text.lower()) for name, text in texts.items()}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_of_where_it_was_made(what):
    found = [
        f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()[:80]!r}"
        for name, (text, small) in committed().items()
        for hit in _hits(what, text, small)
    ]
    assert not found, found[:20]


def test_no_name_of_this_machine():
    """As a word of its own, where it is long enough to be no ordinary word."""
    host = socket.gethostname()
    names = {name for name in (host, host.split(".")[0]) if len(name) > 4 and name != "localhost"}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    assert not [name for name, (text, _) in committed().items() if pattern.search(text)]
