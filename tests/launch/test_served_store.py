"""The store that rank 0 serves: at one address, if the rendezvous address is a number."""

import socket
from contextlib import suppress
from datetime import timedelta

import pytest
from tests.sockets import free_port

from rankmesh.errors import ConnectError
from rankmesh.runtime.served_store import open_at


def _is_reached(address, port):
    with suppress(OSError), socket.create_connection((address, port), 10):
        return True
    return False


@pytest.mark.parametrize(("address", "elsewhere"), [("127.0.0.1", False), ("localhost", True)])
def test_a_store_listens_at_a_numeric_address_alone(address, elsewhere):
    """A name may be resolved to another address on another host, so with one the store listens at all of them."""
    port, limit = free_port(), timedelta(seconds=30)
    store = open_at(address, port, limit, serves=True)
    assert _is_reached("127.0.0.1", port)
    assert _is_reached("127.0.0.2", port) == elsewhere
    store.set("key", "value")
    assert open_at(address, port, limit, serves=False).get("key") == b"value"
    again = open_at(address, port, limit, serves=True)  # of the same process, such as for a second job
    assert again.get("key") == b"value"


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("address", ["nowhere.invalid", "n" * 70])
def test_a_name_that_does_not_resolve_is_an_error(address, serves):
    """Whoever would serve the store there is refused, and who waits for it at the end of the time."""
    with pytest.raises(ConnectError) as error:
        open_at(address, free_port(), timedelta(seconds=0.1), serves=serves)
    assert error.value.missing == (() if serves else (0,))
