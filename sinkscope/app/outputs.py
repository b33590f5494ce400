"""The files that a command will write, checked before its work begins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output, check_writable, is_device

REPLACE = "give another name, or --force to replace it"


def check_outputs(
    paths: Mapping[str, str],
    kinds: Mapping[str, Sequence[str | None]],
    inputs: Mapping[str, str | None],
    *,
    force: bool = False,
) -> None:
    """Refuse outputs of a command, before its work begins, that cannot be written or would replace one another.

    Args:
        paths: Files and folders that will be written, by option.
        kinds: Kinds of each file that `write_output` will write, by option.
        inputs: The option of each other value; none of the files among the values is ever replaced.
        force: Allow them to replace any file.

    Raises:
        SinkscopeError: One of them is refused.
    """
    options: dict[Path, str | None] = {}
    for name, flag in inputs.items():
        if os.path.isfile(name):
            options[Path(os.path.realpath(name))] = flag
    for flag, path in paths.items():
        if flag in kinds:
            target = check_output(path, kinds[flag], force=force, remedy=REPLACE)
        else:
            target = check_writable(path, folder=True)
        if target in options and not is_device(target):
            raise SinkscopeError(f"{target.name} is given for {options[target]} and {flag}: give each its own file")
        options[target] = flag
