"""The code of docs/runtime.md runs, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")


def test_the_page_is_a_program() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    exec(compile("\n".join(blocks), "docs/runtime.md", "exec"), {})


def test_what_it_names_exists() -> None:
    from linalg_dsl.ops.selfcheck import ENVIRONMENT_VARIABLE

    assert f"`{ENVIRONMENT_VARIABLE}=0`" in PAGE
    for path in re.findall(r"tests/\S+\.py", PAGE):
        assert (Path(__file__).parents[2] / path).is_file()
