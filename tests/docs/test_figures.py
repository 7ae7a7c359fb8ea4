"""The figures of the documentation are those that the benchmarks stored, with the date and the machine."""

import json
import re
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "docs" / "_parts"

PAGES = ("cost_model", "growth", "limits", "start")


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


@pytest.fixture(scope="module")
def made():
    """The texts and charts of the benchmark page, made of the stored results."""
    return load_benchmark("page").texts(PARTS)


def test_the_benchmark_page_is_made_of_the_stored_results(made):
    for name, text in made.items():
        folder = ROOT / "docs" / "_static" if name.endswith(".svg") else PARTS
        assert (folder / name).read_text() == text, name


def test_the_benchmark_page_shows_all_that_is_made(made):
    page = (ROOT / "docs" / "speed.md").read_text()
    assert [name for name in made if f"/{name}" not in page] == []


def test_charts_name_the_loaders_and_ours_with_their_figures(made):
    stored = json.loads((PARTS / "benchmarks.json").read_text())
    dots = load_benchmark("dots")
    (case,) = (each for each in stored["results"] if each["case"] == "images-gzip-32")
    for team in ("plain h5py", "lightning_h5", "insitubatch"):
        assert f">{dots.rounded(dots.medians(case)[team])}<" in made["benchmarks.svg"]


def test_text_of_charts_is_legible_on_narrow_screens(made):
    """Pages leave 358 of 390 pixels to a picture."""
    dots = load_benchmark("dots")
    size = float(re.search(r"font: ([\d.]+)px", dots.STYLE)[1])
    assert size * 358 / dots.WIDTH >= 11
