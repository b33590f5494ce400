"""The sixteen commands of sinkscope, written out with click; what a command does is imported when it runs."""

from sinkscope.app.commands import bench, look, loops, sinks
from sinkscope.app.commands.command import Command

__all__ = ["COMMANDS", "LEFT"]

COMMANDS: dict[str, Command] = {}
"""The commands by their words, in the order of the help: that of these files."""
for module in (sinks, loops, bench, look):
    for member in vars(module).values():
        if isinstance(member, Command):
            COMMANDS[member.words] = member
LEFT = {
    "bench table": "`sinkscope bench DIR` shows the table of a run",
    "circuit": "`sinkscope why-sink` has its work",
    "demo": "`sinkscope scan` without a model is the tour",
    "heads": "`sinkscope why-sink` has its work",
    "lines-loss": "`python -m experiments.loopserve.lines_loss` of a clone has its work",
    "models": "`sinkscope.list_models()` lists the short names, as does the error for an unknown one",
    "patch eval": "`sinkscope patch --file FILE` has its work",
    "patch make": "`sinkscope patch --out FILE` has its work",
    "precision": "no other command has its work",
    "scan table": "`sinkscope compare DIR` puts scans side by side",
    "why": "`sinkscope why-loop` has its work",
}
"""Commands of version 0.2 that left, each with what to do instead."""
