"""What is said of segments that meet, and what is asked for."""

from __future__ import annotations

import pytest

from pytest_trainloop import Roles
from pytest_trainloop.frontends.api import check_loop
from tests.checks.batch.segment_independence import faults_documents, faults_graphs, unusual_graphs
from tests.loops.corpus import PAIRS


def judged(make):
    (result,) = check_loop(make, only=["segment_independence"], raises=False).results
    return result


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("readout_without_the_graph_of_each_node", "graphs 0 and 1, of 3 and 5 nodes"),
        ("packed_documents_see_those_before", "documents 0 and 2, of 4 and 3 tokens"),
        ("offsets_by_the_last_index", "graphs 0 and 1"),
        ("last_token_predicts_the_next_document", "documents 0 and 1"),
        ("q_target_does_not_read_the_end", "row [4]"),
    ],
)
def test_at_most_two_segments_show_it(name, smallest):
    (finding,) = judged(PAIRS[name].faulty).findings
    assert finding.smallest == smallest


def test_graphs_that_attend_to_each_other_are_to_be_declared():
    declared = unusual_graphs.matching_of_pairs_of_graphs

    def undeclared():
        loop = declared()
        loop.rows_interact = None
        return loop

    result = judged(undeclared)
    assert result.outcome == "skipped"
    assert result.needs == "rows_interact="
    assert "graphs of one batch affect each other in the model" in result.reason
    assert not judged(declared).applies


def test_a_declaration_makes_attention_between_graphs_a_fault():
    def apart():
        loop = unusual_graphs.matching_of_pairs_of_graphs()
        loop.rows_interact = False
        return loop

    (finding,) = judged(apart).faults
    assert finding.cause == "segments_interact"


@pytest.mark.parametrize(
    ("name", "most"),
    [("readout_without_the_graph_of_each_node", 1), ("advantages_run_over_the_ends_of_episodes", 4)],
)
def test_what_it_costs_when_green(name, most):
    watched = 12
    assert judged(PAIRS[name].fixed).steps <= watched + most


def test_data_that_is_standardised_over_all_graphs_is_advice():
    def standardised(_layers, hidden, batch, count):
        return faults_graphs.mean_pool(None, hidden, batch, count)

    def make():
        loop = faults_graphs.net(standardised)()
        loop.batch.x = loop.batch.x * 3
        model = loop.model
        forward = model.forward

        def over_all(x, *rest):
            return forward((x - x.mean(0)) / x.std(0), *rest)

        model.forward = over_all
        return loop

    (finding,) = judged(make).findings
    assert (finding.cause, finding.level) == ("pooled_over_graphs", "advice")


def test_numbers_that_may_be_those_of_documents_are_asked_for():
    def backwards():
        return faults_documents.numbers_of_documents().flip(1)

    result = judged(faults_documents.by_numbers(numbers=backwards))
    assert (result.outcome, result.needs) == ("skipped", "roles=")
    assert "the numbers in doc may be those of documents" in result.reason


def test_declared_numbers_of_documents_are_taken_as_they_are():
    def backwards():
        return faults_documents.numbers_of_documents().flip(1)

    def make():
        loop = faults_documents.by_numbers(numbers=backwards, apart="")()
        loop.roles = Roles(segments="doc")
        return loop

    (finding,) = judged(make).findings
    assert (finding.cause, finding.level) == ("segments_interact", "fault")
