"""Random draws of transforms that depend on the seed, the epoch and the row or batch, and on nothing else.

Who draws from Python's, NumPy's or torch's global stream would draw the same on every rank after ``seed_everything``,
the same again each epoch in persistent workers, and something else after a resume or with more workers. So a batch's
transforms run on streams that begin anew with each batch. Who needs draws that follow the row, whatever batch it is in,
asks for a generator of the row's own.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..sampling import stream
from ..types import Draws

__all__ = ["asked_for", "fresh_draws", "generators", "own_streams", "seed_streams"]

ROW, BATCH, STREAMS = 3, 4, 5  # purposes of the random streams
_KINDS = ("rng", "generator")


def asked_for(transform: Callable[..., Any] | None) -> tuple[str, ...]:
    """Which generators a transform asks for, by a parameter without a value: ``rng`` (NumPy), ``generator`` (torch)."""
    if transform is None:
        return ()
    try:
        found = inspect.signature(transform.forward if isinstance(transform, torch.nn.Module) else transform)
    except (TypeError, ValueError):  # written in C: it has no signature to ask with
        return ()
    return tuple(name for name in _KINDS if _is_open(found.parameters.get(name)))


def _is_open(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and (parameter.default is None or parameter.default is parameter.empty)


def generators(names: tuple[str, ...], draws: Draws, row: int | None = None) -> dict[str, Any]:
    """The generators that were asked for, as keyword arguments.

    Args:
        names: what ``asked_for`` gave.
        draws: what decides the batch's draws.
        row: the row whose draws these are; None for the batch's.
    """
    if not names:
        return {}
    place, purpose = (draws.position, BATCH) if row is None else (row, ROW)
    made: dict[str, Any] = {}
    for name in names:
        bits = stream(draws.seed, draws.epoch, purpose, place)
        made[name] = np.random.Generator(bits) if name == "rng" else _torch_generator(bits)
    return made


def fresh_draws() -> Draws:
    """Draws for rows that no plan asked for, from torch's stream: others each time."""
    return Draws(int(torch.randint(2**62, ())), 0, 0)


def seed_streams(draws: Draws) -> None:
    """Begins Python's, NumPy's and torch's global streams (on the CPU) anew, for one batch."""
    words = stream(draws.seed, draws.epoch, STREAMS, draws.position).random_raw(4)
    torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed would reach the GPU's stream as well
    np.random.seed(words[1:3].view(np.uint32))  # noqa: NPY002  # users' transforms draw from the global stream
    random.seed(int(words[3]))


@contextmanager
def own_streams(draws: Draws) -> Iterator[None]:
    """The same for a while: afterwards the streams go on as if nothing had been drawn. Takes 0.1 ms."""
    state = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()  # noqa: NPY002
    seed_streams(draws)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.default_generator.set_state(state[2])


def _torch_generator(bits: np.random.Philox) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(int(bits.random_raw()))
    return generator
