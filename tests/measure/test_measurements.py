"""What every measurement must pass, by being registered: only the long ones are named, which meet fewer models."""

from __future__ import annotations

import html
import inspect
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import stranger
import torch
from intervention_kit import bridge_of, nnsight_of
from organisms import Organism, organism
from typer.main import get_command

import sinkscope as ss
from sinkscope.app import cli
from sinkscope.app.card import facts_of, numbers_of
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files import result as results
from sinkscope.files.registry import Entry, entries, external_entries, kinds, shared_parameters
from sinkscope.files.registry import parameter as parameter_of
from sinkscope.files.result import Result
from sinkscope.files.tables import PLAIN, WIDTH
from sinkscope.interventions import SinkPatch
from sinkscope.measure import Measurement
from sinkscope.models.load import load

ALL = [entry for entry in entries().values() if entry.decorator == "measurement"]
EVERY = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
BAD = "<img src=x onerror=alert(1)>"
LOOP = [1, *[20, 31, 12, 44, 25, 36, 17] * 9]
LESS: dict[str, dict[str, Any]] = {  # what is looked at here, forms and rounding, needs less than a quick run
    "barcode": {"max_new_tokens": 8, "layers": [0]},
    "cache_loss": {"prompt": 64, "answer": 2, "policies": ["streaming", "h2o"]},
    "circuit": {"max_repeats": 16, "texts": 1},
    "loop_rate": {"openings": 2, "max_new_tokens": 24},
    "separability": {"count": 32, "texts": 8},
    "token_clusters": {"tokens": "the of and a in to is that it was he for on as with his at be this from".split()},
}


def arguments(name: str) -> dict[str, Any]:
    """Of a quick run, or of a still shorter one."""
    quick = entries()[name].load().quick
    return {**quick, **LESS.get(name, {})}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Makes quick runs on the model of the package, each of them once; the tests below look at it from several sides.

    The beginning of the typical text stands for all of it, and attacks use the clusters that were found before.
    """
    text = tmp_path_factory.mktemp("text") / "short.txt"
    text.write_text((Path(ss.__file__).parent / "models/text/typical.txt").read_text(encoding="utf-8")[:2500])

    @cache
    def run(name: str, kind: Any = None) -> Result:
        more: dict[str, Any] = {}
        if name in ("cluster_attack", "detect_attack"):
            found: Any = run("token_clusters")
            more["clusters"] = {one.head: found.tokens_of(one.head) for one in found.clusters}
        return entries()[name].load()(kind and bundled(kind), text=text, **arguments(name), **more)

    return run


@cache
def bundled(kind: Any) -> Any:
    return load(backend=kind)


@cache
def small(kind: str = "hf") -> tuple[Any, Any]:
    """A model with a known sink as each kind, for what takes long on the model of the package; and its tokenizer."""
    made = organism("llama", 3)
    wrap = {"hf": lambda model, _: model, "bridge": bridge_of, "nnsight": nnsight_of}[kind]
    return wrap(made.model, made.tokenizer), made.tokenizer


@cache
def without_a_sink() -> Organism:
    return organism("llama", 3, kind="none")


@pytest.fixture(scope="module")
def shown(measured: Callable[..., Result]) -> Callable[[str], tuple[Result, str, Any]]:
    """A result of a model with markup for a name, its page, and its figure."""

    @cache
    def show(name: str) -> tuple[Result, str, Any]:
        result = measured(name)
        named = replace(result, model=replace(result.model, name=BAD))
        return named, named.to_html(), named.figure()

    return show


@EVERY
def test_json_comes_back_equal(entry: Entry, measured: Callable[..., Result], tmp_path: Path) -> None:
    result = measured(entry.name)
    assert Result.load(result.save(tmp_path / "a.json")).to_dict() == result.to_dict()
    assert result.model.name == "bundled" and result.provenance.seconds > 0
    assert {"bos", "text", "seed", "revision"} <= set(result.settings)


@EVERY
def test_it_begins_with_its_conclusion(entry: Entry, shown: Callable[[str], Any]) -> None:
    result, page, _ = shown(entry.name)
    told = result.conclusion()
    assert told.endswith((".", "?")) and "\n" not in told and told[0].isupper()
    assert result.text().startswith(f"Conclusion: {told}")
    assert f"Conclusion: {html.escape(told)}" in page


@EVERY
def test_its_table_fits_80_columns_and_is_explained(entry: Entry, measured: Callable[..., Result]) -> None:
    result = measured(entry.name)
    grids = [grid.fitted(WIDTH) for grid in result.grids()]
    below = result.below(grids, WIDTH)
    assert all(len(line) <= 80 for part in (*(grid.text(WIDTH) for grid in grids), *below) for line in part.split("\n"))
    for short, whole in zip(grids, result.grids(), strict=True):
        assert short.head and len(short.cells) == len(whole.cells)
        assert {*short.columns} <= {*whole.head, *result.to_frame().columns}, "the table has no such column"
        cells = {cell for line in whole.cells for cell in line}
        assert {cell for line in short.cells for cell in line} <= cells  # none is cut
    said = "".join(below)
    assert "Not shown" not in result.text(None)
    assert list(pd.read_csv(io.StringIO(result.to_csv())).columns) == list(result.to_frame().columns)
    dark = [n for grid in grids for n in grid.head if n.replace("_", " ") not in said and n not in PLAIN]
    assert [n for n in dark if "." not in n] == []  # such as L1.N338


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_every_kind_concludes_and_has_a_page(kind: str) -> None:
    import_module(kinds()[kind])
    cls = results._KINDS[kind]
    if cls.__module__.startswith("sinkscope."):  # other packages that are installed have pages of their own
        assert (Path(__file__).parents[2] / cls.link()).is_file(), f"{kind}: set `page`"
    assert cls.conclusion is not Result.conclusion
    assert cls.summary is Result.summary


@EVERY
def test_it_is_drawn(entry: Entry, shown: Callable[[str], Any]) -> None:
    _, _, figure = shown(entry.name)
    assert len(figure.data) > 0 or len(figure.layout.annotations) > 0
    assert figure.layout.title.text


@EVERY
def test_names_are_escaped(entry: Entry, shown: Callable[[str], Any]) -> None:
    _, page, figure = shown(entry.name)
    assert BAD not in page
    assert BAD not in (figure.layout.title.text or "")


@EVERY
def test_a_model_without_a_sink_is_an_answer(entry: Entry) -> None:
    measure: Measurement[Any, Any] = entry.load()
    made = without_a_sink()
    try:
        result = measure(made.model, tokenizer=made.tokenizer, **arguments(entry.name))
    except SinkscopeError as error:  # a token of its arguments may be unknown to this tokenizer
        assert "\n" not in str(error)
        return
    assert result.conclusion()


LONG = {"divergence", "make_patch"}
"""Measurements that are compared on a smaller model."""
PLAIN_ONLY = {"line_overlap", "line_weights"}  # a bridge does not offer queries and keys
KINDS = [
    pytest.param(entry, kind, id=f"{entry.name}-{kind}", marks=pytest.mark.slow if later else [])
    for i, entry in enumerate(ALL)
    for way, kind in enumerate(("bridge", "nnsight"))
    for later in [entry.name not in PLAIN_ONLY and i % 2 != way]  # by default a measurement meets one of the two
]


@pytest.mark.parametrize(("entry", "kind"), KINDS)
def test_every_kind_of_model_gives_the_same(entry: Entry, kind: str, measured: Callable[..., Result]) -> None:
    if kind == "bridge" and entry.name in PLAIN_ONLY:
        with pytest.raises(UnsupportedError, match="hf"):  # what can be done instead
            measured(entry.name, kind)
        return
    if entry.name in LONG:
        measure: Measurement[Any, Any] = entry.load()
        pairs = [small(one) for one in ("hf", kind)]
        both = [measure(model, tokenizer=tokenizer, **arguments(entry.name)) for model, tokenizer in pairs]
    else:
        both = [measured(entry.name), measured(entry.name, kind)]
    mine, theirs = (result.to_dict()["result"] for result in both)
    assert _close(mine, theirs) == []


def _close(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two results differ by more than rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [p for key in {*a, *b} for p in _close(a.get(key), b.get(key), f"{where}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [p for i, (x, y) in enumerate(zip(a, b, strict=True)) for p in _close(x, y, f"{where}[{i}]")]
    if isinstance(a, float) and isinstance(b, int | float):
        return [] if abs(a - b) <= 2e-3 * max(1.0, abs(a)) else [where]
    return [] if a == b or b is None else [where]  # null: this kind of model object does not offer it


@EVERY
def test_bad_input_is_one_line(entry: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*entry.command.split(), *([f"--{entry.marks['flag']}"] if "flag" in entry.marks else [])]
    required = [w for n, _, need in entry.marks.get("outputs", []) if need for w in (f"--{n}", str(tmp_path / "o"))]
    needed = [p for p in entry.parameters if p.required]
    required += [word for p in needed for word in (p.flag, "x")]
    bad = [["--model", str(tmp_path / "nowhere")], ["--seed", "-1"], ["--text", "nowhere.txt"], ["--nonsense"]]
    bad += [
        [p.flag, str(p.option.min - 1)] for p in entry.parameters if p.option.min is not None and not p.option.hidden
    ]
    for more in bad:
        assert cli.main([*words, *required, *more]) == 2, more
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1, more


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer knows few words."""
    return organism("llama", 2).save(tmp_path_factory.mktemp("wordy"))


ALIKE = ("the one token '", "unknown to this tokenizer: ")


WORDS = (("dog", 20, ALIKE[0]), ("Straßenbahn", 1, ALIKE[1]))
ONE_WORD = [
    pytest.param(entry, *word, id=f"{entry.name}-{word[0]}", marks=[] if i % 2 == j else pytest.mark.slow)
    for i, entry in enumerate(ALL)
    for j, word in enumerate(WORDS)  # by default a measurement meets one of the two, as the check is one for all
]


@pytest.mark.parametrize(("entry", "word", "every", "says"), ONE_WORD)
def test_a_text_that_is_one_token_is_refused(
    entry: Entry, word: str, every: int, says: str, wordy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known or unknown, a repeated token is nothing to measure on: the remedy is another --text, in every command."""
    text = " ".join(word if i % every < max(1, every - 1) else "poem" for i in range(1000))
    (tmp_path / "alike.txt").write_text(text, encoding="utf-8")
    SinkPatch(layer=0, neurons=[1]).save(tmp_path / "patch.json")
    words = [*entry.command.split(), *([f"--{entry.marks['flag']}"] if "flag" in entry.marks else [])]
    words += [w for n, _, need in entry.marks.get("outputs", []) if need for w in (f"--{n}", str(tmp_path / "out"))]
    words += [word for p in entry.parameters if p.required for word in (p.flag, str(tmp_path / "patch.json"))]
    assert cli.main([*words, "--model", str(wordy), "--text", str(tmp_path / "alike.txt")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert says in shown.err and "--text" in shown.err
    assert not (tmp_path / "out").exists()


@cache
def whole_command_line() -> Any:
    return get_command(cli.command_line())


@EVERY
def test_its_command_has_every_parameter_and_its_help(entry: Entry) -> None:
    found = whole_command_line()
    for word in entry.command.split():
        found = found.commands[word]
    options = {name for parameter in found.params for name in parameter.opts}
    wanted = [p for p in (*entry.parameters, *shared_parameters("open")) if not p.option.hidden]
    for parameter in wanted:
        assert parameter.flag in options or parameter.option.argument
        assert parameter.help.endswith("."), f"{entry.name}: {parameter.name} has no whole sentence in Args"
    assert entry.summary.endswith(".") and entry.group != "Other"


@EVERY
def test_the_public_name_and_the_signature(entry: Entry) -> None:
    measure = getattr(ss, entry.name)
    assert isinstance(measure, Measurement) and entry.name in dir(ss)
    names = list(inspect.signature(measure).parameters)
    assert names[0] == "model" and {"bos", "text", "seed", "progress", "tokenizer"} <= set(names)


SCANNED = pytest.mark.parametrize("entry", [e for e in ALL if e.scan], ids=lambda entry: entry.name)


@SCANNED
def test_its_mark_fits_the_scan(entry: Entry, measured: Callable[..., Result]) -> None:
    """Arguments that it takes, and paths that lead somewhere; every number has a control."""
    mark = entry.scan
    assert mark is not None and len(mark.seconds) == 2
    assert {*(mark.quick or {}), *mark.full} <= {p.name for p in entry.parameters}
    entry.load().refuse({**(mark.quick or {})})
    result = measured(entry.name)
    assert all(len(paths) in (2, 3) and len(label) <= 42 for label, paths in mark.numbers.items())
    found = {n.label: n for n in numbers_of(entry, result)}
    assert all(n.control is not None for n in found.values())
    assert found or not mark.numbers
    assert len(facts_of(entry, result)) >= len(mark.facts) / 2


def test_a_stranger_needs_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement of another package: its command, JSON and page come from its one file of at most 60 lines."""
    source = stranger.SOURCE.read_text()
    assert len(source.splitlines()) <= 60
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["attention-entropy", "--last", "32", "--json", "a.json", "--html", "a.html"]
    with stranger.installed(tmp_path / "package", source):
        assert cli.main(words) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("Conclusion: ") and shown.err == ""
        assert cli.main(["attention-entropy", "--last", "0"]) == 2
        assert cli.main(["attention-entropy", "--help"]) == 0
        told = capsys.readouterr().out
        assert "--last" in told and "docs/cli.md" not in told  # the page does not describe commands of other packages
        found: Any = Result.load("a.json")
        assert type(found) is import_module(stranger.MODULE).AttentionEntropy and found.entropy.shape == (6, 8)
        model = load(backend="hf")
        again = getattr(ss, stranger.NAME)(model, last=32)
    assert (again.entropy == found.entropy).all() and found.settings["last"] == 32
    from sinkscope.measure import Setup

    setup, want = Setup.open(model), torch.zeros(6, 8)
    model.set_attn_implementation("eager")
    for row in setup.ids:
        for i, probs in enumerate(model(row[None], output_attentions=True).attentions):
            want[i] -= torch.xlogy(probs, probs).sum(-1)[0, :, -32:].mean(1) / len(setup.ids)
    assert abs(want.detach().numpy() - found.entropy).max() < 1e-4
    assert json.loads((tmp_path / "a.json").read_text())["kind"] == "attention-entropy"
    assert "Conclusion: " in (tmp_path / "a.html").read_text()


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    from sinkscope.measure import Setup

    with pytest.raises(SinkscopeError, match="layer 9 is not in bundled, which has 6 layers: give one from 0 to 5"):
        list(Setup.open(texts=1).attention(layers=[0, 9]))


def test_registering_a_name_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sinkscope.measure import registry

    (tmp_path / "twice.py").write_text(
        stranger.SOURCE.read_text().replace("def attention_entropy", "def marking_heads")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    twice = external_entries("twice")
    with pytest.raises(SinkscopeError, match=r"marking_heads.*registered under one name"):
        registry._add(dict(entries()), twice[0])


def test_attention_under_a_policy_is_that_of_the_kept_cache() -> None:
    """Token by token under interventions: `Full` changes nothing; StreamingLLM sees its first and last tokens alone."""
    from sinkscope.kv import Full, StreamingLLM
    from sinkscope.measure import Setup

    plain = Setup.open(load(backend="hf", layers=3), texts=1)

    def rows(edit: Any) -> dict[int, torch.Tensor]:
        return {r.layer: r.probs for r in replace(plain, edit=edit).attention(last=20, layers=[0, 2])}

    stock, full, few = rows(None), rows(Full()), rows(StreamingLLM(budget=12))
    assert list(stock) == list(full) == [0, 2]
    for layer, probs in stock.items():
        assert probs.shape == (1, 8, 20, 64)
        torch.testing.assert_close(full[layer], probs, atol=1e-5, rtol=1e-4)
        kept = (few[layer][0, :, -1].amax(0) > 0).nonzero().flatten().tolist()
        assert kept[:4] == [0, 1, 2, 3] and kept[4:] == list(range(64 - len(kept) + 4, 64)) and 12 <= len(kept) <= 13
        torch.testing.assert_close(few[layer].sum(-1), torch.ones(1, 8, 20))


def test_interventions_of_a_measurement_are_given_in_any_form() -> None:
    from sinkscope.kv import H2O
    from sinkscope.kv.edit_of import edit_of

    policy = H2O(budget=64)
    assert edit_of(policy="h2o:64") == policy == edit_of(interventions=[policy]) == edit_of(interventions="h2o:64")
    assert edit_of() is None
    with pytest.raises(SinkscopeError, match="int is no intervention: give a policy"):
        edit_of(policy=5)


def test_one_value_or_several_is_an_option_that_may_be_given_again() -> None:
    several = parameter_of("prefix", str | Sequence[str], ("a",))
    assert several.many and several.type is str and several.flag == "--prefix"
    either = parameter_of("which", bool | Sequence[int], False)
    assert not either.many
