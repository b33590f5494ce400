"""The command line: each command is a thin call of one public function. Importing this loads no torch."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkscope import __version__
from sinkscope._console import Progress, emit, note, print_result
from sinkscope.errors import SinkscopeError
from sinkscope.output import check_writable

app = typer.Typer(
    name="sinkscope",
    help="Find the attention sink of a language model, prove it by ablation, and repair what it breaks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Backend(StrEnum):
    """Kinds of model object."""

    bridge = "bridge"
    hf = "hf"
    nnsight = "nnsight"


Model = Annotated[
    str | None,
    typer.Option(help="Short name, hub id, folder or .gguf file.", show_default="the model in the package"),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Load the model as this kind of object.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, float16.", show_default="the checkpoint's")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="A BOS token first.", show_default="the tokenizer's")]
Text = Annotated[Path | None, typer.Option(help="Typical text.", show_default="the text in the package")]
MaxRepeats = Annotated[int | None, typer.Option(min=1, help="Largest number of repetitions.")]
Seed = Annotated[int, typer.Option(min=0, help="Of every random choice.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON.")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write tables and figures into one file.")]
Png = Annotated[
    str | None, typer.Option("--png", metavar="FILE", help="Write the figure; needs kaleido and a browser.")
]


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"sinkscope {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command("find-sinks")
def find_sinks_command(
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = None,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    text: Text = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Read every layer; adds the sink rate.")] = False,
    top_k: Annotated[int, typer.Option(min=1, help="Neurons to ablate.")] = 8,
    max_repeats: MaxRepeats = None,
    seed: Seed = 0,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Which layer and which neurons make the attention sink, proven by ablation against a control."""
    _check_outputs(json, html, png)

    from sinkscope.sinks.find import find_sinks

    with Progress() as progress:
        result = find_sinks(
            _load(model, backend, revision=revision, device=device, dtype=dtype),
            bos=bos,
            text=text,
            all_layers=all_layers,
            top_k=top_k,
            max_repeats=max_repeats,
            seed=seed,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    _deliver(result, json, html, png)


@app.command("models")
def models_command(json: Json = None) -> None:
    """Short names of public models, and where papers found their sinks."""
    _check_outputs(json)

    from sinkscope._plain import plain
    from sinkscope.models.names import models

    entries = models()
    if json is not None:
        from json import dumps

        emit(json, dumps({"schema": 1, "kind": "models", "result": plain(entries)}, indent=1) + "\n")
    if json != "-":
        from sinkscope._console import print_models

        print_models(entries)


@app.command("generate")
def generate_command(
    prompt_file: Annotated[str, typer.Option(metavar="FILE|-", help="The prompt; - is standard input.")],
    model: Model = None,
    revision: Revision = None,
    backend: BackendOption = Backend.hf,
    device: Device = None,
    dtype: DType = None,
    bos: Bos = None,
    patch: Annotated[Path | None, typer.Option(help="patch.json to run under.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
) -> None:
    """Continue a prompt, with a patch if one is given: text on stdout, events on stderr."""
    prompt = _read_prompt(prompt_file)
    if patch is not None:
        _read(patch)

    from sinkscope.generate import generate

    made = generate(
        _load(model, backend, revision=revision, device=device, dtype=dtype),
        prompt,
        patch=patch,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        bos=bos,
        on_text=lambda _, piece: print(piece, end="", flush=True),  # what is there stays, also after Ctrl-C
    )[0]
    print()
    for event in made.events:
        where = f"step {event.step}, position {event.position}, layer {event.layer}"
        note(f"{event.kind}: {where}" + "".join(f", {name} {value}" for name, value in event.data.items()))


def _load(model: str | None, backend: Backend | None, **options: Any) -> Any:
    """The model as the kind of object that was asked for; a name stays a name if none was."""
    if backend is None:
        return model
    from sinkscope.models.load import load

    return load(model, backend=backend.value, **{k: v for k, v in options.items() if v is not None})


def _check_outputs(*paths: str | None) -> None:
    """Refuse before the work what could not be written after it."""
    files = [path for path in paths if path not in (None, "-")]
    written = [str(check_writable(path)) for path in files if path is not None]
    for path in written:
        if written.count(path) > 1 and not path.startswith("/dev/"):
            raise SinkscopeError(f"{Path(path).name} is given for two outputs: give each its own file")
    if len(paths) == 3:
        for path in paths[1:]:
            if path == "-":
                raise SinkscopeError("only --json writes to standard output with -: give the name of a file")
        if paths[2] is not None:
            from sinkscope.html import check_png

            check_png()


def _deliver(result: Any, json: str | None, html: str | None, png: str | None) -> None:
    """Standard output first: what cannot be written to a file is at least seen."""
    if json != "-":
        print_result(result)
    if json is not None:
        emit(json, result.to_json())
    if html is not None:
        from sinkscope.html import save_html

        save_html(result, html)
    if png is not None:
        from sinkscope.html import save_png

        save_png(result, png)


def _read_prompt(name: str) -> str:
    text = sys.stdin.read() if name == "-" else _read(Path(name))
    if not text:
        raise SinkscopeError("the prompt is empty: write at least one word into the file")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SinkscopeError(f"{path.name} is not UTF-8 text: convert it, or give another file") from None
    except OSError as error:
        raise SinkscopeError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `sinkscope`; by default those of this process.

    Returns:
        0 done, 2 bad input (one line on stderr), 130 interrupted.
    """
    _quiet()
    try:
        code = app(args=list(sys.argv[1:] if argv is None else argv) or ["--help"], prog_name="sinkscope",
                   standalone_mode=False)  # fmt: skip
        sys.stdout.flush()
        if code == 130:  # Ctrl-C, as typer hands it on
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SinkscopeError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return 130
    except (BrokenPipeError, SystemExit):  # the reader, `head` say, has seen enough; typer turns it into an exit
        _drop_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _refuse("cannot write to standard output: the disk is full; make room and run the command again")
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        return _refuse(
            "out of memory: try --dtype bfloat16, --device cpu, a smaller --max-repeats, or leave out --all-layers"
        )


def _drop_output() -> None:
    """What is still in the buffer has nowhere to go; Python would say so again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the command, and where to read on."""
    message = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path if context else 'sinkscope'} --help)"


def _out_of_memory(error: BaseException) -> bool:
    words = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _quiet() -> None:
    """Other libraries' notes and bars stay off: what matters is said by sinkscope itself."""
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")  # tokens need not fit the terminal's encoding
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
