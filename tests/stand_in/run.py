"""``python tests/stand_in/run.py tests/gpu/measure.py check``: runs a script of a GPU where there is none.

Its constants are made smaller as its table ``WHEN_DRY`` says, in its worker processes too.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    os.environ.setdefault("LINALG_DSL_GPU_DRY", "1")
    site = str(Path(__file__).with_name("site"))
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if site not in path:  # for the processes that it starts, and for this one: Python begins anew
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *filter(None, path)])
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    tree = ast.parse(script.read_text(encoding="utf-8"))
    smaller = ast.parse("globals().update(WHEN_DRY)").body
    for i, node in enumerate(tree.body):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "WHEN_DRY":
            tree.body[i + 1 : i + 1] = smaller
            break
    here = sys.modules["__main__"].__dict__
    here.update(__name__="__main__", __file__=str(script), __spec__=None)
    exec(compile(tree, str(script), "exec"), here)


if __name__ == "__main__":
    main()
