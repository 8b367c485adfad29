"""What is known of a machine, an environment and a pipeline: all that the checks read, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found.

    Args:
        remedy: what to do; empty where all is well.
    """

    check: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Packages:
    """What is installed, and what should be.

    Args:
        python: version of the interpreter.
        python_wanted: a specifier, such as ``>=3.11,<3.12``.
        installed: name -> version.
        wanted: what posttrain itself requires, as requirements of pip.
        locked: name -> version in ``requirements.lock``; empty: there is none beside the code.
        required: name of an installed package -> what it requires.
    """

    python: str
    python_wanted: str
    installed: Mapping[str, str]
    wanted: Sequence[str]
    locked: Mapping[str, str]
    required: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """Where the store lies, or will.

    Args:
        last_bytes: of the newest outputs of the pipeline's stages: what one more run of it may write.
        refusal: why nothing can be written there; empty: it can.
        links: whether a file there can have two names.
    """

    path: str
    free_bytes: int
    last_bytes: int
    refusal: str
    links: bool


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The NVIDIA GPUs, by the driver and by torch.

    Args:
        names: as the driver lists them.
        cuda: version that torch was built for; None: it was built without.
        seen: how many torch can use.
        nccl: version of torch's; None: it has none.
        trouble: why torch could not be asked; empty: it could.
        driver_trouble: why the driver could not be asked; empty: it could. Nothing else is known then.
    """

    names: Sequence[str] = ()
    driver: str = ""
    cuda: str | None = None
    seen: int = 0
    nccl: str | None = None
    trouble: str = ""
    driver_trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on.

    Args:
        shm_bytes: size of ``/dev/shm``; None: the system has none.
        open_files: the most that a process may be let have open.
        gpus: None: there is no NVIDIA driver.
    """

    store: StorePlace
    tmp: str
    tmp_free_bytes: int
    shm_bytes: int | None
    open_files: int
    gpus: Gpus | None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A process of this user that others can reach.

    Args:
        address: that it listens at: beyond loopback, for Prefect's also on it, where other accounts of the machine are.
        guarded: whether it asks for credentials.
    """

    kind: Literal["prefect", "mlflow", "ray"]
    address: str
    ports: Sequence[int]
    guarded: bool


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that the environment or the configuration names, and what it answered.

    Args:
        status: of HTTP, where it speaks it; None: it does not, or does not answer.
        trouble: why there was no answer; empty: there was.
        refusal: why a cluster cannot be joined, and behind a semicolon what to do; empty: it can.
        answer: what a cluster holds.
        open_to_all: whether it answers without credentials too.
    """

    url: str
    setting: str
    status: int | None = None
    trouble: str = ""
    refusal: str = ""
    answer: str = ""
    open_to_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Who else is there.

    Args:
        exposed: servers of this user that others can reach.
        prefect, mlflow, ray: None: none is named.
        notify: the block of Prefect that the pipeline notifies.
    """

    exposed: Sequence[Server] = ()
    prefect: Service | None = None
    mlflow: Service | None = None
    ray: Service | None = None
    notify: str | None = None


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What keeps a configuration from being read. Where something does, nothing of the pipeline is known.

    Args:
        refusal: what is wrong with it; empty: nothing, or nothing but variables that are absent.
        absent: variable that it names and that is not set -> where it is named.
    """

    refusal: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All of it."""

    packages: Packages
    machine: Machine
    surroundings: Surroundings
    configuration: Configuration
