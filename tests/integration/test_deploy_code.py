import pytest

from flows.deploy.code import deployed_code
from flows.deploy.preset import Preset

PIPELINE = """# @package _global_
name: own
stages:
  data: {method: {_target_: MODULE.Own}}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A pipeline of the user's with a method of the user's."""
    (tmp_path / "groups/pipeline").mkdir(parents=True)
    module = f"own_{tmp_path.name}"  # where a module lies is looked up once per process
    (tmp_path / "groups/pipeline/own.yaml").write_text(PIPELINE.replace("MODULE", module))
    (tmp_path / f"{module}.py").write_text("class Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(folder):
    return deployed_code("own", Preset(config_dir=folder / "groups"))


def test_the_same_files_have_the_same_digest(own):
    assert digest(own) == digest(own) != deployed_code("cpt-sft-dpo", Preset())


@pytest.mark.parametrize("pattern", ["groups/pipeline/own.yaml", "own_*.py"])
def test_a_change_of_the_users_groups_or_methods_is_other_code(own, pattern):
    before = digest(own)
    (path,) = own.glob(pattern)
    path.write_text(path.read_text() + "# changed\n")
    assert digest(own) != before


def test_a_change_of_a_reward_function_is_other_code(own):
    (own / "mine.py").write_text("def score(completions): return [1]\n")
    file = own / "groups/pipeline/own.yaml"
    text = file.read_text().replace(
        "}}", f", rewards: {{a: {{function: 'python:{own}/mine.py:score'}}, exact: {{}}}}}}}}"
    )
    file.write_text(text)
    before = digest(own)
    (own / "mine.py").write_text("def score(completions): return [2]\n")
    assert digest(own) != before


def test_a_change_of_our_packages_is_other_code(monkeypatch, tmp_path):
    before = deployed_code("cpt-sft-dpo", Preset())
    changed = []

    def digest_file(path):
        changed.append(path.name)
        return "other" if path.name == "dpo.py" else "same"

    monkeypatch.setattr("flows.deploy.code.digest_file", lambda path: "same")
    same = deployed_code("cpt-sft-dpo", Preset())
    monkeypatch.setattr("flows.deploy.code.digest_file", digest_file)
    assert deployed_code("cpt-sft-dpo", Preset()) not in (same, before)
    assert {"dpo.py", "execute.py", "store.py", "cpt-sft-dpo.yaml"} <= set(changed)
