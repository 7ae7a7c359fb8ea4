"""The words that people use lead to the page that answers, in the search of the built documentation."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from guards import HANG
from test_docs import ROOT

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM, ENTRY = 15, 7, 5, 2, 100  # as in Sphinx's searchtools.js
SHOWN = 3
ANSWERS = {
    "install": "install",
    "extras": "install",
    "offline": "install",
    "which data module": "index",
    "which class": "index",
    "which class should I use": "index",
    "regression": "fields",
    "classification": "fields",
    "text labels": "fields",
    "labels are text": "fields",
    "labels are strings": "fields",
    "pandas": "fields",
    "PyTables": "fields",
    "tabular data": "fields",
    "CSV": "fields",
    "class imbalance": "mixtures",
    "imbalanced classes": "mixtures",
    "imbalanced dataset": "mixtures",
    "oversampling": "mixtures",
    "weighted sampling": "mixtures",
    "mixed precision": "gpu",
    "bf16": "gpu",
    "16-mixed": "gpu",
    "CUDA out of memory": "troubleshooting",
    "multi-GPU": "ddp",
    "several GPUs": "ddp",
    "DDP": "ddp",
    "SLURM": "ddp",
    "sliding window": "samples",
    "time series": "samples",
    "data augmentation": "transforms",
    "torchvision": "transforms",
    "augment images": "transforms",
    "wandb": "tuning",
    "log to wandb": "tuning",
    "troubleshooting": "troubleshooting",
    "expected scalar type Float but found Double": "troubleshooting",
    "Too many open files": "troubleshooting",
    "hangs": "troubleshooting",
    "it crashes": "troubleshooting",
    "stuck": "troubleshooting",
    "segmentation fault": "troubleshooting",
    "dtype mismatch": "troubleshooting",
    "dtype mismatch float64": "troubleshooting",
    "Jupyter": "troubleshooting",
    "notebook": "tour",
    "train test split": "splits",
    "predefined split": "splits",
    "existing split": "splits",
    "resume": "resume",
    "S3": "storage",
    "k-fold": "splits",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    pytest.importorskip("sphinx")
    target = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", target / "trees", ROOT / "docs", target]
    subprocess.run(command, check=True, timeout=HANG)
    text = (target / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))


def numbers(found):
    return [found] if isinstance(found, int) else found


def scores(index, query):
    """Yield a page and its score for each match: of titles, of index entries, and of all words in titles and text."""
    from sphinx.search.en import SearchEnglish

    query = query.lower()
    for title, places in index["alltitles"].items():
        if query in title.lower() and len(query) >= len(title) / 2:
            for page, _ in places:
                yield page, round(TITLE * len(query) / len(title)) + (index["titles"][page] == title)
    for entry, places in index["indexentries"].items():
        if query in entry and len(query) >= len(entry) / 2:
            for page, _, is_main in places:
                if is_main:
                    yield page, round(ENTRY * len(query) / len(entry))
    language = SearchEnglish({})
    of_words = []
    for word in {language.stem(word) for word in re.findall(r"\w+", query) if word not in language.stopwords}:
        found = {}
        for table, whole, partial in (("terms", TERM, PARTIAL_TERM), ("titleterms", TITLE, PARTIAL_TITLE)):
            terms = index[table]
            for term in [word] if word in terms else [term for term in terms if len(word) > 2 and word in term]:
                for page in numbers(terms[term]):
                    found[page] = max(found.get(page, 0), whole if term == word else partial)
        of_words.append(found)
    for page in set.intersection(*map(set, of_words)) if of_words else ():
        yield page, max(found[page] for found in of_words)


@pytest.mark.wide
@pytest.mark.parametrize("query", ANSWERS)
def test_a_search_shows_the_page_that_answers(index, query):
    ranked = sorted(scores(index, query), key=lambda found: (-found[1], index["titles"][found[0]].lower()))
    pages = [index["docnames"][page] for page, _ in ranked]
    assert ANSWERS[query] in list(dict.fromkeys(pages))[:SHOWN], pages[:10]


def test_the_side_bar_has_six_sections_of_few_pages():
    captions = re.findall(r"^:caption: (.*)$", (ROOT / "docs" / "index.md").read_text(), flags=re.M)
    assert captions == ["Start", "Data", "Train", "Speed and storage", "Files and tools", "Project"]
    assert len(list((ROOT / "docs").glob("*.md"))) <= 26
