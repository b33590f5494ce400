"""The common form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator.

Every measurement begins with a `Setup`: an opened model, typical text to compare it with, and a record of the run. The
decorator `@measurement` adds the rest to a function.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, get_type_hints

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.console import Progress, silent
from sinkscope.files.options import Count, Hidden, Option, Parameter, Positive, command, parameters_of
from sinkscope.files.result import ModelInfo, Number, Provenance, Result, provenance
from sinkscope.interventions.base import Intervention
from sinkscope.interventions.decode import decode, noted_decoding, watched
from sinkscope.kv.edit_of import edit_of
from sinkscope.kv.session import Observe
from sinkscope.models.load import load
from sinkscope.models.open import PartTarget, fingerprint_of, open_target
from sinkscope.models.target import Target
from sinkscope.models.text import resolve_bos, text_rows, typical_text
from sinkscope.trace import attention_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = [
    "EDIT_PARAMETERS",
    "PIECE",
    "SETUP_PARAMETERS",
    "Count",
    "Hidden",
    "Measurement",
    "ModelInfo",
    "Number",
    "Option",
    "Output",
    "Positive",
    "Progress",
    "Provenance",
    "Result",
    "Rows",
    "Setup",
    "command",
    "measurement",
    "read_whole",
]

P = ParamSpec("P")
R = TypeVar("R", bound=Result)
PIECE = 64  # tokens in one piece of typical text
Loading = Literal["stream", "enough", "whole"]


@dataclass(frozen=True)
class Rows:
    """Attention of one layer for the last queries of one text.

    Attributes:
        text: Index of the text, from 0.
        layer: Layer number.
        probs: Attention `[batch head query key]`, float32. Rows sum to one unless the model has learned sink logits.
    """

    text: int
    layer: int
    probs: Float[Tensor, "batch head query key"]


@dataclass
class Setup:
    """An opened model and typical text to compare it with; the argument of every measurement function.

    Attributes:
        target: The model.
        bos: Id of the BOS token that sequences begin with. None if they begin with none.
        text: The typical text.
        ids: Pieces of it, `[row pos]`, each beginning with BOS if there is one.
        seed: Seed of every random choice.
        progress: Called as `progress(what, done, total)`.
        edit: The patch, policy, guard and other interventions that the caller requested. None if there are none.
        settings: What `record` added to the result's settings.
        started: `time.perf_counter()` when the measurement began.
        source: The model as it was given, and the options that open it again in another process.
        memory: Cache for values that several measurements on the same open model share.
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
    source: tuple[object, dict[str, Any]] = (None, {})
    memory: dict[Any, Any] = field(default_factory=dict)

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
        seed: Annotated[int, Option(min=0, max=(1 << 63) - 1)] = 0,
        tokenizer: Hidden = None,
        texts: Annotated[int, Option(min=1, hidden=True)] = 4,
        trust_remote_code: Annotated[bool, Option(hidden=True)] = False,
        progress: Hidden = None,
        loading: Annotated[Literal["stream", "enough", "whole"], Option(hidden=True)] = "stream",
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
            text: File of typical text. By default the neutral text in the package.
            seed: Seed of every random choice.
            tokenizer: For live models that carry none.
            texts: Number of pieces of typical text, 64 tokens each. With 0 pieces, no tokenizer is needed.
            trust_remote_code: Run code that comes with the checkpoint; the model is then loaded whole.
            progress: Called as `progress(what, done, total)`.
            loading: "stream" reads layer by layer where possible; "enough" may leave out the last layers of a GGUF file
                (see `more`); "whole" loads a model given by name into memory.

        Raises:
            SinkscopeError: Bad input; the message is one line and says what to do.
        """
        started, content = time.perf_counter(), typical_text(text)
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "revision": revision,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
        }
        if loading == "whole" and (model is None or isinstance(model, str | os.PathLike)):
            model = load(model, backend="hf", **options)
        target = open_target(model, **options, needed=texts > 0)
        start = resolve_bos(target.tokenizer, target.config, bos)
        length = min(PIECE, target.max_positions or PIECE)
        none = torch.zeros(0, length, dtype=torch.long)
        ids = text_rows(target.tokenizer, content, texts, length, start) if texts else none
        source = (model, options)
        made = cls(target, start, content, ids, seed, progress or silent, started=started, source=source)
        return made if loading == "enough" else read_whole(made)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.target.tokenizer

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return self.target.n_layers

    @property
    def n_heads(self) -> int:
        """Number of query heads in a layer."""
        return self.target.n_heads

    @property
    def n_texts(self) -> int:
        """Number of pieces of typical text."""
        return len(self.ids)

    def edited(self) -> AbstractContextManager[Any]:
        """A `with` block in which the caller's interventions act; `attention` enters them itself."""
        return nullcontext() if self.edit is None else self.edit.on(self.target)

    def attention(self, *, last: int | None = None, layers: Sequence[int] | None = None) -> Iterator[Rows]:
        """Attention of every layer on each piece of typical text, under the caller's interventions.

        Without interventions a text takes one pass. Under interventions it is read token by token from the first of
        these queries on, because a policy or a guard acts between passes; evicted keys have no attention.

        Only the rows of one text are in memory at a time: `layer x head x last x key` numbers.

        Args:
            last: Only the last queries of each text. None: all.
            layers: Only these layers. None: all.

        Raises:
            SinkscopeError: The model has no such layer.
        """
        wanted = None if layers is None else self.target.chosen_layers(layers)
        for text, row in enumerate(self.ids):
            parts: dict[int, list[Tensor]] = {}
            first = 0 if last is None else max(0, len(row) - last)
            (self._pass if self.edit is None else self._steps)(row, first, wanted, parts)
            self.progress("texts", text + 1, self.n_texts)
            for layer, rows in parts.items():
                yield Rows(text, layer, torch.cat(rows, 2))

    def _pass(self, row: Tensor, first: int, layers: list[int] | None, parts: dict[int, list[Tensor]]) -> None:
        """Attention rows from the query `first` on, from one pass."""

        def keep(layer: int, begin: int, probs: Tensor) -> None:
            if first < begin + probs.shape[2]:
                parts.setdefault(layer, []).append(probs[:, :, max(0, first - begin) :].cpu())

        with attention_rows(self.target, keep, layers=layers):
            self.target.forward(row[None])

    def _steps(self, row: Tensor, first: int, layers: list[int] | None, parts: dict[int, list[Tensor]]) -> None:
        """The same, token by token under the interventions. Keys are positions; evicted keys have no attention."""

        def keep(rows: Any) -> None:
            groups = rows.probs.shape[1] // rows.pos.shape[1]
            pos = rows.pos.repeat_interleave(groups, 1)[:, :, None]
            probs = rows.probs[:, :, -1:] * (pos >= 0)
            spread = probs.new_zeros(*probs.shape[:3], len(row)).scatter_add_(3, pos.clamp(min=0), probs)
            parts.setdefault(rows.layer, []).append(spread.cpu())

        edit = watched(self.edit, Observe(keep, layers, last=1))
        ids = row.tolist()
        decode(self.target, ids[: first + 1], len(ids) - first, edit, [*ids[first + 1 :], ids[0]])

    def record(self, **settings: Any) -> None:
        """Add to the settings of the result, or replace a requested value by the one that was used."""
        self.settings.update(settings)

    def info(self) -> ModelInfo:
        """The model that was measured, for the result."""
        t = self.target
        return ModelInfo(t.name, t.config.model_type, t.n_layers, t.d_model, t.d_mlp, fingerprint_of(t))

    def provenance(self) -> Provenance:
        """How, when and on which device the result was made."""
        return provenance(
            started=self.started,
            device=self.target.device,
            dtype=self.target.dtype,
            seed=self.seed,
            bos=self.bos is not None,
            attention=str(getattr(self.target.config, "_attn_implementation", "unknown")),
        )

    def more(self) -> bool:
        """Load more layers if only the first ones are in memory (loading "enough"); False if all layers already are."""
        if isinstance(self.target, PartTarget):
            self.target = self.target.more()
            return True
        return False


def read_whole(made: Setup) -> Setup:
    """The same setup with every layer, if only the first layers of a file are in memory."""
    while made.more():
        pass
    return made


SETUP_PARAMETERS = {one.name: one for one in parameters_of(Setup.open)}
"""Parameters that every measurement has."""
EDIT_PARAMETERS = {one.name: one for one in parameters_of(edit_of)}
"""Parameters of a measurement that can run under interventions."""


@dataclass(frozen=True)
class Output:
    """A file that a command writes in addition to JSON, HTML and PNG.

    Attributes:
        name: Name of the option, without dashes.
        help: One sentence for the help.
        save: Called with the result and the path. It writes the whole file or nothing. Text that it returns is printed
            as a note on standard error.
        required: Whether the option must be given.
        kind: Kind of the file, which an earlier output that it may replace has as well. None: that of the result.
    """

    name: str
    help: str
    save: Callable[[Any, str], object]
    required: bool = False
    kind: str | None = None


class Measurement(Generic[P, R]):
    """A measurement that can be called with a model; made by `@measurement`.

    Calling it opens the model, runs the function on the `Setup`, and fills in the result's model, settings and
    provenance. `on(setup, ...)` runs it on a model that is already open.
    """

    def __init__(
        self,
        function: Callable[Concatenate[Setup, P], R],
        *,
        group: str,
        command: str | None,
        loading: Loading,
        edits: bool,
        quick: dict[str, Any],
        outputs: Sequence[Output],
        check: Callable[..., object] | None,
        scan: dict[str, Any] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__name__ = function.__name__
        self.function = function
        self.group = group
        self.command = command
        self.loading: Loading = loading
        self.edits = edits
        self.quick = quick
        self.outputs = tuple(outputs)
        self.check = check
        self.scan = scan
        own = list(inspect.signature(function).parameters.values())[1:]
        self._own = [one.name for one in own]
        model, *shared = inspect.signature(Setup.open).parameters.values()
        common = [one for one in shared if one.name not in (*self._own, "loading")]
        if edits:
            common += inspect.signature(edit_of).parameters.values()
        self.__signature__ = inspect.Signature(sorted([model, *own, *common], key=lambda one: one.kind))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The function's own parameters, without the `Setup`."""
        setup = next(iter(inspect.signature(self.function).parameters))
        return parameters_of(self.function, without=[setup])

    @functools.cached_property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """Its own parameters, then those that it shares with all measurements."""
        shared = dict(SETUP_PARAMETERS)
        if self.edits:
            shared |= EDIT_PARAMETERS
        return (*self.parameters, *(one for name, one in shared.items() if name not in self._own))

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Open the model and measure. The arguments are those of the signature."""
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        self.refuse(arguments)
        edit = None
        if self.edits:
            edit = edit_of(**{name: arguments[name] for name in EDIT_PARAMETERS if name in arguments})
        own_only = {one.name for one in self.parameters if one.option.own}
        opening = {name: arguments[name] for name in SETUP_PARAMETERS if name in arguments and name not in own_only}
        opening |= self._pieces(opening.pop("texts", None))
        opening["loading"] = self.loading
        if edit is not None:
            opening["loading"] = "whole"
        setup = replace(Setup.open(**opening), edit=edit)
        return self._measured(setup, {name: arguments[name] for name in self._own if name in arguments}, arguments)

    def _pieces(self, texts: Any) -> dict[str, int]:
        """How many pieces of typical text are needed. A measurement may have a parameter `texts` that takes texts."""
        if texts is None:
            texts = self.__signature__.parameters["texts"].default
        if isinstance(texts, int):
            return {"texts": texts}
        if texts is not None and not any(isinstance(text, str) for text in texts):
            return {"texts": 0}  # only ids are read
        return {}

    def on(self, setup: Setup, **kwargs: Any) -> R:
        """Measure on an open model. The arguments are the measurement's own."""
        self.refuse(kwargs)
        return self._measured(setup, kwargs, {})

    def refuse(self, arguments: Mapping[str, Any]) -> None:
        """Check arguments before a model is opened.

        Raises:
            SinkscopeError: An argument is outside its range, or the measurement cannot use the arguments.
        """
        for one in self.all_parameters:
            if one.name in arguments:
                one.check(arguments[one.name])
        if self.check is not None:
            self.check(**{one.name: arguments.get(one.name, one.default) for one in self.parameters})

    def _measured(self, setup: Setup, own: Mapping[str, Any], arguments: Mapping[str, Any]) -> R:
        with noted_decoding() as decoding:
            result = copy(self.function(setup, **own))  # pyright: ignore[reportCallIssue]
        settings: dict[str, Any] = {
            "bos": setup.bos is not None,
            "text": None,
            "texts": len(setup.ids),
            "revision": arguments.get("revision"),
            "seed": setup.seed,
        }
        if arguments.get("text") is not None:
            settings["text"] = Path(arguments["text"]).name
        for one in self.parameters:
            if not one.option.hidden:
                settings[one.name] = own.get(one.name, one.default)
        if self.edits:
            for name in EDIT_PARAMETERS:
                if arguments.get(name):
                    settings[name] = str(arguments[name])
        settings |= setup.settings
        if decoding:
            settings["decoding"] = decoding
        result.fill_in(setup.info(), settings, setup.provenance())
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.__module__, self.__name__)


def _named(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def measurement(
    *,
    group: str,
    figure: Callable[[Any], go.Figure] | str | None = None,
    command: str | None = None,
    loading: Loading = "stream",
    edits: bool = False,
    quick: dict[str, Any] | None = None,
    outputs: Sequence[Output] = (),
    check: Callable[..., object] | None = None,
    scan: dict[str, Any] | None = None,
    flag: str | None = None,
    adds: str | None = None,
    sets: dict[str, Any] | None = None,
) -> Callable[[Callable[Concatenate[Setup, P], R]], Measurement[P, R]]:
    """Turn a function that takes a `Setup` and returns a `Result` into a measurement.

    The public function takes a model and the options of `Setup.open` in addition to its own parameters. Its command,
    help, JSON, page, documentation and the tests of the matrix are built from its signature and docstring.

    Args:
        group: The documentation lists measurements of one group together.
        figure: Function that draws the result; "module:function" is imported when it is needed.
        command: Words of the command. None: the function's name with dashes.
        loading: As in `Setup.open`.
        edits: Whether it can run under a patch, a policy or a guard; `setup.edit` holds those requested.
        quick: Arguments with which it takes about a second on a small model, for the tests of the matrix.
        outputs: Additional files that its command writes.
        check: Called with the measurement's own arguments, by name, before a model is opened. It raises
            `SinkscopeError` for errors that types and ranges do not exclude.
        scan: Makes it part of `sinkscope scan` (the fields of `sinkscope.app.card.ScanMark`).
        flag: Ignored.
        adds: Ignored.
        sets: Ignored.
    """

    def wrap(function: Callable[Concatenate[Setup, P], R]) -> Measurement[P, R]:
        result_class = get_type_hints(function)["return"]
        if "kind" not in vars(result_class):
            result_class.claim(function.__name__.replace("_", "-"))
        result_class.drawing = figure
        return Measurement(
            function,
            group=group,
            command=command,
            loading=loading,
            edits=edits,
            quick=quick or {},
            outputs=outputs,
            check=check,
            scan=scan,
        )

    return wrap
