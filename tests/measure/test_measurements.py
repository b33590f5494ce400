"""What every measurement of the table must pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import stranger
from covering import slow
from intervention_kit import loaded
from markupsafe import escape
from organisms import organism
from refusals import refused
from same_kit import differences

import sinkscope as ss
from sinkscope.app.commands.others import other_commands
from sinkscope.measure import Measurement, Setup
from sinkscope.opening.load import load
from sinkscope.results.result import Result

pytestmark = pytest.mark.few_texts

ROOT = Path(__file__).parents[2]
ALL = [name for name in ss.__all__ if isinstance(getattr(ss, name), Measurement)]
WORDS = "the of and a in to is that it was he for on as with his at be this from".split()
QUICK = {  # arguments with which a measurement takes about a second
    "attack": {"length": 4, "sequences": 4, "tokens": WORDS},
    "barcode": {"max_new_tokens": 8, "heads": ["L0.H0"]},
    "why_sink": {},
    "find_sinks": {},
    "lines": {"count": 2, "length": 48, "layers": [1]},
    "patch": {"max_repeats": 300, "pieces": 2, "length": 16},
    "repeat": {"max_repeats": 24},
    "why_loop": {"max_new_tokens": 48, "cuts": 3},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Make quick runs on the model of the package, each of them once, with the beginning of the typical text."""
    text = tmp_path_factory.mktemp("text") / "short.txt"
    text.write_text((ROOT / "sinkscope/models/text/typical.txt").read_text(encoding="utf-8")[:2500])

    @cache
    def run(name, backend=None):
        return getattr(ss, name)(backend and loaded(backend), text=text, **QUICK.get(name, {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.loops.why.CONTINUED", 24)
        yield run


def test_a_prompt_that_looks_like_a_path_is_stored_as_it_is():
    found = ss.barcode(prompt="/no_think Why ...?", max_new_tokens=8, heads=["L0.H0"])
    assert found.settings["prompt"] == "/no_think Why ...?"


@pytest.mark.parametrize("name", ALL)
def test_it_is_shown_with_its_conclusion_and_its_json_comes_back_equal(name, measured, tmp_path):
    result = measured(name)
    assert Result.load(result.save(tmp_path / "a.json")).to_dict() == result.to_dict()
    made, conclusion, figure = result.provenance, result.conclusion(), result.figure()
    assert {"bos", "text", "revision"} <= set(result.settings) and made.seconds > 0
    assert result.settings["text"] == "short.txt"
    own = made.first_ids[0], made.bos, made.seed
    assert own == (load().tokenizer.bos_token_id, True, result.settings["seed"])
    assert conclusion.endswith((".", "?")) and "\n" not in conclusion and "nan" not in conclusion
    sentences = conclusion.split(". ")
    assert len(sentences) <= 2
    assert max(len(sentence.split()) for sentence in sentences) <= 50
    assert result.text(None).startswith(f"Conclusion: {conclusion}\n")
    assert f"Conclusion: {escape(conclusion)}" in result.to_html()
    assert figure.layout.title.text and (len(figure.data) > 0 or len(figure.layout.annotations) > 0)
    keys = [(subject.key, row.table, row.key) for subject in result.compared() for row in subject.rows]
    assert len(keys) == len({*keys})  # else `compare` would mix two of its numbers


PLAIN_ONLY = {"lines", "barcode", "why_loop"}
"""A bridge computes its own attention, of which they see nothing and on which they cannot act."""
ASKED = ("conditions", "constant", "purpose")
READ_ALIKE = {("barcode", "nnsight"), ("lines", "bridge")}
"""By default one that edits layers, one that generates, and one that is refused; heads have a test of their own."""
BACKENDS = [(one, kind) for one in ALL for kind in ("bridge", "nnsight")]


@pytest.mark.parametrize(("name", "backend"), [one if one in READ_ALIKE else slow(*one) for one in BACKENDS])
def test_every_kind_of_model_gives_the_same(name, backend, measured):
    if backend == "bridge" and name in PLAIN_ONLY:
        with refused("plain Hugging Face"):  # what can be done instead
            measured(name, backend)
        return
    plain, other = (measured(name, kind).to_dict()["result"] for kind in (None, backend))
    if backend == "bridge" and name in ("find_sinks", "why_sink"):  # a warning says why these are not asked
        for spike in plain["spikes"]:
            effects = [row for row in spike["effects"] if row["key"]["done"] != "hidden"]
            assert len(effects) < len(spike["effects"])
            spike["effects"] = effects
            spike |= {table: [] for table in ASKED}
    assert differences(plain, other, 2e-3, lacks=True) == []  # null: this kind of model object does not offer it


@pytest.mark.parametrize("word", ["Straßenbahn", "dog"])
def test_a_text_that_is_one_token_is_refused(word, tmp_path):
    """A repeated token is nothing to measure on, whether it is known or not: the remedy is another --text."""
    o = organism("llama", 2)  # whose tokenizer knows few words
    (tmp_path / "alike.txt").write_text(" ".join([*[word] * 19, "poem"] * 50), encoding="utf-8")
    with refused("is one token: .*--text"):
        ss.lines(o.model, tokenizer=o.tokenizer, text=tmp_path / "alike.txt")


def test_a_stranger_needs_one_file(tmp_path, monkeypatch, typed):
    """A measurement of another package: its command, JSON and page come from its one file of at most 48 lines."""
    source = stranger.SOURCE.read_text()
    assert len(source.splitlines()) <= 48
    monkeypatch.chdir(tmp_path)
    with stranger.installed(tmp_path, source):
        printed = typed("attention-entropy --last 32 --json a.json --html a.html")
        assert printed.out.startswith("Conclusion: ")
        assert printed.err == "JSON: a.json\nPage: a.html\n"
        assert typed("attention-entropy --last 0", 2).err.startswith("error: last=0")
        help_text = typed("attention-entropy --help").out
        assert "--last" in help_text and "docs/cli.md" not in help_text  # our pages do not describe it
        loaded, again = Result.load("a.json"), getattr(ss, stranger.NAME)(load(), last=32)
        assert (loaded.heads, loaded.settings["last"], loaded.kind) == (again.heads, 32, stranger.KIND)
        found = ss.compare(loaded, again)
        assert len(found.results[0].judged) == 48 and not found.results[0].moved  # text by text
        typed("scan --quick --only attention-entropy --out s")
        (part,) = Result.load("s/card.json").parts
        assert part.measured and part.name == stranger.KIND and part.conclusion.endswith(".")


def test_a_name_that_is_taken_is_refused(tmp_path):
    source = stranger.SOURCE.read_text().replace("def attention_entropy", "def why_sink")
    with refused(r"stranger_entropy:why_sink.*name of another command"):
        with stranger.installed(tmp_path, source, name="why_sink"):
            other_commands()


def test_a_measurement_leaves_its_setup_as_it_was():
    """What one records of itself is stated by no later one, and the time before it is not its own."""
    setup = Setup.open(load())
    setup.started -= 1000
    before = dict(setup.settings)
    ss.repeat.on(setup, max_repeats=8)
    assert setup.settings == before
    later = ss.lines.on(setup, count=2, length=48, layers=[1])
    assert "max_repeats" not in later.settings and later.provenance.seconds < 1000
