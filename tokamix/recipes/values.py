"""The values of recipes: types with ranges, how text becomes a value, and how a type is described in an error."""

import math
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin


class Range(NamedTuple):
    """The numbers from low to high; `open` names an end that is excluded."""

    low: float
    high: float = math.inf
    open: str = ""

    def __contains__(self, number: object) -> bool:
        return self.low <= number <= self.high and (not self.open or number != getattr(self, self.open))  # type: ignore[operator]

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open == "low" else f"of at least {self.low:g}"
        high = f"below {self.high:g}" if self.open == "high" else f"of at most {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and {high}"


Probability = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, open="low")]
Rate = Annotated[float, Range(0, 1, open="high")]
HalfTurn = Annotated[float, Range(0, 0.5)]
Percent = Annotated[float, Range(0, 100)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open="low")]
Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to its type; TypeError or ValueError if it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if NoneType in args:
        if value is None or value == "none":
            return None
        return convert(value, next(arg for arg in args if arg is not NoneType))
    if origin is Annotated:
        number = convert(value, args[0])
        if number not in args[1]:
            raise ValueError
        return number
    if origin is Literal:
        value = "none" if value is None and "none" in args else value
        if value not in args:
            raise ValueError
        return value
    if origin is tuple and args[-1] is Ellipsis:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(convert(item, args[0]) for item in value)
    if origin is tuple:
        return tuple(convert(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError
        return {convert(key, args[0]): convert(item, args[1]) for key, item in value.items()}
    if hint is Any:
        return value
    if hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError
        if value != hint(value):
            raise ValueError
        return hint(value)
    if not isinstance(value, hint):
        raise TypeError
    return value


def describe(hint: Any) -> str:
    """Describe a type in words, for errors."""
    origin, args = get_origin(hint), get_args(hint)
    if NoneType in args:
        return f"{describe(next(arg for arg in args if arg is not NoneType))}, or none"
    if origin is Annotated:
        return f"{describe(args[0])} {args[1]}"
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else repr(args[0])
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}values, each {describe(args[0])}"
    if origin is dict:
        return f"a mapping of {describe(args[0])} to {describe(args[1])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return names.get(hint, "a value")
