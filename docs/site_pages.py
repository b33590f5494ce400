"""For the site only: pictures from figures/, notebooks as pages, and lists made from the registry."""

from __future__ import annotations

import inspect
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from sinkscope.files.registry import Entry, Parameter, entries, shared_parameters


def on_files(files: Any, config: Any) -> Any:
    """Take the pictures of the folder beside this one along, and make a page of each notebook."""
    root = Path(config.config_file_path).parent
    for picture in sorted((root / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    for path in sorted((root / "docs/notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
    return files


def notebook(path: Path) -> str:
    """A notebook with its stored outputs as Markdown."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    link = f"The notebook: `docs/notebooks/{path.name}`"
    return "\n\n".join([*parts, link]) + "\n"


def _output(output: dict[str, Any]) -> str:
    """What a cell showed: a picture, a table, or text."""
    data = {kind: "".join(part) for kind, part in output.get("data", {}).items()}
    if "image/png" in data:
        return f'<img alt="figure" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        table = re.sub(r"\n\s*\n", "\n", data["text/html"])  # an empty line would end the block
        return f'<div class="output">{table}</div>'
    return f"```text\n{''.join(output.get('text', '')) or data.get('text/plain', '')}\n```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the lists, and mend links: `../figures/x.png` is one folder nearer on the site, notebooks are pages."""
    markdown = re.sub(r"\]\(([^)]*notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*figures/)", r"](\1", markdown)
    markdown = re.sub(r"(!\[[^\]]*\]\(([^)]*figures/[^)]*)\))", r"[\1](\2)", markdown)  # a click shows it in full size
    for mark, text in (("<!-- measurements -->", measurements), ("<!-- commands -->", commands)):
        markdown = markdown.replace(mark, text()) if mark in markdown else markdown
    return markdown


def measurements() -> str:
    """Every measurement and its result, as mkdocstrings reads them."""
    found = sorted((e for e in entries().values() if e.decorator == "measurement"), key=lambda e: (e.group, e.command))
    lines: list[str] = []
    for group, members in groupby(found, key=lambda e: e.group):
        lines.append(f"## {group}\n")
        for entry in members:
            returns = getattr(entry.node.returns, "id", "")
            lines.append(f"::: {entry.module}.{entry.name}\n\n::: {entry.module}.{returns}\n")
    return "\n".join(lines)


def commands() -> str:
    """Every command with its options."""
    found = sorted(entries().values(), key=lambda e: (e.group, e.command, e.marks.get("flag") or ""))
    lines: list[str] = []
    for group, members in groupby(found, key=lambda e: e.group):
        lines.append(f"## {group}\n")
        for entry in members:
            flag = f" --{entry.marks['flag'].replace('_', '-')}" if "flag" in entry.marks else ""
            flag += ", several checkpoints" * bool(entry.marks.get("several"))
            lines.append(f"### sinkscope {entry.command}{flag}\n\n{entry.summary}\n")
            lines += _options(entry.parameters, entry)
    lines.append("## Options of every measurement\n")
    lines += _options(shared_parameters("open"))
    lines.append("Measurements that can run under interventions also take:\n")
    lines += _options(shared_parameters("edit_of"))
    return "\n".join(lines)


def _options(parameters: tuple[Parameter, ...], entry: Entry | None = None) -> list[str]:
    shown = [p for p in parameters if not p.option.hidden]
    outputs = entry.marks.get("outputs", []) if entry else []
    if not shown and not outputs:
        return []
    rows = [f"| `{p.flag}` | {p.help}{_default(p)} |" for p in shown]
    rows += [f"| `--{name}` | {text} |" for name, text, _ in outputs]
    return ["| option | |\n|---|---|", *rows, ""]


def _default(parameter: Parameter) -> str:
    value = parameter.default
    if value in (None, False, inspect.Parameter.empty):
        return ""
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return f" Default: {shown}."
