"""Secrets: configurations name environment variables, whose values appear in no file, log or message of ours.

``redacted`` is for every place that prints or records a URL; ``refuse_secrets`` rejects URLs of sources with secrets.
"""

import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

from lineage.errors import ConfigError

_VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")
_AWS_KEY = re.compile("A(KIA|SIA)[A-Z0-9]{16}")  # has the form of a name, but is a key
# The user part before the host, including a password with an unescaped slash, but not a port.
_ADDRESS = re.compile(
    r"(?<![a-z0-9+.-])(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?P<user>[^\s/?#\"<>]*@|[^\s/?#\"<>@]*:(?!\d+[/?#])[^\s\"<>]*@)?"
    r"(?P<rest>[^\s\"<>]*)",
    re.I,
)
_SIGNATURE = re.compile(
    r"(?<=[?&;#])(?P<name>x-[a-z]+-(?:signature|credential|security-token)|sig|signature|awsaccesskeyid|googleaccessid"
    r"|ossaccesskeyid|key-pair-id|(?:access_|id_|auth_)?token|auth|jwt|api[_-]?key|passw(?:or)?d|(?:client_)?secret)=[^&\s\"#]+",
    re.I,
)
_NAMES_BEFORE_HOST = ("abfs", "abfss", "github")  # schemes with a container or repository in the user part
_SECRET_LENGTH = 6  # shorter values are settings, such as true


def secrets_of(credentials: Mapping[str, str]) -> dict[str, str]:
    """Option of a file system -> its value, from the environment variables that a source names.

    Raises:
        ConfigError: a value is given instead of a name (it is not repeated), or a variable is not set.
    """
    for option, variable in credentials.items():
        if not _VARIABLE.fullmatch(variable) or _AWS_KEY.fullmatch(variable):
            raise ConfigError(
                f"credentials.{option} is not the name of an environment variable (it is not repeated here: it may be "
                "the secret itself); accepted: capital letters, digits and _; put the value in a variable, and give "
                "its name"
            )
        if not os.environ.get(variable):
            raise ConfigError(
                f"credentials.{option}={variable}: no environment variable of that name is set here; "
                f"export {variable}=..., or name the one that holds it"
            )
    return {option: os.environ[variable] for option, variable in credentials.items()}


def first_line(error: BaseException, credentials: Mapping[str, str] | None = None) -> str:
    """The type of an error and its first line, with the values of secret variables replaced by their names."""
    text = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for variable in (credentials or {}).values():
        secret = os.environ.get(variable)
        if secret and len(secret) >= _SECRET_LENGTH:
            line = line.replace(secret, f"${variable}")
    return line


def redacted(text: str) -> str:
    """A text with user names, passwords and signature parameters removed from its URLs."""
    return _ADDRESS.sub(_redacted_address, text) if "://" in text else text


def _redacted_address(address: re.Match[str]) -> str:
    user = address["user"] if address["scheme"].lower() in _NAMES_BEFORE_HOST else ""
    rest = _SIGNATURE.sub(r"\g<name>=***", address["rest"])
    return f"{address['scheme']}://{user or ''}{rest}"


_UNDER_CREDENTIALS = (
    "export the secret as an environment variable, and name the variable under credentials: (s3://: key, secret, "
    "token; https://: username and password, or token)"
)


def refuse_secrets(url: str, setting: str = "path", remedy: str = _UNDER_CREDENTIALS) -> None:
    """Refuses a URL that contains a secret.

    Args:
        setting: that has it.
        remedy: where the secret goes instead.
    """
    plain = unquote(url)  # a server reads X%2DAmz%2DSignature as X-Amz-Signature
    if redacted(plain) == plain:
        return
    signature = _SIGNATURE.search(plain)
    found = f"the parameter {signature['name']}" if signature else "a user name or password"
    raise ConfigError(
        f"{setting}={redacted(plain)}: its address holds {found}, which manifests, reports and logs would repeat; an "
        f"address without secrets is accepted; {remedy}"
    )
