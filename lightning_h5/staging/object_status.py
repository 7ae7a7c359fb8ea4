"""URLs without credentials, and the state of the object that one names."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ..errors import H5ValueError

__all__ = ["ObjectStatus", "check_url", "check_urls", "is_url", "shown_url"]

URL = re.compile(r"\s*((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+)://")
NAMES_CONTAINER = {"abfs", "abfss", "az", "azure", "adl"}
"""Schemes of URLs that may have the container before "@": ``abfss://container@account.dfs.core.windows.net/run.h5``."""


def is_url(path: object) -> bool:
    """Return whether a path names an object of a store, such as "s3://bucket/run.h5"."""
    return isinstance(path, str) and URL.match(path) is not None


def shown_url(url: str) -> str:
    """Return a URL as logs and errors show it: nothing but its scheme if it may have a secret."""
    return url if _refused_url(url) is None else f"{_scheme(url)}://***"


def check_url(url: str) -> None:
    """Check that a URL has no place in which credentials are, and is not chained.

    Raises:
        H5ValueError: it has. The error does not show it.
    """
    if (refusal := _refused_url(url)) is not None:
        raise H5ValueError(f"'{_scheme(url)}://***' was given with {refusal}")


def check_urls(values: Any) -> None:
    """Check all URLs in settings (see ``check_url``), except in ``storage_options``, which are never shown."""
    if isinstance(values, os.PathLike):
        values = os.fspath(values)
    if isinstance(values, str):
        if is_url(values):
            check_url(values)
    elif isinstance(values, Mapping):
        check_urls([value for name, value in values.items() if name != "storage_options"])
        check_urls(list(values))
    elif isinstance(values, list | tuple | AbstractSet):
        for value in values:
            check_urls(value)
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        check_urls({field.name: getattr(values, field.name, None) for field in dataclasses.fields(values)})


def _scheme(url: str) -> str:
    match = URL.match(url)
    return match[1] if match is not None else "?"


def _is_pattern(path: str) -> bool:
    """Return whether all ``?`` of a path stand for a letter in the names of files, such as ``run?[0-9].h5``."""
    before, mark, after = path.rpartition("?")
    if not mark:
        return True
    follows_suffix = re.search(r"\.[A-Za-z]\w*(?=\?|$)", before) is not None
    return re.search(r"[*\[]", path) is not None and not follows_suffix and re.search(r"[.\]*/]", after) is not None


def _refused_url(url: str) -> str | None:
    """Return the problem of an invalid URL, and the remedy; None if the URL is valid."""
    if (match := URL.match(url)) is None:
        return None
    scheme, rest = match[1].lower(), url[match.end() :]
    authority, _, path = rest.partition("/")
    host, _, port = authority.rpartition(":")
    # In the names of objects, "@" after a port, "#", and "?" and ";" before "=" are written %40, %23, %3F and %3B.
    has_query = "#" in rest or re.search(r"[?;][^/]*=|\?.*&", rest) or "?" in authority
    has_query = has_query or not _is_pattern(path)
    has_user = "@" in authority and (scheme not in NAMES_CONTAINER or ":" in authority.partition("@")[0])
    is_port = authority.endswith("]") or (port.isdigit() and len(port) <= 5)  # "]" ends an address of IPv6
    if has_query or has_user or (host and not is_port) or (host and "@" in path):
        return (
            "a user name, a password, a signature or another query, which paths in logs and checkpoints would show. "
            "Pass the URL without it, and credentials by the environment or staging={'storage_options': ...}. In the "
            "name of an object, write '@' as %40, '#' as %23, '?' as %3F and ';' as %3B."
        )
    if "::" in match[1]:
        return (
            "a chain of schemes. Pass the URL of the object alone: what is read of it is kept in a mirror on the local "
            "disk (staging)."
        )
    return None


@dataclass(frozen=True)
class ObjectStatus:
    """The state of an object. Fields are named as in ``os.stat_result``.

    Attributes:
        st_size: bytes.
        etag: the store's name for this content; nothing if it gives none.
        st_mtime_ns: when it was written, if there is no ``etag``; otherwise 0, as a copy has another time.
    """

    st_size: int
    etag: str
    st_mtime_ns: int
    st_dev: int = 0
    st_ino: int = 0
    st_ctime_ns: int = 0
    st_mode: int = stat.S_IFREG
