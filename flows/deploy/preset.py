"""What every run of a deployment is given before its own overrides: the words of ``posttrain serve``."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.declare.compose import CONF, field_of
from flows.declared import split_words
from lineage.errors import ConfigError

VARIABLE = "POSTTRAIN_WORDS"  # tells them to a process that Prefect starts
_ALLOW_CODE = "--allow-code"
# What makes an override run code, or hides that it does: an interpolation puts words together, a dash begins an option.
_CODE = ("_target_", "allow_code", "python:", "${")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A folder of the user's groups, and overrides.

    Args:
        pipeline: the only one that is deployed; None: all.
        allow_code: whether the overrides of a run may name code to run.
    """

    config_dir: Path | None = None
    overrides: tuple[str, ...] = ()
    pipeline: str | None = None
    allow_code: bool = False

    @staticmethod
    def of(words: Sequence[str]) -> "Preset":
        """The words of a command; ``pipeline=NAME`` among them chooses."""
        overrides, config_dir = split_words(words)
        chosen = [word.partition("=")[2] for word in overrides if field_of(word) == "pipeline"]
        rest = tuple(word for word in overrides if field_of(word) != "pipeline" and word != _ALLOW_CODE)
        return Preset(
            config_dir=config_dir, overrides=rest, pipeline=chosen[-1] if chosen else None,
            allow_code=_ALLOW_CODE in overrides,
        )  # fmt: skip

    @staticmethod
    def of_environment() -> "Preset":
        return Preset.of(shlex.split(os.environ.get(VARIABLE, "")))

    @property
    def environment(self) -> dict[str, str]:
        """The variable that says it, where there is anything to say."""
        chosen = [f"pipeline={self.pipeline}"] if self.pipeline else []
        words = [*self._groups(), *([_ALLOW_CODE] if self.allow_code else []), *chosen, *self.overrides]
        return {VARIABLE: shlex.join(words)} if words else {}

    def words(self, option: str, overrides: Sequence[str] = ()) -> list[str]:
        """What states one run of a pipeline, as words of a command; what the run states itself wins.

        Raises:
            ConfigError: the run states code of its own, and may not.
        """
        if not self.allow_code:
            _require_no_code(overrides)
        stated = {field_of(word) for word in overrides}
        return [
            *self._groups(),
            f"pipeline={option}",
            *(word for word in self.overrides if field_of(word) not in stated),
            *overrides,
        ]

    def files(self) -> dict[str, Path]:
        """Name -> file of each pipeline to deploy, shipped and the user's.

        Raises:
            ConfigError: there is no such folder of groups.
        """
        if self.config_dir and not self.config_dir.is_dir():
            raise ConfigError(f"--config-dir {self.config_dir}: no such directory")
        folders = [CONF, *([self.config_dir] if self.config_dir else [])]
        found = {path.stem: path for folder in folders for path in sorted((folder / "pipeline").glob("*.yaml"))}
        return {name: path for name, path in found.items() if self.pipeline in (None, name)}

    def _groups(self) -> list[str]:
        return ["--config-dir", str(self.config_dir)] if self.config_dir else []


def _require_no_code(overrides: Sequence[str]) -> None:
    for word in overrides:
        plain = word.replace("\\", "")  # with which Hydra lets any character be written
        found = "-" if word.startswith("-") else next((name for name in _CODE if name in plain), None)
        if found:
            raise ConfigError(
                f"{word}: an override of a deployed run may not have {found}, since whoever may start runs could run "
                "any code with it; write it into the pipeline's YAML, or start `posttrain serve --allow-code`"
            )
