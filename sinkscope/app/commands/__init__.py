"""The commands of sinkscope, written out with click; what a command does is imported when it runs."""

from sinkscope.app.commands import bench, look, loops, sinks
from sinkscope.app.commands.command import Command

__all__ = ["COMMANDS"]

COMMANDS: dict[str, Command] = {
    one.words: one
    for one in (
        sinks.find_sinks,
        sinks.circuit,
        sinks.heads,
        sinks.patch_make,
        sinks.patch_eval,
        sinks.precision,
        sinks.repeat,
        sinks.attack,
        loops.check_loops,
        loops.barcode,
        loops.why,
        loops.lines,
        bench.bench,
        bench.bench_table,
        bench.check_cache,
        look.scan,
        look.demo,
        look.scan_table,
        look.view_model,
        look.print_models,
        look.print_generated,
        look.report,
    )
}
"""The commands by their words, in the order of the help."""
