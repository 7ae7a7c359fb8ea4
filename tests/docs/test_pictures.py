"""The gallery's pictures are of samples that the calls on its pages give."""

from __future__ import annotations

import importlib.util

import pytest
from test_docs import ROOT

pytest.importorskip("pandas")
pytest.importorskip("scipy")

_spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
pictures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pictures)


def test_each_page_of_the_gallery_has_a_picture_with_a_text():
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "gallery").glob("*.md") if page.stem != "index"}
    assert {*pages} == {*pictures.AXES}
    for name, page in pages.items():
        assert f":file: ../_parts/samples/{name}.html" in page
        drawing = (pictures.FOLDER / f"{name}.html").read_text()
        assert drawing.count('<title id="sample-title">One sample: ') == 1
        assert all(field in drawing for field in pictures.AXES[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted({*pictures.AXES} - {*pictures.SIZES}))
def test_a_picture_is_what_its_call_gives(name):
    """Draw them again by `python docs/pictures.py`."""
    assert pictures.draw(name) == (pictures.FOLDER / f"{name}.html").read_text()
