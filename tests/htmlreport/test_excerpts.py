"""Lines of the user's source, as the page shows them."""

from __future__ import annotations

import pytest

from pytest_trainloop.core.report.lines import Line, Places
from pytest_trainloop.views.htmlreport.excerpts import Sources

TRAIN = """\
class Trainer:
    def fit(self):
        for batch in self.batches:
            text = '''
        not code: for
            '''
            loss = self.model(batch)
            loss.backward()
            self.optimizer.step()


def far_away():
    return 1


def further_away():
    return 2
"""


@pytest.fixture
def excerpts(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return lambda **named: Sources(Places(tmp_path)).excerpts(
        {label.replace("_", " "): Line.read(text) for label, text in named.items()}
    )


def text(line):
    return "".join(piece for _, piece in line.tokens)


def test_lines_near_each_other_share_an_excerpt_without_their_common_indent(excerpts):
    (found,) = excerpts(change="train.py:8   loss.backward()", seen_at="train.py:9   self.optimizer.step()")
    assert found.file == "train.py"
    assert [(line.number, line.labels) for line in found.lines if line.labels] == [(8, ("change",)), (9, ("seen at",))]
    assert [line.number for line in found.lines] == list(range(5, 13))
    assert text(found.lines[0]) == "        not code: for"
    assert text(found.lines[2]) == "            loss = self.model(batch)"


def test_lines_far_from_each_other_have_one_each(excerpts):
    found = excerpts(change="train.py:2   def fit(self):", seen_at="train.py:17   return 2")
    assert [[line.number for line in each.lines if line.labels] for each in found] == [[2], [17]]
    assert [text(line) for line in found[1].lines] == ["def further_away():", "    return 2"]


def test_colours_are_those_of_the_whole_file(excerpts):
    (found,) = excerpts(change="train.py:5   not code: for")
    inside = next(line for line in found.lines if line.labels)
    assert {kind for kind, piece in inside.tokens if piece.strip()} == {"string"}
    assert ("keyword", "for") in next(line for line in found.lines if line.number == 3).tokens


def test_a_line_that_moved_is_found_and_one_that_is_gone_is_not_shown(excerpts):
    (found,) = excerpts(change="train.py:3   loss.backward()")
    assert [line.number for line in found.lines if line.labels] == [8]
    assert excerpts(change="train.py:8   loss.forward()") == []
    assert excerpts(change="other.py:8   loss.backward()", seen_at="no place at all") == []


def test_an_excerpt_neither_begins_nor_ends_with_an_empty_line(excerpts):
    (found,) = excerpts(change="train.py:12   def far_away():")
    assert [line.number for line in found.lines] == [9, 10, 11, 12, 13]


def test_a_very_long_line_is_cut(excerpts, tmp_path):
    (tmp_path / "long.py").write_text(f"x = {'1' * 5000}\n", encoding="utf-8")
    (found,) = excerpts(change=f"long.py:1   x = {'1' * 5000}")
    assert len(text(found.lines[0])) == 401
