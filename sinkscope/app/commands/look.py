"""Commands to look at models and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sinkscope.app.commands.command import command
from sinkscope.app.commands.options import EDITS, LOAD, MODEL, SETUP, TextFile

LOOK = "Look"


@command(
    "scan",
    LOOK,
    "sinkscope scan llama-2-7b --out llama",
    "sinkscope scan ./fine-tuned --against llama/card.json",
    shared=[*MODEL, *SETUP],
    kinds=["sink-card"],
)
@click.option("--out", metavar="FOLDER", help="Folder for the results and the card. By default scan-NAME.")
@click.option(
    "--quick",
    is_flag=True,
    help="Use smaller numbers, and end each part after a time: about two minutes for a model of 135 million "
    "parameters, and in proportion for larger ones. The card says which parts were cut short.",
)
@click.option("--against", metavar="CARD", help="A card.json, or the folder of a scan, to compare with.")
def scan() -> Any:
    """Run all measurements on a model and write its sink card.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.
    """
    from sinkscope.app.scan import scan

    return scan


@command("demo", LOOK, "sinkscope demo", kinds=["sink-card"])
def demo() -> Any:
    """Take a tour of the bundled model.

    The page is sinkscope-demo/card.html.
    """
    from sinkscope.app.scan import demo

    return demo


@command("scan table", LOOK, "sinkscope scan table small --html small.html --csv small.csv", kinds=["scan-table"])
@click.argument("folder", metavar="DIR", help="The folder that holds the folders of the scans.", type=Path)
def scan_table() -> Any:
    """Join the cards of several scans into one table.

    If a scan has no card, the status is 1.
    """
    from sinkscope.app.report import scan_table

    return scan_table


@command(
    "view",
    LOOK,
    "sinkscope view",
    "sinkscope view llama-2-7b --text answer.txt --html view.html",
    shared=[*MODEL, *SETUP],
    kinds=["view"],
)
@click.option("--text", metavar="FILE|-", help="The text; - is standard input. By default a story.")
@click.option("--port", type=int, default=0, help="Port of the live page. By default a free one.")
def view_model() -> Any:
    """Explore a model on a text in the browser.

    Without a file to write, the page is served on this machine only, at an address that it prints, until Ctrl-C. Other
    texts can then be typed, and any neuron or head switched off. With --html the page is a file that stands alone.
    """
    from sinkscope.app.view.command import view_model

    return view_model


@command("models", LOOK, "sinkscope models llama")
@click.argument(
    "word", metavar="[WORD]", help="Show only models whose name or hub id contains this word.", required=False
)
@click.option(
    "--check",
    metavar="MODEL",
    help="Load this model, and print its adapter, the figures of the probe, and what of it is served.",
)
def print_models() -> Any:
    """List the short names of public models."""
    from sinkscope.app.models import print_models

    return print_models


@command(
    "generate",
    LOOK,
    'sinkscope generate "The bird sang the same song again:" --guard',
    shared=[*MODEL[1:], *LOAD, *EDITS],
    processes=True,
)
@click.argument("prompt", metavar="[PROMPT]", help="The prompt.", required=False)
@click.option("--prompt-file", type=TextFile(), help="File with the prompt; - is standard input.")
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Whether the prompt begins with BOS. By default the tokenizer, or the chat template, decides.",
)
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Whether the prompt is a message in the tokenizer's chat template. By default it is if there is one.",
)
@click.option(
    "--policy",
    metavar="NAME[:BUDGET]",
    help="What the KV cache keeps, such as streaming:512, snapkv:0.25:window=64 or package.module:Class:512.",
)
@click.option(
    "--guard",
    is_flag=True,
    help="Break repetition loops with LoopGuard, and remove them from the text, which is shown once it is complete. "
    "The guard as published is --policy loopguard:paper.",
)
@click.option("--max-new-tokens", type=int, default=100, help="Longest answer.")
@click.option("--temperature", type=float, default=0.0, help="0 takes the likeliest token.")
@click.option("--seed", type=int, default=0, help="Seed of the sampling.")
def print_generated() -> Any:
    """Continue a prompt under a patch, policy or guard."""
    from sinkscope.app.generate import print_generated

    return print_generated


@command("report", LOOK, "sinkscope report results --out everything.html")
@click.argument(
    "folder",
    metavar="DIR",
    help="Folder with the JSON files of results and folders of `sinkscope bench`, also in its subfolders.",
)
@click.option("--out", metavar="FILE", help="The page; by default report.html in the folder.")
def report() -> Any:
    """Write all results of a folder as one HTML file.

    JSON files that hold no result are named at the end of the page; hidden files and all others are left out silently.
    """
    from sinkscope.app.report import report

    return report
