"""What was chosen for a data module, as its arguments and as YAML to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import Any

import yaml

from ..hdf5 import keys_in

OPTION_FIELDS = {
    "val_fraction": ("split", "val_fraction"),
    "group_key": ("split", "group_key"),
    "stratify_key": ("split", "stratify_key"),
    "shuffle_bytes": ("shuffle", "buffer"),
    "mmap": ("files", "mmap"),
}
"""Choices that are fields of an argument."""
OPTIONS = {argument for argument, _ in OPTION_FIELDS.values()}


def make_settings(**choices: Any) -> dict[str, Any]:
    """Return the arguments of a data module for what was chosen; the only place that knows their form.

    Args:
        choices: ``train_path``, ``x_key``, ``y_key``, ``x_dtype``, ``y_dtype``, ``val_fraction``, ``group_key``,
            ``stratify_key``, ``batch_size``, ``sample``, ``mmap``, ``shuffle_bytes`` and ``num_workers``; those that
            are None are left out.
    """
    first = ("train_path", "x_key", "y_key")
    ordered = {name: choices.get(name) for name in first} | choices
    settings: dict[str, Any] = {}
    for name, value in ordered.items():
        if value is not None:
            argument, field = OPTION_FIELDS.get(name, (name, None))
            settings[argument] = value if field is None else settings.get(argument, {}) | {field: value}
    if set(settings.get("split", ())) == {"val_fraction"}:
        settings["split"] = settings["split"]["val_fraction"]
    return settings


def yaml_of(datamodule: str, settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Return the ``data`` part of a configuration.

    Args:
        datamodule: the class.
        settings: its arguments, of ``make_settings``.
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
    except (yaml.YAMLError, ValueError):  # no YAML, no date
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
