"""Run every command on two real models: CPU seconds, peak memory, and what it says.

    python -m experiments.real.commands --real FOLDER --out figures/real_models.json

Each command is a process of its own on one thread. The models are given as folders, which are made once from the GGUF
files in FOLDER. What is measured goes to the file after each command, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.real.models import MODELS, saved
from experiments.record import Row, earlier, write_record
from experiments.script import run as run_script
from sinkscope.errors import SinkscopeError

ROOT = Path(__file__).parents[2]
PROMPT = "The most important rule of good writing is"
COLUMN = "after"
"""Where the rows go; "before" holds what was printed before these models chose anything."""
CUT = -24
"""The exit code of a process that ran out of CPU seconds (SIGXCPU)."""


@dataclass(frozen=True)
class Command:
    """A command of the table.

    Attributes:
        words: Its words; `{model}` is the folder of the model, other files are in the current folder.
        bound: The CPU seconds after which it is cut.
        needs: A file that an earlier command writes.
    """

    words: str
    bound: int = 240
    needs: str = ""


COMMANDS = {
    "find-sinks": Command("find-sinks {model} --json results/find-sinks.json"),
    "repeat": Command("repeat {model} --tokens the,company,cat --max-repeats 512 --json results/repeat.json"),
    "lines": Command("lines {model} --data texts.jsonl --length 256 --etas 0.1 --json results/lines.json"),
    "generate": Command("generate --model {model} --prompt-file prompt.txt --max-new-tokens 160"),
    "generate --policy": Command("generate --model {model} --prompt-file long.txt --policy snapkv:0.5"),
    "generate --guard": Command("generate --model {model} --prompt-file prompt.txt --max-new-tokens 160 --guard"),
    "loops": Command("loops answer.txt --json results/loops.json", needs="answer.txt"),
    "barcode": Command("barcode {model} --prompt-file prompt.txt --max-new-tokens 160 --json results/barcode.json"),
    "why-loop": Command(
        "why-loop {model} --prompt-file prompt.txt --max-new-tokens 160 --cuts 3 --json results/why-loop.json"
    ),
    "why-sink": Command("why-sink {model} --json results/why-sink.json"),
    "attack": Command("attack {model} --json results/attack.json"),
    "patch": Command("patch {model} --out patch.json --json results/patch.json"),
    "bench": Command("bench --model {model} --task text --methods full,streaming:0.5,snapkv:0.5 --out runs"),
    "view": Command("view {model} --html view.html"),
    "scan --quick": Command("scan {model} --quick --out scan"),
    "report": Command("report results --out report.html", needs="results/find-sinks.json"),
    "check-cache": Command("check-cache snapkv"),
}


def main(
    *,
    real: Path,
    out: Path,
    models: Sequence[Literal[*MODELS]] = tuple(MODELS),
    commands: Sequence[str] = (),
    again: bool = False,
) -> None:
    """Run the commands on the models, and write the table.

    Args:
        real: The folder with the GGUF files.
        out: The file of the table.
        models: The models. By default both.
        commands: The commands. By default all.
        again: Run commands again that the file has.
    """
    version = git("describe", "--always", "--dirty", "--abbrev=8")
    for name in commands or COMMANDS:
        if name not in COMMANDS:
            raise SinkscopeError(f"--commands {name!r}: expected one of {', '.join(COMMANDS)}")
        for model in models:
            table = earlier(out)
            row = table.setdefault(name, {}).setdefault(model, {})
            if COLUMN in row and not again:
                continue
            folder = prepared(real, model)
            row["command"] = "sinkscope " + COMMANDS[name].words.format(model=model)
            row[COLUMN] = {"code": version, **measured(COMMANDS[name], folder)}
            write_record(out, "real-models", table, {"seed": 0, "threads": 1})


def git(*words: str) -> str:
    """What git says of this checkout."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def prepared(real: Path, model: str) -> Path:
    """The folder in which the commands of a model run: the model itself, and the texts that they read."""
    from tests.real import texts

    folder = real / "table" / model
    (folder / "results").mkdir(parents=True, exist_ok=True)
    if not (folder / model).exists():
        (folder / model).symlink_to(saved(model, real).absolute())
    (folder / "prompt.txt").write_text(PROMPT)
    (folder / "long.txt").write_text(texts.prose()[:2000])
    lines = [json.dumps({"text": text()[:4000]}) for text in texts.KINDS.values()]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def measured(command: Command, folder: Path) -> Row:
    """What a command costs and says, in a process of its own."""
    if command.needs and not (folder / command.needs).exists():
        return {"not_run": f"{command.needs} is missing, because the command that writes it was cut or failed"}
    words = command.words.format(model=folder.name).split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    bound = command.bound
    if "--out" in words:  # a command resumes in a folder that it finds
        shutil.rmtree(folder / words[words.index("--out") + 1], ignore_errors=True)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (bound, bound + 5))

    with (folder / "stdout.txt").open("w+") as stdout, (folder / "stderr.txt").open("w+") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "sinkscope", *words],
            cwd=folder, env=environment, stdout=stdout, stderr=stderr, preexec_fn=bounded,
        )  # fmt: skip
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        said, notes = stdout.read(), stderr.read()
    if words[0] == "generate" and "--policy" not in words and "--guard" not in words and child.returncode == 0:
        (folder / "answer.txt").write_text((folder / "prompt.txt").read_text() + said)
    return {
        "exit_code": child.returncode,
        "cut": child.returncode == CUT,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "bound": bound,
        "peak_bytes": 1024 * used.ru_maxrss,
        "said": first_said(said, notes),
    }


def first_said(said: str, notes: str) -> str:
    """The conclusion that a command printed, or else the first line of its output, or of its notes."""
    lines = [line.strip() for line in f"{said}\n{notes}".splitlines() if line.strip()]
    for line in lines:
        if line.startswith("Conclusion: "):
            return line.removeprefix("Conclusion: ")
    return lines[0] if lines else ""


if __name__ == "__main__":
    run_script(main)
