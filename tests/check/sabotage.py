"""Runs ``rankmesh check`` on 8 ranks of this machine with one thing broken: ``python sabotage.py HOW``."""

import os
import signal
import sys
import time

from rankmesh.cli import main
from rankmesh.debug.verification import work as check
from rankmesh.errors import ProofError
from rankmesh.runtime.connection import Connection

VICTIM = 3
SPEC = "megatron:world=8,tp=2,pp=2"


def _at_the_third_group(act):
    verify = check.verify

    def broken(groups, device):
        for number, group in enumerate(verify(groups, device)):
            if number == 2 and groups.rank == VICTIM:
                act()
            yield group

    check.verify = broken


def _raise():
    raise ProofError("received nothing, by sabotage")


def _loop():
    while True:
        pass


def _swap_tp_and_pp():
    opener = Connection.open
    other = {"tp": "pp", "pp": "tp"}
    Connection.open = lambda self, name: opener(self, self.local[other.get(name, name)].canonical)


HOW = {
    "killed": lambda: _at_the_third_group(lambda: os.kill(os.getpid(), 9)),
    "exits": lambda: _at_the_third_group(lambda: os._exit(7)),
    "stops": lambda: _at_the_third_group(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "loops": lambda: _at_the_third_group(_loop),
    "raises": lambda: _at_the_third_group(_raise),
    "stays": lambda: _at_the_third_group(lambda: time.sleep(60)),
    "swapped": _swap_tp_and_pp,
}

if __name__ == "__main__":
    HOW[sys.argv[1]]()
    sys.argv = ["rankmesh", "check", SPEC, "--timeout", "20", *sys.argv[2:]]
    main()
