"""Is the prose plain English? Prints word rates, and fails on words that this project does not use.

    python tests/plain_english.py

looks at pages, and at docstrings, comments and string literals of the package. Rates are per 1,000 words.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "gallery").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    ROOT / "examples" / "README.md",
]
FORBIDDEN = (
    "anew",
    "at hand",
    "be gone on with",
    "in company",
    "likewise",
    "nobody",
    "of one's own",
    "on its way",
    "somebody",
    "whoever",
)
RATES = {
    "where": (r"where", 2.0),
    "who": (r"who|whoever|whose|nobody|somebody", 0.3),
    "tell": (r"tells?|told|says?|said|hears?|heard", 0.4),
}
"""For each rate its words, and the most of them per 1,000 words of docstrings or of pages."""


def package_prose():
    """Yield place, kind and text of each docstring, comment and string literal of the package."""
    for path in sorted((ROOT / "lightning_h5").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        docstrings = set()
        for node in ast.walk(ast.parse(source)):
            is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if is_documented and (text := ast.get_docstring(node)) is not None:
                docstrings.add(node.body[0].lineno)
                yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}", "docstring", text
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            place = f"{path.relative_to(ROOT)}:{token.start[0]}"
            if token.type == tokenize.COMMENT:
                yield place, "comment", token.string
            elif token.type == tokenize.STRING and token.start[0] not in docstrings:
                yield place, "text", token.string


def page_prose():
    """Yield place, kind and text of each page, without code."""
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
        yield str(path.relative_to(ROOT)), "page", re.sub(r"`[^`]*`", "", text)


def main():
    """Print what was found, and return the exit code."""
    pieces = [*package_prose(), *page_prose()]
    forbidden = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.I)
    problems = [f"{place}: {found[0]!r}" for place, _, text in pieces for found in [forbidden.search(text)] if found]
    for kind in ("docstring", "page"):
        text = " ".join(text for _, of, text in pieces if of == kind)
        n_words = len(re.findall(r"[A-Za-z']+", text))
        for name, (pattern, most) in RATES.items():
            rate = 1000 * len(re.findall(rf"\b({pattern})\b", text, re.I)) / n_words
            sys.stdout.write(f"{kind}s, {name!r} per 1,000 words: {rate:.1f} (at most {most})\n")
            if round(rate, 1) > most:
                problems.append(f"{kind}s have {rate:.1f} of {name!r} per 1,000 words, {most} at most")
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
