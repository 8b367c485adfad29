"""What stages import alike: once, in the fork server that their processes start from."""

from collections.abc import Sequence

from flows.planning.plan import PlannedStage
from tasks.method import Method

_BEGIN = "flows.stages.imports_begin"
_RAY_TRAIN = "flows.stages.ray_train"  # around every method that trains


def shares_imports(method: Method, *, is_first: bool) -> bool:
    """Whether a stage starts from the fork server: else it need not wait for what that imports.

    Args:
        is_first: it reads sources alone, and so begins while the imports still go on.
    """
    return method.trains or bool(method.preload and not is_first)


def shared_modules(stages: Sequence[PlannedStage]) -> list[str]:
    """What the stages' processes import: each module once, in order."""
    methods = [each.stage.method for each in stages if shares_imports(each.stage.method, is_first=not each.upstream)]
    return modules_of([type(method) for method in methods])


def modules_of(methods: Sequence[type[Method]]) -> list[str]:
    """What these methods import and what is around them, without anything twice; nothing for no method."""
    own = [module for method in methods for module in method.preload]
    around = [_RAY_TRAIN] if any(method.trains for method in methods) else []
    return list(dict.fromkeys([_BEGIN, *own, *around])) if methods else []
