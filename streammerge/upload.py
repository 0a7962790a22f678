"""Uploads a merged directory to the Hugging Face Hub, through huggingface_hub.

`upload_folder` is what versions 0.30 to 2.4 have in common (`upload_large_folder` is gone in 2.x).
It makes one commit, writes nothing into the folder, and a second run sends only what is missing:
files that the Hub has are recognized by their hash, with Xet each part of a file.
"""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from streammerge.errors import TargetError, UsageError
from streammerge.header import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What loaders take for weights, beside or instead of ours.
_WEIGHTS = (
    "model*.safetensors",
    INDEX_FILE,
    "value_head.safetensors",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "adapter_model.*",
)
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests", "urllib3")
_LOGIN = "'hf auth login' stores one, or set HF_TOKEN"
_OTHER = "use a token that can write there, or another REPO"


@dataclass(frozen=True, slots=True)
class Upload:
    """What an upload did.

    Attributes:
        url: of the repository.
        deleted: weights of an earlier upload that the directory does not have. They went in the
            same commit, as loaders would take them; the repository's history keeps them.
    """

    url: str
    deleted: tuple[str, ...]


def check_upload(repo: str, *, private: bool = False) -> None:
    """Find out, before hours of merging, whether an upload can work.

    Args:
        repo: name of the repository, with or without its namespace.
        private: whether it must be private.

    Raises:
        UsageError: huggingface_hub is not installed, or `repo` is no name.
        TargetError: no token, one that the Hub does not accept or that may not write there, a
            repository that is public against `private`, or no connection.
    """
    api = _api(repo)
    with _explained(repo):
        account = api.whoami()
        refused = refusal(account, repo)
        if refused is not None:
            raise TargetError(refused, hint=_OTHER)
        full_name = repo if "/" in repo else f"{account['name']}/{repo}"
        if private and api.repo_exists(full_name):
            _check_private(api, full_name)


def upload(directory: str, repo: str, *, private: bool = False, progress: bool = False) -> Upload:
    """Upload a merged directory, into a new repository or as a commit of an existing one.

    The same call after a failure sends what is missing.

    Args:
        directory: a finished result. Nothing is written there.
        repo: name of the repository, with or without its namespace.
        private: make a new repository private; refuse one that is public.
        progress: show huggingface_hub's progress on stderr.

    Raises:
        UsageError, TargetError: as `check_upload`, when the Hub fails on the way, and if the
            directory holds no weights.
        KeyboardInterrupt: and whatever else is no Exception, with a message that says how to go on.
    """
    names = _names(directory)
    api = _api(repo)
    command = ["streammerge", "upload", directory, repo, *(["--private"] if private else [])]
    resume = f"{directory} is complete, '{shlex.join(command)}' sends what is missing"
    try:
        with _explained(repo, resume), _output(progress):
            # Without a namespace, only the answer knows the full name.
            full_name = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
            if private:
                _check_private(api, full_name)
            deleted = stale_weights(api.list_repo_files(full_name), names)
            api.upload_folder(
                repo_id=full_name,
                folder_path=directory,
                commit_message="Upload a model merged by streammerge",
                delete_patterns=list(deleted) or None,
            )
    except Exception:
        raise
    except BaseException as interruption:  # Ctrl-C, or what the caller makes of another signal
        raise type(interruption)(f"upload interrupted; {resume}") from None
    return Upload(f"{api.endpoint}/{full_name}", deleted)


def refusal(account: Mapping[str, Any], repo: str) -> str | None:
    """Why an account cannot write to a repository, as far as it says so itself. Pure.

    Args:
        account: the answer of the Hub's ``whoami-v2``. A classic token names its organizations
            with the role in them; a fine-grained one what it may do where (``repo.write``).
        repo: name of the repository.

    Returns:
        The reason, or None.
    """
    token = account.get("auth", {}).get("accessToken") or {}
    role = token.get("role")
    if role == "read":
        return f"the token {token.get('displayName')!r} may only read"
    if role == "fineGrained":
        scoped = (token.get("fineGrained") or {}).get("scoped")
        if scoped is not None and not any("repo.write" in s["permissions"] for s in scoped):
            return f"the token {token.get('displayName')!r} may not write to any repository"
    namespace = repo.rpartition("/")[0]
    if role != "write" or namespace in ("", account.get("name")):
        return None
    roles = {org["name"]: org.get("roleInOrg") for org in account.get("orgs", ())}
    if namespace not in roles:
        return f"{repo}: {namespace} is neither the user {account.get('name')} nor one of the orgs"
    if roles[namespace] == "read":
        return f"{repo}: the user {account.get('name')} may only read in {namespace}"
    return None


def stale_weights(remote: list[str], local: list[str]) -> tuple[str, ...]:
    """The weights in a repository that would be loaded beside or instead of new ones. Pure.

    Args:
        remote: paths in the repository.
        local: names in the directory that is uploaded. If it holds no model (but an adapter, say),
            nothing in the repository is in its way.

    Returns:
        Names at the top of the repository, in order.
    """
    if not {SINGLE_FILE, INDEX_FILE} & set(local):
        return ()
    found = (path for path in remote if any(fnmatch(path, pattern) for pattern in _WEIGHTS))
    return tuple(sorted(path for path in found if "/" not in path and path not in local))


def _names(directory: str) -> list[str]:
    """What is in a directory, unless that is no result of a merge."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}") from error
    if not any(name.endswith(".safetensors") for name in names):
        raise UsageError(f"{directory}: holds no *.safetensors, so it is not a merged directory")
    return names


def _api(repo: str) -> HfApi:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            "an upload needs huggingface_hub, which is not installed",
            hint="pip install 'streammerge[hub]'",
        ) from error
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(
            f"{repo!r} is not the name of a repository: {_first_line(error)}"
        ) from error
    return HfApi()


def _check_private(api: HfApi, full_name: str) -> None:
    """The Hub ignores ``private`` for a repository that exists."""
    if not api.model_info(full_name).private:
        raise TargetError(
            f"{full_name}: exists and is public, nothing was uploaded",
            hint="make it private on the Hub, or give another REPO",
        )


@contextmanager
def _output(progress: bool) -> Iterator[None]:
    """Keep huggingface_hub from writing to stderr, but for its progress if asked."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    verbosity, silent = hub_logging.get_verbosity(), are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hub_logging.set_verbosity(logging.ERROR)
        if not progress:
            disable_progress_bars()
        try:
            yield
        finally:
            hub_logging.set_verbosity(verbosity)
            if not silent:
                enable_progress_bars()


@contextmanager
def _explained(repo: str, resume: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a TargetError, with `resume` at the end of its hint."""
    try:
        yield
    except Exception as error:
        explained = error if isinstance(error, TargetError) else _explain(error, repo)
        hint = "; ".join(part for part in (explained.hint, resume) if part)
        raise TargetError(str(explained), hint=hint or None) from error


def _explain(error: Exception, repo: str) -> TargetError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, LocalTokenNotFoundError):
        return TargetError("no token for the Hugging Face Hub", hint=_LOGIN)
    if isinstance(error, OfflineModeIsEnabled):
        return TargetError("HF_HUB_OFFLINE forbids the upload", hint="unset it")
    causes = list(_causes(error))  # the error of one file comes wrapped
    for cause in causes:
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            said = cause.server_message or _first_line(cause)
            return _explain_status(cause.response.status_code, said, repo)
    if any(_is_network_error(cause) for cause in causes):
        return TargetError(
            f"the connection to {constants.ENDPOINT} failed: {_first_line(causes[-1])}",
            hint="check the network and HF_ENDPOINT",
        )
    return TargetError(f"{repo}: {type(error).__name__}: {_first_line(error)}")


def _explain_status(status: int, said: str, repo: str) -> TargetError:
    if status == 401:
        return TargetError(f"the Hub does not accept the token: {said}", hint=_LOGIN)
    if status == 403:
        return TargetError(f"{repo}: the token may not write there: {said}", hint=_OTHER)
    if status >= 500 or status == 429:  # too many requests
        return TargetError(f"{repo}: the Hub failed ({status}): {said}", hint="try again later")
    return TargetError(f"{repo}: the Hub refused ({status}): {said}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, the root last."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _is_network_error(error: BaseException) -> bool:
    # Which library makes the requests depends on the version of huggingface_hub.
    library = type(error).__module__.split(".")[0]
    return library in _HTTP_LIBRARIES or isinstance(error, (ConnectionError, TimeoutError))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
