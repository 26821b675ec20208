"""Stand-ins for packages of kernels: what is installed stays, and nothing is left when they end."""

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from rankmesh_engines.stand_ins import StandIns

ABSENT = "a_package_of_kernels"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The name of a package that is installed, with one value."""
    (tmp_path / "an_installed_package.py").write_text("value = 7\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "an_installed_package"
    sys.modules.pop("an_installed_package", None)


def test_any_module_of_a_missing_package_is_found():
    """Submodules, decorators with and without options, classes to inherit from and to ask for."""
    with StandIns(ABSENT):
        language = import_module(f"{ABSENT}.language.extra")
        assert language.jit(len) is len
        assert language.jit(fast=True)(len) is len
        assert isinstance(language.Config, type)
        assert not isinstance(7, import_module(ABSENT).runtime.KernelInterface)


def test_the_same_stand_in_is_found_again_and_by_nobody_between():
    """What was imported from it before is what is imported from it later; a search for the package finds none."""
    kernels = StandIns(ABSENT)
    with kernels:
        first = import_module(f"{ABSENT}.language")
    assert find_spec(ABSENT) is None
    with pytest.raises(ModuleNotFoundError):
        import_module(f"{ABSENT}.language")
    with kernels:
        assert import_module(f"{ABSENT}.language") is first


def test_what_is_installed_stays_unless_it_is_hidden(installed):
    """A package that is installed is imported itself; a hidden one comes back, with its modules, when they end."""
    with StandIns(installed):
        assert import_module(installed).value == 7
    itself = sys.modules[installed]
    with StandIns(hidden=[installed]):
        assert import_module(installed).value != 7
    assert sys.modules[installed] is itself


def test_an_error_ends_them_too():
    """As for a package that SGLang wants and nobody has."""
    with pytest.raises(ModuleNotFoundError, match="another_one"), StandIns(ABSENT):
        import_module("another_one")
    assert find_spec(ABSENT) is None
