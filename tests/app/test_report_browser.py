"""Pages in a browser: reports, single results, and a text whose tokens are shaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from report_kit import BAD, WORSE, fill, spoil
from sample_results import sample_find_sinks

import sinkscope as ss
from sinkscope.app.pages import page, save_html
from sinkscope.sinks.first_token.positions import token_positions

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

    x, y = chrome.run(  # the first four bars are layers
        "{document.querySelector('.plot').scrollIntoView();"
        "const at = document.querySelectorAll('.plot .bars .point')[4].getBoundingClientRect();"
        "[at.x + at.width / 2, at.y + at.height / 2]}"
    )
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chrome.run("new Promise((done) => setTimeout(done, 300))")
    assert "412" in chrome.run("document.querySelector('.hoverlayer').textContent")

    chrome.open(path, 360, phone=True)
    assert chrome.run("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    chrome.open(save_html(sample_find_sinks(), tmp_path / "single.html"), 1400)
    assert chrome.run(DRAWN) == 1

    assert chrome.errors == []
    assert {address.partition(":")[0] for address in chrome.asked} <= {"file", "data", "blob"}


def test_the_page_of_positions_shades_the_text(tmp_path: Path, chrome: browser.Browser) -> None:
    found = token_positions(passage=f"one two, three {IMAGE}")
    file = tmp_path / "a.html"
    file.write_text(page(found))
    colours = "[...document.querySelectorAll('span.t')].map((s) => s.style.background)"
    chrome.open(file, 1200)
    text = chrome.run("[...document.querySelectorAll('span.t')].map((s) => s.textContent).join('')")
    assert text == f"<s>one two, three {IMAGE}"
    first = chrome.run(colours)
    assert first[0] == "rgba(0, 114, 178, 0.7)" and all("0, 114, 178, 0" in c for c in first[1:])
    chrome.run(
        "(() => { const i = document.querySelector('input[type=range]');"
        " i.value = 0; i.dispatchEvent(new Event('input')); })()"
    )
    assert chrome.run(colours)[0] != first[0]  # nothing stands out before the sink layer
    for value, colour in (("attention", "230, 159, 0"), ("0", "0, 158, 115")):
        chrome.run(
            f"(() => {{ const s = document.querySelector('select'); s.value = '{value}';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        assert colour in chrome.run(colours)[0]
    assert "position 0" in chrome.run("document.querySelector('span.t').title")
    assert chrome.errors == [] and all(url.startswith(("file:", "data:", "blob:")) for url in chrome.asked)
