"""Secrets by name: a declaration names environment variables; what they hold is in no file, log or message of ours."""

import os
import re
from collections.abc import Mapping

from lineage.errors import ConfigError

_VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")
_AWS_KEY = re.compile("A(KIA|SIA)[A-Z0-9]{16}")  # it could be a name, and is a value
_SECRET_LENGTH = 6  # what is shorter is a setting, such as true


def secrets_of(credentials: Mapping[str, str]) -> dict[str, str]:
    """Option of a file system -> its value, from the environment variables that a source names.

    Raises:
        ConfigError: a value stands where a name should, which is not repeated, or a variable is not set.
    """
    for option, variable in credentials.items():
        if not _VARIABLE.fullmatch(variable) or _AWS_KEY.fullmatch(variable):
            raise ConfigError(
                f"credentials.{option} is no name of an environment variable (it is not repeated here: it may be the "
                "secret itself); accepted: capital letters, digits and _; put the value in a variable, and state its "
                "name"
            )
        if not os.environ.get(variable):
            raise ConfigError(
                f"credentials.{option}={variable}: no environment variable of that name is set here; "
                f"export {variable}=..., or name the one that holds it"
            )
    return {option: os.environ[variable] for option, variable in credentials.items()}


def without_secrets(error: Exception, credentials: Mapping[str, str]) -> str:
    """The first line of what a library says, where it says the value of a variable with the variable's name."""
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    for variable in credentials.values():
        secret = os.environ.get(variable)
        if secret and len(secret) >= _SECRET_LENGTH:
            line = line.replace(secret, f"${variable}")
    return line
