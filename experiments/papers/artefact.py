"""An artefact of a paper: what it asks, what answers it, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from sinkscope.app.commands import COMMANDS
from sinkscope.app.commands.command import Command
from sinkscope.app.commands.others import other_command
from sinkscope.files.plain import pathless
from sinkscope.results.result import Result

BUNDLED = "bundled"


@dataclass(frozen=True)
class Minutes:
    """What an artefact costs on two cores, as it was measured.

    Attributes:
        bundled: Minutes on the model in the package.
        smollm2: Minutes on SmolLM2 (135M). None: it was not measured there.
    """

    bundled: float
    smollm2: float | None = None

    def __str__(self) -> str:
        with_smollm2 = "not timed" if self.smollm2 is None else f"{self.smollm2:g} min"
        return f"{self.bundled:g} min; with SmolLM2 {with_smollm2}"


@dataclass(frozen=True)
class Artefact:
    """A table, figure, theorem, lemma, algorithm or appendix of a paper, or several that one command answers.

    It has a `command`, or a `module`, or a `reason`.

    Attributes:
        name: What is typed, such as "fig5".
        numbers: What it is in the paper's own numbering, such as ("Fig. 5", "Theorem 4.1").
        asks: The question, in one sentence.
        command: The words of a command of sinkscope that answers it. "{stem}" is where its files begin.
        module: The module of this paper's folder with a measurement of the same name, which answers it.
        words: Options that the module's command always has. "{out}" is the folder of the files.
        cost: What it costs.
        reason: Why nothing answers it, or where the answer stands.
    """

    name: str
    numbers: tuple[str, ...]
    asks: str
    command: str = ""
    module: str = ""
    words: str = ""
    cost: Minutes | None = None
    reason: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether a command answers it."""
        return bool(self.command or self.module)


@dataclass(frozen=True)
class Paper:
    """A paper: its artefacts, in the order of its pages.

    Attributes:
        name: What is typed, such as "repeated-token".
        title: Its title.
        artefacts: All of them.
    """

    name: str
    title: str
    artefacts: tuple[Artefact, ...]

    @cached_property
    def measured(self) -> tuple[Artefact, ...]:
        """Those that a command answers."""
        return tuple(artefact for artefact in self.artefacts if artefact.is_measured)

    def command_of(self, artefact: Artefact) -> Command:
        """Return the command of sinkscope that answers an artefact, or that of its measurement."""
        if artefact.command:
            return COMMANDS[artefact.command.partition(" ")[0]]
        kind = artefact.module.replace("_", "-")
        return other_command(kind, EntryPoint(kind, f"{self.place_of(artefact)}:{artefact.module}", ""))

    def place_of(self, artefact: Artefact) -> str:
        """Return the module that answers an artefact; empty if a command of the package does."""
        return f"{__package__}.{self.folder}.{artefact.module}" if artefact.module else ""

    def words_of(self, artefact: Artefact, model: str | None, out: Path) -> list[str]:
        """Return what is typed behind the command.

        Args:
            artefact: The artefact.
            model: The model; None: that of the package.
            out: Folder of the files.
        """
        stem = self.stem_of(artefact, model, out)
        words = [word.format(out=out) for word in artefact.words.split()]
        if artefact.command:
            words = artefact.command.format(stem=stem).split()[1:]
        if model is not None:
            words += ["--model", model]
        return [*words, "--json", str(self.file_of(artefact, model, out))]

    def stem_of(self, artefact: Artefact, model: str | None, out: Path) -> Path:
        """Return the beginning of the names of its files."""
        short = Path(pathless(model)).stem if model else BUNDLED
        return out / f"{self.folder}_{artefact.name}_{short}"

    def file_of(self, artefact: Artefact, model: str | None, out: Path) -> Path:
        """Return the file of its result."""
        stem = self.stem_of(artefact, model, out)
        return stem.with_name(f"{stem.name}.json")

    def load(self, artefact: Artefact, file: Path) -> Any:
        """Read a result of an artefact."""
        if artefact.command:
            return Result.load(file)
        measurement = getattr(import_module(self.place_of(artefact)), artefact.module)
        return measurement.result.load(file)

    @property
    def folder(self) -> str:
        """The folder of its modules, in which underscores stand for hyphens."""
        return self.name.replace("-", "_")
