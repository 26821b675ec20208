"""The stable list of what is public is what is public, and the changelog speaks of it."""

from tests import public

import rankmesh

CHANGELOG = public.PAGE.parents[2] / "CHANGELOG.md"


def test_the_list_is_what_is_public():
    """docs/reference/public.md has every public name with its parameters; `python -m tests.public` writes a change."""
    assert public.PAGE.read_text(encoding="utf-8") == public.page()


def test_every_name_is_in_the_changelog():
    """What `import rankmesh` offers has been told in the changelog, errors as a tree."""
    text = CHANGELOG.read_text(encoding="utf-8")
    missing = [name for name in rankmesh.__all__ if f"{name}" not in text]
    assert missing == []
