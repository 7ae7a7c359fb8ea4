"""Find and seed the random generators that a transform owns.

Transforms of MONAI and Albumentations, and many classes of users, keep generators. Forked workers start with the same
state of a generator, and a resumed run with the state of a new process. So generators are seeded for each sample.
"""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["own_generators"]

MAX_OBJECTS = 1000  # largest number of objects to search inside a transform

# Classes that may be reachable from a transform, and do not draw for samples.
_NOT_SEARCHED = {"LightningModule", "LightningDataModule", "Trainer", "Fabric", "Dataset", "DataLoader", "Sampler"}
_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, np.ndarray, np.generic, torch.Tensor, torch.dtype)


def own_generators(transform: Callable[..., Any]) -> tuple[Callable[[int], object], ...]:
    """Return functions that seed the generators inside a transform, in an order that is the same in all processes.

    Generators are those of Python, NumPy and torch, and objects with ``set_random_state(seed=...)`` (MONAI) or
    ``set_random_seed(seed)`` (Albumentations), which seed their own members. The search covers the transform, its
    attributes (and so the members of a ``Compose``), and the variables and arguments of functions.

    Args:
        transform: the transform.
    """
    seeders: list[Callable[[int], object]] = []
    objects: list[Any] = [transform]
    visited: dict[int, Any] = {}  # by id; keeping the objects keeps their ids unique
    while objects and len(visited) < MAX_OBJECTS:
        item = objects.pop(0)
        names = {kind.__name__ for kind in type(item).__mro__}
        if id(item) in visited or isinstance(item, _PLAIN) or _NOT_SEARCHED & names:
            continue
        visited[id(item)] = item
        if (seeder := _seeder(item)) is not None:
            seeders.append(seeder)
        elif item is not torch.default_generator:
            objects += _referenced_objects(item)
    return tuple(seeders)


def _seeder(item: Any) -> Callable[[int], object] | None:
    """Return a function that seeds an object; None if it is no generator, or torch's global one."""
    if item is torch.default_generator or isinstance(item, random.SystemRandom):
        return None
    if isinstance(item, np.random.Generator):
        return functools.partial(_seed_numpy, item)
    if isinstance(item, torch.Generator):
        return item.manual_seed
    if isinstance(item, random.Random | np.random.RandomState):
        return item.seed
    if callable(method := getattr(item, "set_random_seed", None)):
        return functools.partial(method)
    method = getattr(item, "set_random_state", None)
    return functools.partial(_seed_by_name, method) if callable(method) and _takes_seed(method) else None


def _seed_numpy(generator: np.random.Generator, seed: int) -> None:
    bits: Any = generator.bit_generator
    bits.state = type(bits)(seed).state


def _seed_by_name(method: Callable[..., object], seed: int) -> None:
    method(seed=seed)


def _takes_seed(method: Callable[..., object]) -> bool:
    try:
        return "seed" in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False


def _referenced_objects(item: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to, in an order that is the same in all processes."""
    if isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, types.FunctionType):
        yield from _outer_variables(item)
    elif isinstance(item, list | tuple | dict):
        yield from list(item.values() if isinstance(item, dict) else item)[:MAX_OBJECTS]
    elif not isinstance(item, types.BuiltinFunctionType):
        yield from list(getattr(item, "__dict__", {}).values())
        for name in ("__call__", "forward"):
            if isinstance(method := inspect.getattr_static(type(item), name, None), types.FunctionType):
                yield method


def _outer_variables(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of variables outside a function that it uses."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    codes = [function.__code__]
    while codes:
        code = codes.pop(0)
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
