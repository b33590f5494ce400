"""Files of a hub repo: downloaded, or taken from the cache; errors are those of huggingface_hub, in one line."""

from __future__ import annotations

from pathlib import Path

from sinkscope.errors import SinkscopeError

ADAPTER_CONFIG = "adapter_config.json"


class NoFileError(SinkscopeError):
    """A repo of the hub has no such file."""


def hub_file(repo: str, name: str, revision: str | None) -> Path:
    """Download one file of a model's hub repo, or find it in the cache.

    Args:
        repo: Hub id, org/name.
        name: Name of the file.
        revision: Branch, tag or commit.

    Raises:
        NoFileError: The repo has no such file.
        SinkscopeError: The repo or revision does not exist, access or connection is missing, or the transfer failed.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except Exception as error:
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            raise NoFileError(
                f"{repo} has no {name}: give a whole model of transformers, or another revision; of an adapter, the "
                "model that it was made for"
            ) from None
        at = "" if revision is None else f" at {revision}"
        reason = " ".join(str(error).split())
        raise SinkscopeError(
            f"{name} of {repo}{at} was not downloaded ({type(error).__name__}): {reason}; check name, revision, access "
            "(`hf auth login`) and connection, and run it again: whole files are kept"
        ) from None


def hub_folder(repo: str, revision: str | None) -> Path:
    """Download the config.json of a hub repo.

    Args:
        repo: Hub id, org/name.
        revision: Branch, tag or commit.

    Returns:
        Its folder in the cache. It is named after the commit, so all its files belong to one revision.

    Raises:
        SinkscopeError: There is no config.json, or an adapter.
    """
    folder = hub_file(repo, "config.json", revision).parent
    if optional_file(repo, ADAPTER_CONFIG, folder.name) is not None:
        raise refuse_adapter(repo)
    return folder


def optional_file(repo: str, name: str, commit: str) -> Path | None:
    """Download a file of a hub repo; None if the repo has no file of that name.

    Raises:
        SinkscopeError: The file cannot be downloaded.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=commit)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None:  # a mark that this commit has no such file, which will not change
        return None
    try:
        return hub_file(repo, name, commit)
    except NoFileError:
        return None
    except SinkscopeError:
        # Offline, nobody can tell whether the repo has the file; a file that the cache lacks then counts as absent.
        if constants.HF_HUB_OFFLINE:
            return None
        raise


def refuse_adapter(name: str) -> SinkscopeError:
    """Return the error for a folder or hub id that holds an adapter (LoRA and others of peft)."""
    return SinkscopeError(
        f"{name} holds an adapter ({ADAPTER_CONFIG}), so it is no model alone: load its base with sinkscope.load(...), "
        f"put the adapter on it with peft.PeftModel.from_pretrained(base, {name!r}), and measure that; or merge them; "
        "or give the model without the adapter"
    )
