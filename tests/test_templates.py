"""The texts of findings are templates on their causes. Each field of one is a fact that the code gives: mypy cannot see
this, and a field without a fact would end the check with an error of ours."""

from __future__ import annotations

import ast
import functools
import importlib
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pytest_trainloop
from pytest_trainloop.core.registry import GIVEN, WORDED, Cause
from pytest_trainloop.core.wording import filled

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(pytest_trainloop.__file__).parent
FILES = sorted(
    file for file in ROOT.glob("checks/**/causes.py") if "finding_maker(" in file.read_text(encoding="utf-8")
)

MISTAKES = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "instruments" / "formulas").glob("*.py"))
"""What is wrong with textbook forms, each with its cause of ``loss_formula``."""


def module_of(file: Path) -> ModuleType:
    return importlib.import_module(".".join(file.relative_to(ROOT.parent).with_suffix("").parts))


def causes_of(file: Path) -> dict[str, Cause]:
    causes: dict[str, Cause] = module_of(file).CAUSES
    return causes


def rules_of(file: Path) -> list[Path]:
    """The modules of a check that find causes: a long list of causes is in several files."""
    return [module for module in file.parent.glob("*.py") if not module.name.startswith("causes")]


def fields_of(template: str) -> set[str]:
    """The facts that a template names, also inside of its conditions."""
    found = set()
    for _, name, spec, _ in string.Formatter().parse(template):
        found |= ({name} if name else set()) | fields_of(spec or "")
    return found


def templates(cause: Cause) -> list[str]:
    texts = (cause.summary, cause.measured, cause.shown_by)
    return [text for text in (*texts, *(t for v in cause.variants.values() for t in v.values())) if text]


@functools.cache
def facts_in(file: Path) -> set[str]:
    """The names of all facts that a module gives: keywords, keys of dicts, and keys that are assigned."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        keys: list[Any] = node.keys if isinstance(node, ast.Dict) else []
        keys += [node.slice] if isinstance(node, ast.Subscript) else []
        found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_field_of_a_template_is_a_fact_that_a_module_gives_for_its_cause(file):
    modules = rules_of(file)
    of_every_finding = {"names", *getattr(module_of(file), "OF_EVERY_CALL", ())}
    for name, cause in causes_of(file).items():
        naming = [m for m in modules if f'"{name}"' in m.read_text(encoding="utf-8")]
        if file.parent.name == "loss_formula" and f'"{name}"' in MISTAKES:
            naming = modules
        assert naming, f"no module of {file.parent.name} finds {name}"
        given = set().union(*map(facts_in, naming)) | of_every_finding
        missing = {field for text in templates(cause) for field in fields_of(text)} - (given - GIVEN)
        assert not missing, f"{name}: nobody gives {', '.join(sorted(missing))}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_variant_has_texts_of_a_finding_and_is_asked_for(file):
    asked = "\n".join(module.read_text(encoding="utf-8") for module in rules_of(file))
    for name, cause in causes_of(file).items():
        for variant, texts in cause.variants.items():
            assert set(texts) <= WORDED, f"{name}, {variant}"
            assert f'"{variant}"' in asked, f"{name}: no call asks for the variant {variant!r}"


def test_the_first_of_two_texts_may_hold_a_bar():
    template = "{known:?; {share} of |g|^2 is left out|}"
    assert filled(template, {"known": True, "share": "3 %"}) == "; 3 % of |g|^2 is left out"
    assert filled(template, {"known": False, "share": "3 %"}) == ""


def test_verbs_and_pronouns_agree_with_the_names():
    template = "{names} {names:get} no gradient: moving {names:them} changes nothing"
    assert filled(template, {"names": ("a",)}) == "a gets no gradient: moving it changes nothing"
    assert filled(template, {"names": ("a", "b")}) == "a, b get no gradient: moving them changes nothing"


def test_the_facts_of_every_call_are_those_that_a_call_gives():
    call = ROOT / "checks/loss/loss_contract/call.py"
    assert facts_in(call) >= module_of(call.with_name("causes.py")).OF_EVERY_CALL
