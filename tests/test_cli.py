"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from linalg_dsl import cli
from linalg_dsl.cli_output import format_table, show

GOOD = """\
recurrence mine
input q, k : [K]
input v : [V]
input g : log gate
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
BROKEN = GOOD.replace("S_tᵀ q_t", "S_t q_t").replace("k_t v_tᵀ", "kk_t v_tᵀ")


@dataclass(frozen=True)
class Run:
    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Run]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: str, stdin: str = "") -> Run:
        monkeypatch.setattr(sys, "argv", ["linalg-dsl", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Run(status, captured.out, captured.err)

    return call


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "mine.rec"
    path.write_text(GOOD, encoding="utf-8")
    return str(path)


def test_help_of_every_command(run: Cli) -> None:
    top = run("--help")
    assert top.status == 0
    commands = ("explain", "compile", "check", "export", "list", "doctor", "explain-error", "demo")
    for command in commands:
        assert command in top.out
        page = run(command, "--help")
        assert page.status == 0
        assert "Usage" in page.out


def test_list_has_every_entry(run: Cli) -> None:
    shown = run("list")
    assert shown.status == 0
    assert "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ" in shown.out
    rows = run("list", "--json").data
    assert {"gated_delta_rule", "kda", "rwkv6"} <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "update", "description"} for row in rows)


def test_explain_of_a_file_a_name_and_standard_input(run: Cli, good: str) -> None:
    by_file, by_name = run("explain", good), run("explain", "simple_gla", "--K", "64", "--V", "64")
    assert by_file.status == by_name.status == 0
    assert "log λ_t = g_t" in by_file.out
    assert "K = 64, V = 64" in by_name.out
    assert run("explain", "-", stdin=GOOD).out == by_file.out
    assert "align*" in run("explain", good, "--latex").out
    assert run("explain", good, "--json").data["name"] == "mine"


def test_explain_of_a_call_lists_its_launches_on_the_target(run: Cli) -> None:
    sizes = ("--B", "8", "--T", "2048", "--H", "16")
    shown = run("explain", "kda", *sizes, "--target", "sm_80")
    assert "on sm_80, 108 multiprocessors" in shown.out
    assert "chunks of 32 tokens: an erase" in shown.out
    assert "K = 128, V = 128, chunks of 32; operands" in shown.out  # costs and schedule agree
    assert run("explain", "kda", *sizes, "--target", "sm_70").status == 2
    assert run("explain", "kda", "--dtype", "int8").status == 2


def test_mistakes_are_shown_with_carets_and_status_2(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "broken.rec"
    path.write_text(BROKEN, encoding="utf-8")
    shown = run("explain", str(path))
    assert shown.status == 2
    assert shown.out == ""
    assert f"{path}:5:" in shown.err
    assert "kk_t v_tᵀ" in shown.err
    assert "^^" in shown.err
    assert "did you mean" in shown.err
    data = run("check", str(path), "--json")
    assert data.status == 2
    assert {e["line"] for e in data.data["errors"]} >= {5}
    assert all(e["code"].startswith("E") for e in data.data["errors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "gated_delta_rul"), "did you mean gated_delta_rule"),
        (("explain", "missing.rec"), "cannot read missing.rec"),
        (("explain", "layer.py"), "Python is not run from here"),
        (("check", "gla", "--dtype", "int8"), "dtype is one of"),
        (("check", "gla", "--device", "quantum"), "device"),
        (("check", "gla", "--device", "cuda:99"), "there is no cuda:99 here"),
        (("check", "gla", "--gates", "wild"), "gates is one of"),
        (("check", "gla", "--backend", "cuda"), "backend is one of"),
        (("check", "gla", "--backend", "triton", "--device", "cpu", "--dtype", "bfloat16"), "interpreter"),
        (("check", "gla", "--text", "missing.txt"), "cannot read missing.txt"),
        (("check", "gla", "--text", "missing.txt", "--T", "5"), "--T has no meaning with --text"),
        (("compile",), "give a .rec file"),
        (("compile", "gla", "--target", "sm_12"), "sm_90"),
        (("explain-error", "E999"), "there is no code"),
    ],
)
def test_bad_input_has_status_2_and_says_what(run: Cli, arguments: tuple[str, ...], message: str) -> None:
    shown = run(*arguments)
    assert shown.status == 2
    assert message in shown.err
    assert "Traceback" not in shown.err


def test_wrong_options_have_status_2(run: Cli) -> None:
    assert run("explain").status == 2
    assert run("explain", "gla", "--K", "0").status == 2
    assert run("nonsense").status == 2


def test_check_compares_several_cases(run: Cli, good: str) -> None:
    shown = run("check", good, "--backend", "torch", "--device", "cpu", "--draws", "3")
    assert shown.status == 0
    assert "strong gates" in shown.out
    assert "packed sequences" in shown.out
    assert "all within their bounds" in shown.out


KEYS = ["name", "class", "verdict", "line", "rewrites", "form", "forward", "backward", "order", "missed",
        "proof", "costs", "stability", "precision", "schedule"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("gated_delta_rule", ["scalar gate + rank 1"]),
        ("mamba1", ["scan"]),
        ("mlstm", ["scan", "scalar gate", "scalar gate"]),
    ],
)
def test_an_explanation_as_data_has_the_same_keys_for_every_class(
    run: Cli, name: str, classes: list[str]
) -> None:
    data = run("explain", name, "--json").data
    assert list(data) == ["name", "verdict", "steps", "stages", "explanation"]
    assert [stage["class"] for stage in data["stages"]] == classes
    for stage in data["stages"]:
        assert list(stage) == KEYS
        assert all(set(e) == {"left", "right", "note"} for e in (*stage["forward"], *stage["backward"]))
        assert stage["forward"]
        assert stage["costs"]
        assert stage["missed"] or stage["class"] not in ("scan", "sequential")


def test_check_of_one_shape_as_json(run: Cli, good: str) -> None:
    sizes = ("--B", "1", "--T", "20", "--H", "2", "--K", "5", "--V", "3")
    data = run("check", good, "--backend", "torch", "--dtype", "float64", *sizes, "--json").data
    (report,) = data["reports"]
    assert data["ok"] is True
    assert "T 20" in report["shape"]
    assert [row["name"] for row in report["rows"]][-1] == "d initial_state"
    assert all(row["l2"] < 1e-12 for row in report["rows"])


def test_a_failed_check_has_status_1(run: Cli, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from linalg_dsl.ops import check

    monkeypatch.setattr(check, "output_bound", lambda backend, dtype: 1e-20)
    sizes = ("--B", "1", "--T", "20", "--H", "2", "--K", "5", "--V", "3", "--dtype", "float64")
    shown = run("check", good, "--backend", "torch", "--device", "cpu", *sizes)
    assert shown.status == 1
    assert "TOO LARGE" in shown.out
    assert "beyond their bound" in shown.out


def test_check_over_a_text(run: Cli, good: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on the mat, and the rat sat on the cat. " * 5)
    arguments = ("check", good, "--backend", "torch", "--device", "cpu", "--text", str(text))
    shown = run(*arguments, "--length", "200", "--K", "4", "--V", "4")
    assert shown.status == 0
    assert "a text of 200 bytes" in shown.out
    data = run(*arguments, "--K", "4", "--V", "4", "--json").data
    assert {"o", "final state", "d k"} <= {row["name"] for row in data["reports"][0]["rows"]}


def test_compile_writes_both_modules(run: Cli, good: str, tmp_path: Path) -> None:
    shown = run("compile", good, "--out", str(tmp_path / "out"))
    assert shown.status == 0
    triton = (tmp_path / "out" / "mine_triton.py").read_text(encoding="utf-8")
    torch = (tmp_path / "out" / "mine_torch.py").read_text(encoding="utf-8")
    assert "@triton.jit" in triton
    assert "triton" not in torch
    compile(triton, "mine_triton.py", "exec")


def test_compile_for_a_target_reports_registers_and_shared_memory(good: str) -> None:
    # in a process of its own: the interpreter, which other tests switch on, does not compile
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "linalg_dsl",
        "compile",
        good,
        "--target",
        "sm_90",
        "--K",
        "64",
        "--V",
        "64",
    ]
    environment = {k: v for k, v in __import__("os").environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["recurrence"] for row in rows} == {"mine"}
    assert any("fwd_walk" in row["kernel"] for row in rows)
    assert all(0 < row["registers"] <= 255 and row["shared"] <= row["limit"] for row in rows)


def test_a_kernel_that_does_not_compile_or_fit_has_status_1(
    run: Cli, good: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linalg_dsl.codegen import targets

    def refuse(text: str, target: str, **options: Any) -> Any:
        if "def step(" in text:
            return
        yield targets.KernelReport("mine_fwd_prep", target, 64, 0, 1024, 2048, 4, 1, "C 64", 0.1)
        if target == "sm_80":
            raise RuntimeError("PassManager::run failed")
        yield targets.KernelReport("mine_fwd_walk", target, 64, 0, 4096, 2048, 4, 1, "C 64", 0.1)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(targets, "report", refuse)
    shown = run("compile", good, "--target", "sm_80", "--target", "sm_90")
    assert shown.status == 1
    assert "mine does not compile for sm_80: RuntimeError: PassManager::run failed" in shown.err
    assert [line.split()[:2] for line in shown.out.splitlines()[2:]] == [
        ["mine_fwd_prep", "sm_80"],
        ["mine_fwd_prep", "sm_90"],
        ["mine_fwd_walk", "sm_90"],
    ]
    assert run("compile", good, "--target", "sm_90").status == 1  # 4096 bytes in a memory of 2048


def test_export_writes_a_file_that_runs_alone(run: Cli, good: str, tmp_path: Path) -> None:
    path = tmp_path / "exported.py"
    assert run("export", good, str(path), "--backend", "torch").status == 0
    code = "import sys, exported; assert not any(m.startswith('linalg_dsl') for m in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = run("export", good, str(tmp_path / "no" / "such" / "folder.py"))
    assert refused.status == 2
    assert "cannot write" in refused.err


def test_a_recurrence_of_several_stages_goes_through_every_command(run: Cli, tmp_path: Path) -> None:
    shown = run("explain", "gsa", "--K", "32", "--V", "16")
    assert shown.status == 0
    assert "stage 2 of 2: gsa_" in shown.out
    assert run("explain", "gsa", "--latex").out.count(r"\subsection*") == 2
    sizes = ("--B", "1", "--T", "20", "--H", "2", "--K", "5", "--V", "3")
    checked = run("check", "gsa", "--backend", "torch", *sizes, "--json")
    assert checked.status == 0
    (report,) = json.loads(checked.out)["reports"]
    assert {"final state H", "d initial_state G"} <= {row["name"] for row in report["rows"]}
    text = tmp_path / "text.txt"
    text.write_text("memory of slots", encoding="utf-8")
    assert run("check", "gsa", "--backend", "torch", "--text", str(text)).status == 0
    path = tmp_path / "slots.py"
    assert run("export", "gsa", str(path), "--backend", "torch").status == 0
    compile(path.read_text(encoding="utf-8"), "slots.py", "exec")
    assert run("compile", "gsa", "--out", str(tmp_path / "out")).status == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == [
        "gsa_G_torch.py", "gsa_G_triton.py", "gsa_H_torch.py", "gsa_H_triton.py", "gsa_stages.py",
        "gsa_step_torch.py", "gsa_step_triton.py",
    ]  # fmt: skip


def test_any_locale_prints_mathematics(good: str) -> None:
    command = [sys.executable, "-m", "linalg_dsl", "explain", good]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "S_tᵀ q_t" in done.stdout.decode("utf-8")


def test_standard_input_that_is_no_text_is_status_2() -> None:
    command = [sys.executable, "-m", "linalg_dsl", "explain", "-"]
    done = subprocess.run(command, input=b"recurrence \xff", capture_output=True, check=False)
    assert done.returncode == 2
    assert b"cannot read standard input" in done.stderr


def test_explain_error_prints_a_paragraph(run: Cli) -> None:
    shown = run("explain-error", "e302")
    assert shown.status == 0
    assert shown.out.startswith("E302: ")
    assert run("explain-error", "E302", "--json").data["code"] == "E302"


def test_doctor_runs_the_torch_backend(run: Cli) -> None:
    shown = run("doctor", "--json")
    assert shown.status == 0
    findings = {row["what"]: row for row in shown.data}
    assert findings["torch backend"]["status"] == "good"
    assert "worst error" in findings["torch backend"]["found"]
    assert "at its first use on a device" in findings["self-check"]["found"]


def test_doctor_says_what_is_known_to_go_wrong(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from linalg_dsl import cli_doctor

    monkeypatch.setenv("LINALG_DSL_SELFCHECK", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(cli_doctor, "_version", lambda package: "3.7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    (known,) = {f.found for f in cli_doctor._known_faults() if "640" in f.found}
    assert known.startswith("triton 3.7.0 on sm_9x gives wrong gradients")
    assert cli_doctor._self_check().found == "switched off by LINALG_DSL_SELFCHECK=0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert [f.status for f in cli_doctor._known_faults()] == ["good"]


def test_the_demo_goes_from_the_line_to_checked_code(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on the mat. " * 4)
    # in a process of its own: without a GPU it switches the interpreter on
    command = [sys.executable, "-m", "linalg_dsl", "demo", "--text", str(text), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ" in done.stdout
    assert "d initial_state" in done.stdout
    assert "a text of 96 bytes" in done.stdout
    assert "all checks passed" in done.stdout
    assert (tmp_path / "gated_delta_rule_triton.py").is_file()


def test_a_table_keeps_numbers_whole_and_wraps_prose() -> None:
    rows = [
        {"what": "kernel", "n": 123456, "found": "a long text " * 12},
        {"what": "b", "n": 7, "found": "c"},
    ]
    lines = format_table(("what", "n", "found"), rows, 70).splitlines()
    assert lines[0].split() == ["what", "n", "found"]
    assert all(len(line) <= 70 for line in lines)
    assert lines[1].startswith("kernel  123456  a long")
    assert lines[-1].startswith("b            7  c")
    assert [show(x) for x in (None, True, 3, 0.25, 1.5e-7)] == ["", "yes", "3", "0.25", "1.50e-07"]


def test_a_check_keeps_its_worst_input_and_runs_it_again(run: Cli, good: str, tmp_path: Path) -> None:
    kept = tmp_path / "worst.pt"
    common = ("check", good, "--backend", "torch", "--device", "cpu")
    shown = run(*common, "--draws", "2", "--keep", str(kept), "--json")
    assert shown.status == 0
    found = shown.data["certificate"]
    assert found["ok"]
    assert found["draws"] == 2
    assert found["curves"][0].keys() == {"T", "gates", "error", "floor"}
    again = run(*common, "--replay", str(kept))
    assert again.status == 0
    assert "nearest to its bound" in again.out
    wrong = run("check", "delta_rule", "--backend", "torch", "--device", "cpu", "--replay", str(kept))
    assert wrong.status == 2
    assert run(*common, "--T", "5", "--keep", str(kept)).status == 2
