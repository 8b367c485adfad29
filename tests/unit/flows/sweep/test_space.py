"""What varies and how: Hydra's grammar, as a sweep reads it."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from flows.sweep.folder import short_names
from flows.sweep.space import categories, choices, combinations, fixed_and_swept, read_values, require_variable
from lineage.errors import ConfigError
from tests.sweeps import space_of, sweep


def test_words_with_several_values_vary_and_the_others_are_fixed():
    overrides = ["pipeline=toy", "a.b=1,2", "c=[1,2]", "model=tiny,own", "~d", "e='1,2'", "+f=range(1,3)"]
    fixed, swept = fixed_and_swept(overrides)
    assert fixed == ["pipeline=toy", "c=[1,2]", "~d", "e='1,2'"]
    assert swept == {"a.b": "1,2", "model": "tiny,own", "f": "range(1,3)"}


def test_a_field_that_is_swept_twice_is_refused():
    with pytest.raises(ConfigError, match=r"a=1,2 is given too"):
        fixed_and_swept(["a=1,2", "a=3,4"])


@pytest.mark.parametrize(
    "field",
    ["store", "tracking", "code_drift", "sweep.num_trials", "sweep", "tags", "schedule", "trigger", "retrain", "notify",
     "pipeline", "resources", "stages.left.resources.cpus_per_worker"],
)  # fmt: skip
def test_what_is_no_matter_of_the_stages_cannot_vary(field):
    with pytest.raises(ConfigError, match=f"^{field}: cannot vary"):
        require_variable({field: "a,b"}, [])


def test_nothing_that_varies_and_a_field_that_is_fixed_too_are_refused():
    require_variable({"a": "1,2"}, ["b=3"])
    with pytest.raises(ConfigError, match=r"set sweep\.params"):
        require_variable({}, [])
    with pytest.raises(ConfigError, match="a=3: the sweep varies this field"):
        require_variable({"a": "1,2"}, ["a=3"])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("1,2,1", ("1", "2")),
        ("choice(a,b)", ("a", "b")),
        ("sort(3,1,2)", ("1", "2", "3")),
        ("{r:8},null", ("{r:8}", "null")),
        ("0.5", ("0.5",)),
        ("range(1,4)", ("1", "2", "3")),
        ("range(0.1,0.5,0.1)", ("0.1", "0.2", "0.3", "0.4")),
        ("range(3,0,-1)", ("3", "2", "1")),
        ("tag(log,range(1,9))", tuple("12345678")),
        ("interval(0.1,0.5)", ()),
    ],
)
def test_values_in_hydras_grammar(values, found):
    assert choices(read_values("a", values)) == found


@pytest.mark.parametrize("text", ["'x y'", "'p,q'", r"x\,y", "'$b'", "{r:8,alpha:16}", "[1,2]", "null", "1e-05", "''"])
def test_an_odd_value_parses_back_to_itself(text):
    parse = OverridesParser.create().parse_override
    (first, _) = choices(read_values("a", f"{text},other"))
    assert parse(f"a={first}").value() == parse(f"a={text}").value()


def test_a_shuffle_is_the_same_every_time():
    values = choices(read_values("a", "shuffle(range(0,50))"))
    assert values == choices(read_values("a", "shuffle(range(0,50))"))
    assert values != tuple(map(str, range(50))) and sorted(map(int, values)) == list(range(50))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ("glob(*)", "takes no glob"),
        ("tag(fast,choice(1,2))", "unknown tag fast; accepted: log"),
        ("tag(log,choice(1,2))", "tag an interval or a range"),
        ("range(5,1)", "the range is empty"),
        ("range(1,5,0)", "a step that leads to stop"),
        ("range(1.0,5.0,0)", "a step that leads to stop"),
        ("choice(", "and quote odd values"),
    ],
)
def test_values_that_no_sweep_takes_are_refused(values, why):
    with pytest.raises(ConfigError, match=why):
        read_values("a", values)


def test_until_in_the_name_of_a_field_is_the_last_stage():
    configured = sweep(until="sft", params={"stages.{until}.lr": "1,2"}, fixed={"stages.{until}.steps": 20, "b": None})
    assert configured.params == {"stages.sft.lr": "1,2"} and configured.fixed == {"stages.sft.steps": 20, "b": None}
    with pytest.raises(ConfigError, match=r"set sweep\.until"):
        sweep(params={"{until}.lr": "1,2"})


def test_headings_are_as_short_as_sets_them_apart():
    fields = ["stages.sft.method.learning_rate", "stages.dpo.method.learning_rate", "stages.dpo.method.beta", "model"]
    names = ["sft.method.learning_rate", "dpo.method.learning_rate", "beta", "model"]
    assert list(short_names(fields).values()) == names
    assert short_names(["a.model", "model"]) == {"a.model": "a.model", "model": "model"}


def test_every_combination_once_the_last_field_fastest():
    found = combinations(space_of({"a": "1,2,1", "b": "x,y"}))
    assert [tuple(each.values()) for each in found] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]


@pytest.mark.parametrize("values", ["interval(0,1)", "tag(log,range(1,5))"])
def test_what_only_a_sampler_draws_is_refused_with_the_remedy(values):
    with pytest.raises(ConfigError, match="sweep=optuna"):
        combinations(space_of({"a": values}))


def test_values_of_a_sweep_are_kept_as_they_were_typed_and_named_in_a_study_as_before():
    texts = choices(read_values("sources.base.revision", "1.10,6e53,2024,[1e-4,x]"))
    assert texts == ("1.10", "6e53", "2024", "[1e-4,x]")
    assert categories(texts) == ("1.1", "6e+53", "2024", "[0.0001,x]")
    assert categories(("1.1", "1.10")) == ("1.1", "1.10")
    assert categories(choices(read_values("x", "'a b',c"))) == ("'a b'", "c")
