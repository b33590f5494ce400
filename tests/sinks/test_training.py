"""The sink over training: folders and revisions with known circuits, failures, and going on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hub_server import hub
from organisms import Organism, organism
from organisms.hard import hard

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.sinks.first_token import training
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.training import SinksOverTraining, sinks_over_training

SEEDS = {"step0": ("none", 1), "step8": ("sink", 1), "step64": ("sink", 2), "step512": ("sink", 2)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Organism]:
    return {name: organism("llama", seed, kind=kind, n_layers=4) for name, (kind, seed) in SEEDS.items()}


@pytest.fixture(scope="module")
def folder(made: dict[str, Organism], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each checkpoint, and text that all tokenizers know."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, o in made.items():
        o.save(root / name)
    small = min(made.values(), key=lambda o: o.model.config.vocab_size)
    (root / "text.txt").write_text(small.tokenizer.decode(small.natural(6, 64)[:, 1:].flatten().tolist()))
    return root


def _check(found: SinksOverTraining, made: dict[str, Organism]) -> None:
    assert [c.name for c in found.checkpoints] == list(made)
    for c, o in zip(found.checkpoints, made.values(), strict=True):
        assert c.sink_layer == o.truth.sink_layer and set(c.neurons) == set(o.truth.neurons)
        assert c.rate is not None and c.spike is not None and c.model is not None
        assert c.norm_spike == c.attention_sink == o.truth.has_sink
        assert c.carried_by == ("spike" if o.truth.has_sink else None)
        if o.truth.has_sink:
            assert c.set_drop is not None and c.control_drop is not None and c.set_drop > 0.5 > c.control_drop
            assert c.spike > 10
        else:
            assert c.spike < 3 and c.set_drop is None


def test_folders_in_order(made: dict[str, Organism], folder: Path) -> None:
    found = sinks_over_training([folder / name for name in made], text=folder / "text.txt", max_repeats=8)
    _check(found, made)
    alone = find_sinks(folder / "step64", all_layers=True, text=folder / "text.txt", max_repeats=8)
    third = found.checkpoints[2]
    assert alone.sink_rate is not None and third.rate == alone.sink_rate.value
    ratios = zip(alone.first_token_norm, alone.typical_norm, strict=True)
    assert third.spike == max(a / b for a, b in ratios if a and b)
    assert alone.minimal is not None and third.set_drop == alone.minimal.drop_sink_layer
    told = found.conclusion()
    share = "3 of 4 checkpoints (first in step8)"
    assert told.startswith(f"There is a norm spike in {share}, and an attention sink in {share}: norm ")
    assert "the same in 2 of these 3 checkpoints" in found.text()
    figure: Any = found.figure()
    assert list(figure.data[0].x) == list(made) and figure.data[2].y[0] is None
    assert figure.layout.xaxis.categoryarray == tuple(made)


def test_revisions_of_a_hub_and_one_that_is_not_there(
    made: dict[str, Organism], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub(tmp_path / "cache") as server:
        server.add("org/name", folder / "step512")
        for name in made:
            server.add("org/name", folder / name, revision=name)
        words = ["find-sinks", "--model", "org/name", "--text", str(folder / "text.txt"), "--max-repeats", "8"]
        words += ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
        revisions = [*list(made)[:2], "step9", *list(made)[2:]]
        assert main([*words, *(w for r in revisions for w in ("--revision", r))]) == 0
        found = Result.load(tmp_path / "a.json")
        assert isinstance(found, SinksOverTraining)
        missing = found.checkpoints[2]
        assert missing.name == "step9" and missing.failed is not None and "step9" in missing.failed
        _check(SinksOverTraining(checkpoints=found.measured), made)
        assert "step9 could not be measured: " in capsys.readouterr().out
        assert "step512" in (tmp_path / "a.html").read_text()
        assert main([*words, "--revision", "step9", "--revision", "step10"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
        assert main([*words, "--revision", "step8", "--json", "-"]) == 0  # one is no series
        assert json.loads(capsys.readouterr().out)["kind"] == "find-sinks"


def test_it_goes_on_where_it_stopped(
    made: dict[str, Organism], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    given: dict[str, Any] = {"text": folder / "text.txt", "max_repeats": 8, "resume": tmp_path / "kept"}
    true = training.find_sinks

    def interrupted(model: Any, **options: Any) -> Any:
        seen.append(Path(model).name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return true(model, **options)

    monkeypatch.setattr(training, "find_sinks", interrupted)
    paths = [folder / name for name in made]
    with pytest.raises(KeyboardInterrupt):
        sinks_over_training(paths, **given)
    found = sinks_over_training(paths, **given)
    assert seen == ["step0", "step8", "step64", "step64", "step512"]
    _check(found, made)
    assert sinks_over_training(paths, **given).checkpoints == found.checkpoints and len(seen) == 5
    with pytest.raises(SinkscopeError, match="was begun with other settings"):
        sinks_over_training(paths, **{**given, "max_repeats": 4})


def test_a_failed_checkpoint_is_tried_again(folder: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    given: dict[str, Any] = {"text": folder / "text.txt", "max_repeats": 8, "resume": tmp_path / "kept"}
    found = sinks_over_training([folder / "step8", later], **given)
    assert [c.failed is None for c in found.checkpoints] == [True, False]
    assert str(tmp_path) not in json.dumps(found.to_dict()) and "later" in str(found.checkpoints[1].failed)
    for file in (folder / "step8").iterdir():
        (later / file.name).write_bytes(file.read_bytes())
    again = sinks_over_training([folder / "step8", later], **given)
    assert all(c.failed is None for c in again.checkpoints)
    assert again.checkpoints[0].neurons == again.checkpoints[1].neurons


def test_folders_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "last").symlink_to(folder / "step8")
    paths = [tmp_path / run / "last" for run in ("a", "b", "a")]
    found = sinks_over_training(paths, text=folder / "text.txt", max_repeats=8)
    assert [c.name for c in found.checkpoints] == ["a/last", "b/last"]


def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--model", str(folder / "step0"), "--model", str(folder / "step8")]
    for words, said in (
        ([*two, "--revision", "a", "--revision", "b"], "give one model, or at most one revision"),
        ([*two, "--screen"], "--screen is for one model"),
        ([*two, "--all"], "--all is for one model"),
        ([*two, "--backend", "hf"], "--backend is for one model"),
        ([*two, "--all-layers"], "no use for it"),
        (["--resume", "x"], "no use for it"),
        ([*two, "--text", "nowhere.txt"], "nowhere.txt"),
        ([*two, "--top-k", "100000"], "--top-k"),
        ([*two, "--seed", "-1"], "--seed"),
    ):
        assert main(["find-sinks", *words]) == 2, words
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and said in shown.err, words


def test_without_any_sink_nothing_is_claimed(folder: Path) -> None:
    found = sinks_over_training([folder / "step0"], text=folder / "text.txt", max_repeats=8)
    assert found.conclusion().startswith("There is a norm spike in none of 1 checkpoints, and an")
    assert found.conclusion().count("step0") == 1


def test_spike_and_sink_are_told_apart(tmp_path: Path) -> None:
    """A model with a sink and no spike, and one with a spike and no sink."""
    both = [hard(name, "llama") for name in ("no_norm", "spike_only")]
    for h in both:
        h.model.save_pretrained(tmp_path / h.name)
        h.tokenizer.save_pretrained(tmp_path / h.name)
    (tmp_path / "text.txt").write_text(min(both, key=lambda h: h.model.config.vocab_size).text())
    paths = [tmp_path / "no_norm", tmp_path / "spike_only"]
    found = sinks_over_training(paths, text=tmp_path / "text.txt", max_repeats=8)
    assert [(c.norm_spike, c.attention_sink) for c in found.checkpoints] == [(False, True), (True, False)]
    assert "norm spike in 1 of 2 checkpoints (first in spike_only)" in found.conclusion()
    assert "attention sink in 1 of 2 checkpoints (first in no_norm, not in all later ones)" in found.conclusion()
