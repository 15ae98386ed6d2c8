"""Socket activation as systemd does it: sockets from 3 on, the environment that tells of them, and then the sidecar.

Run as a program: file descriptors, comma between them, and the process id to name, empty for this one.
Source: sd_listen_fds(3).
"""

from __future__ import annotations

import fcntl
import os
import sys

_FIRST = 3
_OUT_OF_THE_WAY = 200


def main() -> None:
    numbers, named = sys.argv[1:]
    moved = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for number in numbers.split(",")]
    for place, number in enumerate(moved, _FIRST):
        os.dup2(number, place)
    os.environ |= {"LISTEN_FDS": str(len(moved)), "LISTEN_PID": named or str(os.getpid())}
    os.execv(sys.executable, [sys.executable, "-m", "sidecar", "serve"])


if __name__ == "__main__":
    main()
