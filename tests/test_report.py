from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_results import NEURONS, sample_find_sinks, sample_without_sink

import sinkscope as ss
from experiments import gallery
from experiments.record import record
from sinkscope import loops
from sinkscope.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.report import Report, Skipped, build, page, report
from sinkscope.report.record import Record
from sinkscope.results import ModelInfo, Result
from sinkscope.sinks.atlas import HeadRow, SinkAtlas

BAD = "<img src=x onerror=alert(1)>&lt;"
WORSE = f"{BAD}</script><script>alert(2)</script><!--<script>\u2028"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
DRAWN = """(async () => {
  for (const box of document.querySelectorAll('.plot')) {
    box.scrollIntoView();
    for (let i = 0; i < 400 && !box.querySelector('svg .xtick'); i++) await new Promise((r) => setTimeout(r, 25));
  }
  return [...document.querySelectorAll('.plot')].filter((box) => box.querySelector('svg .xtick')).length;
})()"""


def atlas(token: str) -> SinkAtlas:
    found = sample_find_sinks()
    n = 4
    return SinkAtlas(
        model=found.model, settings={}, provenance=found.provenance, sink_layer=1, max_repeats=8, ids=(0, 1, 2, 3),
        tokens=("a", token, "c", " d"), repeats=(1, 3, None, 4), norm=(1.0,) * n, frequency=(1, 2, 0, 3),
        embedding_norm=(1.0, 2.0, 3.0, 4.0), head=(0, 0, None, 1), special=(), median=3.0, unreached=1,
        by_head=(HeadRow(0, 2, 0, 2.0), HeadRow(1, 1, 0, 4.0), HeadRow(None, 1, 1, None)), shared=(), text_tokens=6,
    )  # fmt: skip


def fill(folder: Path, text: str) -> None:
    """Results of every form, with `text` wherever a tokenizer or a file could have put it."""
    folder.mkdir()
    found = sample_find_sinks(
        model=ModelInfo(text.replace("/", ""), text, 6, 64, 512, text), settings={text: text, "list": [text]},
        neurons=NEURONS * 10, provenance=replace(sample_find_sinks().provenance, argv=("sinkscope", text)),
    )  # fmt: skip
    (folder / "sinks.json").write_text(found.to_json(massive=sample_without_sink()))
    atlas(text).save(folder / "atlas.json")
    texts = [f"{text} the same again {i}" * 40 for i in range(3)] + [text]
    loops.check(texts, name=text).save(folder / "loops.json")
    (folder / "below").mkdir()
    fill_records(folder / "below", text)


def fill_records(folder: Path, text: str) -> None:
    data = {"ratio": 2.5, text: text, "runs": [{"seed": i, "word": text, "share": 0.125 * i} for i in range(30)]}
    (folder / "speed.json").write_text(record("bench-speed", data, {"rounds": text}, started=time.perf_counter()))
    (folder / "speed.png").write_bytes(PIXEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "results", WORSE)
    return tmp_path / "results"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Without figures: a quick report."""
    (tmp_path / "records").mkdir()
    fill_records(tmp_path / "records", WORSE)
    return tmp_path / "records"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of `folder`, for those who only read."""
    folder = tmp_path_factory.mktemp("whole") / "results"
    fill(folder, WORSE)
    return ss.report(folder)


class Reader(HTMLParser):
    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.data: list[Any] = []  # of blocks of JSON
        self.scripts: list[str] = []  # that run
        self._type: str | None = None
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self._type = dict(attrs).get("type", "run")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            if self._type == "application/json":
                self.data.append(json.loads(data))
            else:
                self.scripts.append(data)
        else:
            self.text += data


def _read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def test_all_results_are_there_in_the_order_of_the_kinds(whole: Report) -> None:
    made, folder = whole, whole.path.parent
    assert made.path.name == "report.html"
    assert made.files == ("sinks.json", "sinks.json, massive", "atlas.json", "loops.json", "below/speed.json")
    assert made.skipped == ()
    read = _read(made.path)
    for result in (Result.load(folder / "sinks.json"), sample_without_sink(), atlas(WORSE)):
        assert result.summary() in read.text
    assert read.text.count("find-sinks") == 4  # contents and headings
    assert "905" in read.text and "0.125" in read.text  # numbers of a table, and of a record
    assert "peak_memory_bytes" in read.text
    figures = [block for block in read.data if isinstance(block, dict) and "layout" in block]
    titles = [f["layout"]["title"]["text"].rpartition(": ")[2] for f in figures]
    assert titles == ["sink in layer 2", "no sink", "repetition of 4 tokens", "3 of 4 loop"]


def test_report_of_the_same_folder_is_the_same_file(whole: Report, tmp_path: Path) -> None:
    again = ss.report(whole.path.parent, tmp_path / "again.html")  # and an earlier report is no result
    assert again.path.read_bytes() == whole.path.read_bytes()


def test_markup_from_files_is_text(whole: Report, tmp_path: Path) -> None:
    fill(tmp_path / "plain", "word")
    attacked, plain = _read(whole.path), _read(ss.report(tmp_path / "plain").path)
    assert attacked.tags == plain.tags
    assert {name for name, _ in attacked.attributes} == {name for name, _ in plain.attributes}
    assert [value[:10] for name, value in attacked.attributes if name == "src" and value] == ["data:image"]
    assert len(attacked.scripts) == len(plain.scripts) == 3  # plotly, that of the atlas, our own
    assert attacked.scripts == plain.scripts
    assert attacked.text.count(WORSE) > 10
    assert any([1, WORSE] == row[:2] for block in attacked.data if isinstance(block, list) for row in block)
    for block in attacked.data:
        if isinstance(block, dict) and "layout" in block:  # plotly would drop the tags it does not know
            assert "<img" not in json.dumps(block) and "<script" not in json.dumps(block)


def test_tags_of_our_own_stay_in_figures(whole: Report) -> None:
    drawn = json.dumps([block for block in _read(whole.path).data if isinstance(block, dict)])
    assert "L2<br>412" in drawn and "<extra></extra>" in drawn


def test_drawings_that_do_not_escape_are_made_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.graph_objects as go

    monkeypatch.setattr(Result, "figure", lambda _self: go.Figure(go.Scatter(name=f"<b>{WORSE}</b><a href='x'>")))
    (block, *_) = (b for b in _read(ss.report(folder).path).data if isinstance(b, dict))
    name = block["data"][0]["name"]
    assert name.startswith("<b>&lt;img src=x onerror=alert(1)>") and name.endswith("</b>&lt;a href='x'>")


def test_only_the_scripts_of_the_page_may_run_and_nothing_is_fetched(whole: Report) -> None:
    read = _read(whole.path)
    policy = next(value for name, value in read.attributes if name == "content" and value and "default" in value)
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in read.scripts
    }
    assert policy.startswith("default-src 'none'; ")
    assert set(policy.partition("script-src ")[2].split()) == hashes
    addresses = [value or "" for name, value in read.attributes if name in ("src", "href", "action", "srcset")]
    assert all(address.startswith(("#", "data:image/png")) for address in addresses)


def test_plotly_is_inside_once_and_only_if_something_is_drawn(whole: Report, records: Path) -> None:
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    document = whole.path.read_text(encoding="utf-8")
    assert document.count(library) == 1
    assert len(document) < len(library) + 200_000
    assert len(ss.report(records).path.read_bytes()) < 60_000


def test_numbers_of_a_figure_are_those_of_the_result(tmp_path: Path) -> None:
    digits = 1 / 3
    sample_find_sinks(first_token_norm=(digits, 20.0, 930.0, 931.0, None, None)).save(tmp_path / "sinks.json")
    block = next(b for b in _read(ss.report(tmp_path).path).data if isinstance(b, dict) and "layout" in b)
    line = next(t for t in block["data"] if t.get("name") == "first token")
    assert line["y"][0] == pytest.approx(digits, rel=1e-6)
    assert line["y"][1:4] == [20.0, 930.0, 931.0]
    assert "template" not in block["layout"]


def test_what_has_no_utf8_or_no_html_is_written_out(tmp_path: Path) -> None:
    data = sample_find_sinks().to_dict()
    data["settings"] = {"text": "bell\x07 null\x00 half \ud83d"}
    (tmp_path / "sinks.json").write_text(json.dumps(data))
    text = _read(ss.report(tmp_path).path).text
    assert "bell\\x07 null\\x00 half \\ud83d" in text


def spoil(folder: Path) -> None:
    (folder / "cut.json").write_text((folder / "atlas.json").read_text()[:200])
    (folder / "foreign.json").write_text('{"a": 1}')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "deep.json").write_text("[" * 5000)
    newer = json.loads((folder / "atlas.json").read_text())
    (folder / "newer.json").write_text(json.dumps({**newer, "schema": 2}))
    uneven = {**newer, "result": {**newer["result"], "tokens": ["a"]}}
    (folder / "uneven.json").write_text(json.dumps(uneven))
    half = {**json.loads((folder / "sinks.json").read_text()), "massive": {"schema": 1, "kind": "find-sinks"}}
    (folder / "half.json").write_text(json.dumps(half))
    (folder / "notes.txt").write_text("not JSON")
    (folder / f"{BAD}\n\x1b[2J.json").write_text("{")
    (folder / "gone.json").symlink_to("nowhere")
    (folder / ".hidden.json").write_text("{")
    (folder / ".git").mkdir()
    (folder / ".git/x.json").write_text("{")
    (folder / "atlas.html").write_text("beside a result")


REASONS = {
    "cut.json": "is not a JSON file",
    "foreign.json": "is not a result of sinkscope: expected an object with schema and kind",
    "list.json": "is not a result of sinkscope",
    "deep.json": "is not a JSON file",
    "newer.json": "has schema 2, this version reads 1",
    "uneven.json": "cannot be shown (ValueError: ",
    "half.json, massive": "has no result",
    "notes.txt": "is no .json file",
    f"{BAD}\\n\\x1b[2J.json": "is not a JSON file",
    "gone.json": "is no file, or a link to none",
}


def test_damaged_and_foreign_files_are_left_out_and_listed(folder: Path) -> None:
    spoil(folder)
    made = ss.report(folder)
    assert {s.file for s in made.skipped} == set(REASONS)
    assert all(s.reason.startswith(REASONS[s.file]) for s in made.skipped), made.skipped
    assert "half.json" in made.files and len(made.files) == 6
    read = _read(made.path)
    assert "10 files left out" in read.text
    left = read.text[read.text.rindex("Left out") :]
    for skipped in made.skipped:
        assert skipped.file in left and skipped.reason in left
    assert "img" not in Reader(made.path.read_text(encoding="utf-8").rpartition("Left out")[2]).tags


def test_command_lists_them_too(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spoil(folder)
    assert main(["report", str(folder), "--out", str(tmp_path / "new/all.html")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'new/all.html'}: 6 results\n"
    lines = said.err.splitlines()
    assert len(lines) == 10 and all(line.startswith("left out: ") for line in lines)
    assert "\x1b" not in said.err
    assert "Left out" in _read(tmp_path / "new/all.html").text
    assert not (folder / "report.html").exists()


def test_many_foreign_files_do_not_fill_the_terminal(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(50):
        (records / f"{i}.bin").touch()
    assert main(["report", str(records)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21 and lines[-1] == "left out: 30 files more; the report names them all"
    assert "49.bin" in _read(records / "report.html").text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{}/none"], "does not exist: give the folder"),
        (["{}/results/sinks.json"], "is no folder: give the folder"),
        (["{}/empty"], "no results in {}/empty: it should hold what --json or .save() wrote"),
        (["{}/foreign"], "no results in {}/foreign (a.json: is not a JSON file"),
        (["{}/results", "--out", "{}/results/atlas.json"], "is one of the files to be read"),
        (["{}/results", "--out", "{}/empty"], "is a folder: give the name of a file"),
        ([], "DIR"),
    ],
)
def test_bad_input_in_one_line(
    folder: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/a.json").write_text("{")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["report", *(word.replace("{}", str(tmp_path)) for word in words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert says.replace("{}", str(tmp_path)) in said.err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_old_report_stays_if_the_new_one_fails(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ss.report(records).path.read_bytes()

    def failing(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "document", failing)
    with pytest.raises(KeyboardInterrupt):
        ss.report(records)
    assert (records / "report.html").read_bytes() == old
    assert [p.name for p in records.iterdir() if p.name.endswith(".tmp")] == []


def test_progress_counts_files(records: Path) -> None:
    shutil.copy(records / "speed.json", records / "second.json")
    told: list[tuple[str, int, int]] = []
    report(records, progress=lambda *now: told.append(now))
    assert told == [("reading", 0, 2), ("reading", 1, 2)]


def test_unreadable_result_is_named(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(records / "speed.json", records / "second.json")
    real = build.read_json

    def denied(path: Path) -> Any:
        if path.name == "second.json":
            raise SinkscopeError("cannot read second.json: permission denied")
        return real(path)

    monkeypatch.setattr(build, "read_json", denied)
    assert ss.report(records).skipped == (Skipped("second.json", "cannot read second.json: permission denied"),)


# Records: whatever their data look like, every value is in a table.

keys = st.text("abcxyz_", min_size=1, max_size=4)
numbers = st.integers(100, 999)
data = st.dictionaries(
    keys,
    st.recursive(numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)),
    max_size=5,
)


def _leaves(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


@given(data)
def test_no_value_of_a_record_is_lost(value: dict[str, Any]) -> None:
    tables = Record("x", value, {}).tables()
    shown = {int(n) for t in tables for row in t.rows for cell in row for n in re.findall(r"\b\d{3}\b", cell)}
    cut = any("…" in cell for t in tables for row in t.rows for cell in row)
    assert cut or shown == set(_leaves(value))
    assert all(len(row) == len(t.head) for t in tables for row in t.rows)


def test_tables_of_a_record() -> None:
    value = {
        "ratio": 0.5,
        "fast": {"seconds": 1, "ok": True},
        "slow": {"seconds": 2, "ok": False},
        "runs": [{"seed": 0, "rows": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}, {"seed": 1, "rows": []}],
    }
    shown = {t.title: (t.head, t.rows) for t in Record("x", value, {}).tables()}
    assert shown[""] == (["name", "value"], [["ratio", "0.5"]])
    assert shown["fast"] == (["name", "value"], [["seconds", "1"], ["ok", "yes"]])
    assert shown["runs"] == (
        ["seed", "step", "loss", "rows"],
        [["0", "1", "2", "-"], ["0", "2", "1", "-"], ["1", "-", "-", ""]],
    )
    del value["runs"]
    (_, both) = Record("x", value, {}).tables()
    assert (both.head, both.rows) == (["name", "seconds", "ok"], [["fast", "1", "yes"], ["slow", "2", "no"]])


def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    text = record("bench-long", {"rows": [{"at": i} for i in range(2345)]}, {})
    (tmp_path / "long.json").write_text(text)
    read = _read(ss.report(tmp_path).path)
    assert "rows (the first 2,000 of 2,345 rows)" in read.text
    assert read.tags.count("tr") == 2001


def test_kinds_of_the_user_are_shown_without_their_class(tmp_path: Path) -> None:
    own = sample_find_sinks().to_dict()
    (tmp_path / "own.json").write_text(json.dumps({**own, "kind": "my-own"}))
    assert ss.report(tmp_path).files == ("own.json",)
    text = _read(tmp_path / "report.html").text
    assert "my-own tiny" in text and "contribution norm" in text


def test_a_picture_that_is_none_is_not_shown(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "img" in _read(ss.report(records).path).tags
    monkeypatch.setattr(page, "_PICTURE", 10)
    assert "img" not in _read(ss.report(records).path).tags
    monkeypatch.undo()
    (records / "speed.png").write_text("<svg onload=alert(1)>")
    assert "img" not in _read(ss.report(records).path).tags


@pytest.mark.skipif(browser.found() is None, reason="needs chromium or Chrome on the PATH")
def test_in_a_browser(folder: Path) -> None:
    spoil(folder)
    path = ss.report(folder).path
    with browser.Browser() as chrome:
        chrome.open(path, 1400)
        assert chrome.run(DRAWN) == chrome.run("document.querySelectorAll('.plot').length") == 5
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth")

        # markup is read, in the page and in a figure, and made nothing
        assert BAD in chrome.run("document.body.innerText")
        assert BAD in chrome.run("[...document.querySelectorAll('svg .gtitle')].map((t) => t.textContent).join()")
        assert chrome.run("document.querySelectorAll('[onerror], img:not([src^=data])').length") == 0

        # hover, search and order
        x, y = chrome.run(
            "{document.querySelector('.plot').scrollIntoView();"
            "const at = document.querySelector('.plot .bars .point').getBoundingClientRect();"
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
            f"find.value = ''; find.dispatchEvent(new Event('input')); {table}.tHead.rows[0].cells[2].click();}}"
        )
        norms = chrome.run(f"[...{table}.tBodies[0].rows].map((row) => Number(row.cells[2].textContent))")
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

        assert chrome.errors == []
        assert {address.partition(":")[0] for address in chrome.asked} <= {"file", "data", "blob"}
        assert {address for address in chrome.asked if address.startswith("file")} == {path.resolve().as_uri()}


def test_gallery_names_every_committed_picture_and_its_command() -> None:
    root = Path(__file__).parents[1]
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("no git checkout")
    names = subprocess.run(["git", "ls-files", "figures/*.png"], cwd=root, capture_output=True, text=True, check=True)
    page = (root / "docs/gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(\.\./(figures/[^)]*)\)", page)
    missing = set(names.stdout.split()) - set(shown)
    assert not missing, f"run python -m experiments.gallery: {missing} not in docs/gallery.md"
    assert all((root / name).is_file() for name in shown)
    assert len(re.findall(r"^`(?:sinkscope |python -m experiments\.)\S.*`$", page, re.M)) == len(shown)


def test_gallery_is_made_of_what_lies_beside_the_pictures(tmp_path: Path) -> None:
    argv = ("/x/sinkscope/__main__.py", "find-sinks", "--json", "a.json", "--top-k", "3", "--png", "a.png")
    made = replace(sample_find_sinks().provenance, argv=argv)
    sample_find_sinks(provenance=made).save(tmp_path / "sinks_a.json")
    (tmp_path / "sinks_a.png").write_bytes(PIXEL)
    (tmp_path / "alone.png").write_bytes(PIXEL)
    text = gallery.gallery(tmp_path)
    assert re.search(r"## sinks-a\n\n[A-Z][^\n]{20,}\.\n\n`sinkscope find-sinks --top-k 3`\n\n!", text)
    assert re.findall(r"!\[.*", text) == ["![sinks-a](../figures/sinks_a.png)"]
