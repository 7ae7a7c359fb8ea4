"""What must not change while the code does is that of `golden.json`: orders, identities, blocks, reads, first batches.

Write that file anew, after a change of any of them that is meant, with

    GOLDEN=write python -m pytest -n 0 -m "wide or not wide" tests/layouts/test_golden.py
"""

import hashlib
import json
import os
from pathlib import Path

import decoded_values  # noqa: F401  # more projects
import h5py
import numpy as np
import projects
import pytest
import single_cells  # noqa: F401
import torch
from test_layouts import MODULES, data_module

GOLDEN = Path(__file__).with_name("golden.json")
COUNTED = ("bytes_read", "chunks_decoded", "rows")

pytestmark = pytest.mark.skipif(h5py.version.hdf5_version_tuple < (2, 0, 0), reason="older libraries write other files")


def digest(value):
    """Digest of tensors, arrays, text and numbers, in lists, tuples and dicts."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for name, each in value.items():
                add([name, each])
        elif isinstance(value, list | tuple):
            found.update(f"{len(value)} of".encode())
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor | np.ndarray):
            array = np.ascontiguousarray(value)
            found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            found.update(f"{type(value).__name__} {value!r}".encode())

    add(value)
    return found.hexdigest()[:16]


def seen(kind, layout):
    """What is pinned of a layout."""
    found = {}
    for shuffle in (False, True, "chunks"):
        module = data_module(kind, layout, shuffle=shuffle)
        module.setup("fit")
        loader = module.train_dataloader()
        epochs = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            batches = list(loader)
            epochs.append([number for batch in batches for number in batch["index"].tolist()])
            if not shuffle and not epoch:
                found["first batch"] = digest(batches[0])
                found["reads"] = {name: int(loader.counters.total()[name]) for name in COUNTED}
        found[f"order {shuffle}"] = digest(epochs)
        if not shuffle:
            found["identity"] = digest(repr(loader.dataset.identity()))
            found["blocks"] = np.diff(loader.dataset.blocks().starts).tolist()
        module.teardown("fit")
    return found


@pytest.fixture
def layout(request, tmp_path):
    projects.RNG.bit_generator.state = np.random.default_rng(20).bit_generator.state  # whatever was written before
    folder = tmp_path / "data"
    folder.mkdir()
    with projects.warning_of(request.param):
        yield projects.PROJECTS[request.param](folder)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("layout", projects.PROJECTS, indirect=True)
def test_nothing_that_is_pinned_of_a_layout_has_changed(layout, kind, request):
    name = f"{request.node.callspec.params['layout']}, {kind}"
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = seen(kind, layout)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(golden | {name: found}, indent=1, sort_keys=True) + "\n")
    else:
        assert found == golden[name]
