"""Reference texts for measurements: neutral ones with their token ids, and ones on which no detector may fire."""

from __future__ import annotations

import json
import random
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text

ONE_TOKEN = 0.9  # a text of which more is one token (mostly the unknown one) is refused
ENOUGH = 8  # tokens that this can be said of
MODULES = ("argparse", "ast", "csv", "difflib", "inspect", "pickle", "statistics", "tarfile", "textwrap", "zipfile")


def typical_text(path: str | Path | None = None) -> str:
    """The neutral text: `path`, or the bundled English prose (Python's language reference, PSF licence).

    Raises:
        SinkscopeError: The file cannot be read, is not UTF-8, or is empty.
    """
    if path is None:
        return resources.files("sinkscope.models.text").joinpath("typical.txt").read_text("utf-8")
    text = read_text(str(path))
    if not text.strip():
        raise SinkscopeError(f"text file {str(path)!r} is empty; give a UTF-8 text file with some prose")
    return text


def source_code() -> str:
    """Python source of the standard library, read from the running interpreter."""
    texts = list[str]()
    for name in MODULES:
        spec = find_spec(name)
        if spec is not None and spec.has_location and spec.origin is not None and spec.origin.endswith(".py"):
            texts.append(Path(spec.origin).read_text("utf-8"))
    return "\n".join(texts)


def honest_repetition(seed: int = 0) -> str:
    """Repetition that people write: tables, songs with a refrain, lists, rulers and dotted contents, in sequence.

    Args:
        seed: 0 keeps the order of the file; any other seed shuffles it.
    """
    pieces = resources.files("sinkscope.models.text").joinpath("repetition.jsonl").read_text("utf-8").splitlines()
    if seed:
        random.Random(seed).shuffle(pieces)
    return "\n\n".join(map(json.loads, pieces)) + "\n"


def resolve_bos(tokenizer: Any, config: Any, bos: bool | None) -> int | None:
    """Id of the token that sequences begin with; None for no BOS.

    Args:
        tokenizer: Determines the BOS token; the config is used only if it does not know.
        config: Text configuration of the model.
        bos: True requires a BOS token; False omits it; None uses it if the tokenizer has one.

    Raises:
        SinkscopeError: `bos=True`, but there is no BOS token.
    """
    if bos is False:
        return None
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None and bos:
        raise SinkscopeError(
            f"--bos: the tokenizer of this {config.model_type} model has no BOS token; leave --bos out or use --no-bos"
        )
    return None if bos_id is None else int(bos_id)


def text_rows(tokenizer: Any, text: str, rows: int, length: int, bos: int | None) -> Int[Tensor, "row pos"]:
    """Up to `rows` consecutive pieces of a text, each of `length` tokens, including BOS if there is one.

    Raises:
        SinkscopeError: The text is too short for one piece, or this tokenizer turns it into one repeated token.
    """
    body = length - (bos is not None)
    # Eight characters a token is more than any tokenizer needs for prose, so a long text is not tokenized whole.
    ids = tokenizer(text[: 8 * rows * body], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < body:
        raise SinkscopeError(
            f"this tokenizer makes {len(ids)} tokens of the text; {body} are needed for one piece: give a "
            "longer --text, of a kind that it knows"
        )
    count = min(rows, len(ids) // body)
    tokens = torch.tensor(ids[: count * body], dtype=torch.long)
    pieces = rearrange(tokens, "(row pos) -> row pos", row=count)
    _refuse_one_token(tokenizer, pieces)
    return pieces if bos is None else torch.nn.functional.pad(pieces, (1, 0), value=bos)


def _refuse_one_token(tokenizer: Any, pieces: Int[Tensor, "row pos"]) -> None:
    """A text that is one token, known or not, is a repeated token: nothing can be compared with it."""
    if pieces.numel() < ENOUGH:
        return
    token = int(pieces.flatten().mode().values)
    share = float((pieces == token).float().mean())
    if share > ONE_TOKEN:
        what = f"the one token {tokenizer.decode([token])!r}"
        if token == getattr(tokenizer, "unk_token_id", None):
            what = "unknown to this tokenizer"
        raise SinkscopeError(f"{share:.0%} of the text is {what}: give a file of prose that it knows with --text")
