"""For every token: does repeating it make a sink, and after how many repetitions (Yona et al. 2025, figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target, first_tensor
from sinkscope.parallel import check_workers
from sinkscope.results import Result
from sinkscope.sinks.attack.chunks import Columns, Opened, hold_layers, in_chunks
from sinkscope.sinks.attack.clusters import clusters_of, sink_of, table_settings
from sinkscope.sinks.attack.vocabulary import draw, shown, vocabulary
from sinkscope.sinks.first_token.locate import Setup, setup
from sinkscope.sinks.first_token.walk import Progress

PILOT, SHORTEST = 16, 128  # tokens that say how long the first pass must be; it is at least this long


@dataclass(frozen=True)
class AtlasWork:
    """For each token the first number of repetitions that makes a sink.

    Attributes:
        layer: the sink layer, whose norm is read.
        first: what stands first: BOS, or a token that stands in for it.
        other: stands in where `first` is no BOS and is itself the repeated token.
        length: repetitions of the first pass. Tokens that do not get there take four times as many, and so on.
        max_repeats: largest number of repetitions.
        batch_size: positions per pass.
    """

    layer: int
    first: int
    other: int
    length: int
    max_repeats: int
    batch_size: int

    @torch.no_grad()
    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns repeats and norm; an entry per token."""
        repeats: list[int | None] = [None] * len(items)
        reached = [0.0] * len(items)
        left, length = list(range(len(items))), min(self.length, self.max_repeats)
        while left:
            passes = -(-len(left) // max(1, self.batch_size // (length + 1)))
            for part in (left[i::passes] for i in range(passes)):  # of equal size, as nearly as can be
                norm = self.norms(target, torch.tensor([self.row(items[i], length) for i in part]))
                share = norm[:, 1:] / norm[:, :1]
                for i, row in zip(part, share, strict=True):
                    above = (row >= 0.5).nonzero().flatten()
                    at = int(above[0]) if len(above) else None
                    repeats[i] = None if at is None else at + 1
                    reached[i] = round(float(row.max() if at is None else row[at]), 4)
            left = [i for i in left if repeats[i] is None]
            if length >= self.max_repeats:
                break
            length = min(4 * length, self.max_repeats)
        return {"repeats": list(repeats), "norm": list(reached)}

    def row(self, token: int, length: int) -> list[int]:
        """A first token and then `length` times another."""
        return [self.other if token == self.first else self.first, *[token] * length]

    def norms(self, target: Target, ids: Int[Tensor, "row pos"]) -> Float[Tensor, "row pos"]:
        """Norm of the residual stream after the sink layer, from a pass that ends there."""
        kept: list[Tensor] = []

        def keep(_m: object, _a: object, _k: object, out: Any) -> None:
            kept.append(torch.linalg.vector_norm(first_tensor(out), dim=-1, dtype=torch.float32).cpu())
            target.stop()

        with target.hooks((target.layers[self.layer], "post", keep)):
            target.forward(ids)
        return kept[0]


@dataclass(frozen=True)
class Property:
    """What tokens that resist have in common.

    Attributes:
        name: of the property.
        reached: its median over tokens that become a sink by repetition (share, of what is or is not).
        resisting: the same over those that do not.
        auroc: chance that a resisting token has more of it than one that is reached; 0.5: it says nothing.
    """

    name: str
    reached: float
    resisting: float
    auroc: float


@dataclass(frozen=True)
class HeadRow:
    """Tokens by the head of layer 0 that serves them; None: no single head does."""

    head: int | None
    tokens: int
    resisting: int
    median_repeats: float | None


@dataclass(frozen=True, kw_only=True)
class SinkAtlas(Result):
    """Repetition of every token of the vocabulary. Lists have an entry per token.

    Attributes:
        sink_layer: None: the model has no sink.
        max_repeats: largest number of repetitions tried.
        ids: the tokens.
        tokens: the same as strings.
        repeats: first number of repetitions whose norm at the sink layer is half of the first token's; None: never.
        norm: norm of that repetition over the first token's; of tokens that never get there the largest.
        frequency: how often the token stands in the neutral text.
        embedding_norm: L2 norm of its embedding.
        head: head of layer 0 that serves it (see `token_clusters`); None: no single one.
        special: ids of special tokens.
        median: of `repeats`, over tokens that got there.
        unreached: tokens that resist.
        by_head: the same by head.
        shared: what resisting tokens have in common.
        text_tokens: length of the neutral text.
    """

    kind: ClassVar[str] = "atlas"

    sink_layer: int | None
    max_repeats: int
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    repeats: tuple[int | None, ...]
    norm: tuple[float, ...]
    frequency: tuple[int, ...]
    embedding_norm: tuple[float, ...]
    head: tuple[int | None, ...]
    special: tuple[int, ...]
    median: float | None
    unreached: int
    by_head: tuple[HeadRow, ...]
    shared: tuple[Property, ...]
    text_tokens: int

    def rows(self) -> list[dict[str, Any]]:
        """One row per token; printed are the rows by head."""
        names = ("id", "token", "repeats", "norm", "frequency", "embedding_norm", "head")
        columns = (self.ids, self.tokens, self.repeats, self.norm, self.frequency, self.embedding_norm, self.head)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        head = ["head", "tokens", "resist", "median repeats"]
        return (head if self.by_head else []), [
            [
                "none" if r.head is None else str(r.head),
                str(r.tokens),
                str(r.resisting),
                "-" if r.median_repeats is None else f"{r.median_repeats:.0f}",
            ]
            for r in self.by_head
        ]

    def to_html(self) -> str:
        """Summary, table by head, and a table of all tokens that can be searched."""
        from sinkscope.sinks.repetition.atlas_table import table

        return super().to_html() + table(self)

    def _repr_html_(self) -> str:
        return super().to_html()  # a notebook is no place for a vocabulary

    def summary(self) -> str:
        """What was found, in a few lines."""
        if self.sink_layer is None:
            return f"{self.model.name}: no attention sink, so no token becomes one by repetition."
        every = len(self.ids)
        median = "" if self.median is None else f"; median {self.median:.0f} repetitions"
        lines = [
            f"{self.model.name}: {every - self.unreached} of {every} tokens become a sink by repetition (half of the "
            f"first token's norm in layer {self.sink_layer}){median}. {self.unreached} never do within "
            f"{self.max_repeats}.",
        ]
        lines += [
            f"Resisting tokens, {p.name}: {p.resisting:.3g} against {p.reached:.3g} (AUROC {p.auroc:.2f})."
            for p in self.shared
        ]
        resisting = [(-f, t) for f, t, n in zip(self.frequency, self.tokens, self.repeats, strict=True) if n is None]
        if resisting:
            lines.append("Those most frequent in the text: " + " ".join(repr(t) for _, t in sorted(resisting)[:12]))
        return "\n".join(lines)


def sink_atlas(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    max_repeats: int | None = None,
    batch_size: int = 4096,
    texts: int = 4,
    seed: int = 0,
    workers: int = 1,
    resume: str | Path | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> SinkAtlas:
    """For every token: the first number of repetitions that makes it a sink, from one causal pass up to the sink layer.

    The pass is BOS and then n times the token; a few tokens say which n to begin with, and it grows for the tokens that
    do not get there, up to `max_repeats`. Beside it stand the token's frequency in the neutral text, the norm of its
    embedding, and the head of layer 0 that serves it (`token_clusters`): what resisting tokens may share.

    Args:
        model: None (the bundled model), short name, hub id, folder, `.gguf` file, or a live model of any kind.
        tokenizer: for live models that carry none.
        bos: begin sequences with BOS; None: where the tokenizer has one. Without, a token of the text stands first.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings, one token each; None: the whole vocabulary.
        max_repeats: largest number of repetitions; None: 1,024, or what the context holds.
        batch_size: positions per pass.
        texts: pieces of 64 tokens of typical text.
        seed: of random choices.
        workers: processes; more than one run over Ray.
        resume: folder for finished chunks; a run that was ended goes on from there with the same table.
        revision: of a hub id.
        dtype: of the weights of a model given by name; None: float32 on a CPU, else bfloat16.
        device: for models given by name; None: the first cuda device if there is one.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    if batch_size < 1:
        raise SinkscopeError(f"--batch-size {batch_size}: at least one position is needed; give 1 or more")
    if seed < 0:
        raise SinkscopeError(f"--seed {seed} is negative; give 0 or more")
    check_workers(workers)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    made, layer, neurons = sink_of(setup(model, bos=bos, text=text, texts=texts, seed=seed, **options))
    limit = _limit(made.target, max_repeats)
    ids = vocabulary(made.target, tokens)
    columns: Columns = {}
    heads: tuple[int | None, ...] = ()
    if layer is not None:
        opened, folder = Opened(model, made.target, options), None if resume is None else Path(resume)
        clusters = clusters_of(
            made,
            layer,
            neurons,
            opened,
            ids,
            0.5,
            0,
            2048,
            workers,
            None if folder is None else folder / "clusters",
            progress,
            {},
        )
        heads = clusters.head if neurons else (None,) * len(ids)
        hold_layers(made.target, layer)
        work = begin(AtlasWork(layer, *firsts(made), SHORTEST, limit, batch_size), made, ids)
        columns = in_chunks(
            opened,
            work,
            ids,
            what="tokens",
            size=max(1, batch_size // 64),
            workers=workers,
            resume=None if folder is None else folder / "atlas",
            progress=progress,
            settings=table_settings(made) | {"layer": layer, "first": work.first, "max_repeats": limit},
        )
    settings = {
        "bos": made.bos is not None,
        "text": None if text is None else Path(text).name,
        "texts": len(made.ids),
        "tokens": None if tokens is None else list(tokens),
        "max_repeats": limit,
        "batch_size": batch_size,
        "seed": seed,
        "revision": revision,
        "workers": workers,
    }
    return _result(made, layer, limit, ids if columns else [], columns, heads, settings)


def _limit(target: Target, asked: int | None) -> int:
    largest = (target.max_positions or 1 << 30) - 1
    if asked is not None and asked < 1:
        raise SinkscopeError(f"--max-repeats {asked}: at least one repetition is needed; give 1 or more")
    if asked is not None and asked > largest:
        raise SinkscopeError(
            f"--max-repeats {asked} does not fit the context of {target.max_positions} tokens; the largest is {largest}"
        )
    return min(1024, largest) if asked is None else asked


def firsts(made: Setup) -> tuple[int, int]:
    """What stands first, and what does where that is the repeated token itself; with BOS always BOS."""
    if made.bos is not None:
        return made.bos, made.bos
    flat = made.ids.flatten()
    first = int(flat[0])
    others = flat[flat != first]
    return first, int(others[0]) if len(others) else first


def begin(work: AtlasWork, made: Setup, ids: list[int]) -> AtlasWork:
    """`work` with a first pass in which most tokens get there; it decides the time, not the table."""
    got = sorted(n for n in work(made.target, draw(ids, PILOT, made.seed))["repeats"] if n is not None)
    enough = 1.1 * got[int(0.9 * (len(got) - 1))] if got else work.max_repeats
    return replace(work, length=max(SHORTEST, -(-int(enough) // 32) * 32))


def _result(
    made: Setup,
    layer: int | None,
    limit: int,
    ids: list[int],
    columns: Columns,
    heads: tuple[int | None, ...],
    settings: dict[str, Any],
) -> SinkAtlas:
    target = made.target
    repeats: list[int | None] = columns.get("repeats", [])
    text = target.tokenizer(made.text, add_special_tokens=False, verbose=False)["input_ids"]
    counts = torch.bincount(torch.tensor(text), minlength=max([*ids, *text]) + 1)[ids].tolist() if ids else []
    norms = _embedding_norms(target, ids) if ids else []
    properties = {
        "median count in the text": [float(n) for n in counts],
        "median norm of the embedding": norms,
        "share served by a single head": [float(h is not None) for h in heads],
    }
    got = sorted(n for n in repeats if n is not None)
    return SinkAtlas(
        model=made.info(),
        settings=settings,
        provenance=made.provenance(),
        sink_layer=layer,
        max_repeats=limit,
        ids=tuple(ids),
        tokens=shown(target, ids),
        repeats=tuple(repeats),
        norm=tuple(columns.get("norm", ())),
        frequency=tuple(counts),
        embedding_norm=tuple(norms),
        head=heads,
        special=tuple(sorted({int(i) for i in target.tokenizer.all_special_ids} & set(ids))),
        median=_median(got),
        unreached=len(ids) - len(got),
        by_head=_by_head(heads, repeats),
        shared=_shared(repeats, properties),
        text_tokens=len(text),
    )


@torch.no_grad()
def _embedding_norms(target: Target, ids: list[int]) -> list[float]:
    """Of what the embedding gives, scale included, where it has one."""
    parts = [target.embedding(torch.tensor(ids[i : i + 4096], device=target.device)) for i in range(0, len(ids), 4096)]
    norm = torch.cat([torch.linalg.vector_norm(p, dim=-1, dtype=torch.float32) for p in parts])
    return [round(v, 4) for v in norm.tolist()]


def _median(values: list[int]) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5)) if values else None


def _by_head(heads: Sequence[int | None], repeats: Sequence[int | None]) -> tuple[HeadRow, ...]:
    of: dict[int | None, list[int | None]] = {}
    for head, n in zip(heads, repeats, strict=True):
        of.setdefault(head, []).append(n)
    rows = [
        HeadRow(head, len(all_), all_.count(None), _median([n for n in all_ if n is not None]))
        for head, all_ in of.items()
    ]
    return tuple(sorted(rows, key=lambda r: (r.head is None, -r.tokens)))


def _shared(repeats: Sequence[int | None], properties: Mapping[str, Sequence[float]]) -> tuple[Property, ...]:
    from sklearn.metrics import roc_auc_score

    resists = torch.tensor([n is None for n in repeats])
    if not len(resists) or bool(resists.all()) or not bool(resists.any()):
        return ()
    found = []
    for name, values in properties.items():
        column = torch.tensor(values, dtype=torch.float64)
        middle = torch.mean if name.startswith("share") else torch.median  # a share has no useful median
        found.append(
            Property(
                name,
                float(middle(column[~resists])),
                float(middle(column[resists])),
                float(roc_auc_score(resists.numpy(), column.numpy())),
            )
        )
    return tuple(found)
