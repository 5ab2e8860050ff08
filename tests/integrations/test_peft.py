"""LoRA by PEFT, under the HF Trainer and under a loop written by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import from_trainer
from tests.integrations.test_transformers import VOCABULARY, MeanLossTrainer, arguments

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.integration

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def lora(**settings):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **settings)


def adapted_lm():
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return peft.get_peft_model(base, lora(lora_dropout=0.1, task_type="CAUSAL_LM"))


def adapted_classifier():
    base = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(num_labels=3, **SIZES))
    return peft.get_peft_model(base, lora(task_type="SEQ_CLS"))


def texts(rows=32):
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, VOCABULARY, (rows, 12))]


def labelled_texts(rows=32):
    return [{"input_ids": row, "labels": row.sum() % 3} for row in torch.randint(1, VOCABULARY, (rows, 12))]


def trained_by_trainer(model, data, out, accumulate):
    kind = transformers.Trainer if data[0]["labels"].dim() else MeanLossTrainer
    return from_trainer(kind(model=model, args=arguments(out, accumulate), train_dataset=data))


def train(model, optimizer, batches, accumulate):
    """A loop as in a fine-tuning script."""
    model.train()
    optimizer.zero_grad()
    for index, batch in enumerate(batches, start=1):
        loss = model(**batch).loss / accumulate
        loss.backward()
        if index % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def trained_by_hand(model, data, parameters, accumulate):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        fit=lambda batches: train(model, optimizer, batches, accumulate),
    )


def lm_with_trainer(out, accumulate=1):
    return trained_by_trainer(adapted_lm(), texts(), out, accumulate)


def classifier_with_trainer(out, accumulate=1):
    return trained_by_trainer(adapted_classifier(), labelled_texts(), out, accumulate)


def lm_by_hand(out, accumulate=1):
    model = adapted_lm()
    return trained_by_hand(model, texts(), [p for p in model.parameters() if p.requires_grad], accumulate)


def lm_by_hand_with_the_frozen_base_in_the_optimizer(out, accumulate=1):
    model = adapted_lm()
    return trained_by_hand(model, texts(), model.parameters(), accumulate)


def embedding_trained_beside_adapters(out, accumulate=1):
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model = peft.get_peft_model(base, lora(modules_to_save=["embed_tokens", "lm_head"]))
    return trained_by_trainer(model, texts(), out, accumulate)


def checkpointed(out, accumulate=1, *, inputs_require_grad=True):
    """Re-entrant checkpoints need an input that requires grad; with a frozen embedding a hook has to see to it."""
    model = adapted_classifier()
    base = model.get_base_model()
    base.activation_checkpointing_enable({"use_reentrant": True})
    base.disable_input_require_grads()
    if inputs_require_grad:
        base.enable_input_require_grads()
    return trained_by_trainer(model, labelled_texts(), out, accumulate)


def frozen_after_injection(out, accumulate=1, *, spare=("modules_to_save", "lora_")):
    """The freezing of an older script, run after the adapters were attached; only what ``spare`` names still trains."""
    model = adapted_classifier()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in spare)
    return trained_by_trainer(model, labelled_texts(), out, accumulate)


CORRECT = [
    lm_with_trainer,
    lm_by_hand,
    lm_by_hand_with_the_frozen_base_in_the_optimizer,
    checkpointed,
    pytest.param(classifier_with_trainer, marks=pytest.mark.corpus),
    pytest.param(embedding_trained_beside_adapters, marks=pytest.mark.corpus),
]


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_a_correct_loop_with_adapters_is_silent(make, tmp_path, assert_silent):
    assert_silent(partial(make, tmp_path))


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_the_loop_trains_the_adapters_only(make, tmp_path, run):
    loop = make(tmp_path, accumulate=4)
    trainable = {name for name, value in loop.model.named_parameters() if value.requires_grad}
    before = {name: value.clone() for name, value in loop.model.named_parameters()}
    assert run(loop) == 3
    moved = {name for name, value in loop.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert moved <= trainable


def test_adapters_behind_a_checkpoint_without_grad(tmp_path, root_fault):
    make = partial(checkpointed, tmp_path, inputs_require_grad=False)
    fault = root_fault(make, "gradient_reaches_every_param:checkpoint_cut")
    assert all("lora_" in name for name in fault.culprits)
    assert len(fault.culprits) > 0


@pytest.mark.corpus
def test_adapters_frozen_after_injection(tmp_path, root_fault):
    make = partial(frozen_after_injection, tmp_path, spare=("modules_to_save",))
    fault = root_fault(make, "gradient_reaches_every_param:adapters_frozen")
    assert all("lora_" in name for name in fault.culprits)
    assert len(fault.culprits) > 0


def test_freezing_that_spares_the_adapters_is_silent(tmp_path, assert_silent):
    assert_silent(partial(frozen_after_injection, tmp_path))
