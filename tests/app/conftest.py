"""What takes longer to open or to scan than to look at: it is made once."""

from __future__ import annotations

from pathlib import Path

import browser
import pytest


@pytest.fixture(scope="session")
def bundled():
    """The model in the package."""
    from sinkscope.app.view.explorer import Explorer  # not before shapes are checked

    return Explorer.showing(None, None)


@pytest.fixture(scope="session")
def chrome():
    if browser.found() is None:
        pytest.skip("needs chromium or Chrome on the PATH")
    with browser.chromium() as tab:
        yield tab


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small model with a known sink."""
    from organisms import organism

    return Path(organism("llama", 2).save(tmp_path_factory.mktemp("models") / "llama"))
