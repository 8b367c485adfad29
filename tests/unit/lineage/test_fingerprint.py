import dataclasses
import math

import pytest

from lineage.fingerprint import canonical_json, differences, fingerprint
from tasks.train.best import Best
from tests.toy_methods import ToyTraining

RECIPE = {"method": "DPO", "version": 1, "beta": 0.1, "adapter": {"rank": 8}}


def test_every_part_of_the_recipe_and_every_slot_enters_but_neither_order_nor_none():
    same = [dict(reversed(RECIPE.items())), {**RECIPE, "later": None, "adapter": {"rank": 8, "later": None}}]
    assert {fingerprint(each, {"b": "2", "a": "1"}) for each in same} == {fingerprint(RECIPE, {"a": "1", "b": "2"})}
    changes = [{}, {"beta": 0.2}, {"version": 2}, {"method": "IPO"}, {"adapter": {"rank": 9}}]
    found = {fingerprint({**RECIPE, **change}, {"a": "1", "b": "2"}) for change in changes}
    assert len(found | {fingerprint(RECIPE, {"a": "2", "b": "1"})}) == 6
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"beta": math.nan})


def test_every_field_of_a_method_is_in_its_recipe():
    method = ToyTraining()
    named = {field.name for field in dataclasses.fields(method) if getattr(method, field.name) is not None}
    # These came later: at their defaults they stay out, so that what was made before stays current.
    assert named - method.recipe().keys() == {"output", "on_divergence", "optimizer", "schedule"}
    assert {"lr_schedule", "warmup_ratio", "weight_decay"} < method.recipe().keys()
    best = Best(every_steps=1)
    changed = dataclasses.replace(method, best=best, output="best", on_divergence="best").recipe()
    assert {"output": "best", "on_divergence": "best"}.items() <= changed.items()


def test_differences_name_nested_fields_with_both_values():
    after = {**RECIPE, "beta": 0.2, "adapter": {"rank": 16}, "extra": "x"}
    assert list(differences(RECIPE, after)) == ["adapter.rank: 8 -> 16", "beta: 0.1 -> 0.2", 'extra: (none) -> "x"']
