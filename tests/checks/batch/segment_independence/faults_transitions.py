"""Targets of the last step of an episode that go on into the next one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.segmented import Policy, generator, rollout

GAMMA = 0.97


def transitions(flag="dones", **more):
    given = rollout(steps=16, envs=1, ends=((4, 0), (9, 0)))
    batch = {name: given[name][:, 0] for name in ("obs", "actions", "rewards")}
    return {
        **batch,
        flag: given["dones"][:, 0],
        "next_obs": torch.randn(16, 4, generator=generator(8)),
        **more,
    }


def q_learning(goes_on, flag="dones", **more):
    def loss_of(model, batch):
        chosen = model(batch["obs"]).gather(1, batch["actions"][:, None])[:, 0]
        with torch.no_grad():
            after = model(batch["next_obs"]).max(1).values
            target = batch["rewards"] + GAMMA * after * goes_on(batch)
        return F.smooth_l1_loss(chosen, target)

    return lambda: loop(Policy(), transitions(flag, **more), loss_of)


pair(
    "q_target_does_not_read_the_end",
    "segment_independence",
    "target_past_the_end",
    faulty=q_learning(lambda _b: 1.0, "terminated"),
    fixed=q_learning(lambda b: 1.0 - b["terminated"], "terminated"),
    where='target = batch["rewards"]',
    culprits=("terminated",),
    quick=True,
)

pair(
    "q_target_multiplied_by_the_flag",
    "segment_independence",
    "target_past_the_end",
    faulty=q_learning(lambda b: b["dones"]),
    fixed=q_learning(lambda b: 1 - b["dones"]),
)
