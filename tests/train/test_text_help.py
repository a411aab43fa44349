"""The folder that LibreOffice's help is downloaded into, before it is unpacked as root."""

import stat
from pathlib import Path

import pytest

from train.data import text_help


@pytest.fixture
def asked(monkeypatch):
    """The commands, with the folder's permissions when each was run; and who was made an owner."""
    commands, owners = [], []

    def run(command, folder):
        commands.append((command[:2], stat.S_IMODE(Path(folder).stat().st_mode)))
        for package in text_help.PACKAGES:
            (Path(folder) / f"{package}.deb").touch()

    monkeypatch.setattr(text_help, "_run", run)
    monkeypatch.setattr(text_help.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(text_help.shutil, "chown", lambda folder, user: owners.append(user))
    return commands, owners


@pytest.mark.parametrize(("uid", "expected"), [(0, ["_apt"]), (1000, [])])
def test_nobody_but_apt_can_write_what_root_unpacks(asked, uid, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(text_help.os, "geteuid", lambda: uid)
    text_help.fetch_packages(tmp_path, lambda line: None)
    commands, owners = asked
    assert commands == [(["apt-get", "download"], 0o700), (["dpkg", "-x"], 0o700), (["dpkg", "-x"], 0o700)]
    assert owners == expected


def test_a_system_without_that_user_downloads_as_root(asked, tmp_path, monkeypatch):
    def chown(folder, user):
        raise LookupError(f"no such user: {user!r}")

    monkeypatch.setattr(text_help.os, "geteuid", lambda: 0)
    monkeypatch.setattr(text_help.shutil, "chown", chown)
    text_help.fetch_packages(tmp_path, lambda line: None)
    assert len(asked[0]) == 3
