"""A model hub on this machine: the part of the file API that huggingface_hub uses, served from folders.

``with hub(cache) as server: server.add("org/name", folder)``: inside it huggingface_hub and transformers of this
process talk to the server.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

TOKEN = "hf_let_me_in"
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """What is served, what goes wrong, and what was asked.

    Attributes:
        url: address.
        log: (method, path) of each request, in order.
        breaks: file name -> lengths after which its next transfers break off, one for each GET; the last one stays.
        folders: (repo, revision or commit) -> commit and folder.
        gated: repos that are only for `TOKEN`.
    """

    url: str
    log: list[tuple[str, str]] = field(default_factory=list)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    folders: dict[tuple[str, str], tuple[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)

    def add(self, repo: str, folder: Path, *, revision: str = "main", gated: bool = False) -> str:
        """Serve `folder` as a revision of `repo`. Returns the commit."""
        commit = digest(f"{repo} {revision}".encode())
        self.folders[repo, revision] = self.folders[repo, commit] = commit, folder
        if gated:
            self.gated.add(repo)
        return commit

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        matches = [FILE.fullmatch(path) for method, path in self.log if method == "GET"]
        return [match[3] for match in matches if match]

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path, before breaks."""
        match = FILE.fullmatch(unquote(path))
        repo, revision, name = match.groups() if match else ("", "", "")
        if not any(repo == other for other, _ in self.folders):
            return 404 if token else 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated and token != f"Bearer {TOKEN}":
            return 403 if token else 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        if (repo, revision) not in self.folders:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit, folder = self.folders[repo, revision]
        head = {"X-Repo-Commit": commit}
        if not (folder / name).is_file():
            return 404, head | {"X-Error-Code": "EntryNotFound"}, b"{}"
        body = (folder / name).read_bytes()
        return 200, head | {"ETag": f'"{digest(body)}"'}, body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the answer to its headers
    hub: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.hub.log.append((self.command, self.path))
        status, headers, body = self.hub.answer(self.path, self.headers.get("Authorization", ""))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        name = self.path.rsplit("/", 1)[-1]
        lengths = self.hub.breaks.get(name)
        if lengths:
            body = body[: lengths[0] if len(lengths) == 1 else lengths.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, *_args):
        """Silent."""


@contextmanager
def hub(cache: Path, *, reachable: bool = True, offline: bool = False, token: str | None = None) -> Iterator[Hub]:
    """Run a hub and point huggingface_hub, already imported or not, at it.

    Args:
        cache: folder of the cache.
        reachable: False: nothing listens at the address.
        offline: as HF_HUB_OFFLINE=1.
        token: as HF_TOKEN.
    """
    from huggingface_hub import close_session, constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    state = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("_Bound", (_Handler,), {"hub": state})
    server.daemon_threads = True
    if reachable:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    else:
        server.server_close()
    values = {  # what it read from its environment, once, at import
        "ENDPOINT": state.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": state.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(cache / "token"),
    }
    with mock.patch.multiple(constants, **values), mock.patch.dict(os.environ, {"HF_TOKEN": token or ""}):
        close_session()  # a session of before keeps its mode (offline or not) and connections
        try:
            yield state
        finally:
            close_session()
            if reachable:
                server.shutdown()
                server.server_close()
