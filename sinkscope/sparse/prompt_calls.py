"""What is known of the prompts of a run: token ids, copies, and the recorded choice of lines."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.hooks.call import Call, Memory
from sinkscope.hooks.edit.base import Run
from sinkscope.sparse.replay import Replayed
from sinkscope.sparse.sample import Copies
from sinkscope.tap.call import View

_UNKNOWN = -1  # the id of an embedding, and of a token that was read before the run


@dataclass(eq=False)
class PromptCall:
    """What the layers of one call share.

    Attributes:
        copies: Copies in each row, on each device; None if no id is known.
        replayed: The choices of lines that were recorded.
    """

    copies: dict[tuple[int, torch.device], Copies | None] = field(default_factory=dict)
    replayed: dict[Hashable, Replayed] = field(default_factory=dict)
    _counts: dict[int, Int[Tensor, "row 3"]] = field(default_factory=dict)

    def counts_of(self, view: View) -> Int[Tensor, "row 3"]:
        """Return the last position of each row, and the numbers of its keys and of its queries."""
        slots = view.pos.shape[2]
        if slots not in self._counts:
            queries = view.query_pos
            keys = (view.pos[:, 0] >= 0).sum(-1)
            self._counts[slots] = torch.stack([queries.amax(1), keys, (queries >= 0).sum(-1)], 1)
        return self._counts[slots]


class PromptCalls:
    """Follows the calls of a run. Ids are kept with the rows of each cache, so that a turn's copies reach into it.

    Args:
        run: The run.
        key: Key of the edit in the run.
    """

    def __init__(self, run: Run, key: int) -> None:
        self._run, self._key = ref(run), key
        self._calls: WeakKeyDictionary[Call, PromptCall] = WeakKeyDictionary()
        run.hook((run.target.base, "pre", self._note))

    def of(self, call: Call) -> PromptCall:
        """Return what is known of a call, as long as it lasts."""
        return self._calls.setdefault(call, PromptCall())

    def copies(self, call: Call, row: int, device: torch.device) -> Copies | None:
        """Find the copies in a row of a prompt; None if no id of it is known. The first layer waits for the device."""
        found = self.of(call).copies
        if (row, device) not in found:
            ids = call.state.memory[self._key].of_tokens["ids"][row]
            real = ids[call.columns[row] >= 0].cpu()
            queries = int((call.index[row] >= 0).sum())
            is_known = bool((real[len(real) - queries :] != _UNKNOWN).any())
            found[row, device] = Copies.of(real, queries, device) if is_known else None
        return found[row, device]

    def _note(self, *_: Any) -> None:
        """Add the ids of a call to those before it."""
        run = self._run()
        call = None if run is None else run.call
        if call is None:
            return
        new = torch.full_like(call.index, _UNKNOWN) if call.ids is None else call.ids.to(call.index.device)
        memory = call.state.memory.setdefault(self._key, Memory())
        earlier = memory.of_tokens.get("ids", new[:, :0])[:, : call.past]
        unknown = new.new_full((call.rows, call.past - earlier.shape[1]), _UNKNOWN)
        memory.of_tokens["ids"] = torch.cat([earlier, unknown, new], 1)
