"""The page of `sinkscope view` in a browser: what it shows, how it moves, and what a link opens again."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
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
from sinkscope.app.view.writing import generation_of
from sinkscope.display.result import Result
from sinkscope.sinks.first_token.circuit import Circuit

CLICK = "document.querySelector('{}').click()"
PICTURE = "document.querySelector('#rows').innerHTML"
SENTENCE = "document.querySelector('#sentence').textContent"
CELL = "document.querySelector('#cell').textContent"
LOADED = "!!document.querySelector('.token')"


@pytest.fixture(scope="module")
def bundled():
    """The model in the package, opened once."""
    return Explorer.open()


@pytest.fixture(scope="module")
def view(bundled):
    """The model in the package on a short text, with its circuit and a generation."""
    bundled.sink.circuit = Circuit.load(Path(__file__).parents[2] / "figures/circuit.json")
    text = "A class is a block. A block is a piece of text."
    return replace(bundled.view(text), generation=generation_of(bundled.sink.setup, 12))


@pytest.fixture(scope="module")
def chrome():
    if browser.found() is None:
        pytest.skip("needs chromium or Chrome on the PATH")
    with browser.Browser(seconds=240) as tab:
        yield tab


def press(chrome: browser.Browser, key: str):
    chrome.send("Input.dispatchKeyEvent", type="keyDown", key=key)


def opened(chrome: browser.Browser, page: Path, width: int, **how: bool):
    chrome.open(page, width, **how)
    until = time.monotonic() + 20
    while not chrome.run(LOADED):
        assert time.monotonic() < until
    chrome.run("new Promise((done) => setTimeout(done, 50))")


def test_a_result_comes_back_from_its_file_and_makes_the_same_page(view, tmp_path):
    view.save(tmp_path / "view.json")
    loaded = Result.load(tmp_path / "view.json")
    assert isinstance(loaded, ModelView)
    page = view_page(view, "bundled")
    assert view_page(loaded, "bundled") == page and len(page) < 5e6
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "") and "https:" not in page


def test_the_page_in_a_browser(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "</script><b>"), encoding="utf-8")
    chrome.errors.clear()
    for how in ({"width": 390, "phone": True}, {"width": 390, "dark": True}, {"width": 1400}):
        opened(chrome, page, **how)
        for tab in ("generation", "text"):
            chrome.run(CLICK.format(f"#tab-{tab}"))
            assert chrome.run("document.documentElement.scrollWidth <= innerWidth"), (how, tab)
    text = view.texts[0]
    assert chrome.run("document.querySelectorAll('.token').length") == len(text.tokens)
    assert chrome.run(SENTENCE) == text.variants[0].sentence

    before = chrome.run(PICTURE)  # a head shows its rows
    chrome.run(CLICK.format("#head-0-1"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    assert chrome.run(PICTURE) != before
    assert chrome.run("document.querySelector('#rows-title').textContent") == "Rows of L0.H1"
    place = text.heads.index((0, 1))
    strongest = text.variants[0].rows[place].array()[-1].max()
    assert f"gives {strongest:.0%} to" in chrome.run("document.querySelector('#rows-text').textContent")

    for number, variant in enumerate(text.variants):  # a switch changes the sentence, the tokens and the heads
        chrome.run(CLICK.format(f"#variant-{number}"))
        chrome.run("new Promise((done) => setTimeout(done, 100))")
        assert chrome.run(SENTENCE) == variant.sentence
        said = chrome.run("document.querySelector('#readout').textContent")
        assert f"norm {float(f'{variant.norm[view.layer, 0]:.4g}'):g} after" in said
        attention = variant.received.array()[2, 0, 0]
        assert chrome.run("document.querySelector('#head-2-0').title") == f"L2.H0: {round(100 * attention)}%"

    assert chrome.run("location.hash").endswith(f"head=L0.H1&model={text.variants[-1].name.replace(' ', '+')}")

    chrome.run("document.querySelector('#token-0').focus()")  # the keys reach everything
    for key, there in (("ArrowRight", "token-1"), ("End", f"token-{len(text.tokens) - 1}"), ("Home", "token-0")):
        press(chrome, key)
        assert chrome.run("document.activeElement.id") == there
    assert chrome.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    chrome.run(CLICK.format("#tab-generation"))
    assert chrome.run("[...document.querySelectorAll('.written')].length") == 2
    assert chrome.errors == [] and all(url.startswith(("file:", "blob:", "data:")) for url in chrome.asked)


@pytest.mark.slow
def test_the_page_says_which_heads_look_elsewhere_and_shows_both_rows(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    text = view.texts[0]
    intact, zeroed, random = text.variants[0], text.variants[1], text.variants[-1]
    assert "random" in random.name
    sink = text.spikes[0]
    readers = intact.received.array()[..., sink] > 0.3
    gone, control = [
        int((readers & (one.received.array()[..., sink] < intact.received.array()[..., sink] / 2)).sum())
        for one in (zeroed, random)
    ]
    assert gone > control  # the planted neurons make the sink
    opened(chrome, page, width=1400)
    headline = "document.querySelector('#headline').textContent"
    named = json.dumps(text.tokens[sink])
    assert chrome.run(headline).startswith(f"{readers.sum()} of {readers.size} heads give token {named} more than 30%")
    shown = "[...document.querySelectorAll('.pair figcaption')].map((one) => one.textContent)"
    assert chrome.run(shown) == ["intact"]
    chrome.run(CLICK.format("#variant-1"))
    chrome.run("new Promise((done) => setTimeout(done, 150))")
    before, after, beside = (json.dumps(one.following[0][0]) for one in (intact, zeroed, random))
    change = f"stays {before}" if before == after else f"changes from {before} to {after}"
    said = f"{gone} of the {readers.sum()} heads that read {named} look elsewhere ({random.name}: {control}); "
    said += f"the likeliest next token {change} ({random.name}: {beside})."
    assert chrome.run(headline) == said and chrome.run(shown) == ["intact", zeroed.name]

    head = text.heads[-1]  # the link opens the same view again, and the pointer reads a cell
    chrome.run(CLICK.format(f"#head-{head[0]}-{head[1]}"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    link = chrome.run("location.href")
    chrome.send("Page.navigate", url="about:blank")
    chrome.send("Page.navigate", url=link)
    while not chrome.run(LOADED):
        time.sleep(0.02)
    chrome.run("new Promise((done) => setTimeout(done, 200))")
    assert chrome.run(headline) == said
    assert chrome.run("document.querySelector('#rows-title').textContent") == f"Rows of L{head[0]}.H{head[1]}"
    frame = "document.querySelector('#rows-before .frame')"
    chrome.run(f"{frame}.scrollIntoView()")
    x, y = chrome.run(f"{{const at = {frame}.getBoundingClientRect();[at.left + 1, at.bottom - 2]}}")
    chrome.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    chrome.run("new Promise((done) => setTimeout(done, 50))")
    share = intact.rows[-1].array()[-1, 0]
    last = len(text.tokens) - 1
    cell = f"token {last}, {json.dumps(text.tokens[-1])}, gives {share:.0%} to token 0, {json.dumps(text.tokens[0])}"
    assert chrome.run(CELL) == cell
    chrome.run("document.querySelector('#rows-before').focus()")  # and so do the keys
    press(chrome, "ArrowUp")
    share = intact.rows[-1].array()[-2, 0]
    assert f"token {last - 1}, " in chrome.run(CELL) and f"gives {share:.0%} to token 0" in chrome.run(CELL)
    press(chrome, "Enter")
    assert chrome.run("document.querySelector('#colour').value") == "row"
    assert chrome.run(f"document.querySelector('#token-{last - 1}').classList.contains('chosen')")

    chrome.run("HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; }")
    for kind, begins in (("svg", "data:image/svg+xml,"), ("png", "data:image/png;base64,")):
        chrome.run(f"window.saved = null; {CLICK.format(f'#save-{kind}')}")
        while not chrome.run("window.saved"):
            time.sleep(0.02)
        name, data = chrome.run("window.saved")
        assert name == f"L{head[0]}.H{head[1]}.{kind}" and data.startswith(begins) and len(data) > 500
        if kind == "svg":
            saved = ElementTree.fromstring(unquote(data.removeprefix(begins)))
            words = [text.text for text in saved.iter("{http://www.w3.org/2000/svg}text")]
            assert "intact" in words and zeroed.name in words and words.count("token that is read") == 2
            assert "var(" not in data and len(list(saved.iter("{http://www.w3.org/2000/svg}path"))) > 1


def test_the_rows_are_drawn_cell_by_cell_on_axes_of_tokens(view, tmp_path, chrome):
    """The shade of every cell of the drawing is that of the attention, and ticks stand at their tokens."""
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    opened(chrome, page, width=1400)
    head = (1, 7)
    chrome.run(CLICK.format(f"#head-{head[0]}-{head[1]}"))
    chrome.run("new Promise((done) => setTimeout(done, 100))")
    text = view.texts[0]
    rows = text.variants[0].rows[text.heads.index(head)].array()
    drawn = np.zeros_like(rows)
    paths = "[...document.querySelectorAll('#rows .cells path')].map((one) => [one.getAttribute('fill-opacity'), "
    for shade, path in chrome.run(f"{paths}one.getAttribute('d')])"):
        for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)v1", path):
            drawn[int(row), int(column) : int(column) + int(run)] = float(shade)
    assert np.abs(drawn - np.sqrt(rows)).max() <= 0.5 / 24 + 1e-6 and drawn.any()
    places = (
        "[...document.querySelectorAll('#rows text[y=\"221\"]')].map((one) => [one.textContent, one.getAttribute('x')])"
    )
    for number, x in chrome.run(places):
        assert float(x) == pytest.approx(44 + 200 * (int(number) + 0.5) / len(rows))


@pytest.mark.slow
def test_two_texts_stand_side_by_side_and_the_link_opens_both(bundled, view, tmp_path, chrome):
    second = bundled.view("a function of a module").texts[0]
    page = tmp_path / "view.html"
    page.write_text(view_page(replace(view, texts=(*view.texts, second)), "x"), encoding="utf-8")
    opened(chrome, page, width=1400)
    beside = "document.querySelector('#beside')"
    choose = f"{beside}.value = '1'; {beside}.dispatchEvent(new Event('change'))"
    for _ in ("chosen", "opened by the link"):
        chrome.run(choose)
        chrome.run("new Promise((done) => setTimeout(done, 150))")
        assert chrome.run("document.querySelectorAll('.strip')[1].children.length") == len(second.tokens)
        captions = chrome.run("[...document.querySelectorAll('.pair figcaption')].map((one) => one.textContent)")
        assert captions == [f"intact: {view.texts[0].name}", f"intact: {second.name}"]
        last = len(second.tokens) - 1
        chrome.run(f"document.querySelector('#other-{last}').dispatchEvent(new Event('pointerenter'))")
        norm = float(f"{second.variants[0].norm[view.layer, last]:.4g}")
        assert f": norm {norm:g} after" in chrome.run("document.querySelector('#readout').textContent")
        link, choose = chrome.run("location.href"), "0"
        assert "beside=1" in link
        chrome.send("Page.navigate", url="about:blank")
        chrome.send("Page.navigate", url=link)
        while not chrome.run(LOADED):
            time.sleep(0.02)


def test_the_first_visit_begins_with_a_tour_that_the_keys_go_through_or_end(view, tmp_path, chrome):
    page = tmp_path / "view.html"
    page.write_text(view_page(view, "x"), encoding="utf-8")
    steps = "[...document.querySelectorAll('.tour p')].map((one) => one.textContent.slice(0, 6))"
    opened(chrome, page, width=390)
    chrome.run("localStorage.clear()")
    opened(chrome, page, width=390)
    for number in (1, 2, 3):
        assert chrome.run(steps) == [f"{number} of 3"]
        assert chrome.run("document.activeElement.closest('.tour') !== null")
        chrome.run("document.activeElement.click()")
    assert chrome.run(steps) == [] and chrome.run("document.activeElement.id") == "tour"
    opened(chrome, page, width=390)
    assert chrome.run(steps) == []  # once
    chrome.run(CLICK.format("#tour"))
    assert chrome.run(steps) == ["1 of 3"]
    press(chrome, "Escape")
    assert chrome.run(steps) == []


def test_the_live_page_in_a_browser(bundled, chrome):
    bundled.text = "A class is a block. A block is a piece of text."
    addresses = []
    threading.Thread(target=serve, args=(bundled, 0, addresses.append), daemon=True).start()
    until = time.monotonic() + 20
    while not addresses and time.monotonic() < until:
        time.sleep(0.01)
    chrome.errors.clear()
    chrome.send("Page.navigate", url=addresses[0])

    def wait(condition):
        end = time.monotonic() + 60
        while not chrome.run(f"!!({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    wait("document.querySelector('.part')")  # the circuit has come
    intact = chrome.run(SENTENCE)
    chrome.run("document.getElementById('off-L1.N338').click()")
    wait(f"{SENTENCE} !== {json.dumps(intact)}")
    assert chrome.run(SENTENCE).startswith("Without L1.N338: after layer 1, the norm changes most at token 0")
    chrome.run("document.getElementById('off-L1.N338').click()")
    wait(f"{SENTENCE} === {json.dumps(intact)}")
    chrome.run("document.querySelector('#other').value = 'l2.h0'; document.querySelector('form').requestSubmit()")
    wait(f"{SENTENCE}.startsWith('Without L2.H0: ')")  # the box takes a head, too
    chrome.run("document.getElementById('off-L2.H0').click()")
    wait(f"{SENTENCE} === {json.dumps(intact)}")
    chrome.run("document.querySelector('#typed').value = 'a function of a module'")
    chrome.run(CLICK.format("#read"))
    wait("[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))")
    chrome.run(CLICK.format("#tab-generation"))  # it fills itself
    wait("document.querySelectorAll('.written').length === 2")
    link = chrome.run("location.href")  # it says which text was typed
    chrome.send("Page.navigate", url="about:blank")
    chrome.send("Page.navigate", url=link)
    wait("[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))")
    assert chrome.errors == []
