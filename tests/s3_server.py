"""An S3 server on this machine's loopback, made of moto: late, failing now and then, and gone, as tests ask.

    python tests/s3_server.py FOLDER [--delay-ms 50] [--fail-percent 5]

serves a folder as s3://bucket/ until it is ended, and prints the environment that finds it. The objects are in memory.
At SIGUSR1 it prints how many requests it has had.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECRET = "nobody-may-read-this-0123456789"
BUCKET = "bucket"


class S3Server:
    """moto's application behind one that delays every answer and fails some requests for pieces of files."""

    def __init__(self, delay_s: float = 0.0, fail_every: int = 0) -> None:
        """fail_every: of so many requests, one is answered 500; 0: none."""
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.delay_s, self.fail_every = delay_s, fail_every
        self.spoilt: Iterator[str] = iter(())
        """How the next answers to GET are spoilt: "503"; "cut", the connection ends early; "short", half of the bytes;
        "slow", a byte a second; "": not."""
        self.expired: set[str] = set()
        """Access keys that are refused."""
        self.requests = self.failed = self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._number = itertools.count(1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._server: Any = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        with self._lock:
            self.at_once -= 1
        number = self.requests = next(self._number)
        if self.fail_every and number % self.fail_every == 0 and environ["REQUEST_METHOD"] == "GET":
            self.failed += 1
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if any(f"Credential={key}/" in environ.get("HTTP_AUTHORIZATION", "") for key in self.expired):
            body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            start_response("400 Bad Request", [("Content-Length", str(len(body)))])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]
        how = next(self.spoilt, "") if environ["REQUEST_METHOD"] == "GET" else ""
        return self._spoil(how, environ, start_response) if how else self._moto(environ, start_response)

    def _spoil(self, how: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if how == "503":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return
        started: list[Any] = []
        body = b"".join(self._moto(environ, lambda *answer: started.append(answer)))
        status, headers = started[0][:2]
        half = body[: len(body) // 2]
        if how == "short":
            headers = [(name, value) for name, value in headers if not name.lower().startswith("content-")]
            start_response(status, [*headers, ("Content-Length", str(len(half)))])
            yield half
            return
        start_response(status, headers)
        if how == "cut":
            yield half
            raise ConnectionAbortedError("as a test wants it")
        for byte in range(len(body)):
            yield body[byte : byte + 1]
            time.sleep(1)

    def start(self) -> None:
        """Answer, again with what was stored before."""
        from werkzeug.serving import make_server

        self._server = make_server("127.0.0.1", self.port, self, threaded=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Be gone: connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """Variables by which s3fs finds it, added to a rank's."""
        found = importlib.util.find_spec("s3fs")
        assert found is not None
        assert found.origin is not None
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "S3FS_FOLDER": str(Path(found.origin).parent.parent),
        }

    def put(self, folder: Path, pattern: str = "*") -> None:
        """Store the files of a folder, and those below it, as s3://bucket/NAME of the folder/…"""
        import boto3

        own = self.environment()
        client = boto3.client(
            "s3",
            endpoint_url=own["AWS_ENDPOINT_URL"],
            aws_access_key_id=own["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=own["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and path.suffix != ".npz":
                client.put_object(Bucket=BUCKET, Key=str(path.relative_to(folder.parent)), Body=path.read_bytes())


@contextmanager
def serving(folder: Path, delay_s: float = 0.0, fail_every: int = 0) -> Iterator[S3Server]:
    """Serve a folder as s3://bucket/NAME inside the block; it is stored without delays and failures."""
    server = S3Server()
    server.start()
    try:
        server.put(folder)
        server.delay_s, server.fail_every, server.requests, server.failed = delay_s, fail_every, 0, 0
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--fail-percent", type=float, default=5)
    given = parser.parse_args()
    every = round(100 / given.fail_percent) if given.fail_percent else 0
    with serving(given.folder.absolute(), given.delay_ms / 1000, every) as running:
        print(" ".join(f"{key}={value}" for key, value in running.environment().items()), flush=True)
        signal.signal(signal.SIGUSR1, lambda *_: print(running.requests, flush=True))
        while os.getppid() != 1:
            time.sleep(1)
