"""Each check finds its fault and names a remedy, and is quiet on a machine that is fit."""

import http.server
import io
import os
import py_compile
import re
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flows.commands import doctor as command
from flows.commands import serve
from flows.declare.config import load_pipeline
from flows.operate import doctor
from flows.operate.doctor import Finding
from flows.stages.resources import Cluster, Node
from lineage.errors import ConfigError
from tasks.context import Resources

VERSIONS = {"python": "3.11.7", "prefect": "3.9.1", "fastapi": "0.150.0", "mlflow": "3.17.2", "ray": "2.60.0",
            "transformers": "5.24.0", "torch": "2.13.0+cpu", "optuna": "5.0.0"}  # fmt: skip
WANTED = ["torch==2.13.0", "ray[train]==2.60.0", "prefect==3.9.1", "python>=3.11,<3.12"]
REQUIRES = {"posttrain": WANTED, "prefect": ["fastapi<0.151,>=0.139", "nothere>=1"]}
LOCK = "torch==2.13.0\nprefect==3.9.1\n"
DISK = namedtuple("DISK", "total used free")


def faults(findings):
    found = [each for each in findings if each.level != "ok"]
    assert all(each.remedy for each in found)
    return [(each.check, each.level, each.found) for each in found]


def pipeline_of(notify=None, **resources):
    stage = SimpleNamespace(method=SimpleNamespace(uses_gpu=True), resources=Resources(**resources))
    return SimpleNamespace(stages={"sft": stage}, operation=SimpleNamespace(notify=notify))


def packages(requires=None, lock=LOCK, **versions):
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return faults(doctor.check_packages({**VERSIONS, **names}, {**REQUIRES, **(requires or {})}, lock))


def test_packages_that_are_fit_have_no_fault():
    assert packages() == packages(lock="") == packages(hqq="1.0", termcolor="2.0") == []
    assert packages(lock=f"{LOCK}\nmypy==2.0") == []  # a tool of the tests
    assert packages({"other": ["unrelated==1"], "broken": ["!!", "torch>=2"]}) == []
    assert faults(doctor.check_packages(*doctor.installed())) == []


@pytest.mark.parametrize(
    ("given", "check", "level", "found"),
    [
        ({"python": "3.12.1"}, "python", "error", "3.12.1, and posttrain requires <3.12,>=3.11"),
        ({"requires": {"posttrain": [*WANTED, "absent>=1"]}}, "packages", "error", "requires absent>=1, none is"),
        ({"requires": {"vllm": ["torch==2.9"]}}, "packages", "warn", "vllm requires torch==2.9, 2.13.0+cpu is"),
        ({"lock": "prefect==3.9.2\nhttpx==0.28", "requires": {"prefect": ["httpx"]}}, "lock", "warn",
         "httpx is absent (lock: 0.28); prefect 3.9.1"),
        ({"fastapi": "0.165.0"}, "packages", "warn", "prefect requires fastapi<0.151,>=0.139, 0.165.0 is installed"),
        ({"hqq": "0.2"}, "known-bad", "error", "hqq 0.2 without termcolor: hqq imports termcolor"),
        ({"hydra_optuna_sweeper": "1.2.0"}, "known-bad", "error", "optuna 5.0.0 and hydra-optuna-sweeper 1.2.0"),
        ({"gptqmodel": "6.0"}, "known-bad", "error", "gptqmodel 6.0 and torch 2.13.0+cpu"),
        ({"mlflow": "3.9.0"}, "security", "error", "mlflow 3.9.0 (>=3.10)"),
    ],
)  # fmt: skip
def test_a_fault_of_packages_is_found(given, check, level, found):
    [fault] = packages(**given)
    assert fault[:2] == (check, level) and found in fault[2]


def test_a_lock_is_read_as_uv_writes_it():
    text = "# head\nray[train]==2.60.0\n    # via posttrain==1\nPy_Yaml==6.0 ; python_version < '4'  # why\n"
    elsewhere = "pywin32==311 ; sys_platform == 'nowhere'\n"
    assert doctor.lock_versions(text + elsewhere) == {"ray": "2.60.0", "py-yaml": "6.0"}


def test_a_store_is_checked_where_it_will_lie(tmp_path, monkeypatch):
    for digits, size in (("0" * 16, 10), ("1" * 16, 3 * doctor._GIB)):
        output = tmp_path / "store" / "sft" / digits / "output"
        output.mkdir(parents=True)
        with (output / "weights").open("wb") as file:
            file.truncate(size)  # no blocks on the disk
    disk = {}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: DISK(0, 0, disk["free"]))

    def found(free_gib, store="store"):
        disk["free"] = int(free_gib * doctor._GIB)
        return [(level, found) for _, level, found in faults(doctor.check_store(tmp_path / store, ["sft", "dpo"]))]

    path = tmp_path / "store"
    last = "and the last outputs of this pipeline take 3.0 GiB"
    assert found(50) == found(1.5, "not/yet") == []
    assert found(2) == [("warn", f"2.0 GiB free at {path}, {last}")]
    assert found(0.5) == [("error", f"0.5 GiB free at {path}, {last}")]
    assert not list(path.glob(".*"))
    monkeypatch.setattr(doctor.os, "link", _refuse)
    assert found(50) == [("warn", f"the file system of {path} has no hard links")]
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", _refuse)
    assert found(50) == [("error", f"{path} cannot be written: Read-only file system")]


def _refuse(*_, **__):
    raise OSError(30, "Read-only file system")


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Runs the check with an nvidia-smi and a torch, which prints as it is imported and at exit."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def check(script, **torch):
        has = {"cuda": "13.0", "seen": 2, "nccl": "2.29.7", **torch}
        (tmp_path / "torch.py").write_text(
            f"""
import atexit
from types import SimpleNamespace as Some
print("a warning")
atexit.register(print, "the last words")
version = Some(cuda={has["cuda"]!r})
cuda = Some(device_count=lambda: {has["seen"]}, nccl=Some(version=lambda: (2, 29, 7)))
distributed = Some(is_nccl_available=lambda: {bool(has["nccl"])})
"""
            if torch
            else "raise MemoryError"
        )
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return doctor.check_gpus()

    return check


@pytest.mark.parametrize(
    ("resources", "level"),
    [({}, "ok"), ({"gpus_per_worker": 1}, "error"), ({"gpus_per_worker": 1, "num_workers": 2}, "ok")],
)
def test_stages_that_ask_for_a_gpu_are_named_on_a_machine_without_one(monkeypatch, resources, level):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # has the GPUs of a stage on a cluster
    found = doctor.check_gpus(doctor.stages_on_gpus(pipeline_of(**resources)))
    assert found.level == level and ("these stages ask for one: sft" in found.found) == (level == "error")


TWO = "echo NVIDIA H200, 570.1; echo NVIDIA H200, 570.1"


def test_torch_uses_the_gpus_that_the_driver_lists(gpus):
    assert gpus(TWO, seen=2) == Finding("gpu", "ok", "2x NVIDIA H200, driver 570.1, CUDA 13.0, NCCL 2.29.7")
    assert gpus("echo H200, 570.1", seen=1, nccl=None).level == "ok"


@pytest.mark.parametrize(
    ("script", "torch", "found"),
    [("echo NVIDIA-SMI has failed; echo; exit 9", {}, "NVIDIA-SMI has failed"),
     ("echo Failed: mismatch; echo library 535.1; exit 18", {}, "Failed: mismatch; library 535.1"),
     ("exit 9", {}, "exit status 9"), ("echo No devices were found", {}, "No devices were found"),
     ("exec sleep 60", {}, "timed out after 0.2 seconds"), (TWO, {}, "2x NVIDIA H200, driver 570.1; torch fails: "),
     (TWO, {"cuda": None}, "torch was built without CUDA"), (TWO, {"seen": 0}, "torch can use 0 of 2"),
     (TWO, {"nccl": None}, "torch was built without NCCL")],
)  # fmt: skip
def test_a_gpu_that_does_not_work_is_an_error(gpus, monkeypatch, script, torch, found):
    if "sleep" in script:
        monkeypatch.setattr(doctor, "_COMMAND_SECONDS", 0.2)
    finding = gpus(script, **torch)
    assert finding.level == "error" and found in finding.found and finding.remedy


@pytest.mark.parametrize(
    ("line", "kind"),
    [("python -m prefect server start", "prefect"), ("python -m flows.prefect.server 3", "prefect"),
     ("/v/bin/uvicorn --factory prefect.server.api.server:create_app", "prefect"), ("mlflow ui", "mlflow"),
     ("gunicorn: master [mlflow.server:app]", "mlflow"), ("/x/ray/core/src/ray/gcs/gcs_server --a", "ray"),
     ("python -m http.server -d mlflow", None), ("python /x/mlflow_notes/app.py --store /x/ray/raylet", None)],
)  # fmt: skip
def test_a_server_is_known_by_its_command_line(line, kind):
    assert doctor.server_kind(line.split()) == kind


class Process:
    """A server of this user that listens at one address."""

    def __init__(self, line, address, **environment):
        self.line, self.address, self.environment = line, address, environment

    def uids(self):
        return SimpleNamespace(real=os.getuid())

    def cmdline(self):
        return self.line.split()

    def environ(self):
        return {"PREFECT_HOME": "/nonexistent", **self.environment}

    def net_connections(self, kind):
        return [SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip=self.address, port=42))]


@pytest.mark.parametrize(
    ("process", "level"),
    [(Process("prefect server start", "0.0.0.0"), "error"), (Process("prefect server start", "127.0.0.1"), "warn"),
     (Process("prefect server start", "::", PREFECT_SERVER_API_AUTH_STRING="a:b"), "ok"),
     (Process("mlflow server", "::"), "error"), (Process("mlflow server", "127.0.0.1"), "ok"),
     (Process("mlflow server --app-name basic-auth", "::"), "ok"), (Process("raylet", "10.0.0.1"), "warn"),
     (Process("raylet", "10.0.0.1", RAY_AUTH_MODE="token"), "ok"), (Process("nginx", "0.0.0.0"), "ok")],
)  # fmt: skip
def test_a_server_without_authentication_is_found(process, level):
    [finding] = doctor.check_exposed([process])
    assert finding.level == level and bool(finding.remedy) == (level != "ok")
    assert level == "ok" or "port 42, without authentication" in finding.found


@pytest.fixture
def service():
    """Answers 200 to a client that knows the password, else ``service.denied``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") in ("Basic YTpi", "Bearer key")
            self.send_response(200 if known else self.server.denied)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.denied, server.url = 401, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    ("credentials", "level"),
    [({}, "error"), ({"PREFECT_API_AUTH_STRING": "a:b"}, "ok"), ({"PREFECT_API_AUTH_STRING": "a:c"}, "error"),
     ({"PREFECT_API_KEY": "key"}, "ok")],
)  # fmt: skip
def test_prefect_must_accept_the_credentials_that_are_set(tmp_path, service, credentials, level):
    environment = {"PREFECT_API_URL": f"{service.url}/api", "PREFECT_HOME": str(tmp_path), **credentials}
    [finding] = doctor.check_prefect(environment)
    assert finding.level == level and (level == "ok") == finding.found.endswith(" answers")
    service.denied = 200
    assert [each.level for each in doctor.check_prefect(environment)] == ["ok", "warn"]  # it asks for no password


def test_prefect_is_also_set_by_the_active_profile(tmp_path, service):
    profiles = f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{service.url}"\nPREFECT_API_KEY = "key"\n'
    (tmp_path / "profiles.toml").write_text(profiles)
    assert [each.level for each in doctor.check_prefect({"PREFECT_HOME": str(tmp_path)})] == ["ok"]
    without = list(doctor.check_prefect({"PREFECT_HOME": "/nonexistent"}, pipeline_of(notify="custom-webhook/ops")))
    assert [each.level for each in without] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("credentials", "level"),
    [({}, "error"), ({"MLFLOW_TRACKING_USERNAME": "a", "MLFLOW_TRACKING_PASSWORD": "b"}, "ok"),
     ({"MLFLOW_TRACKING_USERNAME": "a"}, "error"), ({"MLFLOW_TRACKING_TOKEN": "key"}, "ok")],
)  # fmt: skip
def test_mlflow_must_accept_the_credentials_that_are_set(service, credentials, level):
    found = doctor.check_mlflow(service.url, "tracking.uri", credentials)
    assert found.level == level and found.found.startswith(f"tracking.uri={service.url}")
    assert doctor.check_mlflow("sqlite:///mlflow.db", "tracking.uri", credentials).level == "ok"


def test_an_older_server_of_mlflow_is_named_since_its_upgrade_migrates(service, monkeypatch):
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda asked, timeout: io.BytesIO(b"3.10.1"))
    monkeypatch.setattr(doctor, "status_of", lambda url, header: 200)
    found = doctor.check_mlflow(service.url, "X", {})
    assert found.level == "warn" and "runs MLflow 3.10.1" in found.found and "mlflow db upgrade" in found.remedy


def test_a_service_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("flows.stages.resources.ask_cluster", lambda seconds: pytest.fail("was asked"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    [prefect] = doctor.check_prefect({"PREFECT_API_URL": f"http://{place}", "PREFECT_HOME": "/nonexistent"})
    for finding in (prefect, doctor.check_mlflow(f"http://{place}", "X", {}), doctor.check_ray(place),
                    doctor.check_ray(f"ray://{place}"), doctor.check_ray("host:port")):  # fmt: skip
        assert finding.level == "error" and "nothing answers (" in finding.found and finding.remedy
    assert doctor.check_ray("").level == "ok"


def test_a_cluster_is_asked_what_it_holds_however_it_is_named(monkeypatch):
    there = Cluster(nodes=(Node(host="a", node="10.0.0.1, node 1", cpus=6.0, gpus=1.0, gpu_types=("H100",)),))
    monkeypatch.setattr("flows.stages.resources.ask_cluster", lambda seconds: there)
    has = "1 node: a (10.0.0.1, node 1) with 6 CPUs, 1 GPU H100"
    with socket.create_server(("127.0.0.1", 0)) as server:
        for address in ("auto", f"127.0.0.1:{server.getsockname()[1]}"):
            found = doctor.check_ray(address)
            assert (found.level, found.found) == ("ok", f"RAY_ADDRESS={address} answers: {has}")


@pytest.mark.parametrize(
    ("findings", "last", "code"),
    [([], "0 errors, 0 warnings", 0), ([Finding("store", "warn", "a", "b")], "0 errors, 1 warning", 0),
     ([Finding("credentials", "error", "a", "b")], "1 error, 0 warnings", 1),
     ([Finding("configuration", "error", "a", "b")], "1 error, 0 warnings", 2)],
)  # fmt: skip
def test_the_command_counts_and_exits(monkeypatch, capsys, findings, last, code):
    monkeypatch.setattr(doctor, "diagnose", lambda overrides, config_dir: [Finding("tmp", "ok", "x"), *findings])
    assert command.run_doctor(SimpleNamespace(overrides=[], config_dir=None, json=False)) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("overrides", "absent", "refusal"),
    [(["store=x"], [], ""), (["tracking.uri=${oc.env:ABSENT}", "store=x"], ["ABSENT"], ""),
     (["tracking.uri=${oc.env:ABSENT}", "store=${oc.env:OTHER}", "notify=null"], ["ABSENT", "OTHER"], ""),
     (["stages.sft.method.betta=1"], [], "betta"), (["tracking.uri=${nope.x}"], [], "nope.x"),
     (["tracking.uri=file:mlruns"], [], "is no address of an MLflow"), (["model=nonesuch"], [], "no such model"),
     (["--config-dir", "model=broken"], [], "broken"),
     (["sources.corpus.path=gone.jsonl", "store=x"], [], "no such file or directory")],
)  # fmt: skip
def test_a_configuration_that_a_run_would_refuse_is_found(tmp_path, monkeypatch, overrides, absent, refusal):
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "ABSENT", "OTHER", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "installed", lambda: (VERSIONS, REQUIRES, LOCK))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "broken.yaml").write_text("a: [")  # no YAML
    config_dir = Path("conf") if overrides[0] == "--config-dir" else None
    found = faults(doctor.diagnose([each for each in overrides if "=" in each], config_dir))
    names = sorted(re.search(r"variable (\w+)", text)[1] for check, _, text in found if check == "credentials")
    assert names == absent
    refusals = [text for check, _, text in found if check == "configuration"]
    assert len(refusals) == bool(refusal) and all(refusal in text for text in refusals)


def test_serve_names_a_pipeline_that_starts_by_itself_where_the_plan_refuses_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = ["sources.corpus.path=gone.jsonl", "store=x"]
    assert serve._refused(load_pipeline(wrong)) == ""
    refused = serve._refused(load_pipeline([*wrong, "schedule={interval: 3600}"]))
    assert refused.startswith("  its runs will fail: the plan refuses it: sources.corpus.path=gone.jsonl")


def test_a_cluster_that_refuses_says_why_and_what_to_do(monkeypatch):
    def refuse(seconds):
        raise ConfigError("RAY_ADDRESS=auto: wants a token; or none; put it in RAY_AUTH_TOKEN")

    monkeypatch.setattr("flows.stages.resources.ask_cluster", refuse)
    expected = Finding("ray", "error", "RAY_ADDRESS=auto: wants a token; or none", "put it in RAY_AUTH_TOKEN")
    assert doctor.check_ray("auto") == expected


def test_a_real_server_is_found_with_its_port_and_environment(tmp_path):
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    for variable, level in [({}, "warn"), ({"PREFECT_SERVER_API_AUTH_STRING": "a:b"}, "ok")]:
        server = subprocess.Popen(
            [sys.executable, "-c", script, "prefect.server.api.server:create_app"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PREFECT_HOME": str(tmp_path), **variable},
        )  # fmt: skip
        port = int(server.stdout.readline())
        [finding] = doctor.check_exposed([psutil.Process(server.pid)])
        server.communicate(b"\n")
        assert (finding.level, f"port {port}," in finding.found) == (level, level == "warn")


def test_small_limits_are_found(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: DISK(2**26, 0, 2**29))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 1024))
    found = faults(doctor.check_limits())
    assert [each[:2] for each in found] == [("tmp", "warn"), ("shared memory", "warn"), ("open files", "warn")]
    assert "0.5 GiB" in found[0][2] and "0.1 GiB" in found[1][2] and "1024 files" in found[2][2]


def test_packages_that_each_process_would_compile_are_found(tmp_path, monkeypatch):
    (tmp_path / "heavy.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = doctor.check_byte_code(["heavy", "no_such_package"])
    assert (found.level, "none of heavy:" in found.found) == ("warn", True)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert doctor.check_byte_code(["heavy"]).level == "ok"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(tmp_path / "heavy.py"))
    assert doctor.check_byte_code(["heavy"]).level == "ok"


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(tmp_path, monkeypatch):
    """setuptools appends its own old copies of packages to the path when it is imported."""
    copy = tmp_path / "prefect-0.1.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: prefect\nVersion: 0.1\n")
    before = doctor.installed()[0]["prefect"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert doctor.installed()[0]["prefect"] == before


def test_loopback_is_told_from_the_world():
    assert all(map(doctor.is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1")))
    assert not any(map(doctor.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0")))


def test_modules_of_our_names_elsewhere_are_named(tmp_path):
    (tmp_path / "tasks.py").write_text("")
    (tmp_path / "flows").mkdir()
    found = doctor.check_names([str(tmp_path), str(tmp_path / "absent")])
    assert (found.level, found.found) == ("warn", f"{tmp_path}/tasks.py; {tmp_path}/flows")
    assert "another name" in found.remedy
    assert doctor.check_names([doctor.ROOT, str(tmp_path / "absent")]).level == "ok"
