"""Small JSON chats over kept-alive connections, by wrk."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from bench import shapes
from bench.streams import BenchFailure

_OVER_S = 15.0
_SCRIPT = """
wrk.method = "POST"
wrk.body = [[{"model":"bench","messages":[{"role":"user","content":"Hello"}]}]]
%s
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\nRESULT {"requests":%%d,"duration_us":%%d,"p50_us":%%d,"p99_us":%%d,"errors":%%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


class Chats(NamedTuple):
    """What wrk saw."""

    requests: int
    per_second: float
    p50_us: float
    p99_us: float


def write_script(directory: Path) -> Path:
    fields = shapes.request_fields("bench-chats").items()
    script = directory / "chats.lua"
    script.write_text(_SCRIPT % "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in fields))
    return script


async def chats(port: int, connections: int, seconds: int, script: Path, core: int | None) -> Chats:
    """Requests for `seconds` on that many connections, each as soon as the one before it is answered."""
    url = f"http://127.0.0.1:{port}{shapes.CHAT_PATH}"
    command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"]
    command += ["--script", str(script), url]
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(seconds + _OVER_S):
            output, _ = await process.communicate()
    except TimeoutError as exc:
        raise BenchFailure("wrk did not end") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    result = next((line for line in output.decode().splitlines() if line.startswith("RESULT ")), None)
    if result is None:
        raise BenchFailure(f"wrk failed: {output.decode()[-300:]}")
    said = json.loads(result.removeprefix("RESULT "))
    if said["errors"]:
        raise BenchFailure(f"{said['errors']} of {said['requests']} requests failed")
    return Chats(said["requests"], said["requests"] / said["duration_us"] * 1e6, said["p50_us"], said["p99_us"])
