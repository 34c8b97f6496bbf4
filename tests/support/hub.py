"""A hub on loopback, as far as `datasets` and `huggingface_hub` ask one for a public dataset, or if it has a model.

Promise to tests: what these libraries get from it is what they would get from the hub: real HTTP, the hub's paths,
headers and JSON; only who answers is another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


@contextlib.contextmanager
def serve_hub(repository: str, files: Mapping[str, bytes], kind: str = "datasets") -> Iterator[str]:
    """A hub with one dataset of these files (`models`: a model); yields its address, which `HF_ENDPOINT` takes."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            api, resolve = f"/api/{kind}/{repository}", f"/datasets/{repository}/resolve/"
            if path.startswith(f"{api}/tree/"):
                self._answer_json(self._listed(path.removeprefix(f"{api}/tree/").partition("/")[2]))
            elif path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": name} for name in files]
                self._answer_json({"id": repository, "sha": COMMIT, "private": False, "siblings": siblings})
            elif path.startswith(resolve):
                data = files.get(path.removeprefix(resolve).partition("/")[2])
                if data is None:
                    self._answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
                else:
                    self._answer(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT})
            else:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _listed(self, folder: str) -> list[dict[str, object]]:
            """What lies directly in a folder of the repository."""
            found: dict[str, dict[str, object]] = {}
            for name, data in files.items():
                if folder and not name.startswith(f"{folder}/"):
                    continue
                first, slash, _ = name.removeprefix(f"{folder}/").partition("/")
                path = f"{folder}/{first}" if folder else first
                kind = {"type": "directory", "oid": digest(path.encode())} if slash else {
                    "type": "file", "oid": digest(data), "size": len(data)}  # fmt: skip
                found[path] = {"path": path, **kind}
            return list(found.values())

        def _answer_json(self, value: object) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def digest(data: bytes) -> str:
    """As the hub names a file's content."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
