"""An S3 server on this machine, for tests of sources in a bucket."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import boto3
from moto.server import ThreadedMotoServer

ENVIRONMENT = {"ROWS_KEY": "of-the-rows", "ROWS_SECRET": "hunter2hunter2", "AWS_EC2_METADATA_DISABLED": "true"}
CREDENTIALS = {"key": "ROWS_KEY", "secret": "ROWS_SECRET", "endpoint_url": "ROWS_URL"}


@dataclass(frozen=True)
class Bucket:
    """A bucket named ``rows``.

    Args:
        environment: what ``CREDENTIALS`` name, and what keeps botocore from asking elsewhere.
    """

    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return self.environment["ROWS_URL"]

    def client(self):
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        return boto3.client("s3", endpoint_url=self.address, region_name="us-east-1", **keys)

    def put(self, name: str, content: bytes) -> None:
        self.client().put_object(Bucket="rows", Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client().delete_object(Bucket="rows", Key=name)


@contextlib.contextmanager
def bucket() -> Iterator[Bucket]:
    """A server of its own, with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made = Bucket({**ENVIRONMENT, "ROWS_URL": f"http://{host}:{port}"})
    try:
        made.client().create_bucket(Bucket="rows")
        yield made
    finally:
        server.stop()
