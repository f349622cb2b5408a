"""Everything in examples/ runs, and the README's code is true."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from module_files import module_of_file

import linalg_dsl as ld

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(name: str) -> ModuleType:
    return module_of_file(EXAMPLES / f"{name}.py")


def test_every_example_is_run_here() -> None:
    shown = {"walkthrough", "reluctant_delta", "recall", "state_tracking", "byte_lm", "check_foreign_kernels"}
    assert {p.stem for p in EXAMPLES.glob("*.py")} == shown


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


def test_recall_is_trained_tested_and_taken_up_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--out", str(tmp_path), "--steps", "3", "--pairs", "2", "4"]
    first = load("recall").main([*arguments, "--models", "delta", "delta_full"])
    assert {(r["model"], r["pairs"]) for r in first.rows} == {
        (m, p) for m in ("delta", "delta_full") for p in (2, 4)
    }
    again = load("recall").main([*arguments, "--models", "delta", "delta_full", "linear"])
    assert again.rows[:4] == first.rows
    assert len(again.rows) == 6
    assert "accuracy over the number of pairs, each told 2 times" in capsys.readouterr().out


def test_a_delta_rule_follows_parity_better_with_negative_eigenvalues(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--out", str(tmp_path), "--models", "positive_delta", "delta", "--steps", "170"]
    record = load("state_tracking").main(options)
    (positive,), (negative,) = (record.where(model=m, length=32) for m in ("positive_delta", "delta"))
    assert negative["accuracy"] > 0.9 > 0.8 > positive["accuracy"]
    assert "parity: accuracy over the length" in capsys.readouterr().out


def test_a_byte_model_learns_from_the_librarys_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = load("byte_lm").main(["--out", str(tmp_path), "--steps", "30", "--bytes", "20000"])
    assert record.rows[0]["bits_per_byte"] < 6  # 8 for guessing
    training, held_out = load("byte_lm").text(source=True)
    assert len(training) > 5e6
    assert 18 < len(training) / len(held_out) < 20
    assert "bits per byte" in capsys.readouterr().out


def test_foreign_code_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = load("check_foreign_kernels").main(budget_s=6.0)
    assert right.ok, str(right)
    assert wrong.failed == ("matches_reference",)
    assert "flash-linear-attention" in capsys.readouterr().out


def test_the_page_on_testing_is_true() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    listed = set(re.findall(r"`(\w+)`", page.split("## The properties", 1)[1].split("\n\n", 2)[1]))
    assert set(names["testing"].PROPERTIES) <= listed


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


def test_the_layers_of_the_readme_are_made() -> None:
    names: dict[str, Any] = {"ld": ld, "torch": torch}
    exec(python_blocks()[2], names)
    assert names["y"].shape == (2, 100, 256)
    assert len(names["model"].layers) == 8


def test_both_fronts_of_the_readme_say_the_same() -> None:
    text, python, _ = python_blocks()
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
