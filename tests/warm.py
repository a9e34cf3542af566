"""Runs programs, each in a fork of a process that has already imported what most of their time would go into.

One line of JSON on stdin for each program, one exit code on stdout when it has ended: see `test_docs.Warm`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import shoal
    from shoal.trainer.start import import_for_training

    assert shoal.Trainer
    import_for_training()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            be(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def be(program: dict[str, Any]) -> None:
    """What `python path args` would do, to its last moment."""
    os.chdir(program["folder"])
    os.environ.update(program["environment"])
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(program["output"], os.O_WRONLY | os.O_CREAT, 0o600)
    for number, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, number)
    sys.stdin, sys.argv = os.fdopen(0), [program["path"], *program["arguments"]]
    sys.path[0] = str(Path(program["path"]).parent)
    runpy.run_path(program["path"], run_name="__main__")


if __name__ == "__main__":
    main()
