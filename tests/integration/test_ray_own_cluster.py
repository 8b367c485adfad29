"""A Ray cluster that a stage starts for itself, as other accounts and other machines meet it."""

import json
import os
import socket
import subprocess
import sys

import pytest

from flows.stages.process_settings import stage_environment
from tests.command import PATIENCE

CONNECT = """
import ipaddress, json, os, pathlib, socket, time
import psutil, ray
from flows.stages.job import Job
from flows.stages.resources import connect
from tasks.context import Resources
from tests.toy_methods import ToyTraining

def listening():
    found = {}
    for each in psutil.Process().children(recursive=True):
        for place in each.net_connections(kind="tcp"):
            if place.status == psutil.CONN_LISTEN:
                address = ipaddress.ip_address(place.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                found[" ".join(each.cmdline())] = str(address)
    return found

resources = Resources(num_workers=1)
connect(Job(stage="left", method=ToyTraining(), inputs={}, resources=resources, directory=pathlib.Path.cwd()))
while socket.socket().connect_ex(("127.0.0.1", int(os.environ["AUTOSCALER_METRIC_PORT"]))):
    time.sleep(0.1)
session = pathlib.Path(ray._private.worker._global_node.get_session_dir_path())
private = session.parent.parent
print(json.dumps({"addresses": listening(), "private": private.name, "mode": private.stat().st_mode & 0o777}))
"""


@pytest.mark.slow
def test_it_listens_on_loopback_alone_and_nobody_else_can_enter_its_session(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Of the metrics, which come last; Ray's default is one port for all clusters of a machine.
    environment = {**os.environ, **stage_environment(), "AUTOSCALER_METRIC_PORT": str(port)}
    message = subprocess.run(
        [sys.executable, "-c", CONNECT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        timeout=120 * PATIENCE,
    ).stdout  # fmt: skip
    found = json.loads(message.splitlines()[-1])
    assert len(found["addresses"]) >= 4  # the head, the node, an agent, the metrics
    assert set(found["addresses"].values()) == {"127.0.0.1"}
    assert (found["private"], found["mode"]) == (f"posttrain-{os.getuid()}", 0o700)
