from __future__ import annotations

import json
import re
import shutil
from functools import wraps
from importlib import import_module

import pytest
from repository import FIGURES, ROOT, ran

from experiments.gallery import figure_of
from experiments.script import run
from sinkscope.files.kinds import kind_modules
from sinkscope.results.result import Result

FILES = sorted(FIGURES.glob("*.json"))


def test_gallery_names_every_committed_picture_and_its_command():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    names = ran(["git", "ls-files", "figures/*.png"]).stdout.split()
    page = (ROOT / "docs/gallery.md").read_text()
    shown = re.findall(r"\]\(\.\./(figures/[^)]*)\)", page)
    missing = set(names) - set(shown)
    assert not missing, f"run python -m experiments.gallery: {missing} not in docs/gallery.md"
    assert all((ROOT / name).is_file() for name in shown)
    assert len(re.findall(r"^`(?:sinkscope |(?:python|torchrun .*) -m experiments\.)\S.*`$", page, re.M)) == len(shown)


def keys(data: object) -> object:
    """The names in a record, at every depth; of a list those of its first part."""
    if isinstance(data, dict):
        return {name: keys(value) for name, value in data.items()}
    return [keys(part) for part in data[:1]] if isinstance(data, list) else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_figure_has_the_present_form_and_its_command_is_taken(file):
    """Its data are those that the command would write today, and the words of the command are options of today."""
    data = json.loads(file.read_text())
    made = data["provenance"]
    words = made.get("argv", [])
    assert (words or made["command"]) and isinstance(made["seed"], int) and {"python"} < set(made["versions"])
    if data["kind"] in kind_modules():
        assert keys(json.loads(Result.load(file).to_json())["result"]) == keys(data["result"])
    if list(words[:2]) == ["python", "-m"]:
        taken = []
        main = import_module(words[2]).main
        run(wraps(main)(lambda *args, **options: taken.append((args, options))), words[3:])
        assert len(taken) == 1


@pytest.mark.slow
@pytest.mark.parametrize("picture", [file.with_suffix(".png") for file in FILES], ids=lambda picture: picture.stem)
def test_a_picture_is_drawn_from_the_json_beside_it(picture):
    if picture.exists():
        assert figure_of(picture).to_plotly_json()["data"]
