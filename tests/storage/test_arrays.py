"""Arrays on storage: what NumPy writes is read as NumPy reads it, and anything else is refused."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from toffee_dist.storage.files import count_rows, map_array, read_array, save_array

SHAPES = npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
TYPES = st.sampled_from(["?", "i1", "i4", "u8", "f4", ">f8", "c8", "c16"])
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 2), }"


def npy(header: str, version: bytes = b"\x01\x00", numbers: bytes = bytes(32)) -> bytes:
    """Return a file with a header of our choice."""
    text = (header + "\n").encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + numbers


@given(shape=SHAPES, kind=TYPES, ours=st.booleans(), data=st.data())
def test_arrays_are_read_as_numpy_reads_them(
    shape: tuple[int, ...], kind: str, ours: bool, data: st.DataObject
) -> None:
    array = data.draw(npst.arrays(kind, shape))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        if ours:
            save_array(path, array, durable=False)
        else:
            np.save(path, array)
        expected = np.load(path)
        for found in (read_array(path), map_array(path)):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.tobytes() == expected.tobytes()
        assert count_rows(path) == shape[0]
        assert read_array(path, shape[0] // 2).tobytes() == expected[shape[0] // 2 :].tobytes()


def test_the_header_of_the_refusals_is_one_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy(HEADER))
    assert read_array(path).shape == (4, 2)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(npy(HEADER)[:9], id="cut in its length"),
        pytest.param(npy(HEADER)[:40], id="cut in its header"),
        pytest.param(npy(HEADER, b"\x02\x00"), id="another version"),
        pytest.param(npy(HEADER.replace("False", "True")), id="columns first"),
        pytest.param(npy(HEADER.replace("'<f4'", "'|O'")), id="objects"),
        pytest.param(npy(HEADER.replace("'<f4'", "'<f3'")), id="no such type"),
        pytest.param(npy(HEADER.replace("'<f4'", "[('a', '<f4')]")), id="fields"),
        pytest.param(npy(HEADER.replace("(4, 2)", "()")), id="no dimension"),
        pytest.param(npy(HEADER.replace("4", "-4")), id="fewer than none"),
        pytest.param(npy(HEADER.replace("4,", f"{10**15},")), id="a petabyte"),
        pytest.param(npy(HEADER.replace("4,", f"{'9' * 40},")), id="more than there are"),
        pytest.param(npy("(" * 3000), id="what would break a parser"),
        pytest.param(npy(HEADER.replace("(4, 2)", "(4, 2) if 1 else 0")), id="what would be evaluated"),
        pytest.param(npy(HEADER, numbers=bytes(31)), id="numbers missing"),
    ],
)
def test_what_is_not_one_of_ours_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    for read in (read_array, map_array):
        with pytest.raises(ValueError, match=r"not a \.npy file of ours|bytes are missing"):
            read(path)


def test_many_threads_read_headers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    save_array(path, np.ones((3, 2)), durable=False)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: count_rows(path), range(4000))) == {3}
