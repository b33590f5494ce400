"""What a conversation holds between turns, and its folder: conversation.json and a safetensors file that it names.

The tensor file's name is the sha256 of its content. A new file never overwrites the old one, and the JSON is replaced
last, in one step. The folder therefore holds one complete conversation even if the power fails in between.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from copy import copy as duplicate
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_writable, read_json, write_atomic
from sinkscope.files.plain import plain
from sinkscope.files.records import build
from sinkscope.files.result import versions
from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.positions import Memory, Sequence
from sinkscope.kv.cache import CacheLayer
from sinkscope.lines.choice import HeadLines
from sinkscope.models.checkpoint import fingerprint
from sinkscope.models.inputs import read_row
from sinkscope.models.target import Target

Answers = Literal["recompute", "keep"]
Stock = Literal["offloaded", "quantized", "fp8"]
SCHEMA, KIND, NAME = 1, "conversation", "conversation.json"
_PAGE = "saved-conversation"


@dataclass(frozen=True, eq=False)
class TurnRecord:
    """One turn of a conversation, without tensors.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids of the answer, including the end-of-sequence token if it was generated.
        text: The answer as text, without special tokens. None without a tokenizer.
        prompt_tokens: Length of the whole conversation, in tokens, when the answer begins.
        queries: Number of tokens read in one pass before the answer: the part of the previous answer that has to be
            read, and `prompt`.
        events: What the edit did; `step` counts the turn's forward calls.
        read: Tokens that a decoding step attended to, including its own, averaged over steps, layers and kv heads.
            None if the answer is a single token, which follows from the prompt without a decoding step.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    prompt_tokens: int
    queries: int
    events: tuple[Event, ...] = field(repr=False)
    read: float | None


@dataclass(frozen=True, eq=False)
class Turn(TurnRecord):
    """One turn of a conversation.

    Attributes:
        lines: For each layer, the lines along which the queries attended, except last queries that attend to
            everything (`dense_rows`). None where attention was dense.
        output: What `model.generate` returned. None in a conversation that was loaded.
    """

    lines: tuple[HeadLines | None, ...] = field(repr=False)
    output: Any = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Held:
    """The cache after a turn, and what edits know about its tokens. It is immutable, so a turn can be abandoned.

    Attributes:
        layers: Layers of the cache, either `CacheLayer` or those of transformers; empty before the first turn.
        sequence: Its tokens.
        kind: Kind of transformers cache. None means `CacheLayer`, whose tokens can be hidden and evicted.
    """

    layers: tuple[Any, ...] = ()
    sequence: Sequence | None = None
    kind: Stock | None = None

    @property
    def seen(self) -> int:
        """Tokens that went through the model, evicted or not."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0

    def cache(self, target: Target) -> Any:
        """A cache to continue with. Tensors are shared, because changes to a layer always create new ones."""
        from transformers import DynamicCache

        cache: Any = DynamicCache() if self.kind is None else stock_cache(self.kind, target)
        if self.layers:
            cache.layers = [duplicate(layer) for layer in self.layers]
            cache.layer_class_to_replicate = None
        return cache

    def to(self, kind: Stock | None, target: Target) -> Held:
        """The same keys and values in another kind of cache; only whole, unquantised layers can be moved."""
        if kind == self.kind or self.sequence is None:
            return replace(self, kind=kind)
        cache: Any = Held(kind=kind).cache(target)
        if kind is not None:
            if any(layer.edited for layer in self.layers):
                raise SinkscopeError(
                    f"cache={kind!r}: tokens were evicted or hidden, which transformers' caches do not know: leave "
                    "it out"
                )
            for i, layer in enumerate(self.layers):
                cache.update(layer.keys, layer.values, i)
            return Held(tuple(cache.layers), self.sequence, kind)
        if self.kind != "offloaded":
            raise SinkscopeError(
                f"cache={self.kind!r} is not saved, because its keys and values are not exact: keep `chat.ids`, "
                "and read them as the first prompt of a new conversation"
            )
        layers = tuple(CacheLayer() for _ in self.layers)
        for new, old in zip(layers, self.layers, strict=True):
            new.fill(old.keys.to("cpu"), old.values.to("cpu"), self.sequence.columns.to("cpu"))
        return Held(layers, self.sequence)


def offloads(target: Target) -> bool:
    """Whether anything has to be moved; with a model on the CPU, the cache is already there."""
    return target.device.type != "cpu"


def stock_cache(kind: Stock, target: Target) -> Any:
    """Make an empty transformers cache.

    Raises:
        SinkscopeError: No quantisation package is installed, or the model has layers that cannot be quantised.
    """
    from transformers import DynamicCache, QuantizedCache

    if kind == "offloaded":
        return DynamicCache(offloading=offloads(target))
    if kind == "fp8":
        backends, options = ("fp8",), {}
    else:
        # Groups have to divide a token's keys.
        group = math.gcd(64, target.n_kv_heads * target.head_width)
        backends, options = ("quanto", "hqq"), {"q_group_size": group}
    why: Exception | None = None
    for backend in backends:
        try:
            return QuantizedCache(backend, target.config, **options)
        except (ImportError, ValueError) as error:
            why = why if isinstance(why, ValueError) else error
    if isinstance(why, ImportError):
        raise SinkscopeError(
            f"cache={kind!r} needs a package that quantises: pip install optimum-quanto (or hqq)"
        ) from None
    raise SinkscopeError(
        f"cache={kind!r}: transformers does not quantise the cache of {target.name}: "
        f'{" ".join(str(why).split())[:200]}; use cache="offloaded"'
    ) from None


@dataclass(frozen=True)
class _Content:
    """conversation.json without "schema" and "kind"."""

    model: str
    fingerprint: str
    edit: str | None
    answers: Answers
    chat: bool
    turns: tuple[TurnRecord, ...]
    layers: tuple[dict[str, Any], ...]
    partial: bool
    settled: bool
    memory: tuple[Any, ...]  # keys of what edits know of earlier tokens
    tensors: str
    sha256: str
    versions: dict[str, str]


def write(
    path: str | os.PathLike[str],
    target: Target,
    edit: Intervention | None,
    answers: Answers,
    chat: bool,
    turns: list[Turn],
    held: Held,
) -> None:
    """Write the folder.

    Raises:
        SinkscopeError: There is nothing to save, or the folder cannot be written.
    """
    if (sequence := held.sequence) is None:
        raise SinkscopeError("nothing was said yet, so there is nothing to save: ask something first")
    held, folder = held.to(None, target), Path(path)
    check_writable(folder / NAME)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        before = folder / Path(_content(folder).tensors).name  # of an earlier save
    except SinkscopeError:
        before = None
    data = {"real": sequence.real, "bos": sequence.bos}
    for i, kept in enumerate(sequence.memory.values()):
        data |= {f"memory.{i}.{name}": tensor for name, tensor in kept.items()}
    flags: list[dict[str, int]] = []
    for i, layer in enumerate(held.layers):
        known, tensors = layer.state()
        flags.append(known)
        data |= {f"layer.{i}.{name}": tensor for name, tensor in tensors.items()}
    for i, turn in enumerate(turns):
        for number, lines in enumerate(turn.lines):
            if lines is not None:
                data |= {f"turn.{i}.{number}.vertical": lines.vertical, f"turn.{i}.{number}.slash": lines.slash}
    name, sha256 = _write_tensors(folder, data)
    content = _Content(
        model=target.name,
        fingerprint=fingerprint(target.hf),
        edit=None if edit is None else repr(edit),
        answers=answers,
        chat=chat,
        turns=tuple(TurnRecord(**{f.name: getattr(turn, f.name) for f in fields(TurnRecord)}) for turn in turns),
        layers=tuple(flags),
        partial=sequence.partial,
        settled=sequence.settled,
        memory=tuple(sequence.memory),
        tensors=name,
        sha256=sha256,
        versions=versions(),
    )
    whole = {"schema": SCHEMA, "kind": KIND, **plain(content)}
    write_atomic(folder / NAME, json.dumps(whole, allow_nan=False) + "\n")
    if before is not None and before.name != name:
        before.unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], target: Target, edit: Intervention | None
) -> tuple[Answers, bool, list[Turn], Held]:
    """Read the folder: how answers are kept, whether a chat template is used, the turns, and the cache.

    Raises:
        SinkscopeError: The folder holds no conversation, one of another model or version, or damaged files; or `edit`
            is missing.
    """
    folder = Path(path)
    content = _content(folder)
    here = fingerprint(target.hf)
    file = folder / content.tensors
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
    if file.parent != folder or not file.is_file() or _sha256(file) != content.sha256:
        raise SinkscopeError(
            f"{content.tensors[:80]} in {folder.name} is missing or damaged (its sha256 is not that in {NAME}): copy "
            "the folder again, both files of one save",
            page=_PAGE,
        )
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
        turns = [_turn(i, record, tensors, target) for i, record in enumerate(content.turns)]
        held = _held(content, tensors, target, None if edit is None else repr(edit))
    except SinkscopeError:
        raise
    except Exception as error:  # files that were put together by hand may fail in any way
        raise SinkscopeError(
            f"{folder.name} holds no conversation that this version reads: its two files do not fit "
            f"({type(error).__name__}); give a folder that Conversation.save wrote",
            page=_PAGE,
        ) from None
    return content.answers, content.chat, turns, held


def _content(folder: Path) -> _Content:
    data = read_json(folder / NAME, "give a folder that Conversation.save wrote", page=_PAGE, kind=KIND, schema=SCHEMA)
    return build(_Content, data, f"{NAME} in {folder.name}")


def _turn(number: int, record: TurnRecord, tensors: dict[str, Tensor], target: Target) -> Turn:
    read_row(target, (*record.prompt, *record.ids), f"{NAME}, turn {number + 1}")
    before = record.prompt_tokens - record.queries
    lines: list[HeadLines | None] = []
    for at in (f"turn.{number}.{layer}" for layer in range(target.n_layers)):
        vertical = tensors.get(f"{at}.vertical")
        own = None
        if vertical is not None:  # of the queries that did not attend to everything
            own = HeadLines(vertical, tensors[f"{at}.slash"], vertical.shape[-1] - before)
        lines.append(own)
    return Turn(**vars(record), lines=tuple(lines))


def _held(content: _Content, tensors: dict[str, Tensor], target: Target, edit: str | None) -> Held:
    said = sum(len(turn.prompt) + len(turn.ids) for turn in content.turns)
    seen = content.layers[0]["seen"]
    layers: list[CacheLayer] = []
    if len(content.layers) != target.n_layers or not content.turns or not 0 < seen <= said:
        raise ValueError
    for i, flags in enumerate(content.layers):
        if flags["seen"] != seen:
            raise ValueError
        device = next(target.layers[i].parameters()).device
        layers.append(CacheLayer())
        layers[-1].load_state(flags, _under(f"layer.{i}.", tensors, device))
    real, bos = tensors["real"].to(target.device), tensors["bos"].to(target.device)
    same = edit == content.edit  # to another edit all tokens are new
    sequence = Sequence.of(real, bos, content.partial or not same, content.settled)
    for i, key in enumerate(content.memory if same else ()):
        known = Memory(_under(f"memory.{i}.", tensors, target.device))
        sequence.memory[tuple(key) if isinstance(key, list) else key] = known
    return Held(tuple(layers), sequence)


def _under(start: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, keyed by the rest of the name."""
    return {name.removeprefix(start): held.to(device) for name, held in tensors.items() if name.startswith(start)}


def _write_tensors(folder: Path, data: dict[str, Tensor]) -> tuple[str, str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Cropped and shared tensors are parts of larger ones.
    whole = {name: held.detach().cpu().clone(memory_format=torch.contiguous_format) for name, held in data.items()}
    temporary = folder / f".sinkscope-{secrets.token_hex(6)}.tmp"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(whole, temporary)
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
