"""Imports point one way, and every third-party package has few importing places."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "linalg_dsl": "linalg_dsl",
    "codegen": "linalg_dsl.codegen",
    "ops": "linalg_dsl.ops",
    "templates": "linalg_dsl.templates",
}
# from the bottom up: a module may import from its own layer and from those before it
LAYERS = (
    ("linalg_dsl.source", "linalg_dsl.errors"),
    ("linalg_dsl.algebra",),
    ("linalg_dsl.language",),
    ("linalg_dsl.planner",),
    ("linalg_dsl.templates", "linalg_dsl.codegen"),
    ("linalg_dsl.report",),
    ("linalg_dsl.ops",),
    ("linalg_dsl",),
)
# ready-made ops are part of the public face, although they live in ops/: these may import from all layers
FACE = {"linalg_dsl.ops", "linalg_dsl.ops.catalogue_functions"}
PLACES = {
    "lark": ["linalg_dsl.language.parser"],
    "sympy": ["linalg_dsl.algebra.to_sympy"],
    "jinja2": ["linalg_dsl.codegen.emit.render"],
    "networkx": ["linalg_dsl.planner.graph", "linalg_dsl.codegen.schedule.*", "linalg_dsl.report.*"],
    "triton": [
        "linalg_dsl.codegen.targets",
        "linalg_dsl.codegen.machine_faults",
        "linalg_dsl.templates.*",
        "linalg_dsl.ops.*",
        "linalg_dsl.nn.kernels",
    ],
    "torch": [
        "linalg_dsl.templates.*_library",
        "linalg_dsl.codegen.targets",
        "linalg_dsl.codegen.schedule.evaluate*",
        "linalg_dsl.planner.evaluate*",
        "linalg_dsl.planner.prove",
        "linalg_dsl.ops.*",
        "linalg_dsl.nn.*",
        "linalg_dsl.study.*",
        "linalg_dsl.testing.*",
        "linalg_dsl.cli*",
    ],
    "filelock": ["linalg_dsl.study.record"],
    "hypothesis": ["linalg_dsl.testing.strategies*", "linalg_dsl.testing.fuzz"],
    "fla": ["linalg_dsl.ops.peers"],
    "matplotlib": ["linalg_dsl.plots"],
    "typer": ["linalg_dsl.cli*"],
    "rich": ["linalg_dsl.cli*"],
}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts))
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, imports inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((a.name, node.lineno) for a in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{path}:{node.lineno}: relative import"
                assert module is not None
                yield module, node.lineno
                yield from ((f"{module}.{a.name}", node.lineno) for a in names)


def layer(module: str) -> int:
    found = [
        (len(prefix), depth)
        for depth, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(found)[1]


# op.check() starts the kit, which stands above all it tests
HOOKS = {"linalg_dsl.ops.op": "linalg_dsl.testing.certificate"}


def upward(name: str, imported: str) -> bool:
    if name in HOOKS and imported.startswith(HOOKS[name]):
        return False
    return name not in FACE and imported.startswith("linalg_dsl.") and layer(imported) > layer(name)


def test_no_module_imports_from_a_layer_above_it() -> None:
    known = dict(modules())
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} imports {imported}"
        for name, path in known.items()
        for imported, line in imports(path)
        if upward(name, imported) and (imported in known or imported.rsplit(".", 1)[0] not in known)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_direction_rule_sees_an_upward_import() -> None:
    assert upward("linalg_dsl.planner.plan", "linalg_dsl.codegen.emit")
    assert upward("linalg_dsl.ops.op", "linalg_dsl.driver")
    assert not upward("linalg_dsl.ops.op", "linalg_dsl.planner.plan")
    assert not upward("linalg_dsl.cli", "linalg_dsl.ops.op")


@pytest.mark.parametrize("package", PLACES)
def test_a_third_party_package_is_imported_only_in_its_places(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for name, path in modules()
        for imported, line in imports(path)
        if imported.split(".")[0] == package and not any(fnmatch(name, p) for p in PLACES[package])
    ]
    assert not wrong, f"{package} is imported in\n" + "\n".join(wrong)


def test_nothing_else_is_imported() -> None:
    allowed = {*PLACES, *sys.stdlib_module_names, "linalg_dsl", "_typeshed"}
    wrong = {
        f"{path.relative_to(ROOT)}:{line}: {imported}"
        for _, path in modules()
        for imported, line in imports(path)
        if imported.split(".")[0] not in allowed
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_submodule_bears_the_name_of_a_public_function() -> None:
    # importing linalg_dsl.compile as a module would hide the function
    taken = {"compile", "recurrence", "sweep", "outer", "diag", "exp", "log"}
    assert not [p for p in (ROOT / "linalg_dsl").glob("*") if p.stem in taken]


def test_the_package_itself_imports_nothing_heavy() -> None:
    heavy = ["torch", "sympy", "lark", "networkx", "jinja2", "triton", "typer", "rich"]
    code = f"import sys, linalg_dsl; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
