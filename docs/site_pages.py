"""For the site only: pictures and tables from figures/, notebooks as pages, and lists from the table of commands."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import click
from mkdocs.structure.files import File
from plotly.io import from_json
from plotly.offline import get_plotlyjs

from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import Command
from sinkscope.app.commands.options import EDITS, MODEL, OUTPUTS, SETUP
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Measurement

PLOTLY = "plotly.min.js"
COLAB = "https://colab.research.google.com"
BADGE = f"{COLAB}/assets/colab-badge.svg"
FIGURE = "application/vnd.plotly.v1+json"
INTERACTIVE: set[str] = set()
"""Pictures that have an interactive page, by the names of their files."""


def on_files(files: Any, config: Any) -> Any:
    """Take the pictures of the folder beside this one along, and make a page of each notebook."""
    root = Path(config.config_file_path).parent
    for picture in sorted((root / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    for tables in sorted((root / "figures").glob("*.md")):
        files.append(File.generated(config, f"figures/{tables.name}", content=tables.read_text(encoding="utf-8")))
    for name, page in interactive_figures(root):
        files.append(File.generated(config, f"figures/{name}", content=page))
    for path in sorted((root / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path, config.repo_url)))
    return files


def interactive_figures(root: Path) -> Iterator[tuple[str, str]]:
    """Name and content of a page for each picture that has data beside it, and plotly's script, which they share."""
    sys.path.insert(0, str(root))  # the scripts that draw some of them are in no package that is installed
    from experiments.drawn import figure_of, pictures

    for picture in pictures(root / "figures"):
        try:
            figure = figure_of(picture).update_layout(width=None)
        except SinkscopeError:  # a method of a library that is not installed here; the picture remains
            continue
        yield f"{picture.stem}.html", figure.to_html(include_plotlyjs=PLOTLY)
        INTERACTIVE.add(picture.stem)
    yield PLOTLY, get_plotlyjs()


def notebook(path: Path, repository: str | None = None) -> str:
    """A notebook with its stored outputs as Markdown; a badge opens it in Colab if `repo_url` is set in mkdocs.yml."""
    parts: list[str] = []
    figures = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        shown = source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        if "checks" in cell["metadata"].get("tags", ()):
            shown = f'<details markdown="1"><summary>The checks</summary>\n\n{shown}\n\n</details>'
        parts.append(shown)
        for output in cell.get("outputs", ()):
            if FIGURE in output.get("data", {}):
                parts.append(_drawn(output["data"][FIGURE], figures))
                figures += 1
            else:
                parts.append(_output(output))
    link = f"The notebook: `docs/notebooks/{path.name}`"
    if repository is not None and "github.com/" in repository:
        name = repository.partition("github.com/")[2].strip("/")
        link += f" [![Open in Colab]({BADGE})]({COLAB}/github/{name}/blob/main/docs/notebooks/{path.name})"
    return "\n\n".join([*parts, link]) + "\n"


def _drawn(figure: dict[str, Any], number: int) -> str:
    """An interactive figure; the first one of a page loads plotly's script."""
    script = f"../figures/{PLOTLY}" if number == 0 else False
    drawn = from_json(json.dumps(figure), skip_invalid=True)
    return _block(drawn.to_html(full_html=False, include_plotlyjs=script, div_id=f"figure-{number}"))


def _block(markup: str) -> str:
    """Markup as one block of a page: an empty line would end it."""
    return '<div class="output">' + re.sub(r"\n\s*\n", "\n", markup) + "</div>"


def _output(output: dict[str, Any]) -> str:
    """What a cell showed: a table or text."""
    data = {kind: "".join(part) for kind, part in output.get("data", {}).items()}
    if "text/html" in data:
        return _block(data["text/html"])
    return f"```text\n{''.join(output.get('text', '')) or data.get('text/plain', '')}\n```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the lists, and mend links: `../figures/x.png` is one folder nearer on the site, notebooks are pages."""
    markdown = re.sub(r"\]\(([^)]*notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*figures/)", r"](\1", markdown)
    markdown = markdown.replace("](../docs/", "](../")
    markdown = re.sub(r"!\[[^\]]*\]\(([^)]*figures/)(\w[\w-]*)\.png\)", _linked, markdown)
    markdown = re.sub(r"<!-- measurements: (\w+) -->", lambda found: measurements(found[1]), markdown)
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", command_lists())
    return markdown


def _linked(picture: re.Match[str]) -> str:
    """A picture that opens as an interactive figure, or in full size if it has no data."""
    folder, stem = picture.groups()
    kind = "html" if stem in INTERACTIVE else "png"
    return f"[{picture[0]}]({folder}{stem}.{kind})"


def measurements(section: str) -> str:
    """The measurements of a section and their results, as mkdocstrings reads them."""
    entries: list[str] = []
    for command in _by_section()[section]:
        function = command.load()
        if isinstance(function, Measurement):
            result = get_type_hints(function.function)["return"].__name__
            module = function.function.__module__
            entries.append(f"::: {module}.{function.function.__name__}\n\n::: {module}.{result}\n")
    return "\n".join(entries)


def command_lists() -> str:
    """Every command with its options."""
    lines: list[str] = []
    described = COMMANDS["barcode"]  # it has all options that measurements share
    described.describe()
    shared = {one.name: one for one in described.params}
    for section, members in _by_section().items():
        lines.append(f"## {section}\n")
        for command in members:
            command.describe()
            lines.append(f"### sinkscope {command.words}\n\n{inspect.cleandoc(command.help or '')}\n")
            lines += _options(command.own)
    lines.append("## Options of every measurement\n")
    lines += _options([shared[one.name] for one in (*MODEL[1:], *SETUP)])
    lines.append("Measurements that can run under interventions also take:\n")
    lines += _options([shared[one.name] for one in EDITS])
    lines.append("Commands with a result write it to files:\n")
    lines += _options(OUTPUTS)
    return "\n".join(lines)


def _by_section() -> dict[str, list[Command]]:
    sections: dict[str, list[Command]] = {}
    for command in COMMANDS.values():
        sections.setdefault(command.section, []).append(command)
    return sections


def _options(params: Sequence[click.Parameter]) -> list[str]:
    """A table of arguments and options."""
    rows: list[str] = []
    for one in params:
        name = one.opts[0] if isinstance(one, click.Option) else one.human_readable_name
        rows.append(f"| `{name}` | {one.help} |".replace("|-", "\\|-"))
    if not rows:
        return []
    return ["| option | |\n|---|---|", *rows, ""]
