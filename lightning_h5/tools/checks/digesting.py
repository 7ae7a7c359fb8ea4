"""Digests of whole files: made of a file that was just found whole, or compared with those that lie beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...errors import H5CorruptError, H5Error
from ...files import (
    ArrayDigests,
    ArrayLayout,
    ChangeGuard,
    OpenOptions,
    no_digests,
    process_pool,
    read_digests,
    with_digests,
    write_digests,
)
from ...files.lookup import file_with_digests
from ...readers import BulkTask, can_digest, digest_tasks, do_tasks, usable_cores, verify_tasks
from .looking import FileFacts, look_at
from .problems import Problem, error, warning

__all__ = ["compare_digests", "make_digests"]

OPTIONS = OpenOptions()
MOST = 10  # problems of an array that are told one by one


def make_digests(path: str, names: Sequence[str] | None, guard: ChangeGuard) -> Iterator[Problem]:
    """Writes the digests of a file beside it (see ``files.digests``); reads its arrays once, as they are stored.

    Args:
        path: the file.
        names: arrays to make them of; None takes all.
        guard: how the file looked when it was found whole.

    Yields:
        Arrays that none can be made of.

    Raises:
        H5Error: the file cannot be read, was changed, or the digests cannot be written.
    """
    facts = look_at(path, names)
    made: dict[str, ArrayDigests] = {}
    tasks = []
    for layout in facts.layouts.values():
        if layout.name in made:
            continue
        if not can_digest(layout):
            text = f"its dtype {layout.stored} is one of which no digests are made: verify='digest' refuses it"
            yield warning(path, layout.key, "no digest", text)
            continue
        made[layout.name] = no_digests(layout)
        tasks += digest_tasks(layout, OPTIONS, made[layout.name])
    _do(tasks, facts)
    guard.check()
    write_digests(path, made)


def compare_digests(path: str, names: Sequence[str] | None) -> Iterator[Problem]:
    """Compares a file with the digests that lie beside it, or beside what it is a link to, if any do.

    Args:
        path: the file.
        names: arrays to compare; None takes all that have digests.
    """
    if (name := file_with_digests(path)) is None:
        return
    try:
        known = read_digests(name)
        facts = look_at(path)
    except H5Error as why:
        yield error(path, None, "digest", why)
        return
    by_name = {layout.name: layout for layout in facts.layouts.values()}
    for name in known:
        key = name.strip("/")
        if names is not None and key not in names:
            continue
        if name not in by_name:
            yield error(path, key, "digest", "there are digests of it, and it is not there, or cannot be looked at")
            continue
        yield from _differences(facts, by_name[name], known)


def _differences(facts: FileFacts, layout: ArrayLayout, known: dict[str, ArrayDigests]) -> Iterator[Problem]:
    try:
        layout = with_digests(layout, known)
    except H5Error as why:
        yield error(facts.path, layout.key, "digest", why)
        return
    found: list[H5Error] = []

    def noted(run: Callable[[], None]) -> Callable[[], None]:
        def run_and_note() -> None:
            try:
                run()
            except H5CorruptError as why:
                found.append(why)

        return run_and_note

    _do([task._replace(run=noted(task.run)) for task in verify_tasks(layout, OPTIONS)], facts)
    for one in found[:MOST]:
        yield error(facts.path, layout.key, "digest", one)
    if (more := len(found) - MOST) > 0:
        yield error(facts.path, layout.key, "digest", f"{more:,} more stretches of it differ")


def _do(tasks: Sequence[BulkTask], facts: FileFacts) -> None:
    try:
        do_tasks(tasks, usable_cores(), lambda _: None)
    finally:
        process_pool().close(facts.path)
