"""A loaded Hugging Face model as a TransformerBridge or an nnsight model; both packages are imported when needed."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

from sinkscope.errors import SinkscopeError, UnsupportedError

Backend = Literal["bridge", "hf", "nnsight"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def wrap(hf: Any, tokenizer: Any, backend: Backend) -> Any:
    """`hf` as the kind of object asked for. Bridge and nnsight change `hf` in place: give it to nobody else.

    The tokenizer is copied first, because both set padding and special tokens on theirs.

    Raises:
        UnsupportedError: TransformerLens or nnsight is not installed, or cannot wrap this architecture.
        SinkscopeError: no tokenizer.
    """
    if backend == "hf":
        return hf
    if tokenizer is None:
        raise SinkscopeError(
            f"backend={backend!r} needs a tokenizer and the model came without one; give tokenizer=..., or use "
            'backend="hf"',
            page="no-tokenizer",
        )
    return (_bridge if backend == "bridge" else _nnsight)(hf, copy.deepcopy(tokenizer))


def _bridge(hf: Any, tokenizer: Any) -> Any:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise _not_installed("transformer-lens", "bridge", error) from None
    config = hf.config
    if config.model_type == "falcon" and config.new_decoder_architecture:
        raise _cannot("TransformerLens", hf, "its fused query, key and value are interleaved by group")
    if getattr(config, "vision_config", None) is not None and not _has_torchvision():
        # Booting would run `pip install torchvision`, which may replace torch in the user's environment.
        raise _cannot("TransformerLens", hf, "it needs torchvision for models with images: pip install torchvision")
    if not config.architectures:
        config.architectures = [type(hf).__name__]
    # The bridge makes a second tokenizer from the path of this one, which may be on a hub, unless it is told that
    # this one adds BOS; whether it really does is found out by encoding a text.
    tokenizer.init_kwargs.setdefault("name_or_path", "")
    tokenizer.init_kwargs["add_bos_token"] = True
    name = getattr(config, "_name_or_path", "")
    if "/" not in name:  # it may be an alias of TransformerLens, which warns of those
        name = type(hf).__name__
    try:
        return TransformerBridge.boot_transformers(name, hf_model=hf, tokenizer=tokenizer, dtype=hf.dtype)
    except Exception as error:
        raise _cannot("TransformerLens", hf, error) from error


def _has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except Exception:  # TransformerLens takes a broken one for a missing one, too
        return False
    return True


def _nnsight(hf: Any, tokenizer: Any) -> Any:
    try:
        from nnsight import TransformersModel
    except ImportError as error:
        raise _not_installed("nnsight", "nnsight", error) from None
    try:
        return TransformersModel(hf, tokenizer=tokenizer, task="text-generation")
    except Exception as error:
        raise _cannot("nnsight", hf, error) from error


def _not_installed(package: str, backend: Backend, error: ImportError) -> UnsupportedError:
    return UnsupportedError(
        f"backend={backend!r} needs {package}, which cannot be imported ({error}): pip install {package}, or use "
        'backend="hf"',
        page="backend-cannot",
    )


def _cannot(package: str, hf: Any, why: object) -> UnsupportedError:
    first = (str(why).splitlines() or [type(why).__name__])[0]
    return UnsupportedError(
        f'{package} cannot wrap this {hf.config.model_type} model ({first}); backend="hf" can', page="backend-cannot"
    )
