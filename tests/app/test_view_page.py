"""The page of `sinkscope view` in a browser: what it shows, how it moves, and what a link opens again."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pytest

from sinkscope.app.view.page import view_page
from sinkscope.app.view.result import CircuitPart, ModelView
from sinkscope.app.view.server import serve
from sinkscope.app.view.writing import writings
from sinkscope.results.result import Result

TEXT = "A class is a block. A block is a piece of text."
LOADED = "document.querySelector('.token')"
CAPTIONS = ".pair figcaption"


@pytest.fixture(scope="module")
def view(bundled):
    """The model in the package on a short text, and what it writes."""
    return replace(bundled.view(TEXT), generation=writings(bundled.sink.setup))


@pytest.fixture
def opened(view, tmp_path, chrome):
    """Open the page in a window of some width; its errors are those since."""
    chrome.errors.clear()
    page = tmp_path / "view.html"

    def opening(width: int = 1400, shown: ModelView = view, **how: bool):
        page.write_text(view_page(shown, "</script><b>"))
        chrome.open(page, width, **how)
        chrome.wait(LOADED)
        return chrome

    return opening


def test_the_heads_that_read_each_place_stand_apart_and_many_are_folded(view, opened):
    """A head that reads two places is counted in each, and in no sum."""
    heads = tuple(CircuitPart(f"L{n // 8}.H{n % 8}", share=0.9) for n in range(20))
    first = replace(view.circuit[0], marks=(), readers=heads)
    second = replace(first, place="'.'", readers=heads[:3])
    chrome = opened(shown=replace(view, circuit=(first, second)))
    assert chrome.texts(".circuit h3") == ["Spike at the first token", "Spike at '.'"]
    steps = chrome.texts(".circuit .step > p")
    assert [step.partition(";")[0] for step in steps if " read " in step] == [
        "The 20 heads that read the first token",
        "The 3 heads that read '.'",
    ]
    assert chrome.texts(".circuit summary") == ["8 more"]
    ids = chrome.run("[...document.querySelectorAll('.circuit .part')].map((part) => part.id)")
    assert len(ids) == len(set(ids)) >= 23
    names = chrome.run("[...document.querySelectorAll('.circuit .part')].map((part) => part.firstChild.textContent)")
    assert [names.count(part.name) for part in heads] == [2] * 3 + [1] * 17
    chrome.click("#variant-1")
    chrome.click("#tab-generation")  # a page holds what the intact model writes, and does not show it as another's
    assert chrome.text("#panel-generation") == "This page holds only what the intact model writes."
    chrome.click("#variant-0")
    assert len(chrome.texts(".written")) == 2


def test_the_circuit_has_of_each_spike_what_the_results_say(bundled, view, opened):
    chrome = opened()
    for spike, found in zip(view.circuit, bundled.sink.circuit.spikes, strict=True):
        assert (spike.place, spike.layers, spike.peak) == (found.place.words, found.layers, found.peak)
        assert [part.left for part in spike.marks] == [mark.left for mark in found.marks]
        shares = {str(one.address): one.share for one in found.neurons}
        assert spike.writers and all(part.share == shares[part.name] for part in spike.writers)
        assert {str(one) for one in found.needed.neurons} <= {part.name for part in spike.writers}
        assert len({part.name for part in spike.readers}) == len(spike.readers) == found.heads > 0
    parts = chrome.run("[...document.querySelectorAll('.circuit .part')].map((part) => part.firstChild.textContent)")
    shown = [(*one.marks, *one.writers, CircuitPart("spike"), *one.readers) for one in view.circuit]
    assert parts == [part.name for some in shown for part in some]
    chrome.run("document.querySelector('#part-0-2-spike').click()")
    click = "[...document.querySelectorAll('.part')].find((part) => part.firstChild.textContent === 'spike').click()"
    chrome.run(click)


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
        for tab in ("generation", "text"):
            chrome.click(f"#tab-{tab}")
            assert chrome.run("document.documentElement.scrollWidth <= innerWidth"), (how, tab)
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
    chrome.click("#variant-0")
    chrome.click("#tab-generation")
    plain, guarded = chrome.texts(".written")
    assert "copies taken back" in guarded and "copies taken back" not in plain
    assert chrome.errors == [] and all(url.startswith(("file:", "blob:", "data:")) for url in chrome.asked)


@pytest.mark.slow
def test_the_page_says_which_heads_look_elsewhere_and_shows_both_rows(view, opened):
    text = view.texts[0]
    intact, zeroed, random = text.variants[0], text.variants[1], text.variants[-1]
    sink = text.spikes[0]
    share, *others = (one.received.array()[..., sink] for one in (intact, zeroed, random))
    readers = share > 0.3
    gone, control = (int((readers & (other < share / 2)).sum()) for other in others)
    assert gone > control and "random" in random.name  # the planted neurons make the sink
    chrome = opened()
    assert chrome.text("#headline").startswith(f"{readers.sum()} of {readers.size} heads give the attention sink")
    assert chrome.texts(CAPTIONS) == ["intact"]
    chrome.click("#variant-1")
    layer, head = text.heads[-1]
    chrome.click(f"#head-{layer}-{head}")
    chrome.reopen()  # the link opens the same view again, and the pointer reads a cell
    chrome.wait("document.querySelector('#headline')?.textContent.includes('look elsewhere')")
    said = chrome.text("#headline")
    assert f"{gone} of the {readers.sum()} heads" in said and f"({random.name}: {control})" in said
    after, beside = (json.dumps(one.following[0][0]) for one in (zeroed, random))
    assert "the likeliest next token" in said and f"{after} ({random.name}: {beside})." in said
    assert chrome.text("#rows-title") == f"Rows of L{layer}.H{head}"
    assert chrome.texts(CAPTIONS) == ["intact", zeroed.name]
    rows, last = intact.rows[-1].array()[:, 0], len(text.tokens) - 1
    chrome.run("document.querySelector('#rows-before').focus()")  # the keys read cells
    chrome.press("ArrowUp")
    cell = chrome.text("#cell")
    assert cell.startswith(f"token {last - 1}, ") and f"gives {rows[-2]:.0%} to token 0" in cell
    chrome.run("HTMLAnchorElement.prototype.click = function () { window.saved = this.href; }")
    chrome.click("#save-svg")
    chrome.wait("window.saved")
    picture = unquote(chrome.run("window.saved").removeprefix("data:image/svg+xml,"))
    assert picture.startswith("<svg") and all(f">{word}</text>" in picture for word in ("intact", zeroed.name))


def test_the_rows_are_drawn_cell_by_cell(view, opened):
    """The shade of every cell of the drawing is that of the attention."""
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


@pytest.mark.slow
def test_two_texts_stand_side_by_side_and_the_link_opens_both(bundled, view, opened):
    second = bundled.view("a function of a module").texts[0]
    chrome = opened(shown=replace(view, texts=(*view.texts, second)))
    beside = "document.querySelector('#beside')"
    chrome.run(f"{beside}.value = '1'; {beside}.dispatchEvent(new Event('change'))")
    for _ in ("chosen", "opened by the link"):
        chrome.wait("document.querySelectorAll('.pair figcaption').length == 2")
        assert chrome.texts(CAPTIONS) == [f"intact: {view.texts[0].name}", f"intact: {second.name}"]
        assert chrome.run("document.querySelectorAll('.strip')[1].children.length") == len(second.tokens)
        last = len(second.tokens) - 1
        chrome.run(f"document.querySelector('#other-{last}').dispatchEvent(new Event('pointerenter'))")
        norm = float(f"{second.variants[0].norm[view.layer, last]:.4g}")
        assert f": norm {norm:g} after" in chrome.text("#readout")
        chrome.reopen()
        chrome.wait(LOADED)


def test_the_first_screen_says_what_a_sink_is_and_shows_a_head_that_reads_it(view, opened):
    chrome = opened()
    assert chrome.text("#about").startswith("The attention of a head adds up to 100%.")
    text = view.texts[0]
    received = text.variants[0].received.array()[..., text.spikes[0]]
    layer, head = headed(chrome.text("#rows-title"))
    assert received[layer, head] == received.max() > 0.9
    words = "[...document.querySelectorAll('#read-words span')].map((one) => [one.textContent, one.title])"
    rows = text.variants[0].rows[text.heads.index((layer, head))].array()[-1]
    assert chrome.run(words) == [
        [token, f"{round(100 * share)}%"] for token, share in zip(text.tokens, rows, strict=True)
    ]


def headed(title: str) -> tuple[int, int]:
    """The layer and the head of a title."""
    layer, head = re.fullmatch(r"Rows of L(\d+)\.H(\d+)", title).groups()
    return int(layer), int(head)


def test_the_first_visit_begins_with_a_tour_that_presses_the_switches(view, opened):
    chrome = opened(390)
    chrome.run("localStorage.clear()")
    opened(390)
    chrome.wait("document.querySelector('.tour')")
    pressed = ["intact", "intact", view.texts[0].variants[1].name, view.texts[0].variants[-1].name, "intact"]
    readers = []
    for number, name in enumerate(pressed, 1):
        chrome.wait(f"document.querySelector('.tour p')?.textContent.startsWith('{number} of 5')")
        assert chrome.run("document.querySelector('.switches :checked').parentNode.textContent") == name
        readers.append(chrome.run("document.querySelectorAll('.head.strong').length"))
        chrome.run("document.activeElement.click()")
    chrome.wait("!document.querySelector('.tour')")
    assert readers[0] == readers[3] == 20 and readers[2] < 10  # what the tour says of the squares
    opened(390)
    assert chrome.texts(".tour p") == []  # once


def test_the_live_page_in_a_browser(bundled, chrome):
    bundled.text = TEXT
    addresses = []
    threading.Thread(target=serve, args=(bundled, 0, addresses.append), daemon=True).start()
    while not addresses:
        time.sleep(0.01)
    chrome.errors.clear()
    chrome.open(addresses[0])
    chrome.wait("document.querySelector('.part')")  # the circuit has come
    assert headed(chrome.text("#rows-title"))[0] in (2, 3, 4)
    intact = chrome.text("#sentence")

    def said(beginning: str):
        chrome.wait(f"document.querySelector('#sentence').textContent.startsWith({json.dumps(beginning)})")

    chrome.click("#off-L1\\.N338")
    said(f"Without L1.N338: after layer {bundled.sink.layer}, the norm changes most at token 0")
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
    chrome.click("#tab-generation")  # it fills itself
    chrome.wait("document.querySelectorAll('.written').length === 2")
    intact = chrome.texts(".written")
    chrome.click("#variant-1")  # and again for another model
    chrome.wait(
        "document.querySelector('#panel-generation p').textContent.startsWith('The model, sink neurons zeroed')"
    )
    assert chrome.texts(".written") != intact
    chrome.click("#variant-0")
    chrome.reopen()  # the link says which text was typed
    chrome.wait(typed)
    assert chrome.errors == []
