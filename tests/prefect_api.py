"""Prefect's API as anybody calls it."""

import base64
import json
import os
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_fixed

from tests.command import wait_until


def _is_busy(error: BaseException) -> bool:
    """Whether another writer held the server's SQLite; Prefect's own client asks again too."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 503


def password_in(prefect_home: Path) -> str:
    """Of the one server that a command has started there."""
    [profile] = prefect_home.glob("posttrain-*.toml")
    (settings,) = tomllib.loads(profile.read_text())["profiles"].values()
    return settings["PREFECT_API_AUTH_STRING"]


def serve(folder: Path, environment: dict[str, str], *cli_args: str) -> subprocess.Popen[str]:
    """``posttrain serve`` once its pipelines are deployed; what it says is in ``serve.log``."""
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "serve", *cli_args],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
        )  # fmt: skip
    wait_until(lambda: process.poll() is not None or "run one:" in (folder / "serve.log").read_text(), "served")
    assert process.poll() is None, (folder / "serve.log").read_text()
    return process


class PrefectApi:
    """Asks one server.

    Args:
        url: with its ``/api``.
        auth: its password; without one that of the worker's server.
    """

    def __init__(self, url: str, auth: str | None = None) -> None:
        self._url = url
        auth = auth or os.environ.get("PREFECT_API_AUTH_STRING", "")
        self._headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}

    @retry(retry=retry_if_exception(_is_busy), stop=stop_after_attempt(10), wait=wait_fixed(1), reraise=True)
    def post(self, path: str, body: dict, method: str = "POST") -> dict | list:
        """Raises ``urllib.error.HTTPError`` with the answer in its message where it is refused."""
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            error.msg = error.read().decode()
            raise

    def get(self, path: str) -> dict:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def deployment(self, name: str) -> dict:
        return self.get(f"/deployments/name/{name}")

    def start(self, deployment: str, *overrides: str, **parameters: object) -> str:
        """Creates a run and returns its id."""
        body = {"parameters": {"overrides": list(overrides), **parameters}, "state": {"type": "SCHEDULED"}}
        return self.post(f"/deployments/{self.deployment(deployment)['id']}/create_flow_run", body)["id"]

    def run(self, run_id: str) -> dict:
        return self.get(f"/flow_runs/{run_id}")

    def set_state(self, run_id: str, kind: str) -> None:
        self.post(f"/flow_runs/{run_id}/set_state", {"state": {"type": kind}, "force": True})

    def wait(self, run_id: str, reached: Callable[[dict], bool], seconds: float = 120) -> dict:
        """The run, once it is as wanted."""
        deadline = time.monotonic() + seconds
        while True:
            run = self.run(run_id)
            if reached(run):
                return run
            assert time.monotonic() < deadline, f"not within {seconds} s: {run['state']}"
            time.sleep(0.2)

    def end(self, run_id: str) -> dict:
        """The final state of a run."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
        return self.wait(run_id, lambda run: run["state_type"] in final)["state"]

    def artifacts(self, run_id: str) -> dict[str, dict]:
        """By key, of each the last."""
        found = self.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}})
        return {each["key"]: each for each in sorted(found, key=lambda each: each["created"])}

    def stages(self, run_id: str) -> dict[str, str]:
        """Type of the state of each task run, by name."""
        found = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
        return {each["name"]: each["state_type"] for each in found}

    def log(self, run_id: str) -> str:
        found = self.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}})
        return "\n".join(each["message"] for each in found)
