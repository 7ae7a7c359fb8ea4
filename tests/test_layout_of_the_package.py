"""The package's shape: imports go one way, few parts touch HDF5 or Lightning, and importing does nothing else."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import h5py
import pytest
from guards import HANG

import lightning_h5

ROOT = Path(lightning_h5.__file__).parent
REPOSITORY = ROOT.parent

LEAVES = {
    "jit",
    "kept_files",
    "regular_files",
    "cores",
    "memory",
    "errors",
    "progress_bar",
    "types",
    "sizes",
    "counters",
    "threads",
    "natural_order",
    "lazy_torch",
    "_version",
}
MAY_IMPORT = {
    **{leaf: {"errors", "types"} - {leaf} for leaf in LEAVES},
    "errors": set(),
    "progress_bar": {"sizes"},
    "kept_files": {"errors", "regular_files", "types"},
    "jit": {"errors", "kept_files", "types"},
    "_lightning": {"errors"},
    "options": {"errors", "sizes", "types"},
    "staging": LEAVES | {"options"},
    "hdf5": LEAVES - {"jit"} | {"options", "staging"},  # it describes, and decodes nothing
    "readers": LEAVES | {"options", "staging", "hdf5"},
    "distributed": LEAVES,
    "order": LEAVES,  # pure: neither files nor anything that reads them
    "catalog": LEAVES | {"options", "hdf5", "readers", "order", "distributed"},
}
MAY_IMPORT["samples"] = MAY_IMPORT["catalog"] | {"catalog"}
MAY_IMPORT["datasets"] = MAY_IMPORT["samples"] | {"samples"}
MAY_IMPORT["loading"] = MAY_IMPORT["datasets"] | {"datasets", "staging"}
MAY_IMPORT["metrics"] = MAY_IMPORT["loading"] | {"loading"}
MAY_IMPORT["callbacks"] = MAY_IMPORT["metrics"] | {"metrics", "_lightning"}
MAY_IMPORT["datamodules"] = MAY_IMPORT["callbacks"] | {"callbacks", "staging"}
# Work on files, without Lightning; only `bench` imports the data modules, when it measures them.
MAY_IMPORT["tools"] = MAY_IMPORT["datamodules"] | {"datamodules"}
MAY_IMPORT["cli"] = MAY_IMPORT["tools"] | {"tools"}
MAY_IMPORT["__main__"] = {"cli"}
# The public names are imported from everywhere, when they are asked for.
MAY_IMPORT["__init__"] = set(MAY_IMPORT) - {"__main__", "cli"}

MAY_USE_LIGHTNING = {"_lightning", "datamodules", "callbacks", "cli"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
# A copy of a file, of which everything has to be kept.
WRITES = Path("tools/repack")


@pytest.fixture(scope="module")
def modules():
    """The path of each module in the package, the part of the package it belongs to, and its syntax tree."""
    paths = sorted(ROOT.rglob("*.py"))
    places = [path.relative_to(ROOT) for path in paths]
    trees = [ast.parse(path.read_text(), str(path)) for path in paths]
    return [(place, place.parts[0].removesuffix(".py"), tree) for place, tree in zip(places, trees, strict=True)]


def imported(place, tree):
    """Absolute dotted names of all that a module imports, inside functions and by ``import_module`` too."""
    package = ("lightning_h5", *place.parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from . import x` names modules, `from .x import y` names what is in one.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            yield from ((name.value, node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))


def _name(node):
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_imports_go_one_way(modules):
    for place, part, tree in modules:
        assert part in MAY_IMPORT, f"{part} has no place in the drawing of docs/architecture.md yet"
        for name, line in imported(place, tree):
            if name.startswith("lightning_h5."):
                target = name.split(".")[1]
                known = target in MAY_IMPORT
                assert target == part or (known and target in MAY_IMPORT[part]) or (not known and part == "__init__"), (
                    f"{place}:{line} imports {name}: {part} may import {sorted(MAY_IMPORT[part])}"
                )


@pytest.mark.parametrize(
    ("folder", "module", "imports_it"),
    [("hdf5", "layout", "identity"), ("samples", "indexer", "windows"), ("tools", "inspect.advice", "inspect.inspect")],
)
def test_modules_of_a_folder_do_not_import_each_other_in_a_circle(modules, folder, module, imports_it):
    """Not even for types alone."""
    imports = {
        ".".join(("lightning_h5", *place.with_suffix("").parts)): {name for name, _ in imported(place, tree)}
        for place, part, tree in modules
        if part == folder and place.name != "__init__.py"
    }
    imports = {
        module: {target for target in imports if any(f"{name}.".startswith(f"{target}.") for name in names)}
        for module, names in imports.items()
    }
    assert f"lightning_h5.{folder}.{module}" in imports[f"lightning_h5.{folder}.{imports_it}"]
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_private_names_stay_in_their_folder(modules):
    for place, part, tree in modules:
        for name, line in imported(place, tree):
            parts = name.split(".")
            if parts[0] == "lightning_h5" and parts[1] != part and len(parts) > 2:
                assert not any(p.startswith("_") and not p.endswith("__") for p in parts[2:]), (
                    f"{place}:{line} imports {name}"
                )


def test_few_parts_know_hdf5_or_lightning(modules):
    for place, part, tree in modules:
        for name, line in imported(place, tree):
            top = name.split(".")[0]
            assert top != "h5py" or part in {"hdf5", "readers"} or place.parent == WRITES, (
                f"{place}:{line} imports {name}"
            )
            assert top not in LIGHTNING or part in MAY_USE_LIGHTNING, f"{place}:{line} imports {name}"


UNDOCUMENTED = {"fit_loop", "epoch_loop", "_logger_connector", "_results"}  # attributes of a Trainer


def test_undocumented_attributes_of_a_trainer_are_used_in_two_modules(modules):
    for place, _, tree in modules:
        if place in (Path("_lightning.py"), Path("datamodules/trainer_progress.py")):
            continue
        for node in ast.walk(tree):
            used = isinstance(node, ast.Attribute) and node.attr in UNDOCUMENTED
            assert not used, f"{place}:{node.lineno} uses {node.attr} of a Trainer"


def test_every_file_is_opened_at_the_one_door(modules):
    for place, _, tree in modules:
        if place == Path("hdf5/open.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.ImportFrom):
                by_attribute = isinstance(node, ast.Attribute) and _name(node) in ("h5py.File", "h5py.h5f")
                # `from h5py import File` would be a way round the line above.
                by_name = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "h5py"
                opens = by_attribute or by_name
                assert not opens, f"{place}:{node.lineno} opens a file past hdf5/open.py"


def test_every_module_and_public_name_says_what_it_is(modules):
    for place, _, tree in modules:
        assert ast.get_docstring(tree) or place.name == "_version.py", place
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{place}:{node.lineno} {node.name}"


def test_public_names_are_sorted_and_there(modules):
    for place, _, _ in modules:
        if place.name == "__main__.py":
            continue  # importing it runs it
        module = importlib.import_module(
            ".".join(["lightning_h5", *place.with_suffix("").parts]).removesuffix(".__init__")
        )
        names = getattr(module, "__all__", [])
        assert list(names) == sorted(set(names), key=_as_ruff_sorts), place
        assert all(hasattr(module, name) for name in names), place


def _as_ruff_sorts(name):
    """Constants, then classes, then the rest."""
    return (not name.isupper(), not name[0].isupper(), name)


def test_every_public_name_can_be_got_and_explains_itself():
    assert {*lightning_h5.__all__} <= {*dir(lightning_h5)}
    for name in lightning_h5.__all__:
        found = getattr(lightning_h5, name)
        assert name == "__version__" or len(inspect.getdoc(found)) > 20, name


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'H5LazyDatset'; it has .*H5LazyDataset"):
        lightning_h5.H5LazyDatset  # noqa: B018


def test_the_lazy_names_are_the_listed_names():
    homes = [name for names in lightning_h5._HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == lightning_h5.__all__
    assert len(set(homes)) == len(homes)


def run_fresh(code):
    """Runs code in a fresh interpreter; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_looking_at_a_file_imports_no_torch(tmp_path):
    """It takes longer to import than most looks take."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        for number in range(3):  # the call that is suggested is tried
            file.create_dataset(f"demo_{number}/x", data=[1.0, 2.0], chunks=(1,), compression="gzip")
    look = f"lightning_h5.inspect_file({str(path)!r})"
    assert (
        run_fresh(f"import lightning_h5, sys; {look}; print(*sorted({{'torch', 'lightning'}} & set(sys.modules)))")
        == []
    )


def test_importing_the_package_alone_imports_neither_torch_nor_h5py():
    assert run_fresh("import lightning_h5, sys; print(*sorted({'torch', 'h5py', 'numpy'} & set(sys.modules)))") == []


# The libraries go first: what they do when they are imported is not ours.
OBSERVE = """
import json, os, random, resource, signal, sys, threading, warnings
warnings.simplefilter("ignore")
import h5py, numpy, torch, torch.utils.data, torch.distributed, tqdm

def state():
    return {
        "open files": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "python's random state": random.getstate(),
        "numpy's random state": repr(numpy.random.get_state()),
        "torch's random state": torch.random.get_rng_state().tolist(),
        "torch's threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)],
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGBUS)],
        "children": os.path.exists(f"/proc/self/task/{os.getpid()}/children")
        and open(f"/proc/self/task/{os.getpid()}/children").read(),
    }

def changes(imports):
    before = state()
    del opened[:]
    exec(imports)
    files = [f for f in opened if isinstance(f, str) and not f.endswith((".py", ".pyc")) and ".pyc." not in f]
    after = state()
    return [name for name in before if before[name] != after[name]] + files

opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
found = {"lightning_h5.loading": changes(DATA)}
found["lightning"] = sorted(LIGHTNING & set(sys.modules))
import lightning.pytorch
found["lightning_h5.datamodules"] = changes("import lightning_h5.datamodules")
print(json.dumps(found))
"""
DATA = """
import lightning_h5
import lightning_h5.datasets
from lightning_h5 import H5LazyDataset, h5_worker_init_fn, group_split, H5Error
import lightning_h5.loading
"""


@pytest.fixture(scope="module")
def observed():
    """What importing did, one step after the other in a fresh interpreter."""
    return json.loads(" ".join(run_fresh(f"DATA = {DATA!r}; LIGHTNING = {LIGHTNING!r}\n{OBSERVE}")))


@pytest.mark.wide
def test_lightning_is_not_imported_for_the_data(observed):
    """It costs seconds and memory in every spawned worker."""
    assert observed["lightning"] == []


@pytest.mark.wide
def test_importing_opens_starts_seeds_and_changes_nothing(observed):
    assert {module: observed[module] for module in ("lightning_h5.loading", "lightning_h5.datamodules")} == {
        "lightning_h5.loading": [],
        "lightning_h5.datamodules": [],
    }
