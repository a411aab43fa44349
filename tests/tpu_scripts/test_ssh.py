"""Hosts over plain ssh: numbers, output, signals, exit codes, and two hosts that really train."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tpu_scripts.world import wait_for, without_file

ROOT = Path(__file__).parents[2]
AWKWARD = ["--data-dir", "a b", "--json", 'it\'s "$HOME" `id` \\ ;&|*\ttab\nline', "", "method:top-k"]
UNTIL_TERM = 'trap "echo saved; exit 0" TERM; touch up; while :; do sleep 0.05; done'
UNTIL_INT = 'trap "exit 130" INT; trap "" TERM; touch up; while :; do sleep 0.05; done'
DEAF = 'trap "" TERM INT; touch up; while :; do sleep 0.05; done'


@pytest.fixture
def pair(world):
    (world.folder / "hosts").write_text("# two hosts\nme@h0 10.0.0.5\n\n  h1  # the second\n")
    world.install("me@h0", "h1")
    return world


def up(world, *names):
    for name in names:
        wait_for((world.machine(name) / "up").exists)


def hosts(world):
    return str(world.folder / "hosts")


def test_numbers_and_awkward_words(pair):
    ended = pair.call("ssh_run", "--resume", hosts(pair), "digits", *AWKWARD, JAXCOMM_PORT="1234")
    assert ended.returncode == 0, ended.stderr
    for index, name in enumerate(("me@h0", "h1")):
        arguments, environment = pair.trained(name)
        assert arguments == ["-m", "train", "digits", "--resume", *AWKWARD]
        assert environment == {
            "JAXCOMM_COORDINATOR": "10.0.0.5:1234",
            "JAXCOMM_PROCESS_ID": str(index),
            "JAXCOMM_NUM_PROCESSES": "2",
            "JAXCOMM_GRACE_SECONDS": "60",
        }
        assert f"[{name}] training\n" in ended.stdout


def test_the_coordinator(pair):
    (pair.folder / "hosts").write_text("me@h0\nh1")
    assert pair.call("ssh_run", hosts(pair), "digits").returncode == 0
    assert pair.trained("h1")[1]["JAXCOMM_COORDINATOR"] == "h0:9777"


@pytest.mark.parametrize("verb", ["ssh_run", "ssh_setup"])
def test_a_dry_run(pair, verb):
    words = [hosts(pair), *(["digits", *AWKWARD] if verb == "ssh_run" else [])]
    process = pair.call(verb, "--dry-run", *words)
    assert process.returncode == 0, process.stderr
    assert pair.calls() == []
    ran = pair.call(verb, *words)
    assert ran.returncode == 0, ran.stderr
    commands = without_file("\n".join(sorted(process.stdout.splitlines())))
    calls = without_file("\n".join(sorted(pair.calls())))
    assert calls
    assert "\n".join(line for line in commands.splitlines() if not line.startswith("git ")) == calls


def test_setup(world):
    (world.folder / "hosts").write_text("h0\nh1\n")
    (world.checkout / "new file").write_text("text")
    for name in ("h0", "h1"):
        world.give_python(name)
    for _ in range(2):
        process = world.call("ssh_setup", hosts(world))
        assert process.returncode == 0, process.stderr
    for name in ("h0", "h1"):
        assert (world.machine(name) / "new file").read_text() == "text"
        assert (world.machine(name) / "pip").read_text().count("-e .[cuda,data]\n") == 2


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", ["digits"], "must name a host; got none"),
        ("h0\nh1 10.0.0.6\n", ["digits"], "Only the first host of"),
        ("h0 a b\n", ["digits"], "Line 1 of"),
        ("-oProxyCommand=id\n", ["digits"], "got '-oProxyCommand=id'"),
        ("h0\n", [], "must be given HOSTS and NAME; got 1 arguments"),
        (None, ["digits"], "The file of hosts must be one that can be read"),
    ],
)
def test_bad_hosts(world, text, words, message):
    if text is not None:
        (world.folder / "hosts").write_text(text)
    ended = world.call("ssh_run", hosts(world), *words)
    assert (ended.returncode, world.calls()) == (2, [])
    assert message in ended.stderr


def test_a_bad_port(world):
    (world.folder / "hosts").write_text("h0\n")
    for port in ("99999", "http", "1" * 20):
        ended = world.call("ssh_run", hosts(world), "digits", JAXCOMM_PORT=port)
        assert (ended.returncode, world.calls()) == (2, [])
        assert f"JAXCOMM_PORT must be a whole number of at least 1 and at most 65535; got '{port}'" in ended.stderr


@pytest.mark.parametrize(
    ("send", "number", "behaviour", "code"),
    [
        (os.kill, signal.SIGTERM, UNTIL_TERM, 0),
        (os.kill, signal.SIGINT, UNTIL_INT, 130),
        (os.killpg, signal.SIGHUP, UNTIL_TERM, 0),
        (os.killpg, signal.SIGINT, UNTIL_INT, 130),
    ],
    ids=["launcher TERM", "launcher INT", "terminal HUP", "terminal INT"],
)
def test_signals(pair, send, number, behaviour, code):
    """Sent to the launcher alone, or, as by a terminal, also to the ssh that it has started."""
    for name in ("me@h0", "h1"):
        pair.behave(name, behaviour)
    process = pair.script("ssh_run", hosts(pair), "digits")
    up(pair, "me@h0", "h1")
    send(process.pid, number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    if code == 0:
        assert "[me@h0] saved\n" in out
        assert "[h1] saved\n" in out


def test_one_failure_stops_all(pair):
    pair.behave("me@h0", UNTIL_TERM)
    pair.behave("h1", "while [ ! -e enough ]; do sleep 0.05; done; echo broken; exit 7")
    process = pair.script("ssh_run", hosts(pair), "digits")
    up(pair, "me@h0")
    (pair.machine("h1") / "enough").touch()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 7
    assert "[h1] broken\n" in out
    assert "[me@h0] saved\n" in out
    assert "ssh_run: h1 ended with 7.\nssh_run: Stopping the others.\n" in err


def test_kill_after_the_grace(pair):
    pair.behave("me@h0", DEAF)
    pair.behave("h1", "while [ ! -e ../../me@h0/jaxcomm/up ]; do sleep 0.05; done; exit 3")
    ended = pair.call("ssh_run", hosts(pair), "digits", JAXCOMM_GRACE_SECONDS="1")
    assert ended.returncode == 3
    assert "Killing what has not stopped after 1 seconds." in ended.stderr
    assert "me@h0 ended with 137." in ended.stderr


def test_an_unreachable_host(pair):
    (pair.folder / "hosts").write_text("me@h0\nunreachable\n")
    pair.behave("me@h0", UNTIL_TERM)
    ended = pair.call("ssh_run", hosts(pair), "digits")
    assert ended.returncode == 255
    assert "[unreachable] ssh: connect to host" in ended.stdout


@pytest.mark.parametrize("behaviour", [UNTIL_TERM, DEAF], ids=["listens", "deaf"])
def test_the_launcher_dies(pair, behaviour):
    for name in ("me@h0", "h1"):
        pair.behave(name, behaviour)
    process = pair.script("ssh_run", hosts(pair), "digits", JAXCOMM_GRACE_SECONDS="1")
    up(pair, "me@h0", "h1")
    process.kill()
    for name in ("me@h0", "h1"):
        wait_for((pair.machine(name) / "logs" / "digits.exit").exists)
        assert (pair.machine(name) / "logs" / "digits.exit").read_text() == (
            "0\n" if behaviour == UNTIL_TERM else "137\n"
        )
    process.communicate(timeout=20)


def test_signals_through_the_script(world):
    """The end of the session, or of the machine."""
    world.install("h0")
    world.behave("h0", 'trap "sleep 0.5; echo saved; exit 0" TERM; touch up; while :; do sleep 0.05; done')
    process = subprocess.Popen(
        [world.machine("h0") / "tpu_scripts" / "worker", "attach", "first", "digits"],
        env=world.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    up(world, "h0")
    process.terminate()
    assert process.stdout.read() == "training\nsaved\n"
    assert process.wait(timeout=20) == 0
    process.stdin.close()


def test_a_host_that_trains(pair):
    for name in ("me@h0", "h1"):
        pair.behave(name, UNTIL_TERM)
    first = pair.script("ssh_run", hosts(pair), "digits")
    up(pair, "me@h0", "h1")
    second = pair.call("ssh_run", "--run", "second", hosts(pair), "digits")
    assert second.returncode == 1
    assert "[h1] [h1] A run is going on here: digits" in second.stdout
    assert first.poll() is None
    first.terminate()
    assert first.wait(timeout=20) == 0


@pytest.mark.slow
def test_two_hosts_train(world):
    """The launcher, a copy of the tree on each host, and the trainer's own two processes."""
    for name in ("train", "configs", "models", "jaxcomm"):
        shutil.copytree(ROOT / name, world.checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (world.folder / "hosts").write_text("h0 127.0.0.1\nh1\n")
    real = world.folder / "python"
    real.write_text(f'#!/bin/sh\n[ "$2" != pip ] || exit 0\nexec {sys.executable} "$@"\n')
    real.chmod(0o755)
    for name in ("h0", "h1"):
        world.give_python(name, real)
    assert world.call("ssh_setup", hosts(world)).returncode == 0

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    out = world.folder / "runs"
    words = ["digits", "--workers", "2", "--steps", "2000", "--global-batch", "24", "--checkpoint-every", "20"]
    words += ["--eval-every", "2000", "--no-baseline", "--out", str(out), "method:plump-dp"]
    process = world.script("ssh_run", hosts(world), *words, **environment, JAXCOMM_PORT=port)
    checkpoints = out / "digits" / "plump_dp" / "checkpoints"
    wait_for(lambda: any(checkpoints.glob("[1-9]*")) or process.poll() is not None, seconds=90)
    process.send_signal(signal.SIGTERM)
    output, err = process.communicate(timeout=60)
    assert process.returncode == 0, output + err
    (step,) = re.findall(r"\[h0\] Stopped and saved after step (\d+); go on with --resume\.", output)
    assert (checkpoints / step).is_dir()
    lines = (out / "digits" / "plump_dp" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, int(step) + 1))
    for name in ("h0", "h1"):
        assert (world.machine(name) / "logs" / "digits.exit").read_text() == "0\n"
