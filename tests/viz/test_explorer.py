"""The explorer's page in the wheel is the one that its sources make."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "explorer"
PAGE = ROOT / "src" / "rankmesh" / "viz" / "explorer.html"


def _hash():
    """The SHA-256 of the sources as explorer/build.mjs takes it."""
    inside = [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "src").rglob("*") if path.is_file()]
    files = sorted([*inside, "build.mjs", "package-lock.json", "../src/rankmesh/core/presets.json"])
    taken = hashlib.sha256()
    for file in files:
        taken.update(f"{file}\n{(SOURCES / file).read_text(encoding='utf-8')}\n".encode())
    return taken.hexdigest()


def test_the_page_is_built_from_its_sources():
    """The hash of the sources stands in the page; after a change `make page` writes a new one."""
    built = re.search(r'<meta name="sources" content="(\w{64})">', PAGE.read_text(encoding="utf-8"))[1]
    assert built == _hash(), "the explorer's page is stale; make page builds it"


def test_the_lock_names_no_host():
    """What npm installs is known by version and hash, wherever it is taken from."""
    assert '"resolved"' not in (SOURCES / "package-lock.json").read_text(encoding="utf-8")


def test_the_page_holds_its_licences_and_asks_no_network():
    """Libraries are inside with their licences; nothing is loaded from anywhere."""
    page = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    for name in re.findall(r'"(d3-[a-z]+)": "\^', (SOURCES / "package.json").read_text(encoding="utf-8")):
        assert re.search(rf"^{name} \d", page, re.MULTILINE), name
