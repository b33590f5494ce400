"""The table of commands. Adding a command to sinkscope is one line here; nothing is imported until it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from sinkscope.errors import SinkscopeError

ENTRY_POINTS = "sinkscope.measurements"
"""Group of entry points by which other packages add measurements."""

COMMANDS: dict[str, tuple[str, str, str]] = {  # words of the command: (module:function, group, one line of help)
    "find-sinks": (
        "sinkscope.sinks.first_token.find:find_sinks",
        "Sinks",
        "Find the layer and the neurons that make the sink.",
    ),
    "circuit": ("sinkscope.sinks.first_token.circuit:circuit", "Sinks", "Trace the circuit of the sink."),
    "heads": (
        "sinkscope.sinks.first_token.marking_heads:marking_heads",
        "Sinks",
        "Find the heads that mark the first token.",
    ),
    "patch make": (
        "sinkscope.sinks.patch.make:make_patch",
        "Sinks",
        "Make a patch and prove that it repairs repetition.",
    ),
    "patch eval": ("sinkscope.sinks.patch.evaluate:evaluate_patch", "Sinks", "Measure what a patch costs."),
    "repeat": (
        "sinkscope.sinks.repetition.repeat:repeat",
        "Repetition",
        "Measure what repeated tokens do to norm, attention or output.",
    ),
    "attack": (
        "sinkscope.sinks.attack.attack:cluster_attack",
        "Repetition",
        "Make sinks with different tokens that one head marks.",
    ),
    "loops": ("sinkscope.app.loops:check_loops", "Loops", "Check outputs for repetition, or watch a stream."),
    "loops compare": (
        "sinkscope.app.loops:compare_loops",
        "Loops",
        "Compare detectors of loops on texts whose truth is known.",
    ),
    "barcode": ("sinkscope.attention.barcode:barcode", "Loops", "Show attention in a loop, and what locks onto it."),
    "lines": ("sinkscope.attention.lines:line_weights", "Dialogues", "Measure attention on the heaviest lines."),
    "bench": ("sinkscope.bench.run:bench", "Benchmark", "Compare methods on prompts: scores beside costs."),
    "bench table": ("sinkscope.bench.table:bench_table", "Benchmark", "Show the tables of finished runs."),
    "scan": ("sinkscope.app.scan:scan", "Look", "Run all measurements on a model and write its sink card."),
    "demo": ("sinkscope.app.scan:demo", "Look", "Take a two-minute tour of the bundled model."),
    "view": ("sinkscope.app.view.command:view_model", "Look", "Explore a model on a text in the browser."),
    "models": ("sinkscope.app.models:print_models", "Look", "List the short names of public models."),
    "generate": ("sinkscope.app.generate:print_generated", "Look", "Continue a prompt under a patch, policy or guard."),
    "report": ("sinkscope.app.report:report", "Look", "Write all results of a folder as one HTML file."),
}

KIND_MODULES = {  # kinds of results that no command returns under the name of its function
    "bench": "sinkscope.bench.table",
    "line-weights": "sinkscope.attention.lines",
    "loops": "sinkscope.loops.check",
    "loops-compare": "sinkscope.loops.compare",
    "patch-eval": "sinkscope.sinks.patch.evaluate",
    "patch-make": "sinkscope.sinks.patch.make",
    "sink-card": "sinkscope.app.card",
    "view": "sinkscope.app.view.result",
}


@dataclass(frozen=True)
class Command:
    """A line of the table.

    Attributes:
        words: What is typed, such as "find-sinks" or "patch make".
        target: Its function, as "module:function".
        group: Heading under which the help lists it.
        help: One line.
    """

    words: str
    target: str
    group: str
    help: str

    @property
    def module(self) -> str:
        """Module of its function."""
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.target.partition(":")[2]

    @property
    def public(self) -> bool:
        """Whether `sinkscope` has its function as a public name: it is a measurement."""
        return not self.module.startswith(("sinkscope.app.", "sinkscope.bench."))

    def load(self) -> Any:
        """Its function; this imports its module."""
        return resolve_name(self.target)


@cache
def commands() -> dict[str, Command]:
    """Every command by its words: those of the table, then those of other packages.

    Raises:
        SinkscopeError: Another package uses words or a name that are taken.
    """
    table = {words: Command(words, *line) for words, line in COMMANDS.items()}
    for point in entry_points(group=ENTRY_POINTS):
        name = point.value.partition(":")[2]
        words = name.replace("_", "-")
        if words in table or any(name == other.name for other in table.values()):
            raise SinkscopeError(
                f"{point.value} is registered under the name of another command, {words}: give the function another "
                "name"
            )
        table[words] = Command(words, point.value, "Other packages", f"See sinkscope {words} --help.")
    return table


def measurement_targets() -> dict[str, str]:
    """Public name of each measurement of the table, with its "module:function"."""
    return {command.name: command.target for command in commands().values() if command.public}


@cache
def kind_modules() -> dict[str, str]:
    """Each kind of result, with the module that defines it."""
    modules: dict[str, str] = {}
    for words, command in commands().items():
        if command.public and command.module not in KIND_MODULES.values():
            modules[words] = command.module
    return modules | KIND_MODULES
