"""Explains errors of a model that computes in another dtype than the file has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["explain_dtype_error"]

_SAYS_DTYPES = re.compile(
    r"have the same dtype|should be the same|expected scalar type|expected target dtype|match weight dtype",
    re.IGNORECASE,
)
"""What torch's operations say if two dtypes do not go together, in either order."""

_FOUND = re.compile(r"found dtype (\w+) but expected (\w+)", re.IGNORECASE)
"""What losses say: the dtype of the target, and that of the prediction."""

_SAYS_ONE = re.compile(
    r"can't be cast to the desired output type|with (?:a|two) bool tensors?|mixed dtype|not implemented for '"
)
"""What losses and normalizations say without naming both dtypes; which array it is, their arguments show."""

_NAMES = {
    "bool": ("bool",),
    "uint8": ("byte", "unsigned char", "uint8"),
    "uint16": ("short unsigned int", "uint16"),
    "uint32": ("unsigned int", "uint32"),
    "uint64": ("long unsigned int", "uint64"),
    "int8": ("char", "signed char", "int8"),
    "int16": ("short", "short int", "int16"),
    "int32": ("int", "int32"),
    "int64": ("long", "long int", "long long", "int64"),
    "float16": ("half", "c10::half", "float16"),
    "float32": ("float", "float32"),
    "float64": ("double", "float64"),
}
"""What torch calls a dtype, in C++, in Python and in names of tensor types."""

_WORD = re.compile(
    r"((?:short |long )?unsigned int|unsigned char|signed char|long long|long int|short int|[a-z0-9]+)\b", re.IGNORECASE
)


class _Mismatch(NamedTuple):
    """A dtype that an array may have come in, and the one that the model computes in."""

    arguments: tuple[str, ...]  # of the arrays that it may be, most likely first
    name: str
    wanted: str


def explain_dtype_error(
    error: BaseException, stored: Mapping[tuple[str, str], npt.DTypeLike], computes_in: Collection[str] = ()
) -> bool:
    """Add a note to an error of torch that a dtype of the batch caused.

    The error must be one of dtypes that do not go together, and name that of an array whose dtype is the file's.

    Args:
        error: what a step raised.
        stored: for each array that comes as it is stored, by argument (``x_dtype`` or ``y_dtype``) and key, its dtype.
        computes_in: dtypes of the model's parameters; an array that has one of them is not the cause.

    Returns:
        Whether a note was added.
    """
    if not isinstance(error, RuntimeError | ValueError):
        return False
    for mismatch in _mismatches(error):
        for argument in () if mismatch.name in computes_in else mismatch.arguments:
            for (asked, key), dtype in stored.items():
                if asked == argument and np.dtype(dtype).newbyteorder("=").name == mismatch.name:
                    error.add_note(
                        f"lightning_h5: {key!r} comes as {mismatch.name} since the file has it so, and this model "
                        f"computes in {mismatch.wanted}. Pass {argument}={mismatch.wanted!r} to the data module."
                    )
                    return True
    return False


def _mismatches(error: BaseException) -> Iterator[_Mismatch]:
    """What the error may mean, most likely first."""
    text = f"{error}"
    if found := _FOUND.search(text):
        pair = list(_dtypes_in(f"{found[1]} {found[2]}"))
        if len(pair) == 2:
            yield _Mismatch(("y_dtype", "x_dtype"), *pair)
    elif _SAYS_DTYPES.search(text):
        named = list(dict.fromkeys(_dtypes_in(text)))
        arguments = ("y_dtype",) if "target" in text else ("x_dtype", "y_dtype")
        for name in named:
            for wanted in [each for each in named if each != name][:1]:  # the first of several that do
                yield _Mismatch(arguments, name, wanted)
    elif _SAYS_ONE.search(text) and (frame := _innermost(error)) is not None:
        given = {
            name: f"{value.dtype}".removeprefix("torch.")
            for name, value in frame.f_locals.items()
            if isinstance(value, torch.Tensor)
        }
        pair = [given.get("target", ""), given.get("input", "")]  # of a loss
        arguments = ("y_dtype",)
        if "target" not in given:
            pair, arguments = [given.get("input", ""), given.get("weight", "")], ("x_dtype",)  # of a layer
        if pair[0] != pair[1] and _NAMES.keys() >= set(pair):
            yield _Mismatch(arguments, *pair)


def _innermost(error: BaseException) -> FrameType | None:
    """The frame that raised, if it is of ``torch.nn.functional``."""
    frame, trace = None, error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
    is_torch = frame is not None and PurePath(frame.f_code.co_filename).parts[-3:] == ("torch", "nn", "functional.py")
    return frame if is_torch else None


def _dtypes_in(text: str) -> Iterator[str]:
    """Names of the dtypes that a message names, in their order."""
    for word in _WORD.findall(text):
        called = word.lower().removesuffix("tensor")
        yield from (name for name, calls in _NAMES.items() if called in calls)
