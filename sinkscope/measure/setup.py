"""The argument of every measurement: an opened model, typical text to compare it with, and a record of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from sinkscope.engine.run import runs_here
from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ModelInfo, Provenance, provenance
from sinkscope.files.plain import named_file, pathless
from sinkscope.files.progress import Progress, silent
from sinkscope.files.records import Whole
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.checkpoints.checkpoint import fingerprint_of
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.inputs import read_row
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.models.text import (
    Halves,
    behind_beginning,
    halves_of,
    put_before,
    resolve_bos,
    text_rows,
    typical_text,
)
from sinkscope.models.text.chat import own_text, text_records
from sinkscope.opening.load import fits, open_target

T = TypeVar("T")

PIECE = 64
"""Tokens in one piece of typical text."""
UNKNOWN = 0.1  # share of the text from which a result says so: unknown tokens in a row act as a repeated token
FIRST_IDS = 4  # of the first text, which a result says
WITHOUT_BOS = 4  # times as many pieces of text where no BOS stands first


def model_info(target: Target) -> ModelInfo:
    """Return the model, for a result."""
    return ModelInfo(
        name=pathless(target.name),
        family=target.config.model_type,
        n_layers=target.n_layers,
        d_model=target.d_model,
        d_mlp=target.d_mlp,
        fingerprint=fingerprint_of(target),
    )


@dataclass
class Setup:
    """An opened model and typical text to compare it with; the argument of every measurement function.

    Attributes:
        target: The model.
        bos: Id of the BOS token that sequences begin with. None if they begin with none.
        text: The typical text.
        ids: Pieces of the first half, `[row pos]`, each beginning with BOS if there is one.
        seed: Seed of every random choice.
        progress: Called as `progress(what, done, total)`.
        edit: The patch, policy, guard and other interventions that the caller requested. None if there are none.
        settings: What is added to the result's settings.
        started: `time.perf_counter()` when the measurement began.
        memory: Cache for values that several measurements on the same open model share.
        own_text: Whether the text is the user's own; else texts of four kinds are surveyed.
        surveyed: Number of texts of a survey, in each half. None: sixteen.
        data_field: The field of the records of a measurement's `data`. None: under one of the usual names.
    """

    target: Target
    bos: int | None
    text: str
    ids: Int[Tensor, "row pos"]
    seed: int = 0
    progress: Progress = silent
    edit: Intervention | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    memory: dict[Any, Any] = field(default_factory=dict)
    own_text: bool = True
    surveyed: int | None = None
    data_field: str | None = None

    @classmethod
    def open(
        cls,
        model: object = None,
        *,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        bos: bool | None = None,
        text: str | Path | None = None,
        field: str | None = None,
        seed: Whole = 0,
        tokenizer: Any = None,
        texts: Annotated[int, Field(ge=1)] = 4,
        progress: Any = None,
        loading: Literal["stream", "whole", "fits"] = "stream",
    ) -> Setup:
        """Open a model and cut the typical text into pieces for it.

        Args:
            model: A short name, hub id, folder or .gguf file; from Python also a live model of any kind. By default
                the model in the package.
            revision: Branch, tag or commit on the hub.
            device: cpu, cuda, cuda:1 or mps, for a model given by name. By default the first CUDA device, else the CPU.
            dtype: float32, bfloat16 or float16, for a model given by name. By default the checkpoint's; a model that
                is read layer by layer on a CPU is float32.
            bos: Whether sequences begin with BOS. By default they do where the tokenizer has a BOS token.
            text: File of typical text, or of texts or chats as JSON or JSON lines. Chats are read in the
                model's own template. By default the neutral text in the package.
            field: The field of `text`, or of a file of records that is read instead, that holds the text or the
                messages. By default under one of the usual names.
            seed: Seed of every random choice; without effect where nothing is drawn.
            tokenizer: For live models that carry none.
            texts: Number of pieces of typical text, 64 tokens each; without BOS four times as many, because their first
                tokens differ.
            progress: Called as `progress(what, done, total)`.
            loading: "stream" reads layer by layer where possible; "whole" loads a model given by name into memory;
                "fits" does so if it takes at most half of the memory that is free.

        Raises:
            SinkscopeError: Bad input; the message is one line and says what to do.
        """
        started = time.perf_counter()
        if field is not None and text is None:
            raise SinkscopeError(f"--field {field}: no text is given whose field it is; give --text")
        records = None if text is None else text_records(text, field)
        target = _opened(model, tokenizer, loading, revision=revision, dtype=dtype, device=device)
        first_id = resolve_bos(tokenizer_of(target), bos)
        content = typical_text()
        remarks: list[str] = []
        if records is not None:
            content, remark = own_text(records, target.tokenizer, target.name)
            remarks.append(f"{pathless(str(text))}: {remark}.")
        if first_id is None:
            texts *= WITHOUT_BOS
        length = min(PIECE, target.max_positions or PIECE)
        ids = text_rows(target.tokenizer, halves_of(content).choose, texts, length, first_id)
        remarks += remarks_on_unknown(ids, target.tokenizer)
        return cls(
            target,
            first_id,
            content,
            ids,
            seed,
            progress or silent,
            settings={"text": named_file(text), "revision": revision, "text_said": " ".join(remarks)},
            started=started,
            own_text=text is not None,
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.target.tokenizer

    @property
    def halves(self) -> Halves:
        """The text for what chooses, and the text for what reports on the choice."""
        return halves_of(self.text)

    @property
    def text_read(self) -> str:
        """What tells the texts from others, whatever tokens a model reads them in: texts in common are compared.

        Pieces of a text of the user's own follow one another, so where they begin depends on the tokenizer.
        """
        read = [self.text]
        if self.own_text:
            read += [str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in self.ids]
        return sha256("\n".join(read).encode(errors="replace")).hexdigest()[:16]

    def edited(self) -> AbstractContextManager[Any]:
        """Return a `with` block in which the caller's interventions act."""
        return under(self.edit, self.target)

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return what is made when something is first asked for with this key, under the same interventions."""
        key = (*[run.number for run in runs_here(self.target.base)], *key)
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    def record(self, **settings: Any) -> None:
        """Add to the settings of the result, or replace a requested value by the value that was used."""
        self.settings.update(settings)

    def info(self) -> ModelInfo:
        """Return the model that was measured, for the result."""
        return model_info(self.target)

    def provenance(self) -> Provenance:
        """Return how, when and on which device the result was made."""
        return provenance(
            self.started,
            device=str(self.target.device),
            dtype=str(self.target.dtype).removeprefix("torch."),
            attention=str(getattr(self.target.config, "_attn_implementation", "unknown")),
            bos=self.bos is not None,
            seed=self.seed,
            first_ids=tuple(self.ids[0, :FIRST_IDS].tolist()),
            bos_added=self.bos is not None and self.bos not in put_before(self.tokenizer),
        )


def _opened(model: object, tokenizer: Any, loading: str, **options: Any) -> Target:
    """The model, read as `Setup.open` says."""
    target = open_target(model, tokenizer, **options, in_memory=loading == "whole")
    if loading == "fits" and not target.resident and fits(target, options["dtype"]):
        target = open_target(model, target.tokenizer, **options, in_memory=True)
    if not isinstance(model, str | PathLike | None):  # a checkpoint was checked when it was read
        check_finite(target.hf)
    return target


def remarks_on_unknown(ids: Int[Tensor, "row pos"], tokenizer: Any) -> list[str]:
    """Return what a result says of texts of which a tokenizer does not know much; nothing where it does."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    share = 0.0 if unknown is None else float((ids[:, 1:] == unknown).float().mean())
    if share <= UNKNOWN:
        return []
    return [f"{share:.0%} of the text is unknown to this tokenizer: give suitable text with --text."]


def prompt_ids(setup: Setup, prompt: str | Sequence[int] | None) -> list[int]:
    """Return ids of a prompt: a text, ids, or by default the beginning of the typical text.

    Args:
        setup: The model and typical text.
        prompt: The prompt.

    Raises:
        SinkscopeError: It is empty, or contains an id unknown to the model.
    """
    if prompt is None:
        return setup.ids[0].tolist()
    ids = read_row(setup.target, prompt, special=False)
    if isinstance(prompt, str) and setup.bos is not None:
        ids = behind_beginning(setup.tokenizer, setup.bos, ids)
    return ids
