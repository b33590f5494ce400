"""Make the neutral English text that ships: prose of the language reference that comes with Python's `pydoc`."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics

# Topics that are mostly prose. None of `pydoc_data` is in the training text.
NAMES = (
    "execmodel",
    "objects",
    "naming",
    "typesobjects",
    "atom-identifiers",
    "attribute-access",
    "binary",
    "bltin-ellipsis-object",
    "class",
    "comparisons",
    "context-managers",
    "conversions",
    "customization",
    "debugger",
    "dynamic-features",
    "exceptions",
    "function",
    "global",
    "imports",
    "nonlocal",
    "operator-summary",
    "raise",
    "return",
    "slices",
    "specialattrs",
    "try",
    "types",
    "typesfunctions",
    "typesmethods",
    "typesmodules",
    "typesseq",
    "while",
    "with",
    "yield",
)


def paragraphs(text: str) -> list[str]:
    """Whole paragraphs of prose: no headings, tables, grammar, lists of signatures or code."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if any(line.startswith(("    ", "+--", "| ", ">>>", "===", "***", "---")) or "::=" in line for line in lines):
            continue
        if any(re.fullmatch(r"[*=\-~^]{4,}", line.strip()) for line in lines):
            continue
        parts = []
        for line in lines:
            parts.append(line.strip())
        flat = re.sub(r"\s+", " ", " ".join(parts)).strip()
        flat = re.sub(r"(?<!\w)\*{1,2}([^*\s][^*]*?)\*{1,2}", r"\1", flat)
        flat = re.sub(r'"([\w.()\[\]:+\-*/ ]+)"', r"\1", flat)
        flat = re.sub(r"\s*\[\d+\]", "", flat)
        flat = re.sub(r"^[*\-] |^\d+\. ", "", flat)
        flat = flat.replace("\u2019", "'")
        if len(flat) >= 120 and flat[0].isupper() and flat[-1] in ".:" and flat.isascii():
            kept.append(flat[:-1] + "." if flat[-1] == ":" else flat)
    return kept


def typical_text(limit: int = 64_000) -> str:
    seen: dict[str, None] = {}
    size = 0
    for name in NAMES:
        for paragraph in paragraphs(topics.get(name, "")):
            if paragraph not in seen and size + len(paragraph) <= limit:
                seen[paragraph] = None
                size += len(paragraph) + 2
    return "\n\n".join(seen) + "\n"


LICENSE = """typical.txt is made of paragraphs of "The Python Language Reference" (the topics pydoc shows), taken
from the standard library of CPython; headings, tables, grammar and code were left out and markup was removed.

Copyright (c) 2001 Python Software Foundation. All Rights Reserved.
Copyright (c) 2000 BeOpen.com. All Rights Reserved.
Copyright (c) 1995-2001 Corporation for National Research Initiatives. All Rights Reserved.
Copyright (c) 1991-1995 Stichting Mathematisch Centrum. All Rights Reserved.

SPDX-License-Identifier: PSF-2.0

"""


def psf_licence() -> str:
    """The text of the licence, from the interpreter that runs."""
    import sysconfig

    text = (Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text(encoding="utf-8")
    start = text.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    return text[start : text.index("BEOPEN.COM LICENSE AGREEMENT")].rstrip() + "\n"


def main(folder: Path = Path("sinkscope/models/text")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "typical.txt").write_text(typical_text(), encoding="utf-8")
    (folder / "LICENSE-typical.txt").write_text(LICENSE + psf_licence(), encoding="utf-8")


if __name__ == "__main__":
    main()
