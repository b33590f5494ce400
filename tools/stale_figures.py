"""Lists the figures whose code has changed since they were made: python -m tools.stale_figures

The code of a figure is the module that makes it, and what this imports of `sinkscope` and `experiments`. A figure's
JSON names its commit; where it names none, or one that is not in this repository, the commit that wrote the JSON
counts. The exit code is 1 if there are such figures.
"""

from __future__ import annotations

import ast
import json
import subprocess
from functools import cache
from pathlib import Path

from sinkscope.files.kinds import kind_modules
from sinkscope.files.provenance import CODE

ROOT = Path(__file__).parents[1]


def git(*words: str) -> list[str]:
    """What git prints about this repository, line by line."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.split()


@cache
def code_of(module: str) -> list[str]:
    """The paths below the repository of a module and of all that it imports, what it imports itself first."""
    found = [module]
    files: dict[str, None] = {}
    for name in found:  # grows
        place = name.replace(".", "/")
        for path in (f"{place}.py", f"{place}/__init__.py"):
            if path not in files and name.split(".")[0] in CODE and (ROOT / path).is_file():
                files[path] = None
                for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                    if isinstance(node, ast.ImportFrom) and node.module:
                        found += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return [*files]


def stale() -> dict[str, list[str]]:
    """Files of code that changed since, for each figure that has any, the nearest first."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "figures").glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        made = data["provenance"]
        argv = made.get("argv") or made["command"].split()
        module = argv[argv.index("-m") + 1] if "-m" in argv else kind_modules()[data["kind"]]
        named = (made.get("commit") or "").rstrip("+")
        known = named and git("rev-list", "--ignore-missing", "-1", named)
        (commit,) = known or git("log", "-1", "--format=%H", "--", str(file))
        changed = git("diff", "--name-only", commit, "--", *CODE)
        files = [one for one in code_of(module) if one in changed]
        if files:
            found[file.stem] = files
    return found


if __name__ == "__main__":
    figures = stale()
    for name, files in figures.items():
        print(f"{name}: {', '.join(files[:3])} ({len(files)} files)")
    raise SystemExit(bool(figures))
