"""The constructor arguments of data modules: bundled and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from ..catalog import TARGET, checked_names
from ..errors import H5ValueError
from ..hdf5 import field_names
from ..options import (
    DistributedOptions,
    FileOptions,
    ShuffleOptions,
    StagingOptions,
    WorkerOptions,
)
from ..options.base import Options, check_callable, check_choice, check_flag, check_whole
from ..types import DTypeLike, Keys, PathLike

__all__ = [
    "SPLITS",
    "LoaderArguments",
    "SampleArguments",
    "Split",
    "argument_of",
    "parsed_fields",
    "picked",
]

Split = Literal["train", "val", "test", "predict"]
T = TypeVar("T")
_OPTIONS: dict[str, type[Options]] = {
    "shuffle": ShuffleOptions,
    "workers": WorkerOptions,
    "files": FileOptions,
    "distributed": DistributedOptions,
}
SPLITS: tuple[Split, ...] = ("train", "val", "test", "predict")


@dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments on batches, loading and ranks; see the data modules."""

    batch_size: int
    eval_batch_size: int | None
    drop_last: bool
    seed: int | None
    collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list", "pack"] | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool | Literal["auto"]
    prefetch_to_device: int
    shuffle: ShuffleOptions
    workers: WorkerOptions
    files: FileOptions
    distributed: DistributedOptions

    def __post_init__(self) -> None:
        check_whole(self.eval_batch_size, "eval_batch_size", 1)
        check_whole(self.seed, "seed", 0)
        check_whole(self.num_workers, "num_workers", 0, allow_none=False)
        check_whole(self.prefetch_factor, "prefetch_factor", 1)
        if self.pin_memory not in (True, False, "auto"):
            raise H5ValueError(f"pin_memory={self.pin_memory!r} was given. Pass True, False or 'auto'.")
        check_whole(self.prefetch_to_device, "prefetch_to_device", 0, allow_none=False)
        if self.prefetch_to_device and self.pin_memory is False:
            raise H5ValueError(
                f"prefetch_to_device={self.prefetch_to_device} was given with pin_memory=False; only copies from "
                "page-locked memory run beside the model. Remove pin_memory=False, or prefetch_to_device."
            )
        check_flag(self.drop_last, "drop_last")
        if not isinstance(self.collate_fn, str):
            check_callable(self.collate_fn, "collate_fn")
        else:
            check_choice(self.collate_fn, "collate_fn", ("stack", "pad", "list", "pack"))

    @property
    def collate_function(self) -> Callable[[Any], Any] | None:
        """The user's function that makes batches, if there is one."""
        return None if isinstance(self.collate_fn, str) else self.collate_fn

    @property
    def collate(self) -> Literal["stack", "pad", "list", "pack"] | None:
        """How samples of several shapes become a batch."""
        return self.collate_fn if isinstance(self.collate_fn, str) else None


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """The arguments on samples and their selection; see the data modules."""

    x_key: Keys | None
    y_key: Keys | None
    fields: Any
    x_dtype: DTypeLike
    y_dtype: DTypeLike
    transform: Callable[..., Any] | None
    target_transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    normalize: Mapping[str, Any] | PathLike | None
    with_index: bool
    table: Any
    decode: dict[str, Any] | None
    where: Any
    label: int | None
    valid_mask: str | None
    on_bad_file: Literal["raise", "skip"]

    def __post_init__(self) -> None:
        check_flag(self.with_index, "with_index")
        parsed_fields(self.fields)
        beside = {"x_key": self.x_key, "y_key": self.y_key, "y_dtype": self.y_dtype}
        beside["target_transform"] = self.target_transform
        for name, value in beside.items():
            if self.fields is not None and value is not None:
                raise H5ValueError(
                    f"fields cannot be combined with {name}. Pass fields for batches that are flat dicts, or x_key and "
                    "y_key for batches x or (x, y)."
                )


def parsed_fields(fields: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the argument ``fields`` as a mapping from batch keys to arrays, and the axes of the target if it has them.

    Args:
        fields: a list of arrays, or a mapping; None stays None.

    Raises:
        H5ValueError: the value is neither, or names an array twice.
    """
    if fields is None:
        return None, None
    if not isinstance(fields, Mapping):
        return {name: name for name in checked_names(fields, "fields")}, None
    keys, axes = {}, None
    for name, value in fields.items():
        key = value
        if isinstance(value, Mapping) and "layout" in value:
            if name != TARGET:
                raise H5ValueError(f"fields[{name!r}] has a layout, which only {TARGET!r} can have.")
            axes = value["layout"]
            key = {part: setting for part, setting in value.items() if part != "layout"}
            key = key.get("key", name) if set(key) <= {"key"} else key
        keys[str(name)] = key
    field_names(keys, "fields")  # raises for invalid names
    return keys, axes


def picked(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """Return a dataclass of arguments, from a constructor's arguments by name; others are ignored.

    Args:
        kind: a dataclass with a field for each argument; values of option objects are parsed.
        arguments: the constructor's arguments by name.

    Raises:
        H5ValueError: an argument is invalid.
    """
    values = {field.name: arguments[field.name] for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    options = {name: parser.parse(values[name], name) for name, parser in _OPTIONS.items() if name in values}
    if "files" in values and arguments.get("staging") is not None:
        options["files"] = _with_staging(options["files"], arguments["staging"])
    return kind(**values | options)


def _with_staging(files: Any, staging: Any) -> Any:
    """Return the argument ``files`` with the argument ``staging`` in it."""
    if files.staging is not None:
        raise H5ValueError("staging and files.staging are the same setting, and both were given. Pass only staging.")
    return replace(files, staging=StagingOptions.parse(staging, "staging"))


NAMING = ("x_key", "y_key", "fields", "valid_mask", "where", "split", "weights", "segments", "select", "table")
"""Arguments that name arrays."""


def argument_of(key: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the argument that names an array, in the form that a user would write; None if there is none.

    Args:
        key: the array.
        arguments: the arguments by name.
    """
    places = (_place_in_argument(arguments.get(name), key, name) for name in NAMING)
    return next((place for place in places if place is not None), None)


def _place_in_argument(value: Any, key: str, name: str) -> str | None:
    """Return the place of an array's name in an argument; None if the argument does not name it."""
    if isinstance(value, str):
        return f"{name}={value!r}" if value.strip("/") == key.strip("/") else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(f"{name}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        if name in ("where", "select") and any(isinstance(array, str) and array == key for array in value):
            return f"{key!r} of {name}"
        is_option = name in ("split", "weights", "segments", "table")
        parts = [(f"{name}.{entry}" if is_option else f"{name}[{entry!r}]", part) for entry, part in value.items()]
    elif isinstance(value, Sequence):
        return f"{key!r} of {name}" if key in value else None
    else:
        return None
    places = (_place_in_argument(part, key, part_name) for part_name, part in parts)
    return next((place for place in places if place is not None), None)
