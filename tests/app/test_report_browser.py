"""Pages in a browser: reports, single results, and a text whose tokens are shaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from report_kit import BAD, WORSE, fill, spoil
from sample_results import sample_find_sinks

import sinkscope as ss
from sinkscope.app.pages import save_html

IMAGE = "<img src=x onerror=alert(1)>"

DRAWN = """(async () => {
  for (const box of document.querySelectorAll('.plot')) {
    box.scrollIntoView();
    for (let i = 0; i < 400 && !box.querySelector('svg .xtick'); i++) await new Promise((r) => setTimeout(r, 25));
  }
  return [...document.querySelectorAll('.plot')].filter((box) => box.querySelector('svg .xtick')).length;
})()"""


pytestmark = pytest.mark.skipif(browser.found() is None, reason="needs chromium or Chrome on the PATH")


@pytest.fixture(scope="module")
def chrome() -> Iterator[browser.Browser]:
    """Started once, because that takes longer than to look at a page."""
    with browser.Browser(seconds=240) as tab:
        yield tab


@pytest.fixture(autouse=True)
def _looks_afresh(chrome: browser.Browser) -> None:
    chrome.errors.clear()
    chrome.asked.clear()


def test_in_a_browser(tmp_path: Path, chrome: browser.Browser) -> None:
    folder = tmp_path / "results"
    fill(folder, WORSE)
    spoil(folder)
    path = ss.report(folder).path
    chrome.open(path, 1400)
    assert chrome.run(DRAWN) == chrome.run("document.querySelectorAll('.plot').length") == 5
    assert chrome.run("document.documentElement.scrollWidth <= innerWidth")

    # markup is read, in the page and in a figure, and made nothing
    assert BAD in chrome.run("document.body.innerText")
    assert BAD in chrome.run("[...document.querySelectorAll('svg .gtitle')].map((t) => t.textContent).join()")
    assert chrome.run("document.querySelectorAll('[onerror], img:not([src^=data])').length") == 0

    # hover (the first four bars are layers), search and order
    x, y = chrome.run(
        "{document.querySelector('.plot').scrollIntoView();"
        "const at = document.querySelectorAll('.plot .bars .point')[4].getBoundingClientRect();"
        "[at.x + at.width / 2, at.y + at.height / 2]}"
    )
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chrome.run("new Promise((done) => setTimeout(done, 300))")
    assert "412" in chrome.run("document.querySelector('.hoverlayer').textContent")
    table = "document.querySelector('main .tools + table')"
    assert chrome.run(f"{table}.tBodies[0].rows.length") == 12
    chrome.run(f"{table}.previousSibling.querySelector('button').click()")
    assert chrome.run(f"{table}.tBodies[0].rows.length") == 30
    chrome.run(
        f"{{const find = {table}.previousSibling.querySelector('input');"
        "find.value = '905'; find.dispatchEvent(new Event('input'));}"
    )
    assert chrome.run(f"{table}.tBodies[0].rows.length") == 10
    chrome.run(
        f"{{const find = {table}.previousSibling.querySelector('input');"
        f"find.value = ''; find.dispatchEvent(new Event('input'));}}"
    )
    heads = chrome.run(f"[...{table}.tHead.rows[0].cells].map((cell) => cell.textContent)")
    at = next(i for i, head in enumerate(heads) if head.startswith("contribution"))
    chrome.run(f"{table}.tHead.rows[0].cells[{at}].focus()")
    for kind in ("keyDown", "keyUp"):
        chrome.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)
    norms = chrome.run(f"[...{table}.tBodies[0].rows].map((row) => Number(row.cells[{at}].textContent))")
    assert norms == sorted(norms) and norms[0] == 4.0

    # the reader's machine turns dark
    light = chrome.run("getComputedStyle(document.querySelector('svg .gtitle')).fill")
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    chrome.send("Emulation.setEmulatedMedia", features=[dark])
    chrome.run("new Promise((done) => setTimeout(done, 500))")
    assert chrome.run("getComputedStyle(document.querySelector('svg .gtitle')).fill") != light
    assert chrome.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"

    chrome.open(path, 360, phone=True)
    assert chrome.run(DRAWN) == 5
    assert chrome.run("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]

    # a single page, wide with plotly.js inside and narrow with it beside, and everything reached with the tab key
    for name, beside, width in (("inside", False, 1400), ("beside", True, 390)):
        single = save_html(sample_find_sinks(), tmp_path / f"{name}.html", assets=beside)
        chrome.open(single, width, phone=width < 1000)
        assert chrome.run(DRAWN) == 1
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth")
    wanted = chrome.run("document.querySelectorAll('.plot, th, summary').length")
    reached = 0
    for _ in range(60):
        chrome.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached += chrome.run("document.activeElement.matches('.plot, th, summary')")
    assert reached >= wanted > 5

    assert chrome.errors == []
    assert {address.partition(":")[0] for address in chrome.asked} <= {"file", "data", "blob"}
    files = {address.rpartition("/")[2] for address in chrome.asked if address.startswith("file")}
    assert files == {"report.html", "inside.html", "beside.html", next(tmp_path.glob("plotly-*.js")).name}
