import pytest

from train.folders import run_folder


def test_a_new_run_takes_the_first_free_name(tmp_path):
    out = tmp_path / "runs"
    for name in ("digits", "digits-2", "digits-3"):
        folder = run_folder(out, "digits", resume=False)
        assert folder == out / name
        folder.mkdir(parents=True)
    assert run_folder(out, "mnist", resume=False) == out / "mnist"


def test_resume_takes_the_newest(tmp_path):
    for name in ("digits", "digits-2", "mnist", "digits-old"):
        (tmp_path / name).mkdir()
    assert run_folder(tmp_path, "digits", resume=True) == tmp_path / "digits-2"
    assert run_folder(tmp_path, "mnist", resume=True) == tmp_path / "mnist"


@pytest.mark.parametrize("others", [[], ["mnist"]])
def test_nothing_to_resume_is_an_error(others, tmp_path):
    for name in others:
        (tmp_path / name).mkdir()
    with pytest.raises(
        ValueError, match=r"--resume goes on with a run that has begun, got no .*digits: leave --resume"
    ):
        run_folder(tmp_path, "digits", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == others
