"""The sidecar, for a soak: on SIGUSR1 it writes down how many tasks and collectable objects it has.

Run as `python -m bench.soaked FILE serve`, FILE being where that goes, as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from pathlib import Path

from sidecar.cli import main


def write_down(file: Path) -> None:
    """In one step for whoever reads it: the file is renamed into place."""
    gc.collect()  # else it is a saw-tooth of many minutes, and two short looks at it tell nothing
    objects = gc.get_objects()
    tasks = sum(isinstance(thing, asyncio.Task) and not thing.done() for thing in objects)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"tasks": tasks, "objects": len(objects)}))
    draft.replace(file)


if __name__ == "__main__":
    target = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, lambda *_: write_down(target))
    main()
