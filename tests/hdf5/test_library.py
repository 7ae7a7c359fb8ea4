"""What is said about the HDF5 library that h5py brings."""

import h5py
import pytest

from lightning_h5.hdf5.library import library_text, published_weaknesses


@pytest.mark.parametrize(
    ("version", "n", "words"),
    [
        ((1, 14, 6), 9, "which has at least 9 published vulnerabilities that HDF5 2.2.0 fixes"),
        ((2, 0, 0), 9, "HDF5 2.0.0, which has 9 published vulnerabilities that HDF5 2.2.0 fixes"),
        ((2, 1, 1), 4, "which has 4 published vulnerabilities that HDF5 2.2.0 fixes"),
    ],
)
def test_versions_with_published_vulnerabilities_are_named(version, n, words):
    names = [name for each in published_weaknesses(version).values() for name in each]
    assert len(names) == len(set(names)) == n
    assert words in library_text(version)
    assert all(name in library_text(version, names=True) for name in names)


@pytest.mark.parametrize("version", [(2, 2, 0), (2, 10, 0), (3, 0, 0)])
def test_others_have_no_warning(version):
    assert not published_weaknesses(version)
    number = ".".join(map(str, version))
    assert library_text(version) == library_text(version, names=True) == f"h5py {h5py.__version__}, HDF5 {number}"


def test_by_default_it_is_the_library_of_h5py():
    assert library_text().startswith(f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}")
