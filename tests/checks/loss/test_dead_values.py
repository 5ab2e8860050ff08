"""When the value of a line is lost for sure: read off the source of the function around it."""

import textwrap

import pytest

from pytest_trainloop.checks.loss.dead_values import never_read

LOST = {
    "thrown_away": "F.l1_loss(a, b)",
    "a_name_that_nothing_reads": "term = F.l1_loss(a, b)",
    "scaled_and_not_read": "term = 0.5 * F.l1_loss(a, b).mean()",
    "replaced_by_the_next": "term = F.l1_loss(a, b)\nterm = F.mse_loss(a, b)\nterm.backward()",
    "a_criterion_of_the_project": "term = self.criterion(a.softmax(-1), b)",
}

MAY_BE_READ = {
    "logged": "term = F.l1_loss(a, b)\nprint(term)",
    "read_by_a_closure": "term = F.l1_loss(a, b)\ndef closure():\n    return term",
    "kept_on_an_object": "self.term = F.l1_loss(a, b)",
    "kept_in_a_dict": "terms['l1'] = F.l1_loss(a, b)",
    "given_to_a_call": "meter.update(F.l1_loss(a, b))",
    "given_to_a_call_whose_result_is_not_read": "state = meter.update(F.l1_loss(a, b))",
    "replaced_in_a_branch_only": "term = F.l1_loss(a, b)\nif b:\n    term = F.mse_loss(a, b)\nterm.backward()",
    "added_to_by_the_next": "term = F.l1_loss(a, b)\nterm = term + F.mse_loss(a, b)\nterm.backward()",
    "said_to_be_unused": "_term = F.l1_loss(a, b)",
    "in_a_lambda": "term = lambda: F.l1_loss(a, b)",
    "given_to_the_caller": "return F.l1_loss(a, b), a",
    "found_by_its_text": "term = F.l1_loss(a, b)\nreport(locals())",
    "of_the_module": "global term\nterm = F.l1_loss(a, b)",
}


def lost(tmp_path, body, *callers):
    source = "def step(self, a, b, terms, meter):\n" + textwrap.indent(body, "    ") + "\n"
    lines = source.splitlines()
    at = 1 + next(i for i, line in enumerate(lines) if "l1_loss" in line or "criterion" in line)
    (tmp_path / "train.py").write_text(source + "".join(f"{line}\n" for line in callers))
    return never_read(((str(tmp_path / "train.py"), at), (str(tmp_path / "train.py"), len(lines) + len(callers))))


@pytest.mark.parametrize("body", LOST.values(), ids=LOST.keys())
def test_a_value_that_nothing_can_read_is_lost(tmp_path, body):
    assert lost(tmp_path, body)


@pytest.mark.parametrize("body", MAY_BE_READ.values(), ids=MAY_BE_READ.keys())
def test_a_value_that_may_be_read_is_not_lost(tmp_path, body):
    assert lost(tmp_path, body) == ""


@pytest.mark.parametrize(
    ("line", "said"), [("term = step()", "reads term"), ("return step().item()", ""), ("log.append(float(step()))", "")]
)
def test_a_value_that_is_returned_is_lost_where_the_caller_loses_it(tmp_path, line, said):
    found = lost(tmp_path, "return F.l1_loss(a, b)", "def fit():", f"    {line}")
    assert said in found if said else not found


def test_code_without_a_source_says_nothing():
    assert never_read((("<string>", 1),)) == ""
    assert never_read(()) == ""
