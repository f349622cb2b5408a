"""Everything in examples/ runs, and the README's code is true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import linalg_dsl as ld

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"walkthrough", "reluctant_delta"}


def test_the_walkthrough_prints_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    load("walkthrough").main()
    printed = capsys.readouterr().out
    for stage in ("RecurrenceSpec", "CanonicalRecurrence", "ChunkPlan", "KernelPlan", "PyTorch", "Triton"):
        assert re.search(rf"^\d+\. {stage}", printed, re.MULTILINE), stage
    assert "def forward(" in printed
    assert "@triton.jit" in printed


def test_the_invented_operator_learns_to_recall(capsys: pytest.CaptureFixture[str]) -> None:
    recalled = load("reluctant_delta").main(steps=120)
    assert recalled > 0.6  # one in sixteen by chance
    assert "chunk kernels" in capsys.readouterr().out


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_example_runs_and_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_blocks()[0], names)
    printed = capsys.readouterr().out
    assert names["o"].shape == (2, 500, 4, 64)
    assert names["state"].shape == (2, 4, 64, 64)
    assert names["k"].grad is not None
    assert (tmp_path / "fading_delta.html").stat().st_size > 10_000
    shown = [line for line in README.splitlines() if line.startswith("      ") and "e-0" in line]
    assert len(shown) == 3
    for line in shown:
        assert f"  {re.split(r'  +', line.strip())[0]} " in printed


def test_both_fronts_of_the_readme_say_the_same() -> None:
    text, python = python_blocks()
    written = re.search(r'"""\n(.*?)"""', text, re.DOTALL)
    assert written is not None
    names: dict[str, Any] = {"ld": ld}
    exec(python, names)
    assert names["fading_delta"].spec == ld.parse(written[1])


def test_the_readme_lists_the_catalogue() -> None:
    from linalg_dsl.ops.catalogue import catalogue_names

    section = README.split("## The catalogue", 1)[1].split("\n## ", 1)[0]
    listed = [n for row in section.splitlines() if row.startswith("|") for n in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == list(catalogue_names())


def test_the_page_of_the_catalogue_says_what_the_entries_say() -> None:
    from linalg_dsl.ops.catalogue import catalogue_names, catalogue_text

    page = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(\\\*)? \| (.*) \| .* \| (.*) \|$", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == list(catalogue_names())
    for name, starred, what, source in rows:
        doc = " ".join(ld.parse(catalogue_text(name)).doc.split())
        assert doc.startswith(what.replace("\\|", "|") + "."), name
        assert bool(starred) == ("Form taken from the abstract" in doc), name
        numbers = re.findall(r"arXiv (\d{4}\.\d{5})", doc.split(" Side: ")[0])
        assert re.findall(r"\[(\d{4}\.\d{5})\]", source) == list(dict.fromkeys(numbers)), name


def test_files_that_the_documents_name_exist() -> None:
    pages = [README, *(p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md"))]
    pages.append((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    named = {
        path
        for page in pages
        for path in re.findall(r"`((?:linalg_dsl|codegen|ops|templates|tests|examples|docs)/[\w/.]+)`", page)
    }
    assert len(named) > 20
    missing = [p for p in named if "NAME" not in p and not (ROOT / p).exists()]
    assert not missing
