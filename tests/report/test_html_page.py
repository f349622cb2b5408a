"""The HTML page: well-formed, self-contained, its links whole, its code tied to equations and lines."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import linalg_dsl
from linalg_dsl.codegen.targets import find_target
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.report.parts import Call, Part

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
XMLNS = {"http://www.w3.org/1998/Math/MathML", "http://www.w3.org/2000/svg"}


def op_of(name: str) -> linalg_dsl.ops.op.CompiledOp:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec)


def page_of(name: str, folder: Path, **call: int) -> str:
    written: Path = op_of(name).plan.to_html(folder / f"{name}.html", **call)
    return written.read_text(encoding="utf-8")


def tree_of(page: str) -> ET.Element:
    assert page.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(page.split("\n", 1)[1])


def test_elements_are_escaped_and_closed() -> None:
    from linalg_dsl.report.markup import join, tag

    assert tag("p", "a < b", tag("br"), class_="x") == '<p class="x">a &lt; b<br /></p>'
    assert join("<", tag("a", "&", href='"')) == '&lt;<a href="&quot;">&amp;</a>'
    assert tag("details", open=None) == "<details></details>"


@pytest.mark.parametrize("name", catalogue_names())
def test_every_entry_has_a_page_that_is_whole(name: str, tmp_path: Path) -> None:
    check_whole(page_of(name, tmp_path))


def check_whole(page: str) -> None:
    """Elements are there, nothing is fetched, and links lead somewhere."""
    tree = tree_of(page)
    tags = {e.tag.rpartition("}")[2] for e in tree.iter()}
    assert {"math", "svg", "table", "pre"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object", "embed"}
    # nothing is fetched: what looks like an address is the name of a vocabulary, or prose of the entry
    for element in tree.iter():
        assert set(element.attrib) & {"src", "srcset", "onload", "onclick", "data"} == set()
        assert not re.search(r"url\(|@import", element.attrib.get("style", "") + (element.text or ""))
    assert set(re.findall(r'="(https?:[^"]*)"', page)) <= XMLNS
    ids = [e.attrib["id"] for e in tree.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))
    targets = {e.attrib["href"] for e in tree.iter() if "href" in e.attrib}
    assert {t.removeprefix("#") for t in targets} <= set(ids)
    assert all(t.startswith("#") for t in targets)


def text_of(element: ET.Element) -> str:
    return "".join(element.itertext())


def rows(tree: ET.Element, class_: str) -> list[ET.Element]:
    return [e for e in tree.iter() if class_ in e.attrib.get("class", "").split()]


def test_statements_lead_to_their_equation_and_equations_to_their_line(tmp_path: Path) -> None:
    tree = tree_of(page_of("gated_delta_rule", tmp_path))
    by_id = {e.attrib["id"]: e for e in tree.iter() if "id" in e.attrib}
    found = {}
    for line in rows(tree, "ln"):
        to = next((e for e in line if e.tag == "a"), None)
        statement = text_of(line)
        if to is not None:
            found[re.sub(r"^\d+", "", statement).strip()] = by_id[to.attrib["href"][1:]]
    solved = found["u_1 = substitute(system, x_2)"]
    assert text_of(next(e for e in solved if e.attrib.get("class") == "eq")).startswith("U=")
    assert next(e.attrib["href"] for e in solved.iter() if e.tag == "a") == "#s1-l1"
    read = found["o = scale * (q * since_start[..., None] @ S + g_q11 @ z_1)"]
    assert [e.attrib["href"] for e in read.iter() if e.tag == "a"][:2] == ["#s1-l2", "#s1-k-fwd_walk"]
    assert "#s1-k-fwd_walk"[1:] in by_id
    walk = text_of(by_id["s1-k-fwd_walk"])
    assert "def gated_delta_rule_fwd_walk" in walk


@pytest.mark.parametrize("name", ["kda", "delta_product", "gsa", "mamba1", "lstm", "gated_oja", "mdn"])
def test_every_computing_statement_belongs_to_an_equation(name: str) -> None:
    for plan in op_of(name).plan.stages:
        part = plan.part(Call())
        assert all(part.origins.lines)
        for backend in ("torch", "triton"):
            assert part.code[backend]
            for function in part.code[backend]:
                loose = [
                    line.text.strip()
                    for line in function.lines
                    if line.equation is None and re.match(r"\s+b_\w+ = (?!tl\.load)", line.text)
                ]
                # states, what is loaded, and accumulators that start at nothing
                loose = [x for x in loose if not re.search(r"= (tl\.zeros|tl\.full|b_\w+|\w+\[)", x)]
                assert not loose, f"{function.name}: {loose}"


TWO_LEVELS = ["linear_attention", "simple_gla", "gla", "delta_rule", "comba", "kda", "gated_oja"]


def part_of(name: str, **options: Any) -> Part:
    (plan,) = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec, **options).plan.stages
    return plan.part(Call(B=1, T=8192, H=4))


@pytest.mark.parametrize("name", TWO_LEVELS)
def test_two_levels_are_drawn_as_they_are_launched(name: str, tmp_path: Path) -> None:
    op = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec, schedule="two_level")
    check_whole(op.plan.to_html(tmp_path / "x.html", B=1, T=8192, H=4).read_text(encoding="utf-8"))
    part = part_of(name, schedule="two_level")
    told = op.plan.stages[0].predictions(1, 8192, 4, 128, 128, "bfloat16", find_target("sm_90"))
    assert [(x.phase, x.name) for x in part.launches] == [(phase, kernel) for phase, kernel, _ in told]
    assert part.levels.startswith("two levels")
    shown = {f.name.removeprefix(f"{name}_") for f in part.code["triton"]}
    assert {x.name for x in part.launches} == shown
    # every super-chunk starts from what a scan found, and only the scan touches the states of a call
    starts = {"forward": ("S_0", "S_T", "S before"), "backward": ("dS_T", "dS_0", "dS behind")}
    for launch in part.launches:
        first, last, before = starts[launch.phase]
        reads, writes = {t.name for t in launch.reads}, {t.name for t in launch.writes}
        scans = launch.name == "super_scan"
        assert (first in reads) == (last in writes) == (before in writes) == scans
        if "walk, splits" in launch.what:
            assert ("S before" if launch.what.startswith("forward") else "dS behind") in reads
    # what the backward needs of the forward is kept by it
    made = {t.name for x in part.launches if x.phase == "forward" for t in x.writes if t.role == "saved"}
    needed = {t.name for x in part.launches if x.phase == "backward" for t in x.reads if t.role == "saved"}
    assert needed <= made


@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "mdn", "abc"])
def test_states_come_in_and_go_out_once(name: str) -> None:
    for plan in op_of(name).plan.stages:
        launches = plan.part(Call()).launches
        for phase, role in (("forward", "_T"), ("backward", "_0")):
            written = [t.name for x in launches if x.phase == phase for t in x.writes if t.role == "state"]
            assert written
            assert all(w.endswith(role) for w in written)
            assert len(written) == len(set(written))


def test_sizes_that_are_forced_stand_in_the_table() -> None:
    part = part_of("gla", launch={"fwd_walk": {"block": 32, "warps": 8}})
    (walk,) = [s for s in part.schedules if s.name == "fwd_walk"]
    assert (walk.block, walk.warps) == (32, 8)
    assert walk.programs == 4 * (128 // 32)


def test_bytes_and_crossover_are_those_of_the_call(tmp_path: Path) -> None:
    page = page_of("linear_attention", tmp_path, B=2, T=1024, H=4, K=64, V=64)
    assert "B = 2, T = 1024, H = 4, K = 64, V = 64, bfloat16, sm_90" in page
    listed = "q  [B, T, H, K]  1.05 MB".replace(" ", "\N{NO-BREAK SPACE}")
    assert listed in page  # 2 x 1024 x 4 x 64 x 2 bytes


def test_the_crossover_to_attention_is_where_both_cost_the_same() -> None:
    from linalg_dsl.planner.work import Work, attention_work, crossover

    for length in (100, 5000):
        found = attention_work(length, 64, 128)
        assert crossover(found, 64, 128) == pytest.approx((length, length))
    assert crossover(Work(forward_flops=2 * 192 * 50.5), 64, 128)[0] == pytest.approx(100)


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="sm_1"):
        op_of("kda").plan.to_html(tmp_path / "x.html", target="sm_1")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("name", ["gated_delta_product", "abc"])
def test_a_page_takes_no_longer_than_three_seconds(name: str, tmp_path: Path) -> None:
    op_of("retnet").plan.to_html(tmp_path / "first.html")  # imports
    op = op_of(name)
    begin = time.process_time()
    op.plan.to_html(tmp_path / "x.html")
    assert time.process_time() - begin < 3


def test_notebooks_show_mathematics() -> None:
    op = op_of("gsa")
    spec = op.spec
    for shown in (op.plan, spec):
        ET.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert "<math" in shown._repr_html_()
        assert r"\begin{align*}" in shown._repr_latex_()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_renders_the_page_without_errors(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    op_of("kda").plan.to_html(path)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=2000"
    )
    shot = tmp_path / "page.png"
    command = [str(CHROMIUM), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    dom = done.stdout
    for element in ("svg", "math", "details", "table", "figure"):  # none is dropped or moved by the parser
        assert dom.count(f"<{element}") == path.read_text(encoding="utf-8").count(f"<{element}")
    assert dom.rstrip().endswith("</html>")
    command[-1] = f"--screenshot={shot}"
    subprocess.run([*command, path.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000


def test_what_a_user_wrote_is_shown_and_not_read_as_markup(tmp_path: Path) -> None:
    text = """# A <script>alert(1)</script> & a "word" ]]>
recurrence α_x
input q, k̂ : [K]
input v : [V]
input γ : log gate [K]
S_t = diag(exp(γ_t)) S_{t-1} + k̂_t v_tᵀ
o_t = S_tᵀ q_t
"""
    page = linalg_dsl.compile(text).plan.to_html(tmp_path / "x.html").read_text(encoding="utf-8")
    assert "script" not in {e.tag for e in tree_of(page).iter()}
    assert 'A &lt;script&gt;alert(1)&lt;/script&gt; &amp; a "word"' in page


@pytest.mark.parametrize(
    "call", [{"B": 0}, {"T": 0}, {"B": 1, "T": 1, "H": 1, "K": 1, "V": 1}, {"K": 512, "V": 512}]
)
def test_calls_of_any_size_have_a_page(call: dict[str, int], tmp_path: Path) -> None:
    for name in ("gated_delta_rule", "mamba1"):
        tree_of(page_of(name, tmp_path, **call))


@pytest.mark.parametrize(
    "options", [{"chunk_size": 16}, {"reverse": True}, {"backend": "torch"}, {"invariant": True}]
)
def test_ops_of_any_options_have_a_page(options: dict[str, Any], tmp_path: Path) -> None:
    op = linalg_dsl.compile(linalg_dsl.ops.gated_delta_rule.spec, **options)
    assert tree_of(op.plan.to_html(tmp_path / "x.html").read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("name", ["kda", "gsa", "mamba1"])
def test_the_plan_made_without_an_op_is_the_ops(name: str) -> None:
    from linalg_dsl.driver import make_plan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert make_plan(getattr(linalg_dsl.ops, name).spec) == op_of(name).plan


def test_explaining_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from linalg_dsl.cli import app\n"
        f"sys.argv = ['linalg-dsl', 'explain', 'gla', '--html', {str(tmp_path / 'x.html')!r}]\n"
        "try:\n    app()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert (tmp_path / "x.html").exists()


def test_an_output_that_is_a_state_leads_to_its_own_line() -> None:
    (plan,) = op_of("lstm").plan.stages
    origins = plan.part(Call()).origins
    lines = {e.left: found for e, found in zip(origins.equations, origins.lines, strict=True)}
    assert (lines["c_t"], lines["h_t"], lines["o"]) == ((0,), (1,), (2,))
