"""The verbs for files: their arguments, the functions that they call, and their exit codes.

Functions are imported when their verb runs: inspecting a file takes less time than importing torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import H5Error, H5FileError, H5ValueError
from ..types import Keys
from .terminal import HelpFormatter, discard_output, ends_at_signals, show, warn

INTERRUPTED = 130  # exit code that shells report after Ctrl-C
OF_SEGMENTS = (
    "--split-file lists rows, but samples are made of segments. Pass --rows START:STOP with numbers of segments."
)


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        summary: one-line description.
        examples: commands to try, a line each.
        add_arguments: adds its arguments; all verbs have ``--json``.
        run: calls the function, shows the report, and returns the exit code: 0, or 1 for a problem.
    """

    summary: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def run_verb(name: str, arguments: Sequence[str]) -> None:
    """Run a verb, and write errors to the standard error.

    Args:
        name: name of the verb.
        arguments: the arguments after the verb.

    Raises:
        SystemExit: with 0, with 1 for a problem, with 2 for wrong usage, with 130 after Ctrl-C.
    """
    verb = VERBS[name]
    examples = "\n".join(f"  lightning-h5 {name} {example}" for example in verb.examples)
    parser = argparse.ArgumentParser(
        prog=f"lightning-h5 {name}",
        description=textwrap.fill(f"{verb.summary[0].upper()}{verb.summary[1:]}.", 80),
        epilog=f"examples:\n{examples}",
        formatter_class=HelpFormatter,
    )
    verb.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write the result as JSON instead of text")
    options = parser.parse_args(arguments)
    code = 1
    try:
        code = verb.run(options)
        sys.stdout.flush()
    except H5Error as error:
        text = f"{error}"
        if "allow_external=True" in text:
            only = f"`lightning-h5 {name}` opens only files that you name"
            text += f" (That option is for data modules and datasets; {only}.)"
        warn(text)
    except MemoryError as error:
        warn(f"{name} ran out of memory{f': {error}' if f'{error}' else ''}. Run it on a machine with more.")
    except KeyboardInterrupt:
        warn(f"{name} was interrupted.")
        code = INTERRUPTED
    except BrokenPipeError:  # as with `... | head`
        discard_output()
        code = 0
    except OSError as error:  # file errors are H5Errors, handled above
        discard_output()
        warn(f"{name} has finished, but could not write its output: {error.strerror or error}. Check the disk space.")
    raise SystemExit(code)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", nargs="+", help="a file; or a directory, a glob or several files")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the tree to show (default: all)")
    parser.add_argument("--yaml", action="store_true", help="write only the suggested settings, as YAML")


def _inspect(options: argparse.Namespace) -> int:
    from ..hdf5 import expand_user
    from ..tools import inspect
    from .text import file_text, folder_text

    only = expand_user(options.path[0])
    report: inspect.FileReport | inspect.FolderReport
    if len(options.path) == 1 and not os.path.isdir(only) and not any(mark in only for mark in "*?["):
        report = file = inspect.inspect_file(only)
        text = file_text(file, options.depth)
    else:
        report = inspect.inspect_folder(options.path, shows_progress=not (options.json or options.yaml))
        file, text = report.example, folder_text(report, options.depth)
    if options.yaml and file.advice.datamodule is None:
        raise H5ValueError(f"inspect has no settings to write: {file.advice.reasons[0]}")
    show(report, [file.advice.yaml] if options.yaml else text, as_json=options.json)
    return 0


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a file, a glob or a directory")
    add("--key", action="append", dest="keys", metavar="K", help="an array; repeatable (default: all)")
    add("--no-decode", action="store_true", help="read only metadata: fast, but does not find damaged chunks")
    add("--strict", action="store_true", help="exit with 1 on warnings, too")
    digests = "write digests next to each file without errors; files.verify='digest' compares rows with them"
    add("--write-digests", action="store_true", help=digests)
    add = parser.add_argument_group("untrusted files, and files that crashed a program or made it hang").add_argument
    add(
        "--sandbox",
        action="store_true",
        help="open each file in its own process, with limits; adds 0.2 s per file",
    )
    add("--sandbox-memory", metavar="SIZE", help="address space of each process (default: 4 GiB)")
    add("--sandbox-seconds", type=float, metavar="S", help="time per file (default: 60), plus 1 s per 10 MB")


def _run_check(options: argparse.Namespace) -> int:
    from ..tools.check import check_files
    from .text import check_text

    limits = {"sandbox_memory": options.sandbox_memory, "sandbox_seconds": options.sandbox_seconds}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if limits and not options.sandbox:
        raise H5ValueError(
            "--sandbox-memory and --sandbox-seconds are limits of --sandbox. Add --sandbox, or remove the limits."
        )
    report = check_files(
        options.paths,
        decode=not options.no_decode,
        keys=options.keys,
        sandbox=options.sandbox,
        write_digests=options.write_digests,
        shows_progress=True,
        **limits,
    )
    show(report, check_text(report, decoded=not options.no_decode), as_json=options.json)
    return 1 if report.errors or (options.strict and report.warnings) else 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="a file, a glob or a directory; several files form one dataset")
    add("--x-key", action="append", metavar="K", help="the input array; repeatable (default: as inspect suggests)")
    add("--y-key", action="append", metavar="K", help="the target array; repeatable")
    add("--batch-size", type=int, metavar="N", help="rows per batch (default: 64, or less for few or large rows)")
    add("--num-workers", type=int, default=2, metavar="N", help="worker processes to try (default: 2; 0 tries none)")
    add("--seconds", type=float, default=2.0, metavar="S", help="time for each measurement (default: 2)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements per setting (default: 3)")
    add("--cold", action="store_true", help="drop the files from the page cache before each measurement")
    add("--step", type=float, metavar="MS", help="milliseconds of a training step, to show the cost of loading")


def _bench(options: argparse.Namespace) -> int:
    from ..tools.bench import bench_file
    from .text import bench_text

    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    for name in ("paths", "x_key", "y_key"):
        if arguments[name] and len(arguments[name]) == 1:
            (arguments[name],) = arguments[name]
    logging.disable(logging.INFO)  # data modules log their rows
    try:
        report = bench_file(arguments.pop("paths"), **arguments, shows_progress=True)
    finally:
        logging.disable(logging.NOTSET)
    show(report, bench_text(report), as_json=options.json)
    return 0


def _repack_arguments(parser: argparse.ArgumentParser) -> None:
    from ..tools.repack import COMPRESSIONS

    add = parser.add_argument
    add("source", metavar="IN", help="the file to copy; it is not changed")
    add("target", metavar="OUT", help="the copy; an existing file is never replaced")
    rows = (
        "rows per chunk, or 'auto' for chunks of 256 to 512 KiB (default: auto, for chunked arrays). Labels and other "
        "columns keep their chunks if the file has arrays with larger rows, unless --keys names them"
    )
    add("--rows-per-chunk", type=_rows_per_chunk, metavar="N", help=rows)
    compressions = f"one of {', '.join(COMPRESSIONS)} (default: keep)"
    add("--compression", choices=COMPRESSIONS, metavar="NAME", help=compressions)
    add("--level", type=int, metavar="L", help="compression level: gzip 1-9 (4), zstd 1-22 (3), blosc 0-9 (5)")
    add("--shuffle-filter", action="store_true", help="shuffle bytes before compressing")
    add("--checksum", action="store_true", help="store a checksum with each chunk")
    add("--shuffle-rows", type=int, metavar="SEED", help="permute the rows, in the same order for all arrays")
    add("--shuffle-keys", nargs="+", metavar="K", help="arrays to permute, if not all have the same number of rows")
    add("--keys", nargs="+", metavar="K", help="arrays to write with other chunks or filters (default: all)")
    add("--verify", action="store_true", help="read the copy back and compare it with the original")
    remote = "write a file for an object store: chunks of 2 to 4 MiB, and all metadata in one place"
    add("--for-object-store", action="store_true", help=remote)
    trusted = "accept almost empty arrays of more than 4 GiB, and chunks of more than 1 GiB decoded"
    add("--trusted", action="store_true", help=trusted)


def _rows_per_chunk(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows; pass 1 or more, or 'auto'")
    return int(text)


def _run_repack(options: argparse.Namespace) -> int:
    from ..tools.repack import repack_file
    from .text import repack_text

    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    with ends_at_signals():  # removes an unfinished copy
        report = repack_file(**arguments, shows_progress=True)
    show(report, repack_text(report), as_json=options.json)
    return 0


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="FILE", help="a file, or the URL of an object")
    add("--output", metavar="OUT", help="path of the index (default: FILE.index)")
    add("--force", dest="overwrite", action="store_true", help="replace an existing index")


def _run_index(options: argparse.Namespace) -> int:
    from ..tools.index_file import write_index
    from .text import index_text

    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    report = write_index(**arguments, shows_progress=True)
    show(report, index_text(report), as_json=options.json)
    return 0


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a file, a glob or a directory; several files form one dataset")
    add("--key", action="append", dest="keys", metavar="K", help="an array; repeatable (default: the input)")
    axis = "axis of the channels in a row: 0 for rows (C, ...), -1 for rows (..., C) (default: none)"
    add("--channel-axis", type=int, metavar="A", help=axis)
    add("--sample", choices=("row", "segment"), help="kind of sample, as for data modules")
    segments = "groups or other segments, as for data modules: 'data/*', or a mapping such as '{step_axis: 1}'"
    add("--segments", type=_option, metavar="OPTION", help=segments)
    add("--decode", type=_option, metavar="OPTION", help="decoders of arrays: '{t2m: cf}'")
    add("--select", type=_option, metavar="OPTION", help="part of an array: '{fields: {1: [0, 3], 2: {stop: 720}}}'")
    choice = parser.add_mutually_exclusive_group()
    of_rows = "rows to read, counted over all files; numbers of segments, if samples are made of segments"
    choice.add_argument("--rows", type=_range, metavar="START:STOP[:STEP]", help=of_rows)
    choice.add_argument("--split-file", metavar="FILE", help="read the rows of a split in a data module's split.file")
    add("--split", choices=("train", "val", "test"), default="train", help="split in --split-file (default: train)")
    add("--output", metavar="FILE", help="write a file for the argument `normalize` of data modules and datasets")
    add("--force", action="store_true", help="replace an existing output")


def _option(text: str) -> Any:
    """Parse an option in YAML: a name, or a mapping."""
    import yaml

    try:
        return yaml.safe_load(text) if text.lstrip().startswith("{") else text
    except yaml.YAMLError:
        example = "'{step_axis: 1}'"
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping; write one as in YAML: {example}") from None


def _range(text: str) -> range:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts) or parts[2:] == ["0"]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of rows; write START:STOP or START:STOP:STEP")
    return range(*map(int, parts))


def _stats(options: argparse.Namespace) -> int:
    from ..hdf5 import expand_paths, expand_user
    from ..tools.output_files import check_output
    from ..tools.stats import compute_stats
    from .text import stats_doubts, stats_text

    paths = expand_paths(options.paths, "PATH")
    if options.output is not None:
        check_output(expand_user(options.output), paths, overwrite=options.force)  # fail before hours of reading
    rows = options.rows
    if options.split_file is not None:
        if options.segments is not None or options.sample == "segment":
            raise H5ValueError(OF_SEGMENTS)
        rows = _rows_of_split(options.split_file, options.split, paths, options.keys)
    report = compute_stats(
        paths,
        options.keys,
        channel_axis=options.channel_axis,
        rows=rows,
        sample=options.sample,
        segments=options.segments,
        select=options.select,
        decode=options.decode,
        shows_progress=True,
    )
    text, failure = stats_text(report), None
    if any(array.is_sparse for array in report.arrays):
        refused = "" if options.output is not None else " normalize= does not support them: scale in a transform."
        text += ["", f"The statistics of sparse matrices include the zeros.{refused}"]
        text += [shlex.join(["Next:", "lightning-h5", "bench", *options.paths])] if options.output is None else []
    elif options.output is None:
        command = shlex.join(["lightning-h5", "stats", *_words_of(options), "--output", "stats.json"])
        text += ["", f"Next: {command}", "      and pass normalize='stats.json' to the data module"]
    if options.output is not None:
        try:
            report.save(options.output, overwrite=options.force)
            text += [
                "",
                f"wrote {options.output}: pass it as normalize={options.output!r} in the call that inspect prints",
            ]
            text.append(shlex.join(["Next:", "lightning-h5", "inspect", *options.paths]))
        except H5Error as error:  # still show the result
            failure = error
    show(report, text, as_json=options.json)
    for line in stats_doubts(report):
        warn(line)
    if failure is not None:
        raise failure
    return 0


def _words_of(options: argparse.Namespace) -> list[str]:
    """Return the arguments of ``stats`` as words of a command."""
    words = list(options.paths)
    for key in options.keys or ():
        words += ["--key", key]
    if options.rows is not None:
        words += ["--rows", f"{options.rows.start}:{options.rows.stop}:{options.rows.step}"]
    for name in ("channel_axis", "sample", "segments", "decode", "select", "split_file"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    return words + (["--split", options.split] if options.split_file is not None else [])


def _rows_of_split(name: str, split: str, paths: Sequence[str], keys: Sequence[str] | None) -> Any:
    # The data modules import Lightning, which takes seconds.
    from ..datamodules.cut_splits import read_splits
    from ..hdf5 import expand_user
    from ..regular_files import read_json
    from ..samples import column_of, count_rows
    from ..tools.stats import named_keys, suggested_input

    named: Keys | None = keys
    if named is None:
        named, (sample, segments, *_) = suggested_input(paths)
        if segments is not None or sample == "segment":
            raise H5ValueError(OF_SEGMENTS)
    group_key = None
    with suppress(OSError, ValueError, AttributeError):  # `read_splits` raises a better error
        group_key = read_json(expand_user(name)).get("group_key")
    n_rows = count_rows(paths, named_keys(named)[0])
    groups = None if group_key is None else column_of(paths, group_key, n_rows, argument="group_key")
    splits = read_splits(name, n_rows, group_key, groups, {}) or {}
    rows_of_splits = {str(key): rows for key, rows in splits.items()}
    if not len(rows_of_splits.get(split, ())):
        raise H5ValueError(
            f"--split-file {name!r} does not exist, or has no row in the split {split!r}. Name another file or --split."
        )
    return rows_of_splits[split]


def _rows_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint of the run, of this step or any other")
    step = "the optimizer step: the value of trainer.global_step before it, and the step of its loss in loggers"
    add("--step", type=int, required=True, metavar="N", help=step)
    add("--rank", type=int, metavar="R", help="the samples of one rank (default: all)")
    replay = "write the batch of the step for torch.load, or a list of batches for several ranks or batches"
    add("--replay", metavar="FILE", help=replay)
    add("--config", metavar="YAML", help="configuration of the run (default: the checkpoint's arguments)")
    moved = "replace an argument of the data module, as in YAML; repeatable: train_path=/new/place.h5"
    add("--set", action="append", default=[], type=_setting, dest="arguments", metavar="NAME=VALUE", help=moved)
    add("--force", action="store_true", help="replace an existing file")
    add("--trusted", action="store_true", help="load objects of any class, which can run code from the checkpoint")


def _setting(text: str) -> tuple[str, Any]:
    """Parse the name and the value of an argument."""
    import yaml

    name, sign, value = text.partition("=")
    try:
        return (name, yaml.safe_load(value)) if sign and name.isidentifier() else _refuse_setting(text)
    except yaml.YAMLError:
        return _refuse_setting(text)


def _refuse_setting(text: str) -> tuple[str, Any]:
    raise argparse.ArgumentTypeError(f"{text!r} is not a setting; write NAME=VALUE, with the value as in YAML")


def _rows(options: argparse.Namespace) -> int:
    import torch

    from ..datamodules.of_checkpoint import datamodule_of_checkpoint
    from ..hdf5 import expand_user
    from ..tools.output_files import check_output
    from .rows_text import rows_text

    if options.config is not None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `fit`
    replay = None if options.replay is None else expand_user(options.replay)
    if replay is not None:
        check_output(replay, [options.checkpoint], overwrite=options.force)
    logging.disable(logging.INFO)  # data modules log their rows
    try:
        datamodule = datamodule_of_checkpoint(
            options.checkpoint,
            arguments=dict(options.arguments),
            config=options.config,
            replays=replay is not None,
            trusted=options.trusted,
        )
        try:
            report = datamodule.rows_of_step(options.step, options.rank)
            batches = [] if replay is None else datamodule.batches_of_step(options.step, options.rank)
        except H5FileError as error:
            raise H5FileError(
                f"{error} The checkpoint has the paths of the run: run this command in the folder of the run, or pass "
                "--set train_path=PATH."
            ) from error
    finally:
        logging.disable(logging.NOTSET)
    text = list(rows_text(report))
    if replay is not None:
        torch.save(batches[0] if len(batches) == 1 else batches, replay)
        kind = "the batch" if len(batches) == 1 else f"a list of {len(batches)} batches"
        text += ["", f"wrote {replay}: {kind}, for torch.load({replay!r})"]
    show(report, text, as_json=options.json)
    return 0


VERBS = {
    "inspect": Verb(
        "show the contents of a file, the cost of a random row, and suggested settings",
        ("signals.h5", "signals.h5 --depth 1", "recordings/ --json", "signals.h5 --yaml > data.yaml"),
        _inspect_arguments,
        _inspect,
    ),
    "check": Verb(
        "find missing fields or rows, and chunks that do not decode, in one file or many",
        ("data.h5", "runs/ --strict", "'runs/*.h5' --key signal --key label", "downloads/ --sandbox"),
        _check_arguments,
        _run_check,
    ),
    "bench": Verb(
        "measure the loading speed of several settings, and recommend one",
        ("signals.h5", "images.h5 --x-key train/images --y-key train/labels --batch-size 256"),
        _bench_arguments,
        _bench,
    ),
    "repack": Verb(
        "copy a file with other chunks or another compression",
        (
            "data.h5 small.h5 --rows-per-chunk 32 --compression zstd --verify",
            "data.h5 fast.h5 --compression none",
            "sorted.h5 shuffled.h5 --shuffle-rows 0",
            "data.h5 cloud.h5 --rows-per-chunk auto --for-object-store",
        ),
        _repack_arguments,
        _run_repack,
    ),
    "index": Verb(
        "write a small file next to an object in a store, to set up training with few requests",
        ("run.h5", "s3://bucket/run.h5 --output run.h5.index"),
        _index_arguments,
        _run_index,
    ),
    "stats": Verb(
        "compute mean, standard deviation, minimum and maximum of arrays",
        (
            "data.h5",
            "images.h5 --key images --channel-axis 0 --output stats.json",
            "'runs/*.h5' --key signal --split-file splits.json --output stats.json",
            "demos.h5 --key obs/image --segments 'data/*' --channel-axis -1 --output stats.json",
        ),
        _stats_arguments,
        _stats,
    ),
    "rows": Verb(
        "list the rows of an optimizer step, from a checkpoint of the run",
        (
            "last.ckpt --step 48213",
            "last.ckpt --step 48213 --rank 3 --replay batch.pt",
            "last.ckpt --step 48213 --set train_path=/new/place.h5 --json",
        ),
        _rows_arguments,
        _rows,
    ),
}
