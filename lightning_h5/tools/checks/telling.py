"""What was found in one file as JSON, and back: who listens believes nothing, and takes values of known types alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .checking import Findings
from .problems import Problem, error, warning
from .set_checks import Schema

__all__ = ["NotToldError", "hear", "tell"]

MOST_NUMBER = 2**64  # no size in HDF5 is larger


class NotToldError(ValueError):
    """What was told is not what a check tells."""


def tell(found: Findings) -> dict[str, Any]:
    """What was found in one file, as values that JSON has; without the file's name, which the listener knows.

    Args:
        found: of one file.
    """
    schemas = [
        {
            "arrays": [[name, text, list(shape), each.n_rows[name]] for name, (text, shape) in each.looks.items()],
            "identity": each.identity,
        }
        for each in found.schemas
    ]
    return {
        "schemas": schemas,
        "problems": [[p.array, p.kind, p.text, p.severity] for p in found.problems],
        "order": [[name, at] for (_, name), at in found.order.items()],
        "unchecked": sorted(found.unchecked),
        "unknown": found.unknown,
        "n_decoded": found.n_decoded,
    }


def hear(path: str, text: bytes) -> Findings:
    """What a process told of one file. It may have been taken over by that file: anything may be in the text.

    Args:
        path: the file.
        text: what came out of the process, of bounded length.

    Raises:
        NotToldError: it is anything else than what ``tell`` gives.
        MemoryError: the process says that it had no memory left.
    """
    try:
        told = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as why:
        raise NotToldError(f"it is no JSON: {type(why).__name__}") from None
    if type(told) is dict and "failed" in told:
        if told["failed"] == "memory":
            raise MemoryError
        raise NotToldError(f"it failed with {_text(told['failed'])[:500]!r}")
    schemas, problems, order, unchecked, unknown, n_decoded = _values(
        told, "schemas", "problems", "order", "unchecked", "unknown", "n_decoded"
    )
    return Findings(
        schemas=[_schema(path, each) for each in _items(schemas, most=1)],
        problems=[_problem(path, each) for each in _items(problems)],
        order={(path, _text(name)): _number(at) for name, at in (_items(each, exactly=2) for each in _items(order))},
        unchecked={_text(name) for name in _items(unchecked)},
        unknown=_text_or_none(unknown),
        n_decoded=_number(n_decoded),
    )


def _schema(path: str, told: object) -> Schema:
    arrays, identity = _values(told, "arrays", "identity")
    looks, n_rows = {}, {}
    for each in _items(arrays):
        name, text, shape, rows = _items(each, exactly=4)
        looks[_text(name)] = _text(text), tuple(_number(size) for size in _items(shape))
        n_rows[_text(name)] = _number(rows)
    return Schema(path=path, looks=looks, n_rows=n_rows, identity=_text_or_none(identity))


def _problem(path: str, told: object) -> Problem:
    array, kind, text, severity = _items(told, exactly=4)
    if severity not in ("error", "warning"):
        raise NotToldError("a problem is neither an error nor a warning")
    make = error if severity == "error" else warning
    return make(path, _text_or_none(array), _text(kind), _text(text))


def _values(told: object, *names: str) -> Sequence[object]:
    if type(told) is not dict or set(told) != set(names):
        raise NotToldError(f"it has not just {', '.join(names)}")
    return [told[name] for name in names]


def _items(told: object, *, most: int | None = None, exactly: int | None = None) -> Sequence[object]:
    if type(told) is not list:
        raise NotToldError("there is no list where one should be")
    if (most is not None and len(told) > most) or (exactly is not None and len(told) != exactly):
        raise NotToldError("a list has not as many items as it should")
    return told


def _text(told: object) -> str:
    if type(told) is not str:
        raise NotToldError("there is no text where one should be")
    return told


def _text_or_none(told: object) -> str | None:
    return None if told is None else _text(told)


def _number(told: object) -> int:
    if type(told) is not int or not 0 <= told < MOST_NUMBER:
        raise NotToldError("there is no size where one should be")
    return told
