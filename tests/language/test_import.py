"""The language is light: its modules import no third-party package, and lark only to read a text."""

import subprocess
import sys

HEAVY = "{'torch', 'sympy', 'lark', 'networkx', 'jinja2', 'triton', 'numpy'} & set(sys.modules)"


def output_of(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_importing_both_fronts_imports_nothing_heavy() -> None:
    modules = "linalg_dsl.language.parser, linalg_dsl.language.builder, linalg_dsl.language.codes"
    assert output_of(f"import sys, {modules}; print({HEAVY})") == "set()"


def test_the_python_front_and_the_printer_need_no_lark() -> None:
    code = f"""
import sys
import linalg_dsl.language.builder as ld
@ld.recurrence
def f(S, q: ld.K, v: ld.V):
    S = S + ld.outer(q, v)
    return S, S.T @ q
str(f)
print({HEAVY})
"""
    assert output_of(code) == "set()"
