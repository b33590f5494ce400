"""The training text: Python's own standard library, read from the running interpreter, in a fixed order."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"

# Tests and bundled third-party code are not library text; `encodings` is tables; `pydoc_data` holds the text kept for
# measuring; `_sysconfigdata*` describes the machine Python was built on.
EXCLUDED_DIRS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)


def library_files(root: Path) -> list[Path]:
    """Python files of the standard library, relative to its root, sorted."""
    items: list[Path] = []
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        excluded = EXCLUDED_DIRS & set(path.parts) or path.parts[0].startswith("config-")
        if not excluded and not path.name.startswith("_sysconfigdata"):
            items.append(path)
    return items


def is_validation(path: Path) -> bool:
    """About 3 % of the files, chosen by their name so that the choice never moves."""
    return hashlib.sha256(path.as_posix().encode()).digest()[0] < 8


def read_corpus() -> tuple[list[str], list[str], str]:
    """Training and validation files, in order, and the hash of all of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    valid: list[str] = []
    digest = hashlib.sha256()
    for path in library_files(root):
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest.update(path.as_posix().encode() + b"\0" + text.encode() + b"\0")
        (valid if is_validation(path) else train).append(text)
    return train, valid, digest.hexdigest()


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that puts BOS in front unless told not to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one array of ids, EOS after each, no BOS (crops add it)."""
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(eos)
    return np.asarray(ids, dtype=np.int32)


def windows(tokens: np.ndarray, *, length: int, bos_id: int) -> np.ndarray:
    """Non-overlapping windows with BOS in front, for the validation loss."""
    count = len(tokens) // (length - 1)
    body = tokens[: count * (length - 1)].reshape(count, length - 1).astype(np.int64)
    return np.concatenate([np.full((count, 1), bos_id, dtype=np.int64), body], axis=1)
