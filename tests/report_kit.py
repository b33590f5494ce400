"""Folders of results with markup in every text, and a reader of the report made of them."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import numpy as np
from sample_results import FIRST, sample_find_sinks, spike, with_rows, writer

import sinkscope as ss
from sinkscope import loops
from sinkscope.files.provenance import ModelInfo
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, Row
from sinkscope.sinks.repeat import Repeat

BAD = "<img src=x onerror=alert(1)>&lt;"
WORSE = f"{BAD}</script><script>alert(2)</script><!--<script>\u2028"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True, kw_only=True)
class Plain(Result):
    """A result of a user: it has no figure."""

    kind: ClassVar[str] = "test-plain"

    word: str
    share: float

    def conclusion(self) -> str:
        return f"The word is {self.word}."


def atlas(token: str) -> Repeat:
    found = sample_find_sinks()
    control = {"share": Mean(0.5, kind="share"), "control": Mean(0.0, kind="share")}
    return Repeat(
        effects=(Row("findings", "norm with copies of a token", control, "one copy"),),
        model=found.model,
        provenance=found.provenance,
        quantity="norm",
        ids=tuple(range(4)),
        conditions=("intact",),
        tokens=("a", token, "c", " d"),
        repeats=np.array([[1.0, 3.0, np.nan, 4.0]]),
    )


def fill(folder: Path, text: str):
    """Results of every form, with `text` wherever a tokenizer or a file could have put it."""
    folder.mkdir()
    found = sample_find_sinks(
        model=ModelInfo(text.replace("/", ""), text, 6, 64, 512, text),
        settings={text: text, "list": [text]},
        spikes=(with_rows(spike(FIRST, 9.0), *(writer(f"L9.N{n}", 0.1, 0.9, "lowers") for n in range(30))),),
        provenance=replace(sample_find_sinks().provenance, argv=("sinkscope", text)),
    )
    found.save(folder / "sinks.json")
    atlas(text).save(folder / "atlas.json")
    # The loops are prose, whatever the text is: of markup, fewer are loops.
    texts = [f"{text} " + f"and the same again {word} " * 300 for word in ("here", "there", "then")] + [text]
    loops.check(texts, name=text).save(folder / "loops.json")
    (folder / "below").mkdir()
    made = sample_find_sinks()
    plain = Plain(word=text, share=0.125, model=made.model, settings={text: text}, provenance=made.provenance)
    plain.save(folder / "below/plain.json")
    (folder / "below/plain.png").write_bytes(PIXEL)


class Reader(HTMLParser):
    """What a browser makes of a page: its tags, their attributes, what is read, and the scripts."""

    def __init__(self, document: str):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.scripts = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str):
        if self.cdata_elem == "script":
            self.scripts.append(data)
        else:
            self.text += data


def read_report(path: Path) -> Reader:
    return Reader(path.read_text())


def made_report(folder: Path, out: Path | None = None) -> Path:
    """The page that is made of a folder."""
    ss.report(folder, out)
    return out or folder / "report.html"


def files_shown(path: Path) -> list[str]:
    """The files of a report's sections, in their order."""
    return re.findall(r"<h2>.*? <small>(.*?)</small></h2>", path.read_text())


def spoil(folder: Path):
    (folder / "cut.json").write_text((folder / "atlas.json").read_text()[:200])
    (folder / "foreign.json").write_text('{"a": 1}')
    atlas = json.loads((folder / "atlas.json").read_text())
    (folder / "older.json").write_text(json.dumps({**atlas, "schema": 1}))
    (folder / "unknown.json").write_text(json.dumps({**atlas, "kind": BAD}))
    uneven = {**atlas, "result": {**atlas["result"], "tokens": ["a"]}}
    (folder / "uneven.json").write_text(json.dumps(uneven))
    (folder / "notes.txt").write_text("not JSON")
    (folder / f"{BAD}\n\x1b[2J.json").write_text("{")
    (folder / "gone.json").symlink_to("nowhere")
    (folder / ".hidden.json").write_text("{")
    (folder / "atlas.html").write_text("beside a result")
