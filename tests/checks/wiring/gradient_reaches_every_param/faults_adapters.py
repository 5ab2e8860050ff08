"""Fine-tuning with adapters: nothing trains, only the head trains, or everything trains."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.lora import LoraLayer, inject
from tests.loops.nets import GPT, ConvNet, lm_loss
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"
COMPLAINT = "does not require grad"
TARGETS = ("qkv", "proj", "mlp.0", "mlp.2")


def train(loss, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()


def fine_tuned(prepare, *, only_trainable=True, network=GPT, lr=1e-2):
    """A loop over a model that ``prepare`` has made ready."""

    def make():
        model = network()
        prepare(model)
        trained = [p for p in model.parameters() if p.requires_grad or not only_trainable]
        optimizer = torch.optim.AdamW(trained, lr=lr)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            loss=lm_loss,
            fit=lambda batches: train(lambda batch: lm_loss(model, batch), optimizer, batches),
        )

    return make


def lora(model):
    """Freeze, inject, train the adapters and the head."""
    model.requires_grad_(False)
    inject(model, TARGETS)
    model.head.requires_grad_(True)


def lora_adapters_only(model):
    model.requires_grad_(False)
    inject(model, TARGETS)


# Nothing trains: no layer has the name that is looked for.


def lora_no_such_layer(model):
    model.requires_grad_(False)
    inject(model, ("q_proj", "v_proj"))


def inputs_require_grad(model):
    model.token.register_forward_hook(lambda module, args, output: output.requires_grad_(True))


def lora_no_such_layer_silenced(model):
    lora_no_such_layer(model)
    inputs_require_grad(model)


def lora_silenced(model):
    lora_adapters_only(model)
    inputs_require_grad(model)


pair(
    "lora_targets_match_nothing",
    CHECK,
    "nothing_trainable",
    raises=COMPLAINT,
    faulty=fine_tuned(lora_no_such_layer, only_trainable=False),
    fixed=fine_tuned(lora_adapters_only, only_trainable=False),
)
pair(
    "lora_targets_match_nothing_silently",
    CHECK,
    "nothing_trainable",
    faulty=fine_tuned(lora_no_such_layer_silenced, only_trainable=False),
    fixed=fine_tuned(lora_silenced, only_trainable=False),
)


# Nothing trains: the whole network is frozen where its trunk was meant; what to train is looked for by a wrong name.


def freeze_all(model):
    for p in model.parameters():
        p.requires_grad = False


def freeze_trunk(model):
    for p in model.features.parameters():
        p.requires_grad = False
    model.features.eval()


def transfer(freeze):
    def make():
        model = ConvNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        freeze(model)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: train(lambda b: F.cross_entropy(model(b[0]), b[1]), optimizer, batches),
        )

    return make


pair(
    "everything_frozen",
    CHECK,
    "nothing_trainable",
    raises=COMPLAINT,
    change="p.requires_grad = False",
    faulty=transfer(freeze_all),
    fixed=transfer(freeze_trunk),
)


# The adapters are frozen with the rest: the order is wrong, or the filter.


def lora_then_freeze(model):
    inject(model, TARGETS)
    for p in model.parameters():
        p.requires_grad = False
    model.head.requires_grad_(True)


def mark_only_lora(model, pattern):
    inject(model, TARGETS)
    for name, p in model.named_parameters():
        p.requires_grad = pattern in name or name.startswith("head")


def lora_marked_by_typo(model):
    mark_only_lora(model, "lora_a.")


def lora_marked(model):
    mark_only_lora(model, "lora_")


def peft(model):
    model.requires_grad_(False)
    inject(model, TARGETS, LoraLayer)
    model.head.requires_grad_(True)


pair(
    "lora_then_freeze",
    CHECK,
    "adapters_frozen",
    culprits=("blocks.0.qkv.lora_A", "blocks.0.mlp.2.lora_B"),
    faulty=fine_tuned(lora_then_freeze),
    fixed=fine_tuned(lora),
)
pair(
    "lora_marked_by_typo",
    CHECK,
    "adapters_frozen",
    culprits=("blocks.0.qkv.lora_A", "blocks.0.qkv.lora_B"),
    faulty=fine_tuned(lora_marked_by_typo, only_trainable=False),
    fixed=fine_tuned(lora_marked, only_trainable=False),
)


# The base goes on training beside its adapters.


def lora_unfrozen(model):
    inject(model, TARGETS)


def peft_made_trainable_again(model):
    peft(model)
    for p in model.parameters():
        p.requires_grad = True


pair(
    "lora_base_never_frozen",
    CHECK,
    "base_left_trainable",
    culprits=("blocks.0.qkv.base.weight", "blocks.0.mlp.2.base.weight"),
    faulty=fine_tuned(lora_unfrozen),
    fixed=fine_tuned(lora),
)
pair(
    "peft_base_made_trainable_again",
    CHECK,
    "base_left_trainable",
    culprits=("blocks.0.qkv.base_layer.weight", "blocks.0.mlp.0.base_layer.weight"),
    faulty=fine_tuned(peft_made_trainable_again),
    fixed=fine_tuned(peft),
)
