"""Uploads to a Hub on localhost. huggingface_hub reads its settings when it is imported, so every
upload runs in a process of its own, with an environment of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_hub import ORGS, TOKEN, USER, FakeHub, Repo, fake_hub, git_blob

from streammerge.errors import UsageError
from streammerge.upload import check_upload, refusal, stale_weights, upload

pytest.importorskip("huggingface_hub")

_CHILD = """
import json, sys
from streammerge.errors import StreamMergeError
from streammerge.upload import check_upload, upload
name, arguments, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
try:
    done = {"check_upload": check_upload, "upload": upload}[name](*arguments, **options)
    print(json.dumps({"done": done and [done.url, done.deleted]}))
except StreamMergeError as error:
    print(json.dumps({"error": str(error), "hint": error.hint, "type": type(error).__name__}))
except KeyboardInterrupt as error:
    print(json.dumps({"error": str(error), "type": "KeyboardInterrupt"}))
"""


@dataclass
class Child:
    """Calls a function of `upload` in a process that knows the fake Hub."""

    hub: FakeHub
    home: Path
    process: subprocess.Popen[str] | None = None

    def __call__(
        self, name: str, *arguments: str, env: dict[str, str | None] | None = None, **options: bool
    ) -> dict[str, Any]:
        """What it returned or raised. Nothing else may be printed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        settings: dict[str, str | None] = {
            "HF_ENDPOINT": self.hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            **(env or {}),
        }
        kept |= {key: value for key, value in settings.items() if value is not None}
        command = [sys.executable, "-W", "error", "-c", _CHILD, name]
        command += [json.dumps(arguments), json.dumps(options)]
        with subprocess.Popen(
            command, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as self.process:
            out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, err) == (0, ""), err
        result = json.loads(out)
        assert isinstance(result, dict)
        return result

    def interrupt(self) -> None:
        """Send Ctrl-C."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """An empty Hub."""
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def child(hub: FakeHub, tmp_path: Path) -> Child:
    """A caller for processes that know that Hub."""
    return Child(hub, tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A merged directory in two shards, with a space in its name."""
    folder = tmp_path / "my model"
    (folder / "lora_adapter").mkdir(parents=True)
    for number in (1, 2):
        shard = folder / f"model-{number:05d}-of-00002.safetensors"
        shard.write_bytes(bytes([number]) * 3000)
    (folder / "lora_adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


def oids(folder: Path) -> dict[str, str]:
    """What a Hub that got a folder knows of it."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            lfs = path.suffix == ".safetensors"
            oid = hashlib.sha256(data).hexdigest() if lfs else git_blob(data)
            found[str(path.relative_to(folder))] = oid
    return found


def resume_hint(folder: Path, repo: str) -> str:
    return f"{folder} is complete, 'streammerge upload '{folder}' {repo}' sends what is missing"


# --- what is uploaded -----------------------------------------------------------------------------


def test_the_whole_directory_goes_to_a_new_repository_in_one_commit(
    child: Child, hub: FakeHub, model: Path
) -> None:
    assert child("check_upload", "lab/m") == {"done": None}
    assert hub.repos == {}
    assert child("upload", str(model), "lab/m") == {"done": [f"{hub.url}/lab/m", []]}
    assert hub.repos["lab/m"].files == oids(model)
    assert len(hub.repos["lab/m"].commits) == 1
    assert not hub.repos["lab/m"].private


def test_the_directory_is_left_as_it_was(child: Child, model: Path) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in [model, *model.rglob("*")])
    child("upload", str(model), "m")
    assert sorted((p, p.stat().st_mtime_ns) for p in [model, *model.rglob("*")]) == before


def test_without_a_namespace_it_is_the_users(child: Child, hub: FakeHub, model: Path) -> None:
    assert child("upload", str(model), "m", private=True)["done"] == [f"{hub.url}/{USER}/m", []]
    assert hub.repos[f"{USER}/m"].private


def test_a_second_upload_sends_nothing(child: Child, hub: FakeHub, model: Path) -> None:
    child("upload", str(model), "m")
    sent = hub.paths("PUT", "/lfs/")
    assert len(sent) == 3
    assert child("upload", str(model), "m") == {"done": [f"{hub.url}/{USER}/m", []]}
    assert hub.paths("PUT", "/lfs/") == sent
    assert len(hub.repos[f"{USER}/m"].commits) == 1


def test_weights_of_an_earlier_upload_go_in_the_same_commit(
    child: Child, hub: FakeHub, model: Path
) -> None:
    stale = ["adapter_config.json", "model-00003-of-00003.safetensors", "model.safetensors"]
    kept = ["README.md", "onnx/model.safetensors", "model-00001-of-00002.safetensors"]
    old = dict.fromkeys([*stale, *kept], "0" * 40)
    hub.repos["lab/m"] = Repo(files=old, sizes=dict.fromkeys(old, 1))
    assert child("upload", str(model), "lab/m")["done"] == [f"{hub.url}/lab/m", stale]
    expected = {"README.md": "0" * 40, "onnx/model.safetensors": "0" * 40, **oids(model)}
    assert hub.repos["lab/m"].files == expected
    assert len(hub.repos["lab/m"].commits) == 1


def test_by_xet(child: Child, hub: FakeHub, model: Path) -> None:
    if importlib.util.find_spec("hf_xet") is None:
        pytest.skip("hf_xet is not installed")
    xet = {"HF_HUB_DISABLE_XET": None}
    assert child("upload", str(model), "m", env=xet) == {"done": [f"{hub.url}/{USER}/m", []]}
    assert hub.repos[f"{USER}/m"].files == oids(model)
    assert hub.xet_bytes > 0
    assert hub.objects == {}


# --- going on after a failure ---------------------------------------------------------------------


def test_the_same_call_sends_what_a_failed_one_did_not(
    child: Child, hub: FakeHub, model: Path
) -> None:
    refused = oids(model)["model-00002-of-00002.safetensors"]
    hub.fail = lambda method, path: 400 if path == f"/lfs/{refused}" else None
    assert child("upload", str(model), "m") == {
        "type": "TargetError",
        "error": "m: the Hub refused (400): Bad Request",
        "hint": resume_hint(model, "m"),
    }
    assert hub.repos[f"{USER}/m"].commits == []
    assert len(hub.objects) == 2

    hub.fail = lambda method, path: None
    hub.requests.clear()
    assert "done" in child("upload", str(model), "m")
    assert hub.paths("PUT", "/lfs/") == [f"/lfs/{refused}"]
    assert hub.repos[f"{USER}/m"].files == oids(model)


def test_an_interrupted_upload_says_how_to_go_on(child: Child, hub: FakeHub, model: Path) -> None:
    def interrupt(method: str, path: str) -> None:
        if "commit" in path:
            child.interrupt()

    hub.fail = interrupt
    assert child("upload", str(model), "m") == {
        "type": "KeyboardInterrupt",
        "error": f"upload interrupted; {resume_hint(model, 'm')}",
    }


def test_so_does_one_that_another_signal_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminated(BaseException):
        pass

    class Api:
        def create_repo(self, *_: object, **__: object) -> None:
            raise Terminated

    monkeypatch.setattr("streammerge.upload._api", lambda repo: Api())
    with pytest.raises(Terminated, match=r"upload interrupted; .* sends what is missing"):
        upload(str(model), "m")


def test_with_a_private_repository_the_hint_says_so(
    child: Child, hub: FakeHub, model: Path
) -> None:
    hub.fail = lambda method, path: 400 if "preupload" in path else None
    result = child("upload", str(model), "m", private=True)
    assert result["hint"] == resume_hint(model, "m").replace(" m'", " m --private'")


# --- refused at once ------------------------------------------------------------------------------

_LOGIN = "'hf auth login' stores one, or set HF_TOKEN"
_OTHER = "use a token that can write there, or another REPO"


@pytest.mark.parametrize("repo", ["a/b/c", "a b", "", "-m", "m.git"])
def test_no_name(repo: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a repository"):
        check_upload(repo)


@pytest.mark.parametrize("call", [check_upload, lambda repo: upload("MODEL", repo)])
def test_no_library(
    call: Callable[[str], object], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.rename(model.parent / "MODEL").parent)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="needs huggingface_hub") as caught:
        call("m")
    assert caught.value.hint == "pip install 'streammerge[hub]'"


def test_no_merged_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none: No such file or directory"):
        upload(str(tmp_path / "none"), "m")
    (tmp_path / "secret.txt").touch()
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors"):
        upload(str(tmp_path), "m")


@pytest.mark.parametrize(
    ("env", "error", "hint"),
    [
        ({"HF_TOKEN": None}, "no token for the Hugging Face Hub", _LOGIN),
        ({"HF_TOKEN": "hf_bad"}, "the Hub does not accept the token: Invalid ", _LOGIN),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids the upload", "unset it"),
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "the connection to http://127.0.0.1:9 failed: [Errno 111] Connection refused",
            "check the network and HF_ENDPOINT",
        ),
    ],
    ids=["no token", "bad token", "offline", "no network"],
)
def test_no_access(
    child: Child, hub: FakeHub, env: dict[str, str | None], error: str, hint: str
) -> None:
    result = child("check_upload", "m", env=env)
    assert result["type"] == "TargetError"
    assert result["error"].startswith(error)
    assert result["hint"] == hint
    assert hub.repos == {}


def test_no_access_any_more(child: Child, model: Path) -> None:
    result = child("upload", str(model), "m", env={"HF_TOKEN": "hf_bad"})
    assert result["error"].startswith("the Hub does not accept the token: Invalid ")
    assert result["hint"] == f"{_LOGIN}; {resume_hint(model, 'm')}"


def test_a_token_that_may_only_read(child: Child, hub: FakeHub) -> None:
    hub.role = "read"
    assert child("check_upload", "m") == {
        "type": "TargetError",
        "error": "the token 'test' may only read",
        "hint": _OTHER,
    }


def test_a_repository_of_others(child: Child, model: Path) -> None:
    result = child("upload", str(model), "other/m")
    assert result["error"].startswith("other/m: the token may not write there: ")
    assert result["hint"] == f"{_OTHER}; {resume_hint(model, 'other/m')}"


def test_a_public_repository_is_not_taken_for_a_private_one(
    child: Child, hub: FakeHub, model: Path
) -> None:
    hub.repos[f"{USER}/m"] = Repo(private=False)
    error = f"{USER}/m: exists and is public, nothing was uploaded"
    assert child("check_upload", "m", private=True)["error"] == error
    assert child("upload", str(model), "m", private=True)["error"] == error
    assert hub.repos[f"{USER}/m"].commits == []
    assert hub.objects == {}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, "m: the token may not write there: "),
        (429, "m: the Hub failed (429): "),
        (500, "m: the Hub failed (500): "),
    ],
)
def test_a_hub_that_fails(child: Child, hub: FakeHub, status: int, error: str) -> None:
    hub.fail = lambda method, path: status if "whoami" in path else None
    assert child("check_upload", "m")["error"].startswith(error)


# --- what an account says of itself ---------------------------------------------------------------


def account(role: str, **token: object) -> dict[str, Any]:
    orgs = [{"name": name, "roleInOrg": said} for name, said in ORGS.items()]
    return {
        "name": USER,
        "orgs": orgs,
        "auth": {"accessToken": {"displayName": "mine", "role": role, **token}},
    }


_NOWHERE = {"scoped": [{"permissions": ["repo.content.read"]}]}
_SOMEWHERE = {"scoped": [{"permissions": []}, {"permissions": ["repo.write"]}]}


@pytest.mark.parametrize(
    ("said", "repo", "expected"),
    [
        (account("write"), "m", None),
        (account("write"), f"{USER}/m", None),
        (account("write"), "lab/m", None),
        (account("write"), "club/m", f"club/m: the user {USER} may only read in club"),
        (account("write"), "x/m", f"x/m: x is neither the user {USER} nor one of the orgs"),
        (account("read"), "m", "the token 'mine' may only read"),
        (
            account("fineGrained", fineGrained=_NOWHERE),
            "m",
            "the token 'mine' may not write to any repository",
        ),
        # Which organizations these see is not known, so the Hub decides.
        (account("fineGrained", fineGrained=_SOMEWHERE), "x/m", None),
        (account("fineGrained"), "x/m", None),
        ({"name": "space", "auth": {"type": "oauth"}}, "x/m", None),
        ({}, "x/m", None),
    ],
)
def test_refusal(said: dict[str, Any], repo: str, expected: str | None) -> None:
    assert refusal(said, repo) == expected


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (
            ["model.safetensors", "config.json"],
            [
                "adapter_config.json",
                "adapter_model.safetensors",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model.bin.index.json",
                "value_head.safetensors",
            ],
        ),
        (
            ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
            [
                "adapter_config.json",
                "adapter_model.safetensors",
                "model.safetensors",
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model.bin.index.json",
                "value_head.safetensors",
            ],
        ),
        (["adapter_model.safetensors", "adapter_config.json"], []),
    ],
    ids=["one file", "shards", "adapter"],
)
def test_stale_weights(local: list[str], expected: list[str]) -> None:
    remote = [
        "value_head.safetensors",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "model.safetensors.index.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "adapter_config.json",
        "lora_adapter/adapter_config.json",
        "consolidated.safetensors",
        "config.json",
        ".gitattributes",
    ]
    assert list(stale_weights(remote, local)) == expected
