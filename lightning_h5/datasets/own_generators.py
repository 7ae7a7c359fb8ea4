"""Random generators that a transform owns, and how they are seeded.

MONAI and Albumentations keep generators in their transforms, and so do many classes of users. Forked workers begin with
the same state of them, and a resumed run with that of a new process. So they are seeded for each sample.
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

MAX_OBJECTS = 1000  # that are looked at inside of a transform

# Objects that draw for something else than samples, and may be reachable from a transform.
_OTHERS = {"LightningModule", "LightningDataModule", "Trainer", "Fabric", "Dataset", "DataLoader", "Sampler"}
_PLAIN = (str, bytes, int, float, complex, type, types.ModuleType, np.ndarray, np.generic, torch.Tensor, torch.dtype)


def own_generators(transform: Callable[..., Any]) -> tuple[Callable[[int], object], ...]:
    """Return functions that seed the generators inside a transform, in an order that is the same in all processes.

    They are generators of Python, NumPy and torch, and objects with ``set_random_state(seed=...)`` (MONAI) or
    ``set_random_seed(seed)`` (Albumentations), which seed what is inside of them. They are looked for in the transform,
    in its attributes (so in the members of a ``Compose``), and in what functions refer to.

    Args:
        transform: the transform.
    """
    seeders: list[Callable[[int], object]] = []
    objects: list[Any] = [transform]
    seen: dict[int, Any] = {}  # objects are kept, so that no other one gets the id of one
    while objects and len(seen) < MAX_OBJECTS:
        one = objects.pop(0)
        if id(one) in seen or isinstance(one, _PLAIN) or _OTHERS & {kind.__name__ for kind in type(one).__mro__}:
            continue
        seen[id(one)] = one
        if (seeder := _seeder(one)) is not None:
            seeders.append(seeder)
        elif one is not torch.default_generator:
            objects += _referenced_objects(one)
    return tuple(seeders)


def _seeder(one: Any) -> Callable[[int], object] | None:
    """Return a function that seeds an object; None if it is no generator, or torch's global one."""
    if one is torch.default_generator or isinstance(one, random.SystemRandom):
        return None
    if isinstance(one, np.random.Generator):
        return functools.partial(_seed_numpy, one)
    if isinstance(one, torch.Generator):
        return one.manual_seed
    if isinstance(one, random.Random | np.random.RandomState):
        return one.seed
    if callable(method := getattr(one, "set_random_seed", None)):
        return functools.partial(method)
    method = getattr(one, "set_random_state", None)
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


def _referenced_objects(one: Any) -> Iterator[Any]:
    """Yield what an object refers to, in an order that is the same in all processes."""
    if isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, types.MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, types.FunctionType):
        yield from _referred_to(one)
    elif isinstance(one, list | tuple | dict):
        yield from list(one.values() if isinstance(one, dict) else one)[:MAX_OBJECTS]
    elif not isinstance(one, types.BuiltinFunctionType):
        yield from list(getattr(one, "__dict__", {}).values())
        for name in ("__call__", "forward"):
            if isinstance(method := inspect.getattr_static(type(one), name, None), types.FunctionType):
                yield method


def _referred_to(function: types.FunctionType) -> Iterator[Any]:
    """Yield the variables outside of a function that it uses."""
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
