"""Bad input to every command, made from the registry: one line, exit 2, and no file made, changed or left."""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import typer
from checkpoints import spoiled
from sinkscope.files.registry import Entry, Parameter, entries, shared_parameters

from sinkscope.app import cli

PARTS: dict[str, list[Entry]] = {}
for _entry in entries().values():
    PARTS.setdefault(_entry.command, []).append(_entry)
Case = tuple[str, ...]
NUMBERS = {int: ("x", "1.5", "", str(2**31), str(2**63), "1" + "0" * 400), float: ("x", "nan", "inf", "1e400")}
DAMAGED = ("missing", "folder", "binary", "brackets.json", "huge.json", "other.json")
FOREIGN = ("page.html", "data.npz", "image.png", "other.json")  # none of them ours
ODD: dict[str, Callable[[Path], object]] = {
    "no-vocabulary": lambda at: spoiled(at, vocab_size=0),
    "negative-context": lambda at: spoiled(at, max_position_embeddings=-1),
    "deep": lambda at: spoiled(at, num_hidden_layers=10**9),
    "somewhat-deep": lambda at: spoiled(at, num_hidden_layers=9_999),
    "wide": lambda at: spoiled(at, hidden_size=10**12),
    "many": lambda at: spoiled(at, vocab_size=10**400),
    "nested": lambda at: (spoiled(at) / "config.json").write_text("[" * 10**6),
    "zip": lambda at: _pickled(spoiled(at), b"PK\3\4" + b"x" * 900),
    "outside": lambda at: _index(spoiled(at), "../x.safetensors"),
    "absolute": lambda at: _index(spoiled(at), "/etc/passwd"),
    "header": lambda at: (spoiled(at) / "model.safetensors").write_bytes(
        (10**6).to_bytes(8, "little") + b"{" + b"[" * (10**6 - 1)
    ),
    "escape": lambda at: spoiled(at, model_type="\x1b[2Jgone"),
}


def _pickled(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


def _index(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _bad_values(parameter: Parameter) -> Iterator[str]:
    option = parameter.option
    if parameter.type in NUMBERS and option.reads is None:
        huge = parameter.name == "seed"
        yield from (value for value in NUMBERS[parameter.type] if not (huge and value == str(2**31)))
        if option.min is not None:
            yield str(option.min - 1)
    elif get_origin(parameter.type) is Literal:
        yield from ("nonsense", "", get_args(parameter.type)[0] + "x")
    elif option.metavar and option.metavar.split("|")[0] in ("FILE", "DIR", "DIR...") and not option.writes:
        yield from DAMAGED[:3] if option.reads or parameter.name == "file" or "DIR" in option.metavar else DAMAGED
    elif parameter.name == "model":
        yield from ("", "./missing", "missing.gguf", "words.txt", "binary", "llama-2-77b", "org/missing", "\x1b[2J")
    elif parameter.name in ("device", "dtype", "policy", "methods", "budget", "bench", "dialogues", "heads", "metrics"):
        yield from ("nonsense", "")
    elif parameter.name == "text":
        yield from ("missing", "folder", "binary", "empty")


def _lead(entry: Entry, outputs: bool = True) -> list[str]:
    """The command with what it asks for, as far as that can be good without a run of another command."""
    words = [*entry.command.split(), *([f"--{entry.marks['flag']}"] if "flag" in entry.marks else [])]
    for name, _, required in entry.marks.get("outputs", []) if outputs else []:
        words += [f"--{name}", "new/out"] if required else []
    for p in entry.parameters:
        good = "new/out" if p.option.writes else "patch.json" if p.name == "patch" else "words.txt"
        good = get_args(p.type)[0] if get_origin(p.type) is Literal else "recall" if p.name == "task" else good
        if p.required or (p.option.argument and p.name == "file"):
            words += [good] if p.option.argument else [p.flag, good]
    return words


def _cases(entry: Entry, known: set[str]) -> Iterator[Case]:
    """What is refused without a model in memory; then what may need one, behind the word "slow"."""
    lead = _lead(entry)
    measures = entry.decorator == "measurement"
    writes = measures or (entry.node.returns is not None and getattr(entry.node.returns, "value", "") is not None)
    shared = shared_parameters("open") if measures else ()
    yield (*lead, "--nonsense")
    yield (*lead, "one", "two", "three", "--more")
    for parameter in {p.flag: p for p in (*shared, *entry.parameters)}.values():
        if parameter.option.hidden:
            continue
        for value in _bad_values(parameter):
            if parameter.option.argument:
                yield ("slow", *lead[: len(entry.command.split())], *lead[len(entry.command.split()) + 1 :], value)
                continue
            cheap = parameter.type in NUMBERS or get_origin(parameter.type) is Literal
            yield (*([] if cheap else ["slow"]), *lead, parameter.flag, value)
        if parameter.option.writes:
            for value in (
                "",
                "model/out",
                "/proc/out",
                "words.txt/out",
                "\udcff",
                *(["words.txt"] if "DIR" in str(parameter.option.metavar) else ["folder"]),
            ):
                yield (*lead, parameter.flag, value)
        if parameter.name == "model":
            every = entry.name in ("find_sinks", "print_generated", "loopbench_run")  # of the others each has some
            names = list(ODD) if every else [name for name in ODD if (len(name) + len(entry.name)) % 4 == 0]
            yield from (("slow", *lead, parameter.flag, f"odd/{name}") for name in names)
    for name in ("json", "html", "png") if writes else ():
        for value in ("", "folder", "model/new", "model/config.json", "words.txt/x", "/proc/x", "\udcff", *FOREIGN):
            if name != "png":  # which needs a browser
                yield (*lead, f"--{name}", value)
    if writes:
        yield (*lead, "--json", "new/same", "--html", "./new/same")
        yield (*lead, "--html", "-")
        reads = [p for p in (*entry.parameters, *shared) if p.name in ("text", "prompt", "file", "patch", "data")]
        for p in reads:
            flagged = [w for w in lead if w not in ("words.txt", "patch.json", p.flag)]
            yield (*flagged, *([] if p.option.argument else [p.flag]), "result.json", "--json", "result.json")
    for name, _, _ in entry.marks.get("outputs", []):
        for value in ("", "folder", "model/new", "/proc/x", "\udcff", *FOREIGN):
            yield (*_lead(entry, outputs=False), f"--{name}", value)


ALL = {
    f"{e.command} {e.marks.get('flag', e.name)}": list(dict.fromkeys(_cases(e, set())))
    for e in entries().values()
    if not e.marks.get("several")
}
GROUPS = {e.command.split()[0] for e in entries().values() if " " in e.command}
EVERY = pytest.mark.parametrize("name", list(ALL))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("sweep")
    (here / "folder").mkdir()
    (here / "folder" / "mine").write_text("mine")
    (here / "empty").write_text("")
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    (here / "words.txt").write_text("hello world, this is a text.\n" * 40)
    (here / "brackets.json").write_text("[" * 10**6)
    (here / "huge.json").write_text('{"schema": 1, "kind": "sink-patch", "model": null, "n": 1' + "0" * 400 + "}")
    (here / "other.json").write_text('{"mine": [1, 2, 3]}')
    (here / "result.json").write_text('{"schema": 1, "kind": "find-sinks"}')
    (here / "page.html").write_text("<html>mine</html>")
    (here / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 90)
    with zipfile.ZipFile(here / "data.npz", "w") as packed:
        packed.writestr("a.npy", b"mine")
    patch = {"schema": 1, "kind": "sink-patch", "model": None, "site": "post", "value": "second"}
    sites = [{"layer": 1, "expert": None, "neuron": 3, "calibrated": 0.5}]
    (here / "patch.json").write_text(json.dumps(patch | {"sites": sites}))
    spoiled(here / "model")
    (here / "odd").mkdir()
    for name, make in ODD.items():
        make(here / "odd" / name)
    return here


def _state(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """What is there, and of each file when it was last written, and how long it is; reading them all takes long."""
    found: dict[str, tuple[int, ...]] = {}
    for entry in os.scandir(folder):
        if entry.is_dir():
            found |= {entry.path: (), **_state(entry.path)}
        else:
            at = entry.stat()
            found[entry.path] = (at.st_ino, at.st_mtime_ns, at.st_size)
    return found


@pytest.fixture
def refused(
    files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[list[Case]], list[str]]:
    """Type commands that have to be refused; what was wrong about how they were."""
    monkeypatch.chdir(files)
    make = functools.cache(lambda *words: typer.main.get_command(real(words)))  # it takes longer than what is tested
    real = cli.command_line
    monkeypatch.setattr(cli, "command_line", lambda words: make(*words[: 2 if words[0] in GROUPS else 1]))
    before = _state(files)

    def run(cases: list[Case]) -> list[str]:
        wrong: list[str] = []
        for words in cases:
            capfd.readouterr()
            try:
                code: object = cli.main(words)
            except BaseException as error:
                code = repr(error)[:200]
            out, err = capfd.readouterr()
            problems = [] if code == 2 else [f"exit {code}"]
            lines = [line for line in err.splitlines() if not line.startswith("note: ")]
            problems += (
                [] if len(lines) == 1 and lines[0].startswith("error: ") and not out else [f"said {out + err:.300}"]
            )
            problems += ["control characters"] * any(ord(c) < 32 and c not in "\n\t" for c in out + err)
            problems += ["too long"] * (len(err) > 700)
            if (after := _state(files)) != before:
                changed = {k for k, v in after.items() if before.get(k) != v} | before.keys() - after.keys()
                problems.append(f"files {changed}")
            if problems:
                wrong.append(f"{ascii(words)[:200]}: {'; '.join(problems)}")
        return wrong

    return run


def test_there_are_many() -> None:
    quick = sum(case[0] != "slow" for cases in ALL.values() for case in cases)
    assert quick >= 300 and sum(map(len, ALL.values())) >= 600


def _at_the_door(name: str) -> tuple[list[Case], list[Case]]:
    """A third of the values of each option, other ones for the next command; and all others."""
    options: dict[Case, list[Case]] = {}
    for case in ALL[name]:
        if case[0] != "slow":
            options.setdefault(case[:-1], []).append(case)
    parts: tuple[list[Case], list[Case]] = ([], [])
    for cases in options.values():
        for i, case in enumerate(cases):
            parts[(i - list(ALL).index(name)) % min(3, len(cases)) > 0].append(case)
    return parts


@EVERY
def test_refused_at_the_door(refused: Callable[[list[Case]], list[str]], name: str) -> None:
    assert refused(_at_the_door(name)[0]) == []


@pytest.mark.slow
@EVERY
def test_refused_at_the_door_with_every_value(refused: Callable[[list[Case]], list[str]], name: str) -> None:
    assert refused(_at_the_door(name)[1]) == []


@pytest.mark.slow
@EVERY
def test_refused_after_a_look(refused: Callable[[list[Case]], list[str]], name: str) -> None:
    """Files and models that are damaged: every command meets them."""
    assert refused([case[1:] for case in ALL[name] if case[0] == "slow"]) == []
