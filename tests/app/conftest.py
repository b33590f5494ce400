"""What is opened once for the tests of pages, because that takes longer than to look at one."""

from __future__ import annotations

import browser
import pytest

from sinkscope.app.view.explorer import Explorer


@pytest.fixture(scope="module")
def bundled():
    """The model in the package."""
    return Explorer.open()


@pytest.fixture(scope="module")
def chrome():
    if browser.found() is None:
        pytest.skip("needs chromium or Chrome on the PATH")
    with browser.chromium() as tab:
        yield tab
