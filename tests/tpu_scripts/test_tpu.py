"""Cloud TPU: what gcloud is called with, and what then happens on the workers."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.tpu_scripts.world import wait_for, without_file

TPU = {
    "JAXCOMM_TPU_NAME": "my-tpu",
    "JAXCOMM_TPU_PROJECT": "my-project",
    "JAXCOMM_TPU_ZONE": "us-east5-b",
    "JAXCOMM_TPU_TYPE": "v5litepod-16",
    "JAXCOMM_TPU_VERSION": "v2-alpha-tpuv5-lite",
    "JAXCOMM_TPU_POLL_SECONDS": "0.1",
}
TWO = {"JAXCOMM_TPU_SLICES": "2"}
WHERE = "--project=my-project --zone=us-east5-b"
# A shell would split or expand every one of these.
AWKWARD = ["--data-dir", "a b", "--json", 'it\'s "$HOME" `id` \\ ;&|*\ttab\nline', "", "method:top-k"]
# Trains until it is told to save.
LONG = 'trap "sleep 0.5; echo saved; exit 0" TERM; while :; do sleep 0.05; done'


@pytest.fixture
def tpu(world):
    world.environment |= TPU
    return world


@pytest.fixture
def ready(tpu):
    """Two workers with everything installed."""
    (tpu.folder / "tpu").write_text("READY\n")
    tpu.install("w0", "w1")
    give_metadata(tpu)
    return tpu


def give_metadata(world, environment="ACCELERATOR_TYPE: 'v5litepod-16'\nZONE: 'us-east5-b'\n", workers=2):
    names = (world.folder / "workers").read_text().split()
    for index, name in enumerate(names):
        folder = world.folder / "machines" / name / "metadata"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent-worker-number").write_text(str(index % workers))
        (folder / "worker-network-endpoints").write_text("unused:0:10.0.0.5,unused:1:10.0.0.6")
        (folder / "tpu-env").write_text(environment.replace("{slice}", str(index // workers)))


def test_create(tpu):
    process = tpu.call("create", "--spot", "--network=a b")
    assert process.returncode == 0, process.stderr
    lists = f"gcloud compute tpus tpu-vm list {WHERE} --format=value\\(name.basename\\(\\)\\,state\\)"
    created = (
        f"gcloud compute tpus tpu-vm create my-tpu {WHERE} --accelerator-type=v5litepod-16 "
        "--version=v2-alpha-tpuv5-lite --quiet --spot --network=a\\ b"
    )
    assert tpu.calls() == [lists, created, lists]
    assert "my-tpu is ready." in process.stderr

    repeat = tpu.call("create")
    assert repeat.returncode == 0
    assert tpu.calls() == [lists, lists]
    assert "my-tpu exists already, and is READY." in repeat.stderr


def test_create_slices(tpu):
    (tpu.folder / "states").write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    process = tpu.call("create", **TWO)
    assert process.returncode == 0, process.stderr
    lists = f"gcloud compute tpus queued-resources list {WHERE} --format=value\\(name.basename\\(\\)\\,state.state\\)"
    created = (
        f"gcloud compute tpus queued-resources create my-tpu {WHERE} --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --node-count=2 --node-prefix=my-tpu --quiet"
    )
    assert tpu.calls() == [lists, created, lists, lists, lists]
    assert "is WAITING_FOR_RESOURCES; looking again in 0.1 seconds" in process.stderr

    (tpu.folder / "tpu").write_text("")
    assert tpu.call("create", "--no-wait", **TWO).returncode == 0
    assert tpu.calls() == [lists, created]


@pytest.mark.parametrize(
    ("state", "message"),
    [("FAILED", "delete, then create"), ("PREEMPTED", "delete, then create"), ("STOPPED", "tpu-vm start my-tpu")],
)
def test_create_gives_up(tpu, state, message):
    (tpu.folder / "states").write_text(f"CREATING\n{state}\n")
    process = tpu.call("create")
    assert process.returncode == 1
    assert state in process.stderr
    assert message in process.stderr


@pytest.mark.parametrize("verb", ["create", "delete"])
def test_a_failing_gcloud(tpu, verb):
    (tpu.folder / "broken").touch()
    ended = tpu.call(verb)
    assert ended.returncode == 1
    assert "no permission" in ended.stderr
    assert len(tpu.calls()) == 1


@pytest.mark.parametrize(("slices", "group", "force"), [("1", "tpu-vm", ""), ("2", "queued-resources", " --force")])
def test_delete_twice(tpu, slices, group, force):
    (tpu.folder / "tpu").write_text("READY\n")
    assert tpu.call("delete", JAXCOMM_TPU_SLICES=slices).returncode == 0
    assert tpu.calls()[1:] == [f"gcloud compute tpus {group} delete my-tpu {WHERE} --quiet{force}"]
    repeat = tpu.call("delete", JAXCOMM_TPU_SLICES=slices)
    assert repeat.returncode == 0
    assert "There is no my-tpu." in repeat.stderr
    assert len(tpu.calls()) == 1


VERBS = {
    "create": ["--spot"],
    "setup": [],
    "run": ["--resume", "--run", "first", "digits", *AWKWARD],
    "logs": ["--all", "--no-follow", "--run", "first"],
    "stop": [],
    "delete": [],
}


INTERNAL = {"JAXCOMM_TPU_INTERNAL_IP": "1"}
DRY = [*((verb, {}) for verb in VERBS), *((verb, TWO) for verb in ("create", "run", "delete"))]
DRY += [(verb, INTERNAL) for verb in ("create", "run")]


@pytest.mark.parametrize(("verb", "variables"), DRY)
def test_a_dry_run(ready, verb, variables):
    if verb == "create":
        (ready.folder / "tpu").write_text("")
    if verb == "logs":
        for name in ("w0", "w1"):
            (ready.machine(name) / "logs").mkdir()
            (ready.machine(name) / "logs" / "first.log").write_text("training\n")
    before = ready.files()
    process = ready.call(verb, "--dry-run", *VERBS[verb], **variables)
    assert process.returncode == 0, process.stderr
    assert (ready.calls(), ready.files()) == ([], before)
    ran = ready.call(verb, *VERBS[verb], **variables)
    assert ran.returncode == 0, ran.stderr
    calls = ready.calls()
    assert calls
    commands = [line for line in without_file(process.stdout).splitlines() if not line.startswith("git ")]
    assert commands == without_file("\n".join(calls)).splitlines()
    assert ("--internal-ip" in "".join(calls)) == (
        "JAXCOMM_TPU_INTERNAL_IP" in variables and verb not in ("create", "delete")
    )


# Every verb checks the first three in one place, `create` all five.
NEEDED = [("create", name) for name in list(TPU)[:5]] + [
    (verb, "JAXCOMM_TPU_NAME") for verb in VERBS if verb != "create"
]


@pytest.mark.parametrize(("verb", "name"), NEEDED)
def test_a_missing_variable(tpu, verb, name):
    ended = tpu.call(verb, *(["digits"] if verb == "run" else []), **{name: ""})
    assert ended.returncode == 2
    assert f"{verb}: {name} must be the " in ended.stderr
    assert "Set it in the environment (docs/launching.md" in ended.stderr
    assert tpu.calls() == []


@pytest.mark.parametrize(
    ("verb", "words", "variables", "message"),
    [
        ("run", [], {}, "must be given an experiment's name; got none"),
        ("run", ["--steps", "3"], {}, "Options before NAME must be those of run; got --steps"),
        ("run", ["--run", "a/b", "digits"], {}, "got 'a/b'"),
        ("run", ["digits"], {"JAXCOMM_TPU_SLICES": "two"}, "JAXCOMM_TPU_SLICES must be a whole number"),
        ("run", ["digits"], {"JAXCOMM_FOLDER": "a b"}, "JAXCOMM_FOLDER must be a path"),
        ("logs", ["--run", "../x"], {}, "got '../x'"),
        ("create", ["spot"], {}, "got 'spot'. Write --option=value"),
        ("setup", ["now"], {}, "got 'now'"),
    ],
)
def test_bad_words(tpu, verb, words, variables, message):
    ended = tpu.call(verb, *words, **variables)
    assert (ended.returncode, tpu.calls()) == (2, [])
    assert message in ended.stderr


NAMES = ("--flags-file=/etc/passwd", "-v", "../my-tpu", "my-tpu/..", "my tpu", "my-tpu\n", "$(id)")


@pytest.mark.parametrize(("verb", "name"), [*((verb, NAMES[0]) for verb in VERBS), *(("setup", n) for n in NAMES[1:])])
def test_bad_names(tpu, verb, name):
    before = tpu.files()
    ended = tpu.call(verb, *(["digits"] if verb == "run" else []), JAXCOMM_TPU_NAME=name)
    assert (ended.returncode, tpu.calls(), tpu.files()) == (2, [], before)
    rule = "JAXCOMM_TPU_NAME must be letters, digits and '-', and begin with no '-'; got"
    assert f"{verb}: {rule} '{name}'. Choose another." in ended.stderr


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_setup_in_a_shared_temporary_folder(ready, dry):
    """Its own file has a name that nobody can know before."""
    precious = ready.folder / "precious"
    precious.write_text("mine")
    for name in ("jaxcomm-my-tpu.tar.gz", "jaxcomm.XXXXXXXXXX", "jaxcomm.tar.gz"):
        (ready.folder / name).symlink_to(precious)
    links = {path for path in ready.files() if path.is_symlink() and path.parent == ready.folder}
    files = []
    for _ in range(2):
        process = ready.call("setup", *dry)
        assert process.returncode == 0, process.stderr
        files += [
            word for line in ready.calls() for word in line.split() if word.startswith(f"{ready.folder}/jaxcomm.")
        ]
        assert precious.read_text() == "mine"
        assert {path for path in ready.files() if path.parent == ready.folder and "jaxcomm" in path.name} == links
    assert len(set(files)) == len(files) == (0 if dry else 2)


def test_setup_again(tpu):
    (tpu.folder / "tpu").write_text("READY\n")
    (tpu.checkout / "runs").mkdir()
    (tpu.checkout / "runs" / "large").touch()
    (tpu.checkout / "my file.py").write_text("first")
    for name in ("w0", "w1"):
        tpu.give_python(name)
        (tpu.machine(name) / "runs").mkdir()
    for text in ("first", "second"):
        (tpu.checkout / "my file.py").write_text(text)
        process = tpu.call("setup", JAXCOMM_EXTRAS="tpu,data")
        assert process.returncode == 0, process.stderr
        for name in ("w0", "w1"):
            machine = tpu.machine(name)
            assert (machine / "my file.py").read_text() == text
            assert list((machine / "runs").iterdir()) == []
            assert f"[{name}] Installed with tpu,data." in process.stderr
            assert not (machine.parent / "jaxcomm.tar.gz").exists()
    assert (machine / "pip").read_text() == "-m pip install --quiet --disable-pip-version-check -e .[tpu,data]\n" * 2
    assert not list(tpu.folder.glob("*.tar.gz"))


def test_a_python_that_is_new_enough(world):
    """The images of TPU VMs have Python 3.10 as python3; if there is no newer one, uv fetches one."""
    world.install("w0")
    machine = world.machine("w0")
    folder = world.folder / "bin"
    folder.mkdir()

    def give(name, version, suffix=""):
        """A Python that reports a version, and records how else it is called."""
        claim = f'exec {sys.executable} -c "import sys; sys.version_info = (3, {version}, 0); $2"'
        text = f'#!/bin/sh\n[ "$1" != -c ] || {claim}\necho "$0 $*" >> {world.folder}/pythons\n{suffix}\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def install():
        (machine / ".venv" / "bin" / "python").unlink()
        path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(
            [machine / "tpu_scripts" / "worker", "install", "tpu"], env=path, check=True, capture_output=True
        )
        pythons = (world.folder / "pythons").read_text().replace(f"{folder}/", "").splitlines()
        (world.folder / "pythons").unlink()
        return pythons

    makes = f"cp {folder}/made .venv/bin/python"
    pip = ".venv/bin/python -m pip install --quiet --disable-pip-version-check -e .[tpu]"
    give("made", 12)
    give("python3", 10, f'[ "$2" != uv ] || {makes}')
    give("python3.13", 10)
    give("python3.12", 12, makes)
    give("python3.11", 10)
    assert install() == ["python3.12 -m venv --clear .venv", pip]
    give("python3.12", 10)
    assert install() == [
        "python3 -m pip install --quiet --user uv",
        "python3 -m uv venv --clear --seed --python 3.12 .venv",
        pip,
    ]


def test_run_of_a_slice(ready):
    process = ready.call("run", "digits", *AWKWARD)
    assert process.returncode == 0, process.stderr
    for index, name in enumerate(("w0", "w1")):
        wait_for((ready.machine(name) / "logs" / "digits.exit").exists)
        arguments, environment = ready.trained(name)
        assert arguments == ["-m", "train", "digits", *AWKWARD]
        assert environment == {
            "JAXCOMM_COORDINATOR": "10.0.0.5:8482",
            "JAXCOMM_PROCESS_ID": str(index),
            "JAXCOMM_NUM_PROCESSES": "2",
        }
    logs = ready.call("logs", "--all")
    assert "[w0] training\n" in logs.stdout
    assert "[w1] training\n" in logs.stdout
    assert "[w0] digits ended with 0." in logs.stderr
    assert "[w1]" not in ready.call("logs").stdout


def test_run_of_several_slices(ready):
    (ready.folder / "workers").write_text("w0 w1 w2 w3\n")
    ready.install("w2", "w3")
    give_metadata(
        ready,
        "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '{slice}'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.1.7:8080'\n",
    )
    assert ready.call("run", "--resume", "digits", "--seed", "1", **TWO).returncode == 0
    for index in range(4):
        wait_for((ready.machine(f"w{index}") / "logs" / "digits.exit").exists)
        arguments, environment = ready.trained(f"w{index}")
        assert arguments == ["-m", "train", "digits", "--slices", "2", "--resume", "--seed", "1"]
        assert environment["JAXCOMM_COORDINATOR"] == "10.0.1.7:8482"
        assert (environment["JAXCOMM_PROCESS_ID"], environment["JAXCOMM_NUM_PROCESSES"]) == (str(index), "4")
    calls = ready.calls()
    assert len(calls) == 2
    assert all("queued-resources ssh my-tpu" in call and "--node=all --worker=all" in call for call in calls)


def test_a_bad_number(ready):
    give_metadata(ready)
    (ready.folder / "machines" / "w0" / "metadata" / "agent-worker-number").write_text("x[$(touch touched)]")
    ended = ready.call("run", "digits")
    assert ended.returncode == 2
    assert "must number its workers and slices; got 'x[$(touch touched)]', '' and ''" in ended.stderr
    assert not [*ready.folder.rglob("touched")]


def test_a_second_run_and_stop(ready):
    ready.behave("w1", LONG)
    assert ready.call("run", "digits").returncode == 0
    wait_for((ready.machine("w0") / "logs" / "digits.exit").exists)
    (ready.machine("w0") / "arguments").unlink()

    second = ready.call("run", "--run", "second", "digits")
    assert second.returncode == 1
    assert "[w1] A run is going on here: digits, process " in second.stderr
    assert not (ready.machine("w0") / "arguments").exists()
    assert "[w1] digits is running." in ready.call("logs", "--all", "--no-follow").stderr

    process = ready.call("stop")
    assert process.returncode == 0
    assert "[w0] Nothing runs here." in process.stderr
    assert "[w1] digits has ended." in process.stderr
    assert (ready.machine("w1") / "logs" / "digits.exit").read_text() == "0\n"
    logs = ready.call("logs", "--all")
    assert "[w1] saved\n" in logs.stdout
    assert "[w1] digits ended with 0." in logs.stderr
    assert ready.call("stop").returncode == 0
    assert ready.call("run", "--run", "second", "digits").returncode == 0


def test_logs_without_the_launcher(ready):
    ready.behave("w0", "while [ ! -e enough ]; do sleep 0.05; done; echo last; exit 7")
    begin = time.monotonic()
    assert ready.call("run", "digits").returncode == 0  # though the trainer still runs
    following = ready.script("logs")
    (ready.machine("w0") / "enough").touch()
    out, err = following.communicate(timeout=20)
    assert "[w0] last\n" in out
    assert "[w0] digits ended with 7." in err
    assert time.monotonic() - begin < 20


def test_a_stale_pid_file(ready):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        for name, text in (("w0", f"{stranger.pid} 12345\n"), ("w1", "999999999 1\n")):
            (ready.machine(name) / "logs").mkdir()
            (ready.machine(name) / "logs" / "old.pid").write_text(text)
        try:
            assert ready.call("stop").returncode == 0
            assert ready.call("run", "digits").returncode == 0
            wait_for((ready.machine("w1") / "logs" / "digits.exit").exists)
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_killed_process(ready):
    ready.behave("w0", LONG)
    assert ready.call("run", "digits").returncode == 0
    pid = int((ready.machine("w0") / "logs" / "digits.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    wait_for((ready.machine("w0") / "logs" / "digits.exit").exists)
    assert "[w0] digits ended with 137." in ready.call("logs").stderr
