"""``check_files``: the errors and possible problems of files.

Names are imported on first use: a process of the sandbox sets its limits before it loads NumPy and the HDF5 library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .check import CheckReport, check_files
    from .check_rows import Problem

__all__ = ["CheckReport", "Problem", "check_files"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".check", __name__), name)
