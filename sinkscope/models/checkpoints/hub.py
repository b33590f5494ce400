"""Files of a hub repo: downloaded, or taken from the cache, with one-line errors."""

from __future__ import annotations

from pathlib import Path

from sinkscope.errors import SinkscopeError, first_line

ADAPTER_CONFIG = "adapter_config.json"


class HubError(SinkscopeError):
    """A file of the hub cannot be had here."""


class NoFileError(SinkscopeError):
    """A repo of the hub has no such file."""


def hub_file(repo: str, name: str, revision: str | None) -> Path:
    """Download one file of a model's hub repo, or find it in the cache.

    Args:
        repo: Hub id, org/name.
        name: Name of the file.
        revision: Branch, tag or commit.

    Raises:
        AbsentError: The repo has no such file.
        SinkscopeError: The repo or revision does not exist, access or connection is missing, or the transfer failed.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except errors.LocalEntryNotFoundError as error:
        raise _refusal(error, repo, name, revision) from None
    except errors.EntryNotFoundError:
        raise NoFileError(
            f"{repo} has no {name}: give a whole model of transformers, or another revision; of an adapter, the model "
            "that it was made for"
        ) from None
    except Exception as error:
        raise _refusal(error, repo, name, revision) from None


def _refusal(error: Exception, repo: str, name: str, revision: str | None) -> SinkscopeError:
    """What went wrong, and what to do; it is no `HubError` if the repo or its revision does not exist."""
    from huggingface_hub import constants, errors

    hub, login = constants.ENDPOINT, "log in with `hf auth login`"
    # The class that a broken transfer raises depends on the version of the hub's client.
    message = f"downloading {name} of {repo} failed: {first_line(error)}; run it again, whole files are kept"
    if isinstance(error, errors.GatedRepoError):
        message = f"{repo} is gated: accept its terms at {hub}/{repo}, then {login} or set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        return SinkscopeError(f"there is no model {repo!r} at {hub}, or it is private: check the spelling, or {login}")
    elif isinstance(error, errors.RevisionNotFoundError):
        return SinkscopeError(f"{repo} has no revision {revision!r}; give a branch, tag or commit of this repository")
    elif isinstance(error, errors.LocalEntryNotFoundError):
        message = (
            f"{name} of {repo} is not in the cache and {hub} cannot be reached: check the connection and "
            "HF_HUB_OFFLINE, or give a folder that holds the checkpoint"
        )
    return HubError(message)


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
