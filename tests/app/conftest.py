"""What takes longer to open or to scan than to look at: it is made once."""

from __future__ import annotations

from pathlib import Path

import browser
import pytest


@pytest.fixture(scope="session")
def bundled():
    """The model in the package."""
    from sinkscope.app.view.explorer import Explorer  # not before shapes are checked

    return Explorer.open()


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


@pytest.fixture(scope="session")
def alone(model, tmp_path_factory) -> Path:
    """A folder with the scan of the model, of few parts."""
    from scan_kit import few_parts

    from sinkscope.app.scan import scan

    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        few_parts(patch)
        scan(model, out=folder / model.name, quick=True)
    return folder
