"""A real S3 server for tests and benchmarks: moto, in this process, on a free port of the loopback."""

import functools
import http.client
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock
from urllib.parse import urlsplit


@contextmanager
def object_server(bucket: str) -> Iterator[dict[str, str]]:
    """Yield the environment under which `s3://<bucket>` is reached."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "other",
    }  # fmt: skip
    lock = threading.Lock()

    def alone(put: Any) -> Any:
        """Have puts follow each other: S3 looks whether an object is absent and puts it in one act, moto in two."""

        @functools.wraps(put)
        def called(*arguments: Any, **named: Any) -> Any:
            with lock:
                return put(*arguments, **named)

        return called

    try:
        with mock.patch.object(S3Response, "put_object", alone(S3Response.put_object)):
            make_bucket(environment, bucket)
            yield environment
    finally:
        server.stop()


def make_bucket(environment: Mapping[str, str], bucket: str) -> None:
    """Create a bucket without obstore, which cannot."""
    connection = http.client.HTTPConnection(urlsplit(environment["AWS_ENDPOINT"]).netloc, timeout=20)
    headers = {"Content-Type": "application/octet-stream", "Authorization": "AWS one:signature"}
    connection.request("PUT", f"/{bucket}", body=b"", headers=headers)
    status = connection.getresponse().status
    connection.close()
    if status >= 300:
        raise RuntimeError(f"the bucket {bucket} was not made: status {status}. Look at the server's log.")
