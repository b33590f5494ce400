"""Edits and sites of a model that runs on a server of nnsight (NDIF), where sinkscope is not installed.

What is sent is one block of plain torch operations: an edit travels as columns, positions and numbers, a site as the
module whose input or output it is. What cannot be written so is refused by name before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.placed import PlacedEdit
from sinkscope.hooks.edit.positions import Tracker
from sinkscope.hooks.trace.sites import Pattern, Site, resolve
from sinkscope.models.hooks import first_tensor
from sinkscope.models.inputs import Ids, read_inputs
from sinkscope.models.loading.config import first_line
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.results.options import checks_arguments

Where = bool | Literal["local"]


_Stop = tuple[nn.Module, str]
"""A module at which the pass is edited or read, and its side: "pre" is what enters it, "post" what leaves it."""


@dataclass(frozen=True)
class Remote:
    """A model of nnsight whose passes run on a server. Made by `sinkscope.remote`.

    Attributes:
        target: The model; its weights may be on the meta device, as they are if it was made by name.
        where: What nnsight is given as `remote=`.
    """

    target: Target
    where: Where

    def trace(
        self,
        tokens: Any,
        sites: Pattern | Sequence[Pattern],
        edit: Intervention | None = None,
        *,
        attention_mask: Any = None,
        bos: bool | None = None,
    ) -> dict[str, Tensor]:
        """Run the model once on the server, edited, and return each site's tensor `[batch pos ...]` on the CPU.

        Args:
            tokens: Texts, or ids `[batch pos]`, as `sinkscope.trace` takes them.
            sites: Names or patterns of sites, as `sinkscope.trace` takes them, but those of attention rows.
            edit: `Ablate`, `SinkPatch` or `Add`, or several joined by `|`. None edits nothing.
            attention_mask: 1 for real tokens, 0 for padding, `[batch pos]`. nnsight counts positions from each row's
                first real token.
            bos: Whether texts begin with BOS. By default the tokenizer decides.

        Raises:
            SinkscopeError: Tokens, a site, a neuron or a head are not this model's.
            UnsupportedError: A site or an edit cannot be sent.
        """
        target = self.target
        rows = read_inputs(target, tokens, attention_mask, bos=bos)
        edits, reads = self._edits(edit, rows.ids, rows.mask), dict[Site, _Stop]()
        for site in resolve(target, sites):
            if site.module is None:
                raise _cannot_travel(f"no module returns the rows of {site.name!r}")
            reads[site] = site.module, site.when
        given = self._sent(self._order({*edits, *reads.values()}), edits, set(reads.values()), rows.ids, rows.mask)
        found: dict[str, Tensor] = {}
        for site, stop in reads.items():
            if site.name in ("ln_final", "logits"):  # the block has taken them out of what the model returns
                site = replace(site, cut=first_tensor)
            found[site.name] = site.shown(given[stop], rows.ids.shape)
        return found

    def _edits(self, edit: Intervention | None, ids: Ids, mask: Ids | None) -> dict[_Stop, list[Any]]:
        """The columns and new values of each edit, by where it acts."""
        edits: dict[_Stop, list[Any]] = {}
        index = Tracker(self.target).begin(ids, mask=mask).index
        for part in () if edit is None else edit.parts:
            if not isinstance(part, PlacedEdit):
                raise _cannot_travel(f"{type(part).__name__} acts on the cache or on every token that is generated")
            for place, of in part.places_in(self.target):
                if place.inside is not None:
                    raise _cannot_travel(f"{type(part).__name__} computes more than new values for columns (experts)")
                formula = part.formula(of, index)
                if formula is None:
                    raise _cannot_travel(f"{part!r} decides by what it measures")
                edits.setdefault((place.module, place.when), []).append((place.columns, *formula))
        return edits

    @torch.no_grad()
    def _order(self, stops: set[_Stop]) -> list[_Stop]:
        """The stops in the order of a pass, which the model tells without its weights."""
        target = self.target
        seen: list[_Stop] = []
        hooks: list[Any] = []
        for stop in stops:
            hooks.append((*stop, lambda *_, stop=stop: seen.append(stop)))
        device, mask = target.device, None
        if target.is_empty:
            device, mask = torch.device("meta"), torch.zeros(1, 1, 2, 2, device="meta")  # others' values are looked at
        try:
            with target.hooks(*hooks):
                ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
                target.hf(input_ids=ids, attention_mask=mask, use_cache=False)
        except Exception as error:
            raise UnsupportedError(
                f"{target.name} does not run without its weights ({first_line(error)}), so the order of its modules is "
                "not known: make it with dispatch=True"
            ) from None
        for module, _ in stops.difference(seen):
            raise _cannot_travel(f"{type(module).__name__}, where a site or an edit is, does not run in a pass")
        return list(dict.fromkeys(seen))

    def _sent(
        self, stops: list[_Stop], edits: dict[_Stop, list[Any]], reads: set[_Stop], ids: Ids, mask: Ids | None
    ) -> dict[_Stop, Tensor]:
        """What was read at each stop. The block is source code that the server runs."""
        paths = {module: path for path, module in self.target.hf.named_modules()}
        plan = [(paths[stop[0]], stop[1], edits.get(stop, []), stop in reads) for stop in stops]
        model, batch, where = self.target.model, len(ids), self.where
        save = import_module("nnsight").save
        inputs: dict[str, Any] = {"input_ids": ids}
        if mask is not None:
            inputs["attention_mask"] = mask
        read: Any = None
        with torch.no_grad():
            with model.trace(**inputs, remote=where):
                read = []
                for path, side, changes, is_read in plan:
                    module = model.get(path) if path else model
                    whole = module.input if side == "pre" else module.output
                    value = whole if isinstance(whole, torch.Tensor) else whole[0]
                    if changes:
                        new = value.clone().reshape(batch, -1, value.shape[-1])
                        for numbers, chosen, given, adds, mean_of in changes:
                            columns = list(range(new.shape[-1])) if numbers is None else numbers
                            old = new[..., columns]
                            made = torch.as_tensor(given, dtype=old.dtype, device=old.device)
                            if adds:
                                made = old + made
                            if mean_of is not None:
                                there = mean_of.to(old.device)[..., None]
                                mean = torch.where(there, old, 0).sum(1, keepdim=True) / there.sum(1, keepdim=True)
                                made = torch.where(mean.isnan(), old, mean)
                            new[..., columns] = torch.where(chosen.to(old.device)[..., None], made, old)
                        value = new.reshape(value.shape)
                        if side == "pre":
                            module.input = value
                        elif isinstance(whole, torch.Tensor):
                            module.output = value
                        else:
                            module.output = (value, *whole[1:])
                    if is_read:
                        read.append(value.detach().cpu())
                read = save(read)
        return dict(zip([stop for stop in stops if stop in reads], read, strict=True))


@checks_arguments
def remote(model: object, where: Where = True, *, tokenizer: Any = None) -> Remote:
    """A model of nnsight on a server: `.trace(tokens, sites, edit)` runs it there.

    Args:
        model: A `TransformersModel` or `LanguageModel` of nnsight. One that is made by name is not loaded here.
        where: True sends to the server that nnsight is configured for; "local" runs here what would be sent, without
            sinkscope, as nnsight simulates a server; False runs it here.
        tokenizer: Tokenizer for texts, if the model carries none.

    Raises:
        SinkscopeError: It is no model of nnsight.

    Example:
        >>> import nnsight
        >>> model = nnsight.TransformersModel("gpt2", task="text-generation")  # doctest: +SKIP
        >>> edit = Ablate(neurons="L1.N7890")  # doctest: +SKIP
        >>> remote(model).trace("A text", "logits", edit)["logits"]  # doctest: +SKIP
    """
    target = target_of(model, tokenizer, loads=False)
    if target.kind != "nnsight":
        raise SinkscopeError(
            f"{type(model).__name__} is no model of nnsight, which sends it to a server: make it with "
            "nnsight.TransformersModel(name, task='text-generation')"
        )
    return Remote(target, where)


def _cannot_travel(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"this cannot be sent to a server: {reason}; load the model here, or send Ablate, SinkPatch or Add and the "
        "sites of modules (docs/interventions.md)"
    )
