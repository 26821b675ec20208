"""What else runs in a process of a job, or beside it, while members are lost: nobody may notice the other.

```
asyncio     a loop with connections that stay open
reporter    a thread that writes to a socket, which another one reads, and to a file
loader      workers of a DataLoader, which are forked in train
stranger    another user's process that sends every member what it likes
```
"""

import asyncio
import os
import random
import secrets
import socket
import threading
import time
from contextlib import ExitStack
from multiprocessing import current_process

import torch
from tests.strangers import STRANGER
from torch.utils.data import DataLoader, Dataset

_HERE, _BLOCK, _PAUSE = "127.0.0.1", 40_000, 0.01


class Neighbours:
    """Traffic in this process that checks itself until ``stop``, which returns how much there was of each kind."""

    def __init__(self, folder, member):
        self.counts, self._file = dict.fromkeys(("asyncio", "reporter", "loader"), 0), folder / f"log-{member}"
        self.folder, self.wrong, self._over = folder, [], threading.Event()
        self._threads = [
            threading.Thread(target=self._checked, args=(run,), name=f"neighbour-{run.__name__}", daemon=True)
            for run in (self._asyncio, self._reporter)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        """End the traffic; how much there was, and what went wrong."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        return {"counts": self.counts, "wrong": self.wrong + [one.name for one in self._threads if one.is_alive()]}

    def _checked(self, run):
        try:
            run()
        except BaseException as error:  # noqa: BLE001  - the test hears of it
            self.wrong.append(f"{run.__name__}: {type(error).__name__}: {error}")

    def _asyncio(self):
        asyncio.run(self._echoes())

    async def _echoes(self):
        async def echo(reader, writer):
            while block := await reader.read(1 << 16):
                writer.write(block)
                await writer.drain()
            writer.close()

        async def client(port):
            reader, writer = await asyncio.open_connection(_HERE, port)
            while not self._over.is_set():
                block = secrets.token_bytes(64) * (_BLOCK // 64)
                writer.write(block)
                assert await reader.readexactly(len(block)) == block
                self.counts["asyncio"] += 1
                await asyncio.sleep(_PAUSE)
            writer.close()

        server = await asyncio.start_server(echo, _HERE, 0)
        await asyncio.gather(*(client(server.sockets[0].getsockname()[1]) for _ in range(3)))
        server.close()

    def _reporter(self):
        here, there = socket.create_server((_HERE, 0)), []
        with here, socket.create_connection(here.getsockname()) as out, here.accept()[0] as sink:
            reads = threading.Thread(target=lambda: there.extend(iter(lambda: sink.recv(1 << 16), b"")), daemon=True)
            reads.start()
            with self._file.open("w", encoding="utf-8") as file:
                while not self._over.wait(_PAUSE):
                    line = f"{self.counts['reporter']} {'metrics ' * 50}\n"
                    file.write(line)
                    out.sendall(line.encode())
                    self.counts["reporter"] += 1
            out.shutdown(socket.SHUT_WR)
            reads.join(30)
        text = self._file.read_text(encoding="utf-8")
        assert b"".join(there).decode() == text
        assert [int(line.split()[0]) for line in text.splitlines()] == [*range(self.counts["reporter"])]

    def loader(self):
        """Batches without end of a ``DataLoader`` with a worker; each is checked."""
        while True:
            # The worker of a member that is killed lives on for seconds: the test ends it.
            made = DataLoader(Numbers(self.folder), batch_size=4, num_workers=1, multiprocessing_context="fork")
            for number, batch in enumerate(made):
                if batch.tolist() != [*range(4 * number, 4 * number + 4)]:
                    self.wrong.append(f"loader: {batch}")
                self.counts["loader"] += 1
                yield batch


class Numbers(Dataset):
    """The first numbers; ``dead-worker-N`` names each worker for whoever ends what a killed member leaves."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 0 and current_process().name != "MainProcess":
            (self.folder / f"dead-worker-{os.getpid()}").write_text(str(os.getpid()), encoding="utf-8")
        return torch.tensor(index)


def stranger(contacts, seed):
    """Send members of a job, as another user, what does not have the key, until all have ended; how often."""
    pick, sent = random.Random(seed), 0  # noqa: S311  - lines, no secrets
    lines = [
        b'{"what":"end","epoch":"%d","over":true,"suspects":[],"evicted":{"0":"a","1":"b"}}\n',
        b'{"what":"outcome","epoch":"%d"}\n',
        b"0" * 64 + b' "' + b"1" * 64 + b'"\n' + b"2" * 64 + b' {"what":"ping","n":%d}\n',
    ]
    user, _ = os.geteuid(), "".encode("idna")  # loads what connecting needs, which the stranger may not read
    if user == 0:
        os.seteuid(STRANGER)
    try:
        with ExitStack() as opened:
            refused = 0
            while contacts and refused < 50:
                address = pick.choice(contacts)
                data = pick.choice([*(line % pick.randrange(4) for line in lines), secrets.token_bytes(3000), b"{"])
                try:
                    one = opened.enter_context(socket.create_connection(address, 10))
                    one.sendall(data)
                    sent, refused = sent + 1, 0
                except OSError as error:
                    refused += isinstance(error, ConnectionRefusedError)
                if pick.random() < 0.1:
                    opened.close()  # else connections stay, and read nothing
                time.sleep(0.002)
    finally:
        os.seteuid(user)
    return {"lines": sent}
