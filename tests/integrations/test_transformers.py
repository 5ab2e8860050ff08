"""The HF Trainer and subclasses of it, as a project writes them."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_trainloop import UsageError
from pytest_trainloop.adapters import from_trainer
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.runs.evidence import Evidence

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.integration

VOCABULARY = 31


def token_rows(rows=32, length=12):
    """Token rows padded on the right by different amounts."""
    ids = torch.randint(1, VOCABULARY, (rows, length))
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row in range(rows):
        keep = length - row % 4
        mask[row, keep:] = 0
        ids[row, keep:] = 0
        labels[row, keep:] = -100
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]


def labelled_rows(rows=32, length=12, classes=3):
    ids = torch.randint(1, VOCABULARY, (rows, length))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.sum() % classes} for row in ids]


def arguments(out, accumulate, **settings):
    settings = {"learning_rate": 1e-3, "per_device_train_batch_size": 4, **settings}
    return transformers.TrainingArguments(out, gradient_accumulation_steps=accumulate, use_cpu=True, **settings)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
        )
    )


def llama(**settings):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            bos_token_id=None,
            eos_token_id=None,
            **settings,
        )
    )


def bert_config():
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )


def trained(model, out, accumulate, *, kind=transformers.Trainer, rows=token_rows, given=None, **settings):
    """A loop of this kind of Trainer; ``given`` are more of its arguments."""
    args = arguments(out, accumulate, **settings)
    return from_trainer(kind(model=model, args=args, train_dataset=rows(), **(given or {})))


def bert():
    return transformers.BertForSequenceClassification(bert_config())


class MeanLossTrainer(transformers.Trainer):
    """For losses that are means over a micro-batch and do not look at ``num_items_in_batch``: the Trainer divides."""

    loss_is_scaled_for_ga = False


def causal_lm(out, accumulate=1):
    return trained(gpt2(), out, accumulate, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine")


def causal_lm_label_smoothing(out, accumulate=1):
    return trained(llama(), out, accumulate, label_smoothing_factor=0.1, max_grad_norm=0.5)


def causal_lm_checkpointed(out, accumulate=1):
    return trained(llama(), out, accumulate, activation_checkpointing=True)


def causal_lm_full_precision(out, accumulate=1):
    return trained(gpt2(), out, accumulate, bf16=False, fp16=False, optim="adafactor")


def classifier(out, accumulate=1, trainer_class=MeanLossTrainer):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1}
    given = {"eval_dataset": labelled_rows(8)}
    return trained(bert(), out, accumulate, kind=trainer_class, rows=labelled_rows, given=given, **settings)


class OwnHead(nn.Module):
    """Mean pooling over BERT's last layer; BERT's own pooler is computed and not used."""

    def __init__(self):
        super().__init__()
        self.bert = transformers.BertModel(bert_config())
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden.mean(dim=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def unused_pooler(out, accumulate=1):
    return trained(OwnHead(), out, accumulate, rows=labelled_rows)


class Distillation(MeanLossTrainer):
    """A teacher that never trains, and a loss of two terms."""

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        soft = F.kl_div(outputs.logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss = outputs.loss + 0.5 * soft
        return (loss, outputs) if return_outputs else loss


def distillation(out, accumulate=1):
    return trained(bert(), out, accumulate, kind=Distillation, rows=labelled_rows, given={"teacher": bert()})


def own_optimizer_and_schedule(out, accumulate=1):
    model = gpt2()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return trained(model, out, accumulate, given={"optimizers": (optimizer, schedule)})


def built_by_model_init(out, accumulate=1):
    return trained(None, out, accumulate, given={"model_init": gpt2})


class Reweighted(MeanLossTrainer):
    """Classes weighed by their frequency, on features taken from the encoder by hand."""

    cut = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        features = model.bert(**inputs).pooler_output
        if self.cut:
            features = features.detach()
        logits = model.classifier(features)
        loss = F.cross_entropy(logits, labels, weight=torch.tensor([0.5, 0.25, 0.25]))
        return (loss, {"logits": logits}) if return_outputs else loss


class ReweightedCut(Reweighted):
    cut = True


def reweighted(out, accumulate=1, trainer_class=Reweighted):
    return trained(bert(), out, accumulate, kind=trainer_class, rows=labelled_rows)


class Sentences(torch.utils.data.Dataset):
    """Token lists of several lengths, as a tokenizer gives them."""

    def __init__(self, rows=32):
        self.rows = []
        for _ in range(rows):
            ids = torch.randint(1, VOCABULARY, (int(torch.randint(4, 13, ())),)).tolist()
            self.rows.append({"input_ids": ids, "label": sum(ids) % 3})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def padded_to_the_longest(rows):
    """Each row is written into a batch of zeros: a tensor that is written in place as often as it has rows."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["label"] for row in rows])}


def dynamic_padding(out, accumulate=1):
    settings = {"per_device_train_batch_size": 16, "remove_unused_columns": False}
    given = {"data_collator": padded_to_the_longest}
    return trained(bert(), out, accumulate, kind=MeanLossTrainer, rows=Sentences, given=given, **settings)


CORRECT = [
    dynamic_padding,
    causal_lm,
    causal_lm_full_precision,
    distillation,
    own_optimizer_and_schedule,
    reweighted,
    pytest.param(causal_lm_label_smoothing, marks=pytest.mark.corpus),
    pytest.param(causal_lm_checkpointed, marks=pytest.mark.corpus),
    pytest.param(classifier, marks=pytest.mark.corpus),
    pytest.param(unused_pooler, marks=pytest.mark.corpus),
    pytest.param(built_by_model_init, marks=pytest.mark.corpus),
]


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_a_correct_trainer_is_silent(make, tmp_path, assert_silent):
    assert_silent(partial(make, tmp_path))


@pytest.mark.corpus
def test_features_detached_in_compute_loss(tmp_path, root_fault):
    make = partial(reweighted, tmp_path, trainer_class=ReweightedCut)
    fault = root_fault(make, "gradient_reaches_every_param:graph_cut")
    assert "bert.embeddings.word_embeddings.weight" in " ".join(fault.culprits)
    assert not any(name.startswith("classifier") for name in fault.culprits)
    assert "test_transformers.py" in fault.where


def test_a_loss_that_ignores_the_number_of_items_is_not_divided(tmp_path, root_fault):
    """BERT's forward takes any keyword, so the Trainer hands it num_items_in_batch and leaves the division to it; the
    loss of its classifier is a plain mean."""
    make = partial(classifier, tmp_path, trainer_class=transformers.Trainer)
    fault = root_fault(make, "accumulation_equivalence:loss_not_divided")
    assert "2.00 times the gradient" in fault.summary
    assert "loss_is_scaled_for_ga" in fault.repair


@pytest.mark.parametrize(("accumulate", "batches", "steps"), [(1, 12, 12), (4, 12, 3), (5, 12, 3)])
@pytest.mark.parametrize("make", [causal_lm, classifier, built_by_model_init], ids=lambda make: make.__name__)
def test_fit_goes_once_over_the_batches(make, accumulate, batches, steps, tmp_path, run):
    loop = make(tmp_path, accumulate=accumulate)
    before = {name: value.clone() for name, value in loop.model.named_parameters()}
    assert run(loop, batches) == steps
    assert any(not torch.equal(value, before[name]) for name, value in loop.model.named_parameters())


@pytest.mark.parametrize("settings", [{"max_steps": 5}, {"max_steps": 500}, {"num_train_epochs": 7}], ids=str)
def test_the_users_length_does_not_count(settings, tmp_path, run):
    assert run(trained(gpt2(), tmp_path, 1, **settings)) == 12


class Interrupt(BaseException):
    pass


def reported(loop, trainer):
    loop.fit([loop.batch] * 3)


def interrupted(loop, trainer):
    def stop(*args):
        raise Interrupt

    trainer.training_step = stop
    with pytest.raises(Interrupt):
        loop.fit([loop.batch] * 3)
    del trainer.training_step


@pytest.mark.parametrize("how", [reported, interrupted], ids=lambda how: how.__name__)
def test_the_trainer_stays_as_it_was(how, tmp_path):
    args = arguments(tmp_path / "out", 1, eval_strategy="epoch", save_strategy="epoch", logging_steps=1)
    stops_early = transformers.EarlyStoppingCallback()
    args.metric_for_best_model = "loss"
    trainer = transformers.Trainer(
        model=gpt2(), args=args, train_dataset=token_rows(), eval_dataset=token_rows(8), callbacks=[stops_early]
    )
    before, callbacks = dict(vars(args)), list(trainer.callback_handler.callbacks)
    how(from_trainer(trainer), trainer)
    assert trainer.args is args
    assert vars(args) == before
    assert trainer.callback_handler.callbacks == callbacks
    assert "get_train_dataloader" not in vars(trainer)


def test_nothing_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    loop = classifier("out")
    capfd.readouterr()
    loop.fit([loop.batch] * 4)
    loop.evaluate()
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]
    assert capfd.readouterr().out == ""


def test_evaluate_only_with_an_eval_dataset(tmp_path):
    assert causal_lm(tmp_path).evaluate is None
    assert classifier(tmp_path).evaluate()["eval_loss"] > 0


def test_fields_given_win(tmp_path):
    trainer = transformers.Trainer(model=gpt2(), args=arguments(tmp_path, 1), train_dataset=None)
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    loop = from_trainer(trainer, batch=batch, frozen=("transformer.wte.",), evaluate=dict)
    assert loop.batch is batch
    assert loop.frozen == ("transformer.wte.",)
    assert loop.evaluate is dict


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self):
        return []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda out: None, "got None; a transformers.Trainer is needed"),
        (lambda out: transformers.Trainer, "got the class Trainer; a transformers.Trainer is needed"),
        (lambda out: gpt2(), "got a GPT2LMHeadModel; a transformers.Trainer is needed"),
        (
            lambda out: transformers.Trainer(gpt2(), arguments(out, 1)),
            "got a Trainer without train_dataset; give it one, or",
        ),
        (lambda out: OwnLoader(gpt2(), arguments(out, 1)), "got an OwnLoader whose train dataloader is empty"),
    ],
    ids=["none", "class", "model", "no-data", "empty-data"],
)
def test_what_is_no_trainer_is_refused_in_one_sentence(given, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        from_trainer(given(tmp_path))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="from_trainer needs the package transformers"):
        from_trainer(object())


class WithoutEmbeddings(transformers.Trainer):
    """Faulty: the groups of the project's own optimizer leave the embeddings out."""

    def create_optimizer(self, *_model):
        kept = [p for name, p in self.model.named_parameters() if "embeddings" not in name]
        self.optimizer = torch.optim.AdamW(kept, lr=1e-3)
        return self.optimizer


def test_the_line_that_built_the_optimizer_is_the_projects(tmp_path):
    make = partial(classifier, tmp_path, trainer_class=WithoutEmbeddings)
    results = check_loop(make, only=["optimizer_holds_every_param"], raises=False).results
    (fault,) = results[0].faults
    assert fault.cause == "not_in_optimizer"
    assert "torch.optim.AdamW(kept, lr=1e-3)" in fault.change


def test_an_optimizer_that_the_trainer_built_is_changed_where_the_trainer_was(tmp_path):
    made = MadeAt.of(Evidence(partial(classifier, tmp_path)))
    assert "test_transformers.py" in made.optimizer()
    assert "test_transformers.py" in made.scheduler()


def sorted_ids(items, *, masked):
    """Sorts the texts of a batch by length, and leaves their labels where they were."""
    ids = sorted((item["input_ids"] for item in items), key=len, reverse=True)
    ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([item["labels"] for item in items], True, -100)
    labels = labels.masked_fill(ids == 0, -100) if masked else labels
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


@pytest.mark.parametrize("masked", [False, True], ids=["as they are", "masked as padding"])
def test_a_collator_that_sorts_texts_and_not_their_tags(tmp_path, masked):
    def make():
        ids = [torch.randint(1, VOCABULARY, (4 + 5 * n % 9,)) for n in range(32)]
        rows = [{"input_ids": row, "labels": row % 5} for row in ids]
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            num_labels=5,
        )  # fmt: skip
        model, given = (
            transformers.BertForTokenClassification(config),
            {"data_collator": partial(sorted_ids, masked=masked)},
        )
        return trained(model, tmp_path, 1, rows=lambda: rows, given=given, per_device_train_batch_size=8)

    report = check_loop(make, only=["data_order"], raises=False)
    (found,) = (f for r in report.results for f in r.findings)
    assert (found.cause, found.level) == ("labels_apart", "fault")
    assert "def sorted_ids(" in found.change
