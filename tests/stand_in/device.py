"""Tensors that say ``device="cuda"`` and lie in the host's memory (device.cpp, built when first needed)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """The C++ compiler that builds it, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """The built library, made anew for another source or version of torch; raises where building fails."""
    text = SOURCE.read_text(encoding="utf-8")
    key = hashlib.sha256(f"{text}\0{torch.__version__}\0{torch.__file__}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("LINALG_DSL_STAND_IN", Path(tempfile.gettempdir()) / "linalg_dsl_stand_in"))
    path = folder / f"device_{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "device.so"
        include = root / "include"
        subprocess.run(
            [
                compiler() or "g++", "-O0", "-std=c++20", "-shared", "-fPIC",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(made),
                f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
            ],
            check=True,
        )  # fmt: skip
        made.replace(path)
    return path


def install() -> None:
    """From now on tensors can be made on ``cuda``; for the rest of this process."""
    torch.ops.load_library(str(library()))  # type: ignore[no-untyped-call]
    torch.ops.linalg_dsl_stand_in.install()
