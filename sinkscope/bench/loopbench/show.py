"""One prompt as every method continued it, side by side (Xu et al. 2026, appendix D)."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope._plain import visible
from sinkscope.bench.loopbench.metrics import Continued, Ended, Ending, ending, read_run
from sinkscope.bench.loopbench.tables import title
from sinkscope.bench.methods import check_methods, order_of
from sinkscope.bench.store import Contents, envelope
from sinkscope.errors import SinkscopeError
from sinkscope.results import Result, cell

SHOWN = 1200  # characters of an output in a terminal: its first and last half


@dataclass(frozen=True)
class Output(Ending):
    """What one method wrote.

    Attributes:
        method: name of the method.
        text: what was written.
        ended: by the end of sequence, a stopper, or the cap.
        steps: where `window_ttr` was taken.
        window_ttr: type-token ratio of the last window.
    """

    method: str
    text: str
    ended: Ended
    steps: tuple[int, ...]
    window_ttr: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Shown(Result):
    """One prompt of a run.

    Attributes:
        prompt: its id.
        bench: its set.
        prompt_text: the prompt.
        outputs: of each method.
    """

    kind: ClassVar[str] = "loopbench-show"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_shown"

    prompt: str
    bench: str
    prompt_text: str
    outputs: tuple[Output, ...]

    def rows(self) -> list[dict[str, Any]]:
        """A row per method, without the texts."""
        names = ("method", "ended", "length", "ttr", "cr", "loop", "tail_loop", "collapse")
        return [{n: getattr(o, n) for n in names} | {"interventions": len(o.interventions)} for o in self.outputs]

    def summary(self) -> str:
        """The prompt's end, and how each method's output ended."""
        last = visible(self.prompt_text).strip().splitlines()[-1:]
        return f"{self.model.name}, {title(self.bench)}, prompt {self.prompt} (ends {''.join(last)[-100:]!r})"

    def text(self) -> str:
        """The outputs below each other, and the numbers."""
        parts = [f"--- {o.method} ({_ending(o)})\n{_middle_out(visible(o.text))}" for o in self.outputs]
        return "\n\n".join([super().text(), *parts])

    def table(self) -> Any:
        """The outputs side by side."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        grid = Table(header_style="bold", show_lines=True)
        for o in self.outputs:
            grid.add_column(Text(f"{o.method}\n{_ending(o)}"), ratio=1, overflow="fold")
        grid.add_row(*(Text(_middle_out(visible(o.text))) for o in self.outputs))
        return Group(super().table(), grid)

    def to_html(self) -> str:
        """Prompt and outputs whole, side by side, everything escaped."""
        columns = "".join(
            f'<td style="vertical-align:top;text-align:left;min-width:22em"><b>{html.escape(o.method)}</b> '
            f"({html.escape(_ending(o))})<pre>{html.escape(visible(o.text))}</pre></td>"
            for o in self.outputs
        )
        return (
            f"{super().to_html()}<details><summary>prompt</summary><pre>{html.escape(visible(self.prompt_text))}</pre>"
            f'</details><div class="figure"><table><tr>{columns}</tr></table></div>'
        )


def _ending(o: Output) -> str:
    loop = "loop" if o.loop else "ends in a loop" if o.tail_loop else "no loop"
    count = len(o.interventions)
    guard = f", {count} intervention{'s' * (count != 1)}" if count else ""
    return f"{o.length} tokens, {o.ended}, {loop}, TTR {cell(o.ttr)}, CR {cell(o.cr)}{guard}"


def _middle_out(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def show(folder: str | os.PathLike[str], prompt: str | int, *, methods: Sequence[str] | None = None) -> Shown:
    """Set the outputs of one prompt side by side.

    Args:
        folder: of a run.
        prompt: id of the prompt, or its number in the run, from 0.
        methods: only these; None: all that were run.

    Raises:
        SinkscopeError: no such prompt, a method that is unknown or was not run.
    """
    started = time.perf_counter()
    run = read_run(folder)
    known = _prompt(run, str(prompt))
    there = {record.method: record for record in run.records if record.prompt == known}
    wanted = [m.spec for m in check_methods(methods)] if methods is not None else sorted(there, key=order_of)
    if not there:
        raise SinkscopeError(f"prompt {known!r} was not run yet in {run.name}: go on with `sinkscope loopbench run`")
    for name in wanted:
        if name not in there:
            raise SinkscopeError(f"{name} was not run on prompt {known!r} in {run.name}: there are {', '.join(there)}")
    cap, window = int(run.settings["max_new_tokens"]), int(run.settings["window"])
    shared: dict[str, Any] = {
        **envelope([run], started, "prompts"),
        "settings": {"folder": run.name, "prompt": known, **run.settings},
    }
    return Shown(
        **shared,
        prompt=known,
        bench=str(run.prompts[known].get("bench")),
        prompt_text=str(run.prompts[known].get("prompt")),
        outputs=tuple(_output(there[name], cap, window) for name in wanted),
    )


def _prompt(run: Contents[Continued], wanted: str) -> str:
    ids = list(run.prompts)
    if wanted in run.prompts:
        return wanted
    if wanted.isdecimal() and int(wanted) < len(ids):
        return ids[int(wanted)]
    raise SinkscopeError(
        f"prompt {wanted!r} is not in {run.name}: give a number from 0 to {len(ids) - 1}, or an id such as {ids[0]!r}"
    )


def _output(record: Continued, cap: int, window: int) -> Output:
    return Output(
        **vars(ending(record, cap, window)),
        method=record.method,
        text=record.text,
        ended=record.ended,
        steps=tuple(record.signals["step"]),
        window_ttr=tuple(record.signals["ttr"]),
    )
