"""What modules declare, as they can be looked at without running them: records that change, and who names arguments."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

__all__ = ["changing_records", "modules_of", "unnamed_arguments"]


def modules_of(*packages: str) -> list[ModuleType]:
    """The modules of these names and, of packages, all that lie in them, but for programs (``__main__``)."""
    found = []
    for name in packages:
        module = importlib.import_module(name)
        found.append(module)
        for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            if not info.name.endswith(".__main__"):
                found.append(importlib.import_module(info.name))
    return found


def _classes(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield value


def changing_records(*packages: str) -> list[str]:
    """``module:Class`` of every dataclass whose fields can be set, in order."""
    return sorted(
        f"{module.__name__}:{each.__name__}"
        for module in modules_of(*packages)
        for each in _classes(module)
        if "__dataclass_params__" in vars(each) and not vars(each)["__dataclass_params__"].frozen
    )


def unnamed_arguments(*packages: str) -> list[str]:
    """``module:function(argument)`` of every argument that cannot be given by its name, in order."""
    found = []
    for module in modules_of(*packages):
        owners = [("", vars(module)), *((f"{each.__name__}.", vars(each)) for each in _classes(module))]
        for prefix, members in owners:
            for name, value in members.items():
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    found += [
                        f"{module.__name__}:{prefix}{name}({each.name})"
                        for each in inspect.signature(function).parameters.values()
                        if each.kind is each.POSITIONAL_ONLY
                    ]
    return sorted(found)
