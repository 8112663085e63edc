"""Whole files: the old one or the new one, whatever happens, and a folder that others may remove."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dsa_verify.base import atomic_write
from dsa_verify.base.atomic_write import FOLDER_TRIES, write_atomically


@pytest.fixture
def tidy(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Another process that removes the folder just before it is written to, as often as there are entries."""
    times: list[Path] = []
    replace = atomic_write._replace

    def removed_first(path: Path, text: str, durable: bool) -> None:
        if times:
            times.pop()
            path.parent.rmdir()
        replace(path, text, durable)

    monkeypatch.setattr(atomic_write, "_replace", removed_first)
    return times


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, tidy: list[Path]) -> None:
    tidy += [tmp_path] * 2
    write_atomically(tmp_path / "findings" / "a.json", "text")
    assert (tmp_path / "findings" / "a.json").read_text() == "text"


def test_not_for_ever(tmp_path: Path, tidy: list[Path]) -> None:
    tidy += [tmp_path] * FOLDER_TRIES
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "findings" / "a.json", "text")


@pytest.mark.parametrize("durable", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old", durable=durable)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync" if durable else "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new", durable=durable)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"


def test_only_what_is_durable_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, and then the folder that names it."""
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.path.isdir(f"/proc/self/fd/{handle}")))
    write_atomically(tmp_path / "a.json", "text", durable=False)
    assert synced == []
    write_atomically(tmp_path / "a.json", "text")
    assert synced == [False, True]
