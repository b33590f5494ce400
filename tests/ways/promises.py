"""Five promises, checked on a draw.

- right: logits are those of the plain model that is edited by hand, in every way.
- alone: a padded row, or one of several, is what it is alone.
- clean: behind the block, logits are the plain ones bit for bit, and hooks, configuration and classes are as before.
- words: what is refused is refused by one line of the product's own error.
- seen: what was changed is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sinkscope as ss

from .calls import NEW, Use
from .draws import counts_padding
from .edits import EDITS, LAYER, PATTERN, RESID, ROWS_SEEN, Draw, Z, rows_by_hand
from .families import FAMILIES, model_of
from .hiding import hide
from .known import may_be_refused, must_be_refused
from .masks import SECOND, Layout, counted, layout_of
from .settings import ATTENTIONS, HOOKS, MODES, OTHERS, WRAPPERS
from .texts import AS_GREEDY, ASSISTED, BY_TOKENS
from .ways import WAYS, inputs

TOLERATED = {"float64": 1e-5, "float32": 2e-3, "bfloat16": 0.4, "float16": 0.04}
"""Largest difference, in units of the spread of the logits. In half precision, the largest of 400 draws were 0.12 and
0.011, of interventions that read the attention, and so compute it in another way."""


def check(draw: Draw, seed: int) -> str | None:
    """Return which promise a draw breaks, and how; None if it keeps all, or plain transformers has no answer."""
    try:
        said = _broken(draw, seed)
        return None if said is not None and _is_a_tie(draw, said, seed) else said
    except ss.SinkscopeError as error:
        lines = str(error).strip().splitlines()
        if len(lines) > 1:
            return f"words: {len(lines)} lines"
        return None if may_be_refused(draw, lines[0]) else f"words: refused: {lines[0]}"
    except Exception as error:
        return f"words: {_said(error)}"


def _is_a_tie(draw: Draw, said: str, seed: int) -> bool:
    """Whether two numbers that differ by rounding were ranked or rounded in two ways: float64 tells.

    Another thread had no part in it if the same is wrong without one.
    """
    quiet = {**draw, "other": "nothing"}
    if draw["options"] in BY_TOKENS and _precision(draw) != "float32":
        return _is_right_beside(draw, seed)
    has_experts = FAMILIES[draw["family"]].experts is not None  # which are chosen by ranks
    if has_experts and _precision(draw) != "float32":
        whole = {**draw, "dtype": "float32", "mode": "usual"}
        return said.startswith("right: o") and _broken(whole, seed) is None
    is_ranked = has_experts or EDITS[draw["edit"]].alone
    if not is_ranked or draw["dtype"] != "float32" or not said.startswith("right: o"):
        return False
    if draw["other"] != "nothing" and _broken(quiet, seed) != said:
        return False
    return _broken({**quiet, "dtype": "float64"}, seed) is None


def _is_right_beside(draw: Draw, seed: int) -> bool:
    """Whether tokens are right in full precision and logits in this one: equal scores were ranked in two ways."""
    full, greedy = {**draw, "dtype": "float32", "mode": "usual"}, {**draw, "options": "greedy"}
    return _broken(full, seed) is None and _broken(greedy, seed) is None


def _precision(draw: Draw) -> str:
    """In which numbers a draw computes."""
    return "bfloat16" if draw["mode"] == "autocast" else draw["dtype"]


@contextlib.contextmanager
def repeatable(device: str) -> Iterator[None]:
    """A GPU adds in one order, so that the same call gives the same bits; memory that nobody wrote is NaN."""
    if device == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _broken(draw: Draw, seed: int) -> str | None:
    mode = MODES[draw["mode"]].around(torch.device(draw["device"]))
    ATTENTIONS[draw["attention"]].register()
    with torch.no_grad(), repeatable(draw["device"]), mode:
        ids, mask = inputs(draw, seed)
        try:
            model = _model(draw)
            right = None if EDITS[draw["edit"]].alone else _by_hand(draw, ids, mask)
        except Exception:  # plain transformers cannot do it
            return None
        if right is None:
            right = _alone({**draw, "mode": "usual"}, _model(draw), ids, mask)
        if not right.isfinite().any() or right.isinf().any():
            return None
        wrapper = WRAPPERS[draw["wrapper"]]
        wrapped = wrapper.around(model)
        call = wrapper.called(wrapped)
        try:
            plain = _forward(draw, call, model, ids, mask)  # transformers may leave hooks of its own
        except Exception:  # a mask of one turn alone
            return None
        before = _state(model)
        got, run, wrong = _used(draw, wrapped, call, model, ids, mask)
        if must_be_refused(draw):
            return "words: not refused"
        if WAYS[draw["cache"]].nothing:
            right = torch.zeros_like(got)
        if EDITS[draw["edit"]].alone and draw["mode"] == "autocast":  # rounding changes what is kept
            right = got
        if wrong:
            return f"other thread: {wrong[0]}"
        got = got.cpu()
        return (
            _differs(draw, got, right.cpu(), mask.cpu())
            or _unclean(before, _state(model), wrapper.same_bits, plain, _forward(draw, call, model, ids, mask))
            or _unseen(draw, run, plain.cpu(), got)
        )


def _model(draw: Draw) -> nn.Module:
    model = model_of(draw["family"], draw["dtype"], draw["ends"], draw["device"])
    if draw["dtype"] == "float64" and FAMILIES[draw["family"]].experts is not None:
        model.set_experts_implementation("eager")  # others have no products in float64
    name = ATTENTIONS[draw["attention"]].name
    if name is not None:
        model.set_attn_implementation(name)
    if MODES[draw["mode"]].trains:
        without_dropout(model.train())
    return model


def without_dropout(model: nn.Module) -> None:
    """Let a model in training give the same numbers again."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _by_hand(draw: Draw, ids: Tensor, mask: Tensor) -> Tensor:
    edit, hand, family = EDITS[draw["edit"]], _model(draw), FAMILIES[draw["family"]]
    edit.by_hand(hand, family)
    enter = partial(HOOKS[draw["hooks"]].around, hand, family, contextlib.nullcontext)
    use = Use(hand, hand, draw, ids, mask, enter, _layout(draw, hand, ids, mask))
    if edit.knocked is not None:
        hide(hand, family, edit.knocked.of(mask, NEW))
    if edit.site == ROWS_SEEN:
        seen = rows_by_hand(hand, family)
        WAYS[draw["cache"]].run(use)
        return seen.joined(use.length)
    if edit.site is not None:
        with enter():
            return _read(hand, family, edit.site, ids, mask)
    return WAYS[draw["cache"]].run(use)


def _read(model: nn.Module, family: Any, site: str, ids: Tensor, mask: Tensor) -> Tensor:
    """What a trace reads, by plain means."""
    more = {"position_ids": counted(mask)} if family.positions else {}
    if site == PATTERN:
        model.set_attn_implementation("eager")
        return model(input_ids=ids, attention_mask=mask, output_attentions=True, **more).attentions[LAYER]
    kept: list[Tensor] = []

    def keep(_module: nn.Module, args: Any, output: Any = None) -> None:
        passed = args if output is None else output
        kept.append(passed[0] if isinstance(passed, tuple) else passed)

    block = family.block(model, LAYER)
    if site == RESID:
        hook = block.register_forward_hook(keep)
    else:
        hook = block.get_submodule(family.out if site == Z else family.down).register_forward_pre_hook(keep)
    logits = model(input_ids=ids, attention_mask=mask, **more).logits
    hook.remove()
    if site == "logits":
        return logits
    read = kept[0].reshape(*ids.shape, -1)
    return read.unflatten(-1, (4, -1)) if site == Z else read


def _alone(draw: Draw, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The same intervention in the plainest way: each row by itself without padding, on the bare model.

    It stands where it stands in the batch: even in float64 angles of rotary embeddings are made in float32, so that
    other positions change logits by 1e-4.
    """
    way = WAYS[WAYS[draw["cache"]].alone]
    plainer = {**draw, "rows": 1, "padding": "none", "call": "keyword"}
    if draw["mask"] in ("hole", "later turn"):  # padding is gone
        plainer["mask"] = "usual"
    if draw["options"] in AS_GREEDY:
        plainer["options"] = "greedy"
    layout, found = _layout(draw, model, ids, mask), list[Tensor]()
    for number, row in enumerate(ids):
        chosen = mask[number].bool()
        one = row[chosen][None]
        edits = EDITS[draw["edit"]]
        enter = partial(_entered, draw, model, model, edits.make(), [])
        some = _some(draw, layout, number, chosen)
        use = Use(model, model, plainer, one, torch.ones_like(one), enter, some, edits.make())
        use.cut = int(chosen[: max(1, len(row) - SECOND)].sum()) or None
        said = way.run(use)
        if draw["options"] in ASSISTED:
            said = said.argmax(-1)
        if not way.tokens:  # back to where the row stands in the batch
            wide = torch.full((1, len(row), said.shape[-1]), torch.nan, device=row.device)
            wide[0, chosen] = said[0].float()
            said = wide
        found.append(said)
    return torch.cat(found)


def _some(draw: Draw, layout: Layout, row: int, chosen: Tensor) -> Layout:
    """What is said of some tokens of a row by themselves: that they stand where they stand in the batch."""
    places = layout.places
    if places is not None:
        places = places[row, chosen][None]
    elif counts_padding(draw):
        places = chosen.nonzero()[:, 0][None]
    return layout.some(row, chosen, places)


def _layout(draw: Draw, model: nn.Module, ids: Tensor, mask: Tensor) -> Layout:
    return layout_of(draw, ids, mask, model.get_input_embeddings().weight.dtype)


@contextlib.contextmanager
def _entered(draw: Draw, model: Any, bare: nn.Module, edits: Sequence[Any], runs: list[Any]) -> Iterator[list[Any]]:
    """Inside the interventions, and among the user's own hooks."""

    @contextlib.contextmanager
    def enter() -> Iterator[list[Any]]:
        with contextlib.ExitStack() as stack:
            for one in edits:
                runs.append(stack.enter_context(one.on(model)))
            yield runs

    with HOOKS[draw["hooks"]].around(bare, FAMILIES[draw["family"]], enter) as entered:
        yield entered


def _used(
    draw: Draw, wrapped: Any, call: Any, model: nn.Module, ids: Tensor, mask: Tensor
) -> tuple[Tensor, list[Any], list[str]]:
    """What the intervention gives, its runs, and what went wrong in another thread."""
    runs: list[Any] = []
    edit = EDITS[draw["edit"]]
    with OTHERS[draw["other"]].running(model, ids) as wrong:
        edits = edit.make()
        enter = partial(_entered, draw, wrapped, model, edits, runs)
        if edit.site in (None, ROWS_SEEN):
            use = Use(call, model, draw, ids, mask, enter, _layout(draw, model, ids, mask), edits)
            got = WAYS[draw["cache"]].run(use)
            if edit.site == ROWS_SEEN:
                got = edits[0].fn.joined(use.length)
        else:
            with enter():
                got = ss.trace(wrapped, ids, edit.site, attention_mask=mask)[edit.site]
    return got, runs, wrong


def _forward(draw: Draw, call: Any, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    plain = {**draw, "cache": "none", "hooks": "none"}
    layout = _layout(draw, model, ids, mask)
    return WAYS["none"].run(Use(call, model, plain, ids, mask, contextlib.nullcontext, layout))


def _state(model: nn.Module) -> tuple[str, int, tuple[type, ...], list[bool]]:
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    classes = tuple(type(module) for module in model.modules())
    return model.config.to_json_string(), hooks, classes, [module.training for module in model.modules()]


def _differs(draw: Draw, got: Tensor, right: Tensor, mask: Tensor) -> str | None:
    if got.shape != right.shape:
        return f"right: shape {tuple(got.shape)}, not {tuple(right.shape)}"
    if not got.is_floating_point():
        return None if torch.equal(got, right) else "right: other tokens"
    got, right = got.float(), right.float()
    counts = ~right.isnan()
    precision = _precision(draw)
    writes = WAYS[draw["cache"]].tokens and EDITS[draw["edit"]].site in (None, ROWS_SEEN)  # a trace reads one call
    if precision != "float32" and writes:  # a draw of two equal logits: the texts part there
        same = (got.argmax(-1) == right.argmax(-1)).long().cumprod(1).roll(1, 1)
        same[:, 0] = 1
        counts &= same.bool()[..., None]
    if EDITS[draw["edit"]].site in (PATTERN, ROWS_SEEN) and got.dim() == 4:  # attention: at padding it means nothing
        counts &= (mask[:, None, :, None] * mask[:, None, None, :]).bool()
    elif got.shape[1:2] == mask.shape[1:] and not writes and draw["call"] != "no mask":
        counts &= mask.bool().reshape(*mask.shape, *[1] * (got.dim() - 2))
    spread, off = right[counts].std(), (got - right).abs().where(counts, 0.0)
    if off.max() <= TOLERATED[precision] * max(1.0, float(spread)):
        return None
    return f"right: off by {float(off.max()):.3g} where they spread by {float(spread):.3g}"


def _unclean(before: Any, after: Any, same_bits: bool, plain: Tensor, again: Tensor) -> str | None:
    for name, was, became in zip(("configuration", "hooks", "classes", "modes"), before, after, strict=True):
        if was != became:
            return f"clean: other {name}"
    if same_bits and not torch.equal(plain, again):
        return "clean: other logits behind the block"
    return None


def _unseen(draw: Draw, runs: list[Any], plain: Tensor, got: Tensor) -> str | None:
    """Whether nothing was counted although logits changed."""
    if EDITS[draw["edit"]].acts:
        return None if any(run.events for run in runs) else "seen: no event although the guard had to act"
    if not EDITS[draw["edit"]].events or draw["hooks"] != "none" or got.shape != plain.shape or torch.equal(got, plain):
        return None
    return None if any(run.counts.total() for run in runs) else "seen: nothing was counted where logits changed"


def _said(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0][:110] if text else ''}"
