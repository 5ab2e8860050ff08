"""Scripts that raise, or are stopped, before they come to all that they do: only what was seen is said of them."""

from __future__ import annotations

GAN = """
    G = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
    D = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
    opt_D = torch.optim.Adam(D.parameters(), lr=1e-3)
    opt_G = torch.optim.Adam(G.parameters(), lr=1e-3)
"""


def causes(said):
    return {line.split("[")[-1].rstrip("]") for line in said.out.splitlines() if line.endswith("]") and ": " in line}


def test_an_optimizer_counts_before_its_first_step(watch):
    """406_conditional_GAN.py of MorvanZhou's tutorial, which newer versions of torch refuse in its first iteration."""
    said = watch(
        GAN
        + """
    for step in range(100):
        real = rows(16)[0]
        fake = G(torch.randn(16, 2))
        score_real, score_fake = torch.log(D(real)), torch.log(1.0 - D(fake))
        D_loss = -torch.mean(score_real + score_fake)
        G_loss = torch.mean(score_fake)
        opt_D.zero_grad()
        D_loss.backward(retain_graph=True)
        opt_D.step()
        opt_G.zero_grad()
        G_loss.backward()
        opt_G.step()
    """
    )
    assert said.status == 1
    assert causes(said) == {"step_before_backward"}


WARM_UP = (
    GAN
    + """
    for step in range(200):
        real, fake = rows(16)[0], G(torch.randn(16, 2))
        D_loss = -(torch.log(D(real)) + torch.log(1.0 - D(fake))).mean()
        opt_D.zero_grad()
        D_loss.backward()
        opt_D.step()
        if step > 100:
            G_loss = -torch.log(D(G(torch.randn(16, 2)))).mean()
            opt_G.zero_grad()
            G_loss.backward()
            opt_G.step()
    """
)


def test_an_optimizer_that_waits_for_its_turn(watch):
    said = watch(WARM_UP)
    assert said.status == 0, said.out
    assert "30 optimizer steps watched, then it was stopped" in said.out


def test_an_optimizer_that_a_function_builds_and_that_waits(watch):
    said = watch("def main():\n" + WARM_UP + "\nmain()\n")
    assert said.status == 0, said.out


def test_what_no_optimizer_holds_is_named_in_a_script_that_raises(watch):
    said = watch(
        """
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for step in range(5):
        train(model, optimizer, loader())
    raise RuntimeError("disk full")
    """
    )
    assert "not_in_optimizer" in causes(said)
    assert "disk full" in said.out


def test_an_optimizer_that_never_steps_in_a_script_that_ends(watch):
    said = watch(
        """
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    opt_body = torch.optim.SGD(body.parameters(), lr=0.1)
    opt_head = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(12):
        x, y = rows()
        opt_body.zero_grad()
        opt_head.zero_grad()
        F.mse_loss(head(body(x).tanh()), y).backward()
        opt_head.step()
    """
    )
    assert causes(said) == {"step_missing"}


SCHEDULED = """
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for epoch in range(3):
        train(model, optimizer, loader())
        RAISE
        scheduler.step()
"""


def test_a_scheduler_is_not_missed_in_a_script_that_raised_before(watch):
    said = watch(SCHEDULED.replace("RAISE", "raise FileNotFoundError('val.json')"))
    assert said.status == 1
    assert "StepLR" not in said.out.partition("Traceback")[2].partition("\n\n")[2]


def test_a_scheduler_that_a_whole_script_never_calls_is_advice(watch):
    said = watch(SCHEDULED.replace("RAISE", "").replace("scheduler.step()", "pass"))
    assert "no call of it was seen: the 12 steps that were watched are made at 0.1" in said.out


VIEWS = """
    class Handed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return x

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.weight * gradient, None

    def filled(x):
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[:, :4] = True
        return x.masked_scatter(mask, 2 * x[:, :4])

    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(40):
        x, y = rows()
        optimizer.zero_grad()
        F.mse_loss(head(CALL), y).backward()
        optimizer.step()
"""


def test_what_the_command_itself_keeps_is_no_growth(watch):
    """A function that returns its input, and masked_scatter: their arguments were kept by this package."""
    for call in ("Handed.apply(body(x), 0.1)", "filled(body(x))", "body(x).view_as(body(x))"):
        said = watch(VIEWS.replace("CALL", call))
        assert "memory_growth" not in said.out, call
