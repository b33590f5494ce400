"""A model hub on this machine: the part of the file API that huggingface_hub uses, served from folders.

``with hub(cache, {("org/name", "main"): folder}) as asked``: inside it huggingface_hub and transformers of this process
talk to the server, and `asked` lists the files whose content was asked for.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from huggingface_hub import close_session, constants

GATED = "org/gated"
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _answer(folders: Mapping[tuple[str, str], Path], path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body for a path."""
    match = _FILE.fullmatch(unquote(path))
    repo, revision, name = match.groups() if match else ("", "", "")
    if repo == GATED:
        return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
    revisions = {digest(f"{one} {of}".encode()): of for one, of in folders if one == repo}
    if not revisions:
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
    revision = revisions.get(revision, revision)  # it may be a commit
    if revision not in revisions.values():
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    head = {"X-Repo-Commit": digest(f"{repo} {revision}".encode())}
    file = folders[repo, revision] / name
    if not file.is_file():
        return 404, head | {"X-Error-Code": "EntryNotFound"}, b"{}"
    body = file.read_bytes()
    return 200, head | {"ETag": f'"{digest(body)}"'}, body


@contextmanager
def hub(
    cache: Path, folders: Mapping[tuple[str, str], Path], *, cut: str = "", reachable: bool = True
) -> Iterator[list[str]]:
    """Run a hub and point huggingface_hub, already imported or not, at it.

    Args:
        cache: Folder of the cache.
        folders: What is served, by repo and revision.
        cut: Name of a file of which the first bytes are sent alone.
        reachable: False: nothing listens at the address.
    """
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for the answer to its headers

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            status, headers, body = _answer(folders, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                name = self.path.rsplit("/", 1)[-1]
                asked.append(name)
                self.close_connection = name == cut
                self.wfile.write(body[:100] if name == cut else body)

        def log_message(self, *_args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_port}"
    if reachable:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    else:
        server.server_close()
    values = {  # what it read from its environment, once, at import
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(cache / "token"),
    }
    with mock.patch.multiple(constants, **values):
        close_session()  # a session of before keeps its connections
        try:
            yield asked
        finally:
            close_session()
            if reachable:
                server.shutdown()
                server.server_close()
