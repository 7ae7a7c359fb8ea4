"""Loops over numbers for which NumPy takes several passes, compiled by Numba where it is installed.

A compiled loop is one call that runs without the interpreter's lock: threads that decode do not wait for each other
between its passes, and memory is gone through once. Compiling takes a few tenths of a second for each dtype, once in a
process; nothing is written to disk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

__all__ = ["compiled"]

_Given = ParamSpec("_Given")
_Gives = TypeVar("_Gives")


def compiled(loop: Callable[_Given, _Gives]) -> Callable[_Given, _Gives] | None:
    """A loop as machine code, compiled when it is first called with arrays of some dtype.

    Args:
        loop: a function of arrays and numbers, in the part of Python that Numba knows. It must not go beyond the
            arrays' ends: nobody looks.

    Returns:
        The same function; None where Numba is not installed, or does not go with the NumPy that is.
    """
    numba = _numba()
    return None if numba is None else numba.njit(nogil=True)(loop)


@cache
def _numba() -> Any:
    try:
        return importlib.import_module("numba")
    except ImportError:  # it looks at NumPy's version when it is imported
        return None
