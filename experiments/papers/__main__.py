"""Every table, figure, theorem, lemma, algorithm and appendix of the three papers, and the command that answers it.

python -m experiments.papers                                            lists them
python -m experiments.papers loopserve fig4 --model MODEL --out DIR     measures one
python -m experiments.papers loopserve all --model MODEL --out DIR      measures what DIR does not have yet
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from experiments.drawn import write_png
from experiments.papers.artefact import Artefact, Minutes, Paper
from experiments.papers.loopguard import LOOPGUARD
from experiments.papers.loopserve import LOOPSERVE
from experiments.papers.repeated_token import REPEATED_TOKEN
from sinkscope.app.cli import run
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import pathless
from sinkscope.results.console import note, show
from sinkscope.results.result import Result

PAPERS = (REPEATED_TOKEN, LOOPGUARD, LOOPSERVE)
GUESS = 10  # times as long as with the model in the package
PACKAGE = "experiments.papers"
PROGRAM = f"python -m {PACKAGE}"
MODEL = click.Option(["--model"], help="Short name, hub id, folder or .gguf file. By default the model in the package.")
OUT = click.Option(
    ["--out"], type=click.Path(file_okay=False, path_type=Path), default=Path("papers"), help="Folder of the files."
)


class ArtefactCommand(click.Command):
    """The command of one artefact: further options are those of the command that answers it."""

    def __init__(self, paper: Paper, artefact: Artefact) -> None:
        """Make it."""
        command = paper.command_of(artefact)
        help = f"{artefact.asks} ({', '.join(artefact.numbers)}) Further options are those of {answer(artefact)}."
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(artefact.name, params=[MODEL, OUT], help=help, context_settings=settings)
        self.paper = paper
        self.artefact = artefact
        self.answering = command

    def invoke(self, ctx: click.Context) -> None:
        """Measure, and write the result and its figure."""
        measure(self.paper, self.artefact, ctx.params["model"], ctx.params["out"], ctx.args)


class AllCommand(click.Command):
    """The command that measures all artefacts of a paper that a folder does not have yet."""

    def __init__(self, paper: Paper) -> None:
        """Make it."""
        super().__init__("all", params=[MODEL, OUT], help="Measure every artefact whose file is not in the folder yet.")
        self.paper = paper

    def invoke(self, ctx: click.Context) -> None:
        """Measure one artefact after the other, and say how long the others will take."""
        model, out = ctx.params["model"], ctx.params["out"]
        waiting: list[Artefact] = []
        for artefact in self.paper.measured:
            if not self.paper.file_of(artefact, model, out).exists():
                waiting.append(artefact)
        note(f"{len(self.paper.measured) - len(waiting)} of {len(self.paper.measured)} artefacts are in {out}")
        failed: list[str] = []
        expected = spent = 0.0
        for at, artefact in enumerate(waiting):
            left = sum(minutes_of(later, model) for later in waiting[at:])
            if spent:
                left *= spent / expected  # this machine and model, against the times that were noted
            note(f"{at + 1} of {len(waiting)}: {artefact.name}; about {max(left, 1):.0f} min left for all")
            begun = time.perf_counter()
            try:
                measure(self.paper, artefact, model, out, [])
            except SinkscopeError as error:  # such as a model without what is asked for
                failed.append(f"{artefact.name}: {error}")
            spent += (time.perf_counter() - begun) / 60
            expected += minutes_of(artefact, model)
        for line in failed:
            note(f"not measured: {line}")


def minutes_of(artefact: Artefact, model: str | None) -> float:
    """Return what an artefact was measured to cost; where it was not, a guess, which the first artefacts correct."""
    cost = artefact.cost or Minutes(1)
    if model is None:
        return cost.bundled
    return cost.smollm2 if cost.smollm2 is not None else GUESS * cost.bundled


def measure(paper: Paper, artefact: Artefact, model: str | None, out: Path, words: Sequence[str]) -> Result:
    """Run the command of an artefact, which writes NAME.json, and draw NAME.png beside it.

    Args:
        paper: The paper.
        artefact: The artefact.
        model: The model; None: that of the package.
        out: Folder of the files; it is made.
        words: Further options of the command.

    Raises:
        SinkscopeError: Bad input.
    """
    command = paper.command_of(artefact)
    out.mkdir(parents=True, exist_ok=True)
    typed = [*without(paper.words_of(artefact, model, out), words), *words]
    command.main(args=typed, prog_name=f"sinkscope {command.name}", standalone_mode=False)
    file = paper.file_of(artefact, model, out)
    result: Any = paper.load(artefact, file)
    chosen = [] if model is None else ["--model", model]
    argv = ["python", "-m", PACKAGE, paper.name, artefact.name, *chosen, "--out", str(out), *words]
    result = replace(result, provenance=replace(result.provenance, argv=tuple(map(pathless, argv))))
    result.save(file)
    if type(result).figure is not Result.figure:
        try:
            write_png(result.figure(), file.with_suffix(".png"))
        except (ValueError, RuntimeError) as error:  # kaleido or the browser is missing
            note(f"no PNG: {error}")
    return result


def without(defaults: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the options of an artefact, less those that are given anew: one that takes several values would add."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    kept: list[str] = []
    is_given = False
    for word in defaults:
        if word.startswith("--"):
            is_given = word in flags
        if not is_given:
            kept.append(word)
    return kept


def answer(artefact: Artefact) -> str:
    """Return what answers an artefact, in words."""
    if artefact.command:
        words = artefact.command.split()
        return f"sinkscope {words[0]}"
    return f"experiments/papers: {artefact.module}"


def listed(papers: Sequence[Paper]) -> str:
    """Return the artefacts as lines: name, numbers, question; command and cost, or the reason for none."""
    lines: list[str] = []
    for paper in papers:
        lines += [f"{paper.name}: {paper.title}", ""]
        for artefact in paper.artefacts:
            lines.append(f"  {artefact.name:12} {', '.join(artefact.numbers)}: {artefact.asks}")
            if artefact.command:
                lines.append(f"{'':14} sinkscope {artefact.command.replace('{stem}', 'NAME')}")
            elif artefact.module:
                lines.append(f"{'':14} {PROGRAM} {paper.name} {artefact.name} {artefact.words}".rstrip())
            else:
                lines.append(f"{'':14} not measured: {artefact.reason}")
            if artefact.cost is not None:
                lines.append(f"{'':14} {artefact.cost}")
        lines.append("")
    return "\n".join(lines).rstrip()


class PaperGroup(click.Group):
    """The artefacts of a paper; without a word it lists them."""

    def __init__(self, paper: Paper) -> None:
        """Make it."""
        super().__init__(paper.name, help=paper.title, invoke_without_command=True, callback=self.list_artefacts)
        self.paper = paper

    def list_artefacts(self) -> None:
        """List the artefacts where none is named."""
        if click.get_current_context().invoked_subcommand is None:
            show(listed([self.paper]))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all artefacts that a command answers."""
        return [*(artefact.name for artefact in self.paper.measured), "all"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of an artefact.

        Raises:
            SinkscopeError: The paper has no such artefact, or nothing answers it; the error says why.
        """
        if cmd_name == "all":
            return AllCommand(self.paper)
        for artefact in self.paper.artefacts:
            if artefact.name == cmd_name and not artefact.is_measured:
                raise SinkscopeError(f"{self.paper.name} {cmd_name} is not measured: {artefact.reason}")
            if artefact.name == cmd_name:
                return ArtefactCommand(self.paper, artefact)
        names = ", ".join(self.list_commands(ctx))
        raise SinkscopeError(f"{self.paper.name} has no artefact {cmd_name!r}: give one of {names}")


def program() -> click.Group:
    """Return the whole program."""
    return click.Group(PROGRAM, commands={paper.name: PaperGroup(paper) for paper in PAPERS}, help=__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; without a word it lists every artefact."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    if not words:
        show(listed(PAPERS))
        return 0
    return run(program(), words)


if __name__ == "__main__":
    raise SystemExit(main())
