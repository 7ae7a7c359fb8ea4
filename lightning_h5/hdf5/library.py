"""The HDF5 library in h5py, and its published vulnerabilities."""

from __future__ import annotations

import h5py

__all__ = ["library_text", "published_weaknesses"]

MENDED = {
    (2, 1, 0): ("CVE-2025-2308", "CVE-2025-2309", "CVE-2025-44904", "CVE-2026-26197", "CVE-2026-26199"),
    (2, 2, 0): ("CVE-2025-9274", "CVE-2026-17572", "CVE-2026-17573", "CVE-2026-17574"),
}
"""Published vulnerabilities of HDF5 2.0.0, by the release that fixes them. Sources: the list of The HDF Group
(github.com/HDFGroup/cve_hdf5), the security advisories of HDFGroup/hdf5, and h5py's pull request 2947."""


def published_weaknesses(version: tuple[int, ...]) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the published vulnerabilities of a version of HDF5, by the release that fixes them.

    Versions before 2.0.0 have more, which are not listed here.
    """
    return {release: names for release, names in MENDED.items() if version[:3] < release}


def library_text(version: tuple[int, ...] | None = None, *, names: bool = False) -> str:
    """Return the versions of h5py and its HDF5 library, with a warning about published vulnerabilities.

    Args:
        version: version of the library; None uses h5py's.
        names: name each vulnerability.
    """
    version = tuple(h5py.version.hdf5_version_tuple[:3]) if version is None else version
    text = f"h5py {h5py.__version__}, HDF5 {'.'.join(map(str, version))}"
    if not (weaknesses := published_weaknesses(version)):
        return text
    newest = ".".join(map(str, max(weaknesses)))
    least, n = "" if version >= (2,) else "at least ", sum(map(len, weaknesses.values()))
    text += f", which has {least}{n} published vulnerabilities that HDF5 {newest} fixes"
    if not names:
        return f"{text} (lightning-h5 --version lists them)"
    lists = [f"  before HDF5 {'.'.join(map(str, release))}: {', '.join(each)}" for release, each in weaknesses.items()]
    advice = "Check files from unknown sources with `lightning-h5 check --sandbox`, and update h5py when its wheels"
    return "\n".join([f"{text}:", *lists, f"{advice} have this release."])
