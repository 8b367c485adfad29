"""Looks for servers of this user that others can reach."""

import contextlib
import ipaddress
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import psutil

from flows.doctor.facts import Server
from flows.doctor.gather_services import prefect_settings

_VALUED = ("-W", "-X")  # options of Python that take the next word
_APPLICATION = re.compile(r"\[?(prefect|mlflow)(\.\w+)*:\w")  # what a server of applications is told to serve
_RAY_PROGRAM = re.compile(r"(ray|raylet|gcs_server)$|ray(::|\.)")
_RAY_SCRIPT = "-packages/ray/"

Kind = Literal["prefect", "mlflow", "ray"]


def exposed_servers() -> list[Server]:
    """Of this user, beyond loopback; Prefect's on loopback too, where any account and any web page may run code."""
    ports: dict[tuple[Kind, str, bool], set[int]] = defaultdict(set)
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            kind = kind_of(words)
            places = _open_places(process, kind) if kind else []
            guarded = is_guarded(kind, words, _environment(process, kind)) if kind and places else None
            if kind is None or guarded is None:
                continue
            for address, port in places:
                ports[kind, address, guarded].add(port)
        except psutil.Error:  # it ended meanwhile, or is not ours to look at
            continue
    return [
        Server(kind=kind, address=address, ports=sorted(found), guarded=guarded)
        for (kind, address, guarded), found in sorted(ports.items())
    ]


def kind_of(words: Sequence[str]) -> Kind | None:
    """Whose server a command line is, if any's: by what it runs, not by what else it names."""
    path = _program(words)
    program = path.rpartition("/")[2]
    served = next((found[1] for found in map(_APPLICATION.match, words) if found), program.partition(".")[0])
    if served == "prefect" or program == "flows.prefect_process":
        return "prefect"
    if served == "mlflow":
        return "mlflow"
    return "ray" if _RAY_PROGRAM.match(program) or _RAY_SCRIPT in path else None


def _program(words: Sequence[str]) -> str:
    """The path of a program or a script, or the name of the module that Python runs."""
    rest = iter(words)
    first = next(rest, "")
    if not first.rpartition("/")[2].startswith("python"):
        return first
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _VALUED:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return first


def is_loopback(address: str) -> bool:
    """Also of an IPv4 address in the clothes of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_guarded(kind: Kind, words: Sequence[str], environment: Mapping[str, str] | None) -> bool | None:
    """Whether a server asks for credentials, by its command line and its environment; None: nobody can tell."""
    if kind == "mlflow":
        return any("mlflow.server.auth" in word or word == "basic-auth" for word in words)
    if environment is None:
        return None
    if kind == "prefect":
        return bool(prefect_settings(environment).get("PREFECT_SERVER_API_AUTH_STRING"))
    return environment.get("RAY_AUTH_MODE") == "token"


def _open_places(process: psutil.Process, kind: Kind) -> list[tuple[str, int]]:
    """Addresses that a process listens at and others can reach, with their ports."""
    listening = [each.laddr for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
    return [(each.ip, each.port) for each in listening if kind == "prefect" or not is_loopback(each.ip)]


def _environment(process: psutil.Process, kind: Kind) -> Mapping[str, str] | None:
    """What a server was started with; None: it does not show any more.

    Ray's workers and agents write their title over theirs. They have that of the raylet above them. An ancestor of
    another kind is not asked: it may be one that took in an orphan, and knows nothing of how that was started.
    """
    for each in (process, *process.parents()):
        with contextlib.suppress(psutil.AccessDenied):
            if kind_of(each.cmdline()) == kind and "PATH" in (found := each.environ()):
                return found
    return None
