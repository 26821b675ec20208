"""A network between processes of this machine, which can be cut."""

import selectors
import socket
import threading
import time

from tests import limits


class Link:
    """A way to a port, on which something happens at a message; where it is cut, all is lost, and nothing is closed."""

    def __init__(self, port, happens=lambda _: None):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self.messages, self.at, self.cut = self._server.getsockname()[1], 0, 0, False
        self._to, self._happens = port, happens
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self._server.accept()
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near):
        # Where nothing listens yet, the one that tries is told so.
        with near, socket.socket() as far:
            if far.connect_ex(("127.0.0.1", self._to)):
                return
            waiting = selectors.DefaultSelector()
            waiting.register(near, selectors.EVENT_READ, far)
            waiting.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in waiting.select():
                    data = key.fileobj.recv(65536)
                    if not data and not self.cut:
                        return
                    self.messages += key.fileobj is near
                    if key.fileobj is near and self.messages == self.at:
                        self._happens(self)
                    if self.cut:
                        time.sleep(4 * limits.LONG)
                    key.data.sendall(data)
