"""The figures of the documentation are those that the benchmarks stored, with the date and the machine."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS, BENCHMARKS = ROOT / "docs" / "_parts", ROOT / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

PAGES = ("converted", "cost_model", "limits", "start")


@pytest.mark.parametrize("script", PAGES)
def test_tables_are_made_of_the_stored_results(script):
    stored = json.loads((PARTS / f"{script}.json").read_text())
    text = (PARTS / f"{script}.md").read_text()
    assert text == importlib.import_module(script).page(stored)
    assert stored["environment"]["date"] in text
    assert f"{stored['environment']['cpus']} cores" in text


def test_stored_results_are_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for script in PAGES:
        assert f"_parts/{script}.md" in pages
