"""A resolver that knows no name and says so, and nothing after SIGUSR1.

It writes a line with the time of each question.
"""

import signal
import socket
import time

ADDRESS = "127.0.0.9"
_UNKNOWN = b"\x81\x83"  # the flags of an answer: there is no such name

if __name__ == "__main__":
    silenced = []
    signal.signal(signal.SIGUSR1, lambda *_: silenced.append(True))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind((ADDRESS, 53))
        print("listens", flush=True)  # noqa: T201
        while True:
            question, place = here.recvfrom(512)
            print(time.time(), flush=True)  # noqa: T201
            if not silenced:
                here.sendto(question[:2] + _UNKNOWN + question[4:], place)
