"""The documentation: what is generated is not stale, links lead somewhere, and it names what there is."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import pytest_trainloop
from pytest_trainloop import adapters
from pytest_trainloop.core import registry
from pytest_trainloop.declare.knobs import KNOBS
from pytest_trainloop.instruments import strategies
from pytest_trainloop.judging import explain

ROOT = Path(__file__).parents[1]
NOT_OURS = {".git", ".venv", ".venv-ci", "build", "dist", "site"}
OURS = (path for top in ROOT.iterdir() if top.name not in NOT_OURS for path in (top, *top.rglob("*")))
TEXTS = sorted(path for path in OURS if path.suffix in {".py", ".md", ".toml"})
PAGES = [path for path in TEXTS if path.suffix == ".md"]

LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
MENTION = re.compile(
    r"\b(?P<path>(?:docs|scripts|tests|benchmarks|examples)/[\w./-]+\.(?:md|py))(?:#(?P<anchor>[\w-]+))?"
)
NOTES = re.compile(r"\b[A-Z]{4,} [A-Z]\d+\b|\([A-Z]\d{1,2}[:,)]")
"""A rule by its number in some notes, as in "NOTES K4": what a reader of this repository cannot look up."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown gives them."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in re.findall(r"^#+ (.+)$", text, re.M))
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@cache
def script(name):
    """A file in scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_from_the_check_files_is_not_stale():
    docs = script("docs")
    old = [relative(path) for path in docs.stale(docs.generated(fast=True))]
    assert not old, "run python scripts/docs.py --fast"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "scripts").glob("*.py")))
def test_a_script_can_be_loaded_and_says_how_it_is_called(name, monkeypatch, capsys):
    loaded = script(name)
    assert loaded.__doc__
    if hasattr(loaded, "main"):  # mkdocs_hooks.py is a plugin of mkdocs
        monkeypatch.setattr("sys.argv", [name, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            loaded.main()
        assert "usage:" in capsys.readouterr().out


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for link in LINK.finditer(re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)):
            target = (page.parent / link["path"]).resolve() if link["path"] else page
            if not target.exists() or (link["anchor"] and link["anchor"] not in anchors(target)):
                broken.append((relative(page), link[0]))
    assert broken == []


def test_files_that_are_named_exist():
    wrong = [
        f"{relative(path)}: {named[0]}"
        for path in TEXTS
        if not relative(path).startswith("scripts/public/")  # files of other projects
        for named in MENTION.finditer(read(path))
        if not (ROOT / named["path"]).is_file()
        or (named["anchor"] and named["anchor"] not in anchors(ROOT / named["path"]))
    ]
    assert not wrong


def test_paths_for_contributors_exist():
    example = "parameters_are_contiguous"
    places = (ROOT, ROOT / "pytest_trainloop", *(ROOT / "pytest_trainloop").iterdir())
    in_any_folder = {path.name for path in TEXTS}
    named = {
        path: relative(page)
        for page in PAGES
        if page.parent.name == "contributing"
        for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", read(page))
    }
    missing = {p: page for p, page in named.items() if not any((place / p).exists() for place in places)}
    assert {p: page for p, page in missing.items() if p not in in_any_folder and example not in p} == {}


def test_nothing_refers_to_notes_outside_of_the_repository():
    own = Path(__file__)
    assert [f"{relative(p)}: {m[0]}" for p in TEXTS if p != own for m in NOTES.finditer(read(p))] == []


def test_the_readme_fits_and_contributing_pages_are_short():
    lines = [line for line in read("README.md").splitlines() if not line.startswith("| [`")]  # a row a check
    assert len(lines) <= 113
    long = [p.name for p in (ROOT / "docs" / "contributing").glob("*.md") if len(read(p).splitlines()) > 110]
    assert long == []


def test_every_option_and_knob_has_its_line():
    declared = read("pytest_trainloop/frontends/plugin/options.py")
    page = read("docs/options.md")
    for option in re.findall(r'option\(\s*"(--[\w-]+)"', declared):
        assert f"`{option}" in page, option
    for key in re.findall(r'ini\(\s*"(\w+)"', declared):
        assert f"\n{key} = " in page, key
    for knob in KNOBS:
        assert f"`{knob}" in read("docs/knobs.md"), knob


def test_the_reference_has_every_public_name():
    shown = read("docs/reference.md")
    names = [f"pytest_trainloop.{name}" for name in pytest_trainloop.__all__ if name != "__version__"]
    names += [f"pytest_trainloop.adapters.{name}" for name in adapters.__all__]
    assert [name for name in names if f"::: {name}\n" not in shown] == []
    members = re.search(r"members: \[(.*)\]", read("docs/strategies.md"))[1].split(", ")
    assert set(members) == {name for name in strategies.__all__ if not name.isupper()}


@pytest.mark.parametrize(
    "function",
    [
        pytest_trainloop.check_loop,
        pytest_trainloop.check_loss,
        pytest_trainloop.observe,
        pytest_trainloop.Padding,
        pytest_trainloop.Roles,
        pytest_trainloop.TrainLoop,
        pytest_trainloop.LossContract,
        *(getattr(adapters, name) for name in adapters.__all__),
        *(
            getattr(strategies, n)
            for n in ("row_selections", "paddings", "splits", "token_batches", "sequences", "cases")
        ),
    ],
    ids=lambda function: function.__name__,
)
def test_every_parameter_is_described(function):
    text = inspect.getdoc(function)
    told = re.findall(r"^(\w[\w, ]*)\n    \S", text.partition("Parameters\n----------\n")[2], re.M)
    names = {name for line in told for name in line.split(", ")}
    given = {name for name in inspect.signature(function).parameters if name not in ("self", "draw")}
    assert given <= names, given - names


def test_examples_are_python():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", read(page), re.M | re.S):
            ast.parse(block, filename=relative(page))


def test_a_page_has_all_sections_and_causes_of_its_check():
    for name, check in registry.registered().items():
        text = explain.markdown_page(check)
        headings = [line for line in check.page.splitlines()[1:] if line and not line.startswith(" ")]
        assert sorted(re.findall(r"^## (.+)$", text, re.M)) == sorted([*headings, "Causes"]), name
        assert text.index("## Fixed") < text.index("## Causes") < text.index("## How it decides"), name
        assert all(f"](#{slug})" in text.partition("| | |")[0] for slug in check.causes), name
        assert re.findall(r"^### `(.+)`$", text, re.M) == list(check.causes), name
        assert ">>>" not in text, name
        assert "``" not in text.replace("```", ""), name


def test_a_repair_that_begins_with_code_keeps_its_case():
    for name, check in registry.registered().items():
        text = explain.markdown_page(check).replace("\\", "")
        first = [cause.repair.split()[0] for cause in check.causes.values() if cause.repair]
        assert [word for word in first if set("(=_") & set(word) and f"*Repair*: {word}" not in text] == [], name
