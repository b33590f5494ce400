"""Commands about loops and dialogues."""

from __future__ import annotations

from typing import Any

import click

import sinkscope as ss
from sinkscope.app.commands.command import command, measures
from sinkscope.app.commands.options import Several, TextFile

LOOPS, DIALOGUES = "Loops", "Dialogues"

prompt = click.option(
    "--prompt-file", "prompt", type=TextFile(), help="Text to continue. By default the beginning of the typical text."
)
length = click.option(
    "--max-new-tokens", type=int, help="Tokens to generate. By default 512, or as many as the context holds."
)


@command(
    "loops",
    LOOPS,
    "sinkscope loops answers.jsonl",
    "sinkscope loops logs --field response.choices --fail-on suspicious",
    "sinkscope loops answers.csv --by prompt",
    "tail -f server.log | sinkscope loops --follow",
    "sinkscope loops --proxy http://127.0.0.1:11434 --go-on --json -",
    kinds=["loops"],
)
@click.argument(
    "files",
    metavar="[FILE|DIR|-]...",
    nargs=-1,
    help="Texts, tables (CSV, parquet), or JSON with the answers of a server, a log, a chat or a data set; also "
    "folders of these, and .gz. - is standard input.",
)
@click.option(
    "--field",
    help="Where the answers of a line of JSON are, or the column of a table, such as response.choices or turns.1. By "
    "default under one of the names of servers, logs and data sets.",
)
@click.option(
    "--by",
    metavar="FIELD",
    help="Count loops by prompt, or by the value of any field, such as model or request.temperature.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["loops", "suspicious"]),
    default="loops",
    help='From which verdict on the exit status is 3; "suspicious" counts repetitions that may be honest as well.',
)
@click.option(
    "--follow",
    is_flag=True,
    help="Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one. With "
    "--json, each is a line of JSON, also under --proxy.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", "text", "jsonl", "sse", "csv", "parquet"]),
    default="auto",
    help="What the input is. By default .json, .jsonl and .ndjson are JSON, .csv, .tsv and .parquet are tables, what a "
    "server streamed is read as such, also behind its headers and keep-alive lines, and any other file is one text.",
)
@click.option("--settings", metavar="FILE", help='Settings of the monitor, a JSON object such as {"window": 128}.')
@click.option(
    "--variant",
    type=click.Choice(["repeats", "full"]),
    default="repeats",
    help='Which monitor decides. "repeats" finds exact repetitions of anything, "full" is the paper\'s.',
)
@click.option(
    "--cut",
    type=click.Choice(["auto", "exact", "all", "none"]),
    default="auto",
    help='Which repetitions are loops, and end an answer under --proxy; the others are only reported. "auto": equal '
    'copies, and in prose also copies whose numbers change. "exact": equal copies. "all": also those of code, '
    'markup and logs whose numbers change. "none": no repetition.',
)
@click.option(
    "--prompt",
    metavar="TEXT",
    help='What was asked; copies that it asks for, such as "ten lines", are no loop. By default what the record of an '
    "answer says; the proxy reads requests.",
)
@click.option("--first", is_flag=True, help="With --follow: stop at the first loop.")
@click.option(
    "--proxy", metavar="URL", help="Stand between clients and the server at this address, and end answers that loop."
)
@click.option("--port", type=int, default=8790, help="With --proxy: port to listen at.")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="With --proxy: address to listen at, by default one that other machines cannot reach.",
)
@click.option(
    "--go-on",
    is_flag=True,
    help="With --proxy: drop the copies of a loop and ask the server to go on behind the first, at most twice for an "
    "answer. A loop in a reasoning ends the reasoning. Answers with calls of tools, schemas, probabilities or several "
    "choices are only cut.",
)
@click.option(
    "--server",
    type=click.Choice(["auto", "llama.cpp", "ollama", "vllm", "sglang", "lmstudio", "transformers", "other"]),
    default="auto",
    help="With --go-on: which server it is, as each is asked to continue in its own way. By default found out by a "
    "request for its models.",
)
@click.option(
    "--template",
    metavar="DIR",
    help="With --go-on: folder of the model, whose chat template makes the prompt that is continued; for a server that "
    "always begins a new message.",
)
@click.option(
    "--reasoning-end",
    metavar="TEXT",
    help="With --go-on: what ends a reasoning, such as </think>. By default as the chat template says.",
)
@click.option(
    "--watch-whole",
    is_flag=True,
    help="With --go-on: ask for answers that are not streamed as streams, so that they are watched, and give them to "
    "the client whole.",
)
def loops() -> Any:
    """Check outputs for repetition, or watch a stream.

    Loads no model.

    Each one loops, looped, is suspicious, is clean, or has no text. The exit status is 3 if one loops or looped, and
    else 1 if one has no text, or cannot be read.
    """
    from sinkscope.app.loops import loops

    return loops


@measures("barcode", LOOPS, "sinkscope barcode --html barcode.html", edits=True)
@prompt
@length
@click.option(
    "--heads",
    cls=Several,
    metavar="L0.H4,...",
    help="Draw these heads, and measure only their layers. By default up to four heads that the loop changes most.",
)
def barcode() -> Any:
    """Show attention in a loop, and what locks onto it.

    At every position, the attention on the suffix is indexed by offset (distance back) and compared with the row one
    period earlier. The score is the share on the same offsets. A head that always looks one token back scores high in
    any text, so heads are ranked by the increase over ordinary text (Xu et al. 2026, sections 1 and 3.2; pictures as in
    appendix E, Fig. 5). A model whose attention cannot be observed (BLOOM, Falcon, GPT-J, MPT) raises an
    `UnsupportedError`.
    """
    return ss.barcode


@measures("why", LOOPS, "sinkscope why --max-new-tokens 200", edits=True)
@prompt
@click.option(
    "--answer-file",
    "answer",
    type=TextFile(),
    help="The text after the prompt, which ends in a loop. By default what the model writes.",
)
@length
@click.option("--cuts", type=int, default=3, help="Number of positions at which causes are taken away, at least 3.")
def why() -> Any:
    """Say what keeps a loop going.

    A loop needs a cause if at least half of the continuations no longer end in it without the cause, and more than if
    as many random tokens before the loop are removed. Only if no cause is needed and the loop goes on after the first
    and the last token alone, it lies in the weights.
    """
    return ss.why


@measures("lines", DIALOGUES, "sinkscope lines --model llama-3.1-8b --data samsum.jsonl", edits=True)
@click.option("--data", help='File of JSON lines, each with a "text", to use instead.')
@click.option("--count", type=int, default=4, help="Number of pieces of ordinary text, or of lines of the file.")
@click.option(
    "--length",
    type=int,
    help="Maximum tokens per text, at least 16; longer texts are shortened in the middle. By default the context, "
    "or 512 for ordinary text.",
)
@click.option(
    "--etas",
    cls=Several,
    default=["0.05,0.1,0.15,0.2,0.25,0.3"],
    type=click.FLOAT,
    metavar="ETA,...",
    help="Shares of all lines to choose.",
)
@click.option(
    "--layers", cls=Several, type=click.INT, metavar="LAYER,...", help="Layers to measure. By default all are measured."
)
def lines() -> Any:
    """Measure attention on the heaviest lines.

    Attention is recomputed from queries and keys, some rows at a time, while the model runs normally. Memory grows
    linearly with the length. A second pass corrects for cells where chosen lines cross. Each text is read in one
    call: what acts later, as a guard or a policy that evicts once the prompt was read, changes nothing here.
    """
    return ss.lines
