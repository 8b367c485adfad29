"""Shipped pipelines are what Hydra composes, which takes it a quarter of a second each."""

import json

import pytest

from flows.declare.config import CONF, compose_tree
from tests.unit.flows.declare.test_config import of_hydra


@pytest.mark.parametrize("pipeline", sorted(path.stem for path in (CONF / "pipeline").glob("*.yaml")))
def test_a_shipped_pipeline_is_what_hydra_composes(pipeline: str) -> None:
    overrides = [f"pipeline={pipeline}", "model=tiny"]
    assert json.dumps(compose_tree(overrides)) == json.dumps(of_hydra(overrides))
