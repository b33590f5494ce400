"""Shows that a change of the code changes no number: the JSON of every command is recorded and compared.

The models are made once, so that both trees measure the very same folders. Each tree is recorded into a folder of its
own, and the two folders are compared; the exit code is 1 if anything differs:

    python -m tools.same_numbers models --out MODELS
    python -m tools.same_numbers record --models MODELS --out BEFORE --tree OLD_TREE
    python -m tools.same_numbers record --models MODELS --out AFTER
    python -m tools.same_numbers compare BEFORE AFTER

Only the command line of sinkscope is used, so the script does not depend on where things are in the package.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve()
BUNDLED = "bundled"  # the model inside the package, which needs no folder
TIMES = ("seconds", "time")  # fields inside a result that measure time, so that they differ from run to run

# What a user types. `{all}` stands for `{model} {text} {json}`, and `{model}` and `{text}` for nothing where the model
# is the bundled one.
_METHODS = "--methods full,streaming:80,h2o:80,snapkv:80,tova:80,adakv:80,loopserve:80"
_PROMPT = "--prompt-file {inputs}/prompt.txt {model}"
COMMANDS = {
    "find-sinks": "find-sinks {all}",
    "repeat": "repeat --max-repeats 256 {all}",
    "repeat-attention": "repeat --quantity attention --max-repeats 256 {all}",
    "repeat-probability": "repeat --quantity probability --max-repeats 256 {all}",
    "repeat-all": "repeat --tokens all --sample 64 --max-repeats 256 {all}",
    "why-sink": "why-sink {all}",
    "attack": "attack --length 8 --sequences 16 {all}",
    "patch": "patch --out patch.json --max-repeats 256 --pieces 2 --length 64 {all}",
    "patch-file": "patch --file patch.json --pieces 4 --length 64 {all}",
    "patch-generate": f"generate {_PROMPT} --max-new-tokens 16 --patch patch.json",
    "barcode": "barcode --prompt-file {inputs}/prompt.txt --max-new-tokens 96 {all}",
    "barcode-policy": "barcode --max-new-tokens 32 --policy h2o:32 {all}",
    "lines": "lines --count 2 --length 128 --etas 0.05,0.2 {all}",
    "generate": f"generate {_PROMPT} --max-new-tokens 32",
    "generate-sampled": f"generate {_PROMPT} --max-new-tokens 32 --temperature 1",
    "generate-policy": f"generate {_PROMPT} --max-new-tokens 32 --policy snapkv:72",
    "generate-guard": f"generate {_PROMPT} --max-new-tokens 400 --guard",
    "bench-file": "bench --task {inputs}/prompts.jsonl --out file --max-new-tokens 12 {methods} {model}",
    "bench-file-table": "bench file {json}",
    "bench-text": "bench --task text:source={inputs}/prompts.jsonl:prompt=120:answer=12 --out text {methods} {model}",
    "bench-text-table": "bench text {json}",
}
ONCE = {  # these measure no model, or the recall model of the package
    "bench-recall": "bench --task recall --out recall --methods full,streaming:0.25,h2o:0.25,loopserve:0.25",
    "bench-recall-table": "bench recall {json}",
    "loops": "loops {inputs}/outputs.jsonl {json}",
}
ONLY = click.option("--only", default="", help="Only the results whose names begin so: a command, such as patch.")
FOLDER = click.Path(path_type=Path)


@click.group()
def app() -> None:
    """Show that a change of the code changes no number."""


# --- the models and what they read -----------------------------------------------------------------------------------


@app.command("models")
@click.option("--out", type=FOLDER, required=True, help="A new folder.")
def make_models(out: Path) -> None:
    """Write five organisms and the inputs of all models. The same call writes the same files."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    import torch
    from loop_texts import prose
    from organisms import kept_loop, organism

    torch.set_num_threads(1)
    made = {
        "llama": organism("llama", 0),
        "llama-none": organism("llama", 2, kind="none"),
        "llama-no-bos": organism("llama", 7, bos=False),
        "mixtral": organism("mixtral", 6),
    }
    for name, o in made.items():
        o.save(out / name)
        texts = [o.tokenizer.decode(row, skip_special_tokens=True) for row in o.natural(n=60, length=100)]
        write_inputs(out, name, texts, " ".join([*texts[0].split()[:40], *texts[1].split()[:8] * 6]))
    loop = kept_loop(seed=1)
    loop.model.save_pretrained(out / "loop")
    loop.tokenizer.save_pretrained(out / "loop")
    walks = [loop.tokenizer.decode(loop.walk(start, 100)) for start in range(60)]
    write_inputs(out, "loop", walks, loop.tokenizer.decode(loop.turn[1:]))
    write_inputs(out, BUNDLED, [prose(80, seed) for seed in range(60)], "The cat sat on the mat. " * 12)


def write_inputs(out: Path, name: str, texts: list[str], prompt: str) -> None:
    """Write typical text, a prompt, prompts for the bench and outputs for `loops`, all made of `texts`."""
    folder = out / f"{name}-inputs"
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "prompt.txt").write_text(prompt)
    prompts: list[dict[str, Any]] = []
    for i in range(2):
        context = " ".join(" ".join(texts[i : i + 2]).split()[:150])
        answer = texts[i].split()[4]
        prompts.append({"id": f"p{i}", "prompt": context, "answers": [answer]})
    save_lines(folder / "prompts.jsonl", prompts)
    save_lines(folder / "outputs.jsonl", [{"text": texts[0]}, {"text": texts[1] + texts[2][:40] * 20}])


def save_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    lines: list[str] = []
    for row in rows:
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


# --- recording -------------------------------------------------------------------------------------------------------


@app.command("record")
@click.option("--models", type=FOLDER, required=True, help="The folder that `models` wrote.")
@click.option("--out", type=FOLDER, required=True, help="Where the recording is written.")
@click.option("--tree", type=FOLDER, default=HERE.parents[1], help="The tree whose sinkscope runs.")
@ONLY
@click.option("--model", multiple=True, help="This model only (may be given again).")
def record_tree(models: Path, out: Path, tree: Path, only: str, model: tuple[str, ...]) -> None:
    """Run every command on every model, each model in a process of its own, and keep the results."""
    folders = sorted(file.parent.name for file in models.glob("*/config.json"))
    env = {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    failed = False
    for name in model or [BUNDLED, *folders]:
        words = [str(models.resolve()), str(out.resolve()), name, "--only", only]
        failed |= bool(
            subprocess.run([sys.executable, "-P", str(HERE), "one", *words], env=env, check=False).returncode
        )
    sys.exit(int(failed))


@app.command("one", hidden=True)
@click.argument("models", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.argument("name")
@ONLY
def record_model(models: Path, out: Path, name: str, only: str) -> None:
    """Record one model in this process."""
    import numpy as np
    import torch

    from sinkscope import __file__ as package

    torch.set_num_threads(1)
    commands = COMMANDS | (ONCE if name == BUNDLED else {})
    (out / name).mkdir(parents=True, exist_ok=True)
    print(f"{name}: recorded with {Path(package).parent}")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for label in filter(lambda one: one.startswith(only), commands):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            started = time.perf_counter()
            kept = run(words_of(commands[label], models, name))
            print(f"{name}: {label}: exit {kept['exit']}, {time.perf_counter() - started:.1f} s", flush=True)
            (out / name / f"{label}.json").write_text(json.dumps(kept, indent=1) + "\n")


def words_of(command: str, models: Path, name: str) -> list[str]:
    """The command line: `command` with its placeholders filled in."""
    folder, inputs = f"{models}/{name}", f"{models}/{name}-inputs"
    model, text = f"--model {folder}", f"--text {inputs}/text.txt"
    if name == BUNDLED:
        model, text = "", ""
    out = "--json result.json"
    filled = {"all": f"{model} {text} {out}", "model": model, "json": out}
    return command.format(inputs=inputs, methods=_METHODS, **filled).split()


def run(words: list[str]) -> dict[str, Any]:
    """Run one command in the current folder and return what is kept: the exit code and the result."""
    from sinkscope.app.cli import main

    said, noted = io.StringIO(), io.StringIO()
    Path("result.json").unlink(missing_ok=True)  # no command replaces the result of another
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(noted):
        try:
            code: Any = main(words)
        except Exception as error:  # a crash is recorded as well; the other commands go on
            code = type(error).__name__
    if code != 0:
        return {"exit": code, "refused": noted.getvalue().strip()}
    if words[-1] == "result.json":
        return {"exit": 0, **json.loads(Path("result.json").read_text())}
    if words[0] == "generate":
        return {"exit": 0, "result": {"text": said.getvalue(), "events": noted.getvalue().splitlines()}}
    return {"exit": 0}


# --- comparing -------------------------------------------------------------------------------------------------------


def essence(recorded: Any) -> Any:
    """What must be equal: all but the settings and the provenance of results, measured times, and texts of errors."""
    if isinstance(recorded, list):
        return [essence(item) for item in recorded]
    if not isinstance(recorded, dict):
        return recorded
    aside = (*TIMES, "refused", *(("settings", "provenance") if "result" in recorded else ()))
    return {key: essence(value) for key, value in recorded.items() if key not in aside}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """One line for every place in which two JSON values differ; numbers are equal only if every digit is."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            place = f"{path}.{key}" if path else key
            if key not in after:
                yield f"{place}: missing, was {short(before[key])}"
            elif key not in before:
                yield f"{place}: new, {short(after[key])}"
            else:
                yield from differences(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{path}: {len(before)} items, now {len(after)}"
        for i, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{path}[{i}]")
    elif type(before) is not type(after) or before != after:
        yield f"{path}: {short(before)}, now {short(after)}"


def short(value: Any) -> str:
    """The value in at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


@app.command("compare")
@click.argument("before", type=FOLDER)
@click.argument("after", type=FOLDER)
@ONLY
@click.option("--model", default="*", help="This model only.")
@click.option("--shown", default=20, help="Differences to print of each result.")
def compare(before: Path, after: Path, only: str, model: str, shown: int) -> None:
    """Say for every model and command whether both recordings are equal. The exit code is 1 if any differs."""
    found: dict[str, list[str]] = {}
    for name in sorted({str(file.relative_to(d)) for d in (before, after) for file in d.glob(f"{model}/{only}*.json")}):
        one, other = (essence(json.loads(f.read_text())) if (f := d / name).exists() else {} for d in (before, after))
        found[name] = list(differences(one, other))
        print(f"{'DIFFERS' if found[name] else 'equal  '} {name.removesuffix('.json')}")
        print(*(f"    {line}" for line in found[name][:shown]), sep="\n", end="\n" if found[name] else "")
    equal = sum(not lines for lines in found.values())
    print(f"{equal} of {len(found)} results are equal.")
    sys.exit(int(equal < len(found) or not found))


if __name__ == "__main__":
    app()
