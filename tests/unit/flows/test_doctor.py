"""Each check fires on what it is for, names a remedy, and is quiet on a machine that is fit."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.commands import doctor as command
from flows.commands.doctor import CHECKS
from flows.doctor import gather as gather_module
from flows.doctor import gather_exposed as exposed_module
from flows.doctor import gather_gpus as gpus_module
from flows.doctor import gather_machine as machine_module
from flows.doctor import gather_services as services_module
from flows.doctor import packages as packages_module
from flows.doctor.facts import Configuration, Facts, Gpus, Machine, Packages, Server, Service, StorePlace, Surroundings
from flows.doctor.gather import gather
from flows.doctor.gather_exposed import exposed_servers, is_guarded, is_loopback, kind_of
from flows.doctor.gather_gpus import gather_gpus
from flows.doctor.gather_machine import gather_machine
from flows.doctor.gather_packages import gather_packages, locked
from flows.doctor.gather_services import absent_variables, mlflow_service, prefect_service, ray_service
from flows.doctor.services import check_ray
from lineage.errors import ConfigError

GIB = 2**30
INSTALLED = {"prefect": "3.8.8", "fastapi": "0.150.0", "mlflow": "3.17.2", "ray": "2.60.0", "transformers": "5.23.0",
             "torch": "2.13.0+cpu", "optuna": "5.0.0"}  # fmt: skip
FIT = Facts(
    packages=Packages(
        python="3.11.7", python_wanted=">=3.11,<3.12", installed=INSTALLED,
        wanted=["torch==2.13.0", "ray[train]==2.60.0", "fastapi<0.151"],
        locked={"torch": "2.13.0", "prefect": "3.8.8"}, required={"prefect": ["fastapi>=0.111", "nothere>=1"]},
    ),
    machine=Machine(
        store=StorePlace(path="/s", free_bytes=50 * GIB, last_bytes=GIB, refusal="", links=True),
        tmp="/tmp", tmp_free_bytes=50 * GIB, shm_bytes=8 * GIB, open_files=65536, gpus=None,
    ),
    surroundings=Surroundings(), configuration=Configuration(),
)  # fmt: skip
GPUS = Gpus(names=["H200", "H200"], driver="570.1", cuda="13.0", seen=2, nccl="2.29.7")
SERVICE = Service(url="http://m", setting="X", status=200)


def packages(**fields):
    return replace(FIT, packages=replace(FIT.packages, **fields))


def installed(**versions):
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return packages(installed={**INSTALLED, **names}, wanted=[], locked={})


def machine(**fields):
    return replace(FIT, machine=replace(FIT.machine, **fields))


def store(**fields):
    return machine(store=replace(FIT.machine.store, **fields))


def around(**fields):
    return replace(FIT, surroundings=Surroundings(**fields))


def configuration(**fields):
    return replace(FIT, configuration=Configuration(**fields))


def findings(facts):
    return [finding for check in CHECKS for finding in check(facts)]


@pytest.mark.parametrize(
    "facts",
    [FIT, machine(gpus=GPUS), machine(gpus=replace(GPUS, names=["H200"], seen=1, nccl=None)), machine(shm_bytes=None),
     packages(locked={}), packages(required={"other": ["unrelated==1"], "broken": ["!!", "torch>=2"]}),
     installed(hqq="1.0", termcolor="2.0"), around(prefect=SERVICE, mlflow=SERVICE, ray=SERVICE),
     around(prefect=SERVICE, notify="custom-webhook/ops"),
     around(exposed=[Server(kind="mlflow", address="0.0.0.0", ports=[5000], guarded=True)])],
)  # fmt: skip
def test_a_fit_machine_has_no_complaint(facts):
    assert {finding.level for finding in findings(facts)} == {"ok"}
    assert not any(finding.remedy for finding in findings(facts))


@pytest.mark.parametrize(
    ("facts", "check", "level", "found"),
    [
        (packages(python="3.12.1"), "python", "error", "3.12.1, and posttrain takes >=3.11,<3.12"),
        (packages(wanted=["torch==2.14"]), "packages", "error", "posttrain requires torch==2.14, 2.13.0+cpu is"),
        (packages(wanted=["absent>=1"]), "packages", "error", "posttrain requires absent>=1, none is installed"),
        (packages(required={"vllm": ["torch==2.9"]}), "packages", "warn", "vllm requires torch==2.9, 2.13.0+cpu is"),
        (packages(locked={"prefect": "3.8.9"}), "lock", "warn", "prefect 3.8.8 (lock: 3.8.9)"),
        (packages(locked={"prefect": "3.8.8", "httpx": "0.28"}), "lock", "warn", "httpx is absent (lock: 0.28)"),
        (installed(fastapi="0.165.0"), "known-bad", "error", "prefect 3.8.8 and fastapi 0.165.0: Prefect states no"),
        (installed(sqlalchemy="2.1.9"), "known-bad", "error", "prefect 3.8.8 and sqlalchemy 2.1.9: Prefect states no"),
        (installed(hqq="0.2"), "known-bad", "error", "hqq 0.2 without termcolor: hqq imports termcolor"),
        (installed(hydra_optuna_sweeper="1.2.0"), "known-bad", "error", "optuna 5.0.0 and hydra-optuna-sweeper 1.2.0"),
        (installed(gptqmodel="6.0"), "known-bad", "error", "gptqmodel 6.0 and torch 2.13.0+cpu"),
        (installed(prefect="3.6.21"), "security", "error", "prefect 3.6.21 (>=3.6.22)"),
        (installed(mlflow="3.9.0"), "security", "error", "mlflow 3.9.0 (>=3.10)"),
        (installed(ray="2.53.0"), "security", "error", "ray 2.53.0 (>=2.54)"),
        (installed(transformers="5.2.0"), "security", "error", "transformers 5.2.0 (>=5.3)"),
        (store(refusal="Read-only file system"), "store", "error", "/s cannot be written: Read-only file system"),
        (store(free_bytes=GIB // 2), "store", "error", "0.5 GiB free at /s"),
        (store(free_bytes=2 * GIB, last_bytes=3 * GIB), "store", "warn", "the last outputs of this pipeline take 3.0"),
        (store(links=False), "store", "warn", "the file system of /s knows no hard links"),
        (machine(tmp_free_bytes=GIB // 2), "tmp", "warn", "0.5 GiB free at /tmp"),
        (machine(shm_bytes=64 * 2**20), "shared memory", "warn", "/dev/shm holds 0.1 GiB"),
        (machine(open_files=1024), "open files", "warn", "1024 files"),
        (machine(gpus=Gpus(driver_trouble="mismatch")), "gpu", "error", "the NVIDIA driver cannot be asked: mismatch"),
        (machine(gpus=replace(GPUS, trouble="no torch")), "gpu", "error", "torch cannot be asked: no torch"),
        (machine(gpus=replace(GPUS, cuda=None)), "gpu", "error", "2x H200, and a torch that was built without CUDA"),
        (machine(gpus=replace(GPUS, seen=0)), "gpu", "error", "driver 570.1; torch (CUDA 13.0) can use 0 of 2"),
        (machine(gpus=replace(GPUS, nccl=None)), "gpu", "error", "and a torch without NCCL"),
        (around(exposed=[Server(kind="prefect", address="0.0.0.0", ports=[4200], guarded=False)]), "exposed", "error",
         "prefect listens at 0.0.0.0, port 4200, without authentication"),
        (around(exposed=[Server(kind="mlflow", address="::", ports=[5000, 5001], guarded=False)]), "exposed", "error",
         "mlflow listens at ::, port 5000, 5001, without"),
        (around(exposed=[Server(kind="ray", address="10.0.0.1", ports=[6379], guarded=False)]), "exposed", "warn",
         "ray listens at 10.0.0.1"),
        (around(exposed=[Server(kind="prefect", address="127.0.0.1", ports=[4200], guarded=False)]), "exposed", "warn",
         "prefect listens at 127.0.0.1, port 4200, without authentication"),
        (around(prefect=replace(SERVICE, open_to_all=True)), "prefect", "warn",
         "PREFECT_API_URL=http://m asks for no password: whoever reaches it can run code"),
        (around(prefect=replace(SERVICE, status=None, trouble="refused")), "prefect", "error", "X=http://m: nothing"),
        (around(prefect=replace(SERVICE, status=401)), "prefect", "error", "does not let you in (HTTP 401)"),
        (around(notify="custom-webhook/ops"), "prefect", "warn", "notify=custom-webhook/ops, and no PREFECT_API_URL"),
        (around(mlflow=replace(SERVICE, status=None, trouble="refused")), "mlflow", "error", "nothing answers"),
        (around(mlflow=replace(SERVICE, status=403)), "mlflow", "error", "does not let you in (HTTP 403)"),
        (around(ray=replace(SERVICE, status=None, trouble="refused")), "ray", "error", "nothing answers (refused)"),
        (around(ray=Service(url="auto", setting="R", refusal="no token; give it")), "ray", "error", "R=auto: no token"),
        (around(ray=Service(url="auto", setting="R", refusal="no answer")), "ray", "error", "R=auto: no answer"),
        (configuration(refusal="a.b: unknown key"), "configuration", "error", "a.b: unknown key"),
        (configuration(absent={"TOKEN": "a.yaml"}), "credentials", "error", "a.yaml names the variable TOKEN, which"),
    ],
)  # fmt: skip
def test_a_fault_is_found_with_its_remedy(facts, check, level, found):
    [finding] = [finding for finding in findings(facts) if finding.level != "ok"]
    assert (finding.check, finding.level) == (check, level)
    assert found in finding.found
    assert finding.remedy


def test_what_is_installed_here_is_fit():
    found = gather_packages()
    assert found.installed["prefect"]
    assert "torch==2.13.0" in found.wanted
    here = [finding for check in CHECKS[:5] for finding in check(replace(FIT, packages=found))]
    assert {finding.level for finding in here} == {"ok"}


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(tmp_path, monkeypatch):
    """setuptools appends its own old copies of packages to the path when it is imported."""
    copy = tmp_path / "prefect-0.1.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: prefect\nVersion: 0.1\n")
    before = gather_packages().installed["prefect"]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert gather_packages().installed["prefect"] == before


def test_every_known_bad_pair_and_floor_names_packages_that_pip_knows():
    for pair in packages_module.KNOWN_BAD:
        assert all(packages_module._name(each) for each in pair.together)


def test_a_lock_is_read_as_uv_writes_it():
    text = "# head\nray[train]==2.60.0\n    # via posttrain==1\nPy_Yaml==6.0 ; python_version < '4'  # why\n"
    elsewhere = "pywin32==311 ; sys_platform == 'nowhere'\n"
    assert locked(text + elsewhere) == {"ray": "2.60.0", "py-yaml": "6.0"}


def test_the_floors_of_what_is_not_installed_are_no_empty_line():
    [finding] = packages_module.check_floors(packages(installed={}))
    assert (finding.level, finding.found) == ("ok", "none of prefect, mlflow, ray, transformers is installed")


@pytest.mark.parametrize(
    ("facts", "last", "code"),
    [(FIT, "0 errors, 0 warnings", 0), (store(links=False), "0 errors, 1 warning", 0),
     (packages(python="3.12.1"), "1 error, 0 warnings", 1),
     (configuration(absent={"A": "b"}), "1 error, 0 warnings", 1),
     (configuration(refusal="a.b: unknown key"), "1 error, 0 warnings", 2)],
)  # fmt: skip
def test_the_last_line_counts(monkeypatch, capsys, facts, last, code):
    monkeypatch.setattr("flows.doctor.gather.gather", lambda overrides, config_dir: facts)
    assert command.run(SimpleNamespace(overrides=[], config_dir=None, json=False)) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_store_is_looked_at_where_it_will_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_module, "gather_gpus", lambda: None)
    for digits, size in (("0" * 16, 10), ("1" * 16, 3)):
        output = tmp_path / "store" / "sft" / digits / "output"
        output.mkdir(parents=True)
        (output / "weights").write_bytes(b"0" * size)
    found = gather_machine(tmp_path / "store", ["sft", "dpo"]).store
    assert (found.refusal, found.links, found.last_bytes) == ("", True, 3)
    assert not list((tmp_path / "store").glob(".*"))
    assert gather_machine(tmp_path / "not" / "yet", []).store.free_bytes == pytest.approx(found.free_bytes, rel=0.1)
    monkeypatch.setattr(machine_module.os, "link", _refuse)
    assert not gather_machine(tmp_path / "store", []).store.links
    monkeypatch.setattr(machine_module.tempfile, "TemporaryDirectory", _refuse)
    assert gather_machine(tmp_path / "store", []).store.refusal == "Read-only file system"


def _refuse(*_, **__):
    raise OSError(30, "Read-only file system")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an nvidia-smi on PATH that does as told; beside it is a torch that can use one GPU."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gpus_module, "_ROOT", tmp_path)
    answer = json.dumps({"cuda": "13.0", "seen": 1, "nccl": "2.29.7"})
    monkeypatch.setattr(gpus_module, "_TORCH", f"print('a warning'); print({answer!r})")

    def does(script):
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return does


def test_torch_is_asked_what_it_can_use_of_what_the_driver_shows(driver):
    driver("echo NVIDIA H200, 570.1")
    assert gather_gpus() == Gpus(names=["NVIDIA H200"], driver="570.1", cuda="13.0", seen=1, nccl="2.29.7")


@pytest.mark.parametrize(
    ("script", "trouble"),
    [("echo NVIDIA-SMI has failed; echo; exit 9", "NVIDIA-SMI has failed"),
     ("echo Failed: mismatch; echo library 535.1; exit 18", "Failed: mismatch; library 535.1"),
     ("exit 9", "returned non-zero exit status 9"),
     ("echo No devices were found", "No devices were found"), ("", "nvidia-smi lists none"),
     ("exec sleep 60", "timed out after 0.2 seconds")],
)  # fmt: skip
def test_a_driver_that_does_not_work_is_not_taken_for_none(driver, monkeypatch, script, trouble):
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/bin:/usr/bin")  # of sleep
    monkeypatch.setattr(gpus_module, "_SMI_SECONDS", 0.2 if "sleep" in script else 20)
    driver(script)
    assert trouble in gather_gpus().driver_trouble


def test_there_is_no_gpu_where_nothing_speaks_of_one(driver, tmp_path):
    assert gather_gpus() is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert gather_gpus().driver_trouble == f"{tmp_path}/dev/nvidia0 is there, and no nvidia-smi on PATH"


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_world(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    ("line", "kind"),
    [("python -m prefect server start", "prefect"), ("python -m flows.prefect_process 3", "prefect"),
     ("uvicorn mlflow.server.fastapi_app:app", "mlflow"), ("/x/ray/core/src/ray/gcs/gcs_server --a", "ray"),
     ("ray::IDLE", "ray"), ("python -m http.server", None), ("", None),
     ("/v/bin/python /v/bin/prefect server start", "prefect"), ("/v/bin/python -u -X dev -m mlflow server", "mlflow"),
     ("/v/bin/python3.11 /v/bin/mlflow server", "mlflow"), ("mlflow ui", "mlflow"),
     ("/v/bin/uvicorn --factory prefect.server.api.server:create_app", "prefect"),
     ("gunicorn: master [mlflow.server:app]", "mlflow"), ("gunicorn mlflow.server.auth:create_app()", "mlflow"),
     ("/home/ray/v/bin/python /home/ray/v/bin/mlflow server", "mlflow"), ("python -m ray.util.client.server", "ray"),
     ("python -u /v/lib/python3.11/site-packages/ray/dashboard/dashboard.py --host=::", "ray"), ("ray start", "ray"),
     ("python -m http.server --directory /x/prefect-notes", None), ("python -m http.server -d mlflow", None),
     ("python /home/ray/serve.py", None), ("/home/ray/bin/jupyter lab", None), ("python", None),
     ("python /x/mlflow_notes/app.py --store /x/ray/raylet", None), ("rayon", None)],
)  # fmt: skip
def test_a_server_is_known_by_its_command_line(line, kind):
    assert kind_of(line.split()) == kind


@pytest.mark.parametrize(
    ("kind", "line", "environment", "expected"),
    [("prefect", "", {"PREFECT_SERVER_API_AUTH_STRING": "a:b"}, True), ("prefect", "", {}, False),
     ("mlflow", "uvicorn mlflow.server.auth:create_app", {}, True),
     ("mlflow", "mlflow server --app-name basic-auth", {}, True),
     ("mlflow", "uvicorn mlflow.server.fastapi_app:app", {}, False),
     ("ray", "", {"RAY_AUTH_MODE": "token"}, True), ("ray", "", {"RAY_AUTH_MODE": "disabled"}, False)],
)  # fmt: skip
def test_a_server_that_asks_for_credentials_is_guarded(tmp_path, kind, line, environment, expected):
    assert is_guarded(kind, line.split(), {"PREFECT_HOME": str(tmp_path), **environment}) is expected


def test_a_server_whose_environment_is_gone_is_guarded_only_if_its_words_say_so():
    assert is_guarded("ray", ["ray::IDLE"], None) is is_guarded("prefect", ["prefect"], None) is None
    assert is_guarded("mlflow", ["gunicorn: worker [mlflow.server:app]"], None) is False


def test_a_listening_server_is_found(monkeypatch):
    monkeypatch.setattr(exposed_module, "is_loopback", lambda address: False)  # as if it were bound to all
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    server = subprocess.Popen(
        [sys.executable, "-c", script, "mlflow.server.fastapi_app:app"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    port = int(server.stdout.readline())
    found = [each for each in exposed_servers() if port in each.ports]
    server.communicate(b"\n")
    assert [(each.kind, each.address, each.guarded) for each in found] == [("mlflow", "127.0.0.1", False)]


# A worker of Ray: its title lies over its environment. Under a raylet, or under a process that Ray knows nothing of.
@pytest.fixture
def service():
    """Lets in whoever knows the password."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") in ("Basic YTpi", "Bearer key")
            self.send_response(200 if known else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("credentials", "status"),
    [({}, 401), ({"PREFECT_API_AUTH_STRING": "a:b"}, 200), ({"PREFECT_API_KEY": "key"}, 200)],
)
def test_prefect_is_asked_with_the_credentials_that_there_are(tmp_path, service, credentials, status):
    environment = {"PREFECT_API_URL": f"{service}/api", "PREFECT_HOME": str(tmp_path), **credentials}
    assert prefect_service(environment).status == status
    assert prefect_service({"PREFECT_HOME": str(tmp_path)}) is None


def test_a_prefect_that_asks_for_no_password_is_told_from_one_that_takes_ours(tmp_path, service):
    environment = {"PREFECT_API_URL": f"{service}/api", "PREFECT_HOME": str(tmp_path)}
    assert not prefect_service({**environment, "PREFECT_API_AUTH_STRING": "a:b"}).open_to_all
    assert not prefect_service({**environment, "PREFECT_API_AUTH_STRING": "a:c"}).open_to_all
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _LetsIn) as open_server:
        threading.Thread(target=open_server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{open_server.server_port}/api"
        for credentials in ({}, {"PREFECT_API_AUTH_STRING": "a:b"}):
            assert prefect_service({**environment, "PREFECT_API_URL": url, **credentials}).open_to_all
        open_server.shutdown()


class _LetsIn(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


def test_a_prefect_server_on_loopback_is_found_too(tmp_path):
    script = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    for variable, guarded in [({}, False), ({"PREFECT_SERVER_API_AUTH_STRING": "a:b"}, True)]:
        server = subprocess.Popen(
            [sys.executable, "-c", script, "prefect.server.api.server:create_app"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PREFECT_HOME": str(tmp_path), **variable},
        )  # fmt: skip
        port = int(server.stdout.readline())
        found = [each for each in exposed_servers() if port in each.ports]
        server.communicate(b"\n")
        assert [(each.kind, each.address, each.guarded) for each in found] == [("prefect", "127.0.0.1", guarded)]


def test_prefect_is_also_named_by_the_active_profile(tmp_path, service):
    profiles = f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{service}"\nPREFECT_API_KEY = "key"\n'
    (tmp_path / "profiles.toml").write_text(profiles)
    assert prefect_service({"PREFECT_HOME": str(tmp_path)}).status == 200


@pytest.mark.parametrize(
    ("credentials", "status"),
    [({}, 401), ({"MLFLOW_TRACKING_USERNAME": "a", "MLFLOW_TRACKING_PASSWORD": "b"}, 200),
     ({"MLFLOW_TRACKING_USERNAME": "a"}, 401), ({"MLFLOW_TRACKING_TOKEN": "key"}, 200)],
)  # fmt: skip
def test_mlflow_is_asked_with_the_credentials_that_there_are(service, credentials, status):
    found = mlflow_service(service, False, credentials)
    assert (found.status, found.setting) == (status, "MLFLOW_TRACKING_URI")
    assert mlflow_service(service, True, credentials).setting == "tracking.uri"
    assert mlflow_service("sqlite:///mlflow.db", False, credentials) is None


@pytest.fixture
def free_place():
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_server_of_mlflow_that_is_gone_says_so(free_place):
    assert mlflow_service(f"http://{free_place}", False, {}).trouble


def test_a_cluster_that_is_gone_is_not_joined(monkeypatch, free_place):
    monkeypatch.setattr(services_module, "ask_cluster", lambda seconds: pytest.fail("was asked"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_service() is None
    for address in (free_place, f"ray://{free_place}", "host:port"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert ray_service().trouble


def test_a_cluster_is_asked_what_it_holds_however_it_is_named(monkeypatch):
    monkeypatch.setattr(services_module, "ask_cluster", lambda seconds: (6.0, 1.0))
    with socket.create_server(("127.0.0.1", 0)) as there:
        for address in ("auto", f"127.0.0.1:{there.getsockname()[1]}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            [finding] = check_ray(around(ray=ray_service()))
            assert (finding.level, finding.found) == ("ok", f"RAY_ADDRESS={address} answers: 6 CPUs, 1 GPU")


def test_a_cluster_that_lets_nobody_in_says_why_and_what_to_do(monkeypatch):
    def refuse(seconds):
        raise ConfigError("RAY_ADDRESS=auto: wants a token; or none; put it in RAY_AUTH_TOKEN")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(services_module, "ask_cluster", refuse)
    [finding] = check_ray(around(ray=ray_service()))
    assert (finding.level, finding.found) == ("error", "RAY_ADDRESS=auto: wants a token; or none")
    assert finding.remedy == "put it in RAY_AUTH_TOKEN"


def test_a_variable_without_a_default_must_be_set():
    text = "uri: ${oc.env:ABSENT}\nkey: ${oc.env:GIVEN}\nother: ${oc.env:HAS_ONE,default}"
    assert absent_variables([("a.yaml", text)], {"GIVEN": "x"}) == {"ABSENT": "a.yaml"}


@pytest.fixture
def only_configuration(tmp_path, monkeypatch):
    """Of the rest what is looked at is of no interest here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "ABSENT", "OTHER"):
        monkeypatch.delenv(name, raising=False)
    for name in ("gather_packages", "gather_machine", "exposed_servers"):
        monkeypatch.setattr(gather_module, name, lambda *_: None)


@pytest.mark.parametrize(
    ("overrides", "absent", "refusal"),
    [(["store=x"], [], ""), (["tracking.uri=${oc.env:ABSENT}", "store=x"], ["ABSENT"], ""),
     (["tracking.uri=${oc.env:ABSENT}", "store=${oc.env:OTHER}", "notify=null"], ["ABSENT", "OTHER"], ""),
     (["stages.sft.method.betta=1"], [], "betta"), (["tracking.uri=${nope.x}"], [], "nope.x"),
     (["tracking.uri=file:mlruns"], [], "is no address of an MLflow"), (["model=nonesuch"], [], "no such model")],
)  # fmt: skip
def test_what_is_wrong_with_a_configuration_is_one_of_the_facts(only_configuration, overrides, absent, refusal):
    found = gather(overrides, None).configuration
    assert sorted(found.absent) == absent
    assert refusal in found.refusal and bool(found.refusal) == bool(refusal)


def test_a_file_that_is_no_yaml_is_told(only_configuration, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "broken.yaml").write_text("a: [")
    assert gather(["model=broken"], Path("conf")).configuration.refusal
