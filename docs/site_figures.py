"""Pictures lie in figures/, outside of the documentation: the site takes them along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, config: Any) -> Any:
    """Those of the folder beside this one."""
    for picture in sorted((Path(config.config_file_path).parent / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`../figures/x.png`, right in the repository, is one folder nearer on the site."""
    return re.sub(r"\]\(\.\./((?:\.\./)*figures/)", r"](\1", markdown)
