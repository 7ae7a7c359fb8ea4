"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI over any model and the data modules of this package."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from .._lightning import PACKAGE, LightningDataModule, LightningModule, models_of_the_other_package
from ..errors import H5Error
from ..options.keywords import unknown_keyword

UNKNOWN_OPTION = re.compile(
    r"class_path '([\w.]+)':\s+"
    r"(?:Option '(\w+)' is not accepted|Validation failed: No action for key \"(\w+)\")"  # older releases
)


def run_training(arguments: Sequence[str]) -> None:
    """Run LightningCLI; model and data are classes named in the config.

    A config is code: it names classes that are imported and called.

    Args:
        arguments: the verb and its arguments.

    Raises:
        SystemExit: with 2 for a wrong config, with 1 for an error of this package.
    """
    try:
        lightning_cli = import_module(f"{PACKAGE}.cli").LightningCLI
        import_module("jsonargparse")
    except ImportError as error:
        sys.stderr.write(
            f"lightning_h5: `{arguments[0]}` needs jsonargparse, which is not installed ({error}). "
            "Run `pip install 'lightning-h5[cli]'`.\n"
        )
        raise SystemExit(1) from error
    import_module("lightning_h5.datamodules")  # LightningCLI finds imported subclasses by their short names
    if os.getcwd() not in sys.path:  # unlike `python -m`, the console script does not import from the working directory
        sys.path.insert(0, os.getcwd())
    words = _with_comments(arguments)
    # LightningCLI reads sys.argv if `args` is None, and warns if it is not.
    are_own = list(arguments) == sys.argv[1:]
    refusals = _Messages()
    logger = logging.getLogger(__name__)
    logger.propagate = False
    logger.addHandler(refusals)
    if are_own:
        sys.argv[1:] = words
    try:
        lightning_cli(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-h5", "logger": logger},
            args=None if are_own else words,
        )
    except SystemExit as ended:
        if ended.code == 2:
            sys.stderr.writelines(f"lightning_h5: {message}\n" for message in _unknown_options(refusals.texts))
        if ended.code == 2 and (models := models_of_the_other_package()):
            package = PACKAGE.split(".")[0]
            (base,) = {"lightning", "pytorch_lightning"} - {package}
            sys.stderr.write(
                f"lightning_h5: {', '.join(models)} derives from {base!r}, and this command runs the Trainer of "
                f"{package!r}; the two packages hold unrelated classes. Set LIGHTNING_H5_IMPORT={base}, or derive "
                f"from {package!r}.\n"
            )
        raise
    except Exception as error:
        if (cause := _error_of_ours(error)) is None:
            raise
        sys.stderr.write(f"lightning_h5: {type(cause).__name__}: {cause}\n")
        raise SystemExit(1) from error
    finally:
        logger.removeHandler(refusals)


class _Messages(logging.Handler):
    """Collects messages, which the parser writes only after pages of usage."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message."""
        self.texts.append(record.getMessage())


def _unknown_options(texts: Sequence[str]) -> list[str]:
    """Return a message for each option of this package's classes that a config misspells."""
    messages = dict[str, None]()
    for class_path, *options in [match for text in texts for match in UNKNOWN_OPTION.findall(text)]:
        module, _, name = class_path.rpartition(".")
        if module.partition(".")[0] == __name__.partition(".")[0]:
            messages[unknown_keyword(getattr(import_module(module), name), "".join(options), ...)] = None
    return list(messages)


def _error_of_ours(error: BaseException | None) -> H5Error | None:
    """Return the error of this package in a chain of causes: jsonargparse wraps the exceptions of constructors."""
    while error is not None and not isinstance(error, H5Error):
        error = error.__cause__
    return error


def _with_comments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with comments in a printed configuration if jsonargparse can write them."""
    has_writer = any(find_spec(name.split(".")[0]) and find_spec(name) for name in ("ruamel.yaml", "ruyaml"))
    return [f"{word}=comments" if has_writer and word == "--print_config" else word for word in arguments]
