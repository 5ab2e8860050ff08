"""What is known of a script's loop, for the test that hands it over.

Looked at once, before the first optimizer step: the user's frames are still there then, with all that made the loop.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pytest_trainloop.core import members
from pytest_trainloop.core.ours import is_ours
from pytest_trainloop.core.places import shown
from pytest_trainloop.core.whose import reraise_ours
from pytest_trainloop.frontends.script_runner.slices import Slices
from pytest_trainloop.frontends.script_runner.stack import Frame, call_at, is_guarded, user_stack
from pytest_trainloop.frontends.script_runner.training_function import globals_used, iterated, training_function
from pytest_trainloop.frontends.script_runner.values import Imports, Unknown, loader_code
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.watch import Watch


@dataclass(slots=True)
class Loop:
    """What the written test returns."""

    statements: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    """Of ``TrainLoop``, as code; none where an adapter makes the loop."""
    adapter: str = ""
    """The call of the framework's adapter."""
    missing: list[str] = field(default_factory=list)
    """What a human has to fill in, a sentence each."""
    data: str = ""
    """The statement that makes the data."""
    kept: Any = None
    """Rows or batches of the script's own that it reads, from a file next to the test."""
    fit: list[str] = field(default_factory=list)
    """The body of ``fit``, where it takes more than one expression."""
    further: dict[str, str] = field(default_factory=dict)
    """Calls of the script's that fields of ``TrainLoop`` could be, with their lines."""


class Handover:
    """Looks at the script while it runs."""

    def __init__(self, alias: str) -> None:
        self._frames: list[Frame] = []
        self._optimizers: list[Any] = []
        self._models: list[Any] = []
        self._seen = False
        self.alias = alias

    def look(self, watch: Watch) -> None:
        """Called before each step: keep the frames of the first, and the optimizers of all."""
        for _, optimizer in watch.optimizers.indexed():
            if not any(optimizer is known for known in self._optimizers):
                self._optimizers.append(optimizer)
        if not self._seen:
            self._seen = True
            self._frames = _of_the_script(user_stack())
            self._models = _outermost([module for _, module in watch.table.named_modules()])

    def loop(self) -> tuple[Loop, Imports]:
        """What is known, as code."""
        held = (item for frame in self._frames for item in frame.locals.items())
        variables = {name for name, value in held if not isinstance(value, types.ModuleType)}
        imports = Imports(sys.modules["__main__"], self.alias, variables)
        if not self._frames:
            loop = Loop(missing=["model, optimizer, batch and fit: no optimizer step was seen"])
        elif trainer := _framework_call(self._frames):
            loop = _of_framework(self._frames, *trainer, imports)
        else:
            loop = self._of_function(imports)
        return loop, imports

    def _of_function(self, imports: Imports) -> Loop:
        """A loop of the project's own, in a function that is called with its data."""
        loop = Loop()
        found = training_function(self._frames)
        at = next((f for f in reversed(self._frames) if not f.through_library), self._frames[-1])
        if found is None:
            loop.missing.append(_no_function(at))
        loader = found[2] if found else next(filter(None, map(iterated, reversed(self._frames))), None)
        slices = Slices(self._frames, imports, loader)
        # the model first: what else is made may be made of it
        names = self._add_models(loop, slices)
        names |= self._add_optimizers(loop, slices)
        if loader is None:
            loop.missing.append(f"batch: one batch as the loop at {at.place} gets it; no DataLoader was seen there")
        else:
            self._add_batches(loop, loader, imports)
        if found is not None:
            self._add_fit(loop, slices, *found)
        if self._frames[0].at_module_level and imports.script_used and not is_guarded(self._frames[0]):
            loop.missing.append(
                f"the script trains as soon as it is imported: put {self._frames[0].place} and what follows under "
                'if __name__ == "__main__":'
            )
        loop.statements = slices.statements
        for frame in self._frames:
            loop.further = _further(frame) | loop.further
        return loop

    def _add_models(self, loop: Loop, slices: Slices) -> dict[int, str]:
        made: dict[int, str] = {}
        for model in self._models:
            if not any(p.requires_grad for p in members.parameters(model)):
                continue
            try:
                made[id(model)] = _found_by_name(slices, self._frames, model)
            except Unknown as what:
                loop.missing.append(f"model: how {type(model).__name__} was built is not known ({what})")
        names = list(dict.fromkeys(made.values()))
        if len(names) == 1:
            loop.fields["model"] = names[0]
        elif names:
            loop.fields["model"] = "{" + ", ".join(f'"{n}": {n}' for n in names) + "}"
        elif not loop.missing:
            loop.missing.append("model: no module was seen")
        return made

    def _add_optimizers(self, loop: Loop, slices: Slices) -> dict[int, str]:
        made: dict[int, str] = {}
        for optimizer in self._optimizers:
            try:
                made[id(optimizer)] = _found_by_name(slices, self._frames, optimizer)
            except Unknown as what:
                loop.missing.append(f"optimizer: how {type(optimizer).__name__} was built is not known ({what})")
        names = list(dict.fromkeys(made.values()))
        if names:
            loop.fields["optimizer"] = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        return made

    def _add_batches(self, loop: Loop, loader: Any, imports: Imports) -> None:
        try:
            made, loop.kept = loader_code(loader, imports)
            loop.data = f"data = {made}"
        except Exception as what:  # also what the project's own data set raises
            if not isinstance(what, Unknown):
                reraise_ours(what)
            loop.missing.append(f"batches: a small DataLoader that gives what the script's gives ({what})")
            return
        loop.fields |= {"batches": "data", "batch": "next(iter(data))"}

    def _add_fit(self, loop: Loop, slices: Slices, caller: Frame, called: Frame, loader: Any) -> None:
        """The call of the training function with ``batches`` in the place of its loader."""
        call = call_at(caller, called)
        if call is None:
            loop.missing.append(f"fit: a call of {called.name} with batches in place of its data")
            return
        try:
            held = _holder_of(called, loader)
            before = []
            if held is not None:
                owner = slices.name(called.parameters[0], called)
                before.append(f"{owner}.{held} = batches")
            for name in globals_used(called):
                value = called.value(name)
                if value is loader or slices.known(value) in loop.fields.values():
                    slices_module = slices.known(sys.modules.get(str(called.globals.get("__name__"))))
                    before.append(f"{slices_module}.{name} = {'batches' if value is loader else slices.known(value)}")
            text = slices.expression(call, caller)
        except Unknown as what:
            loop.missing.append(
                f"fit: the call of {called.name} at {caller.place} needs {what}, which is not plain data"
            )
            return
        if before:
            loop.fit = [*before, text]
            loop.fields["fit"] = "fit"
        else:
            loop.fields["fit"] = f"lambda batches: {text}"


def _of_the_script(frames: list[Frame]) -> list[Frame]:
    """The frames from the script's own module on."""
    own = sys.modules["__main__"].__dict__
    first = next((i for i, frame in enumerate(frames) if frame.at_module_level and frame.globals is own), 0)
    return frames[first:]


def _outermost(modules: Sequence[Any]) -> list[Any]:
    """The modules that no other one holds."""
    held = {id(inner) for module in modules for inner in members.modules(module) if inner is not module}
    return [module for module in modules if id(module) not in held]


def _found_by_name(slices: Slices, frames: list[Frame], thing: Any) -> str:
    """Code for an object that some frame holds by a name, or in an attribute of what it holds by a name."""
    why = Unknown("no variable holds it")
    for code in _ways_to(slices, frames, thing):
        try:
            return slices.named(thing, code())
        except Unknown as what:
            why = what
    raise why


def _ways_to(slices: Slices, frames: list[Frame], thing: Any) -> Iterator[Callable[[], str]]:
    for frame in frames[::-1]:
        shared = frame.globals if frame.at_module_level else {n: frame.value(n) for n in globals_used(frame)}
        for name, value in (*frame.locals.items(), *shared.items()):
            if value is thing:
                yield partial(slices.name, name, frame)
    for frame in frames[::-1]:
        for name, value in frame.locals.items():
            if is_ours(value):
                continue
            attribute = next((a for a, v in getattr(value, "__dict__", {}).items() if v is thing), None)
            if attribute is not None and name.isidentifier():
                yield partial(_attribute_of, slices, name, frame, attribute)


def _attribute_of(slices: Slices, name: str, frame: Frame, attribute: str) -> str:
    return f"{slices.name(name, frame)}.{attribute}"


def _holder_of(called: Frame, loader: Any) -> str | None:
    """The attribute of a method's own object that holds the loader."""
    if any(called.value(name) is loader for name in called.parameters) or not called.parameters:
        return None
    own = getattr(called.value(called.parameters[0]), "__dict__", {})
    return next((name for name, value in own.items() if value is loader), None)


def _no_function(at: Frame) -> str:
    where = "at the top of the script" if at.at_module_level else f"in {at.name}()"
    lines, what = _lines_of_loop(at)
    return (
        f"fit: the loop is {where} ({lines}), and no function takes its batches: put {what} into one, "
        "train(model, optimizer, batches), and call that from both places"
    )


def _lines_of_loop(at: Frame) -> tuple[str, str]:
    """The lines of the innermost loop that a frame is in, and its head; the frame's line and "it" outside of any."""
    import ast

    around = [
        node
        for node in ast.walk(ast.Module(at.body(), []))
        if isinstance(node, (ast.For, ast.While)) and node.lineno <= at.line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return at.place, "it"
    loop = max(around, key=lambda node: node.lineno)
    if isinstance(loop, ast.For):
        head = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
    else:
        head = f"while {ast.unparse(loop.test)}"
    return f"{shown(at.file, loop.lineno)} to {loop.end_lineno}", f"`{head}` with its body"


def _further(frame: Frame) -> dict[str, str]:
    """The first calls in the body of a function, or of the script, that evaluate and that save."""
    import ast

    found: dict[str, str] = {}
    todo: list[ast.AST] = [*frame.body()]
    while todo:
        node = todo.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call):
            called = str(getattr(node.func, "attr", getattr(node.func, "id", ""))).lower()
            fields = "evaluate=" if called.startswith(("evaluat", "valid")) else "save= and load="
            if fields == "evaluate=" or (called.startswith("save") and not _saves_results(node, frame)):
                found.setdefault(fields, f"{ast.unparse(node)} at {shown(frame.file, node.lineno)}")
    return found


def _saves_results(node: ast.Call, frame: Frame) -> bool:
    """Whether a call is one of a library's functions that is given no weights: ``np.save``, ``save_image``."""
    import ast

    function = frame.evaluated(node.func)
    home = sys.modules.get(str(getattr(function, "__module__", None)))
    of_a_library = layer(str(getattr(home, "__file__", None) or "<frozen>")) == 1
    return of_a_library and not hasattr(function, "__self__") and "state_dict" not in ast.unparse(node)


_METHODS = {"transformers": "train", "lightning": "fit", "pytorch_lightning": "fit"}


def _framework_call(frames: list[Frame]) -> tuple[Frame, ast.Call, Any] | None:
    """The call that hands the loop to a framework's trainer: its frame, its node and the trainer."""
    import ast

    for frame in frames:
        for node in ast.walk(ast.Module(frame.body(), [])):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if not node.lineno <= frame.line <= (node.end_lineno or node.lineno):
                continue
            trainer = frame.evaluated(node.func.value)
            packages = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
            if any(node.func.attr == _METHODS.get(package) for package in packages):
                return frame, node, trainer
    return None


def _of_framework(frames: list[Frame], frame: Frame, node: ast.Call, trainer: Any, imports: Imports) -> Loop:
    loop = Loop()
    slices = Slices(frames, imports)
    packages = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    try:
        made = slices.expression(node.func.value, frame)  # type: ignore[attr-defined]
        if "transformers" in packages:
            imports.lines["from pytest_trainloop.adapters import from_trainer"] = None
            loop.adapter = f"from_trainer({made})"
        else:
            _of_lightning(loop, slices, frame, node, (trainer, made), imports)
    except Unknown as what:
        loop.missing.append(f"the {type(trainer).__name__} at {frame.place}: it is made of {what}, which is not known")
    loop.statements = slices.statements
    return loop


def _of_lightning(
    loop: Loop, slices: Slices, frame: Frame, node: ast.Call, trainer: tuple[Any, str], imports: Imports
) -> None:
    """``from_lightning`` with what ``trainer.fit`` is given: ``fit(model, train, val)``, or a data module."""
    import ast

    imports.lines["from pytest_trainloop.adapters import from_lightning"] = None
    positions = ("model", "train_dataloaders", "val_dataloaders", "datamodule")
    given = dict(zip(positions, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
    arguments = [slices.expression(given["model"], frame) if "model" in given else "...", trainer[1]]
    data = given.get("datamodule") or given.get("train_dataloaders")
    if data is not None and (data is given.get("datamodule") or hasattr(frame.evaluated(data), "train_dataloader")):
        arguments.append(f"datamodule={slices.expression(data, frame)}")
    elif data is not None:
        try:
            text = slices.expression(data, frame)
            if not _is_loader(data, frame, trainer[0]):
                raise Unknown(f"{ast.unparse(data)} is no DataLoader")
        except Unknown as what:
            loop.missing.append(f"batches: the DataLoader that trainer.fit() is given at {frame.place} ({what})")
            text = ""
        if text and not text.isidentifier():
            slices.statements.append(f"data = {text}")
            text = "data"
        arguments += [f"batch=next(iter({text}))", f"batches={text}"] if text else []
    loop.adapter = f"from_lightning({', '.join(arguments)})"


def _is_loader(node: ast.expr, frame: Frame, trainer: Any) -> bool:
    """Whether an expression is a DataLoader; what a call gave is asked of the trainer, which holds it."""
    import ast

    value = frame.evaluated(node) if not isinstance(node, ast.Call) else getattr(trainer, "train_dataloader", None)
    return isinstance(value, DataLoader)
