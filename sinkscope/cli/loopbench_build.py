"""`sinkscope loopbench build`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, note
from sinkscope.cli.common import Revision, Seed
from sinkscope.cli.loopbench import group
from sinkscope.errors import SinkscopeError


class BenchName(StrEnum):
    """Benchmarks that can be built."""

    dc = "dc"
    ri = "ri"
    wiki2 = "2wiki"


@group.command("build")
def build_command(
    bench: Annotated[BenchName, typer.Option(help="LoopBench-DC, LoopBench-RI or 2WikiMultihopQA.")],
    source: Annotated[
        str, typer.Option(metavar="PATH|hub", help="LongBench's .jsonl file, its folder or data.zip, or hub.")
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the prompts are written, as JSON lines.")],
    model: Annotated[str | None, typer.Option(help="Count tokens with the tokenizer of this model.")] = None,
    revision: Revision = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Count tokens with this tokenizer, instead of --model.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Prompts.", show_default="the paper's: 300 dc, 200 ri")
    ] = None,
    target_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Mean length; of 2wiki the longest.", show_default="the paper's: 3853 dc, 5376 ri"),
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Dataset, with --source hub.", show_default="zai-org/LongBench")
    ] = None,
    file: Annotated[str | None, typer.Option(help="File in it.", show_default="data.zip")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it is there.")] = False,
    seed: Seed = 0,
) -> None:
    """Make prompts from LongBench's files, with the mean length reached beside the paper's."""
    from sinkscope.bench.loopbench.build import TASKS, build
    from sinkscope.bench.loopbench.longbench import ARCHIVE, REPO, read_longbench
    from sinkscope.bench.sets import HUB, check_out, write_set

    if source != HUB and (repo or file):
        raise SinkscopeError(f"--repo and --file belong to --source {HUB}; --source is {source!r}")
    check_out(out, force=force)

    from sinkscope.bench.loopbench.tokens import open_tokenizer

    counting, name = open_tokenizer(model, tokenizer, revision)
    records = read_longbench(TASKS[bench.value], source, repo=repo or REPO, file=file or ARCHIVE)
    with Progress() as progress:
        built = build(
            bench.value,
            records,
            counting,
            tokenizer_name=name,
            count=count,
            seed=seed,
            target_tokens=target_tokens,
            progress=progress,
        )
    prompts, manifest = write_set([prompt.to_json() for prompt in built.made], built.manifest, out, force=force)
    print(built.text())
    note(f"wrote {prompts.name} and {manifest.name}")
