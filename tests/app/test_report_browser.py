"""Pages in a browser: reports, single results, and a text whose tokens are shaded."""

from __future__ import annotations

import pytest
from report_kit import BAD, WORSE, fill, made_report, spoil
from sample_results import sample_find_sinks

from sinkscope.files.output import write_output

DRAWN = """(async () => {
  for (const box of document.querySelectorAll('.plot')) {
    box.scrollIntoView();
    for (let i = 0; i < 400 && !box.querySelector('svg .xtick'); i++) await new Promise((r) => setTimeout(r, 25));
  }
  return [...document.querySelectorAll('.plot')].filter((box) => box.querySelector('svg .xtick')).length;
})()"""


@pytest.mark.slow
def test_the_report_in_a_browser(tmp_path, chrome):
    chrome.errors.clear()
    chrome.asked.clear()
    folder = tmp_path / "results"
    fill(folder, WORSE)
    spoil(folder)
    path = made_report(folder)
    chrome.open(path, 1400)
    assert chrome.run(DRAWN) == chrome.run("document.querySelectorAll('.plot').length") == 2
    assert chrome.run("document.documentElement.scrollWidth <= innerWidth")

    # markup is read, in the page and in a figure, and made nothing
    assert BAD in chrome.run("document.body.innerText")
    assert chrome.run("document.querySelectorAll('[onerror], img:not([src^=data])').length") == 0

    chrome.open(path, 360, phone=True)
    assert chrome.run("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    chrome.open(write_output(tmp_path / "single.html", sample_find_sinks().to_html()), 1400)
    assert chrome.run(DRAWN) == 1

    assert chrome.errors == []
    assert {address.partition(":")[0] for address in chrome.asked} <= {"file", "data", "blob"}
