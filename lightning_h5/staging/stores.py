"""Object stores: the state of objects that URLs name, their bytes, lists of them, and errors that say what to do.

Amazon S3 and stores with its protocol, Google Cloud Storage, Azure and HTTP servers are read by obstore, others by
fsspec. Only the main process of a rank uses this module (see ``network``).
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from ..errors import H5DataChangedError, H5Error, H5FileError, H5ValueError
from .object_status import ObjectStatus, check_url, is_url, shown_url

__all__ = ["Stores"]

BY_OBSTORE = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"}
TIMEOUT, CONNECT_TIMEOUT = "10m", "10s"  # of a request, which may be slow, and of a connection
RETRY_TIMEOUT = 60  # seconds in which a request is tried again
MAX_RETRIES = 5
MAX_LISTED = 1 << 22  # objects of a list, each of which takes some 500 bytes
RECENT = 1000  # requests whose times are recorded, for the rate in an error
TIMES = ("mtime", "LastModified", "last_modified", "updated", "last_commit", "created")  # names in fsspec's libraries
NO_CONTAINER = {"http", "https"}


class _Store(Protocol):
    def head(self, url: str) -> ObjectStatus: ...

    def read(self, url: str, start: int, stop: int, status: ObjectStatus) -> Any: ...

    def list(self, url: str) -> Iterator[tuple[str, ObjectStatus]]: ...


class Stores:
    """The stores that this process uses, each with its connections and credentials. Safe to use from threads."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], _Store] = {}
        self._times: deque[float] = deque(maxlen=RECENT)

    def head(self, url: str, options: Mapping[str, Any] | None) -> ObjectStatus:
        """Return the present state of an object.

        Args:
            url: its URL.
            options: credentials and settings of the store.

        Raises:
            H5FileError: it is not there, or cannot be reached.
            H5ValueError: the library for its scheme is not installed, or its settings make no sense.
        """
        try:
            status = self._store(url, options).head(url)
        except Exception as error:
            raise self._error(url, options, error) from None  # a cause may show credentials
        if not status.etag and not status.st_mtime_ns:
            raise H5FileError(
                f"the server of {shown_url(url)!r} sends neither an ETag nor the time of the last change, so a change "
                "during training would pass unnoticed. Copy the file to a local disk or to another store."
            )
        return status

    def read(
        self, url: str, start: int, stop: int, status: ObjectStatus, options: Mapping[str, Any] | None
    ) -> memoryview:
        """Return a range of bytes of an object in a state.

        Raises:
            H5DataChangedError: it has another state.
            H5FileError: it cannot be read.
        """
        self._times.append(time.monotonic())
        try:
            data = memoryview(self._store(url, options).read(url, start, stop, status))
        except Exception as error:
            raise self._error(url, options, error) from None
        if len(data) != stop - start:
            raise H5FileError(
                f"{stop - start:,} bytes of {shown_url(url)!r} were requested, and {len(data):,} came. Check the "
                "server, or a proxy before it, then resume."
            )
        return data

    def list(self, url: str, options: Mapping[str, Any] | None) -> dict[str, ObjectStatus]:
        """Return the URLs of all objects whose names begin as a URL does, in order, and their states.

        Raises:
            H5FileError: the store cannot be listed, or lists too many.
        """
        try:
            statuses = dict(islice(self._store(url, options).list(url), MAX_LISTED + 1))
            if len(statuses) > MAX_LISTED:
                raise H5FileError(
                    f"the store lists more than {MAX_LISTED:,} objects for {shown_url(url)!r}. Pass a URL with fewer "
                    "objects below it, or a list with the URL of each file."
                )
            return dict(sorted(statuses.items()))
        except Exception as error:
            raise self._error(url, options, error, action="listed") from None

    def _store(self, url: str, options: Mapping[str, Any] | None) -> _Store:
        check_url(url)
        parts = urlsplit(url)
        root = f"{parts.scheme}://{parts.netloc}"
        key = root, repr(sorted((options or {}).items(), key=str))
        if (store := self._stores.get(key)) is None:
            kind = _ObstoreStore if parts.scheme in BY_OBSTORE else _FsspecStore
            store = self._stores[key] = kind(root, options or {})
        return store

    def _error(self, url: str, options: Mapping[str, Any] | None, error: Exception, *, action: str = "read") -> H5Error:
        if isinstance(error, H5Error):
            return error
        return explained(url, options or {}, error, action, self._rate())

    def _rate(self) -> str:
        times = list(self._times)
        seconds = times[-1] - times[0] if len(times) > 1 else 0.0
        return f"{len(times) / seconds:,.0f} requests a second" if seconds else "few requests"


class _ObstoreStore:
    """A bucket, container or server, by obstore.

    Args:
        root: its URL.
        options: settings of obstore's store; "client_options", "retry_config" and "credential_provider" among them.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        if find_spec("obstore") is None:
            raise H5ValueError(
                f"{shown_url(root)!r} is read by the library obstore, which is not installed. Run "
                "`pip install 'lightning-h5[remote]'`, or copy the files to a file system."
            )
        from obstore.store import HTTPStore, from_url

        # Not `from_url` for web servers: it recognizes cloud hosts, and uses a part of the path as the bucket.
        connect: Any = HTTPStore.from_url if urlsplit(root).scheme in NO_CONTAINER else from_url
        settings = dict(options)
        client: dict[str, Any] = {"timeout": TIMEOUT, "read_timeout": READ_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
        client |= settings.pop("client_options", None) or {}
        if root.startswith("http://") or str(settings.get("endpoint", "")).startswith("http://"):
            client.setdefault("allow_http", True)
        retry = {"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT}
        retry |= settings.pop("retry_config", None) or {}
        provider = settings.pop("credential_provider", None) or _profile_credentials(root, settings)
        credentials = {} if provider is None else {"credential_provider": provider}
        self._root = root
        self._store = connect(root, client_options=client, retry_config=_with_times(retry), **credentials, **settings)

    def _key(self, url: str) -> str:
        return unquote(urlsplit(url).path).lstrip("/")

    def head(self, url: str) -> ObjectStatus:
        meta = self._store.head(self._key(url))
        return _status(meta["size"], meta["e_tag"], meta["last_modified"])

    def read(self, url: str, start: int, stop: int, status: ObjectStatus) -> Any:
        options: dict[str, Any] = {"range": (start, stop)}
        if status.etag:
            options["if_match"] = status.etag
        else:
            options["if_unmodified_since"] = datetime.fromtimestamp(status.st_mtime_ns / 1e9).astimezone()
        for n_retries in reversed(range(MAX_RETRIES)):
            try:
                return _body_of(self._get(url, options, (start, stop), status), stop - start, url)
            except Exception as error:
                # The library repeats requests, but does not continue all answers that broke off.
                if not n_retries or "body error" not in str(error):
                    raise
        raise AssertionError

    def _get(self, url: str, options: dict[str, Any], ends: tuple[int, int], status: ObjectStatus) -> Any:
        """Return the answer to a request; its body is not read yet."""
        answer = self._store.get(self._key(url), options=options)
        current = _status(answer.meta["size"], answer.meta["e_tag"], answer.meta["last_modified"])
        if current != status:
            raise changed(url, status, current)
        if tuple(answer.range) != ends:
            raise H5FileError(
                f"bytes {ends[0]:,} to {ends[1]:,} of {shown_url(url)!r} were requested, and the server sent bytes "
                f"{answer.range[0]:,} to {answer.range[1]:,}. Use a server or proxy that answers requests for ranges."
            )
        return answer

    def list(self, url: str) -> Iterator[tuple[str, ObjectStatus]]:
        if urlsplit(url).scheme in NO_CONTAINER:
            raise H5FileError(
                f"{shown_url(url)!r} names files by a pattern, and a web server has no list of its files. Pass a list "
                "with the URL of each file."
            )
        for page in self._store.list(self._key(url)):
            for entry in page:
                status = _status(entry["size"], entry["e_tag"], entry["last_modified"])
                yield f"{self._root}/{quote(entry['path'])}", status


def _body_of(answer: Any, n_bytes: int, url: str) -> Any:
    """Return the body of an answer, as far as it has the bytes that were requested.

    Raises:
        H5FileError: it has more. A server can send without an end.
    """
    data = bytearray()
    for piece in answer.stream(min_chunk_size=n_bytes):
        if not data and len(piece) == n_bytes:
            data = piece
            continue
        if len(data) + len(piece) > n_bytes:
            raise H5FileError(
                f"{n_bytes:,} bytes of {shown_url(url)!r} were requested, and the server sends more. Check the server, "
                "or a proxy before it, then resume."
            )
        data = bytearray(data) + piece
    return data


class _FsspecStore:
    """A file system of fsspec. Requests cannot name a state, so the state is requested after each of them.

    Args:
        root: its scheme and host.
        options: arguments of the file system.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        import fsspec

        scheme = urlsplit(root).scheme
        try:
            self._files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise H5ValueError(
                f"{shown_url(root)!r} cannot be read: {error}. Install fsspec's library for this scheme, or pass a URL "
                f"of {', '.join(sorted(BY_OBSTORE))}."
            ) from None

    def head(self, url: str) -> ObjectStatus:
        return _status_of(self._files.info(url))

    def read(self, url: str, start: int, stop: int, status: ObjectStatus) -> Any:
        data = self._files.cat_file(url, start=start, end=stop)
        if (current := self.head(url)) != status:
            raise changed(url, status, current)
        return data

    def list(self, url: str) -> Iterator[tuple[str, ObjectStatus]]:
        folder = url.rpartition("/")[0]
        inside = self._files._strip_protocol(folder)
        for name, info in self._files.find(folder, detail=True).items():
            yield folder + name.removeprefix(inside), _status_of(info)


def _status(size: int, etag: str | None, modified: datetime | None) -> ObjectStatus:
    if etag and not etag.startswith("W/"):  # a weak one is never equal in If-Match
        return ObjectStatus(size, etag, 0)
    return ObjectStatus(size, "", _nanoseconds(modified))


def _status_of(info: Mapping[str, Any]) -> ObjectStatus:
    """Return a state from the details of fsspec, whose names differ between its libraries."""
    etag = next((str(info[name]) for name in ("ETag", "etag", "md5Hash", "blob_id", "ino") if info.get(name)), "")
    times = (info.get(name) for name in TIMES)
    return ObjectStatus(int(info["size"]), etag, next((_nanoseconds(moment) for moment in times if moment), 0))


def _with_times(retry: Mapping[str, Any]) -> dict[str, Any]:
    """Return how requests are tried again as obstore takes it, with numbers of seconds as YAML has them."""
    settings: dict[str, Any] = {
        name: timedelta(seconds=value)
        if name in ("retry_timeout", "init_backoff", "max_backoff") and isinstance(value, int | float)
        else value
        for name, value in retry.items()
    }
    if isinstance(settings.get("backoff"), Mapping):
        settings["backoff"] = _with_times(settings["backoff"])
    return settings


def _nanoseconds(moment: Any) -> int:
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    return int(moment * 1e9) if isinstance(moment, int | float) else 0


def _profile_credentials(root: str, options: Mapping[str, Any]) -> Any:
    """Return a provider of the credentials of an AWS profile, with boto3 and a profile; obstore reads no profiles."""
    names = {str(name).lower().removeprefix("aws_") for name in options}
    if not root.startswith("s3") or names & {"access_key_id", "skip_signature"} or "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    folder = Path.home() / ".aws"
    has_profiles = "AWS_PROFILE" in os.environ or any((folder / name).exists() for name in ("credentials", "config"))
    if not has_profiles or find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()


READ_TIMEOUT = "20s"
"""Time in which at least one byte of an answer must arrive."""

MAX_LETTERS = 200  # of the text of another library's error


def changed(url: str, status: ObjectStatus, now: ObjectStatus | None) -> H5DataChangedError:
    """Return the error for an object in another state."""
    change = "" if now is None else f" (it had {_state(status)}, and has {_state(now)})"
    return H5DataChangedError(
        f"{shown_url(url)!r} was written to since training was set up{change}, so its rows can no longer be trusted. "
        "Leave objects alone while they are trained from, and start again."
    )


def _state(status: ObjectStatus) -> str:
    return f"{status.st_size:,} bytes" + (f", ETag {status.etag}" if status.etag else "")


def explained(url: str, options: Mapping[str, Any], error: Exception, action: str, rate: str) -> H5Error:
    """Return an error with a remedy, without credentials in its text."""
    kind, text = type(error).__name__, _without_secrets(str(error), options)
    name = shown_url(url)
    if kind == "PreconditionError" or "412 Precondition" in text:
        return changed(url, ObjectStatus(0, "", 0), None)
    for (kinds, marks), (why, cure) in _CAUSES.items():
        if kind in kinds or any(mark in text for mark in marks):
            return H5FileError(f"{name!r} cannot be {action}: {why.format(rate=rate)}. {cure}")
    details = text.partition(" Debug source")[0][:MAX_LETTERS]
    return H5FileError(
        f"{name!r} cannot be {action}: {kind}: {details}. Check the URL, the network and the credentials, then start "
        "again."
    )


_CAUSES: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, str]] = {
    ((), ("InvalidObjectState",)): (
        "the object is archived",
        "Restore it to a storage class that can be read at once.",
    ),
    ((), ("SlowDown", "503 Service Unavailable", "429 Too Many", "TooManyRequests")): (
        "the store refused requests because there were too many ({rate})",
        (
            "Let fewer jobs read at once, rewrite the file with larger chunks (`lightning-h5 repack`), or give the "
            "mirror more room (staging.max_bytes)."
        ),
    ),
    ((), ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "301 Moved")): (
        "the bucket is in another region",
        "Pass staging={'storage_options': {'region': ...}}, or set AWS_REGION.",
    ),
    ((), ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "ExpiredToken", "InvalidToken")): (
        "there are no valid credentials: none was found, or they have expired",
        (
            "Set them in the environment as for the store's own tools, or pass staging={'storage_options': ...}; for "
            "public data, {'skip_signature': True}."
        ),
    ),
    (("UnauthenticatedError",), ("InvalidAccessKeyId", "SignatureDoesNotMatch", "401 Unauthorized")): (
        "the store does not accept the credentials (401)",
        "Check that they are of this store and have not expired, and the endpoint if it is not the provider's own.",
    ),
    (("PermissionDeniedError", "PermissionError"), ("403 Forbidden", "AccessDenied")): (
        "the store denies access (403)",
        (
            "Check that the credentials may read it. S3 also answers this for a name that does not exist, if they may "
            "not list the bucket."
        ),
    ),
    (("NotFoundError", "FileNotFoundError"), ("404 Not Found", "NoSuchKey", "NoSuchBucket")): (
        "there is no such object (404)",
        "Check bucket and name, and the endpoint if it is not the provider's own.",
    ),
    (("NotSupportedError",), ("does not support range",)): (
        "the server does not answer requests for ranges of bytes",
        "Use a server or proxy that does, or copy the file to a local disk.",
    ),
    ((), ("timed out", "kind: Timeout")): (
        f"no bytes came for {READ_TIMEOUT} or the time that was set ({{rate}} were sent)",
        "Check the network, or raise staging={'storage_options': {'client_options': {'read_timeout': '60s'}}}.",
    ),
}


def _without_secrets(text: str, options: Mapping[str, Any]) -> str:
    line = " ".join(text.split())
    for secret in _secret_texts(options):
        line = line.replace(secret, "***")
    return re.sub(r"\?\S+", "", line)


def _secret_texts(options: Any) -> Iterator[str]:
    """Yield texts of settings that are long enough to be a secret."""
    if isinstance(options, Mapping):
        for value in options.values():
            yield from _secret_texts(value)
    elif isinstance(options, str) and is_url(options):  # of an endpoint or a proxy
        users = options.partition("://")[2].rpartition("@")[0]
        yield from (text for text in (users, users.partition(":")[2]) if text)
    elif isinstance(options, str):
        yield from (text for text in (options, *options.split()) if len(text) > 7)  # the latter of "Bearer ..."
