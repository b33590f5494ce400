"""A conversation in a folder: conversation.json and the safetensors file that it names by the sha256 of its content.

A new tensor file never takes the place of the old one; the JSON is replaced last and at once. So whenever the power
goes, the folder holds one whole conversation.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope._plain import build, plain
from sinkscope._provenance import provenance
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.positions import Memory, Sequence
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.loopserve.turn import Held, Turn, check_ids
from sinkscope.lines.choice import HeadLines
from sinkscope.models.checkpoint import fingerprint
from sinkscope.models.target import Target
from sinkscope.output import check_writable, write_atomic

SCHEMA, KIND, NAME = 1, "conversation", "conversation.json"
_PAGE = "saved-conversation"
_PROBED = 16  # tokens


@dataclass(frozen=True, eq=False)
class State:
    """What there is to save."""

    target: Target
    edit: Intervention | None
    answers: Literal["recompute", "keep"]
    chat: bool
    turns: tuple[Turn, ...]
    held: Held


@dataclass(frozen=True)
class _Turn:
    """A `Turn` without tensors; `lines` are the layers that have some."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    prompt_tokens: int
    queries: int
    lines: tuple[int, ...]
    events: tuple[Event, ...]
    read: float | None


@dataclass(frozen=True)
class _Layer:
    """What a `CacheLayer` knows beside tensors."""

    seen: int
    edited: bool
    ragged: bool
    rebased: bool
    reorders: int


@dataclass(frozen=True)
class _Content:
    """conversation.json, beside "schema" and "kind"."""

    model: str
    fingerprint: str
    edit: str | None
    answers: Literal["recompute", "keep"]
    chat: bool
    turns: tuple[_Turn, ...]
    layers: tuple[_Layer, ...]
    partial: bool
    settled: bool
    memory: tuple[Any, ...]  # keys of what edits know of earlier tokens
    tensors: str
    sha256: str
    versions: dict[str, str]


def write(path: str | os.PathLike[str], state: State) -> None:
    """Write the folder.

    Raises:
        SinkscopeError: nothing to save, or it cannot be written.
    """
    if state.held.sequence is None:
        raise SinkscopeError("nothing was said yet, so there is nothing to save: ask something first")
    target, sequence = state.target, state.held.sequence
    folder = Path(path)
    check_writable(folder / NAME)
    folder.mkdir(parents=True, exist_ok=True)
    keys = list(sequence.memory)
    before = _tensors_of(folder)
    name, sha256 = _write_tensors(folder, _packed(state, keys))
    content = _Content(
        target.name,
        fingerprint(target.hf),
        _named(state.edit),
        state.answers,
        state.chat,
        tuple(
            _Turn(
                t.prompt,
                t.ids,
                t.text,
                t.prompt_tokens,
                t.queries,
                tuple(i for i, lines in enumerate(t.lines) if lines is not None),
                t.events,
                t.read,
            )
            for t in state.turns
        ),
        tuple(_Layer(**{f.name: getattr(layer, f.name) for f in fields(_Layer)}) for layer in state.held.layers),
        sequence.partial,
        sequence.settled,
        tuple(keys),
        name,
        sha256,
        provenance(
            started=time.perf_counter(),
            device=target.device,
            dtype=target.dtype,
            attention="",
            bos=None,
            seed=0,
            argv=(),
        ).versions,
    )
    data = {"schema": SCHEMA, "kind": KIND, **plain(content)}
    write_atomic(folder / NAME, json.dumps(data, allow_nan=False) + "\n")
    if before is not None and before.name != name:
        before.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], target: Target, edit: Intervention | None) -> State:
    """Read the folder.

    Raises:
        SinkscopeError: it holds no conversation, one of another model or version, or damaged files; or `edit` is
            missing.
    """
    folder = Path(path)
    content = _content(folder)
    here = fingerprint(target.hf)
    if content.fingerprint != here:
        raise SinkscopeError(
            f"{folder.name} was held with {content.model} (fingerprint {content.fingerprint}), and this is "
            f"{target.name} ({here}): give the same model",
            page=_PAGE,
        )
    if content.edit is not None and edit is None:
        raise SinkscopeError(
            f"{folder.name} was held under {content.edit}: give edit=..., the same or another one; Full() for none",
            page=_PAGE,
        )
    file = folder / content.tensors
    if file.parent != folder or not file.is_file() or _sha256(file) != content.sha256:
        raise SinkscopeError(
            f"{content.tensors[:80]} in {folder.name} is missing or damaged (its sha256 is not that in {NAME}): copy "
            "the folder again, both files of one save",
            page=_PAGE,
        )
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
        probe = tensors["probe"]
        state = _unpacked(content, tensors, target, edit)
    except SinkscopeError:
        raise
    except Exception as error:  # files that were put together by hand may fail in any way
        raise _foreign(folder, f"its two files do not fit ({type(error).__name__})") from None
    _check_probe(probe, _probe(target, state.turns), folder, content.model, target)
    return state


def _content(folder: Path) -> _Content:
    try:
        data = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except OSError as error:
        raise SinkscopeError(
            f"cannot read {NAME} in {folder}: {(error.strerror or str(error)).lower()}; give a folder that "
            "Conversation.save wrote",
            page=_PAGE,
        ) from None
    except ValueError:
        raise _foreign(folder, f"{NAME} is not JSON") from None
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("schema") != SCHEMA:
        kind = (data.get("kind"), data.get("schema")) if isinstance(data, dict) else type(data).__name__
        raise _foreign(folder, f"{NAME} has kind and schema {kind!r}, expected {(KIND, SCHEMA)!r}")
    return build(_Content, data, f"{NAME} in {folder.name}")


def _foreign(folder: Path, why: str) -> SinkscopeError:
    return SinkscopeError(
        f"{folder.name} holds no conversation that this version reads: {why}; give a folder that Conversation.save "
        "wrote",
        page=_PAGE,
    )


def _named(edit: Intervention | None) -> str | None:
    return None if edit is None else repr(edit)


def _packed(state: State, keys: list[Hashable]) -> dict[str, Tensor]:
    held, sequence = state.held, state.held.sequence
    assert sequence is not None
    data = {"real": sequence.real, "bos": sequence.bos, "probe": _probe(state.target, state.turns)}
    for i, key in enumerate(keys):
        data |= {f"memory.{i}.{name}": kept for name, kept in sequence.memory[key].items()}
    for i, layer in enumerate(held.layers):
        data |= {f"layer.{i}.{name}": tensor for name, tensor in layer.state()[1].items()}
    for i, turn in enumerate(state.turns):
        for number, lines in enumerate(turn.lines):
            if lines is not None:
                data |= {f"turn.{i}.{number}.vertical": lines.vertical, f"turn.{i}.{number}.slash": lines.slash}
    # Cropped and shared tensors are parts of larger ones.
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in data.items()}


def _unpacked(content: _Content, tensors: dict[str, Tensor], target: Target, edit: Intervention | None) -> State:
    n_layers, turns = target.n_layers, list[Turn]()
    if len(content.layers) != n_layers or not content.turns:
        raise ValueError
    for i, turn in enumerate(content.turns):
        check_ids((*turn.prompt, *turn.ids), target, f"{NAME}, turn {i + 1}")
        at = [
            HeadLines(tensors[f"turn.{i}.{n}.vertical"], tensors[f"turn.{i}.{n}.slash"], turn.queries)
            if n in turn.lines
            else None
            for n in range(n_layers)
        ]
        turns.append(
            Turn(turn.prompt, turn.ids, turn.text, turn.prompt_tokens, turn.queries, tuple(at), turn.events, turn.read)
        )
    said = sum(len(turn.prompt) + len(turn.ids) for turn in turns)
    layers: list[CacheLayer] = []
    for i, flags in enumerate(content.layers):
        device = next(target.layers[i].parameters()).device
        if not 0 < flags.seen <= said or flags.seen != content.layers[0].seen:
            raise ValueError
        layers.append(_layer(flags, i, {n: t.to(device) for n, t in tensors.items() if n.startswith(f"layer.{i}.")}))
    same = _named(edit) == content.edit
    real, bos = tensors["real"].to(target.device), tensors["bos"].to(target.device)
    sequence = Sequence.of(real, bos, content.partial or not same, content.settled)  # to another edit they are new
    if same:
        for i, key in enumerate(content.memory):
            known = Memory()
            for name, tensor in tensors.items():
                if name.startswith(start := f"memory.{i}."):
                    known[name.removeprefix(start)] = tensor.to(target.device)
            sequence.memory[tuple(key) if isinstance(key, list) else key] = known
    held = Held(tuple(layers), sequence)
    return State(target, edit, content.answers, content.chat, tuple(turns), held)


def _layer(flags: _Layer, number: int, tensors: dict[str, Tensor]) -> CacheLayer:
    layer = CacheLayer()
    layer.load_state(vars(flags), {name.removeprefix(f"layer.{number}."): held for name, held in tensors.items()})
    return layer


def _probe(target: Target, turns: tuple[Turn, ...]) -> Tensor:
    """What the model makes of the first tokens: what tells models of one shape apart."""
    ids = [token for turn in turns for token in (*turn.prompt, *turn.ids)][:_PROBED]
    return target.forward(torch.tensor([ids])).last_hidden_state[0, -1].detach().float().cpu()


def _check_probe(saved: Tensor, now: Tensor, folder: Path, name: str, target: Target) -> None:
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.05
    if saved.shape != now.shape or not float((saved - now).norm()) <= tolerance * float(saved.norm()):
        raise SinkscopeError(
            f"{folder.name} was held with {name}, and this model has its shape and other weights: give the same model",
            page=_PAGE,
        )


def _tensors_of(folder: Path) -> Path | None:
    """The tensor file of an earlier save."""
    try:
        return folder / Path(_content(folder).tensors).name
    except SinkscopeError:
        return None


def _write_tensors(folder: Path, data: dict[str, Tensor]) -> tuple[str, str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = folder / f".sinkscope-{secrets.token_hex(6)}.tmp"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(data, temporary)
        temporary.chmod(mode)  # some versions make it readable to its owner alone
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        sha256 = _sha256(temporary)
        name = f"cache-{sha256[:16]}.safetensors"
        temporary.replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise SinkscopeError(f"cannot write in {folder}: {error}; make room or choose another place") from None
    finally:
        temporary.unlink(missing_ok=True)
    return name, sha256


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
