"""Modules of ``examples/benchmarks``, some of which have the names of modules of the tests."""

import importlib
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"
NAMES = {path.stem for path in BENCHMARKS.iterdir()}


def load_benchmark(name):
    """Imports a module of the benchmarks, and leaves no trace of it where others would import it by name."""
    kept = {each: sys.modules.pop(each) for each in [*sys.modules] if each.partition(".")[0] in NAMES}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for each in [*sys.modules]:
            if each.partition(".")[0] in NAMES:
                del sys.modules[each]
        sys.modules.update(kept)
