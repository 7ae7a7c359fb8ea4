"""Settings to paste: the arguments of a data module as a call, and as a configuration of LightningCLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import Any

import yaml

from ..hdf5 import keys_in

__all__ = ["python_of", "yaml_of"]

OPTIONS = ("split", "shuffle", "files", "segments", "window")  # arguments that have fields


def python_of(datamodule: str, settings: Mapping[str, Any]) -> str:
    """Return the call of a data module, a line for each argument."""
    return "\n".join([f"{datamodule}(", *(f"    {name}={value!r}," for name, value in settings.items()), ")"])


def yaml_of(datamodule: str, settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Return the ``data`` part of a configuration.

    Args:
        datamodule: the class.
        settings: its arguments.
        comments: sentences above it.
    """
    comments = [*comments]
    data = {"data": {"class_path": datamodule, "init_args": _yaml_forms(settings, comments)}}
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    printable = ("".join(c if c.isprintable() else " " for c in comment) for comment in comments)
    lines = [line for comment in printable for line in wrap(comment, 78, break_long_words=False)]
    return "\n".join([*(f"# {line}" for line in lines), text.rstrip()])


def _yaml_forms(settings: Mapping[str, Any], comments: list[str]) -> dict[str, Any]:
    """Return settings as a configuration can have them; adds a comment for each that it cannot."""
    forms: dict[str, Any] = {}
    for name, value in settings.items():
        if name in OPTIONS and isinstance(value, Mapping):
            if fields := _yaml_forms(value, comments):
                forms[name] = fields
        elif name.endswith("_key") and any("{split}" in key for key in keys_in(value)):
            comments.append(
                f"{name} is left out: {{split}} in {value!r} would be replaced by a split's name. Rename the array."
            )
        elif not isinstance(value, str) or _stays_text(value):
            forms[name] = value
        elif name == "train_path":
            forms[name] = [value]
        elif _stays_text(f"/{value}"):
            forms[name] = f"/{value}"  # the same array
        else:
            comments.append(f"{name} is left out: a configuration cannot name {value!r}. Use Python: {name}={value!r}.")
    return forms


def _stays_text(text: str) -> bool:
    """Return whether jsonargparse, which reads a string of YAML once more as YAML, leaves it a string."""
    try:
        read = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # neither YAML nor a date
        return True
    if isinstance(read, dict):
        return text in (f"{key}:" for key in read)
    return read is not None and not isinstance(read, list)


def _quoted(dumper: Any, text: str) -> Any:
    """Write a string, in quotes if YAML 1.2 reads it as a number, such as 1e3, which PyYAML leaves plain."""
    style = None
    for read in (float, lambda digits: int(digits, base=0)):
        with suppress(ValueError):
            read(text.replace("_", ""))
            style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})
_Dumper.add_representer(str, _quoted)
