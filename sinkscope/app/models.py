"""The command `sinkscope models`."""

from __future__ import annotations

from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.progress import Progress, silent
from sinkscope.models.checkpoints.locate import list_models
from sinkscope.results.console import end_bar, show
from sinkscope.results.tables import Grid, Table, strings


@checks_arguments
def print_models(
    word: str | None = None,
    *,
    check: str | None = None,
    progress: Any = None,
) -> None:
    """List the short names of public models, or check one model.

    Args:
        word: Show only models whose name or hub id contains this word.
        check: Load this model, and print its adapter, the figures of the probe, and what of it is served.
        progress: Called as `progress(what, done, total)`.
    """
    if check is not None and word is not None:
        raise SinkscopeError(f"{word} has no effect with --check: leave it out")
    if check is not None:
        _check(check, progress or silent)
        return
    rows: Table = []
    for entry in list_models():
        if word is None or word.lower() in f"{entry.name} {entry.hub_id}".lower():
            rows.append({"name": entry.name, "hub id": entry.hub_id})  # the longest last
    if not rows:
        raise SinkscopeError(f"no model's name contains {word!r}: `sinkscope models` shows every name")
    print(Grid(strings(rows)).text(rows=len(rows)))


def _check(name: str, progress: Progress) -> None:
    """Print what is known of a model, and prove it."""
    from sinkscope.kv.windows import scope_line
    from sinkscope.models.adapters import shown_row
    from sinkscope.opening.inference.proof import probe
    from sinkscope.opening.live import target_of
    from sinkscope.opening.load import load

    progress(f"loading {name}, and proving its parts", 0, 0)
    target = target_of(load(name, probe=False))
    report = probe(target)
    end_bar(progress)
    verdict = "is not served"
    show(f"Adapter: {shown_row(target.adapter)}")
    if report.problem is None:
        verdict = f"is served: {scope_line(target)}"
    else:
        show(f"Problem: {report.problem}")
    show(f"\nConclusion: {target.name} ({target.hf.config.model_type}) {verdict}.")
