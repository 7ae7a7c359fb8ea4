"""Loops over numbers for which NumPy takes several passes, compiled by Numba if it is installed, and kept on disk.

A compiled loop is one call that runs without the interpreter's lock: threads that decode do not wait for each other
between its passes, and memory is gone through once.

Compiling takes up to two seconds for each loop and dtype. The machine code is kept where Numba keeps its own: in
`NUMBA_CACHE_DIR`, or `__pycache__` next to this package's files, or the user's cache folder if that is read-only.
Numba's `cache=True` looks at the file of the function alone, which misses a change of what the function calls, and
trusts what is on disk. So the files here are named by all that decides the machine code, and each has a checksum: one
that is damaged, or that another version wrote, is not used, and the loop is compiled.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

__all__ = ["c_call", "compiled"]

_Given = ParamSpec("_Given")
_Gives = TypeVar("_Gives")

DIGEST_BYTES = 32
COMPILERS = ("numba", "llvmlite", "numpy")  # what they compute is known by their versions


def compiled(loop: Callable[_Given, _Gives]) -> Callable[_Given, _Gives] | None:
    """A loop as machine code, compiled or loaded from disk when it is first called with arrays of some dtype.

    Args:
        loop: a function of arrays and numbers, in the part of Python that Numba knows. It must not go beyond the
            arrays' ends: nothing checks that. Addresses of C functions have to be arguments (see ``c_call``): constants
            would be those of another process when the loop is loaded.

    Returns:
        The same function; None if Numba is not installed, does not go with the NumPy that is, or is turned off.
    """
    numba = _numba()
    if numba is None:
        return None
    machine = numba.njit(nogil=True)(loop)
    with suppress(Exception):  # no folder to write to, or other internals than those of the versions tested
        machine._cache = _disk_cache()(machine)
    found: Callable[_Given, _Gives] = machine
    return found


@cache
def _numba() -> Any:
    try:
        numba = importlib.import_module("numba")
    except ImportError:  # it looks at NumPy's version when it is imported
        return None
    return None if numba.config.DISABLE_JIT else numba


@cache
def c_call() -> Any:
    """Return ``call(address, arguments)``, which calls a C function from compiled code.

    ``address`` is an int, ``arguments`` a tuple of ints of the widths that the function takes. It returns an int64, of
    which a function that returns less sets the lower bits alone.
    """
    numba = _numba()
    ir, unpack = importlib.import_module("llvmlite.ir"), importlib.import_module("numba.core.cgutils").unpack_tuple

    def call(context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pieces = unpack(builder, values[1])
            kind = ir.FunctionType(ir.IntType(64), [piece.type for piece in pieces])
            return builder.call(builder.inttoptr(values[0], kind.as_pointer()), pieces)

        return numba.types.int64(numba.types.int64, arguments), generate

    return numba.extending.intrinsic(call)


# On disk ---------------------------------------------------------------------------------------------------------


@cache
def _disk_cache() -> Any:
    """The class of what Numba asks for machine code before it compiles, and gives it afterwards."""
    caching = importlib.import_module("numba.core.caching")
    dumps = importlib.import_module("numba.core.serialize").dumps

    class DiskCache(caching.NullCache):  # type: ignore[misc, name-defined]  # Numba has no types
        """The machine code of one loop.

        Args:
            machine: the loop, as Numba has it.
        """

        def __init__(self, machine: Any) -> None:
            self._numba = caching.CompileResultCacheImpl(machine.py_func)
            self._folder = self._numba.locator.get_cache_path()
            self._meaning = _meaning_of(machine)

        @property
        def cache_path(self) -> str:
            """The folder."""
            return str(self._folder)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            """What was compiled for these arguments; None if it is not on disk, or damaged."""
            target_context.refresh()  # the machine code may call what is registered there
            with suppress(Exception):
                path = self._path(sig, target_context.codegen())
                data = _checked(path)
                return None if data is None else self._numba.rebuild(target_context, pickle.loads(data))
            return None

        def save_overload(self, sig: Any, data: Any) -> None:
            """Keeps what was compiled for these arguments; a full or read-only disk keeps nothing."""
            with suppress(Exception):
                if not data.library.has_dynamic_globals:
                    _write(self._path(sig, data.codegen), dumps(self._numba.reduce(data)))

        def _path(self, sig: Any, codegen: Any) -> str:
            key = hashlib.sha256(repr((self._meaning, sig, codegen.magic_tuple(), _versions())).encode()).hexdigest()
            return os.path.join(self._folder, f"{self._numba.filename_base}-{key[:32]}.machine")

    return DiskCache


def _checked(path: str) -> bytes | None:
    """What was written to a file, if all of it is there."""
    with open(path, "rb") as file:
        digest, data = file.read(DIGEST_BYTES), file.read()
    return data if digest == _digest(path, data) else None


def _write(path: str, data: bytes) -> None:
    """Writes a file that others find whole or not at all, however many write it at a time."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd, name = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".tmp")
    try:
        with open(fd, "wb") as file:
            file.write(_digest(path, data) + data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest(path: str, data: bytes) -> bytes:
    return hashlib.sha256(os.path.basename(path).encode() + b"\0" + data).digest()


@cache
def _versions() -> tuple[Any, ...]:
    """What decides the machine code besides the loop, its arguments and the processor."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    settings = {
        name: settings[name] for name in sorted(settings) if name not in ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS")
    }
    versions = [importlib.import_module(name).__version__ for name in COMPILERS]
    return platform.python_implementation(), platform.python_version(), *versions, settings


def _meaning_of(value: Any) -> Any:
    """All that decides what a loop computes, as plain values: its code, and that of all it calls.

    Raises:
        TypeError: it uses something of which that is not known.
    """
    if hasattr(value, "targetoptions"):  # compiled, too
        return [repr(sorted(value.targetoptions.items())), _meaning_of(value.py_func)]
    if hasattr(value, "_defn"):  # what `c_call` gives
        return _meaning_of(value._defn)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, tuple | frozenset):
        return [_meaning_of(each) for each in (value if isinstance(value, tuple) else sorted(value, key=repr))]
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | BuiltinFunctionType) or getattr(value, "__module__", "").split(".")[0] in COMPILERS:
        return value.__module__, value.__qualname__
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, value.co_varnames, [_meaning_of(each) for each in value.co_consts]
    if isinstance(value, FunctionType):
        used = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_meaning_of(each) for each in (value.__code__, *used, *used.values(), *cells, value.__defaults__)]
    raise TypeError(f"it is not known what {value!r} computes")


def _names(code: CodeType) -> list[str]:
    """Names that code uses, in it and in the functions that it defines."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each)]
    return sorted({*code.co_names, *inner})
