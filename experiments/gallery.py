"""The gallery page of the documentation: every picture in figures/, what it shows, and the command that makes it.

python -m experiments.gallery [--out docs/gallery.md]
"""

from __future__ import annotations

import argparse
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

from sinkscope.output import write_atomic
from sinkscope.results import known_kinds, read_json

FIGURES = Path(__file__).parents[1] / "figures"
_HEAD = """# Gallery

Pictures of the model in the package, each with the command that makes it. The same folder as one page with figures
that answer to the mouse, tables and provenance: `sinkscope report figures` ([report](report.md)). This page is made by
`python -m experiments.gallery`.
"""
_OUTPUTS = ("--json", "--html", "--png", "--out", "--resume")
# made in Python; this command prints the same beside its own result
_COMMANDS = {"massive-activations": "sinkscope find-sinks --all"}


def entry(picture: Path) -> str:
    """Heading, what is drawn, the command and the picture; its data lie beside it."""
    data = read_json(picture.with_suffix(".json"))
    title = picture.stem.replace("_", "-")
    return f"## {title}\n\n{_drawn(data)}\n\n`{_command(data)}`\n\n![{title}](../figures/{picture.name})"


def _drawn(data: dict[str, Any]) -> str:
    """What the function that draws it, or the script, says of itself."""
    kind = data["kind"]
    if kind in known_kinds():
        said = import_module(f"sinkscope.figures.{kind.replace('-', '_')}").draw.__doc__
    else:
        said = import_module(data["provenance"]["argv"][2]).__doc__
    return " ".join((said or "").strip().partition("\n\n")[0].split())


def gallery(folder: Path = FIGURES) -> str:
    """The page: find-sinks first, then in the order of the kinds, those without a class last."""
    order = {kind: i for i, kind in enumerate(known_kinds())}
    pictures = [path for path in folder.glob("*.png") if path.with_suffix(".json").is_file()]
    kinds = {path: read_json(path.with_suffix(".json"))["kind"] for path in pictures}
    pictures.sort(key=lambda path: (order.get(kinds[path], len(order)), path.name))
    return "\n\n".join([_HEAD.rstrip(), *map(entry, pictures)]) + "\n"


def _command(data: dict[str, Any]) -> str:
    """The command that was given, without the files that it wrote."""
    words = list(data["provenance"]["argv"])
    if words and words[0].endswith("__main__.py"):
        words[0] = "sinkscope"
    kept: list[str] = []
    for i, word in enumerate(words):
        if word not in _OUTPUTS and not (i and words[i - 1] in _OUTPUTS):
            kept.append(word)
    return shlex.join(kept) if len(kept) > 1 else _COMMANDS[data["kind"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/gallery.md")
    write_atomic(parser.parse_args().out, gallery())
