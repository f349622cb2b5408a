"""The wheel: one top-level package, all its data, and it works far from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "linalg_dsl": "linalg_dsl",
    "codegen": "linalg_dsl/codegen",
    "ops": "linalg_dsl/ops",
    "templates": "linalg_dsl/templates",
}
DATA = (".css", ".json", ".jinja", ".lark", ".rec", ".typed")

USE = """
import sys, torch, linalg_dsl, linalg_dsl.ops
site = sys.argv[1]
for module in (linalg_dsl, linalg_dsl.ops):
    assert module.__file__.startswith(site), module.__file__
text = '''
recurrence mine
input q, k : [K]
input v : [V]
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
'''
op = linalg_dsl.compile(text, backend="torch")
q, k, v = (torch.randn(1, 70, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
g = -torch.rand(1, 70, 2, dtype=torch.float64)
o = op(q, k, v, g)
want, _ = op.reference(q, k, v, g, output_final_state=True)
torch.testing.assert_close(o, want)
o.sum().backward()
assert linalg_dsl.ops.linear_attention(q, k, v).shape == o.shape
print("works")
"""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # built from a copy: a build writes beside its sources
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(
        *pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(out), str(source), cwd=out
    )
    (built,) = out.glob("*.whl")
    return built


def test_one_top_level_package_with_every_module_and_data_file(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert {n.split("/")[0] for n in names} == {"linalg_dsl"}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", *DATA)
    }
    assert names == expected
    for suffix in DATA:
        assert any(n.endswith(suffix) for n in names), suffix


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (licence,) = [n for n in files.namelist() if n.endswith("/LICENSE")]
    assert "Apache License" in files.read(licence).decode()
    (metadata,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0" in files.read(metadata).decode()


def test_it_compiles_and_runs_when_installed_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{USE}"
    (tmp_path / "use.py").write_text(code, encoding="utf-8")
    assert run(sys.executable, "use.py", str(site), cwd=tmp_path).endswith("works\n")
