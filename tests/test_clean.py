"""What is committed speaks to its users: nothing of the machine it was made on, no talk of the work on it."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

HOST = socket.gethostname().partition(".")[0]
FORBIDDEN = {
    "a home folder": r"/(?:home|Users)/(?!me\b|you\b|user\b)[a-z_][\w.-]*/|/root/|[A-Z]:\\{1,2}Users\\{1,2}(?!\\|me\b)",
    "a place of work": r"(?<![\w.<-])/work/|(?<![\w/.])shared/|\.\./shared/",
    "talk of the work": r"(?i:issue) #|\b(?i:issue) [0-9A-E]\b",
    "a registry": r"(?i)https?://[^\s/\"')>]*(?:pypi|artifactory|nexus|mirror|proxy)(?<!//pypi)|/simple/"
    r"|index-url|extra-index|trusted-host|file:///\w",
    "an address": r"(?<![\d.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\d.])",
    "this machine": rf"\b{re.escape(HOST)}\b" if len(HOST) > 4 and HOST != "localhost" else "(?!)",  # else a word
}


def test_files_name_no_machine_or_session():
    """Text files of the checkout but this one, which holds what it forbids."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    found = []
    for path in (ROOT / name for name in names.split("\0") if name):
        data = path.read_bytes() if path.is_file() and path != Path(__file__) else b""
        if b"\0" not in data[:8192]:
            for what, pattern in FORBIDDEN.items():
                found += [
                    f"{path}: {what}: {hit[0][:80]!r}" for hit in re.finditer(pattern, data.decode("utf-8", "replace"))
                ]
    assert not found, found[:20]
