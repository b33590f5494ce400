"""For every token: whether repeating it makes a sink, and after how many repetitions (Yona et al. 2025, figure 6)."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import torch

from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.sinks.attack.clusters import clusters_of
from sinkscope.sinks.attack.vocabulary import Columns, Work, hold_layers, in_chunks, refuse_workers, shown
from sinkscope.sinks.first_token.layer_scan import norms_after, repeats_until_half
from sinkscope.sinks.first_token.sets import causal_neurons
from sinkscope.sinks.tokens import left_out_line, repetition_limit, sample_tokens, vocabulary

PILOT = 16  # tokens that determine the length of the first pass
SHORTEST = 128  # smallest number of repetitions in that pass
_SHOWN = 200  # rows shown at a time: a browser is slow with a hundred thousand

# Texts are inserted with textContent and never become HTML.
_SCRIPT = """
(async()=>{
const box=document.currentScript.parentElement, packed=atob(box.querySelector('script[type]').textContent);
const bytes=new Blob([Uint8Array.from(packed,c=>c.charCodeAt(0))]).stream();
const columns=await new Response(bytes.pipeThrough(new DecompressionStream('gzip'))).json();
const data=columns[0].map((_,i)=>columns.map(c=>c[i]));
const body=box.querySelector('tbody'), find=box.querySelector('input[type=search]'), count=box.querySelector('output');
const only=box.querySelector('input[type=checkbox]');
let column=2, up=true;
const show=v=>v===null?'\\u2013':typeof v==='string'?JSON.stringify(v):String(v);
const order=(a,b)=>a[column]===null?(b[column]===null?0:1):b[column]===null?-1:
  (a[column]<b[column]?-1:a[column]>b[column]?1:0)*(up?1:-1);
const draw=()=>{
 const want=find.value.toLowerCase();
 const hits=data.filter(r=>(!only.checked||r[2]===null)&&
   (!want||r[1].toLowerCase().includes(want)||String(r[0])===want)).sort(order);
 body.replaceChildren(...hits.slice(0,SHOWN).map(r=>{
  const tr=document.createElement('tr');
  for(const v of r){const td=document.createElement('td');td.textContent=show(v);tr.append(td);}
  return tr;}));
 count.textContent=hits.length+' tokens'+(hits.length>SHOWN?', the first SHOWN shown':'');
};
find.oninput=only.onchange=draw;
box.querySelectorAll('th').forEach((th,i)=>{th.style.cursor='pointer';
 th.tabIndex=0;
 th.onkeydown=e=>{if(e.key==='Enter'||e.key===' '){e.preventDefault();th.click();}};
 th.onclick=()=>{up=column===i?!up:true;column=i;draw();};});
draw();
})();
""".replace("SHOWN", str(_SHOWN))


@dataclass(frozen=True)
class AtlasWork(Work):
    """Finds, for each token, the first number of repetitions that makes a sink.

    Attributes:
        layer: The sink layer, whose norm is read.
        first: The id that stands first: BOS, or a token that stands in for it.
        other: Used instead of `first` if that is not BOS and is itself the repeated token.
        length: Repetitions in the first pass. Tokens that do not become a sink get four times as many, and so on.
        max_repeats: Largest number of repetitions.
        batch_size: Positions per pass.
    """

    first: int
    other: int
    length: int
    max_repeats: int
    batch_size: int

    @torch.no_grad()
    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns repeats and norm, with one entry per token."""
        repeats: list[int | None] = [None] * len(items)
        reached = [0.0] * len(items)
        left, length = list(range(len(items))), min(self.length, self.max_repeats)
        while left:
            passes = -(-len(left) // max(1, self.batch_size // (length + 1)))
            for part in (left[i::passes] for i in range(passes)):  # parts of nearly equal size
                norm = norms_after(target, self.layer, torch.tensor([self.row(items[i], length) for i in part]))
                share = norm[:, 1:] / norm[:, :1]
                for i, row in zip(part, share, strict=True):
                    repeats[i] = n = repeats_until_half(row, 1.0)
                    reached[i] = round(float(row.max() if n is None else row[n - 1]), 4)
            left = [i for i in left if repeats[i] is None]
            if length >= self.max_repeats:
                break
            length = min(4 * length, self.max_repeats)
        return {"repeats": list(repeats), "norm": list(reached)}

    def row(self, token: int, length: int) -> list[int]:
        """A first token followed by `length` copies of another."""
        return [self.other if token == self.first else self.first, *[token] * length]


@dataclass(frozen=True)
class Property:
    """A property that may distinguish resisting tokens.

    Attributes:
        name: Name of the property.
        reached: Median over tokens that repetition turns into a sink (for yes/no properties, the share).
        resisting: The same over tokens that never become one.
        auroc: Probability that a resisting token has a higher value than one that becomes a sink; 0.5 means no
            relation.
    """

    name: str
    reached: float
    resisting: float
    auroc: float


@dataclass(frozen=True)
class HeadRow:
    """Tokens grouped by the head of layer 0 that serves them. Head None: no single head does."""

    head: int | None
    tokens: int
    resisting: int
    median_repeats: float | None


@dataclass(frozen=True, kw_only=True)
class SinkAtlas(Result):
    """Repetition of every token of the vocabulary. Lists have one entry per token.

    Attributes:
        sink_layer: Sink layer of the model. None if the model has no sink.
        max_repeats: Largest number of repetitions tried.
        ids: Ids of the tokens.
        tokens: The same tokens as strings.
        repeats: First number of repetitions whose norm at the sink layer reaches half of the first token's. None if
            never.
        norm: Norm at that repetition divided by the first token's; the largest norm for tokens that never become a
            sink.
        frequency: How often the token occurs in the neutral text.
        embedding_norm: L2 norm of the token's embedding.
        head: Head of layer 0 that serves the token (see `token_clusters`). None if no single one does.
        special: Ids of special tokens.
        median: Median of `repeats` over tokens that repetition makes a sink, without tokens whose first occurrence is
            one.
        unreached: Number of tokens that never become a sink.
        by_head: The same numbers for each head.
        shared: Properties that may distinguish resisting tokens.
        text_tokens: Length of the neutral text in tokens.
    """

    kind: ClassVar[str] = "atlas"
    glossary: ClassVar[dict[str, str]] = {
        "tokens": "number of tokens that this head of layer 0 serves",
        "resisting": "those of them that repetition does not make a sink",
        "median_repeats": "median number of repetitions that make the others a sink",
    }

    sink_layer: int | None
    max_repeats: int
    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    repeats: tuple[int | None, ...] = ()
    norm: tuple[float, ...] = ()
    frequency: tuple[int, ...] = ()
    embedding_norm: tuple[float, ...] = ()
    head: tuple[int | None, ...] = ()
    special: tuple[int, ...] = ()
    median: float | None = None
    unreached: int = 0
    by_head: tuple[HeadRow, ...] = ()
    shared: tuple[Property, ...] = ()
    text_tokens: int

    def rows(self) -> list[dict[str, Any]]:
        """One row per token; only the rows by head are printed."""
        names = ("id", "token", "repeats", "norm", "frequency", "embedding_norm", "head")
        columns = (self.ids, self.tokens, self.repeats, self.norm, self.frequency, self.embedding_norm, self.head)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def shown_rows(self) -> list[dict[str, Any]]:
        """One row per head of layer 0."""
        return [{"layer": 0, **vars(r), "head": "none" if r.head is None else r.head} for r in self.by_head]

    def to_html(self) -> str:
        """Summary, table by head, and a searchable table of all tokens."""
        return super().to_html() + _table(self.rows())

    def _repr_html_(self) -> str:
        return super().to_html()  # the whole vocabulary is too large for a notebook

    def conclusion(self) -> str:
        """How many tokens become a sink by repetition, and how many never do."""
        if self.sink_layer is None:
            return "The model has no attention sink, so no token becomes one by repetition."
        every = len(self.ids)
        when = "" if self.median is None else f", in the median after {self.median:.0f} repetitions"
        return (
            f"Repetition makes a sink of {every - self.unreached} of {every} tokens{when}. Without repetition "
            f"{self.repeats.count(1)} are one, and {self.unreached} never become one within {self.max_repeats} "
            "repetitions."
        )

    def details(self) -> list[str]:
        """What counts as a sink, and what resisting tokens have in common."""
        if self.sink_layer is None:
            return []
        lines = [f"A token is a sink where its norm in layer {self.sink_layer} is half of the first token's."]
        lines += left_out_line([t for t, n in zip(self.tokens, self.repeats, strict=True) if n == 1])
        lines += [
            f"Resisting tokens have {p.name} {p.resisting:.3g}, and the others {p.reached:.3g} (AUROC {p.auroc:.2f})."
            for p in self.shared
        ]
        resisting = [(-f, t) for f, t, n in zip(self.frequency, self.tokens, self.repeats, strict=True) if n is None]
        if resisting:
            words = ", ".join(repr(t) for _, t in sorted(resisting)[:12])
            lines.append(f"The resisting tokens that are most frequent in the text are {words}.")
        return lines


@measurement(
    group="Repetition",
    figure="sinkscope.figures.vocabulary:atlas",
    command="atlas",
    quick={"tokens": ["the", "of"], "max_repeats": 32},
    check=refuse_workers,
    scan={
        "order": 44,
        "seconds": [1.1, 12.0],
        "quick": {"sample": 48, "max_repeats": 512},
        "full": {"sample": 1000},
    },
)
def sink_atlas(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    max_repeats: Positive | None = None,
    sample: Positive | None = None,
    batch_size: Positive = 4096,
    workers: Positive = 1,
    resume: Annotated[str | Path | None, Option(metavar="DIR", writes=True)] = None,
) -> SinkAtlas:
    """Find for every token of the vocabulary the first number of repetitions that makes it a sink.

    One causal pass up to the sink layer contains BOS and then n copies of the token. A few tokens determine the n to
    start with, and n grows for tokens that do not become a sink. The result also gives the token's frequency in the
    neutral text, the norm of its embedding, and the head of layer 0 that serves it (`token_clusters`), as properties
    that resisting tokens may share. Without BOS, a token of the text stands first (Yona et al. 2025, Fig. 6).

    Args:
        tokens: Token to repeat. By default the whole vocabulary.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        sample: Measure only this many of the tokens, drawn at random.
        batch_size: Positions per pass.
        workers: Number of processes; more than one run over Ray.
        resume: Folder that keeps finished parts, so that an interrupted run can continue.

    Example:
        sinkscope atlas --model llama-2-7b --sample 1000
    """
    target, folder = setup.target, None if resume is None else Path(resume)
    limit = repetition_limit(target, max_repeats, 1)
    ids = vocabulary(target, tokens)
    ids = ids if sample is None else sorted(sample_tokens(ids, sample, setup.seed))
    layer, neurons = causal_neurons(setup)
    setup.record(max_repeats=limit)
    text = setup.tokenizer(setup.text, add_special_tokens=False, verbose=False)["input_ids"]
    found: dict[str, Any] = {"sink_layer": layer, "max_repeats": limit, "text_tokens": len(text)}
    if layer is None:
        return SinkAtlas(**found)
    kept = None if folder is None else folder / "clusters"
    heads = clusters_of(setup, layer, neurons, ids, workers=workers, resume=kept).head or (None,) * len(ids)
    hold_layers(target, layer)
    work = begin(AtlasWork(layer, *firsts(setup), SHORTEST, limit, batch_size), setup, ids)
    columns = in_chunks(
        setup,
        work,
        ids,
        what="tokens",
        size=max(1, batch_size // 64),
        workers=workers,
        resume=None if folder is None else folder / "atlas",
        settings={"layer": layer, "first": work.first, "max_repeats": limit},
    )
    repeats: list[int | None] = columns["repeats"]
    counts = torch.bincount(torch.tensor(text), minlength=max([*ids, *text]) + 1)[ids].tolist()
    norms = _embedding_norms(target, ids)
    properties = {
        "median count in the text": [float(n) for n in counts],
        "median norm of the embedding": norms,
        "share served by a single head": [float(h is not None) for h in heads],
    }
    return SinkAtlas(
        ids=tuple(ids),
        tokens=shown(target, ids),
        repeats=tuple(repeats),
        norm=tuple(columns["norm"]),
        frequency=tuple(counts),
        embedding_norm=tuple(norms),
        head=heads,
        special=tuple(sorted({int(i) for i in setup.tokenizer.all_special_ids} & set(ids))),
        median=_median([n for n in repeats if n != 1]),
        unreached=repeats.count(None),
        by_head=_by_head(heads, repeats),
        shared=_shared(repeats, properties),
        **found,
    )


def firsts(setup: Setup) -> tuple[int, int]:
    """The token that stands first, and the one used if that is the repeated token itself; with BOS always BOS."""
    if setup.bos is not None:
        return setup.bos, setup.bos
    flat = setup.ids.flatten()
    first = int(flat[0])
    others = flat[flat != first]
    return first, int(others[0]) if len(others) else first


def begin(work: AtlasWork, setup: Setup, ids: list[int]) -> AtlasWork:
    """`work` with a first pass in which most tokens become sinks. This affects only the time, not the table."""
    got = sorted(n for n in work(setup.target, sample_tokens(ids, PILOT, setup.seed))["repeats"] if n is not None)
    enough = 1.1 * got[int(0.9 * (len(got) - 1))] if got else work.max_repeats
    return replace(work, length=max(SHORTEST, -(-int(enough) // 32) * 32))


@torch.no_grad()
def _embedding_norms(target: Target, ids: list[int]) -> list[float]:
    """Norms of the embedding's output, including its scale, if it has one."""
    parts = [target.embedding(torch.tensor(ids[i : i + 4096], device=target.device)) for i in range(0, len(ids), 4096)]
    norm = torch.cat([torch.linalg.vector_norm(p, dim=-1, dtype=torch.float32) for p in parts])
    return [round(v, 4) for v in norm.tolist()]


def _median(repeats: Sequence[int | None]) -> float | None:
    """Over those that got there."""
    got = [n for n in repeats if n is not None]
    return float(median(got)) if got else None


def _by_head(heads: Sequence[int | None], repeats: Sequence[int | None]) -> tuple[HeadRow, ...]:
    of: dict[int | None, list[int | None]] = {}
    for head, n in zip(heads, repeats, strict=True):
        of.setdefault(head, []).append(n)
    rows = [HeadRow(head, len(mine), mine.count(None), _median(mine)) for head, mine in of.items()]
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


def _table(rows: list[dict[str, Any]]) -> str:
    """All tokens as an HTML table that can be searched and sorted and is self-contained."""
    if not rows:
        return ""
    columns = zip(*(row.values() for row in rows), strict=True)
    cut = [[float(f"{v:.4g}") if isinstance(v, float) else v for v in column] for column in columns]
    packed = gzip.compress(json.dumps(cut, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
    data = base64.b64encode(packed).decode()  # a vocabulary of 128,000 stays below 3 MB
    names = ("id", "token", "repeats", "largest norm", "in the text", "embedding norm", "head")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        '<div class="sinkscope"><p><input type="search" placeholder="search a token or an id" size="30"> '
        '<label><input type="checkbox"> only those that resist</label> <output></output></p>'
        f"<table><thead><tr>{head}</tr></thead><tbody></tbody></table>"
        f'<script type="application/gzip">{data}</script><script>{_SCRIPT}</script></div>'
    )
