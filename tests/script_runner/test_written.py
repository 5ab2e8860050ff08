"""The test that ``--write-test`` writes: it is valid, hands the loop over, and says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pytest_trainloop
from pytest_trainloop import Script, check_loop
from pytest_trainloop.frontends.script_runner import session
from pytest_trainloop.frontends.script_runner.trial import refusal
from pytest_trainloop.frontends.script_runner.written import path_code
from tests.script_runner.conftest import HEAD, TRAIN, loaded


@pytest.fixture
def written(watch, folder, monkeypatch):
    """Watch a script, and give the written test's text and its function; ``tried`` is what pytest says of it."""

    def write(source, name="test_loop", args=(), tried=""):
        monkeypatch.setattr(session, "refusal", lambda test, folder: tried)
        file = folder / "tests" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        said = watch(source, "--steps=3", "--trainloop-only=step_order", f"--write-test={file}", args=args)
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
    assert ".pt, the data that it reads" in said.out
    assert "; run it by pytest --trainloop " in said.out
    report = check_loop(loop.__wrapped__ if hasattr(loop, "__wrapped__") else loop, only=["step_order"])
    assert report.ok
    assert report.results[0].outcome == "passed"


def test_a_module_may_be_named_as_a_variable(written, folder):
    (folder / "model.py").write_text(HEAD, encoding="utf-8")
    _, text, loop = written(f"from model import mlp\n{TRAIN}")
    assert "import model as model_module\n" in text
    assert check_loop(loop, only=["step_order"]).ok


IN_MAIN = """
def main():
    with torch.device("cpu"):
        model = mlp()
        model.apply(id)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader(160)
    for epoch in range(2):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        np.save("sample.npy", x.numpy())
        torch.save(model.state_dict(), "last.pt")

if __name__ == "__main__":
    import numpy as np
    main()
"""


def test_a_loop_that_no_function_takes_is_run_by_its_script(written):
    said, text, loop = written(IN_MAIN)
    lines = re.search(r"- fit: the loop is in main\(\) \(train.py:(\d+) to (\d+)\)", text)
    assert int(lines[2]) - int(lines[1]) == 3
    assert "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # train.py:" in text
    assert "#     model.apply(id)  # train.py:" in text
    assert "# give save= and load= too, from torch.save(model.state_dict(), " in text
    assert "#         batches=data,\n#         batch=next(iter(data)),\n#         fit=...,\n" in text
    assert "it runs the script once" in said.out
    assert loop() == Script("train.py", cwd=Path.cwd() / "tests" / "..", steps=3)


def test_a_script_that_trains_when_it_is_imported_is_run(written):
    _, text, loop = written(OF_GLOBALS.replace('if __name__ == "__main__":', "if True:"))
    assert "the script trains as soon as it is imported" in text
    assert isinstance(loop(), Script)


TAKES_ARGUMENTS = TRAIN.replace(
    "    model = mlp()\n",
    "    model = nn.Sequential(mlp(), *[nn.Identity()] * int(sys.argv[1] if len(sys.argv) > 1 else 0))\n",
)


def test_the_arguments_are_those_of_the_run(written):
    _, text, loop = written(TAKES_ARGUMENTS, args=("2",))
    assert "['train.py', '2'][1]" in text
    assert len(loop().model) == 3


MASKED = TRAIN.replace(
    "    data = loader()\n", "    data = DataLoader(Masked(), batch_size=4, shuffle=True)\n"
).replace(
    "def main(",
    """class Masked(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((4,), float(i)), torch.tensor([-100.0 if i % 3 else 5.0])

def main(""",
)


def test_small_data_are_kept_beside_the_test(written):
    _, _, loop = written(MASKED)
    x, y = next(iter(loop().batches))
    assert len(loop().batches.dataset) == 16
    assert {row.item() for row in y} <= {-100.0, 5.0}
    assert all((label < 0) == (row[0] % 3 > 0) for row, label in zip(x, y, strict=True))


def test_a_test_that_cannot_be_run_is_not_left_behind(written):
    _, text, loop = written(MASKED, tried="it")
    assert "- its loop was passed to the checks, which could not judge it: it" in text
    assert isinstance(loop(), Script)
    assert not Path("tests/test_loop.pt").exists()


@pytest.mark.processes
def test_what_pytest_says_of_a_test_is_found_out(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(pytest_trainloop.__file__).parents[1]))
    good, bad = folder / "test_good.py", folder / "test_bad.py"
    (folder / "train.py").write_text(HEAD + TRAIN, encoding="utf-8")
    lines = "import pytest\nfrom pytest_trainloop import Script\n@pytest.mark.trainloop\ndef test_it():\n"
    good.write_text(f"{lines}    return Script('train.py')\n", encoding="utf-8")
    bad.write_text(f"{lines}    return Script('none.py')\n", encoding="utf-8")
    assert refusal(good, folder) == ""
    assert "there is no file none.py" in refusal(bad, folder)


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
