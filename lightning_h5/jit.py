"""Compile loops with Numba, if it is installed, and keep the machine code on disk.

A compiled loop is one call that runs without the interpreter's lock, with one pass over memory. NumPy would need
several passes, and threads that decode would wait for each other between the passes.

Compiling takes up to two seconds for each loop and dtype. The machine code is kept in Numba's own folder:
`NUMBA_CACHE_DIR`, `__pycache__` next to this package's files, or the user's cache folder if `__pycache__` is read-only.
Numba's `cache=True` checks only the file of the function: it misses changes of called functions, and trusts files on
disk. So the file names of this module contain a hash of everything that the machine code depends on, and each file
has a checksum: files that are damaged, or of another version, are not used.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from .kept_files import read_kept, write_kept

__all__ = ["c_call", "compiled"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

NAMED = "by meaning"  # how functions in the machine code are named
COMPILERS = ("numba", "llvmlite", "numpy")  # their versions are part of the cache key


def compiled(loop: Callable[_Args, _Result]) -> Callable[_Args, _Result] | None:
    """Return a loop as machine code, compiled or loaded from disk when it is first called with arrays of some dtype.

    Args:
        loop: a function of arrays and numbers, in the part of Python that Numba supports. Array bounds are not checked.
            Addresses of C functions have to be arguments (see ``c_call``): a constant would be the address in another
            process when the loop is loaded.

    Returns:
        The compiled function; None if Numba is missing, turned off, or does not support the installed NumPy.
    """
    numba = _numba()
    if numba is None:
        return None
    with suppress(TypeError):  # then it is not kept on disk either
        _name_by_meaning(loop)
    machine = numba.njit(nogil=True)(loop)
    with suppress(Exception):  # no writable folder, or a Numba version with other internals
        machine._cache = _disk_cache()(machine)
    function: Callable[_Args, _Result] = machine
    return function


@cache
def _numba() -> Any:
    try:
        numba = importlib.import_module("numba")
    except ImportError:  # also raised for an unsupported NumPy
        return None
    return None if numba.config.DISABLE_JIT else numba


@cache
def c_call() -> Any:
    """Return ``call(address, arguments)``, which calls a C function from compiled code.

    ``address`` is an int, ``arguments`` a tuple of ints of the widths of the function's parameters. It returns an
    int64; only its lower bits are valid if the function returns a smaller type. None if nothing can be compiled.
    """
    if (numba := _numba()) is None:
        return None
    ir, unpack = importlib.import_module("llvmlite.ir"), importlib.import_module("numba.core.cgutils").unpack_tuple

    def call(context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pieces = unpack(builder, values[1])
            kind = ir.FunctionType(ir.IntType(64), [piece.type for piece in pieces])
            return builder.call(builder.inttoptr(values[0], kind.as_pointer()), pieces)

        return numba.types.int64(numba.types.int64, arguments), generate

    return numba.extending.intrinsic(call)


def _name_by_meaning(loop: Any) -> None:
    """Give a function a name that no other code has.

    Numba names machine code by the function's name and a number, which begins at 1 in each process. Code from disk has
    the numbers of another process: two loops of one name could have the same one, and LLVM would link the first of them
    where the second is called.
    """
    meaning = hashlib.sha256(repr(_meaning_of(loop)).encode()).hexdigest()[:16]
    if meaning not in loop.__qualname__:
        loop.__qualname__ += f"_{meaning}"


# On disk ---------------------------------------------------------------------------------------------------------


@cache
def _disk_cache() -> Any:
    """Return the class that Numba asks for machine code before it compiles, and passes it to afterwards."""
    caching = importlib.import_module("numba.core.caching")
    dumps = importlib.import_module("numba.core.serialize").dumps

    class DiskCache(caching.NullCache):  # type: ignore[misc, name-defined]  # Numba has no types
        """The machine code of one loop.

        Args:
            machine: Numba's dispatcher of the loop.
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
            """Return the machine code for these arguments; None if it is missing on disk, or damaged."""
            target_context.refresh()  # registers functions that the machine code may call
            with suppress(Exception):
                path = self._path(sig, target_context.codegen())
                data = read_kept(path)
                return None if data is None else self._numba.rebuild(target_context, pickle.loads(data))
            return None

        def save_overload(self, sig: Any, data: Any) -> None:
            """Write the machine code for these arguments; errors of the disk are ignored."""
            with suppress(Exception):
                if not data.library.has_dynamic_globals:
                    write_kept(self._path(sig, data.codegen), dumps(self._numba.reduce(data)))

        def _path(self, sig: Any, codegen: Any) -> str:
            key = hashlib.sha256(
                repr((NAMED, self._meaning, sig, codegen.magic_tuple(), _versions())).encode()
            ).hexdigest()
            return os.path.join(self._folder, f"{self._numba.filename_base}-{key[:32]}.machine")

    return DiskCache


@cache
def _versions() -> tuple[Any, ...]:
    """Return versions and settings that machine code depends on, besides the loop, its arguments and the processor."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    settings = {
        name: settings[name] for name in sorted(settings) if name not in ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS")
    }
    versions = [importlib.import_module(name).__version__ for name in COMPILERS]
    return platform.python_implementation(), platform.python_version(), *versions, settings


def _meaning_of(value: Any) -> Any:
    """Return everything that the result of a loop depends on, as plain values: its code, and the code of all callees.

    Raises:
        TypeError: it uses an object of an unknown kind.
    """
    if hasattr(value, "targetoptions"):  # also compiled
        return [repr(sorted(value.targetoptions.items())), _meaning_of(value.py_func)]
    if hasattr(value, "_defn"):  # returned by `c_call`
        return _meaning_of(value._defn)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, tuple | frozenset):
        return [_meaning_of(part) for part in (value if isinstance(value, tuple) else sorted(value, key=repr))]
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | BuiltinFunctionType) or getattr(value, "__module__", "").split(".")[0] in COMPILERS:
        return value.__module__, value.__qualname__
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, value.co_varnames, [_meaning_of(part) for part in value.co_consts]
    if isinstance(value, FunctionType):
        references = {
            name: value.__globals__[name] for name in _names_of_code(value.__code__) if name in value.__globals__
        }
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [
            _meaning_of(part)
            for part in (value.__code__, *references, *references.values(), *cells, value.__defaults__)
        ]
    raise TypeError(f"it is not known what {value!r} computes")


def _names_of_code(code: CodeType) -> list[str]:
    """Return the names that code uses, also in the functions that it defines."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names_of_code(constant)]
    return sorted({*code.co_names, *inner})
