"""A Hugging Face Hub on this machine: the requests of `huggingface_hub`, over real HTTP.

python -m tests.hub ORG/NAME FOLDER    serves a folder as a model, and prints its HF_ENDPOINT
"""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Serves what ``put`` was given. Large files are redirected, as on the Hub."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[tuple[str, str], Files] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        """Method and path of each request."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, repository: str, files: Files, branch: str = "main") -> str:
        """Commit files to a branch. Return the commit."""
        commit = hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()
        self.commits[repository, commit] = files
        self.branches[repository, branch] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        path, hub = self.path.partition("?")[0].strip("/"), self.server
        match path.split("/"):
            case ["api", "models" | "datasets", owner, name, "revision" | "tree" as kind, revision]:
                pass
            case ["datasets", owner, name, "resolve" as kind, revision, _]:
                pass
            case [owner, name, "resolve" | "storage" as kind, revision, _]:
                pass
            case _:
                return self._send(404, with_body=with_body)
        repository = f"{owner}/{name}"
        if all(each != repository for each, _ in hub.branches):
            return self._send(401, {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        commit = hub.branches.get((repository, revision), revision)
        if (files := hub.commits.get((repository, commit))) is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        if kind == "revision":
            body = {"id": repository, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self._send(200, body=json.dumps(body).encode(), with_body=with_body)
        if kind == "tree":
            tree = [_entry(file, content) for file, content in files.items()]
            return self._send(200, body=json.dumps(tree).encode(), with_body=with_body)
        if repository in hub.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        file = path.rpartition("/")[2]
        about = {"X-Repo-Commit": commit, "ETag": f'"{_digest(files[file])}"'}
        if kind == "resolve" and file.endswith(".safetensors"):
            about |= {"X-Linked-ETag": about["ETag"], "X-Linked-Size": str(len(files[file]))}
            place = f"{hub.endpoint}/{repository}/storage/{commit}/{file}"
            return self._send(302, {**about, "Location": place}, with_body=with_body)
        return self._send(200, about, files[file], with_body=with_body)

    def _send(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *, with_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: ``asked`` has the requests."""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, object]:
    size, digest = len(content), _digest(content)
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": digest[:40]}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
    return entry


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Give a hub that serves until the end of the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, name="hub")
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


if __name__ == "__main__":
    with local_hub() as served:
        served.put(sys.argv[1], {file.name: file.read_bytes() for file in Path(sys.argv[2]).iterdir()})
        print(f"HF_ENDPOINT={served.endpoint}", flush=True)
        threading.Event().wait()
