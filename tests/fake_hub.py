"""A Hub on localhost that keeps what is uploaded to it, so that no test leaves the machine.

It answers the endpoints that ``huggingface_hub`` 0.30 to 2.4 calls for an upload: whoami, create,
tree, preupload, Git LFS batch with single PUTs, the Xet token with a store that takes everything,
validate-yaml and commit. One token is known, one user, one organization.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"
USER = "ann"
ORGS = {"lab": "write", "club": "read"}

Json = dict[str, Any]


@dataclass
class Repo:
    """A model repository: its files as they are after the last commit, and the commits."""

    private: bool = False
    files: dict[str, str] = field(default_factory=dict)  # path -> sha256 or content of the blob
    sizes: dict[str, int] = field(default_factory=dict)
    commits: list[Json] = field(default_factory=list)


class FakeHub:
    """What the server knows, and how it is to misbehave.

    Attributes:
        role: of the token: ``write``, ``read`` or ``fineGrained``.
        scoped: permissions of a fine-grained token.
        repos: by full name.
        objects: uploaded LFS objects by sha256, committed or not.
        requests: method and path of every request, in order.
        fail: called with method and path before anything else; a status it returns is answered.
    """

    def __init__(self) -> None:
        self.role = "write"
        self.scoped: list[Json] = []
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], int | None] = lambda method, path: None
        self.xet_bytes = 0
        self.url = ""

    def paths(self, method: str, pattern: str) -> list[str]:
        """The paths of the requests so far that match."""
        return [path for verb, path in self.requests if verb == method and re.search(pattern, path)]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a Hub until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def git_blob(data: bytes) -> str:
    """The name that git gives to a file with these contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        method, path = self.command, unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append((method, path))
        status = self.hub.fail(method, path)
        if status is not None:
            return self._answer({"error": HTTPStatus(status).phrase}, status)
        for verb, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                if name not in _PUBLIC and self.headers["Authorization"] != f"Bearer {TOKEN}":
                    message = "Invalid credentials in Authorization header"
                    return self._answer({"error": message}, 401, {"X-Error-Message": message})
                return getattr(self, name)(body, *match.groups())
        return self._answer({"error": f"fake Hub: no {method} {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: object, status: int = 200, headers: Json | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(text))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- the Hub ----------------------------------------------------------------------------------

    def _whoami(self, body: bytes) -> None:
        token: Json = {"displayName": "test", "role": self.hub.role}
        if self.hub.role == "fineGrained":
            token["fineGrained"] = {"scoped": self.hub.scoped}
        self._answer(
            {
                "type": "user",
                "name": USER,
                "orgs": [{"name": name, "roleInOrg": role} for name, role in ORGS.items()],
                "auth": {"type": "access_token", "accessToken": token},
            }
        )

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or USER
        full = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{full}", "name": full}
        if full in self.hub.repos:
            return self._answer(answer | {"error": "You already created this repo"}, 409)
        if self.hub.role == "read" or (owner != USER and ORGS.get(owner) != "write"):
            message = f"You don't have the rights to create a model under the namespace {owner!r}"
            return self._answer({"error": message}, 403)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repos[full] = Repo(private)
        return self._answer(answer)

    def _validate_yaml(self, body: bytes) -> None:
        self._answer({"errors": [], "warnings": []})

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return repo

    def _info(self, body: bytes, name: str) -> None:
        if (repo := self._repo(name)) is not None:
            siblings = [{"rfilename": path} for path in repo.files]
            self._answer(
                {"id": name, "sha": _sha(repo), "private": repo.private, "siblings": siblings}
            )

    def _tree(self, body: bytes, name: str) -> None:
        if (repo := self._repo(name)) is not None:
            self._answer(
                [
                    {"type": "file", "path": path, "oid": oid, "size": repo.sizes[path]}
                    for path, oid in repo.files.items()
                ]
            )

    def _preupload(self, body: bytes, name: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        files = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in repo.files:
                entry["oid"] = repo.files[path]
            files.append(entry)
        return self._answer({"files": files})

    def _commit(self, body: bytes, name: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
                repo.files[value["path"]], repo.sizes[value["path"]] = git_blob(data), len(data)
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = value["oid"]
                repo.sizes[value["path"]] = value.get("size", 0)
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]], repo.sizes[value["path"]]
        repo.commits.append(lines[0]["value"])
        oid = _sha(repo)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        return self._answer({"success": True, "commitOid": oid, "commitUrl": url})

    # --- Git LFS ----------------------------------------------------------------------------------

    def _lfs_batch(self, body: bytes, name: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            entry: Json = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
            objects.append(entry)
        self._answer({"transfer": "basic", "objects": objects})

    def _lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer({"error": "wrong contents"}, 400)
        self.hub.objects[oid] = body
        return self._answer({})

    # --- Xet --------------------------------------------------------------------------------------

    def _xet_token(self, body: bytes, name: str) -> None:
        expires = int(time.time()) + 3600
        self._answer(
            {"accessToken": "xet", "exp": expires, "casUrl": self.hub.url},
            headers={
                "X-Xet-Access-Token": "xet",
                "X-Xet-Token-Expiration": expires,
                "X-Xet-Cas-Url": self.hub.url,
            },
        )

    def _xet_chunk(self, body: bytes) -> None:
        self._answer({"error": "unknown chunk"}, 404)

    def _xet_xorb(self, body: bytes) -> None:
        self.hub.xet_bytes += len(body)
        self._answer({"was_inserted": True})

    def _xet_shard(self, body: bytes) -> None:
        self._answer({"result": 1})


_MODEL = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    ("GET", r"/api/whoami-v2", "_whoami"),
    ("POST", r"/api/repos/create", "_create"),
    ("POST", r"/api/validate-yaml", "_validate_yaml"),
    ("GET", rf"/api/models/{_MODEL}(?:/revision/main)?", "_info"),
    ("GET", rf"/api/models/{_MODEL}/tree/main", "_tree"),
    ("POST", rf"/api/models/{_MODEL}/preupload/main", "_preupload"),
    ("GET", rf"/api/models/{_MODEL}/xet-write-token/main", "_xet_token"),
    ("POST", rf"/api/models/{_MODEL}/commit/main", "_commit"),
    ("POST", rf"/{_MODEL}\.git/info/lfs/objects/batch", "_lfs_batch"),
    ("PUT", r"/lfs/([0-9a-f]{64})", "_lfs_put"),
    ("GET", r"/v1/chunks/.*", "_xet_chunk"),
    ("POST", r"/v1/xorbs/.*", "_xet_xorb"),
    ("POST", r"/(?:v1/)?shards?", "_xet_shard"),
)
_PUBLIC = {"_lfs_put", "_xet_chunk", "_xet_xorb", "_xet_shard"}


def _sha(repo: Repo) -> str:
    return hashlib.sha1(repr(repo.commits).encode()).hexdigest()
