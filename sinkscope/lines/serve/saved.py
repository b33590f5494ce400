"""A conversation as a safetensors file: its turns, keys and values, without the model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_output
from sinkscope.files.plain import parse_json
from sinkscope.files.records import check
from sinkscope.hooks.edit.positions import Memory, Sequence
from sinkscope.kv.cache import COLUMNS, CacheLayer

_KIND = "sinkscope conversation"
_REMEDY = "give a file that Conversation.save of this version wrote"


@dataclass(frozen=True)
class SavedLayer:
    """What a layer of the cache is, besides its tensors."""

    seen: int
    edited: bool
    ragged: bool
    rebased: bool
    gapless: bool


@dataclass(frozen=True, eq=False)
class SavedTurn:
    """What a file keeps of one turn of a conversation.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids of the answer, including the end-of-sequence token if it was generated.
        text: The answer as text, without special tokens and without the token that ended it. None without a tokenizer.
        prompt_tokens: Length of the whole conversation, in tokens, when the answer begins.
        queries: Number of tokens read in one pass before the answer: the part of the previous answer that has to be
            read, and `prompt`.
        read: Tokens that a decoding step attended to, including its own, averaged over steps, layers and kv heads.
            None if the answer is a single token, which follows from the prompt without a decoding step.
        held: Number of tokens in the cache after the turn, averaged over layers and kv heads.
        summary: What the edit did, in one line.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str | None
    prompt_tokens: int
    queries: int
    read: float | None
    held: float
    summary: str


@dataclass(frozen=True)
class SavedConversation:
    """What a file says beside the tensors.

    Attributes:
        fingerprint: Of the model's checkpoint.
        edit: How the edit was written.
        answers: What happens to answers.
        turns: The turns.
        layers: The layers of the cache.
        partial: As `Sequence` has it.
        settled: As `Sequence` has it.
        memory: The edits' places of which values are stored.
    """

    fingerprint: str
    edit: str
    answers: str
    turns: tuple[SavedTurn, ...]
    layers: tuple[SavedLayer, ...]
    partial: bool
    settled: bool
    memory: tuple[tuple[int | None, ...], ...]


def write_conversation(
    path: str | os.PathLike[str], facts: dict[str, Any], layers: list[CacheLayer], sequence: Sequence
) -> None:
    """Write a conversation; `facts` are the fields of `SavedConversation` that the layers do not say.

    Raises:
        SinkscopeError: The path cannot be written, or holds another kind of file.
    """
    tensors: dict[str, Tensor] = {"columns": sequence.columns, "length": sequence.length, "bos": sequence.bos}
    saved: list[dict[str, Any]] = []
    for layer in layers:
        saved.append({name: getattr(layer, name) for name in SavedLayer.__dataclass_fields__})
        place = f"layers.{layer.number}"
        tensors |= {f"{place}.keys": layer.keys, f"{place}.values": layer.values, f"{place}.pos": layer.pos}
        for name in layer.numbers:
            tensors[f"{place}.numbers.{name}"] = layer.extra(name)
    for number, memory in enumerate(sequence.memory.values()):
        for name, values in memory.items():
            tensors[f"memory.{number}.{name}"] = values
    for name, tensor in tensors.items():
        tensors[name] = tensor.detach().cpu().contiguous().clone()  # a file holds no tensor twice
    facts |= {"layers": saved, "memory": list(sequence.memory)}
    facts |= {"partial": sequence.partial, "settled": sequence.settled}
    write_output(path, save(tensors, {_KIND: json.dumps(facts)}))


def read_conversation(
    path: str | os.PathLike[str], device: torch.device
) -> tuple[SavedConversation, list[CacheLayer], Sequence]:
    """Read what `write_conversation` wrote.

    Raises:
        SinkscopeError: There is no such file, or it is another kind of file.
    """
    name = Path(path).name
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            said = (file.metadata() or {}).get(_KIND, "null")
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise SinkscopeError(f"cannot read {name}: {' '.join(str(error).split())}; {_REMEDY}") from None
    facts = check(parse_json(said), SavedConversation, name, _REMEDY.removeprefix("give "))
    memory: dict[Any, Memory] = {}
    for place in facts.memory:
        memory[place] = Memory(_under(f"memory.{len(memory)}.", tensors))
    sequence = Sequence(tensors["columns"], tensors["length"], tensors["bos"], facts.partial, facts.settled, memory)
    layers: list[CacheLayer] = []
    for number, layer in enumerate(facts.layers):
        layers.append(_layer(number, layer, _under(f"layers.{number}.", tensors), sequence.columns))
    return facts, layers, sequence


def _layer(
    number: int, facts: SavedLayer, tensors: dict[str, Tensor], columns: Int[Tensor, "batch seen"]
) -> CacheLayer:
    """The layer that was written."""
    layer = CacheLayer(number)
    token = COLUMNS.set(columns[:, : facts.seen])
    try:
        layer.update(tensors["keys"], tensors["values"])
    finally:
        COLUMNS.reset(token)
    if facts.edited:
        layer.keep_slots(None, tensors["pos"])
    for name, value in vars(facts).items():
        setattr(layer, name, value)
    layer.numbers = _under("numbers.", tensors)
    return layer


def _under(place: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name begins so, by the rest of it."""
    return {name.removeprefix(place): tensor for name, tensor in tensors.items() if name.startswith(place)}
