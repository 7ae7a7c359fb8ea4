"""What of a file is believed: which of its claims pass, and which of its values must be vouched for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from ..errors import H5ValueError
from .checks import INTEGRITY

__all__ = ["CAUTIOUS", "Trust", "Verify"]

Verify: TypeAlias = Literal["digest"]
"""How values are vouched for beyond what the file itself offers."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Named exceptions from what is refused, and what is asked for on top.

    Attributes:
        external: follow links, storage and virtual arrays into other files.
        sparse: take arrays that declare more than 4 GiB and more than 1,000 times what is stored.
        large_chunks: take chunks of more than 1 GiB, decoded.
        min_integrity: the lowest integrity level that passes (see ``INTEGRITY``).
        verify: compare values with the digests that lie beside the file.
    """

    external: bool = False
    sparse: bool = False
    large_chunks: bool = False
    min_integrity: int = 0
    verify: Verify | None = None

    @classmethod
    def of(
        cls,
        *,
        allow_external: bool,
        allow_sparse: bool,
        allow_large_chunks: bool,
        min_integrity: int,
        verify: Verify | None,
    ) -> Trust:
        """From the arguments that users give.

        Raises:
            H5ValueError: there is no such level, or no such way to verify.
        """
        levels = range(len(INTEGRITY))
        asked: Any = min_integrity  # what comes from a configuration file is not checked by anybody else
        if isinstance(asked, bool) or not isinstance(asked, int) or asked not in levels:
            raise H5ValueError(
                f"min_integrity={min_integrity!r} was given; there are {levels[0]} to {levels[-1]}. Pass one of these."
            )
        if verify not in (None, *get_args(Verify)):
            raise H5ValueError(
                f"verify={verify!r} was given. Pass 'digest', which compares rows with the digests that `lightning-h5 "
                "check --write-digests` wrote, or None."
            )
        return cls(
            external=allow_external,
            sparse=allow_sparse,
            large_chunks=allow_large_chunks,
            min_integrity=min_integrity,
            verify=verify,
        )

    def arguments(self) -> dict[str, Any]:
        """The arguments that it was made of, for who takes them."""
        return {
            "allow_external": self.external,
            "allow_sparse": self.sparse,
            "allow_large_chunks": self.large_chunks,
            "min_integrity": self.min_integrity,
            "verify": self.verify,
        }


CAUTIOUS = Trust()
"""Nothing is followed out of a file, and nothing is taken that cannot be what it says."""
