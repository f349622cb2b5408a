"""The text of generated Triton modules: the same every time, quickly made, and standing alone."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
from kernel_cases import TEXTS

import linalg_dsl as ld

EMIT = """
import hashlib, json, sys
from linalg_dsl import driver
from linalg_dsl.codegen.options import CompileOptions
options = CompileOptions()
for name, text in json.loads(sys.argv[1]):
    artefacts = driver.derive(driver.read_spec(text), options, {})
    for backend in ("triton", "torch"):
        print(name, hashlib.sha256(driver.emit(artefacts, backend, options).encode()).hexdigest())
"""
NAMES = ("gated_delta_rule", "kda", "two_writes")


def emitted(seed: str, *names: str) -> list[str]:
    """What a fresh process emits, a line for each name and backend."""
    command = [sys.executable, "-c", EMIT, json.dumps([(n, TEXTS[n]) for n in names])]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return sorted(done.stdout.splitlines())


def module_of(name: str) -> str:
    return ld.compile(TEXTS[name]).source(backend="triton")


def test_processes_with_other_hash_seeds_and_order_emit_the_same_text() -> None:
    first, second = emitted("1", *NAMES), emitted("77", *reversed(NAMES))
    assert first == second
    assert len(first) == 2 * len(NAMES)
    own = hashlib.sha256(module_of("kda").encode()).hexdigest()
    assert f"kda {own}" in first


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_recurrence_becomes_source_in_two_seconds(name: str) -> None:
    module_of("linear_attention")  # imports do not count
    text = TEXTS[name] + "\n# measured\n"
    start = time.process_time()
    ld.compile(text).source(backend="triton")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_module_imports_torch_and_triton_only(name: str) -> None:
    found, text = set(), module_of(name)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module="triton.tools.tensor_descriptor") if "\nDESCRIBED = " in text:
                assert [alias.name for alias in node.names] == ["TensorDescriptor"]
            case ast.ImportFrom():
                pytest.fail(f"line {node.lineno} imports from {node.module}")
    assert found == {"functools", "math", "torch", "triton", "triton.language"}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_kernels_carry_the_names_of_recurrence_and_stage(name: str) -> None:
    text = module_of(name)
    plan = ld.compile(TEXTS[name]).plan.kernels
    kernels = [k.name for k in (*plan.forward, *plan.backward)]
    for kernel in kernels:
        assert text.count(f"def {name}_{kernel}(") == 1
        assert text.count(f"call.prep({name}_{kernel},") + text.count(f"call.walk({name}_{kernel},") == 1
    assert text.isascii()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_no_kernel_takes_or_makes_what_it_does_not_use(name: str) -> None:
    tree = ast.parse(module_of(name))
    kernels = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith(f"{name}_")]
    assert kernels
    for kernel in kernels:
        words = [n for n in ast.walk(kernel) if isinstance(n, ast.Name)]
        read = {n.id for n in words if isinstance(n.ctx, ast.Load)}
        unused = {a.arg for a in kernel.args.args} - read - {"K", "V"}
        assert not unused, f"{kernel.name} takes {sorted(unused)}"
        written = {n.id for n in words if isinstance(n.ctx, ast.Store)} - {"i_ch", "m_t"}  # the templates'
        assert not written - read, f"{kernel.name} makes {sorted(written - read)}"
