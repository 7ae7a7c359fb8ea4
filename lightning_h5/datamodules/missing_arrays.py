"""Errors about missing arrays: the argument that names the array, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..catalog import TARGET, SideTable
from ..errors import H5KeyError, near
from .arguments import argument_of

__all__ = ["explain_missing_array"]

ATTRIBUTES = ("@stem", "@file", "@name")


def explain_missing_array(
    error: Exception, arguments: Mapping[str, Any], groups: str | None, side: SideTable | None
) -> None:
    """Add the argument that names the array, and a remedy, to an error about a missing array.

    Args:
        error: any error.
        arguments: arguments of the data module, by name.
        groups: the pattern of groups, if segments are groups.
        side: the side table, if any.
    """
    if not isinstance(error, H5KeyError) or error.key is None:
        return
    key, place, contents, hint, remedy = error.key, *error.args
    argument = argument_of(key, arguments)
    levels = key.split("/")
    n_levels = 0 if groups is None else groups.strip("/").count("/") + 1
    group, relative = "/".join(levels[:n_levels]), "/".join(levels[n_levels:])
    if argument is None and groups is not None and (argument := argument_of(relative, arguments)) is not None:
        contents, hint = (text.replace(f"'{group}/", "'") for text in (contents, hint))
        inner = relative.split("/")
        if fnmatchcase("/".join(inner[:n_levels]), groups.strip("/")) and len(inner) > n_levels:
            contents, hint = "", ""
            remedy = f"Names are relative to a group of segments.groups: pass {'/'.join(inner[n_levels:])!r}."
    if argument is not None and argument.startswith("table.on"):
        remedy += (
            near(key, ATTRIBUTES) if key.startswith("@") else " Name what lines are joined on: on={column: array}."
        )
    elif key == TARGET and argument is None and arguments.get("label") is not None:
        argument = f"{key!r}, in which label={arguments['label']!r} is searched,"
        remedy += " Or pass the target as y_key."
    elif side is not None and key in side.names:
        remedy += f" The table has the column {key!r}: pass 'table/{key}'."
    elif key.startswith("table/") and side is None and not hint:
        remedy += " For a column of a CSV or Parquet file, pass table too."
    elif (braces := re.search(r"\{\w+\}", key)) is not None:
        hint = ""
        remedy += f" {braces[0]} stands for nothing; {{split}} stands for train, val, test or predict."
    error.args = (place, contents, hint, remedy)
    error.argument = argument
