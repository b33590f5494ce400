"""Numbers for each slot of a cache layer, such as the attention it received; they move with the slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor


class SlotNumbers:
    """Numbers for each slot, by name. They are zero in slots that came after they were last read."""

    def __init__(self) -> None:
        self._by_name: dict[str, Shaped[Tensor, "batch kv_head slot"]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def names(self) -> list[str]:
        """The names."""
        return list(self._by_name)

    def of(self, name: str, slots: int) -> Shaped[Tensor, "batch kv_head slot"]:
        """The numbers of all slots, of which there are so many."""
        numbers = self._by_name[name]
        new = slots - numbers.shape[-1]
        if new > 0:
            numbers = torch.nn.functional.pad(numbers, (0, new))
            self._by_name[name] = numbers
        return numbers

    def set(self, name: str, numbers: Shaped[Tensor, "batch kv_head slot"]) -> None:
        """Replace the numbers of this name."""
        self._by_name[name] = numbers

    def add(self, name: str, numbers: Shaped[Tensor, "batch kv_head slot"]) -> None:
        """Add the earlier numbers to a new tensor, which replaces them."""
        earlier = self._by_name.get(name)
        if earlier is not None:
            numbers.narrow(-1, 0, earlier.shape[-1]).add_(earlier)
        self._by_name[name] = numbers

    def moved(self, slots: int, move: Callable[[Tensor], Tensor]) -> SlotNumbers:
        """The numbers of other slots or rows, as a function takes them from those of all slots."""
        moved = SlotNumbers()
        for name in self._by_name:
            moved.set(name, move(self.of(name, slots)))
        return moved

    def split(self, parts: int) -> list[SlotNumbers]:
        """The numbers of equal parts of the rows."""
        split = [SlotNumbers() for _ in range(parts)]
        for name, numbers in self._by_name.items():
            for part, of_part in zip(split, numbers.chunk(parts), strict=True):
                part.set(name, of_part)
        return split

    def copy(self) -> SlotNumbers:
        """The same numbers, for another holder."""
        copied = SlotNumbers()
        copied._by_name.update(self._by_name)
        return copied
