"""SKILL.md and llms.txt, which language models read, are made from the pages as they are now."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(ROOT / "docs" / "llms.py"))


def test_the_files_are_current(made):
    """Otherwise run `python docs/llms.py`, or `make docs`, which begins with it."""
    assert (ROOT / "SKILL.md").read_text() == made["skill"]()
    assert (ROOT / "llms.txt").read_text() == made["llms"]()


def test_the_skill_is_short_and_has_eight_layouts_of_the_gallery(made):
    text = made["skill"]()
    assert len(text.splitlines()) < 200
    assert len(re.findall(r"^```python\ndatamodule = \w+\(\n", text, flags=re.M)) == 8
    assert "{{" not in text
    assert "```{" not in text


def test_each_page_but_the_first_is_listed_once(made):
    listed = re.findall(r"\((.*?)\.html\)", made["llms"]())
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").glob("*.md")}
    assert len(listed) == len(set(listed))
    assert all((ROOT / "docs" / f"{page}.md").exists() for page in listed)
    assert pages - set(listed) <= {"index", "changelog"}
