"""First and later tokens for training and for holding out, so that no token and no text is on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError

PER_TOKEN = 4  # later positions of one token at most, so that frequent words do not make up the class
CLEAR = 8  # without BOS the first few tokens may still be marked as the first is: later positions begin here
_LEAST = 2  # samples of a class on either side


@dataclass(frozen=True)
class Samples:
    """What is told apart.

    Attributes:
        firsts: tokens to put first.
        first_held: which of them are held out.
        ids: the texts.
        later: places in them, (row, position).
        later_held: which of these are held out.
        bos: BOS, if texts begin with it.
    """

    firsts: Int[Tensor, " first"]
    first_held: Bool[Tensor, " first"]
    ids: Int[Tensor, "row pos"]
    later: Int[Tensor, "later 2"]
    later_held: Bool[Tensor, " later"]
    bos: int | None

    @property
    def later_tokens(self) -> Int[Tensor, " later"]:
        """The tokens at the later places."""
        return self.ids[self.later[:, 0], self.later[:, 1]]


def draw_samples(ids: Int[Tensor, "row pos"], words: list[int], bos: int | None, seed: int) -> Samples:
    """Half of the tokens and half of the texts are held out; later positions are taken where both halves agree.

    Args:
        ids: typical text.
        words: tokens to put first, without BOS.
        bos: BOS, if texts begin with it.
        seed: of the draw.

    Raises:
        SinkscopeError: too few words or too short a text for both classes on both sides.
    """
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.tensor(words)[torch.randperm(len(words), generator=generator)]
    held_token = torch.randint(2, (int(max(ids.max(), firsts.max())) + 1,), generator=generator).bool()
    held_token[firsts] = torch.arange(len(firsts)) % 2 == 1
    held_text = torch.randperm(len(ids), generator=generator) % 2 == 1

    start = CLEAR if bos is None else 1
    later, held, seen = [], [], dict[int, int]()
    for place in (torch.randperm(len(ids) * (ids.shape[1] - start), generator=generator)).tolist():
        row, pos = divmod(place, ids.shape[1] - start)
        token = int(ids[row, pos + start])
        if token == bos or bool(held_token[token] != held_text[row]) or seen.get(token, 0) == PER_TOKEN:
            continue
        seen[token] = seen.get(token, 0) + 1
        later.append((row, pos + start))
        held.append(bool(held_token[token]))
    made = Samples(firsts, held_token[firsts], ids, torch.tensor(later).view(-1, 2), torch.tensor(held).bool(), bos)
    for name, sides in (("first", made.first_held), ("later", made.later_held)):
        if min(int(sides.sum()), int((~sides).sum())) < _LEAST:
            raise SinkscopeError(
                f"{len(sides)} {name} tokens are too few to train on some and hold out others; give more words, or a "
                "longer --text"
            )
    return made
