"""The command line: ``python -m lightning_h5 VERB`` and the console script ``lightning-h5``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

USAGE = """usage: python -m lightning_h5 VERB ...

  fit --config FILE       train a model: LightningCLI, with the data modules of this package by their short names
  validate, test, predict likewise
  VERB --help             what a verb takes
  --version               the version of this package
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb.

    Args:
        arguments: what follows the program's name; None takes the process's.

    Raises:
        SystemExit: with 2 for wrong usage, or what the verb ends with.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb = given[0] if given else "--help"
    if verb in ("-h", "--help"):
        sys.stdout.write(USAGE)
        raise SystemExit(0 if given else 2)
    if verb == "--version":
        from .._version import __version__

        sys.stdout.write(f"lightning_h5 {__version__}\n")
        return
    run = _verbs().get(verb)
    if run is None:
        sys.stderr.write(f"lightning_h5: there is no verb {verb!r}; there are {', '.join(_verbs())}.\n\n{USAGE}")
        raise SystemExit(2)
    run(given)


def _verbs() -> dict[str, Callable[[Sequence[str]], None]]:
    from .train import TRAINING_VERBS, run_training

    return dict.fromkeys(TRAINING_VERBS, run_training)
