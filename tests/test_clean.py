"""What is committed speaks to its users: nothing of the machine it was made on, no talk of the work on it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

FORBIDDEN = {
    "a home folder": r"/(?:home|Users)/(?!me\b|you\b|user\b)[a-z_][\w.-]*/|/root/|[A-Z]:\\{1,2}Users\\{1,2}(?!\\|me\b)",
    "a place of work": r"(?<![\w.<-])/work/|(?<![\w/.])shared/|\.\./shared/",
    "talk of the work": r"(?i:issue) #|\b(?i:issue) [0-9A-E]\b",
    "a registry": r"(?i)https?://[^\s/\"')>]*(?:pypi|artifactory|nexus|mirror|proxy)(?<!//pypi)|/simple/"
    r"|index-url|extra-index|trusted-host|file:///\w",
    "an address": r"(?<![\d.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\d.])",
}


@cache
def committed() -> dict[str, str]:
    """Text files of the checkout but this one, which holds what it forbids."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in names.split("\0") if name]
    content = {str(path): path.read_bytes() for path in paths if path.is_file() and path != Path(__file__)}
    return {name: data.decode("utf-8", "replace") for name, data in content.items() if b"\0" not in data[:8192]}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_files_name_no_machine_or_session(what):
    found = []
    for name, text in committed().items():
        for hit in re.finditer(FORBIDDEN[what], text):
            found.append(f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()[:80]!r}")
    assert not found, found[:20]


def test_no_name_of_this_machine():
    """As a word of its own, where it is long enough to be no ordinary word."""
    host = socket.gethostname()
    names = {name for name in (host, host.split(".")[0]) if len(name) > 4 and name != "localhost"}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    assert not [name for name, text in committed().items() if pattern.search(text)]
