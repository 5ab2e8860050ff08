"""Loops whose resumed run is another than the uninterrupted one, or only seems to be."""

from __future__ import annotations

import copy
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.nets import relu_mlp
from tests.loops.threads.shared import cross_entropy_of, stepped


def classified(batches=8, rows=8, features=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    out = []
    for _ in range(batches):
        y = torch.randint(classes, (rows,), generator=g)
        out.append((centres[y] + 0.7 * torch.randn(rows, features, generator=g), y))
    return out


def held(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def images(batches=8, rows=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, 16, generator=g) for _ in range(batches)]


def tokens(batches=8, rows=4, length=10, vocab=24, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (rows, length), generator=g) for _ in range(batches)]


@fault(
    "checkpoints",
    "the GradScaler is not in the checkpoint: the scale starts at its first value again",
    thread="pytorch/vision#4923",
    check="resume_equivalence",
)
def amp_reference_script():
    model = relu_mlp(12, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=50)

    def train_one_epoch(batches):
        model.train()
        for image, target in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(image), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    def load(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batches=classified(),
        fit=train_one_epoch,
        save=lambda path: torch.save(held(model, optimizer), path),
        load=load,
    )


@fault(
    "checkpoints",
    "the snapshot kept in memory holds the live weights, not a copy: it moves on with the training",
    thread="WenjieDu/PyPOTS#667",
    check="resume_equivalence",
)
def series_regressor():
    class Snapshots:
        """The last good states, in memory: training returns to one where it diverges."""

        def __init__(self, model, optimizer, keep=3):
            self.model, self.optimizer = model, optimizer
            self.kept = deque(maxlen=keep)

        def take(self):
            self.kept.append(
                {"weights": dict(self.model.state_dict()), "optimizer": copy.deepcopy(self.optimizer.state_dict())}
            )
            return self.kept[-1]

        def back_to(self, snapshot):
            self.model.load_state_dict(snapshot["weights"])
            self.optimizer.load_state_dict(snapshot["optimizer"])

    model = nn.GRU(8, 12, batch_first=True)
    head = nn.Linear(12, 1)
    both = nn.ModuleDict({"rnn": model, "head": head})
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-2)
    snapshots = Snapshots(both, optimizer)

    def train(batches):
        for series, value in batches:
            loss = F.mse_loss(head(model(series)[0][:, -1]).squeeze(-1), value)
            if not torch.isfinite(loss):
                snapshots.back_to(snapshots.kept[-1])
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    g = torch.Generator().manual_seed(5)
    data = [(torch.randn(6, 5, 8, generator=g), torch.randn(6, generator=g)) for _ in range(6)]
    return TrainLoop(
        model=both, optimizer=optimizer, batches=data, fit=train, save=snapshots.take, load=snapshots.back_to
    )


class TinyLM(nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.rnn(self.wte(ids))[0])

    def loss(self, ids):
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@fault(
    "checkpoints",
    "lm_head.weight is a parameter of its own after loading: it is untied from wte.weight",
    thread="NVIDIA-NeMo/Automodel#2571",
    check="resume_equivalence",
)
def lm_recipe():
    class Recipe:
        def __init__(self):
            self.model = TinyLM()
            self.build_optimizer()

        def build_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def train(self, batches):
            for ids in batches:
                self.optimizer.zero_grad()
                self.model.loss(ids).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()

        def save(self, path):
            torch.save(self.model.state_dict(), path)

        def load(self, path):
            for name, value in torch.load(path).items():
                owner, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(owner), leaf, nn.Parameter(value.clone()))
            self.build_optimizer()

    r = Recipe()
    return TrainLoop(model=r.model, batches=tokens(), fit=r.train, save=r.save, load=r.load)


@fault(
    "checkpoints",
    "load_state_dict(assign=True) replaces the parameters: the optimizer steps the old ones",
    thread="pytorch/tutorials#2522",
    check="resume_equivalence",
)
def mmap_loading():
    model = relu_mlp(12, 24, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(path):
        state = torch.load(path, mmap=True, map_location="cpu")
        model.load_state_dict(state["model"], assign=True)
        optimizer.load_state_dict(state["optimizer"])

    return stepped(
        model,
        optimizer,
        cross_entropy_of(model),
        batches=classified(),
        save=lambda path: torch.save(held(model, optimizer), path),
        load=load,
    )


def transitions(batches=8, rows=16, seed=9):
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(rows, 6, generator=g),
            "action": torch.randint(3, (rows,), generator=g),
            "reward": torch.randn(rows, generator=g),
            "next_obs": torch.randn(rows, 6, generator=g),
            "done": (torch.rand(rows, generator=g) < 0.1).float(),
        }
        for _ in range(batches)
    ]


@fault(
    "checkpoints",
    "the target network is not saved: it is set to the online network on load",
    thread="google-deepmind/open_spiel#1620",
    check="resume_equivalence",
)
def dqn_agent():
    class DQN:
        def __init__(self, update_target_every=6):
            self.q, self.target = relu_mlp(6, 24, 3), relu_mlp(6, 24, 3)
            self.target.load_state_dict(self.q.state_dict())
            self.optimizer = torch.optim.Adam(self.q.parameters(), lr=5e-3)
            self.every, self.step_counter = update_target_every, 0

        def learn(self, t):
            with torch.no_grad():
                best = t["reward"] + 0.9 * (1 - t["done"]) * self.target(t["next_obs"]).max(1).values
            q = self.q(t["obs"]).gather(1, t["action"][:, None]).squeeze(1)
            self.optimizer.zero_grad()
            F.smooth_l1_loss(q, best).backward()
            self.optimizer.step()
            self.step_counter += 1
            if self.step_counter % self.every == 0:
                self.target.load_state_dict(self.q.state_dict())

        def save(self):
            return {"q": self.q.state_dict(), "optimiser": self.optimizer.state_dict(), "steps": self.step_counter}

        def load(self, data):
            self.q.load_state_dict(data["q"])
            self.target.load_state_dict(data["q"])
            self.optimizer.load_state_dict(data["optimiser"])
            self.step_counter = data["steps"]

    agent = DQN()
    return TrainLoop(
        model={"q": agent.q, "target": agent.target},
        optimizer=agent.optimizer,
        batches=transitions(),
        fit=lambda batches: [agent.learn(t) for t in batches] and None,
        save=agent.save,
        load=agent.load,
    )


@fault(
    "checkpoints",
    "the scheduler is built after the optimizer's state is loaded and sets lr back to the warm-up's first value",
    thread="torch-points3d/torch-points3d#630",
    check="resume_equivalence",
)
def point_clouds():
    class Checkpointed:
        def __init__(self, checkpoint=None):
            self.model = relu_mlp(3, 24, 5)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)
            self.scheduler = self.make_scheduler()

        def make_scheduler(self):
            return LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 6))

        def train_epoch(self, batches):
            for points, labels in batches:
                self.optimizer.zero_grad()
                out = self.model(points).max(dim=1).values
                F.cross_entropy(out, labels).backward()
                self.optimizer.step()
                self.scheduler.step()

        def dump(self):
            return copy.deepcopy(
                {
                    "state": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                }
            )

        def load(self, saved):
            self.model.load_state_dict(saved["state"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scheduler = self.make_scheduler()
            self.scheduler.load_state_dict(saved["scheduler"])

    c = Checkpointed()
    g = torch.Generator().manual_seed(12)
    clouds = [(torch.randn(4, 9, 3, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(8)]
    return TrainLoop(model=c.model, optimizer=c.optimizer, batches=clouds, fit=c.train_epoch, save=c.dump, load=c.load)


@fault(
    "checkpoints",
    "save copies the EMA into the model and does not put the raw weights back",
    thread="harubaru/waifu-diffusion#31",
    check="resume_equivalence",
)
def denoiser():
    class EMAModel:
        def __init__(self, parameters, decay=0.9):
            self.shadow_params = [p.clone().detach() for p in parameters]
            self.decay = decay

        @torch.no_grad()
        def step(self, parameters):
            for s, p in zip(self.shadow_params, parameters, strict=True):
                s.sub_((1 - self.decay) * (s - p))

        def copy_to(self, parameters):
            for s, p in zip(self.shadow_params, parameters, strict=True):
                p.data.copy_(s.data)

        def state_dict(self):
            return {"decay": self.decay, "shadow_params": [s.clone() for s in self.shadow_params]}

        def load_state_dict(self, state):
            self.decay, self.shadow_params = state["decay"], state["shadow_params"]

    unet = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16))
    ema_unet = EMAModel(unet.parameters())
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-3)

    def train(batches):
        for x, noise, t in batches:
            noisy = x * (1 - t) + noise * t
            loss = F.mse_loss(unet(torch.cat([noisy, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_unet.step(unet.parameters())

    def save_checkpoint(path):
        ema_unet.copy_to(unet.parameters())
        torch.save({"unet": unet.state_dict(), "ema": ema_unet.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load_checkpoint(path):
        ckpt = torch.load(path)
        unet.load_state_dict(ckpt["unet"])
        ema_unet.load_state_dict(ckpt["ema"])
        optimizer.load_state_dict(ckpt["optimizer"])

    g = torch.Generator().manual_seed(13)
    data = [(x, torch.randn(x.shape, generator=g), torch.rand(len(x), 1, generator=g)) for x in images()]
    return TrainLoop(
        model=unet, optimizer=optimizer, batches=data, fit=train, save=save_checkpoint, load=load_checkpoint
    )


@fault(
    "checkpoints",
    "n_averaged is not restored: the average starts over with the next weights",
    thread="Lightning-AI/pytorch-lightning#9938",
    check="resume_equivalence",
)
def stochastic_weight_averaging():
    model = relu_mlp(12, 24, 4)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)

    def save(path):
        torch.save(
            {"model": model.state_dict(), "swa": average.module.state_dict(), "optim": optimizer.state_dict()}, path
        )

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["model"])
        average.module.load_state_dict(ckpt["swa"])
        optimizer.load_state_dict(ckpt["optim"])

    return TrainLoop(
        model={"model": model, "swa": average},
        optimizer=optimizer,
        batches=classified(),
        fit=train,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "the weights are saved in half precision: the resumed run starts from rounded ones",
    thread="ultralytics/ultralytics#2235",
    check="resume_equivalence",
)
def yolo_trainer():
    class DetectionTrainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 4))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.937, nesterov=True)
            self.epoch = 0

        def _do_train(self, batches):
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
                self.optimizer.step()
            self.epoch += 1

        def save_model(self, path):
            ckpt = {
                "epoch": self.epoch,
                "model": copy.deepcopy(self.model).half(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(ckpt, path)

        def resume_training(self, path):
            ckpt = torch.load(path, weights_only=False)
            self.model.load_state_dict(ckpt["model"].float().state_dict())
            self.optimizer.load_state_dict(ckpt["optimizer"])
            self.epoch = ckpt["epoch"]

    t = DetectionTrainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        batches=classified(),
        fit=t._do_train,
        save=t.save_model,
        load=t.resume_training,
    )


@right(
    "checkpoints",
    "the noise of a step is seeded by the step's number, which is saved; no generator is",
    thread="vllm-project/speculators#1027",
)
def seeded_by_step():
    model = relu_mlp(16, 32, 16)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.9)
    run = {"step": 0}

    def fit(batches):
        for x in batches:
            g = torch.Generator().manual_seed(1000 + run["step"])
            noisy = x + 0.3 * torch.randn(x.shape, generator=g)
            optimizer.zero_grad()
            F.mse_loss(model(noisy), x).backward()
            optimizer.step()
            run["step"] += 1

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run["step"] = state["step"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=images(seed=21),
        fit=fit,
        save=lambda: {**held(model, optimizer), "step": run["step"]},
        load=load,
    )
