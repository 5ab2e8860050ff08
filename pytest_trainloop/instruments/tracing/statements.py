"""The statement next to another one, by the source: what is called, ends, encloses or overwrites.

A call at the wrong place is repaired in the function that needs it, and not in the helper that it calls.
These questions take a line as findings have it, ``file:line   source``, and give one, or an empty text.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.places import code_of, first_line
from pytest_trainloop.instruments.tracing.call_expressions import called_name
from pytest_trainloop.instruments.tracing.syntax import (
    FARTHEST,
    FUNCTIONS,
    argument_of,
    as_list,
    assignment_of,
    base_of,
    blocks_of,
    maker_of,
    nodes_within,
    parameters_of,
    statement_at,
    targets_of,
)
from pytest_trainloop.recording.events import Forward
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.instruments.tracing.syntax import Source
    from pytest_trainloop.recording.events import Site
    from pytest_trainloop.recording.record import Record

_RANK = r"(id|attr)='(\w*rank|is_(main|master|world)\w*)'"
_SORTS = ("sorted", "sort", "argsort")


def used_next(line: str, *, of_losses: bool = False) -> str:
    """The first statement after the one at a line, in its block, that reads what this one assigns; the line itself
    where that is a loss, unless asked for ``of_losses``."""
    found = statement_at(line)
    statement = None if found is None else found[1]
    called = getattr(statement, "value", None)
    if found is None or not isinstance(statement, ast.Assign) or not isinstance(called, ast.Call):
        return line
    if not of_losses and re.search(r"loss|entropy|criterion|bce|mse|mean|sum", called_name(called)):
        return line
    for block in blocks_of(found[0].parents.get(statement)):
        for one in block[block.index(statement) + 1 :] if statement in block else ():
            if targets_of(statement) & {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}:
                return found[0].text(one)
    return line


def by_caller(site: Site, name: str, keyword: str = "") -> str:
    """The line that calls the function of a call site, where both sides that this one compares, or its argument of this
    keyword, are parameters of the function."""
    found = statement_at(str(place_of(*site[0]))) if len(site) > 1 else None
    function = None if found is None else found[0].function(found[1])
    for node in nodes_within(found[1]) if found is not None and function is not None else ():
        if isinstance(node, ast.Call) and called_name(node) == name:
            given = argument_of(node, keyword, 1 if keyword == "target" else -1) if keyword else None
            sides = ([] if given is None else [given]) if keyword else node.args[:2]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and not keyword:
            sides = [node.left, node.right]
        else:
            continue
        names = [n for n in map(base_of, sides) if isinstance(n, ast.Name) and n.id in parameters_of(function)]
        bare = found is not None and all(assignment_of(found[0], n) is None for n in names)
        return str(place_of(*site[1])) if bare and len(names) == (1 if keyword else 2) else ""
    return ""


def unsynchronised(line: str) -> str:
    """The ``with`` around the statement at a line, in its function, whose context is that of ``no_sync()``."""
    found = statement_at(line)
    for node in found[0].above(found[1]) if found is not None else ():
        if isinstance(node, FUNCTIONS):
            return ""
        for item in node.items if isinstance(node, ast.With) and found is not None else ():
            given = item.context_expr
            made = assignment_of(found[0], given) if isinstance(given, ast.Name) and found is not None else given
            if found is not None and made is not None and "sync" in ast.dump(made):
                return found[0].text(node)
    return ""


def overwritten(line: str) -> str:
    """The next statement of the same block that gives the name which the one at a line assigns another value, and does
    not read it."""
    found = statement_at(line)
    names = targets_of(found[1]) if found is not None and isinstance(found[1], ast.Assign) else set[str]()
    for block in () if found is None else blocks_of(found[0].parents.get(found[1])):
        for one in block[block.index(found[1]) + 1 :] if found is not None and found[1] in block else ():
            read = {n.id for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            if names & read:
                return ""
            if isinstance(one, ast.Assign) and names & targets_of(one):
                return found[0].text(one) if found is not None else ""
    return ""


def only_return(line: str) -> str:
    """What the function returns whose result a line assigns, where it has one ``return``."""
    found = statement_at(line)
    value = getattr(found[1], "value", None) if found is not None else None
    own = isinstance(value, ast.Call) and found is not None and found[0].named(called_name(value)) is not None
    return maker_of(found[0], value) if own and found is not None else ""


def only_call(line: str, name: str) -> str:
    """The only call of a function in the innermost function around a line that calls it, or in the file."""
    found = statement_at(line)
    for scope in found[0].above(found[1]) if found is not None else ():
        if isinstance(scope, (*FUNCTIONS, ast.Module)) and found is not None:
            calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and called_name(n) == name]
            if calls:
                return found[0].text(calls[0]) if len(calls) == 1 else ""
    return ""


def only_call_in(function: str, name: str) -> str:
    """The only call of a name in the function that begins at a line."""
    found = statement_at(function)
    calls = [n for n in ast.walk(found[1]) if isinstance(n, ast.Call) and called_name(n) == name] if found else []
    return found[0].text(calls[0]) if found is not None and len(calls) == 1 else ""


def reader_of(function: str, name: str) -> str:
    """The first condition or loop that reads an attribute, key or variable of this name, in the function that begins at
    a line."""
    found = statement_at(function) if function else None
    for node in ast.walk(found[1]) if found is not None else ():
        part = node.test if isinstance(node, ast.If) else node.iter if isinstance(node, ast.For) else None
        if part is not None and found is not None and re.search(rf"\b{name}\b", ast.unparse(part)):
            return found[0].text(part)
    return ""


def condition_of(line: str, named: str = "") -> str:
    """The condition that the statement at a line is under, in its function, on a name that matches ``named``."""
    found = statement_at(line)
    for node in found[0].above(found[0].parents[found[1]]) if found is not None else ():
        if isinstance(node, FUNCTIONS):
            return ""
        if isinstance(node, ast.If) and found is not None and re.search(named, ast.dump(node.test)):
            return found[0].text(node)
    return ""


def condition_on_rank(line: str) -> str:
    """The condition on the rank that the statement at a line is under, or the only call of its function."""
    found = statement_at(line)
    function = None if found is None else found[0].function(found[1])
    called = "" if function is None else only_call(line, function.name)
    return condition_of(line, _RANK) or (condition_of(called, _RANK) if called else "")


def after(line: str) -> str:
    """The statement behind the one at a line, in its block."""
    found = statement_at(line)
    for block in () if found is None else blocks_of(found[0].parents.get(found[1])):
        if found is not None and found[1] in block[:-1]:
            return found[0].text(block[block.index(found[1]) + 1])
    return ""


def window_size(step: str, backward: str, knob: str) -> str:
    """What the function that calls ``backward()`` has for the number of micro-batches: ``k`` of the condition
    ``(i + 1) % k`` around the step, or else the knob of the test by its name."""
    found, other = statement_at(step), statement_at(backward)
    if other is None:
        return ""
    source, statement = other
    function = source.function(statement)
    if found is not None and found[0] is source and source.function(found[1]) is function:
        around = [n.test for n in source.above(found[1]) if isinstance(n, ast.If) and source.function(n) is function]
        divided = [n for t in around for n in ast.walk(t) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
        sizes = {ast.unparse(n.right) for n in divided if isinstance(n.right, (ast.Name, ast.Attribute))}
        if len(sizes) == 1:
            return sizes.pop()
    names = {n.id for n in ast.walk(function or source.tree) if isinstance(n, ast.Name)}
    return knob if knob in names else ""


def sorting(line: str) -> str:
    """The last statement that sorts, in the function that begins at a line or holds it, or in the one of the file whose
    result that returns."""
    found = statement_at(line)
    function: Any = None
    if found is not None:
        function = found[1] if isinstance(found[1], FUNCTIONS) else found[0].function(found[1])
    for _ in range(2 if function is not None else 0):
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and called_name(n) in _SORTS]
        if calls and found is not None:
            return found[0].text(found[0].statement(max(n.lineno for n in calls)))
        returned = function.body[-1].value if isinstance(function.body[-1], ast.Return) else None
        function = found[0].named(called_name(returned)) if isinstance(returned, ast.Call) and found else None
        if function is None:
            break
    return ""


def carried(line: str) -> str:
    """The statement that carries a sum back from step to step, ``running = reward + gamma * running``: the only one of
    the file. The line itself where none does; empty where several do."""
    found = statement_at(line)
    sums = []
    for loop in ast.walk(found[0].tree) if found is not None else ():
        for node in loop.body if isinstance(loop, ast.For) and _from_the_end(loop) else ():
            names = targets_of(node) if isinstance(node, ast.Assign) else set[str]()
            products = [n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
            if any(isinstance(n, ast.Name) and n.id in names for p in products for n in ast.walk(p)):
                sums.append(node)
    return line if not sums else found[0].text(sums[0]) if len(sums) == 1 and found is not None else ""


def _from_the_end(loop: ast.For) -> bool:
    return any(isinstance(n, ast.USub) or getattr(n, "id", "") == "reversed" for n in ast.walk(loop.iter))


def entry(line: str) -> str:
    """The first statement of the function of a line that reads a parameter; empty where the line calls a loss."""
    found = statement_at(line)
    calls = [n for n in nodes_within(found[1]) if isinstance(n, ast.Call)] if found is not None else []
    if any(re.search(r"loss|entropy", called_name(n)) for n in calls):
        return ""
    function: Any = None if found is None else found[0].function(found[1])
    given = [] if function is None else parameters_of(function)
    for statement in function.body if function is not None else ():
        if any(isinstance(n, ast.Name) and n.id in given for n in ast.walk(statement)) and found is not None:
            return found[0].text(statement)
    return ""


def flag_set(condition: str) -> str:
    """The statement of the same function that sets the flag which the condition at a line asks."""
    found = statement_at(condition)
    flag = ast.dump(found[1].test) if found is not None and isinstance(found[1], ast.If) else ""
    function = None if found is None else found[0].function(found[1])
    sets = [
        node
        for node in (ast.walk(function) if function is not None else ())
        if isinstance(node, ast.Assign) and any(ast.dump(t).replace("Store", "Load") == flag for t in node.targets)
    ]
    return found[0].text(sets[-1]) if sets and found is not None else ""


def within(line: str, name: str) -> str:
    """The line itself, if its function has this name."""
    found = statement_at(line)
    function = None if found is None else found[0].function(found[1])
    return line if function is not None and function.name == name else ""


def in_a_loop_of_its_own(line: str, other: str) -> bool:
    """Whether the innermost loop around a line leaves out another line of the same function."""
    found, outside = statement_at(line), statement_at(other)
    if found is None or outside is None or found[0] is not outside[0]:
        return False
    source, function = found[0], found[0].function(found[1])
    around = [
        n for n in source.above(found[1]) if isinstance(n, (ast.For, ast.While)) and source.function(n) is function
    ]
    return bool(around) and source.function(outside[1]) is function and outside[1] not in ast.walk(around[0])


def second_of_two_calls(function: str) -> str:
    """The second of the only two calls of one helper, each with another name, in the function that begins at a line."""
    found = statement_at(function)
    calls: dict[str, dict[str, ast.Call]] = defaultdict(dict)
    for node in ast.walk(found[1]) if found is not None else ():
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.Name):
            calls[ast.unparse(node.func)][node.args[0].id] = node
    twice = [list(own.values()) for own in calls.values() if len(own) == 2]
    return found[0].text(twice[0][1]) if found is not None and len(twice) == 1 else ""


def call_in_function_of(site: Site, other: Site) -> str:
    """The line of a call site that lies in a function which another call site goes through too; empty where it is the
    innermost one."""
    functions = {file_and_function for at in other if (file_and_function := _function_of(at))}
    line = next((at for at in site if _function_of(at) in functions), None)
    return str(place_of(*line)) if line is not None and line != site[0] else ""


def behind_return(site: Site) -> str:
    """The innermost line of a call site that does more than return what it calls."""
    lines = [str(place_of(*at)) for at in site]
    kinds = [statement_at(line) for line in lines]
    returns = [found is not None and isinstance(found[1], ast.Return) for found in kinds]
    return next((line for line, gives in zip(lines, returns, strict=True) if not gives), lines[0])


def call_of_model(record: Record) -> str:
    """Where the function that backpropagates first calls the model, or a method of it."""
    backward = next(iter(record.backwards()), None)
    answered = [f for f in record.of(Forward) if backward is not None and backward.at in f.answered]
    if backward is None or not answered:
        return ""
    return call_in_function_of(answered[0].site, backward.site) or str(answered[0].place)


def call_of_helper(site: Site, other: Site) -> str:
    """The line that calls the function of a call site, where another call site goes through a function further out."""
    return str(place_of(*site[1])) if len(site) > 1 and call_in_function_of(site, other) else ""


def in_one_loop(site: Site, other: Site, unless: str) -> bool:
    """Whether a loop holds both call sites, the first one under no condition: what that one does lasts for the other in
    the next pass of the loop, unless the loop calls a function under a condition."""
    mine = [loop for at in site for loop in _loops_around(at, conditions=False) if not _may_call(loop, unless)]
    return any(loop in mine for at in other for loop in _loops_around(at, conditions=True))


def _loops_around(at: tuple[str, int], *, conditions: bool) -> Iterator[ast.AST]:
    found = statement_at(str(place_of(*at)))
    for node in found[0].above(found[1]) if found is not None else ():
        if isinstance(node, FUNCTIONS) or (isinstance(node, ast.If) and not conditions):
            return
        if found is not None and node is not found[1] and isinstance(node, (ast.For, ast.While)):
            yield node


def _may_call(loop: ast.AST, name: str) -> bool:
    conditions = [n for n in ast.walk(loop) if isinstance(n, ast.If)]
    return any(isinstance(n, ast.Call) and called_name(n) == name for node in conditions for n in ast.walk(node))


def _function_of(at: tuple[str, int]) -> tuple[str, int] | None:
    found = statement_at(str(place_of(*at)))
    function = None if found is None else found[0].function(found[1])
    return None if found is None or function is None else (found[0].file, function.lineno)


def end_of(evaluate: Any, line: str, name: str = "") -> str:
    """The last statement before the end of ``evaluate``; without it of the function of a name in the file of a line, or
    of the one at the line. Where it loads a state at its end, what made that state."""
    code, function, source = code_of(evaluate), None, None
    if code is not None and layer(code.co_filename) == 2:
        found = statement_at(str(place_of(code.co_filename, first_line(code))))
        source = None if found is None else found[0]
        lambdas = [] if source is None else [n for n in ast.walk(source.tree) if isinstance(n, ast.Lambda)]
        own = next((n for n in lambdas if n.lineno == code.co_firstlineno and code.co_name == "<lambda>"), None)
        if own is not None and isinstance(own.body, ast.Call) and source is not None:
            function = source.named(called_name(own.body)) or _closed_over(source, evaluate, called_name(own.body))
        elif found is not None and isinstance(found[1], FUNCTIONS):
            function = found[1]
    elif evaluate is None and (found := statement_at(line)) is not None:
        source = found[0]
        function = source.named(name) if name else source.function(found[1])
    if source is None or function is None:
        return ""
    loads = [n for n in ast.walk(function) if isinstance(n, ast.Call) and called_name(n) == "load_state_dict"]
    last = max(loads, key=lambda n: n.lineno, default=None)
    sure = last is not None and not any(isinstance(n, ast.If) for n in source.above(last))
    if last is not None and sure and len(loads) > 1 and last.args:
        return maker_of(source, last.args[0])
    block = [n for n in function.body if not isinstance(n, ast.Return)]
    while block and as_list(getattr(block[-1], "body", None)):
        block = block[-1].body
    return source.text(block[-1]) if block else ""


def _closed_over(source: Source, function: Any, name: str) -> Any:
    """The function of a file that a function closes over under a name."""
    cells = getattr(function, "__closure__", None) or ()
    inner = dict(zip(function.__code__.co_freevars if cells else (), cells, strict=False)).get(name)
    code = None
    with contextlib.suppress(ValueError):  # an empty cell
        code = None if inner is None else code_of(inner.cell_contents)
    inside = code is not None and code.co_filename == source.file
    found = source.statement(first_line(code)) if code is not None and inside else None
    return found if isinstance(found, FUNCTIONS) else None


def inference_mode_of(function: Any) -> str:
    """The only line of a function, or decorator of it, that switches to inference mode."""
    code = code_of(function)
    found = statement_at(str(place_of(code.co_filename, first_line(code)))) if code is not None else None
    names = (
        [n for n in ast.walk(found[1]) if getattr(n, "attr", getattr(n, "id", "")) == "inference_mode"] if found else []
    )
    return found[0].text(names[0]) if found is not None and len(names) == 1 else ""


def without_gradients(line: str) -> str:
    """What switches gradients off around the statement at a line: a block, a decorator, or one around the only call of
    its function."""
    found = statement_at(line)
    node: Any = None if found is None else found[1]
    called = [n for n in nodes_within(node) if isinstance(n, ast.Call)] if found is not None else []
    if found is not None and (within := _decorated(found[0], {called_name(n) for n in called})):
        return within
    for _ in range(FARTHEST if found is not None else 0):
        for above in found[0].above(node) if found is not None else ():
            blocks = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
            for switch in (*blocks, *(above.decorator_list if isinstance(above, FUNCTIONS) else ())):
                if found is not None and _switches_off(switch):
                    return found[0].text(switch)
            if isinstance(above, FUNCTIONS):
                break
        function = None if found is None else found[0].function(node)
        calls = [] if function is None or found is None else found[0].calls(function.name)
        if len(calls) != 1 or found is None:
            return ""
        node = found[0].statement(calls[0].lineno)
    return ""


def _decorated(source: Source, names: set[str]) -> str:
    """The decorator that switches gradients off in a function that a statement calls."""
    functions = [n for n in ast.walk(source.tree) if isinstance(n, FUNCTIONS) and n.name in names]
    found = [switch for one in functions for switch in one.decorator_list if _switches_off(switch)]
    return source.text(found[0]) if len(found) == 1 else ""


def _switches_off(switch: ast.AST) -> bool:
    name = called_name(switch) if isinstance(switch, ast.Call) else getattr(switch, "attr", "")
    return name in ("no_grad", "inference_mode", "set_grad_enabled")


def use_of(forward: str, names: Sequence[str]) -> str:
    """The statement of a ``forward`` that calls the module of the first of these parameters; where none does, what it
    returns, which is to use it."""
    found = statement_at(forward)
    if found is None or not isinstance(found[1], FUNCTIONS):
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
    found = statement_at(line)
    if code.co_name == "<lambda>":
        return line
    body = found[1].body if found is not None and isinstance(found[1], FUNCTIONS) else []
    body = body[1:] if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
    short = len(body) == 1 or (1 < len(body) <= most and isinstance(body[-1], ast.Return) and not _applies(body[-1]))
    return found[0].text(body[-1]) if found is not None and short else ""


def _applies(statement: ast.AST) -> bool:
    """Whether a statement calls a ``torch.autograd.Function``, whose own methods may be at fault."""
    return any(isinstance(n, ast.Call) and called_name(n) == "apply" for n in ast.walk(statement))


def backward_of(criterion: Any) -> str:
    """What the ``backward`` of the only ``torch.autograd.Function`` that a loss function applies returns."""
    code = code_of(getattr(criterion, "forward", criterion))
    found = statement_at(str(place_of(code.co_filename, first_line(code)))) if code is not None else None
    if found is None:
        return ""
    source, function = found
    applied = [n.func.value for n in ast.walk(function) if isinstance(n, ast.Call) and called_name(n) == "apply"
               and isinstance(n.func, ast.Attribute)]  # fmt: skip
    names = {getattr(n, "id", "") for n in applied}
    classes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name in names]
    methods = [n for c in classes for n in c.body if isinstance(n, FUNCTIONS) and n.name == "backward"]
    returns = [n for m in methods for n in ast.walk(m) if isinstance(n, ast.Return)]
    return source.text(returns[0]) if len(returns) == 1 else ""


def call_next_to_step(line: str) -> str:
    """The only call of the function that a line lies in, where the function that makes it steps an optimizer and that
    of the line does not."""
    found = statement_at(line)
    function = None if found is None else found[0].function(found[1])
    if found is None or function is None or _steps(function):
        return ""
    calls = [call for call in found[0].calls(function.name) if found[0].function(call) is not function]
    within = found[0].function(calls[0]) if len(calls) == 1 else None
    return found[0].text(found[0].statement(calls[0].lineno)) if within is not None and _steps(within) else ""


def _steps(function: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and called_name(n) == "step" for n in ast.walk(function))


def loop_of(line: str) -> str:
    """The first loop or ``yield`` of the function that begins at a line, else what it returns."""
    found = statement_at(line)
    if found is None or not isinstance(found[1], FUNCTIONS):
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
