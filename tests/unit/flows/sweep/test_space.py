"""What varies and how: Hydra's grammar, as a sweep reads it."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from flows.sweep.folder import short_names
from flows.sweep.space import Values, combinations, fixed_and_swept, fixed_overrides, merged_params, read_values
from lineage.errors import ConfigError
from tests.sweeps import space_of, sweep


def test_words_with_several_values_vary_and_the_others_are_fixed():
    words = ["pipeline=toy", "a.b=1,2", "c=[1,2]", "model=tiny,own", "~d", "e='1,2'", "+f=range(1,3)"]
    fixed, swept = fixed_and_swept(words)
    assert fixed == ["pipeline=toy", "c=[1,2]", "~d", "e='1,2'"]
    assert swept == {"a.b": "1,2", "model": "tiny,own", "f": "range(1,3)"}


def test_a_field_that_is_swept_twice_is_refused():
    with pytest.raises(ConfigError, match=r"a=1,2 is given too"):
        fixed_and_swept(["a=1,2", "a=3,4"])


SAME = [
    "store=a,b", "tracking=none,local", "code_drift=warn,rerun", "sweep.num_trials=1,2", "sweep=grid,optuna",
    "tags=[a],[b]", "schedule=null,{interval: 1}", "trigger=null,{}", "retrain=null,{}", "notify=a,b",
    "pipeline=toy,other", "resources=local,h100", "stages.left.resources.cpus_per_worker=1,2",
]  # fmt: skip


@pytest.mark.parametrize("word", SAME)
def test_what_is_no_matter_of_the_stages_cannot_vary(word):
    field, _, values = word.partition("=")
    with pytest.raises(ConfigError, match=f"^{field}: cannot vary"):
        fixed_and_swept([word])
    with pytest.raises(ConfigError, match=f"^{field}: cannot vary"):
        merged_params(sweep(params={field: values}), [], {})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("1,2,1", Values(choices=("1", "2"))),
        ("choice(a,b)", Values(choices=("a", "b"))),
        ("sort(3,1,2)", Values(choices=("1", "2", "3"))),
        ("{r:8},null", Values(choices=("{r:8}", "null"))),
        ("0.5", Values(choices=("0.5",))),
        ("range(1,4)", Values(choices=("1", "2", "3"), low=1, high=3, step=1)),
        ("range(0.1,0.5,0.1)", Values(choices=("0.1", "0.2", "0.3", "0.4"), low=0.1, high=0.4, step=0.1)),
        ("range(3,0,-1)", Values(choices=("3", "2", "1"), low=1, high=3, step=1)),
        ("interval(0.1,0.5)", Values(low=0.1, high=0.5)),
        ("int(interval(1,9))", Values(low=1, high=9, step=1)),
        ("tag(log,interval(1e-6,1e-4))", Values(low=1e-6, high=1e-4, log=True)),
        ("tag(log,int(interval(1,9)))", Values(low=1, high=9, step=1, log=True)),
        ("tag(log,range(1,9))", Values(choices=tuple("12345678"), low=1, high=8, step=1, log=True)),
    ],
)
def test_values_in_hydras_grammar(values, found):
    assert read_values("a", values) == found


def test_whole_numbers_stay_whole():
    assert isinstance(read_values("a", "int(interval(1,9))").low, int)
    assert isinstance(read_values("a", "interval(1,9)").low, float)


@pytest.mark.parametrize("text", ["'x y'", "'p,q'", r"x\,y", "'$b'", "{r:8,alpha:16}", "[1,2]", "null", "1e-05", "''"])
def test_an_odd_value_parses_back_to_itself(text):
    parse = OverridesParser.create().parse_override
    (first, _) = read_values("a", f"{text},other").choices
    assert parse(f"a={first}").value() == parse(f"a={text}").value()


def test_a_shuffle_is_the_same_every_time():
    values = read_values("a", "shuffle(range(0,50))").choices
    assert values == read_values("a", "shuffle(range(0,50))").choices
    assert values != tuple(map(str, range(50))) and sorted(map(int, values)) == list(range(50))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ("glob(*)", "takes no glob"),
        ("tag(fast,choice(1,2))", "unknown tag fast; accepted: log"),
        ("tag(log,choice(1,2))", "tag an interval or a range"),
        ("interval(2,1)", "give the smaller number first"),
        ("tag(log,interval(0,1))", "give a start above 0"),
        ("tag(log,range(1,9,2))", "leave the step out"),
        ("range(5,1)", "the range is empty"),
        ("range(1,5,0)", "a step that is not 0"),
        ("range(1.0,5.0,0)", "a step that is not 0"),
        ("choice(", "quote odd values"),
    ],
)
def test_values_that_no_sweep_takes_are_refused(values, why):
    with pytest.raises(ConfigError, match=why):
        read_values("a", values)


def test_the_command_line_replaces_the_values_of_yaml():
    stated = sweep(params={"a": "1,2", "b": "3,4"})
    assert merged_params(stated, [], {"b": "5,6", "c": "7,8"}) == {"a": "1,2", "b": "5,6", "c": "7,8"}


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"a": "1,2"}, "a=3: the sweep varies this field"),
        ({}, r"set sweep\.params"),
        ({"{until}.lr": "1,2"}, r"set sweep\.until"),
    ],
)
def test_parameters_that_no_sweep_can_vary_are_refused(params, why):
    with pytest.raises(ConfigError, match=why):
        merged_params(sweep(params=params), ["a=3"], {})


def test_until_in_the_name_of_a_field_is_the_last_stage():
    stated = sweep(
        until="sft", params={"stages.{until}.lr": "1,2"}, fixed={"stages.{until}.steps": 20, "b": None, "c": True}
    )
    assert merged_params(stated, [], {}) == {"stages.sft.lr": "1,2"}
    assert fixed_overrides(stated) == ["stages.sft.steps=20", "b=null", "c=true"]


def test_headings_are_as_short_as_sets_them_apart():
    fields = ["stages.sft.method.learning_rate", "stages.dpo.method.learning_rate", "stages.dpo.method.beta", "model"]
    assert list(short_names(fields).values()) == [
        "sft.method.learning_rate",
        "dpo.method.learning_rate",
        "beta",
        "model",
    ]
    assert short_names(["a.model", "model"]) == {"a.model": "a.model", "model": "model"}


def test_every_combination_once_the_last_field_fastest():
    found = combinations(space_of({"a": "1,2,1", "b": "x,y"}))
    assert [tuple(each.values()) for each in found] == [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
    shuffled = {"a": "shuffle(range(0,9))"}
    assert (
        combinations(space_of(shuffled))
        == combinations(space_of(shuffled))
        != combinations(space_of({"a": "range(0,9)"}))
    )


@pytest.mark.parametrize("values", ["interval(0,1)", "tag(log,range(1,5))"])
def test_what_only_a_sampler_draws_is_refused_with_the_remedy(values):
    with pytest.raises(ConfigError, match="sweep=optuna"):
        combinations(space_of({"a": values}))
