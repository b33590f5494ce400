"""`sinkscope dialogues positions`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import Html, Json, Png, Seed, check_outputs, deliver
from sinkscope.cli.dialogues import group


@group.command("positions")
def positions_command(
    file: Annotated[
        Path, typer.Argument(help="LMSYS-Chat-1M, ShareGPT or OpenAI messages (JSON, parquet), or a message a line.")
    ],
    min_turns: Annotated[
        int, typer.Option(help="Leave out conversations with fewer messages of the user; the paper takes 2.")
    ] = 1,
    count: Annotated[
        int | None, typer.Option(help="Draw so many conversations; the paper takes 10000.", show_default="all")
    ] = None,
    examples: Annotated[int, typer.Option(help="Messages to show of each class.")] = 0,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Where questions stand in a chat log's messages: front, middle or end, by rules for English; loads no model."""
    check_outputs(json, html, png)

    from sinkscope.bench.dialogues.positions import question_positions

    result = question_positions(file, min_turns=min_turns, count=count, examples=examples, seed=seed)
    deliver(result, json, html, png)
