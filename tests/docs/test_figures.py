"""The figures of the documentation are those that the benchmarks stored, with the date and the machine."""

import json
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "docs" / "_parts"

PAGES = ("converted", "cost_model", "limits", "start")


@pytest.mark.parametrize("script", PAGES)
def test_tables_are_made_of_the_stored_results(script):
    stored = json.loads((PARTS / f"{script}.json").read_text())
    text = (PARTS / f"{script}.md").read_text()
    assert text == load_benchmark(script).page(stored)
    assert stored["environment"]["date"] in text
    assert f"{stored['environment']['cpus']} cores" in text


def test_stored_results_are_on_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for script in PAGES:
        assert f"_parts/{script}.md" in pages
