"""Values are set on a copy of what the groups compose: as Hydra would set them, in whichever order they stand."""

import os
import shutil

import pytest

from flows.declare.compose import Composer, compose_tree
from lineage.errors import ConfigError
from tests.command import CONF

TOY = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt")
RATE = "stages.left.method.learning_rate"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{RATE}=0.2", "adapter=lora"),
        (f"{RATE}=0.2", f"++{RATE}=0.3"),
        (f"++{RATE}=0.3", f"{RATE}=0.2"),
        (f"{RATE}=0.2", "~stages.right", f"{RATE}=0.3"),
        ("stages.right.method.num_steps=7", "~stages.right"),
        ("stages.left.resources={max_failures: 1}", "stages.left.resources.max_failures=2"),
        ("stages.left.resources.max_failures=2", "stages.left.resources={max_failures: 1}"),
        ("sources.rows.path=other.txt", "sources={rows: {path: third.txt}}"),
        ("store='a b'", "stages.left.method.new={deep: [1, null]}"),
        ("store=elsewhere", "store=here", "name=other", "code_drift=warn"),
    ],
)
def test_it_is_what_hydra_composes(overrides):
    assert compose_tree([*TOY, *overrides], CONF) == Composer([*TOY, *overrides], CONF).tree()


def test_a_file_that_changed_is_read_again(tmp_path):
    shutil.copytree(CONF, tmp_path / "groups")
    before = compose_tree(TOY, tmp_path / "groups")
    file = tmp_path / "groups/pipeline/toy.yaml"
    file.write_text(file.read_text().replace("name: toy", "name: other"))
    os.utime(file, ns=(1, 1))
    assert (before["name"], compose_tree(TOY, tmp_path / "groups")["name"]) == ("toy", "other")


@pytest.mark.parametrize(
    ("word", "said"),
    [("hydra.run.dir=x", "none of its hydra"), (f"{RATE}=1,2", "several values"), (f"{RATE}=[", "no override")],
)
def test_a_value_that_no_field_can_have_is_refused(word, said):
    with pytest.raises(ConfigError, match=said):
        compose_tree([*TOY, word], CONF)
