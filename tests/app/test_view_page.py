"""Pages in a browser: that of `sinkscope view` (what it shows, how it moves, what a link opens again), and reports."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
from plain_hooks import attention
from sample_results import sample_find_sinks

import sinkscope as ss
from sinkscope.app.view.page import serve, view_page
from sinkscope.app.view.switches import RANDOM_SWITCH

TEXT = "A class is a block. A block is a piece of text."
BAD = "<img src=x onerror=alert(1)>"


@pytest.fixture
def opened(bundled, tmp_path, chrome):
    """Open the page of the bundled model on a text in a window of some width; its errors are those since."""
    chrome.errors.clear()

    def opening(width: int = 1400, **changes):
        (tmp_path / "view.html").write_text(view_page(replace(bundled.view(TEXT), **changes), "</script><b>"))
        chrome.open(tmp_path / "view.html", width)
        chrome.wait("document.querySelector('.token')")
        return chrome

    return opening


def each(chrome, selector: str, what: str) -> list:
    """What JavaScript reads of each element that a selector finds."""
    return chrome.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.{what})")


def test_the_circuit_has_the_attention_of_the_model_and_markup_is_text(bundled, opened):
    view, measured = bundled.view(TEXT), bundled.sinks.spikes[0].reported
    (first,), (text,) = view.circuit, view.texts
    found = replace(first.found, place=replace(first.found.place, words=BAD))
    tokens = (BAD, *text.tokens[1:])
    chrome = opened(
        circuit=(replace(first, found=found),),
        others={"x": "<b>sharp</b>."},
        texts=(replace(text, name=BAD, tokens=tokens),),
    )
    assert chrome.run("document.images.length") == 0 and chrome.errors == []
    assert chrome.text(".circuit .spike h3") == f"{BAD}, layers 1-5"
    assert chrome.text("#token-0").count(BAD) == 1 and chrome.texts("#others p") == ["x: <b>sharp</b>."]
    given = attention(bundled.setup.target.hf, measured.survey.ids)[..., 1:, 0].mean((1, 3))  # layer head
    titles = [f"L{n}.H{head}: {given[n, head]:.0%}" for n in range(2, 6) for head in range(8)]
    assert each(chrome, "#spike-0 .head", "title") == titles
    assert len(each(chrome, "#spike-0 .reader", "title")) == first.found.heads == 20
    chrome.click("#reads-0-2-1")
    assert chrome.text("#rows-title") == "Rows of L2.H1"
    assert each(chrome, ".circuit .head.chosen", "id") == ["reads-0-2-1"]


def test_the_page_says_which_heads_look_elsewhere_and_a_link_opens_it_again(bundled, opened):
    (text,) = bundled.view(TEXT).texts
    zeroed = text.variants[1]
    random = next(one for one in text.variants if one.name == RANDOM_SWITCH)
    share, *others = (one.received.array()[..., text.spikes[0]] for one in (text.variants[0], zeroed, random))
    readers = share > 0.3
    gone, control = (int((readers & (other < share / 2)).sum()) for other in others)
    assert gone > control  # the planted neurons make the sink
    chrome = opened()
    said = f"On this text, {readers.sum()} of {readers.size} heads give the attention sink"
    assert chrome.text("#headline").startswith(said)
    chrome.click("#variant-1")
    layer, head = text.heads[-1]
    chrome.click(f"#head-{layer}-{head}")
    title = f"document.querySelector('#rows-title')?.textContent === 'Rows of L{layer}.H{head}'"
    chrome.wait(title)  # then the address says both
    chrome.reopen()
    chrome.wait("document.querySelector('#headline')?.textContent.includes('look elsewhere')")
    chrome.wait(title)
    said = chrome.text("#headline")
    assert f"{gone} of the {readers.sum()} heads" in said and f"({random.name}: {control})" in said
    after, beside = (json.dumps(one.following[0][0]) for one in (zeroed, random))
    assert "the likeliest next token" in said and f"{after} ({random.name}: {beside})." in said
    assert chrome.texts(".pair figcaption") == ["intact", zeroed.name]


def test_the_first_visit_begins_with_a_tour_that_presses_the_switches(bundled, opened):
    chrome = opened(390)
    chrome.run("localStorage.clear()")
    opened(390)
    names = [variant.name for variant in bundled.view(TEXT).texts[0].variants]
    readers = []
    for number, name in enumerate(["intact", "intact", names[1], RANDOM_SWITCH, *names[-2:], "intact", "intact"], 1):
        chrome.wait(f"document.querySelector('.tour p')?.textContent.startsWith('{number} of 8')")
        assert chrome.run("document.querySelector('.switches :checked').parentNode.textContent") == name
        readers.append(chrome.run("document.querySelectorAll('.head.strong').length"))
        chrome.run("document.activeElement.click()")
    assert readers[0] == readers[3] == 20 and readers[2] < 10  # what the tour says of the squares
    opened(390)
    assert chrome.texts(".tour p") == []  # once


def test_the_live_page_in_a_browser(bundled, chrome, monkeypatch):
    monkeypatch.setattr(bundled, "text", TEXT)
    addresses = []
    threading.Thread(target=serve, args=(bundled.answer, "bundled", 0, addresses.append), daemon=True).start()
    while not addresses:
        time.sleep(0.01)
    chrome.errors.clear()
    chrome.open(addresses[0])
    chrome.wait("document.querySelector('.parts')")  # the circuit has come
    intact, after = chrome.text("#sentence"), f"after layer {bundled.layer}"
    for clicked, beginning in (
        ("#off-L1\\.N338", f"Without L1.N338: {after}, the norm changes most at token 0"),
        ("#off-L1\\.N338", intact),
        ("#token-5", intact),
        ("#isolate", f"Token 5 isolated: {after}, the norm changes most at token 5"),
        ("#place", f"Token 5 with the first id: {after}"),
        ("#variant-0", intact),
    ):
        chrome.click(clicked)
        chrome.wait(f"document.querySelector('#sentence').textContent.startsWith({json.dumps(beginning)})")
    chrome.run("document.querySelector('#other').value = 'l2.h0'; document.querySelector('form').requestSubmit()")
    chrome.wait("document.querySelector('#sentence').textContent.startsWith('Without L2.H0: ')")
    chrome.run("document.querySelector('#typed').value = 'a function of a module'")
    chrome.click("#read")
    typed = "[...document.querySelectorAll('.token')].some((token) => token.textContent.includes('module'))"
    chrome.wait(typed)
    chrome.reopen()  # the link says which text was typed
    chrome.wait(typed)
    assert chrome.errors == []


DRAWN = """(async () => {
  for (const box of document.querySelectorAll('.plot')) {
    box.scrollIntoView();
    for (let i = 0; i < 400 && !box.querySelector('svg .xtick'); i++) await new Promise((r) => setTimeout(r, 25));
  }
  return [...document.querySelectorAll('.plot')].filter((box) => box.querySelector('svg .xtick')).length;
})()"""


COVERED = """(() => {
  const covered = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const bar = plot.querySelector('.modebar').getBoundingClientRect();
    const frame = plot.getBoundingClientRect();
    for (const title of plot.querySelectorAll('.annotation-text')) {
      const box = title.getBoundingClientRect();
      const meets = box.right > bar.left && box.top < bar.bottom;
      if (meets || box.left < frame.left || box.right > frame.right) covered.push(title.textContent);
    }
  }
  return covered;
})()"""
"""Titles of panels that stand below the buttons of a figure, or leave it; both are measured after all is opened."""


def test_figures_of_a_report_are_drawn_in_a_browser_and_nothing_is_fetched(tmp_path, chrome):
    chrome.open("about:blank")
    chrome.errors.clear()
    chrome.asked.clear()
    for name in ("a", BAD):
        sample_find_sinks(settings={"word": name}).save(tmp_path / f"{len(name)}.json")
    ss.report(tmp_path)
    for width in (1400, 360):
        chrome.open(tmp_path / "report.html", width)
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth")
        assert chrome.run(DRAWN) == 2
        assert chrome.run(COVERED) == []
    conclusion = sample_find_sinks().conclusion()
    assert chrome.run(f"document.body.innerText.split({json.dumps(conclusion)}).length - 1") == 2, (
        "once for each result"
    )
    assert chrome.run("document.querySelectorAll('[onerror], img:not([src^=data])').length") == 0
    assert chrome.errors == []
    assert {address.partition(":")[0] for address in chrome.asked} <= {"file", "data", "blob"}
