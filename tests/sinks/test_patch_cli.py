"""`patch make`, `patch eval` and `divergence` as a user types them, and their drawings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from organisms import organism
from organisms.hard import hard
from test_divergence import _measure
from test_evaluate import _evaluate, _loud
from test_patching import _make, _text

import sinkscope.sinks.patch.make as patching
from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import SinkPatch
from sinkscope.sinks.patch.evaluate import Change
from sinkscope.sinks.patch.make import PatchMade, make_patch


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> PatchMade:
    """A patch of an organism. No test alters it."""
    return _make(organism("llama", 2), tmp_path_factory.mktemp("made"))


def _said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    out, err = capsys.readouterr()
    return out, err


def test_make_then_eval(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    o = organism("llama", 2)
    o.save("model")
    _text(o, here)
    few = "--model model --text text.txt --pieces 4 --length 24"
    assert main(f"patch make {few} --out out/patch.json --words 3 --max-repeats 250 --json made.json".split()) == 0
    out, err = _said(capsys)
    assert (err, "Conclusion: A patch of" in out) == ("", True)
    made = Result.load("made.json")
    assert isinstance(made, PatchMade)
    assert SinkPatch.load("out/patch.json").checked_sites == made.patch.checked_sites
    assert [(s.layer, s.neuron) for s in SinkPatch.load("out/patch.json").checked_sites] == list(o.truth.neurons)
    assert main(f"patch eval {few} --patch out/patch.json --json -".split()) == 0
    found = json.loads(_said(capsys)[0])
    assert (found["kind"], found["result"]["neurons"]) == ("patch-eval", [list(n) for n in o.truth.neurons])


def test_a_patch_of_another_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of another name it is told, of another shape refused, before anything is measured."""
    o = organism("llama", 2)
    o.save("model")
    _text(o, here)
    size = {"family": "llama", "n_layers": o.model.config.num_hidden_layers}
    SinkPatch(sites=[(1, 3)], model={"name": "bundled", **size}).save("p.json")
    words = "patch eval --model model --text text.txt --pieces 2 --length 8 --patch p.json --json out.json".split()
    assert main(words) == 0
    assert "Warning: the patch was made for bundled, not for model." in _said(capsys)[0]
    Path("out.json").unlink()
    SinkPatch(sites=[(1, 3)], model={"name": "bundled", **size, "n_layers": 99}).save("p.json")
    assert main(words) == 2
    out, err = _said(capsys)
    assert (out, err.count("\n"), Path("out.json").exists()) == ("", 1, False)
    assert "was made for bundled, whose n_layers is 99, and that of model is" in err


def test_refusal_is_an_error_and_no_sink_is_not(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    organism("llama", 0, kind="none").save("none")
    assert main("patch make --model none --out p.json --json made.json".split()) == 0
    out, err = _said(capsys)
    assert "no MLP makes a norm spike" in out
    assert err == "p.json was not written: there is nothing to patch\n"
    refused = replace(Result.load("made.json"), verdict="refused", reason="it would harm: 3 % > 1 %.")
    monkeypatch.setattr(make_patch, "function", lambda *_, **__: refused)
    assert main("patch make --model none --out p.json".split()) == 1
    out, err = _said(capsys)
    assert "No patch was made: it would harm" in out  # the evidence is seen
    assert err == "error: no patch was written: it would harm: 3 % > 1 %.\n"
    assert not Path("p.json").exists()


def test_a_sink_that_returns_ends_with_exit_code_one_and_no_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence is printed and saved, the error is one line, and there is nothing that a script could load."""
    h = hard("backup_next", "llama")
    h.model.save_pretrained("model")
    h.tokenizer.save_pretrained("model")
    Path("text.txt").write_text(h.text(120))
    found = patching._candidates
    monkeypatch.setattr(patching, "_candidates", lambda *a: [n for n in found(*a) if n.site not in h.truth.backup])
    few = "--model model --text text.txt --words 3 --pieces 4 --length 32 --max-repeats 600"
    assert main(f"patch make {few} --out p.json --json made.json".split()) == 1
    out, err = _said(capsys)
    assert out.startswith("Conclusion: Not repaired, and no patch was made: the sink returns in layer")
    assert err.startswith("error: not repaired, and no patch was written: the sink returns") and err.count("\n") == 1
    assert not Path("p.json").exists()
    made = Result.load("made.json")
    assert isinstance(made, PatchMade) and made.verdict == "not-repaired"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("patch make", "Missing option '--out'"),
        ("patch eval", "Missing option '--patch'"),
        ("patch make --out p.json --token poem", "at least two different ones are needed"),
        ("patch make --out -", "give the name of a file"),
        ("patch make --out x.json --json x.json", "give each its own file"),
        ("patch eval --patch none.json --backend hf", "make a patch with `sinkscope patch make`"),
        ("patch nothing", "No such command 'nothing'"),
        ("divergence --repeats 0", "'--repeats'"),
        ("divergence --corpus nowhere", "--corpus 'nowhere' is not a folder"),
        ("divergence --index none.npz", "the index none.npz is not there: give --corpus"),
    ],
)
def test_refused_before_any_model_is_loaded(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    monkeypatch.setattr("sinkscope.models.load.load", None)
    assert main(words.split()) == 2
    out, err = _said(capsys)
    assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True)
    assert says in err


def test_tasks_have_commas_or_are_given_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: object, tasks: list[str], **__: object) -> None:
        raise SinkscopeError(f"tasks {tasks}")

    monkeypatch.setattr("sinkscope.sinks.patch.evaluate.evaluate_patch", told)
    assert main("patch eval --patch p.json --tasks a,b --tasks c".split()) == 2
    assert _said(capsys)[1] == "error: tasks ['a', 'b', 'c']\n"


def test_divergence_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    organism("llama", 2).save("model")
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("the cat")
    words = "divergence --model model --token dog --token cat --prefix the --repeats 5 --repeats 9 --max-repeats 30"
    assert (
        main([*words.split(), *"--new-tokens 4 --controls 2 --corpus corpus --index i.npz --json d.json".split()]) == 0
    )
    assert Path("i.npz").exists()
    found: Any = Result.load("d.json")
    assert {c.word for c in found.curves} == {"dog", "cat"}
    assert {c.repeats for c in found.continuations} == {5, 9}
    assert len(found.continuations) == 2 * 2 * 2 * 2
    assert (len(found.control), found.curves[0].repeats[-1]) == (2, 30)
    assert "ordinary prompts" in _said(capsys)[0]


def _traces(result: Result) -> dict[str, Any]:
    return {t["name"]: t for t in json.loads(result.figure().to_json())["data"] if t.get("name")}


def test_drawings_show_the_numbers(here: Path, made: PatchMade) -> None:
    o = organism("llama", 2)
    traces = _traces(made)
    assert traces["intact"]["y"] == [t.intact for t in made.held_out]
    assert traces["patched"]["y"] == [t.patched for t in made.held_out]
    assert made.perplexity is not None
    [cost] = [t for t in json.loads(made.figure().to_json())["data"] if t["x"] == ["patched"]]
    assert cost["mode"] == "markers" and cost["y"] == [made.perplexity.difference / made.perplexity.before]
    scored = _evaluate(o, here, _loud(o))
    row = scored.scores[0]
    assert _traces(scored)["patch"]["y"] == pytest.approx([100 * row.difference / row.original])
    Path("corpus").mkdir()
    Path("corpus/a.txt").write_text("the cat dog")
    found = _measure(corpus="corpus", repeats=[5, 280], new_tokens=4, controls=2)
    boxes = [t for t in json.loads(found.figure().to_json())["data"] if t["type"] == "box"]
    groups = found.groups()
    assert [b["y"] for b in boxes] == [[c.leak.length for c in part if c.leak] for part in groups.values()]
    [bold] = [t for t in json.loads(found.figure().to_json())["data"] if t.get("name") == "patched"]
    [curve] = [c for c in found.curves if (c.prefix, c.patched) == (False, True)]
    assert (tuple(bold["x"]), tuple(bold["y"])) == (curve.repeats, curve.p)


def test_summary_of_a_refused_patch_has_its_evidence(made: PatchMade) -> None:
    refused = replace(made, verdict="refused", perplexity=Change(10.0, 10.5, 0.5, 0.01))
    assert "from 10 to 10.5 (+5.000% +- 0.100%, where up to +1.0% is accepted)" in refused.summary()
