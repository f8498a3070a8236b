"""Check the fields of a configuration dataclass against their annotations, and what it is made with against them."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dspark.errors import DSparkError

__all__ = ["check_fields", "keywords_checked"]

_Class = TypeVar("_Class", bound=type)


def keywords_checked(explain: Callable[[str, list[str]], str]) -> Callable[[_Class], _Class]:
    """Decorate a dataclass so that a keyword that is no field of it raises DSparkError, not TypeError.

    Args:
        explain: the message, from the keyword and the names of all fields.
    """

    def decorate(cls: _Class) -> _Class:
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)  # which leaves its signature to whoever inspects it
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    raise DSparkError(explain(name, known))
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate


def check_fields(config: Any, what: str) -> None:
    """Refuse values of the wrong type: bool, int, float (finite; whole numbers fit), str, tuples and `| None` of these.

    Raises:
        DSparkError: names the first field that does not fit.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints[field.name]):
            raise DSparkError(f"{what} {field.name} must be {_name(hints[field.name])}, got {value!r}")


def _name(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list of {_name(get_args(hint)[0])}"
    return str(getattr(hint, "__name__", hint)).replace("NoneType", "None")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint)
