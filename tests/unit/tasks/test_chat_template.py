"""The chat template that a stage installs."""

import pytest

from lineage.errors import ConfigError
from lineage.fingerprint import fingerprint
from lineage.model_source import template_families, text_digest
from tasks.orpo import ORPO
from tasks.recipe import TrainingRecipe
from tasks.sft import SFT


@pytest.mark.parametrize("cls", [SFT, ORPO])
def test_a_chat_template_is_identity_and_one_that_does_not_exist_is_refused(cls: type[TrainingRecipe]) -> None:
    recipes = [cls(chat_template=name).recipe() for name in (None, "chatml", "qwen3")]  # type: ignore[call-arg]
    assert len({fingerprint(each, {}) for each in recipes}) == 3
    assert recipes[2]["chat_template_text"] == text_digest(template_families()["qwen3"].read_text(encoding="utf-8"))
    assert "chat_template_text" not in recipes[1]
    with pytest.raises(ConfigError, match="chat_template=chatm: no such template"):
        cls(chat_template="chatm")  # type: ignore[call-arg]
