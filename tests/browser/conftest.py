"""A real browser: Debian's chromium, driven by Playwright. What it opens is the page that the wheel holds."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "rankmesh" / "viz" / "explorer.html"
RUN = "RANKMESH_BROWSER"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


# The window of tests, pictures and figures.
WINDOW = {"width": 1440, "height": 900}


def chromium(playwright):
    """Debian's own, without a window."""
    return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)


def _needs():
    if not os.environ.get(RUN):
        pytest.skip(f"a browser: make test-browser runs it ({RUN}=1)")
    if importlib.util.find_spec("playwright") is None or shutil.which("chromium") is None:
        pytest.skip("a browser: playwright or chromium is missing; make test-browser installs them")


@pytest.fixture(scope="session")
def browser():
    """One chromium for all tests."""
    _needs()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = chromium(playwright)
        yield opened
        opened.close()
