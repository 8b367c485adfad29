"""What `_target_` names is read before it is imported."""

import itertools
import sys
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline, method_class
from lineage.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"
_NUMBER = itertools.count()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module, which leaves a file `ran` when it is imported; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(text: str) -> str:
        names.append(f"planted_{next(_NUMBER)}")
        Path(f"{names[-1]}.py").write_text(f"from pathlib import Path\nPath('ran').touch()\n{text}")
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "text",
    [
        "class Own: pass",
        "class Own(dict): pass",
        "class Method: pass\nclass Own(Method): pass",
        "from antigravity import Own",
        "Own = 1",
        "import tasks.method\nclass Other(tasks.method.Method): pass",
        "class Own(Own): pass",
    ],
)
def test_a_module_without_such_a_method_is_not_imported_by_a_plan(written, text):
    module = written(text)
    with pytest.raises(ConfigError, match=r"is no tasks.method.Method; .*\.py was read, and not imported"):
        load_pipeline(
            ["pipeline=toy", "model=none", "sources.rows.path=x", f"stages.left.method._target_={module}.Own"], CONF
        )
    assert not Path("ran").exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "from tasks.sft import SFT\nclass Own(SFT): pass",
        "import tasks.sft as methods\nclass Own(methods.SFT): pass",
        "import tasks.sft\nclass Own(tasks.sft.SFT): pass",
        "from tasks.sft import SFT as Own",
        "from tasks.sft import SFT\nclass Between(SFT): pass\nclass Own(Between): pass",
        "try:\n    from no.such import SFT\nexcept ImportError:\n    from tasks.sft import SFT\nclass Own(SFT): pass",
    ],
)
def test_a_method_of_ones_own_is_imported(written, text):
    assert issubclass(method_class("here", f"{written(text)}.Own"), sys.modules["tasks.sft"].SFT)
    assert Path("ran").exists()


def test_a_method_may_derive_from_one_in_another_module_of_a_package(written, tmp_path):
    first = written("from tasks.sft import SFT\nclass First(SFT): pass")
    package = tmp_path / f"{first}_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Own\n")
    (package / "inner.py").write_text(f"from {first} import First\nclass Own(First): pass\n")
    assert method_class("here", f"{package.name}.Own").__module__ == f"{package.name}.inner"
    assert method_class("here", f"{package.name}.inner.Own").__name__ == "Own"


@pytest.mark.parametrize("text", ["class Own(", "raise SystemError('no')\nfrom tasks.sft import SFT as Own"])
def test_a_module_that_is_no_python_or_cannot_be_imported_is_named(written, text):
    with pytest.raises(ConfigError, match=r"Own: cannot be imported \(.*\); give package.module.Class"):
        method_class("here", f"{written(text)}.Own")
