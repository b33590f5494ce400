"""The sixteen commands of sinkscope, written out with click; what a command does is imported when it runs."""

from sinkscope.app.commands import bench, look, loops, sinks
from sinkscope.app.commands.command import Command

__all__ = ["COMMANDS"]

COMMANDS: dict[str, Command] = {}
"""The commands by their words, in the order of the help: that of these files."""
for module in (sinks, loops, bench, look):
    for member in vars(module).values():
        if isinstance(member, Command):
            COMMANDS[member.words] = member
