"""Commands about loops and dialogues."""

from __future__ import annotations

import click

from sinkscope.app.commands.command import command, measures
from sinkscope.app.commands.options import Several, TextFile

LOOPS, DIALOGUES = "Loops", "Dialogues"

prompt = click.Option(["--prompt-file", "prompt"], type=TextFile())
length = click.Option(["--max-new-tokens"], type=int)

loops = command(
    "loops",
    "app.loops:loops",
    LOOPS,
    "sinkscope loops answers.jsonl",
    "sinkscope loops logs --field response.choices --fail-on suspicious",
    "sinkscope loops answers.csv --by prompt",
    "tail -f server.log | sinkscope loops --follow",
    "sinkscope loops --proxy http://127.0.0.1:11434 --go-on --json -",
    params=[
        click.Argument(["files"], metavar="[FILE|DIR|-]...", nargs=-1),
        click.Option(["--field"]),
        click.Option(["--by"], metavar="FIELD"),
        click.Option(["--fail-on"], type=click.Choice(["loops", "suspicious"]), default="loops"),
        click.Option(["--follow"], is_flag=True),
        click.Option(
            ["--format", "form"], type=click.Choice(["auto", "text", "jsonl", "sse", "csv", "parquet"]), default="auto"
        ),
        click.Option(["--settings"], metavar="FILE"),
        click.Option(["--variant"], type=click.Choice(["repeats", "full"]), default="repeats"),
        click.Option(["--cut"], type=click.Choice(["auto", "exact", "all", "none"]), default="auto"),
        click.Option(["--prompt"], metavar="TEXT"),
        click.Option(["--first"], is_flag=True),
        click.Option(["--proxy"], metavar="URL"),
        click.Option(["--port"], default=8790),
        click.Option(["--host"], metavar="ADDRESS", default="127.0.0.1"),
        click.Option(["--go-on"], is_flag=True),
        click.Option(
            ["--server"],
            type=click.Choice(["auto", "llama.cpp", "ollama", "vllm", "sglang", "lmstudio", "transformers", "other"]),
            default="auto",
        ),
        click.Option(["--template"], metavar="DIR"),
        click.Option(["--reasoning-end"], metavar="TEXT"),
        click.Option(["--watch-whole"], is_flag=True),
    ],
    described=["app.loops.check:check_files", "app.loops.follow:follow_stream", "app.loops.proxy:serve_proxy"],
    kinds=["loops"],
)

barcode = measures(
    "barcode",
    LOOPS,
    "sinkscope barcode --html barcode.html",
    params=[prompt, length, Several(["--heads"], metavar="L0.H4,...")],
    edits=True,
)

why = measures(
    "why",
    LOOPS,
    "sinkscope why --max-new-tokens 200",
    params=[
        prompt,
        click.Option(["--answer-file", "answer"], type=TextFile()),
        length,
        click.Option(["--cuts"], default=3),
    ],
    edits=True,
)

lines = measures(
    "lines",
    DIALOGUES,
    "sinkscope lines --model llama-3.1-8b --data samsum.jsonl",
    params=[
        click.Option(["--data"]),
        click.Option(["--count"], default=4),
        click.Option(["--length"], type=int),
        Several(["--etas"], default=["0.05,0.1,0.15,0.2,0.25,0.3"], type=click.FLOAT, metavar="ETA,..."),
        Several(["--layers"], type=click.INT, metavar="LAYER,..."),
    ],
    edits=True,
)

lines_loss = measures(
    "lines-loss",
    DIALOGUES,
    "sinkscope lines-loss --model llama-3.1-8b --data texts.jsonl --length 4096",
    params=[
        click.Option(["--data"]),
        click.Option(["--count"], default=4),
        click.Option(["--length"], default=512),
        Several(["--alphas"], default=["0.9,0.95,0.99"], type=click.FLOAT, metavar="ALPHA,..."),
    ],
)
