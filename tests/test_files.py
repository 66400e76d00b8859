"""Files that several processes write at the same time."""

import threading

import pytest

from tilewright import files


def test_writers_at_the_same_time_do_not_meet(tmp_path):
    path = tmp_path / "new" / "kernel.cubin"
    failed = []

    def write():
        for _ in range(200):
            try:
                files.replace(path, b"the same bytes")
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert path.read_bytes() == b"the same bytes"
    assert [*path.parent.iterdir()] == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        files.replace(path, "text")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
