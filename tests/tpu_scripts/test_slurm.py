"""Slurm: what sbatch is called with, what the job does before its limit and when it is queued again."""

import signal
import subprocess

import pytest

from tests.tpu_scripts.world import wait_for

ASKED = {"JAXCOMM_SLURM_NODES": "4", "JAXCOMM_SLURM_TIME": "04:00:00"}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]"}
AWKWARD = ["--data-dir", "a b", "--json", 'it\'s "$HOME" `id`', "", "method:top-k"]
UNTIL_TERM = 'trap "echo saved; exit 0" TERM; touch "up$SLURM_PROCID"; while :; do sleep 0.05; done'


@pytest.fixture
def job(world):
    """The checkout is what all nodes share."""
    world.environment |= JOB
    world.machine = lambda name: world.checkout
    world.give_python("any")
    return world


def test_submit(world):
    process = world.call("slurm_submit", "--partition=gpu x", "digits", *AWKWARD, **ASKED, JAXCOMM_SLURM_GPUS="8")
    assert process.returncode == 0, process.stderr
    (call,) = world.calls()
    root = str(world.checkout)
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {call}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert words == [
        *("sbatch", "--job-name=digits", f"--chdir={root}", "--nodes=4", "--ntasks-per-node=8", "--time=04:00:00"),
        *("--signal=B:USR1@180", "--requeue", "--open-mode=append", f"--output={root}/logs/slurm-%j.log"),
        *("--gpus-per-node=8", "--partition=gpu x", f"{root}/tpu_scripts/slurm_job", "digits", *AWKWARD),
    ]
    dry_run = world.call(
        "slurm_submit", "--dry-run", "--partition=gpu x", "digits", *AWKWARD, **ASKED, JAXCOMM_SLURM_GPUS="8"
    )
    assert (dry_run.stdout, world.calls()) == (call + "\n", [])


def test_a_dry_run_leaves_nothing(world):
    before = world.files()
    assert world.call("slurm_submit", "--dry-run", "digits", **ASKED).returncode == 0
    assert world.files() == before


def test_without_gpus(world):
    assert world.call("slurm_submit", "digits", **ASKED).returncode == 0
    (call,) = world.calls()
    assert "--ntasks-per-node=1" in call
    assert "--gpus" not in call


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["digits"], {"JAXCOMM_SLURM_NODES": ""}, "JAXCOMM_SLURM_NODES must be the number of nodes; got nothing"),
        (["digits"], {"JAXCOMM_SLURM_TIME": ""}, "JAXCOMM_SLURM_TIME must be the time limit"),
        (["digits"], {"JAXCOMM_SLURM_GPUS": "all"}, "JAXCOMM_SLURM_GPUS must be a whole number"),
        (["-p", "gpu", "digits"], {}, "written as --option=value; got -p"),
        ([], {}, "must be given an experiment's name"),
    ],
)
def test_bad_words(world, words, variables, message):
    ended = world.call("slurm_submit", *words, **(ASKED | variables))
    assert (ended.returncode, world.calls()) == (2, [])
    assert message in ended.stderr


def test_numbers_of_tasks(job):
    ended = job.call("slurm_job", "digits", *AWKWARD)
    assert ended.returncode == 0, ended.stderr
    for task in "01":
        arguments, environment = job.trained("any", task)
        assert arguments == ["-m", "train", "digits", "--out", "runs/slurm-4711", *AWKWARD]
        assert environment == {
            "JAXCOMM_COORDINATOR": f"127.0.0.1:{61440 + 4711 % 4096}",
            "JAXCOMM_PROCESS_ID": task,
            "JAXCOMM_NUM_PROCESSES": "2",
        }
    assert not any("requeue" in call for call in job.calls())


def test_a_bad_number(job):
    ended = job.call("slurm_job", "digits", SLURM_JOB_ID="x[$(touch run)]")
    assert (ended.returncode, (job.checkout / "run").exists()) == (2, False)
    assert "SLURM_JOB_ID must be a whole number of at least 1; got 'x[$(touch run)]'" in ended.stderr


@pytest.mark.parametrize("inputs", [["--out", "a b"], ["--out=a b"]])
@pytest.mark.parametrize(("restarts", "begun", "resumes"), [("1", True, True), ("1", False, False), ("0", True, False)])
def test_queued_again_goes_on(job, inputs, restarts, begun, resumes):
    if begun:
        (job.checkout / "a b" / "digits").mkdir(parents=True)
    assert job.call("slurm_job", "digits", *inputs, SLURM_RESTART_COUNT=restarts).returncode == 0
    assert job.trained("any", "0")[0][3:] == [*(["--resume"] if resumes else []), *inputs]


@pytest.mark.parametrize("inputs", [["--name", "mine"], ["--name=mine"]])
def test_a_named_run_goes_on(job, inputs):
    (job.checkout / "out" / "mine").mkdir(parents=True)
    assert job.call("slurm_job", "digits", "--out", "out", *inputs, SLURM_RESTART_COUNT="1").returncode == 0
    assert job.trained("any", "0")[0][3:] == ["--resume", "--out", "out", *inputs]


def to_the_limit(job):
    """Runs the job until Slurm says that its time is nearly over: (process, its output, its errors)."""
    process = job.script("slurm_job", "digits")
    for path in (*(job.checkout / f"up{task}" for task in "01"), job.folder / "step"):
        wait_for(path.exists)
    process.send_signal(signal.SIGUSR1)
    return process, *process.communicate(timeout=20)


def test_the_limit_queues_again(job):
    job.behave("any", UNTIL_TERM)
    process, out, err = to_the_limit(job)
    assert process.returncode == 0, err
    assert out.count("saved") == 2
    calls = job.calls()
    assert calls[-2:] == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]


def test_a_failure_is_not_queued_again(job):
    job.behave("any", 'trap "exit 5" TERM; touch "up$SLURM_PROCID"; while :; do sleep 0.05; done')
    assert to_the_limit(job)[0].returncode == 5
    assert not any("requeue" in call for call in job.calls())
