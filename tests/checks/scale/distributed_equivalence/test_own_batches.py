"""What ranks did over their own batches, made by hand."""

from pytest_trainloop.checks.scale.distributed_equivalence import own_batches
from pytest_trainloop.checks.scale.distributed_equivalence.drift import of_drift
from pytest_trainloop.checks.scale.distributed_equivalence.ledger import Seen
from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
from pytest_trainloop.recording.events import Place
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.record import Record, Statistics


def did(first=None, last=None, *, entered=None, steps=(), stepped=("w",), record=None, **seen):
    first = {"w": (1.0, 2.0)} if first is None else first
    return Did(
        record or Record(),
        Seen(
            entered=first if entered is None else entered,
            first=first,
            last=first if last is None else last,
            digests=[{name: repr(value).encode() for name, value in state.items()} for state in steps],
            stepped=set(stepped),
            **seen,
        ),
    )


def course(*values):
    """A rank whose weight has these values before each step, and at the end."""
    states = [{"w": (value,)} for value in values]
    return did(states[0], states[-1], steps=states)


def test_names_lose_what_wrappers_add():
    assert plain("module._orig_mod.blocks.0.weight") == "blocks.0.weight"
    assert plain("net.module.head.bias") == "net.head.bias"
    assert plain("my_module.weight") == "my_module.weight"


def test_a_start_differs_beyond_rounding_and_still_at_the_first_step():
    assert own_batches.starts_apart([did(), did({"w": (1.0, 2.5)})]) == ("w",)
    assert own_batches.starts_apart([did(), did({"w": (1.0, 2.0 + 1e-6)})]) == ()
    sent = did(entered={"w": (7.0, 7.0)})
    assert own_batches.starts_apart([did(), sent]) == ()
    changed_by_a_forward_pass = did({"w": (1.0, 2.5)}, entered={"w": (1.0, 2.0)})
    assert own_batches.starts_apart([did(), changed_by_a_forward_pass]) == ()


def test_weights_that_part_for_good_drift_and_those_that_come_together_do_not():
    assert own_batches.ends_apart([course(1, 2, 3), course(1, 2, 4)]) == ("w",)
    assert own_batches.ends_apart([course(1, 2, 3), course(1, 2, 3)]) == ()
    averaged = [course(1, 2, 5, 6), course(1, 3, 5, 7)]
    assert own_batches.ends_apart(averaged) == ()
    assert own_batches.come_together(averaged, ["w"])
    assert not own_batches.come_together([course(1, 2, 3), course(1, 4, 5)], ["w"])


def test_a_stepped_weight_that_parts_is_a_fault_and_a_buffer_advice():
    (fault,) = of_drift([course(1, 2, 3), course(1, 2, 4)])
    assert (fault.cause, fault.level, fault.culprits) == ("weights_drift", "fault", ("w",))
    sides = [course(1, 2, 3), course(1, 2, 4)]
    for side in sides:
        side.seen.stepped.clear()
    (advice,) = of_drift(sides)
    assert (advice.cause, advice.level) == ("weights_drift", "advice")


def test_running_statistics_that_part_are_those_of_a_norm():
    record = Record(statistics=[Statistics("module.norm.w", "module.norm")])
    states = [[{"norm.w": (v,)} for v in values] for values in ((1, 2), (1, 3))]
    sides = [did(s[0], s[-1], steps=s, stepped=(), record=record) for s in states]
    (advice,) = of_drift(sides)
    assert (advice.cause, advice.level, advice.culprits) == ("batch_norm_per_rank", "advice", ("norm",))


def test_a_file_of_several_ranks_is_named_once():
    line = Place("train.py", 12, "torch.save(state, path)")
    sides = [did(written={"/tmp/last.pt": line}), did(written={"/tmp/last.pt": line, "/tmp/rank1.pt": line})]
    (found,) = own_batches.of_files(sides)
    assert (found.culprits, found.where) == (("last.pt",), str(line))


def test_draws_are_the_same_where_several_are():
    noise, once = Place("train.py", 5), Place("train.py", 7)
    sides = [did(draws={noise: [b"a", b"b"], once: [b"c"]}), did(draws={noise: [b"a", b"b"], once: [b"c"]})]
    assert [found.where for found in own_batches.of_draws(sides)] == ["train.py:5"]
    assert list(own_batches.of_draws([did(draws={noise: [b"a", b"b"]}), did(draws={noise: [b"a", b"x"]})])) == []
