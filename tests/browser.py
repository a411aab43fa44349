"""A page in a real browser, if there is one: headless Chromium, as in every distribution."""

import shutil
import subprocess

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def browse(path, *options):
    """What the browser prints for a page; skips the test if there is no browser (.ci/run installs one)."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: {', '.join(NAMES)}")
    # As root there is no sandbox; the page must not need the network, and gets none.
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    arguments = [program, "--headless", "--no-sandbox", "--disable-gpu", offline, *options, path.resolve().as_uri()]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    return process.stdout


def screenshot(page, path, width=1200, height=1000):
    """Writes what the browser shows of a page as a PNG file."""
    browse(page, f"--screenshot={path}", f"--window-size={width},{height}", "--hide-scrollbars")
    return path
