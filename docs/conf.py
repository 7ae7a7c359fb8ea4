"""Sphinx: pages in Markdown (MyST), the reference from the docstrings. Building needs no network."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from lightning_h5 import __version__

sys.path.insert(0, str(Path(__file__).parent))
import tour  # the module beside this one

project = "lightning_h5"
author = "The lightning_h5 contributors"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_parts"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"lightning_h5 {release}"
html_static_path = ["_static"]
html_css_files = ["drawing.css"]
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["../SKILL.md", "../llms.txt"]

# Docstrings are Google style; types stand in the signatures alone, and are shown with the arguments.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Cost", "notes_style")]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True

# The reference has a page for each class. Members are shown if they are listed here.
autosummary_context = {
    "members": {
        "H5LazyDataset": "__getitem__, __getitems__, read_batch, close, transform, target_transform, batch_transform",
        "ConcatDataset": "__getitems__",
        "RankMemCachedH5Dataset": "__getitem__, __getitems__, read_batch, load, is_loaded, rows, close",
        "CombinedHDF5Dataset": "__getitem__, __getitems__, read_batch, index, get_stats, clear_cache, close",
        "MultiDataLoader": "set_epoch, state_dict, load_state_dict",
        "EpochShuffleSampler": "set_epoch, rank, num_replicas",
    }
}

# Links to classes of other packages need those packages' inventories, which come from the network.
# BaseContext is multiprocessing's, DataLoader and Dataset torch's, Fraction Python's, and Column a type
# alias of ours, named in signatures as they stand in the source.
OTHERS = (
    r"(torch|numpy|np|npt|lightning|pytorch_lightning|collections|multiprocessing|os)"
)
nitpick_ignore_regex = [
    ("py:.*", OTHERS + r"(\..*)?"),
    ("py:class", "BaseContext"),
    ("py:class", "DataLoader"),
    ("py:class", "Dataset"),
    ("py:class", "Column"),
    ("py:class", r"(.*\.)?ArrayRequest"),
    ("py:class", r"(.*\.)?Span"),
    ("py:class", "Loader"),
    ("py:class", "Fraction"),
    ("py:class", "Skip"),
    ("py:class", "Step"),
    ("py:class", "AlikeArrays"),
    ("py:class", "BadSample"),
    ("py:class", r"(.*\.)?KeptChunks"),
    ("py:class", "BoolArray"),
    ("py:class", "BufferPool"),
    ("py:class", "Collate"),
    ("py:class", "Changes"),
    ("py:class", "CopyRows"),
    ("py:class", "CountReads"),
    ("py:class", "Decode"),
    ("py:class", r"(.*\.)?Decoding"),
    ("py:class", r"(.*\.)?ClassNumbers"),
    ("py:class", r"(.*\.)?Conventions"),
    ("py:class", r"(.*\.)?MatrixRows"),
    ("py:class", "HeldDataset"),
    ("py:class", "Agreement"),
    ("py:class", "Categories"),
    ("py:class", r"(.*\.)?Codec"),
    ("py:class", r"(.*\.)?SparseField"),
    ("py:class", "Describe"),
    ("py:class", "PatchRows"),
    ("py:class", r"(.*\.)?Joint"),
    ("py:class", r"(.*\.)?RaiseBadRows"),
    ("py:class", "SampleErrors"),
    ("py:class", "SampleKind"),
    ("py:class", "Select"),
    ("py:class", "SegmentChoice"),
    ("py:class", "SegmentSubset"),
    ("py:class", "array"),
    ("py:class", r"(.*\.)?PartLayouts"),
]


def types_as_written(app: Any, function: Any, is_bound: bool) -> None:
    """Shows types by the names that the source has for them: ``IntArray``, not what NumPy makes of it.

    Sphinx takes the source's text where annotations cannot be evaluated, so one is added that cannot.
    """
    if inspect.isfunction(function):
        function.__annotations__["_"] = "nowhere"


def notebook_as_page(app: Any, name: str, source: list[str]) -> None:
    """Puts the notebook of the examples in the place of its page."""
    if name == "tour":
        notebook, outputs = (
            json.loads(path.read_text(encoding="utf-8"))
            for path in (tour.NOTEBOOK, tour.OUTPUTS)
        )
        source[0] = tour.page(notebook, outputs)
        for path in (tour.NOTEBOOK, tour.OUTPUTS):
            app.env.note_dependency(str(path))


def setup(app: Any) -> None:
    app.connect("autodoc-before-process-signature", types_as_written)
    app.connect("source-read", notebook_as_page)
