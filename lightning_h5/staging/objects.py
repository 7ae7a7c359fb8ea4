"""Objects of stores in the place of files: their status, the mirrors that they are read through, names by a pattern."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ..errors import H5Error, H5FileError, listing
from ..natural_order import natural_order
from ..options import StagingOptions
from .mirror import Mirror
from .network import ask_store
from .object_status import ObjectStatus, shown_url
from .origin import ObjectOrigin, fetch_now
from .policy import ensure_folder, mirror_name

__all__ = [
    "INDEX_SUFFIX",
    "expand_url",
    "look_ahead",
    "mirror_of",
    "object_status",
    "published_index",
    "staging_of",
    "use_staging",
]

_log = logging.getLogger(__name__)

INDEX_SUFFIX = ".index"
MAX_INDEX, INDEX_SLACK = 256 << 20, 1 << 20
"""Bytes of an index that are fetched at most: so many, and no more than its object has and a little."""

DEFAULT_BYTES = "20 GB"
"""Room for the mirrors of objects if no ``staging`` was given, in the folder for temporary files."""

FIRST_BYTES = 64 << 10
"""Of each of many objects: the tables of a small file are there."""

RECENT_SECONDS = 20.0
"""Time for which a state is taken as the present one. Each request names it, so that a change is noticed."""

_recent: dict[str, tuple[float, ObjectStatus]] = {}  # the last status of each object, until it is used
_absent: dict[str, float] = {}  # indexes that are not there, and when that was seen
_staging: dict[str, StagingOptions] = {}  # of this process, by URL


def use_staging(url: str, staging: StagingOptions | None) -> None:
    """Set how an object is read from now on, if that is known."""
    if staging is not None:
        _staging[url] = staging


def staging_of(url: str) -> StagingOptions:
    """Return the staging of an object: the last setting, or a folder for temporary files."""
    staging = _staging.get(url)
    return StagingOptions(dir=tempfile.gettempdir(), max_bytes=DEFAULT_BYTES) if staging is None else staging


def object_status(url: str) -> ObjectStatus:
    """Return the present state of an object; one request.

    Raises:
        H5FileError: it is not there, or cannot be reached.
    """
    since, recent = _recent.pop(url, (0.0, None))
    if recent is not None and time.monotonic() - since < RECENT_SECONDS:
        return recent
    status: ObjectStatus = ask_store("head", url, _options(url))
    return status


def look_ahead(urls: Sequence[str]) -> None:
    """Fetch the states and first bytes of objects that will be opened one after another, many at a time.

    Their errors are raised when they are opened.
    """

    def look(url: str) -> None:
        with suppress(H5Error):
            status = object_status(url)
            mirror = mirror_of(url, status)
            mirror.stage(np.array([0]), np.array([min(FIRST_BYTES, status.st_size)]))
            mirror.close()
            _recent[url] = time.monotonic(), status
            published_index(url, status.st_size)  # or that there is none

    if len(urls) > 1:
        fetch_now([partial(look, url) for url in urls])


def published_index(url: str, n_bytes: int) -> bytes | None:
    """Return the index that is stored next to an object (see ``lightning-h5 index``); None if there is none.

    Args:
        url: the object.
        n_bytes: its size, which no index of it exceeds by much.
    """
    place = url + INDEX_SUFFIX
    if place in _absent and time.monotonic() - _absent.pop(place) < RECENT_SECONDS:
        return None
    try:
        status = object_status(place)
        if status.st_size > min(n_bytes + INDEX_SLACK, MAX_INDEX):
            _log.warning(
                "%r has %s bytes, too many for an index, and is not used.", shown_url(place), f"{status.st_size:,}"
            )
            return None
        return bytes(ask_store("read", place, 0, status.st_size, status, _options(url)))
    except H5FileError:  # some stores deny access to names that do not exist
        _absent[place] = time.monotonic()
        return None


def mirror_of(url: str, status: ObjectStatus) -> Mirror:
    """Return the mirror of a state of an object.

    Raises:
        H5ValueError: the folder for it cannot be used.
    """
    folder = ensure_folder(staging_of(url))
    name = mirror_name(url, (status.st_size, status.etag, status.st_mtime_ns))
    return Mirror(ObjectOrigin(url, status, _options(url)), folder, name)


def expand_url(url: str, suffixes: tuple[str, ...], name: str) -> list[str]:
    """Return the objects of a URL: the object, all matches of a pattern, or all objects of a folder ("/" at the end).

    They are sorted by the numbers in their names.

    Args:
        url: the URL.
        suffixes: of the files of a folder.
        name: the argument's name, for errors.

    Raises:
        H5FileError: there are none, or the store cannot be listed.
    """
    is_folder = url.endswith("/")
    if not is_folder and not re.search(r"[*\[]", url.partition("://")[2]):
        return [url]
    fixed = url if is_folder else url[: re.search(r"[*?\[]", url).start()]  # type: ignore[union-attr]  # it has one
    statuses: dict[str, ObjectStatus] = ask_store("list", fixed.rpartition("/")[0] + "/", _options(url))
    if is_folder:
        urls = [address for address in statuses if address.endswith(suffixes) and "/" not in address[len(url) :]]
    else:
        pattern = re.compile(_expression(url))
        urls = [address for address in statuses if pattern.fullmatch(address)]
    if not urls:
        has = (
            f"the store has {listing(map(shown_url, statuses), most=3)}"
            if statuses
            else "the store has nothing that begins so"
        )
        outcome = f"has no files {', '.join('*' + suffix for suffix in suffixes)}" if is_folder else "matches no object"
        raise H5FileError(f"{name}={shown_url(url)!r} {outcome}; {has}. Check bucket and names.")
    for address in urls:
        use_staging(address, staging_of(url))
        for place in (address, address + INDEX_SUFFIX):
            if place in statuses:
                _recent[place] = time.monotonic(), statuses[place]
            else:
                _absent[place] = time.monotonic()
    return sorted(urls, key=natural_order)


def _expression(pattern: str) -> str:
    """Return a glob as a regular expression: "**/" crosses folders, "*" and "?" do not."""
    text = re.escape(pattern)
    text = text.replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.sub(r"\\\[(!?)([^/]*?)\\\]", lambda match: f"[{'^' if match[1] else ''}{match[2]}]", text)


def _options(url: str) -> Mapping[str, Any] | None:
    return staging_of(url).storage_options
