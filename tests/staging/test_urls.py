"""URLs with credentials are refused at every door, before anything records or shows them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import CombinedHDF5DataModule, H5LazyDataset, H5ValueError, LazyH5DataModule, inspect_file
from lightning_h5.staging import check_url, shown_url, stores

SECRET = "sesame"
USERS = (SECRET, f"user:{SECRET}", f"user:p@{SECRET}", f"AKIA:ab/{SECRET}", f"AKIA:7/{SECRET}", f"AKIA:a#{SECRET}")
ENDS = (f"?X-Amz-Signature={SECRET}", f"#{SECRET}", f";sig={SECRET}", f"?a&{SECRET}", f"?{SECRET}", f"?{SECRET}.a.b")
names = st.text("abz09-._", min_size=1, max_size=6)


@st.composite
def urls_with_secrets(draw):
    chain = draw(st.sampled_from(["", "simplecache::", "filecache::simplecache::"]))
    scheme = draw(st.sampled_from(["http", "https", "s3", "S3", "gs", "az", "ftp", "sftp", "hdfs"]))
    host = draw(st.sampled_from(["bucket", "127.0.0.1:9", "host.org", "[::1]:80"]))
    path = "/".join(draw(st.lists(names, min_size=1, max_size=3))) + draw(st.sampled_from([".h5", "*.h5", "/"]))
    user, end = draw(st.sampled_from([*((user, "") for user in USERS), *(("", end) for end in ENDS)]))
    if (scheme, user) == ("az", SECRET):
        user = USERS[1]  # the container
    return f"{chain}{scheme}://{user}{'@' if user else ''}{host}/{path}{end}"


@given(urls_with_secrets())
def test_a_url_with_credentials_is_refused_before_it_is_recorded_and_never_shown(url):
    for make in (
        lambda: LazyH5DataModule(url, x_key="x"),
        lambda: LazyH5DataModule("run.h5", val_path=[url], x_key="x"),
        lambda: LazyH5DataModule("run.h5", x_key={"x": {"path": url, "key": "x"}}),
        lambda: CombinedHDF5DataModule([url], fields=["x"]),
        lambda: H5LazyDataset(url, "x"),
        lambda: inspect_file(url),
    ):
        with pytest.raises(H5ValueError, match=r"was given with") as error:
            make()
        cause = error.value
        while cause is not None:
            assert SECRET not in str(cause)
            cause = cause.__cause__ or cause.__context__
    assert SECRET not in shown_url(url)


@given(
    st.sampled_from(["http", "s3", "abfss"]), names, names, st.sampled_from(["", "*", "?[0-9]", "run@2", "a;b", "a:b"])
)
def test_a_url_without_credentials_is_taken_as_it_is(scheme, host, folder, name):
    container = "container@" if scheme == "abfss" else ""
    url = f"{scheme}://{container}{host}/{folder}/{name}.h5"
    check_url(url)
    assert shown_url(url) == url


def test_the_password_of_an_endpoint_is_in_no_error():
    options = {"endpoint": f"https://user:{SECRET}@minio:9000"}
    error = stores.explained("s3://b/k", options, RuntimeError(f"https://user:{SECRET}@minio:9000/b"), "read", "few")
    assert SECRET not in str(error)
