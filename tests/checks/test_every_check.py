"""What holds for every registered check, whoever adds one: its page, its causes, its examples, its findings."""

from __future__ import annotations

import dataclasses
import doctest
import graphlib
import importlib.util
import re
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import LossContract, Roles, TrainLoop, checks
from pytest_trainloop.core import registry
from pytest_trainloop.core.registry import FAMILIES, Check
from pytest_trainloop.frontends.api import check_loop, check_loss
from pytest_trainloop.judging import explain
from tests.helpers.findings import described
from tests.loops.corpus import PAIRS
from tests.losses.corpus import PAIRS as LOSS_PAIRS

HEADINGS = ["What it does", "Why is this bad?", "How it decides", "Faulty", "Fixed", "Known limits", "References"]
CHECKS = {name: check for name, check in registry.registered().items() if check.family != "project"}
CAUSES = [(name, cause) for name, check in CHECKS.items() for cause in check.causes]

every_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


def section(check: Check, heading: str) -> str:
    """The text under one heading of the rule page."""
    lines = check.page.splitlines()
    start = lines.index(heading) + 1
    end = next((i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    return "\n".join(lines[start:end])


def test_every_folder_holds_one_check_of_its_name_in_its_family():
    files = sorted(Path(checks.__path__[0]).glob("*/*/check.py"))
    assert {check.module for check in CHECKS.values()} == {
        f"{checks.__name__}.{file.parts[-3]}.{file.parts[-2]}.check" for file in files
    }
    assert {(check.family, name) for name, check in CHECKS.items()} == {file.parts[-3:-1] for file in files}


def test_every_page_has_all_headings_in_order_and_text_under_each():
    for name, check in CHECKS.items():
        assert [line for line in check.page.splitlines() if line in HEADINGS] == HEADINGS, name
        headings = [h for h in (*HEADINGS, "When it is skipped") if h in check.page.splitlines()]
        assert [h for h in headings if not section(check, h).strip()] == [], name
        assert 0 < len(check.headline) <= 120, name
        assert check.page.splitlines()[1] == "", name
        assert re.findall(r"https://\S+", section(check, "References")), name


def test_how_every_check_decides_is_said_in_short_steps_and_one_short_table():
    """At most 250 words of at most 30 in a sentence, and 12 rows: whoever is accused reads it once."""
    for name, check in CHECKS.items():
        lines = [line.strip() for line in section(check, "How it decides").splitlines()]
        prose = "\n".join(line for line in lines if not line.startswith("|"))
        lengths = [len(each.split()) for each in re.split(r"(?m)^\d+\. |(?<=[.!?])\s+", prose)]
        steps = re.findall(r"(?m)^(?:\d+[.)]|[-*+]) ", prose)  # in Markdown, whatever wrapping puts first
        assert steps == [f"{n}. " for n in range(1, len(steps) + 1)] != [], name
        assert sum(lengths) <= 250, name
        assert max(lengths) <= 30, name
        assert sum(line.startswith("|") for line in lines) <= 2 + 12, name
        assert "\n".join(lines).count("\n|--") <= 1, name
        assert max(map(len, explain.page(name).splitlines())) <= 120, name
        assert "It skips" not in prose, name  # that is under "When it is skipped"
        if name not in ("loss_contract", "loss_is_finite"):  # whose causes say by their names what is seen
            assert [c for c in check.causes if f"``{c}``" not in section(check, "How it decides")] == [], name


def test_the_data_of_every_check_is_well_formed():
    known = {*CHECKS, *(f"{name}:{cause}" for name, cause in CAUSES)}
    of_losses = {f.name for f in dataclasses.fields(LossContract)}
    for name, check in CHECKS.items():
        assert check.family in FAMILIES, name
        fields = of_losses if check.subject == "loss" else TrainLoop.field_names()
        assert check.needs <= {*fields, "run"}, name
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", cause) for cause in check.causes), name
        assert all(len(proof.split()) > 3 for proof in check.proofs.values()), name
        assert {explained for cause in check.causes.values() for explained in cause.explains} <= known, name
        assert all(cause.source.startswith("https://") for cause in check.causes.values() if cause.source), name


def test_nothing_heavy_and_no_other_check_stands_at_the_top_of_a_check_file():
    for name, check in CHECKS.items():
        held = list(vars(sys.modules[check.module]).values())
        held_modules = {v.__name__.partition(".")[0] for v in held if isinstance(v, types.ModuleType)}
        origins = {str(getattr(v, "__module__", "")) for v in held} - {check.module}
        assert not {"torch", "hypothesis", "numpy"} & (held_modules | {o.partition(".")[0] for o in origins}), name
        assert not {c.module for c in CHECKS.values()} & origins, name


class Classifier(nn.Module):
    """What the examples call a model: 8 features, 3 classes."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x.to(self.head.weight.dtype)))


def different_batches(n):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 8, generator=generator), torch.randint(3, (6,), generator=generator)) for _ in range(n)]


def loop_of(example: str):
    """A loop around an example: a ``forward`` for the model, a loop over ``batches``, or the lines that build both (and
    a ``batch``, or ``batches``)."""
    compiled = compile(example, "<example>", "exec")

    def make(accumulate=1, compiling=False, ranks=1):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"torch": torch, "nn": nn, "F": F, "Classifier": Classifier, "Roles": Roles}
        names |= {"model": model, "optimizer": optimizer}
        names |= {"accumulate": accumulate, "compile": compiling, "ranks": ranks}
        if "in batches" not in example and "(batches" not in example:
            exec(compiled, names)
        elif "parts = " in example or example.startswith("batch = "):
            defined = {**names, "batches": ()}  # a loop over no batches: what it defines is declared
            exec(compiled, defined)
            names |= {field: defined[field] for field in ("parts", "batch", "roles") if field in defined}
        if "forward" in names:
            model.forward = types.MethodType(names["forward"], model)

        def fit(batches):
            if "in batches" in example or "(batches" in example:
                exec(compiled, {**names, "batches": batches})
                return
            for x, y in batches:
                names["optimizer"].zero_grad()
                F.cross_entropy(names["model"](x), y).backward()
                names["optimizer"].step()

        given = (
            {"batch": names["batch"]}
            if "batch" in names
            else {"batch": different_batches(1)[0], "batches": names.get("batches", different_batches)}
        )
        given |= {field: names[field] for field in ("evaluate", "save", "load", "parts", "roles") if field in names}
        return TrainLoop(model=names["model"], optimizer=names["optimizer"], fit=fit, **given)

    if "torch.compile" in example:
        return lambda compile=False: make(compiling=compile)
    if "ranks" in example:
        return lambda ranks=1: make(ranks=ranks)
    return (lambda accumulate=1: make(accumulate)) if "accumulate" in example else lambda: make()


def loop_in_a_file(example: str):
    """A loop around a ``fit(model, optimizer, batches)`` that a module of its own defines."""
    file = Path(tempfile.mkdtemp(), "train_example.py")
    lines = ["import torch.nn.functional as F", example, "def make(): return build(fit)"]
    file.write_text("\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    module.build = lambda fit: plain_loop(Classifier(), different_batches(1)[0], fit)
    spec.loader.exec_module(module)
    return module.make


def plain_loop(model, batch, fit):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda b: fit(model, optimizer, b))


def contract_of(example: str) -> LossContract:
    """The contract that the lines of an example build."""
    names = {"torch": torch, "nn": nn, "F": F, "LossContract": LossContract}
    exec(compile(example, "<example>", "exec"), names)
    return names["contract"]


def judge(check: Check, heading: str, **options):
    """The report on the example under this heading."""
    battery, subject_of = (check_loss, contract_of) if check.subject == "loss" else (check_loop, loop_of)
    if check.name == "no_typos":  # reads the file that holds the loop
        return battery(loop_in_a_file(example(check, heading)), raises=False, **options)
    if check.name != "baseline":
        return battery(subject_of(example(check, heading)), raises=False, **options)
    with tempfile.TemporaryDirectory() as folder:  # the example under "Fixed" is what was recorded
        file = Path(folder, "loop.json")
        battery(subject_of(example(check, "Fixed")), only=["baseline"], baseline=file, update=True)
        return battery(subject_of(example(check, heading)), raises=False, baseline=file, **options)


def example(check: Check, heading: str) -> str:
    """The code under one heading."""
    code = "".join(e.source for e in doctest.DocTestParser().get_examples(section(check, heading)))
    assert code
    return code


@every_check
def test_the_faulty_example_fails_it_and_the_fixed_one_passes_it(check):
    report = judge(check, "Faulty", only=[check.name], strict=True)  # strict: a check may only advise
    (faulty,) = report.results
    assert faulty.outcome == "failed", described(report)
    page = Path(__file__).parents[2] / "docs" / "checks" / f"{check.name}.md"
    assert f"\ncause      {faulty.findings[0].cause}\n" in page.read_text(encoding="utf-8")
    report = judge(check, "Fixed", only=[check.name])
    (fixed,) = report.results
    assert fixed.outcome == "passed" or not fixed.applies, described(report)


@pytest.mark.corpus
@every_check
def test_the_fixed_example_passes_everything(check):
    assert {r.outcome for r in judge(check, "Fixed").results} <= {"passed", "skipped"}


@pytest.mark.corpus
@every_check
def test_the_faulty_example_has_one_root_cause(check):
    failed = [r for r in judge(check, "Faulty").results if r.outcome == "failed"]
    roots = [f for r in failed if r.check == check.name for f in r.faults]
    consequences = [r for r in failed if any(f.accounts_for(r.check, g.cause) for f in roots for g in r.faults)]
    assert [r.check for r in failed if r not in consequences] in ([check.name], [])


def test_every_cause_has_a_pair_that_shows_it_and_every_pair_is_of_a_declared_cause():
    """A pair(..., check, cause, ...) in a faults*.py of the check's test folder."""
    PAIRS.load_all()
    LOSS_PAIRS.load_all()
    pairs = (*PAIRS.values(), *LOSS_PAIRS.values())
    shown = {(p.check, p.cause) for p in pairs}
    assert [each for each in CAUSES if each not in shown] == []
    assert [p.name for p in pairs if (p.check, p.cause) not in CAUSES] == []


def test_no_cause_accounts_for_itself_by_way_of_others():
    """Else two findings would name each other as the root."""
    follows = {
        f"{check}:{cause}": {
            f"{name.partition(':')[0]}:{other}"
            for name in CHECKS[check].causes[cause].explains
            for other in ([name.partition(":")[2]] if ":" in name else CHECKS[name].causes)
        }
        for check, cause in CAUSES
    }
    graphlib.TopologicalSorter(follows).prepare()
