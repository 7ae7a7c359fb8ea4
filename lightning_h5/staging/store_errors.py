"""Errors of object stores as errors of this package, which say what to do, and show no credentials."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import H5DataChangedError, H5Error, H5FileError
from .object_status import ObjectStatus, is_url, shown_url

__all__ = ["READ_TIMEOUT", "changed", "explained"]

READ_TIMEOUT = "20s"
"""Time in which at least a byte of an answer comes."""

MAX_LETTERS = 200  # of the text of another library's error


def changed(url: str, status: ObjectStatus, now: ObjectStatus | None) -> H5DataChangedError:
    """Return the error for an object in another state."""
    what = "" if now is None else f" (it had {_state(status)}, and has {_state(now)})"
    return H5DataChangedError(
        f"{shown_url(url)!r} was written to since training was set up{what}, so its rows can no longer be trusted. "
        "Leave objects alone while they are trained from, and start again."
    )


def _state(status: ObjectStatus) -> str:
    return f"{status.st_size:,} bytes" + (f", ETag {status.etag}" if status.etag else "")


def explained(url: str, options: Mapping[str, Any], error: Exception, what: str, rate: str) -> H5Error:
    """Return an error that says what to do, without credentials in its text."""
    kind, text = type(error).__name__, _without_secrets(str(error), options)
    name = shown_url(url)
    if kind == "PreconditionError" or "412 Precondition" in text:
        return changed(url, ObjectStatus(0, "", 0), None)
    for (kinds, marks), (why, cure) in _CAUSES.items():
        if kind in kinds or any(mark in text for mark in marks):
            return H5FileError(f"{name!r} cannot be {what}: {why.format(rate=rate)}. {cure}")
    shown = text.partition(" Debug source")[0][:MAX_LETTERS]
    return H5FileError(
        f"{name!r} cannot be {what}: {kind}: {shown}. Check the URL, the network and the credentials, then start again."
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
    for secret in _values(options):
        line = line.replace(secret, "***")
    return re.sub(r"\?\S+", "", line)


def _values(options: Any) -> Iterator[str]:
    """Yield texts of settings that are long enough to be a secret."""
    if isinstance(options, Mapping):
        for value in options.values():
            yield from _values(value)
    elif isinstance(options, str) and not is_url(options):
        yield from (each for each in (options, *options.split()) if len(each) > 7)  # the latter of "Bearer ..."
