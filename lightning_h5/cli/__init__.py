"""The command line: ``python -m lightning_h5 VERB`` and the console script ``lightning-h5``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import near
from .verbs import VERBS, run_verb

__all__ = ["main"]

TRAINING = {
    "fit": "train a model by LightningCLI, with the data modules of this package by their short names",
    "validate": "run one epoch of validation",
    "test": "run one epoch of testing",
    "predict": "run one epoch of prediction",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb.

    Args:
        arguments: the command line without the program's name; None uses ``sys.argv``.

    Raises:
        SystemExit: with 2 for wrong usage, with 1 for a problem, or with the exit code of the verb.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help"):
        (sys.stdout if words else sys.stderr).write(_usage())
        raise SystemExit(0 if words else 2)
    if verb == "--version":
        from .._version import __version__
        from ..hdf5 import library_text

        sys.stdout.write(f"lightning_h5 {__version__}\n{library_text(names=True)}\n")
    elif verb in TRAINING:
        from .train import run_training

        run_training(words)
    elif verb in VERBS:
        run_verb(verb, words[1:])
    else:
        names = ", ".join([*VERBS, *TRAINING])
        hint = near(verb, [*VERBS, *TRAINING])
        sys.stderr.write(f"lightning_h5: {verb!r} is not a verb. The verbs are {names}.{hint}\n\n{_usage()}")
        raise SystemExit(2)


def _usage() -> str:
    summaries = {name: verb.summary for name, verb in VERBS.items()} | TRAINING
    verbs = "\n".join(f"  {name:<10}{summary}" for name, summary in summaries.items())
    return f"""usage: lightning-h5 VERB ...  (or python -m lightning_h5 VERB ...)

{verbs}

  VERB --help   show the arguments of a verb
  --version     show the versions of this package, h5py and HDF5, with known vulnerabilities
"""
