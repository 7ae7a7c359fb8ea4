"""Functions that users pass, such as transforms: their random draws, and the errors that they raise.

Draws depend only on the seed, the epoch, and the row or batch. A transform may draw from the global stream of Python,
NumPy or torch. Without this module it would draw the same on every rank after ``seed_everything``, the same in each
epoch in persistent workers, and differently after a resume or with more workers. So the transforms of a batch run on
streams that restart with each batch. A transform with a parameter for a generator gets one for each row. Generators
that a transform owns are seeded for each row.
"""

from __future__ import annotations

import inspect
import pickle
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ..errors import H5Error, named, stop_iteration
from ..order import stream
from ..types import Draws
from .own_generators import own_generators

__all__ = [
    "AskedFor",
    "Samples",
    "WorkerFailure",
    "add_note",
    "asked_for",
    "fresh_draws",
    "generators",
    "note_rows",
    "own_streams",
    "rows_text",
    "seed_streams",
]

ROW, BATCH, STREAMS, OWN_OF_ROW, OWN_OF_BATCH = 3, 4, 5, 20, 21  # purposes of the random streams
_KINDS = ("rng", "generator")


class AskedFor(NamedTuple):
    """The generators that a transform draws from.

    Attributes:
        names: parameters that accept a generator: ``rng`` (NumPy), ``generator`` (torch).
        own: functions that seed the transform's own generators (see ``own_generators``).
    """

    names: tuple[str, ...] = ()
    own: tuple[Callable[[int], object], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.own)


def asked_for(transform: Callable[..., Any] | None) -> AskedFor:
    """Return the generators that a transform requests by parameters without a value, and the generators it owns."""
    if transform is None:
        return AskedFor()
    try:
        signature = inspect.signature(transform.forward if isinstance(transform, torch.nn.Module) else transform)
    except (TypeError, ValueError):  # C functions may have no signature
        return AskedFor()
    return AskedFor(
        tuple(name for name in _KINDS if _is_open(signature.parameters.get(name))), own_generators(transform)
    )


def _is_open(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and (parameter.default is None or parameter.default is parameter.empty)


def generators(request: AskedFor, draws: Draws, row: int | None = None) -> dict[str, Any]:
    """Return the requested generators as keyword arguments, and seed the generators that the transform owns.

    Args:
        request: the result of ``asked_for``.
        draws: seed, epoch and position of the batch.
        row: the row that draws; None for the whole batch.
    """
    if not request:
        return {}
    place, purpose, of_own = (draws.position, BATCH, OWN_OF_BATCH) if row is None else (row, ROW, OWN_OF_ROW)
    if request.own:
        seeds = stream(draws.seed, draws.epoch, of_own, place).random_raw(len(request.own)) >> np.uint64(32)
        for seed_generator, seed in zip(request.own, seeds.tolist(), strict=True):
            seed_generator(seed)
    arguments: dict[str, Any] = {}
    for name in request.names:
        bits = stream(draws.seed, draws.epoch, purpose, place)
        arguments[name] = np.random.Generator(bits) if name == "rng" else _torch_generator(bits)
    return arguments


def fresh_draws() -> Draws:
    """Return draws for rows outside of any plan, from torch's stream; they differ each time."""
    return Draws(int(torch.randint(2**62, ())), 0, 0)


def seed_streams(draws: Draws) -> None:
    """Restart Python's, NumPy's and torch's global streams (on the CPU) for one batch."""
    words = stream(draws.seed, draws.epoch, STREAMS, draws.position).random_raw(4)
    torch.default_generator.manual_seed(int(words[0]))  # torch.manual_seed would also seed the GPU
    np.random.seed(words[1:3].view(np.uint32))  # noqa: NPY002  # users' transforms draw from the global stream
    random.seed(int(words[3]))


@contextmanager
def own_streams(draws: Draws) -> Iterator[None]:
    """Run a block with streams of one batch; afterwards the streams continue unchanged. Takes 0.1 ms."""
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


class Samples(list[Any]):
    """The samples of a batch, for a user's ``collate_fn``.

    Attributes:
        describe: returns their rows as text.
    """

    def __init__(self, samples: list[Any], describe: Callable[[], str]) -> None:
        super().__init__(samples)
        self.describe = describe


def note_rows(error: Exception, argument: str, function: Callable[..., Any], describe: Callable[[], str]) -> None:
    """Add a note to an error of a user's function, with the function and the rows.

    Type, arguments and traceback do not change. Raise the error again after that, with a bare ``raise``.

    Args:
        error: the error.
        argument: the argument that the function was passed as.
        function: the function.
        describe: returns the rows as text.

    Raises:
        RuntimeError: the error is a ``StopIteration``, which a loop over a loader takes for the end of the epoch.
    """
    if isinstance(error, StopIteration):
        raised = stop_iteration(argument, function)
        add_note(raised, f"by {named(argument, function)}", describe)
        raise raised from error
    add_note(error, f"by {named(argument, function)}", describe)


def add_note(error: Exception, how: str, describe: Callable[[], str]) -> None:
    """Add a note to an error, with the step that raised it and the rows.

    Args:
        error: the error.
        how: the step, such as ``while stacking``.
        describe: returns the rows as text.
    """
    rows = "rows that cannot be named"
    with suppress(Exception):  # another error must not hide this one
        rows = describe()
    error.add_note(f"Raised {how} for {rows}.")


class _WorkerTraceback(Exception):  # noqa: N818  # what a reader sees of it is the name, as of Python's pools
    """The traceback of a worker process as text: the cause of the error that is raised in the main process."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


class WorkerFailure:
    """An error as a value, which a worker process returns in place of a batch.

    torch creates a new exception from the text of a worker's error. That fails for classes with other arguments, and
    ends in a timeout for errors that cannot be pickled.

    Args:
        error: the error.
    """

    def __init__(self, error: Exception) -> None:
        worker = get_worker_info()
        self._worker = None if worker is None else worker.id
        self._text = "".join(traceback.format_exception(error))
        self._shown = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        self._pickled = _pickled(error)

    def raise_again(self) -> NoReturn:
        """Raise the error in the main process.

        Raises:
            Exception: of the same type, with the same arguments and notes; a ``RuntimeError`` if its class is unknown
                in this process. The worker's traceback is its cause, except for errors of this package.
        """
        try:
            error = None if self._pickled is None else _unpickled(self._pickled)
        except Exception:
            error = None
        if error is None:
            error = RuntimeError(self._shown)
        error.add_note(f"In worker process {self._worker}.")
        raise error from None if isinstance(error, H5Error) else _WorkerTraceback(self._text)


def _pickled(error: Exception) -> bytes | None:
    """Return the error as bytes for ``_unpickled``; None if it cannot be pickled."""
    state = {name: value for name, value in vars(error).items() if _is_picklable(value)}
    args = error.args if _is_picklable(error.args) else (str(error),)
    for form in (error, (type(error), args, state)):
        with suppress(Exception):
            pickled = pickle.dumps(form)
            if _is_like(_unpickled(pickled), error):
                return pickled
    return None


def _unpickled(pickled: bytes) -> Exception:
    form: Any = pickle.loads(pickled)
    return form if isinstance(form, Exception) else _rebuilt(*form)


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], state: Mapping[str, Any]) -> Exception:
    """Return an error of a class that cannot be called with the arguments in ``args``."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def _is_like(left: Exception, right: Exception) -> bool:
    """Return whether two errors have the same type and text, except for addresses of objects."""
    kinds = [[type(error), *map(type, error.args)] for error in (left, right)]
    return kinds[0] == kinds[1] and _ADDRESS.sub("", str(left)) == _ADDRESS.sub("", str(right))


_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def _is_picklable(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def rows_text(places: list[tuple[str, int]], n_rows: int) -> str:
    """Return rows of files as text, grouped by file, such as ``rows 3, 4 of 'a.h5' and 2 more``.

    Args:
        places: the file and the row inside it, of all rows or of the first ones.
        n_rows: number of all rows.
    """
    by_file: dict[str, list[str]] = {}
    for path, row in places:
        by_file.setdefault(path, []).append(str(row))
    shown = ", ".join(f"{', '.join(rows)} of {path!r}" for path, rows in by_file.items())
    rest = f" and {n_rows - len(places)} more" if n_rows > len(places) else ""
    return f"row{'s' if n_rows != 1 else ''} {shown}{rest}"
