"""The test that ``--write-test`` writes: it is valid, hands the loop over, and says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_trainloop import check_loop
from pytest_trainloop.frontends.watching.written import path_code
from tests.watching.conftest import TRAIN, loaded


@pytest.fixture
def written(watch, folder):
    """Watch a script, and give the written test's text and its function."""

    def write(source, name="test_loop"):
        file = folder / "tests" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        said = watch(source, "--steps=3", "--trainloop-only=step_order", f"--write-test={file}")
        assert said.status == 0, said
        return said, file.read_text(encoding="utf-8"), loaded(file).test_train

    return write


AS_METHOD = """
class Trainer:
    def __init__(self, model, rate):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        self.data = loader()

    def run(self):
        train(self.model, self.optimizer, self.data)

def main(rate=0.1):
    trainer = Trainer(mlp(), rate=rate)
    while True:
        trainer.run()

if __name__ == "__main__":
    main()
"""

OF_GLOBALS = """
model = mlp()
model = nn.Sequential(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = loader()

def epoch(number):
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    for number in range(9):
        epoch(number)
"""


OF_WRAPPED = """
def wrapped(model, data):
    return nn.Sequential(model), data

def main():
    model = mlp()
    batches = loader()
    model, batches = wrapped(model, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        train(model, optimizer, batches)

if __name__ == "__main__":
    main()
"""


OF_STEPS = """
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.valid = loader(16)
        self.data = loader()

    def train_step(self, batch):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        return [self.model(x) for x, _ in self.valid]

    def fit(self):
        self.model.train()
        for epoch in range(4):
            for number, batch in enumerate(self.data):
                self.train_step(batch)
            self.validate()

if __name__ == "__main__":
    Trainer(mlp()).fit()
"""


def test_of_methods_the_one_that_goes_over_the_loader_is_the_loop(written):
    _, text, loop = written(
        OF_STEPS.replace(
            "Trainer(mlp()).fit()", "trainer = Trainer(nn.Sequential(nn.Dropout(0.1), mlp()))\n    trainer.fit()"
        )
    )
    assert "TODO" not in text
    assert "        trainer.data = batches\n        trainer.fit()\n" in text
    report = check_loop(loop, only=["train_mode"], raises=False)
    assert [f.cause for r in report.results for f in r.faults] == ["eval_left_on"]


@pytest.mark.parametrize(
    "source", [TRAIN, AS_METHOD, OF_GLOBALS, OF_WRAPPED], ids=["function", "method", "globals", "data wrapped"]
)
def test_a_loop_in_a_function_is_handed_over_whole(written, source):
    said, text, loop = written(source)
    assert "TODO" not in text
    assert "wrote" in said.out
    assert "; run it by pytest --trainloop " in said.out
    report = check_loop(loop.__wrapped__ if hasattr(loop, "__wrapped__") else loop, only=["step_order"])
    assert report.ok
    assert report.results[0].outcome == "passed"


def test_what_is_missing_is_said_and_the_test_is_skipped(written):
    said, text, loop = written("""
        def main():
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader(160):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        if __name__ == "__main__":
            main()
    """)
    lines = re.search(r"- fit: the loop stands in main\(\) \(train.py:(\d+) to (\d+)\)", text)
    assert int(lines[2]) - int(lines[1]) == 3
    assert "put `for (x, y) in loader(160)` with its body into one, train(model, optimizer, batches)" in text
    assert "fit=...,  # TODO" in text
    assert re.search(r"- batch: one batch as the loop at train.py:\d+ gets it; no DataLoader was seen there", text)
    assert "batch=...,  # TODO" in text
    assert "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # train.py:" in text
    assert "to be filled in by hand, where it says TODO" in said.out
    with pytest.raises(pytest.skip.Exception, match="TODO"):
        loop()


def test_the_data_of_a_loop_in_no_function_is_handed_over(written):
    _, text, _ = written("""
        def main():
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data, valid = loader(160), loader(16)
            for epoch in range(2):
                for number, (x, y) in enumerate(data):
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()

        if __name__ == "__main__":
            main()
    """)
    assert "data = torch.utils.data.DataLoader(" in text
    assert "        batches=data,\n        batch=next(iter(data)),\n        fit=...,  # TODO\n" in text
    assert "- batch" not in text


def test_a_script_that_trains_when_it_is_imported_is_told_so(written):
    _, text, _ = written(OF_GLOBALS.replace('if __name__ == "__main__":', "if True:"))
    assert "the script trains as soon as it is imported" in text


def test_a_path_is_relative_only_where_test_and_script_lie_in_one_project():
    script, root = Path("/home/me/project/src/train.py"), Path("/home/me/project")
    assert path_code(script, root / "tests" / "test_train.py") == 'Path(__file__).parent / "../src/train.py"'
    assert path_code(script, root / "src" / "test_train.py") == 'Path(__file__).parent / "train.py"'
    assert path_code(root, root / "test_train.py") == "Path(__file__).parent"
    assert path_code(script, Path("/elsewhere/test_train.py")) == 'Path("/home/me/project/src/train.py")'


CONFIGURED = """
import types

def load_config(path, scale=1):
    train = types.SimpleNamespace(rate=0.1, momentum=0.9, warm_up=5, most_steps=200, comment="as it was before")
    return types.SimpleNamespace(train=train, path=path)

def optimizer_of(model, t):
    return torch.optim.SGD(model.parameters(), lr=t.rate, momentum=t.momentum)

def main(cfg):
    t = cfg.train
    model = mlp()
    optimizer = optimizer_of(model, t)
    data = loader()
    for epoch in range(20):
        train(model, optimizer, data)

if __name__ == "__main__":
    main(load_config(sys.argv[1] if len(sys.argv) > 1 else "tiny.toml"))
"""


def test_a_configuration_is_loaded_as_the_script_loaded_it(written):
    _, text, loop = written(CONFIGURED)
    assert "optimizer_of(model, train_script.load_config('tiny.toml').train)" in text
    assert check_loop(loop, only=["step_order"]).ok


CHANGED = {
    "afterwards": ("    t = cfg.train\n", "    cfg.train.rate = 0.2\n    t = cfg.train\n"),
    "by a method": ("    t = cfg.train\n", "    vars(cfg.train).update(rate=0.2)\n    t = cfg.train\n"),
    "command line": (
        "    return types.SimpleNamespace(train",
        "    sys.argv.copy()\n    return types.SimpleNamespace(train",
    ),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_configuration_that_the_call_does_not_give_is_written_as_it_was(written, change):
    assert change[0] in CONFIGURED
    _, text, loop = written(CONFIGURED.replace(*change))
    assert "load_config" not in text
    assert "types.SimpleNamespace(" in text
    assert check_loop(loop, only=["step_order"]).ok
