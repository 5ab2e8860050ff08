"""From where a value is used to the statement that made it, by the source: what a mask, a list or a number comes from.

A finding is seen where a symptom arrives: at an attention, at ``backward()``, at an optimizer. The statement to edit
is where its argument was made. These questions take a line as findings have it, ``file:line   source``, and give one,
or an empty text where the source does not say.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.places import code_of, first_line, syntax_of
from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.recording.events import Site

_MASKS = re.compile(r"mask|visible|allowed|hidden_keys|causal|ahead|seen|padded|padding")
_MASK_ARGUMENTS = ("attn_mask", "src_mask", "tgt_mask", "memory_mask", "attention_mask", "mask")
CAUSAL_MASKS = ("attn_mask", "src_mask", "tgt_mask")
PADDING_MASKS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
_FILLS = ("masked_fill", "masked_fill_", "where")
_SAME = frozenset(
    "contiguous detach clone items to bool long float type_as squeeze unsqueeze expand view flatten reshape".split()
)
_WRITES = ("add_", "sub_", "addcdiv_", "copy_", "lerp_")
_FARTHEST = 6

_Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source:
    """The syntax tree of a file of the project's."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.tree = syntax_of(file)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node and what holds it."""
        while True:
            yield node
            if node not in self.parents:
                return
            node = self.parents[node]

    def statement(self, line: int) -> Any:
        """The innermost statement at a line; of a block its first line alone."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and n.lineno <= line <= _last(n)]
        return max(found, key=lambda n: n.lineno, default=None)

    def function(self, node: ast.AST) -> Any:
        """The function that holds a node."""
        return next((n for n in self.above(self.parents.get(node, node)) if isinstance(n, _Functions)), None)

    def named(self, name: str) -> Any:
        """The only function of this name."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, _Functions) and n.name == name]
        return found[0] if len(found) == 1 else None

    def calls(self, name: str) -> list[ast.Call]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and called_name(n) == name]

    def text(self, node: Any) -> str:
        return str(place_of(self.file, node.lineno))


_source = functools.lru_cache(maxsize=64)(Source)


def _last(node: Any) -> int:
    """The last line of a statement, of a block that of its header."""
    body = getattr(node, "body", None)
    return int(max(node.lineno, body[0].lineno - 1) if isinstance(body, list) and body else node.end_lineno)


def _at(line: str) -> tuple[Source, Any] | None:
    """The file and the statement of a line as findings have it."""
    name, _, number = line.partition("   ")[0].rpartition(":")
    file = _file(name) if number.isdigit() else ""
    if not file or layer(file) != 2:
        return None
    source = _source(file)
    statement = source.statement(int(number))
    return None if statement is None else (source, statement)


def _file(name: str) -> str:
    if (path := Path.cwd() / name).is_file():
        return str(path)
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    found = [file for file in files if file.replace("\\", "/").endswith(f"/{name}")]
    return found[0] if len(found) == 1 else ""


def mask(line: str, *, of: Sequence[str] = ()) -> str:
    """The statement that made the mask which the statement at a line uses; empty where it uses none. ``of`` are the
    only keywords of a layer of attention under which it counts: a layer takes one mask for time and one for padding."""
    found = _at(line)
    if found is None:
        return ""
    source, statement = found
    for _ in range(_FARTHEST):
        used = _mask_in(statement, of)
        if used is not None:
            return _made(source, used)
        scores = next((n for n in ast.walk(statement) if isinstance(n, ast.Name) and "score" in n.id), None)
        before = None if scores is None else _assigned(source, scores)
        if before is None:
            return ""
        statement = before
    return ""


def _mask_in(statement: ast.AST, of: Sequence[str]) -> ast.expr | None:
    """The mask among the arguments of the calls in a statement."""
    calls = [n for n in _within(statement) if isinstance(n, ast.Call)]
    given = {k.arg: k.value for call in calls for k in call.keywords if not isinstance(k.value, ast.Constant)}
    if found := [given[name] for name in of or (*_MASK_ARGUMENTS, *PADDING_MASKS) if name in given]:
        return found[0]
    if of and any(name in given for name in (*_MASK_ARGUMENTS, *PADDING_MASKS)):
        kernel = any("scaled_dot_product" in called_name(call) for call in calls)
        return given["attn_mask"] if kernel and "attn_mask" in given else None
    for call in calls:
        if called_name(call) in _FILLS and call.args:
            return call.args[0]
    return next((n for n in _within(statement) if isinstance(n, ast.Name) and _MASKS.search(n.id)), None)


def _within(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without those of a block that it opens."""
    blocks = [n for part in ("body", "orelse", "finalbody", "handlers") for n in _list(getattr(statement, part, None))]
    todo = [n for n in ast.iter_child_nodes(statement) if n not in blocks] if blocks else [statement]
    while todo:
        node = todo.pop(0)
        yield node
        todo += ast.iter_child_nodes(node)


def _calls_at(line: str, name: str) -> list[tuple[Source, ast.Call]]:
    """The calls of this name in the statement at a line, with its file."""
    found = _at(line)
    nodes = [] if found is None else [n for n in _within(found[1]) if isinstance(n, ast.Call)]
    return [(found[0], call) for call in nodes if found is not None and called_name(call) == name]


def _passed(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """What a call gives for a parameter, by its name or at its place."""
    keyword = next((k.value for k in call.keywords if k.arg == name), None)
    return keyword or (call.args[place] if 0 <= place < len(call.args) else None)


def _blocks(node: Any) -> list[list[Any]]:
    return [_list(getattr(node, part, None)) for part in ("body", "orelse", "finalbody")]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def positions(line: str) -> str:
    """The statement that made the positions which the statement at a line looks up in a table of positions."""
    found = _at(line)
    for node in _within(found[1]) if found is not None else ():
        table: Any = (
            node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
        )
        name = getattr(table, "attr", getattr(table, "id", "")).lower()
        given = node.slice if isinstance(node, ast.Subscript) else next(iter(getattr(node, "args", ())), None)
        if found is not None and given is not None and re.search(r"pos|wpe|wave|rotary|time_emb|table", name):
            return _made(found[0], given)
    return ""


def index(line: str) -> str:
    """The statement that made the index by which the statement at a line, or the one before that made what it uses,
    chooses rows; empty where it is given the index."""
    found = _at(line)
    if found is None:
        return ""
    source, statement = found
    names = [n for n in _within(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    before = [one for one in (_assigned(source, n) for n in names) if one is not None and not isinstance(one, ast.For)]
    for one in (statement, *before):
        for node in _within(one):
            chosen = node.slice if isinstance(node, ast.Subscript) else None
            chosen = chosen.lower if isinstance(chosen, ast.Slice) else chosen
            if isinstance(chosen, ast.Name) and _assigned(source, chosen) is not None:
                return _made(source, chosen)
    return ""


def compared(line: str, side: int = 1) -> str:
    """The statement before the one at a line that made a side of its comparison: 0 the outputs, 1 the targets."""
    found = _at(line)
    sides: list[Any] = []
    for node in _within(found[1]) if found is not None else ():
        if isinstance(node, ast.Call) and re.search(r"loss|entropy|kl_div|criterion", called_name(node)):
            sides += node.args[side : side + 1]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides.append((node.left, node.right)[side])
    for one in reversed(sides):
        before = _assigned(found[0], base) if found is not None and isinstance(base := _base(one), ast.Name) else None
        if before is not None and found is not None:
            return found[0].text(before)
    return ""


def used_next(line: str, *, of_losses: bool = False) -> str:
    """The first statement after the one at a line, in its block, that reads what this one assigns; the line itself
    where that is a loss, unless asked for ``of_losses``."""
    found = _at(line)
    statement = None if found is None else found[1]
    called = getattr(statement, "value", None)
    if found is None or not isinstance(statement, ast.Assign) or not isinstance(called, ast.Call):
        return line
    if not of_losses and re.search(r"loss|entropy|criterion|bce|mse|mean|sum", called_name(called)):
        return line
    for block in _blocks(found[0].parents.get(statement)):
        for one in block[block.index(statement) + 1 :] if statement in block else ():
            if _targets(statement) & {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}:
                return found[0].text(one)
    return line


def criterion(line: str, keyword: str = "") -> str:
    """The statement that built the criterion which the one at a line calls, or that made an argument of it."""
    found = _at(line)
    for node in _within(found[1]) if found is not None else ():
        if not isinstance(node, ast.Call) or found is None:
            continue
        built = _at(_made(found[0], node.func))
        for one in _within(built[1]) if built is not None else ():
            if built is not None and isinstance(one, ast.Call) and re.search(r"Loss$|Criterion$", called_name(one)):
                given = _passed(one, keyword, -1) if keyword else None
                return built[0].text(built[1]) if given is None else _made(built[0], given)
    return ""


def by_caller(site: Site, name: str) -> str:
    """The line that calls the function of a call site, where both sides that this one compares are its parameters."""
    found = _at(str(place_of(*site[0]))) if len(site) > 1 else None
    function = None if found is None else found[0].function(found[1])
    for node in _within(found[1]) if found is not None and function is not None else ():
        if isinstance(node, ast.Call) and called_name(node) == name:
            sides = node.args[:2]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides = [node.left, node.right]
        else:
            continue
        names = [n for n in map(_base, sides) if isinstance(n, ast.Name) and n.id in _parameters(function)]
        given = len(names) == 2 and found is not None and all(_assigned(found[0], n) is None for n in names)
        return str(place_of(*site[1])) if given else ""
    return ""


def first_argument(line: str) -> str:
    """The statement that made what the call at a line is given first, where that is a name."""
    found = _at(line)
    for node in _within(found[1]) if found is not None else ():
        given = _passed(node, "params", 0) if isinstance(node, ast.Call) else None
        if isinstance(given, ast.Name) and found is not None:
            before = _assigned(found[0], given)
            return "" if before is None else found[0].text(before)
    return ""


def source_of_draws(line: str) -> str:
    """The statement that made the object which the one at a line calls a method of, as a generator; else the line."""
    found = _at(line)
    for node in _within(found[1]) if found is not None else ():
        owner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and re.search(r"rng|gen|random|draw", owner.id) and found is not None:
            before = _assigned(found[0], owner)
            if before is not None:
                return found[0].text(before)
    return line


def update_in(step: str) -> str:
    """The only statement of an optimizer's ``step`` that writes to a parameter; its first line where several do."""
    found = _at(step)
    if found is None or not isinstance(found[1], _Functions):
        return step
    writes = [
        n
        for n in ast.walk(found[1])
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _WRITES
        and getattr(_base(n.func.value), "id", getattr(n.func.value, "attr", "")) in ("p", "param", "parameter", "data")
    ]  # fmt: skip
    return found[0].text(writes[0]) if len(writes) == 1 else step


def overwritten(line: str) -> str:
    """The next statement of the same block that gives the name which the one at a line assigns another value, and does
    not read it."""
    found = _at(line)
    names = _targets(found[1]) if found is not None and isinstance(found[1], ast.Assign) else set[str]()
    for block in () if found is None else _blocks(found[0].parents.get(found[1])):
        for one in block[block.index(found[1]) + 1 :] if found is not None and found[1] in block else ():
            read = {n.id for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            if names & read:
                return ""
            if isinstance(one, ast.Assign) and names & _targets(one):
                return found[0].text(one) if found is not None else ""
    return ""


def value(line: str, method: str = "backward") -> str:
    """The statement that made what a method is called on at a line, as the loss that is backpropagated."""
    for source, call in _calls_at(line, method):
        if isinstance(call.func, ast.Attribute):
            return _made(source, call.func.value)
    return ""


def argument(line: str, call: str, name: str, position: int) -> str:
    """The statement that made an argument of a call at a line."""
    for source, made in _calls_at(line, call):
        given = _passed(made, name, position)
        return "" if given is None else _made(source, given)
    return ""


def copied(line: str) -> str:
    """The statement that made the state which ``load_state_dict`` is given at a line; where that is the state of
    another model, the one that made the model that loads it."""
    for source, call in _calls_at(line, "load_state_dict"):
        if call.args and isinstance(call.func, ast.Attribute):
            of_a_model = isinstance(call.args[0], ast.Call)
            return _made(source, call.func.value if of_a_model else call.args[0])
    return ""


def network(line: str, name: str) -> str:
    """The statement that made the network of this name, which the statement at a line calls."""
    last = name.rpartition(".")[2]
    for source, call in _calls_at(line, last) if last else ():
        return _made(source, call.func)
    return ""


def given(line: str) -> str:
    """The statement that gives the function at a line the value that the line reads: the only call, past functions that
    pass it on."""
    found = _at(line)
    function = None if found is None else found[0].function(found[1])
    if found is None or function is None:
        return ""
    for name in (n for n in ast.walk(found[1]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)):
        if name.id in _parameters(function)[1:] and (made := _given(found[0], name, _FARTHEST)):
            return made
    return ""


def assigned_value(line: str) -> str:
    """The statement that made the value which the line assigns."""
    found = _at(line)
    value = None if found is None else getattr(found[1], "value", None)
    return "" if found is None or not isinstance(value, ast.Name) else _made(found[0], value)


def length_given(line: str) -> str:
    """Where the function that builds a schedule at a line is given its length: the only call, or what was assigned to
    the name that it gives."""
    found = _at(line)
    function = None if found is None else found[0].function(found[1])
    if found is None or function is None or isinstance(found[0].parents.get(function), ast.ClassDef):
        return ""
    source, parameters = found[0], _parameters(function)
    read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    lengths = [n for n in parameters if n in read and re.search(r"steps|total|max|iter|epoch", n)]
    calls = source.calls(function.name)
    if len(calls) != 1 or not lengths:
        return ""
    total = next((n for n in lengths if "warm" not in n), lengths[0])
    given = _passed(calls[0], total, parameters.index(total))
    before = _assigned(source, given) if isinstance(given, ast.Name) else None
    return source.text(before if before is not None else calls[0])


def only_return(line: str) -> str:
    """What the function returns whose result a line assigns, where it has one ``return``."""
    found = _at(line)
    value = getattr(found[1], "value", None) if found is not None else None
    own = isinstance(value, ast.Call) and found is not None and found[0].named(called_name(value)) is not None
    return _made(found[0], value) if own and found is not None else ""


def key_written(line: str, key: str) -> str:
    """The only statement of a file that writes this key into a dict."""
    found = _at(line)
    if found is None:
        return ""
    nodes = list(ast.walk(found[0].tree))
    keys = [k for n in nodes if isinstance(n, ast.Dict) for k in n.keys if k is not None]
    keys += [n.slice for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    lines = [k for k in keys if isinstance(k, ast.Constant) and k.value == key]
    return found[0].text(lines[0]) if len(lines) == 1 else ""


def only_call(line: str, name: str) -> str:
    """The only call of a function in the file of a line."""
    found = _at(line)
    calls = [] if found is None else found[0].calls(name)
    return found[0].text(calls[0]) if found is not None and len(calls) == 1 else ""


def after(line: str) -> str:
    """The statement behind the one at a line, in its block."""
    found = _at(line)
    for block in () if found is None else _blocks(found[0].parents.get(found[1])):
        if found is not None and found[1] in block[:-1]:
            return found[0].text(block[block.index(found[1]) + 1])
    return ""


def call_in_function_of(site: Site, other: Site) -> str:
    """The line of a call site that lies in a function which another call site goes through too; empty where it is the
    innermost one."""
    functions = {file_and_function for at in other if (file_and_function := _function_of(at))}
    line = next((at for at in site if _function_of(at) in functions), None)
    return str(place_of(*line)) if line is not None and line != site[0] else ""


def _function_of(at: tuple[str, int]) -> tuple[str, int] | None:
    found = _at(str(place_of(*at)))
    function = None if found is None else found[0].function(found[1])
    return None if found is None or function is None else (found[0].file, function.lineno)


def end_of(evaluate: Any, line: str, name: str = "") -> str:
    """The last statement before the end of ``evaluate``; without it of the function of a name in the file of a line, or
    of the one at the line. Where it loads a state at its end, what made that state."""
    code, function, source = code_of(evaluate), None, None
    if code is not None and layer(code.co_filename) == 2:
        found = _at(str(place_of(code.co_filename, first_line(code))))
        source = None if found is None else found[0]
        lambdas = [] if source is None else [n for n in ast.walk(source.tree) if isinstance(n, ast.Lambda)]
        own = next((n for n in lambdas if n.lineno == code.co_firstlineno and code.co_name == "<lambda>"), None)
        if own is not None and isinstance(own.body, ast.Call) and source is not None:
            function = source.named(called_name(own.body))
        elif found is not None and isinstance(found[1], _Functions):
            function = found[1]
    elif evaluate is None and (found := _at(line)) is not None:
        source = found[0]
        function = source.named(name) if name else source.function(found[1])
    if source is None or function is None:
        return ""
    loads = [n for n in ast.walk(function) if isinstance(n, ast.Call) and called_name(n) == "load_state_dict"]
    last = max(loads, key=lambda n: n.lineno, default=None)
    if last is not None and len(loads) > 1 and last.args:
        return _made(source, last.args[0])
    block = [n for n in function.body if not isinstance(n, ast.Return)]
    while block and _list(getattr(block[-1], "body", None)):
        block = block[-1].body
    return source.text(block[-1]) if block else ""


def without_gradients(line: str) -> str:
    """What switches gradients off around the statement at a line: a block, a decorator, or one around the only call of
    its function."""
    found = _at(line)
    node: Any = None if found is None else found[1]
    called = [n for n in _within(node) if isinstance(n, ast.Call)] if found is not None else []
    if found is not None and (within := _decorated(found[0], {called_name(n) for n in called})):
        return within
    for _ in range(_FARTHEST if found is not None else 0):
        for above in found[0].above(node) if found is not None else ():
            blocks = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
            for switch in (*blocks, *(above.decorator_list if isinstance(above, _Functions) else ())):
                if found is not None and _switches_off(switch):
                    return found[0].text(switch)
            if isinstance(above, _Functions):
                break
        function = None if found is None else found[0].function(node)
        calls = [] if function is None or found is None else found[0].calls(function.name)
        if len(calls) != 1 or found is None:
            return ""
        node = found[0].statement(calls[0].lineno)
    return ""


def _decorated(source: Source, names: set[str]) -> str:
    """The decorator that switches gradients off in a function that a statement calls."""
    functions = [n for n in ast.walk(source.tree) if isinstance(n, _Functions) and n.name in names]
    found = [switch for one in functions for switch in one.decorator_list if _switches_off(switch)]
    return source.text(found[0]) if len(found) == 1 else ""


def _switches_off(switch: ast.AST) -> bool:
    name = called_name(switch) if isinstance(switch, ast.Call) else getattr(switch, "attr", "")
    return name in ("no_grad", "inference_mode", "set_grad_enabled")


def use_of(forward: str, names: Sequence[str]) -> str:
    """The statement of a ``forward`` that calls the module of the first of these parameters; where none does, what it
    returns, which is to use it."""
    found = _at(forward)
    if found is None or not isinstance(found[1], _Functions):
        return ""
    source, function = found
    for part in reversed(next(iter(names), "").split(".")[:-1]):
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr == part and isinstance(node.ctx, ast.Load):
                return source.text(source.statement(node.lineno))
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
    return source.text(returns[-1]) if returns else ""


def only_statement(function: Any, most: int = 1) -> str:
    """The statement of a function that has one, or the last of so few; empty for others."""
    code = code_of(function)
    if code is None or layer(code.co_filename) != 2:
        return ""
    line = str(place_of(code.co_filename, first_line(code)))
    found = _at(line)
    if code.co_name == "<lambda>":
        return line
    body = found[1].body if found is not None and isinstance(found[1], _Functions) else []
    body = body[1:] if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
    short = len(body) == 1 or (1 < len(body) <= most and isinstance(body[-1], ast.Return) and not _applies(body[-1]))
    return found[0].text(body[-1]) if found is not None and short else ""


def _applies(statement: ast.AST) -> bool:
    """Whether a statement calls a ``torch.autograd.Function``, whose own methods may be at fault."""
    return any(isinstance(n, ast.Call) and called_name(n) == "apply" for n in ast.walk(statement))


def names_in_condition(line: str) -> str:
    """The statement that made the list of names by which a statement at a line, or the condition that it is under,
    chooses parameters."""
    found = _at(line)
    if found is None:
        return ""
    source, statement = found
    for node in source.above(statement):
        if isinstance(node, _Functions):
            return ""
        whole = node.test if isinstance(node, ast.If) else node
        lists = [g.iter for n in _within(whole) if isinstance(n, ast.GeneratorExp) for g in n.generators]
        chosen = [n for n in lists if isinstance(n, (ast.Name, ast.Attribute))]
        given = [
            c.args[0] for c in _within(whole) if isinstance(c, ast.Call) and called_name(c) == "startswith" and c.args
        ]
        chosen += [n for n in given if isinstance(n, (ast.Name, ast.Attribute))]
        for one in chosen:
            if (made := _made(source, one)) and made != source.text(source.statement(one.lineno)):
                return made
    return ""


def loop_of(line: str) -> str:
    """The first loop or ``yield`` of the function that begins at a line, else what it returns."""
    found = _at(line)
    if found is None or not isinstance(found[1], _Functions):
        return ""
    source, function = found
    kinds: tuple[Any, ...]
    for kinds in ((ast.For, ast.While), (ast.Expr,), (ast.Return,)):
        for node in ast.walk(function):
            if isinstance(node, kinds) and (
                not isinstance(node, ast.Expr) or isinstance(node.value, (ast.Yield, ast.YieldFrom))
            ):
                return source.text(node)
    return ""


def _made(source: Source, used: Any, depth: int = _FARTHEST) -> str:
    """The statement that made what an expression gives: a name is followed to where it was assigned, a function of the
    file to what it returns, a parameter to the only call."""
    own = source.statement(used.lineno)
    base = _base(used)
    if depth == 0 or own is None:
        return ""
    if isinstance(base, ast.Call):
        function = source.named(called_name(base))
        returns = [] if function is None else [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        inside = [n for n in returns if source.function(n) is function]
        return _made(source, inside[0].value, depth - 1) if len(inside) == 1 else source.text(own)
    if isinstance(base, ast.Name):
        if (before := _assigned(source, base)) is not None:
            whole = _iterated(before, base.id) if isinstance(before, ast.For) else getattr(before, "value", None)
            simple = isinstance(whole, (ast.Name, ast.Attribute, ast.Call)) and not isinstance(before, ast.AugAssign)
            return _made(source, whole, depth - 1) if simple else source.text(before)
        return _given(source, base, depth) or source.text(own)
    if isinstance(base, ast.Attribute):
        return _attribute(source, base) or source.text(own)
    return source.text(own)


def _base(used: Any) -> Any:
    """What lies behind a negation, an index that adds axes, and casts."""
    while True:
        if isinstance(used, ast.UnaryOp):
            used = used.operand
        elif isinstance(used, ast.Subscript) and isinstance(used.slice, (ast.Tuple, ast.Constant)):
            used = used.value
        elif isinstance(used, ast.Call) and isinstance(used.func, ast.Attribute) and used.func.attr in _SAME:
            used = used.func.value
        elif isinstance(used, ast.Call) and getattr(used.func, "id", "") == "enumerate" and used.args:
            used = used.args[0]
        else:
            return used


def _assigned(source: Source, name: ast.Name) -> Any:
    """The last statement before, in the same function or outside of all, that assigns a name."""
    function = source.function(name)
    while True:
        scope = source.tree if function is None else function
        found = [
            n
            for n in ast.walk(scope)
            if isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)) and name.id in _targets(n)
            and (source.function(n) is function) and (n.lineno < name.lineno or source.function(name) is not function)
        ]  # fmt: skip
        if found:
            return max(found, key=lambda n: n.lineno)
        if function is None or name.id in _parameters(function):
            return None
        function = source.function(function)


def _iterated(loop: Any, name: str) -> Any:
    """What a name of a loop goes over: of ``zip`` the argument in its place."""
    zipped = isinstance(loop.iter, ast.Call) and called_name(loop.iter) == "zip" and isinstance(loop.target, ast.Tuple)
    places = [getattr(n, "id", "") for n in loop.target.elts] if zipped else []
    place = places.index(name) if name in places else len(loop.iter.args) if zipped else 0
    return loop.iter.args[place] if zipped and place < len(loop.iter.args) else loop.iter


def _targets(statement: Any) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _parameters(function: Any) -> list[str]:
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _given(source: Source, name: ast.Name, depth: int) -> str:
    """The statement that made what the only call of a function gives for a parameter."""
    function = source.function(name)
    if function is None or name.id not in _parameters(function):
        return ""
    calls = [call for call in source.calls(function.name) if source.function(call) is not function]
    if len(calls) != 1:
        return ""
    place = _parameters(function).index(name.id) - (_parameters(function)[0] in ("self", "cls"))
    given = _passed(calls[0], name.id, place)
    return "" if given is None else _made(source, given, depth - 1)


def _attribute(source: Source, used: ast.Attribute) -> str:
    """The only statement that gives an attribute more than None, in a method or in the body of a class."""
    found: list[ast.AST] = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            in_class = isinstance(source.parents.get(node), ast.ClassDef)
            names = [n.attr for t in targets for n in ast.walk(t) if isinstance(n, ast.Attribute)]
            names += [n.id for t in targets if in_class for n in ast.walk(t) if isinstance(n, ast.Name)]
            empty = isinstance(node.value, ast.Constant) and node.value.value is None
            found += [node] if used.attr in names and not empty else []
        elif isinstance(node, ast.Call) and called_name(node) == "register_buffer" and node.args:
            found += [node] if getattr(node.args[0], "value", None) == used.attr else []
    return source.text(found[0]) if len(found) == 1 else ""
