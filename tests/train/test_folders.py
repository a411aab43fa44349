import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from train.folders import check_fresh, run_folder
from train.restarts import BEGUN, note_begun, previous_run_folder


def test_the_first_free_name(tmp_path):
    out = tmp_path / "runs"
    for name in ("digits", "digits-2", "digits-3"):
        with run_folder(out, "digits", resume=False, runs=["plump_dp"]) as folder:
            assert folder == out / name
            assert folder.is_dir()
    with run_folder(out, "mnist", resume=False) as folder:
        assert folder == out / "mnist"


def test_two_runs_at_once(tmp_path):
    with run_folder(tmp_path, "digits", resume=False) as one, run_folder(tmp_path, "digits", resume=False) as second:
        assert (one.name, second.name) == ("digits", "digits-2")


def test_resume_takes_the_last(tmp_path, capsys):
    for name in ("digits", "digits-2", "digits-3", "mnist", "digits-old", "digits-02"):
        (tmp_path / name).mkdir()
    for name, last, of in (("digits", "digits-3", " of 3 runs"), ("mnist", "mnist", "")):
        with run_folder(tmp_path, name, resume=True) as folder:
            assert folder == tmp_path / last
        message = capsys.readouterr().err
        assert message == f"train: --resume goes on with {folder}{of and ', which was written last'}{of}\n"
    for number, last in enumerate(("digits", "digits-2", "digits-3", "digits-2"), 1):
        (tmp_path / last / "goodput.json").touch()
        os.utime(tmp_path / last / "goodput.json", (2e9 + number,) * 2)
        with run_folder(tmp_path, "digits", resume=True) as folder:
            assert folder.name == last
    shutil.rmtree(tmp_path / "digits-2")  # a gap hides nothing
    with run_folder(tmp_path, "digits", resume=True) as folder:
        assert folder.name == "digits-3"


@pytest.mark.parametrize("folders", [[], ["mnist"]])
def test_nothing_to_resume(folders, tmp_path):
    for name in folders:
        (tmp_path / name).mkdir()
    message = r"--resume must go on with a run that has begun; got no .*digits. Leave --resume"
    with pytest.raises(ValueError, match=message), run_folder(tmp_path, "digits", resume=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == folders


def test_the_same_method(tmp_path):
    with run_folder(tmp_path, "digits", resume=False, runs=["plump_dp", "dct_dp"]):
        pass
    with run_folder(tmp_path, "digits", resume=True, runs=["plump_dp", "dct_dp"]):
        pass
    message = r"got plump_dp, topk for .*digits, which has plump_dp, dct_dp. Give the same method"
    with (
        pytest.raises(ValueError, match=message),
        run_folder(tmp_path, "digits", resume=True, runs=["plump_dp", "topk"]),
    ):
        pass
    assert json.loads((tmp_path / "digits" / "runs.json").read_text()) == ["plump_dp", "dct_dp"]


def test_one_run_at_a_time(tmp_path):
    with run_folder(tmp_path, "digits", resume=False, runs=["dct_dp"]):
        refusal = pytest.raises(ValueError, match=r"got .*digits, in which another process trains. Wait for it")
        with refusal, run_folder(tmp_path, "digits", resume=True, runs=["dct_dp"]):
            pass
        # Also locked by another process, but no longer once it is killed.
        code = (
            "import sys, time, pathlib\nfrom train.folders import run_folder\n"
            f"with run_folder(pathlib.Path({str(tmp_path)!r}), 'mnist', resume=False):\n"
            "    print('there', flush=True)\n    time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            with pytest.raises(ValueError, match="another process trains"), run_folder(tmp_path, "mnist", resume=True):
                pass
            process.kill()
        with run_folder(tmp_path, "mnist", resume=True) as folder:
            assert folder == tmp_path / "mnist"
    with run_folder(tmp_path, "digits", resume=True, runs=["dct_dp"]):
        pass


def test_missing_checkpoints(tmp_path):
    check_fresh(tmp_path, 10)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * 10)
    check_fresh(tmp_path, 10)  # it was killed before the first
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * 11)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"got 11 steps in .*metrics\.jsonl and nothing in .*checkpoints. Put the"):
        check_fresh(tmp_path, 10)
    (tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()
    check_fresh(tmp_path, 10)  # it was killed while it wrote the first


def test_early_failures_leave_nothing(tmp_path):
    out = tmp_path / "runs"
    with pytest.raises(OSError, match="full"), run_folder(out, "digits", resume=False):
        raise OSError("full")
    assert not out.exists()
    with run_folder(out, "digits", resume=False) as folder:
        (folder / "metrics.jsonl").touch()
    assert (out / "digits" / "metrics.jsonl").exists()
    with pytest.raises(OSError, match="full"), run_folder(out, "digits", resume=False):
        raise OSError("full")
    assert [path.name for path in out.iterdir()] == ["digits"]
    with pytest.raises(OSError, match="full"), run_folder(out, "digits", resume=True):
        raise OSError("full")
    assert (out / "digits" / "metrics.jsonl").exists()


def test_an_early_failure_leaves_another_run(tmp_path):
    """The folder of all runs was new to both."""
    out = tmp_path / "runs"
    with contextlib.ExitStack() as other:

        def begin_another_and_fail():
            other.enter_context(run_folder(out, "digits", resume=False))
            raise OSError("full")

        with pytest.raises(OSError, match="full"), run_folder(out, "digits", resume=False):
            begin_another_and_fail()
        assert [path.name for path in out.iterdir()] == ["digits-2"]


def test_a_full_disk_keeps_what_a_run_has(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    with run_folder(tmp_path, "digits", resume=False, runs=["plump_dp", "dct_dp"]) as folder:
        (folder / "metrics.jsonl").touch()
    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, full)
    monkeypatch.setattr(Path, "write_text", full)
    with run_folder(tmp_path, "digits", resume=True, runs=["plump_dp", "dct_dp"]):
        pass
    assert json.loads((folder / "runs.json").read_text()) == ["plump_dp", "dct_dp"]


@pytest.mark.parametrize("files", [[], ["metrics.jsonl"]])
def test_a_folder_that_is_removed_is_not_gone_on_with(files, tmp_path, monkeypatch):
    def begin(folder):
        note_begun(folder)
        for name in files:
            (folder / name).touch()
        raise OSError("full")

    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv(BEGUN, str(file.fileno()))
        with pytest.raises(OSError, match="full"), run_folder(tmp_path, "digits", resume=False) as folder:
            begin(folder)
        assert previous_run_folder() == (tmp_path / "digits" if files else None)


@pytest.mark.parametrize("out", ["/dev/null", "/dev/null/runs", "/proc/runs", "/dev/full/\udcff"])
def test_a_folder_that_cannot_be_made(out):
    message = re.escape(f"--out must be a folder in which folders can be made; got {out!r}: ")
    with pytest.raises(OSError, match=message), run_folder(Path(out), "digits", resume=False):
        pass


@pytest.mark.parametrize("is_there", [False, True])
def test_errors_remove_new_folders(is_there, tmp_path):
    out = tmp_path / "runs"
    if is_there:
        out.mkdir()
    with pytest.raises(RuntimeError, match="early"), run_folder(out, "digits", resume=False):
        raise RuntimeError("early")
    assert out.exists() == is_there
    assert not (out / "digits").exists()
