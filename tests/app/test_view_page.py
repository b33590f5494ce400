"""The page of `sinkscope view` in a browser: what it shows, how it moves, and what a link opens again."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import browser
import numpy as np
import pytest

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page
from sinkscope.app.view.result import ModelView
from sinkscope.app.view.server import serve
from sinkscope.results.result import Result
from sinkscope.sinks.circuit.circuit import Circuit

TEXT = "A class is a block. A block is a piece of text."
LOADED = "document.querySelector('.token')"
CAPTIONS = ".pair figcaption"


@pytest.fixture(scope="module")
def bundled():
    """The model in the package, opened once."""
    return Explorer.open()


@pytest.fixture(scope="module")
def view(bundled):
    """The model in the package on a short text, with its circuit."""
    bundled.sink.circuit = Circuit.load(Path(__file__).parents[2] / "figures/circuit.json")
    return bundled.view(TEXT)


@pytest.fixture(scope="module")
def chrome():
    if browser.found() is None:
        pytest.skip("needs chromium or Chrome on the PATH")
    with browser.Browser(seconds=240) as tab:
        yield tab


@pytest.fixture
def opened(view, tmp_path, chrome):
    """Open the page in a window of some width; its errors are those since."""
    chrome.errors.clear()
    page = tmp_path / "view.html"

    def opening(width: int = 1400, shown: ModelView = view, **how: bool):
        page.write_text(view_page(shown, "</script><b>"), encoding="utf-8")
        chrome.open(page, width, **how)
        chrome.wait(LOADED)
        return chrome

    return opening


def test_a_result_comes_back_from_its_file_and_makes_the_same_page(view, tmp_path):
    view.save(tmp_path / "view.json")
    loaded = Result.load(tmp_path / "view.json")
    assert isinstance(loaded, ModelView)
    page = view_page(view, "bundled")
    assert view_page(loaded, "bundled") == page and len(page) < 5e6
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "") and "https:" not in page


def test_the_page_in_a_browser(view, opened):
    for how in ({"width": 390, "phone": True}, {"width": 390, "dark": True}, {"width": 1400}):
        chrome = opened(**how)
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth"), how
    text = view.texts[0]
    assert len(chrome.texts(".token")) == len(text.tokens)

    before = chrome.run("document.querySelector('#rows').innerHTML")  # a head shows its rows
    chrome.click("#head-0-1")
    assert chrome.run("document.querySelector('#rows').innerHTML") != before
    assert chrome.text("#rows-title") == "Rows of L0.H1"
    strongest = text.variants[0].rows[text.heads.index((0, 1))].array()[-1].max()
    assert f"gives {strongest:.0%} to" in chrome.text("#rows-text")

    for number, variant in enumerate(text.variants):  # a switch changes the sentence, the tokens and the heads
        chrome.click(f"#variant-{number}")
        assert chrome.text("#sentence") == variant.sentence
        assert f"norm {float(f'{variant.norm[view.layer, 0]:.4g}'):g} after" in chrome.text("#readout")
        attention = variant.received.array()[2, 0, 0]
        assert chrome.run("document.querySelector('#head-2-0').title") == f"L2.H0: {round(100 * attention)}%"
    assert chrome.run("location.hash").endswith(f"head=L0.H1&model={text.variants[-1].name.replace(' ', '+')}")

    chrome.run("document.querySelector('#token-0').focus()")  # the keys reach everything
    for key, there in (("ArrowRight", "token-1"), ("End", f"token-{len(text.tokens) - 1}"), ("Home", "token-0")):
        chrome.press(key)
        assert chrome.run("document.activeElement.id") == there
    assert len(chrome.texts('.token[tabindex="0"]')) == 1
    assert chrome.errors == [] and all(url.startswith(("file:", "blob:", "data:")) for url in chrome.asked)


@pytest.mark.slow
def test_the_page_says_which_heads_look_elsewhere_and_saves_both_rows(view, opened):
    text = view.texts[0]
    intact, zeroed, random = text.variants[0], text.variants[1], text.variants[-1]
    sink = text.spikes[0]
    share, *others = (one.received.array()[..., sink] for one in (intact, zeroed, random))
    readers = share > 0.3
    gone, control = (int((readers & (other < share / 2)).sum()) for other in others)
    assert gone > control and "random" in random.name  # the planted neurons make the sink
    chrome = opened()
    named = json.dumps(text.tokens[sink])
    assert chrome.text("#headline").startswith(f"{readers.sum()} of {readers.size} heads give token {named} more than")
    chrome.click("#variant-1")
    said = f"{gone} of the {readers.sum()} heads that read {named} look elsewhere ({random.name}: {control}); "
    layer, head = text.heads[-1]
    chrome.click(f"#head-{layer}-{head}")
    chrome.reopen()  # the link opens the same view again
    chrome.wait(LOADED)
    chrome.wait(f"document.querySelector('#headline').textContent.startsWith({json.dumps(said)})")
    assert chrome.texts(CAPTIONS) == ["intact", zeroed.name]
    chrome.run("document.querySelector('#rows-before').focus()")
    chrome.press("ArrowUp")
    rows, last = intact.rows[-1].array()[:, 0], len(text.tokens) - 1
    cell = chrome.text("#cell")
    assert cell.startswith(f"token {last - 1}, ") and f"gives {rows[-2]:.0%} to token 0" in cell
    chrome.run("HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }")
    for kind, begins in (("svg", "data:image/svg+xml,"), ("png", "data:image/png;base64,")):
        chrome.run("window.saved = null")
        chrome.click(f"#save-{kind}")
        chrome.wait("window.saved")
        name, data = chrome.run("window.saved")
        assert name == f"L{layer}.H{head}.{kind}" and data.startswith(begins) and len(data) > 500
        if kind == "svg":
            picture = ElementTree.fromstring(unquote(data.removeprefix(begins)))
            words = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
            assert {"intact", zeroed.name} <= {*words} and "var(" not in data


def test_the_rows_are_drawn_cell_by_cell_on_axes_of_tokens(view, opened):
    """The shade of every cell of the drawing is that of the attention, and ticks stand at their tokens."""
    chrome = opened()
    chrome.click("#head-1-7")
    text = view.texts[0]
    rows = text.variants[0].rows[text.heads.index((1, 7))].array()
    drawn = np.zeros_like(rows)
    paths = "[...document.querySelectorAll('#rows .cells path')].map((one) => [one.getAttribute('fill-opacity'), "
    for shade, path in chrome.run(f"{paths}one.getAttribute('d')])"):
        for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)v1", path):
            drawn[int(row), int(column) : int(column) + int(run)] = float(shade)
    assert np.abs(drawn - np.sqrt(rows)).max() <= 0.5 / 24 + 1e-6 and drawn.any()
    ticks = "[...document.querySelectorAll('#rows text[y=\"221\"]')]"
    for number, x in chrome.run(f"{ticks}.map((one) => [one.textContent, one.getAttribute('x')])"):
        assert float(x) == pytest.approx(44 + 200 * (int(number) + 0.5) / len(rows))


def test_the_live_page_in_a_browser(bundled, chrome):
    bundled.text = TEXT
    addresses = []
    threading.Thread(target=serve, args=(bundled, 0, addresses.append), daemon=True).start()
    while not addresses:
        time.sleep(0.01)
    chrome.errors.clear()
    chrome.open(addresses[0])
    chrome.wait("document.querySelector('.part')")  # the circuit has come
    intact = chrome.text("#sentence")

    def said(beginning: str):
        chrome.wait(f"document.querySelector('#sentence').textContent.startsWith({json.dumps(beginning)})")

    chrome.click("#off-L1\\.N338")
    said("Without L1.N338: after layer 1, the norm changes most at token 0")
    chrome.click("#off-L1\\.N338")
    said(intact)
    chrome.run("document.querySelector('#other').value = 'l2.h0'; document.querySelector('form').requestSubmit()")
    said("Without L2.H0: ")  # the box takes a head, too
    chrome.click("#off-L2\\.H0")
    said(intact)
    chrome.run("document.querySelector('#typed').value = 'a function of a module'")
    chrome.click("#read")
    typed = "[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))"
    chrome.wait(typed)
    chrome.reopen()  # the link says which text was typed
    chrome.wait(typed)
    assert chrome.errors == []
