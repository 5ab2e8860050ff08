"""What the checks decide on one observed run of code that was not written for them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop.frontends.api import observe
from tests.helpers.findings import named


def trained(loss_of=None, *, steps=16, model=None, optimizer=None, after=lambda net, step: None):
    """The observed building and training of a small net over a DataLoader."""
    torch.manual_seed(0)
    with observe() as record:
        net = (model or (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))))()
        optim = (optimizer or (lambda p: torch.optim.Adam(p, lr=1e-3)))(net.parameters())
        rows = torch.randn(4 * steps, 6)
        loader = DataLoader(TensorDataset(rows, (rows.sum(1) > 0).float()), batch_size=4)
        for step, (x, y) in enumerate(loader):
            optim.zero_grad()
            (loss_of or (lambda net, x, y: F.binary_cross_entropy_with_logits(net(x).flatten(), y)))(
                net, x, y
            ).backward()
            optim.step()
            after(net, step)
    return record


def outcomes(report):
    return {r.check: r.outcome for r in report.results}


def test_a_right_loop_passes_what_one_run_decides():
    report = trained().check(raises=False)
    assert report.ok
    decided = {name for name, outcome in outcomes(report).items() if outcome == "passed"}
    assert {"loss_formula", "every_term_trains", "train_mode", "optimizer_numerics"} <= decided


def dice(net, x, y):
    p = net(x).flatten()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def test_a_formula_is_found_in_the_precision_of_the_loop():
    report = trained(dice).check("loss_formula", raises=False)
    (finding,) = named(report, "loss_formula", "scores_as_probabilities", "fault")
    assert "batch[1]" in finding.culprits


def left_out(net, x, y):
    scores = net(x).flatten()
    penalty_loss = scores.square().mean()  # noqa: F841
    return F.binary_cross_entropy_with_logits(scores, y)


def test_a_term_that_nothing_reads_is_a_fault():
    report = trained(left_out).check("every_term_trains", raises=False)
    assert named(report, "every_term_trains", "term_left_out", "fault")


def detached(net, x, y):
    scores = net(x).flatten()
    return F.binary_cross_entropy_with_logits(scores, y) + 0.1 * scores.square().mean().detach()


def test_a_term_without_its_gradient_is_advice():
    report = trained(detached).check("every_term_trains", raises=False)
    (finding,) = named(report, "every_term_trains", "term_detached", "advice")
    assert "computed from the weights" in finding.shown_by
    assert report.ok


def validated(net, step):
    if step % 4 == 3:
        net.eval()
        with torch.no_grad():
            net(torch.randn(4, 6))


def dropping():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))


def test_a_mode_that_an_evaluation_leaves_is_a_fault():
    report = trained(model=dropping, after=validated).check("train_mode", raises=False)
    (finding,) = named(report, "train_mode", "eval_left_on", "fault")
    assert "loss changes" not in finding.measured  # which one run does not show


def test_betas_the_wrong_way_round_are_a_fault():
    report = trained(optimizer=lambda p: torch.optim.Adam(p, betas=(0.999, 0.9))).check(
        "optimizer_numerics", raises=False
    )
    assert named(report, "optimizer_numerics", "betas_swapped", "fault")


def test_weights_that_are_not_finite_are_told():
    def broken(net, x, y):
        return (net(x) * float("nan")).mean()

    report = trained(broken).check("finite", raises=False)
    (result,) = report.results
    assert result.outcome == "skipped"
    assert "not finite when the run ends" in result.reason


def test_at_light_density_no_more_modes_are_on_than_without_these_checks():
    on = []
    trained(after=lambda net, step: on.append(len(_get_current_function_mode_stack())))
    assert max(on[:10]) - min(on[13:]) >= 4


@pytest.mark.parametrize("most", [0])
def test_a_step_of_large_results_is_not_looked_at(most, monkeypatch):
    monkeypatch.setattr("pytest_trainloop.instruments.tracing.loss_tape.MOST_BYTES", most)
    (result,) = trained(dice).check("loss_formula", raises=False).results
    assert result.outcome == "skipped"
    assert "too large" in result.reason


def test_options_that_no_recipe_has_are_told_with_the_line_that_built_them():
    def model():
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, 0.8), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    report = trained(model=model, optimizer=lambda p: torch.optim.SGD(p, 0.05, 0.9, 5e-4)).check(
        "hyperparameters_are_plausible", raises=False
    )
    (eps,) = named(report, "hyperparameters_are_plausible", "norm_eps_too_large", "advice")
    (decay,) = named(report, "hyperparameters_are_plausible", "weight_decay_given_as_momentum", "advice")
    assert eps.culprits == ("1",)
    assert "nn.BatchNorm1d(16, 0.8)" in eps.change
    assert "torch.optim.SGD(p, 0.05, 0.9, 5e-4)" in decay.change


def two_parts(fit):
    """The verdicts on an observed loop of a trunk and a head, each with an optimizer that steps for each batch."""
    torch.manual_seed(0)
    with observe() as record:
        trunk, head = nn.Linear(6, 8), nn.Linear(8, 1)
        of_trunk, of_head = (torch.optim.SGD(part.parameters(), 0.1) for part in (trunk, head))
        for step, x in enumerate(torch.randn(8, 4, 6)):
            fit(step, trunk, head, of_trunk, of_head, x)
    report = record.check("gradient_reaches_every_param", raises=False)
    return report, [finding for result in report.results for finding in result.findings]


def a_pass_that_no_step_uses(step, trunk, head, of_trunk, of_head, x):
    hidden = trunk(x)
    of_head.zero_grad()
    head(hidden.detach()).square().mean().backward()
    of_head.step()
    of_trunk.zero_grad()
    loss = (1 - head(hidden.detach())).square().mean()
    loss.backward()
    of_trunk.step()


def test_an_optimizer_whose_own_pass_never_reaches_it_is_a_fault():
    _, (finding,) = two_parts(a_pass_that_no_step_uses)
    assert finding.level == "fault"
    assert finding.culprits == ("trunk.weight", "trunk.bias")
    assert "of_trunk.step()" in finding.where
    assert finding.repair == "loss = (1 - head(hidden)).square().mean()"


def one_loss_for_both(step, trunk, head, of_trunk, of_head, x):
    of_head.zero_grad()
    head(trunk(x).detach()).square().mean().backward()
    of_head.step()
    of_trunk.step()


def test_an_optimizer_that_no_pass_reaches_is_advice():
    report, (finding,) = two_parts(one_loss_for_both)
    assert report.ok
    assert finding.level == "advice"


def frozen_so_far(step, trunk, head, of_trunk, of_head, x):
    trunk.requires_grad_(requires_grad=False)
    one_loss_for_both(step, trunk, head, of_trunk, of_head, x)


def not_called_so_far(step, trunk, head, of_trunk, of_head, x):
    one_loss_for_both(step, nn.Identity(), lambda x: head(F.pad(x, (0, 2))), of_trunk, of_head, x)


def in_the_last_step_only(step, trunk, head, of_trunk, of_head, x):
    hidden = trunk(x)
    of_head.zero_grad()
    head(hidden if step == 7 else hidden.detach()).square().mean().backward()
    of_head.step()
    of_trunk.step()


def without_its_gradients_now_and_then(step, trunk, head, of_trunk, of_head, x):
    of_head.zero_grad()
    of_trunk.zero_grad()
    head(trunk(x) if step % 4 == 0 else trunk(x).detach()).square().mean().backward()
    of_head.step()
    of_trunk.step()


@pytest.mark.parametrize(
    "fit", [frozen_so_far, not_called_so_far, in_the_last_step_only, without_its_gradients_now_and_then]
)
def test_an_optimizer_that_waits_for_gradients_is_none(fit):
    assert two_parts(fit)[1] == []


def generator(width):
    return nn.Sequential(
        nn.Linear(6, width),
        nn.Tanh(),
    )


def discriminator(width):
    return nn.Sequential(
        nn.Linear(width, 1),
        nn.Sigmoid(),
    )


def train_adversaries(networks, step):
    for x in torch.randn(8, 4, 6):
        F.binary_cross_entropy_with_logits(networks()[1](networks()[0](x)), torch.ones(4, 1)).backward()
        step()


@pytest.mark.parametrize(("in_a_variable", "named_as"), [(True, "nets.1.1"), (False, "Sequential.1")])
def test_a_layer_is_looked_up_in_its_own_network(in_a_variable, named_as):
    torch.manual_seed(0)
    with observe() as record:
        networks = (lambda *made: lambda: made)(generator(4), discriminator(4))
        nets = networks() if in_a_variable else ()
        optimizer = torch.optim.Adam([p for net in networks() for p in net.parameters()])
        train_adversaries(networks, optimizer.step)
    assert len(nets) == 2 * in_a_variable
    report = record.check("loss_contract", raises=False)
    (finding,) = named(report, "loss_contract", "probabilities_as_logits", "fault")
    assert finding.summary.endswith(named_as)
    assert "nn.Sigmoid()" in finding.change
