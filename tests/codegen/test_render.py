"""A template gets exactly what it asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jinja2
import pytest

from linalg_dsl.codegen.emit import render as render_module
from linalg_dsl.codegen.emit.pipeline import Pipeline
from linalg_dsl.codegen.emit.render import render, template_variables
from linalg_dsl.codegen.emit.standalone import Standalone, StandaloneCall
from linalg_dsl.codegen.emit.torch_layout import TorchModule
from linalg_dsl.errors import InternalError


@dataclass(frozen=True)
class Greeting:
    name: str
    extra: str


def _with_template(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(render_module, "template_text", lambda _: text)
    template_variables.cache_clear()
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda _: text), undefined=jinja2.StrictUndefined
    )
    monkeypatch.setattr(render_module, "_environment", lambda: environment)


@pytest.mark.parametrize("text", ["{{ name }}", "{{ name }} {{ extra }} {{ other }}"])
def test_unused_and_missing_fields_are_faults(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    _with_template(monkeypatch, text)
    with pytest.raises(InternalError, match="extra" if "other" not in text else "other"):
        render("greeting", Greeting("a", "b"))
    template_variables.cache_clear()


def test_fields_fill_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_template(monkeypatch, "{{ name }}, {{ extra }}")
    assert render("greeting", Greeting("a", "b")) == "a, b"
    template_variables.cache_clear()


@pytest.mark.parametrize(
    ("template", "context"),
    [
        ("torch_module.py.jinja", TorchModule),
        ("standalone.py.jinja", Standalone),
        ("standalone_call.py.jinja", StandaloneCall),
        ("pipeline.py.jinja", Pipeline),
    ],
)
def test_context_classes_match_their_templates(template: str, context: type) -> None:
    assert template_variables(template) == {f.name for f in dataclasses.fields(context)}
