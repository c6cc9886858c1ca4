"""A real S3 server over loopback (moto's), which answers wrongly, or not at all, when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "knows", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Asked:
    """A request: its method, its path without the bucket, its query, and what range of an object it asks for."""

    method: str
    path: str
    query: str
    range: str

    @property
    def changes(self) -> bool:
        """Whether it changes what is stored."""
        return self.method in ("PUT", "POST", "DELETE")

    @property
    def nbytes(self) -> int:
        """Bytes that it reads."""
        start, _, stop = self.range.removeprefix("bytes=").partition("-")
        return int(stop) - int(start) + 1 if self.range else 0


class ObjectServer:
    """Runs until `close`.

    Attributes:
        asked: all requests since `forget`.
        refuses: which of them are answered with a 500 without a look.
        loses: which of them are carried out, and answered with a 500 all the same.
        holds: which are not answered, and not carried out, until `release` is set; `reached` says that there is one.
    """

    def __init__(self) -> None:
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://localhost:{self._server.server_port}"  # a name, which clients look up
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **{
            "aws_access_key_id": "anybody", "aws_secret_access_key": "knows"
        })  # fmt: skip
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "AWS_MAX_ATTEMPTS": "3"}
        self.reached, self.release = threading.Event(), threading.Event()
        self.behave()

    def behave(self) -> None:
        """Answer everything, and forget what was asked."""
        self.asked: list[Asked] = []
        self.refuses: Callable[[Asked], bool] = lambda _: False
        self.loses: Callable[[Asked], bool] = lambda _: False
        self.holds: Callable[[Asked], bool] = lambda _: False
        self.release.set()
        self.reached.clear()

    def bucket(self, name: str) -> str:
        """Make a bucket; its URL."""
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def names(self, bucket: str) -> list[str]:
        """Of all objects in a bucket."""
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=bucket).get("Contents", ()))

    def uploads(self, bucket: str) -> int:
        """Uploads in parts that were begun and neither completed nor given up."""
        return len(self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))

    def close(self) -> None:
        """End it."""
        self.behave()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"].lstrip("/").partition("/")[2]
        asked = Asked(environ["REQUEST_METHOD"], path, environ["QUERY_STRING"], environ.get("HTTP_RANGE", ""))
        self.asked.append(asked)
        if self.holds(asked):
            self.reached.set()
            self.release.wait(60)
            return _failure({}, start_response)
        if self.refuses(asked):
            return _failure(environ, start_response)
        if self.loses(asked):
            list(self._app(environ, lambda *_: None))
            return _failure({}, start_response)
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextmanager
def running() -> Iterator[ObjectServer]:
    """A server for a while."""
    server = ObjectServer()
    yield server
    server.close()


def _failure(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    if length := int(environ.get("CONTENT_LENGTH") or 0):
        environ["wsgi.input"].read(length)
    start_response("500 Internal Server Error", [("Content-Type", "application/xml"), ("Connection", "close")])
    return [b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"]


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: Any) -> None:
        pass
