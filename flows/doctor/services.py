"""Checks of the services that a run needs, and of those that should not be reachable."""

from collections.abc import Iterator

from flows.doctor.facts import Facts, Finding, Service
from flows.doctor.gather_exposed import is_loopback

_GUARD = {
    "prefect": "set PREFECT_SERVER_API_AUTH_STRING where it starts and PREFECT_API_AUTH_STRING where it is used",
    "mlflow": "start it with --app-name basic-auth, or with --host 127.0.0.1",
    "ray": "set RAY_AUTH_MODE=token on every node and for every driver, and keep its ports inside a private network",
}
_DENIED = (401, 403)


def check_exposed(facts: Facts) -> Iterator[Finding]:
    """Whoever reaches a server of Prefect, MLflow or Ray without credentials can run code, or read and delete runs."""
    open_to_all = [server for server in facts.surroundings.exposed if not server.guarded]
    for server in open_to_all:
        ports = ", ".join(map(str, server.ports))
        yield Finding(
            check="exposed", level="warn" if server.kind == "ray" or is_loopback(server.address) else "error",
            found=f"{server.kind} listens at {server.address}, port {ports}, without authentication",
            remedy=_GUARD[server.kind],
        )  # fmt: skip
    if not open_to_all:
        yield Finding(check="exposed", level="ok", found="no server of yours is open to others")


def check_prefect(facts: Facts) -> Iterator[Finding]:
    """The server that is named answers, and lets us in."""
    yield from _answers("prefect", facts.surroundings.prefect, "an embedded server is started for each run",
                        "set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud",
                        "start it (prefect server start), mend the URL, or unset it: one is embedded")  # fmt: skip
    if facts.surroundings.prefect and facts.surroundings.prefect.open_to_all:
        yield Finding(
            check="prefect", level="warn",
            found=f"PREFECT_API_URL={facts.surroundings.prefect.url} asks for no password: whoever reaches it can run "
            "code where its runs run",
            remedy=_GUARD["prefect"],
        )  # fmt: skip
    if facts.surroundings.notify and facts.surroundings.prefect is None:
        yield Finding(
            check="prefect", level="warn",
            found=f"notify={facts.surroundings.notify}, and no PREFECT_API_URL: the block is looked for in your own "
            "Prefect database",
            remedy="set PREFECT_API_URL to the server that holds the block",
        )  # fmt: skip


def check_mlflow(facts: Facts) -> Iterator[Finding]:
    """The server that is named answers, and lets us in."""
    if facts.surroundings.mlflow is None and (facts.configuration.refusal or facts.configuration.absent):
        return  # whether one is named nobody knows
    yield from _answers("mlflow", facts.surroundings.mlflow, "a database, or no record in MLflow",
                        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                        "start it, mend the address, or turn the record off with tracking.mlflow=false")  # fmt: skip


def check_ray(facts: Facts) -> Iterator[Finding]:
    """The cluster that is named answers, and lets us in."""
    service, mend = facts.surroundings.ray, "start it, mend the address, or unset it for a cluster of our own"
    if service and service.refusal:
        cause, _, remedy = service.refusal.rpartition("; ")
        yield Finding(
            check="ray", level="error", found=f"{service.setting}={service.url}: {cause or remedy}",
            remedy=remedy if cause else mend,
        )  # fmt: skip
    else:
        yield from _answers("ray", service, "a cluster is started for each stage that needs one", "", mend)


def check_configuration(facts: Facts) -> Iterator[Finding]:
    """The configuration is one that a run would take; of absent variables the next check tells."""
    if facts.configuration.refusal:
        yield Finding(check="configuration", level="error", found=facts.configuration.refusal, remedy="mend it as said")
    elif not facts.configuration.absent:
        yield Finding(check="configuration", level="ok", found="every key and value of it is accepted")


def check_credentials(facts: Facts) -> Iterator[Finding]:
    """Every variable that the configuration names is set."""
    for name, where in facts.configuration.absent.items():
        yield Finding(
            check="credentials", level="error", found=f"{where} names the variable {name}, which is not set",
            remedy=f"export {name}=...",
        )  # fmt: skip
    if not (facts.configuration.absent or facts.configuration.refusal):
        yield Finding(check="credentials", level="ok", found="every variable that the configuration names is set")


def _answers(check: str, service: Service | None, without: str, admit: str, mend: str) -> Iterator[Finding]:
    if service is None:
        yield Finding(check=check, level="ok", found=f"none is named: {without}")
    elif service.trouble:
        yield Finding(
            check=check, level="error", found=f"{service.setting}={service.url}: nothing answers ({service.trouble})",
            remedy=mend,
        )  # fmt: skip
    elif service.status in _DENIED:
        yield Finding(
            check=check, level="error",
            found=f"{service.setting}={service.url}: does not let you in (HTTP {service.status})", remedy=admit,
        )  # fmt: skip
    else:
        said = f": {service.answer}" if service.answer else ""
        yield Finding(check=check, level="ok", found=f"{service.setting}={service.url} answers{said}")
