"""A model hub on this machine: the part of the file API that huggingface_hub uses, served from folders.

``with hub(cache) as server: server.add("org/name", folder)``: inside it huggingface_hub and transformers of this
process talk to the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

TOKEN = "hf_let_me_in"


@dataclass
class _Repo:
    revisions: dict[str, Path]
    gated: bool = False


@dataclass
class Hub:
    """What is served, what goes wrong, and what was asked.

    Attributes:
        log: (method, path) of each request, in order.
        breaks: file name -> lengths after which its next transfers break off, one for each GET; the last one stays.
        pauses: file name -> seconds before its content begins.
    """

    cache: Path
    url: str = ""
    log: list[tuple[str, str]] = field(default_factory=list)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)
    _repos: dict[str, _Repo] = field(default_factory=dict)

    def add(self, repo: str, folder: Path, *, revision: str = "main", gated: bool = False) -> str:
        """Serve `folder` as a revision of `repo` (datasets/org/name: of data); gated: only for `TOKEN`.

        Returns the commit.
        """
        entry = self._repos.setdefault(repo, _Repo({}))
        entry.gated = gated
        commit = hashlib.sha1(f"{repo} {revision}".encode(), usedforsecurity=False).hexdigest()
        entry.revisions[revision] = entry.revisions[commit] = folder
        return commit

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        paths = [path for method, path in self.log if method == "GET" and "/resolve/" in path]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in paths]

    def answer(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path, before ranges and breaks."""
        parts = [unquote(p) for p in urlsplit(path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        kind, parts = ("datasets/", parts[1:]) if parts[:1] == ["datasets"] else ("", parts)
        repo = self._repos.get(kind + "/".join(parts[:2]))
        if repo is None:
            return _error(401 if not token else 404, "RepoNotFound")
        if repo.gated and not api and token != f"Bearer {TOKEN}":
            return _error(403 if token else 401, "GatedRepo")
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in repo.revisions:
            return _error(404, "RevisionNotFound")
        folder = repo.revisions[revision]
        commit = next(c for c, f in repo.revisions.items() if f == folder and len(c) == 40)
        head = {"X-Repo-Commit": commit}
        files = sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())
        if api:
            name = "/".join(parts[:2])
            info = {"id": name, "modelId": name, "sha": commit, "tags": [], "private": False, "gated": repo.gated}
            info["siblings"] = [{"rfilename": f} for f in files]
            if parts[2:3] == ["tree"]:
                below = "/".join(parts[4:])
                listed = [f for f in files if not below or f.startswith(f"{below}/")]
                if below and not listed:
                    return _error(404, "EntryNotFound", head)
                info = [
                    {"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": _etag(folder / f)}
                    for f in listed
                ]
            return 200, head | {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = "/".join(parts[4:])
        if parts[2:3] != ["resolve"] or name not in files:
            return _error(404, "EntryNotFound", head)
        return 200, head | {"ETag": f'"{_etag(folder / name)}"', "Accept-Ranges": "bytes"}, (folder / name).read_bytes()


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _error(status: int, code: str, head: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    return status, {**(head or {}), "X-Error-Code": code, "X-Error-Message": code}, b"{}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the answer to its headers
    hub: Hub

    def do_HEAD(self):
        self._send(body_too=False)

    def do_GET(self):
        self._send(body_too=True)

    def _send(self, body_too: bool):
        self.hub.log.append((self.command, self.path))
        status, headers, body = self.hub.answer(self.path, self.headers.get("Authorization", ""))
        wanted = self.headers.get("Range")
        if wanted and status == 200 and body_too:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[start:]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body_too:
            return
        name = self.path.rsplit("/", 1)[-1]
        threading.Event().wait(self.hub.pauses.get(name, 0))  # tests replace time.sleep
        lengths = self.hub.breaks.get(name)
        if not lengths:
            self.wfile.write(body)
            return
        self.wfile.write(body[: lengths[0] if len(lengths) == 1 else lengths.pop(0)])
        self.close_connection = True

    def log_message(self, *_args):
        """Silent."""


@contextmanager
def hub(cache: Path, *, reachable: bool = True, offline: bool = False, token: str | None = None) -> Iterator[Hub]:
    """Run a hub and point huggingface_hub, already imported or not, at it; `cache` is HF_HOME.

    Args:
        cache: folder of the cache.
        reachable: False: nothing listens at the address.
        offline: as HF_HUB_OFFLINE=1.
        token: as HF_TOKEN.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    state = Hub(cache, f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("_Bound", (_Handler,), {"hub": state})
    server.daemon_threads = True
    if reachable:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    else:
        server.server_close()
    try:
        with _pointed_at(state.url, cache, offline, token):
            yield state
    finally:
        if reachable:
            server.shutdown()
            server.server_close()


@contextmanager
def _pointed_at(url: str, cache: Path, offline: bool, token: str | None) -> Iterator[None]:
    """huggingface_hub reads its environment once, at import; what it read is set here, and restored."""
    from huggingface_hub import close_session, constants, hf_api

    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_TOKEN_PATH": str(cache / "token"),
    }
    with mock.patch.multiple(constants, **values), mock.patch.object(hf_api.api, "endpoint", url):
        with mock.patch.dict(os.environ, {"HF_TOKEN": token} if token else {}):
            if not token:
                os.environ.pop("HF_TOKEN", None)
            close_session()  # a session of before keeps its mode (offline or not) and connections
            try:
                yield
            finally:
                close_session()
