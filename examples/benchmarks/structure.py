"""How large the package is, and how many of its modules a batch passes.

    python examples/benchmarks/structure.py [--json FILE]

counts modules and code lines (blanks, comments and docstrings are not counted), arguments of the data modules'
constructors, and the modules whose functions are called, in any thread, for a shuffled batch of a gzip file once the
first batches are read.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import logging
import sys
import tempfile
import threading
import tokenize
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import numpy as np

import lightning_h5

ROOT = Path(lightning_h5.__file__).parent
MAX_LINES = 400
N_ROWS, ROW_SHAPE, CHUNK_ROWS, BATCH_SIZE = 8192, (3, 64, 64), 32, 64
BUFFER = "16 MiB"  # of 96 MiB, so that chunks are decoded during the whole epoch
N_FIRST = 32  # batches before tracing starts
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    docstrings.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def importers(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that import each module; a package's ``__init__`` re-exports and does not count."""
    found: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if path.endswith("__init__.py") or not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = Path(path).parents[node.level - 1] / (node.module or "").replace(".", "/")
            for alias in node.names:
                if (home := _home(base, alias.name, sources)) not in (None, path):
                    found[home].add(path)
    return found


def _home(base: Path, name: str, sources: dict[str, str]) -> str | None:
    """Return the module that a name is imported from; for a name of a package the module that defines it."""
    for path in (f"{base / name}.py", f"{base}.py", (base / name / "__init__.py").as_posix()):
        if path in sources:
            return path
    for node in ast.walk(ast.parse(sources.get((base / "__init__.py").as_posix(), ""))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.level
            and name in {each.asname or each.name for each in node.names}
        ):
            inner = base if node.level == 1 else base.parents[node.level - 2]
            return _home(inner / (node.module or "").replace(".", "/"), name, sources)
    return None


def constructor_arguments() -> dict[str, int]:
    """Return the number of arguments of each data module's constructor."""
    classes = {name: getattr(lightning_h5, name) for name in lightning_h5.__all__ if name.endswith("DataModule")}
    return {name: len(signature(each.__init__).parameters) - 1 for name, each in classes.items()}


@contextmanager
def traced(functions: dict[str, set[str]]) -> Iterator[None]:
    """Note the package's functions that are called, by module, in this thread and in those that note calls."""
    prefix = f"{ROOT}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            functions[code.co_filename.removeprefix(prefix)].add(code.co_qualname)

    _state.note = note
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        _state.note = None


class _State:
    note: Any = None


_state = _State()


def _note(frame: FrameType, event: str, argument: Any) -> None:
    if (note := _state.note) is not None:
        note(frame, event, argument)


def functions_of_a_batch(path: Path) -> dict[str, set[str]]:
    """Return the functions that are called between ``next()`` and a shuffled batch of a file, by module."""
    module = lightning_h5.LazyH5DataModule(
        path,
        x_key="x",
        y_key="y",
        batch_size=BATCH_SIZE,
        shuffle={"buffer": BUFFER},
    )
    module.setup("fit")
    functions: dict[str, set[str]] = defaultdict(set)
    threading.setprofile(_note)  # for threads that start from now on
    try:
        batches = iter(module.train_dataloader())
        for _ in range(N_FIRST):
            next(batches)
        with traced(functions):
            for _ in range(N_ROWS // BATCH_SIZE - 2 * N_FIRST):
                next(batches)
        for _ in batches:
            pass
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # None is what the standard library takes
        module.teardown("fit")
    return dict(sorted(functions.items()))


def write_gzip(path: Path) -> None:
    """Write a file of images, all chunks alike, and their labels."""
    values = np.random.default_rng(0).integers(0, 50, (CHUNK_ROWS, *ROW_SHAPE), dtype=np.uint8)
    with h5py.File(path, "w") as file:
        shape, chunks = (N_ROWS, *ROW_SHAPE), values.shape
        images = file.create_dataset("x", shape, values.dtype, chunks=chunks, compression="gzip", compression_opts=1)
        stored = zlib.compress(values.tobytes(), 1)
        for first in range(0, N_ROWS, CHUNK_ROWS):
            images.id.write_direct_chunk((first, 0, 0, 0), stored)
        file["y"] = np.arange(N_ROWS)


def measure() -> dict[str, Any]:
    """Return all figures."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    lines = {path: code_lines(source) for path, source in sources.items()}
    by_module = importers(sources)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gzip.h5"
        write_gzip(path)
        functions = functions_of_a_batch(path)
    return {
        "modules": len(sources),
        "code_lines": sum(lines.values()),
        "large_modules": {path: n for path, n in lines.items() if n > MAX_LINES},
        "one_importer": {path: next(iter(names)) for path, names in by_module.items() if len(names) == 1},
        "constructor_arguments": constructor_arguments(),
        "modules_of_a_batch": {path: sorted(names) for path, names in functions.items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Count, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--functions", action="store_true", help="print the functions that a batch passes")
    options = parser.parse_args(argv)
    logging.getLogger("lightning_h5").setLevel(logging.WARNING)
    found = measure()
    print(f"{found['modules']} modules, {found['code_lines']:,} code lines")
    print(f"modules above {MAX_LINES} code lines: {len(found['large_modules'])}")
    for path, n in found["large_modules"].items():
        print(f"    {path} ({n})")
    print(f"modules with one importer: {len(found['one_importer'])}")
    for path, importer in found["one_importer"].items():
        print(f"    {path} (by {importer})")
    print("arguments of the constructors:")
    for name, n in found["constructor_arguments"].items():
        print(f"    {name}: {n}")
    print(f"modules that a shuffled batch of a gzip file passes: {len(found['modules_of_a_batch'])}")
    for path, names in found["modules_of_a_batch"].items():
        print(f"    {path}" + (f": {', '.join(names)}" if options.functions else ""))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
