"""`make bench`: the sidecar, nginx, a plain aiohttp proxy and no proxy at all, measured in turns on this machine.

Law: loopback only, bounded in count and time, and whatever is started here is ended here, by its handle.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import uvloop

from bench import peers, small_chats, streams
from bench.peers import Cores, Peer
from bench.shapes import Shape
from bench.streams import BenchFailure
from bench.table import table

_GAP_MS = 20
_IDLE_STREAMS = 500
_FULL_STREAMS = 8
_UPLOADS = 10
_MOST_ROUNDS = 20

Note = Callable[[str, float], None]
"""Takes a row's key and a value."""


async def measure(peer: Peer, seconds: int, script: Path, client_core: int | None, note: Note) -> None:
    """One round of one peer. The idle streams come first, before other loads have widened the heap."""
    if peer.name != "direct":
        note("idle_bytes", await streams.idle(peer.port, _IDLE_STREAMS, "bench-idle", peer.memory_bytes))
        await peer.settled()
    note("first_byte_us", statistics.median(await streams.first_bytes(peer.port, seconds / 2, "bench-first")) * 1e6)
    for count in (50, 200):
        await _measure_paced(peer, count, seconds, note)
    note("full_mb_s", await streams.full_speed(peer.port, _FULL_STREAMS, seconds / 2, "bench-full") / 1e6)
    note("upload_mb_s", await streams.uploads(peer.port, _UPLOADS, "bench-upload") / 1e6)
    await peer.settled()
    cpu_s = peer.cpu_s()
    chats = await small_chats.chats(peer.port, 32, seconds, script, client_core)
    note("chats_32", chats.per_second)
    note("chats_p50_us", chats.p50_us)
    note("chats_p99_us", chats.p99_us)
    if peer.name != "direct":
        note("chats_cpu_us", (peer.cpu_s() - cpu_s) / chats.requests * 1e6)
    note("chats_128", (await small_chats.chats(peer.port, 128, max(1, seconds // 2), script, client_core)).per_second)


async def _measure_paced(peer: Peer, count: int, seconds: int, note: Note) -> None:
    shape = Shape(events=seconds * 1000 // _GAP_MS, gap_ms=_GAP_MS)
    await peer.settled()
    cpu_s = peer.cpu_s()
    delays = await streams.paced(peer.port, count, shape, "bench-paced")
    cpu_s = peer.cpu_s() - cpu_s
    if len(delays.events_ns) != count * shape.events:
        raise BenchFailure(f"brought {len(delays.events_ns)} of {count * shape.events} events")
    percentiles = statistics.quantiles(delays.events_ns, n=100)
    note(f"paced_{count}_p50_us", percentiles[49] / 1000)
    note(f"paced_{count}_p99_us", percentiles[98] / 1000)
    if count == 200 and peer.name != "direct":
        note("events_cpu_s", cpu_s / len(delays.events_ns) * 100_000)


async def run(names: list[str], rounds: int, seconds: int) -> None:
    """All rounds, in turns: what drifts on this machine hits everybody."""
    cores = Cores.of_this_machine()
    if cores.client is not None:
        os.sched_setaffinity(0, {cores.client})
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    failed = False
    began_at = time.monotonic()
    print(f"{about(cores)}\n{rounds} rounds of {', '.join(names)}; {seconds} s for each load. Keep the machine quiet.")
    with tempfile.TemporaryDirectory(prefix="hermes-sidecar-bench-") as scratch:
        directory = Path(scratch)
        script = small_chats.write_script(directory)
        async with peers.upstream(cores.upstream, directory) as upstream_port:
            for number in range(1, rounds + 1):
                for name in names:
                    print(f"  round {number}: {name}", file=sys.stderr, flush=True)
                    try:
                        async with peers.peer(name, upstream_port, cores.proxy, directory) as peer:
                            gc.collect()
                            gc.disable()  # a pause here would look like the peer's
                            await measure(peer, seconds, script, cores.client, _noting(figures[name]))
                    except BenchFailure as failure:
                        failed = True
                        print(f"  {name}: {failure}", file=sys.stderr, flush=True)
                    finally:
                        gc.enable()
    print(f"\n{table(figures)}\n\nMedians of {rounds} rounds; {time.monotonic() - began_at:.0f} s in all.")
    if failed:
        raise SystemExit(1)


def _noting(figures: dict[str, list[float]]) -> Note:
    return lambda key, value: figures[key].append(value)


def about(cores: Cores) -> str:
    """This machine and the versions, in two lines."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    placed = "not pinned" if cores.proxy is None else f"upstream, client, proxy on {tuple(cores)}"
    said = [f"hermes-sidecar {version('hermes-sidecar')}", f"Python {platform.python_version()}"]
    said += [f"{name} {version(name)}" for name in ("uvloop", "aiohttp")]
    said += [_version_of(program, "-v") for program in (peers.nginx_program(), shutil.which("wrk")) if program]
    load = os.getloadavg()[0]
    return (
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores ({placed}), {model}, load {load:.1f}\n"
        + ", ".join(said)
    )


def _version_of(program: str, option: str) -> str:
    told = subprocess.run([program, option], capture_output=True, text=True, check=False)  # noqa: S603  found on the PATH
    match = re.search(r"(nginx|wrk)\S* (?:version: nginx/)?(\S+)", told.stdout + told.stderr)
    return f"{match[1]} {match[2]}" if match else Path(program).name


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def missing_tools(names: list[str]) -> str | None:
    """What has to be installed first, in a sentence."""
    missing = []
    if shutil.which("wrk") is None:
        missing.append("wrk")
    if "nginx" in names and peers.nginx_program() is None:
        missing.append("nginx-light")
    if not missing:
        return None
    return (
        f"make bench: needs {' and '.join(missing)}. On Debian and Ubuntu: apt-get install {' '.join(missing)}\n"
        "Without nginx: make bench ARGS='--peers direct,plain,sidecar'"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--peers", default=",".join(peers.NAMES), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("BENCH_ROUNDS", "3")))
    parser.add_argument("--seconds", type=int, default=2, help="for each load")
    options = parser.parse_args()
    names = options.peers.split(",")
    if not sys.platform.startswith("linux"):
        print("make bench: needs Linux, whose /proc tells what a process costs.", file=sys.stderr)
        return 2
    if unknown := sorted(set(names) - set(peers.NAMES)):
        parser.error(f"no such peer: {', '.join(unknown)}")
    if not (1 <= options.rounds <= _MOST_ROUNDS and 1 <= options.seconds <= 60):
        parser.error(f"1 to {_MOST_ROUNDS} rounds of 1 to 60 seconds")
    if sentence := missing_tools(names):
        print(sentence, file=sys.stderr)
        return 2
    # A request to end is an exception: whatever was started is stopped on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run(names, options.rounds, options.seconds))
        return 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
