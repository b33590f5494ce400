"""Progress in a notebook: a kernel runs a cell, and its messages are read."""

from __future__ import annotations

import pytest

CODE = """
from types import SimpleNamespace
from sinkscope.results import console
now = 100.0
console.time = SimpleNamespace(monotonic=lambda: now)
with console.NotebookBar() as bar:
    for done in range(4):
        bar("reading <layers>", done, 4)
        now += 0.3
"""


@pytest.mark.timeout(120)
def test_a_notebook_shows_progress_and_clears_it():
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel()
    try:
        begun = client.execute(CODE)
        shown: list[tuple[str, str]] = []
        while True:
            message = client.get_iopub_msg(timeout=60)
            content = message["content"]
            if message["parent_header"].get("msg_id") == begun and "data" in content:
                shown.append((message["msg_type"], content["data"]["text/html"]))
            if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == begun:
                break
        first, further, last = shown  # twice a second
        assert first[0] == "display_data" and "reading &lt;layers&gt; 0/4" in first[1]
        assert further[0] == "update_display_data" and "reading &lt;layers&gt; 2/4" in further[1]
        assert last == ("update_display_data", "")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def test_outside_of_notebooks_nothing_is_shown(capsys):
    from sinkscope.results.console import NotebookBar

    with NotebookBar() as bar:
        bar("reading", 0, 4)
    assert capsys.readouterr() == ("", "")
