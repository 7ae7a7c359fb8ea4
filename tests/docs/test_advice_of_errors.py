"""What messages advise exists: verbs and options of the command line, extras to install, arguments to pass."""

import argparse
import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch

import lightning_h5
from lightning_h5.cli import TRAINING
from lightning_h5.cli.verbs import VERBS

PACKAGE = Path(lightning_h5.__file__).parent


def texts():
    """Each text of the package that may become a message, with its place; docstrings are no messages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def options_of(verb):
    parser = argparse.ArgumentParser()
    VERBS[verb].add_arguments(parser)
    return {"--json"} | {name for action in parser._actions for name in action.option_strings}


@pytest.mark.wide
def test_commands_that_messages_name_exist():
    found = [(place, *match) for place, text in texts() for match in re.findall(r"`lightning-h5 (\w+)([^`]*)`", text)]
    assert len(found) > 5
    for place, verb, rest in found:
        assert verb in {*VERBS, *TRAINING}, place
        unknown = set(re.findall(r"--[a-z][a-z-]*", rest)) - (options_of(verb) if verb in VERBS else set())
        assert not unknown, place


@pytest.mark.wide
def test_extras_that_messages_name_exist():
    extras = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [(place, name) for place, text in texts() for name in re.findall(r"lightning-h5\[(\w+)\]", text)]
    assert len(found) > 2
    assert not [place for place, name in found if name not in extras]


def is_error(each):
    return isinstance(each, type) and issubclass(each, Exception)


@pytest.mark.wide
def test_arguments_that_messages_say_to_pass_exist():
    public = [getattr(lightning_h5, name) for name in lightning_h5.__all__]
    callables = [each for each in public if callable(each) and not is_error(each)]
    takes = {name for each in callables for name in inspect.signature(each).parameters}
    of_torch = (torch.nn.functional.cross_entropy, torch.utils.data.DataLoader)
    takes |= {name for each in of_torch for name in inspect.signature(each).parameters}
    found = [
        (place, name)
        for place, text in texts()
        for sentence in re.findall(r"(?:Pass|pass|Set|set|Raise|raise|with) ([^.]*)", text)
        for name in re.findall(r"\b([a-z]+_[a-z_]+)=", sentence)
    ]
    assert len(found) > 5
    assert not [(place, name) for place, name in found if name not in takes]
