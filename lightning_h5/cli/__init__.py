"""The command line: ``python -m lightning_h5 VERB`` and the console script ``lightning-h5``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

TOOLS = {
    "inspect": "what is in a file, how it is stored, what a random row costs, what to use",
    "check": "problems in one file or many: fields, rows, chunks that do not decode",
    "bench": "how fast rows come from a file with the settings that matter",
    "repack": "a copy of a file with other chunks or another compression",
    "stats": "mean, standard deviation, minimum and maximum of arrays",
}
TRAINING = {
    "fit": "train a model: LightningCLI, with the data modules of this package by their short names",
    "validate": "the same for one epoch of validation",
    "test": "the same for one epoch of testing",
    "predict": "the same for one epoch of prediction",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb.

    Args:
        arguments: what follows the program's name; None takes the process's.

    Raises:
        SystemExit: with 2 for wrong usage, with 1 for a problem, or what the verb ends with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb = given[0] if given else "--help"
    if verb in ("-h", "--help"):
        (sys.stdout if given else sys.stderr).write(_usage())
        raise SystemExit(0 if given else 2)
    if verb == "--version":
        from .._version import __version__

        sys.stdout.write(f"lightning_h5 {__version__}\n")
    elif verb in TRAINING:
        from .train import run_training

        run_training(given)
    elif verb in TOOLS:
        from .terminal import INTERRUPTED, run_verb, warn

        try:
            module = import_module(f".{verb}_command", __name__)
        except KeyboardInterrupt:
            warn(f"{verb} was interrupted.")
            raise SystemExit(INTERRUPTED) from None
        run_verb(verb, module, given[1:])
    else:
        names = ", ".join([*TOOLS, *TRAINING])
        sys.stderr.write(f"lightning_h5: {verb!r} is no verb; there are {names}.\n\n{_usage()}")
        raise SystemExit(2)


def _usage() -> str:
    verbs = "\n".join(f"  {name:<10}{summary}" for name, summary in (TOOLS | TRAINING).items())
    return f"""usage: lightning-h5 VERB ...  (or python -m lightning_h5 VERB ...)

{verbs}

  VERB --help   the arguments of a verb
  --version     the version of this package
"""
