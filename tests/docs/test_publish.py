"""What a package index and the forge read: the description of the package, workflows, and forms."""

import re
import runpy
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Beside Python and the scripts here, what a runner's shell has.
SHELL = {"echo", "test"}
PIP = {"pip", "uv"}


def jobs(path):
    """The jobs of a workflow, by name."""
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("repository", [None, "https://example.com/owner/name"])
def test_an_index_renders_the_readme(repository):
    markdown = pytest.importorskip("readme_renderer.markdown", reason="readme_renderer is in the extra test")
    page = SETUP["description"]((ROOT / "README.md").read_text(), repository)
    html = markdown.render(page, stream=None)
    assert html is not None
    assert "python -m benchmarks.exchange --shapes resnet50" in re.sub("<[^>]+>", "", html)
    targets = re.findall(r"""(?:href|src)=["']([^"']+)""", html)
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    paths = [target.partition("/HEAD/")[2].partition("#")[0] for target in targets if "/HEAD/" in target]
    assert bool(paths) == (repository is not None)
    assert all((ROOT / path).is_file() for path in paths)


def test_links_and_brackets():
    page = "[the\nguide](docs/guide.md#a) ![x](a.png)[b](https://b.c)\n```\nf[0](x)\n```\n"
    assert SETUP["description"](page, None) == "the\nguide [b](https://b.c)\n```\nf[0](x)\n```\n"
    assert "[the\nguide](https://h/o/n/blob/HEAD/docs/guide.md#a) ![x](https://h/o/n/raw/HEAD/a.png)" in SETUP[
        "description"
    ](page, "https://h/o/n")


def commands(path):
    """The commands that a workflow runs, as words, without what they write to."""
    for job in jobs(path).values():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                yield shlex.split(line.partition(" >")[0])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_workflows_exist(path):
    names = list(commands(path))
    assert names
    for words in names:
        if words[0] == "python3":
            assert words[1] == "-m"
            assert words[2] in PIP or find_spec(words[2]), words
        elif words[0] not in SHELL:
            script = ROOT / words[0]
            assert script.is_file(), words
            assert script.stat().st_mode & 0o100, words
    for job in jobs(path).values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step.get("uses", "a/b@v1"))


def test_pythons_of_ci():
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["run"]["strategy"]["matrix"]["include"]
    versions = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert [row["python"] for row in matrix] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert matrix[0]["packages"] == "oldest"


def test_one_job_may_ask_for_a_token():
    build, publish = (jobs(ROOT / ".github" / "workflows" / "release.yml")[name] for name in ("build", "publish"))
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert "permissions" not in build
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_forms_and_dependabot():
    forms = {path.name: path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert yaml.safe_load(forms.pop("config.yml").read_text()) == {"blank_issues_enabled": True}
    assert forms
    for path in forms.values():
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form) <= {"name", "description", "labels", "body"}
        assert len({item["id"] for item in form["body"]}) == len(form["body"])
        for item in form["body"]:
            assert item["type"] in ("input", "textarea")
            assert item["attributes"]["label"]
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}
    pinned = {name.partition("==")[0] for name in PROJECT["optional-dependencies"]["test"] if "==" in name}
    (pip,) = (update for update in updates if update["package-ecosystem"] == "pip")
    assert {row["dependency-name"] for row in pip["allow"]} == pinned
