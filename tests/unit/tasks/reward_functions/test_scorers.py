"""Reward functions are chosen, checked and called; what they return is finite numbers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.reward_functions import RewardFunction, check_columns, check_rewards, code_of_rewards, identity_of, scorers


def asked(count: int) -> list[list[dict[str, object]]]:
    return [[{"role": "user", "content": f"question {row}"}] for row in range(count)]


def mine(path: Path, code: str, name: str = "score") -> dict[str, RewardFunction]:
    path.write_text(code)
    return {"mine": RewardFunction(function=f"python:{path}:{name}", allow_code=True)}


def test_a_reward_is_named_after_its_key_or_its_function():
    first, second = scorers({"exact": RewardFunction(), "right": RewardFunction(function="exact", weight=-2.5)})
    assert (first.name, first.weight, second.name, second.weight) == ("exact", 1.0, "right", -2.5)
    for scorer in (first, second):
        assert scorer(asked(2), ["7", "8"], {"answer": ["7", "7"]}) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("key", "fields", "found"),
    [
        ("exakt", {}, "there is no reward function exakt; accepted: exact, "),
        ("exact", {"tolerance": 0.1}, r".tolerance=0.1: exact does not read it; exact reads answer_tag, column, "),
        ("exact", {"function": "python:shlex.quote"}, "exact is the name of a built-in function; rename the reward"),
        ("exact", {"allow_code": True}, "exact is built in; .* remove allow_code"),
        ("exact", {"answer_tag": "<answer>"}, r"answer_tag=\['<answer>'\]: different names such as"),
        ("exact", {"weight": float("nan")}, "weight=nan: a finite number is accepted"),
        ("mine", {"function": "python:file.py:score"}, "would run that file; set rewards.mine.allow_code=true"),
        ("mine", {"function": "python:math.sqrt", "allow_code": True}, "sqrt is of a module; .* remove it"),
        ("mine", {"function": "python:no.such.score"}, "there is no Python source of a module no.such"),
        ("mine", {"function": "python:shlex.quote", "column": "answer"}, "python:shlex.quote reads none; remove it"),
        ("mine", {"function": "python:shlex.nothing"}, r"defines no nothing; .* scores as score\(prompts, completions"),
    ],
)
def test_what_a_reward_cannot_be_is_refused_without_running_it(key, fields, found):
    with pytest.raises(ConfigError, match=f"rewards.{key}.*{found}"):
        check_rewards({key: RewardFunction(**fields)})


def test_a_path_that_names_no_function_is_refused_and_a_file_is_found_from_elsewhere(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="path=python: names no function"):
        RewardFunction(function="python:")
    monkeypatch.chdir(tmp_path)
    reward = RewardFunction(function="python:a.py:score", allow_code=True)
    assert reward.function == f"python:{tmp_path}/a.py:score"


def test_a_python_function_gets_prompts_completions_and_columns(tmp_path):
    code = """
def score(prompts, completions, level, **more):
    rows = zip(prompts, completions, level, more["other"])
    return [len(p[0]["content"]) + len(c) + l + len(o) for p, c, l, o in rows]
"""
    rewards = mine(tmp_path / "a.py", code)
    (scorer,) = scorers(rewards)
    assert scorer.columns == ("level",)
    assert scorer(asked(2), ["a", "bc"], {"level": [100, 200], "other": ["xy", "x"]}) == [113.0, 213.0]
    check_columns([scorer], {"level": [1, 2]})
    with pytest.raises(DataError, match=r"rewards.mine: the prompts have no column level; they have: answer, other"):
        check_columns([scorer], {"other": [], "answer": []})


def test_what_a_python_function_changes_in_place_is_its_own(tmp_path):
    code = """
def score(prompts, completions, answer, **more):
    scores = [float(each == right[0]) for each, right in zip(completions, answer)]
    prompts[0].clear(), completions.reverse(), answer[0].clear(), answer.pop()
    return scores
"""
    (scorer,) = scorers(mine(tmp_path / "a.py", code))
    texts, columns = ["a", "b"], {"answer": [["a"], ["c"]]}
    prompts = [[{"role": "user", "content": "x"}], []]
    assert [scorer(prompts, texts, columns) for _ in range(2)] == [[1.0, 0.0]] * 2
    assert (len(prompts[0]), texts, columns) == (1, ["a", "b"], {"answer": [["a"], ["c"]]})


def test_a_python_function_need_not_take_what_it_does_not_use(tmp_path):
    code = """
import numpy
def score(completions, answer=None):
    return numpy.array([len(text) for text in completions], dtype="float32")
"""
    (scorer,) = scorers(mine(tmp_path / "a.py", code))
    assert scorer(asked(2), ["a", "bc"], {"other": [1, 2]}) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return [1.0, float('nan')]", r"returned nan for row 1 \(prompt 'question 1', completion 'bc'\)"),
        ("return [None, 1]", r"returned None for row 0"),
        ("return ['1', 1]", r"returned '1' for row 0"),
        ("return [1j, 1]", r"returned 1j for row 0"),
        ("return [1, 10**400]", r"returned 10+\.\.\.0+ for row 1 .* finite number"),
        ("return [1, -1e39]", r"returned -1e\+39 for row 1 .* weight=1; numbers up to 1e\+15 are accepted"),
        ("return [1.0]", "returned 1 values for 2 completions"),
        ("return 1.0", "returned 1.0 for 2 completions"),
        ("return [1 / (len(c) - 2) for c in completions]", r"a.py:1: ZeroDivisionError: .* for row 1 \(.*'bc'\)"),
        ("raise SystemExit(3)", "SystemExit: 3 for row 0"),
    ],
)
def test_anything_but_finite_numbers_names_row_function_and_value(tmp_path, body, found):
    (scorer,) = scorers(mine(tmp_path / "a.py", f"def score(completions): {body}\n"))
    with pytest.raises(PipelineError, match=f"rewards.mine.*{found}"):
        scorer(asked(2), ["a", "bc"], {})


def test_a_weight_that_makes_a_reward_too_large_is_refused_with_it(tmp_path):
    code = "def score(completions): return [1e10 for _ in completions]\n"
    (scorer,) = scorers({"mine": replace(mine(tmp_path / "a.py", code)["mine"], weight=-1e6)})
    with pytest.raises(PipelineError, match=r"returned 10000000000.0 for row 0 .* weight=-1e\+06"):
        scorer(asked(1), ["a"], {})


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("score = 3", "it is int; accepted: a function that returns a list with one finite number"),
        ("async def score(completions): return []", "is async"),
        ("def score(): return []", r"cannot be called as score\(prompts=, completions=, \*\*columns\)"),
        ("def score(a, b, /): return []", "cannot be called as score"),
    ],
)
def test_what_cannot_score_is_refused_when_it_is_imported(tmp_path, code, found):
    with pytest.raises(DataError, match=found):
        scorers(mine(tmp_path / "a.py", code))


def test_the_plan_reads_the_code_and_never_runs_it(tmp_path):
    rewards = mine(tmp_path / "a.py", "raise SystemExit('it ran')\ndef score(completions): return []\n")
    check_rewards(rewards)
    (before,) = code_of_rewards(rewards).values()
    mine(tmp_path / "a.py", "raise SystemExit('it ran again')\ndef score(completions): return []\n")
    (after,) = code_of_rewards(rewards).values()
    assert before != after
    assert code_of_rewards({"exact": RewardFunction()}) == {}


def test_identity_has_options_and_weight_and_no_path_or_code(tmp_path):
    (tmp_path / "one").mkdir()
    one, other = mine(tmp_path / "a.py", "def score(): pass"), mine(tmp_path / "one" / "a.py", "def score(): 1")
    assert identity_of(one) == identity_of(other) == {"mine": {"function": "python:a.py:score", "weight": 1.0}}
    short, long = {"exact": RewardFunction()}, {"exact": RewardFunction(function="exact")}
    assert identity_of(short) == identity_of(long)
    changed = {"exact": RewardFunction(column="right", partial_credit=0.5, weight=2)}
    assert identity_of(changed) == {
        "exact": {"function": "exact", "weight": 2, "column": "right", "partial_credit": 0.5}
    }


def test_rows_without_an_answer_are_refused_before_the_first_step():
    (scorer,) = scorers({"exact": RewardFunction()})
    with pytest.raises(DataError, match=re.escape("rewards.exact: row 1 of the prompts: answer is None; text")):
        check_columns([scorer], {"answer": ["1", None]})
    with pytest.raises(DataError, match=r"have no column answer; they have: target; .* set rewards.exact.column"):
        scorer(asked(1), ["1"], {"target": ["1"]})
