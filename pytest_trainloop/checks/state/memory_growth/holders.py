"""Which Python objects hold the graphs of earlier steps, by the names and the lines of the project's."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import sys
from collections import deque
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from pytest_trainloop.core.ours import holds_alone, is_ours
from pytest_trainloop.core.paths import FIT_CALLER
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.graphs import metadata_of
from pytest_trainloop.recording.source import here, layer, place_of
from pytest_trainloop.recording.torch_internals import function_class, hooks_of, saved_values_overwritten
from pytest_trainloop.runs.reachable_state.value_kinds import attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.graphs import Graphs
    from pytest_trainloop.recording.watch import Watch

MOST_LEVELS = 6
"""Objects between a container and the tensors in it."""

MOST_TO_A_NAME, MOST_AT_A_LEVEL = 8, 64
"""Objects between a name and what it leads to, and those of them at one distance."""

MOST_NODES = 500_000

_KEY = "pytest_trainloop.place"
_ADDS = frozenset("append appendleft extend add insert push put update record log store".split())
_CONTEXT = torch.autograd.function.BackwardCFunction


class GraphHolder(NamedTuple):
    """What holds the graphs of all these steps, or carries one into the next."""

    how: Literal["running_sum", "kept_tensors", "held_outside_python", "carried_graph"]
    name: str
    """As the project's code reaches it; empty where no name is known."""
    kind: str
    """The type of the container, the class of the custom function, or "Tensor"."""
    items: int
    """The number of tensors that reach the graphs."""
    bounded: int | None
    """``maxlen`` of the deque."""
    where: str
    """The line that made the tensor, or that puts tensors into the container."""


class Made(NamedTuple):
    """Where and when a node was made."""

    place: Place
    site: Site
    window: int
    """The number of the optimizer step that followed."""
    item: int
    """The number of batches that the loop had taken."""


class Lines(WatchingMode):
    """Notes where and when each node of a graph was made, in the node itself."""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(name, func, args, kwargs)
        if name != "__get__":
            with self.watch.suspended():
                nodes = [t.grad_fn for t in tensors_in(out) if t.requires_grad and not t.is_leaf]
                fresh = [m for node in nodes if (m := metadata_of(node)) is not None and _KEY not in m]
                if fresh:
                    now = Made(*here(), window=self.watch.record.rounds + 1, item=self.watch.items())
                    for metadata in fresh:
                        metadata[_KEY] = now
        return out


def made(node: Any) -> Made | None:
    """Where and when a node was made; None where ``Lines`` did not see it."""
    metadata = None if node is None else metadata_of(node)
    return None if metadata is None else metadata.get(_KEY)


class Heap:
    """The objects that ``gc`` searches: those of one run first.

    ``gc.get_referrers`` goes through every object of the process once for each value that is asked for: minutes in a
    session that has imported much. What an earlier ``gc.freeze()`` set aside is left out.
    """

    def __init__(self) -> None:
        self._frozen = False

    @contextlib.contextmanager
    def of_this_block(self) -> Iterator[None]:
        """Leave out what was there before; not where the project has frozen objects itself, which would be lost."""
        self._frozen = not gc.get_freeze_count()
        if self._frozen:
            gc.freeze()
        try:
            yield
        finally:
            self._thaw()

    def searched(self, search: Callable[[], list[GraphHolder]]) -> list[GraphHolder]:
        """What the search finds; made again among all objects where something has no name among those of the block: a
        variable of a module is older."""
        held = search()
        if self._frozen and not (held and all(one.name for one in held)):
            self._thaw()
            held = search()
        return held

    def _thaw(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False


class Reached:
    """What Python holds of the graphs of some marked windows: the tensors, and the contexts of custom functions, each
    with its node and the windows that it reaches, as bits."""

    def __init__(self, graphs: Graphs, windows: Iterable[int]) -> None:
        self._graphs = graphs
        self.full = sum(1 << window for window in windows)
        self._known: dict[Any, int] = {}
        tensors = [(tensor, node, self._of(node)) for tensor, node in tensors_with_history()]
        self.whole = [(tensor, node) for tensor, node, bits in tensors if bits == self.full]
        self.some = [entry for entry in tensors if 0 < entry[2] < self.full]
        contexts = [o for o in gc.get_objects() if issubclass(type(o), _CONTEXT)]
        self.contexts = [context for context in contexts if self._marked(context)]
        self.some += [(context, context, self._of(context)) for context in self.contexts]
        self.order = {node: number for number, node in enumerate(self._known)}
        """Of each node a larger number than those of all nodes below it."""
        marked = [node for node in self._known if self._marked(node)]
        self.nodes = len(marked)
        """The nodes of these windows that are alive."""
        self.overwritten = any(map(saved_values_overwritten, marked))
        """Whether some node cannot be used again, since what it needs was written to in place after the step."""
        lists = (self._known, self.order, self.whole, self.some, self.contexts, *self.whole, *self.some)
        self.own = tuple(map(id, lists))
        """What refers to tensors and contexts here, and is none of the project's."""

    def _of(self, node: Any) -> int:
        """The windows that a node reaches."""
        open_nodes = [node]
        while open_nodes and len(self._known) < MOST_NODES:
            at = open_nodes[-1]
            below = [n for n, _ in at.next_functions if n is not None and n not in self._known]
            if at not in self._known and below:
                open_nodes += below
                continue
            open_nodes.pop()
            own = self._graphs.window_of(at)
            bits = 0 if own is None else 1 << own
            for following, _ in at.next_functions:
                bits |= self._known.get(following, 0)
            self._known[at] = bits & self.full
        return self._known.get(node, 0)

    def _marked(self, node: Any) -> bool:
        window = self._graphs.window_of(node)
        return window is not None and bool(self.full >> window & 1)


def find(reached: Reached, names: Names) -> list[GraphHolder]:
    """What holds the graphs of these windows: a tensor that holds all of them, and the containers that do."""
    held = []
    if reached.whole:
        # the others were computed from the first with a name; graphs save earlier values of a sum, without names
        first = sorted(reached.whole, key=lambda made: reached.order.get(made[1], 0))
        ordered = sorted(first, key=lambda made: id(made[0]) not in names.locals)
        likely = {id(tensor) for tensor, _ in (*ordered[:4], *ordered[-4:])}
        asked = [(tensor, node) for tensor, node in first if id(tensor) in likely]
        name, node = next(((name, node) for tensor, node in asked if (name := names.of(tensor))), ("", asked[0][1]))
        held.append(GraphHolder("running_sum", name, "Tensor", len(reached.whole), None, _where(node)))
    containers = _containers(reached, names)
    held += containers or []
    if held or containers is None:
        return held
    if reached.contexts:  # a custom function whose context is alive
        node, kind, count = reached.contexts[0], "autograd.Function", len(reached.contexts)
        name = (function_class(node) or type(node)).__name__
    else:
        node, name, count = reached.some[0][1] if reached.some else None, "", len(reached.some)
        kind = type(node).__name__ if reached.some else ""
    return [GraphHolder("held_outside_python", name, kind, count, None, _where(node))]


def _containers(reached: Reached, names: Names) -> list[GraphHolder] | None:
    """The innermost containers that hold a tensor of every window; None where none does but what is this package's."""
    items: dict[int, tuple[Any, int]] = {id(value): (value, bits) for value, _, bits in reached.some}
    count, ours = len(items), 0
    node = reached.some[0][1] if reached.some else None
    for _ in range(MOST_LEVELS):
        if not items:
            break
        above: dict[int, tuple[Any, int]] = {}
        values = [value for value, _ in items.values()]
        for holder in referrers(values, (id(items), *map(id, items.values()), *reached.own)):
            if isinstance(holder, ModuleType):
                continue
            bits = 0
            for value in gc.get_referents(holder):
                bits |= items[id(value)][1] if id(value) in items else 0
            if is_ours(holder):
                ours |= bits
            elif bits:
                above[id(holder)] = (holder, bits)
        own = (id(items), id(above), id(values), *map(id, above.values()), *reached.own)
        whole = [holder for holder, bits in above.values() if bits == reached.full and not holds_alone(holder, own)]
        if whole:
            # containers of the project's first; what has no name is a part of what has one
            plain = [holder for holder in whole if isinstance(holder, (list, deque, dict, set, tuple))]
            named = [(holder, name) for holder in plain if (name := names.of(holder))]
            found = []
            for holder, name in (named or [(whole[0], names.of(whole[0]))])[:2]:
                bounded = holder.maxlen if isinstance(holder, deque) else None
                line = names.put_at(name, node) or _where(node)
                found.append(GraphHolder("kept_tensors", name, type(holder).__name__, count, bounded, line))
            return found
        items = above
    return None if ours == reached.full else []


def _where(node: Any) -> str:
    known = made(node)
    return str(known.place) if known is not None else ""


def tensors_with_history() -> list[tuple[torch.Tensor, Any]]:
    """The tensors that Python holds and that were computed, each with the node that made it."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # a view whose base was written to
                found.append((thing, thing.grad_fn))
    return [(tensor, node) for tensor, node in found if node is not None]


class _Step(NamedTuple):
    """An object that leads to the one that is looked for, and what is written after its name."""

    at: Any
    suffix: str


class _Variable(str):
    """A name that needs no further one: of a module's variable, or of a closure's."""

    __slots__ = ()


class Names:
    """The names under which a project's code reaches an object: ``losses``, ``Trainer.total_loss``,
    ``cache['outputs']``; looked up from the frames that are running now, what a step's hook was called from."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._files: list[str] = []
        """The files of the project's running functions, the innermost first."""
        self.locals: dict[int, str] = {}
        """The variables of the running functions, by the identity of their values."""
        self._ignored: set[int] = {id(self.locals)}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != FIT_CALLER:
            values = frame.f_locals
            self._ignored |= {id(frame), id(values)}
            if layer(frame.f_code.co_filename):
                self._files.append(frame.f_code.co_filename)
                for name, value in values.items():
                    if not isinstance(value, ModuleType):
                        self.locals.setdefault(id(value), name)
            frame = frame.f_back
        self._modules = {id(vars(m)): name for name, m in list(sys.modules.items()) if isinstance(m, ModuleType)}

    def of(self, target: Any) -> str:
        """The shortest name; empty where none is found."""
        steps, seen = [_Step(target, "")], {id(target)}
        for _ in range(MOST_TO_A_NAME):
            for step in steps:
                at, name = step.at, self.locals.get(id(step.at), "")
                if isinstance(at, _Variable):
                    name = str(at)
                elif isinstance(at, nn.Module) and self._watch.table.knows(at):
                    name = self._watch.table.path_of(at)
                elif name == "self":
                    name = type(at).__name__
                if name:
                    return name + step.suffix
            if not steps:
                break
            wanted = {id(step.at): step for step in steps}
            above: list[_Step] = []
            for holder in referrers([step.at for step in steps], self._ignored | {id(steps), id(wanted)}):
                above += self._links(holder, wanted)
            steps = [step for step in above if id(step.at) not in seen][:MOST_AT_A_LEVEL]
            seen |= {id(step.at) for step in steps}
        return ""

    def put_at(self, container: str, node: Any) -> str:
        """The one line of the running functions' files, and of those that made the node, that puts something into the
        container of this name; empty where there are several."""
        last, known = container.rpartition(".")[2].partition("[")[0], made(node)
        files = dict.fromkeys([*self._files, *(file for file, _ in (known.site if known is not None else ()))])
        lines = {(file, line) for file in files for line in _puts(file).get(last, ())} if last else set()
        return str(place_of(*lines.pop())) if len(lines) == 1 else ""

    def _links(self, holder: Any, wanted: dict[int, _Step]) -> list[_Step]:
        """What leads from an object to one of those that are wanted."""

        def dotted(suffix: str) -> str:
            """``.key`` where a suffix begins with ``['key']``, the key of an object's or a class's dict."""
            key, _, rest = suffix[1:].partition("]")
            return f".{key[1:-1]}{rest}"

        if isinstance(holder, dict):
            links = [(key, wanted[id(v)].suffix) for key, v in list(holder.items()) if id(v) in wanted]
            if id(holder) in self._modules:
                return [_Step(_Variable(str(key)), suffix) for key, suffix in links]
            return [_Step(holder, f"[{key!r}]{suffix}") for key, suffix in links]
        if isinstance(holder, (list, tuple, deque)):
            return [_Step(holder, f"[{i}]{wanted[id(v)].suffix}") for i, v in enumerate(holder) if id(v) in wanted]
        if isinstance(holder, FunctionType):  # a closure of the project's: its cells lie in a tuple
            step = wanted.get(id(holder.__closure__))
            if step is None or not layer(holder.__code__.co_filename):
                return []
            number, _, rest = step.suffix[1:].partition("]")
            return [_Step(_Variable(holder.__code__.co_freevars[int(number)]), rest)]
        if isinstance(holder, CellType):
            return [_Step(holder, step.suffix) for step in wanted.values() if holder.cell_contents is step.at]
        if isinstance(holder, GeneratorType) and holder.gi_frame is not None:
            values = holder.gi_frame.f_locals.items()
            return [_Step(_Variable(name), wanted[id(v)].suffix) for name, v in values if id(v) in wanted]
        if isinstance(holder, type):  # its dict shows itself through a proxy only
            own = [
                s for s in wanted.values() if isinstance(s.at, dict) and "__module__" in s.at and s.at == vars(holder)
            ]
            return [_Step(_Variable(holder.__name__), dotted(step.suffix)) for step in own]
        if isinstance(holder, (FrameType, MethodType, ModuleType)):
            return []
        if issubclass(type(holder), torch.Tensor) and any(id(hooks) in wanted for hooks in hooks_of(holder)):
            index = self._watch.table.index(holder)
            name = "" if index is None else f"{self._watch.table.entries[index].name}._backward_hooks"
            return [_Step(_Variable(name), "")] if name else []
        held = attributes(holder)
        found = [_Step(holder, dotted(step.suffix)) for step in wanted.values() if held is step.at]
        found += [_Step(holder, f".{key}{wanted[id(v)].suffix}") for key, v in held.items() if id(v) in wanted]
        for kind in type(holder).__mro__:
            slots = vars(kind).get("__slots__", ())
            for slot in [slots] if isinstance(slots, str) else slots:
                value = None if slot.startswith("__") else getattr(holder, slot, None)
                if id(value) in wanted:
                    found.append(_Step(holder, f".{slot}{wanted[id(value)].suffix}"))
        return found


def referrers(values: list[Any], ignored: Iterable[int] = ()) -> list[Any]:
    """The objects that refer to these, but for frames, for what is ours and for what was made on the way."""
    given = tuple(values)  # Python 3.13 finds the arguments of a call, too
    left_out = {id(values), id(given), *ignored}
    found = gc.get_referrers(*given)
    return [o for o in found if id(o) not in left_out and not isinstance(o, FrameType) and not is_ours(o)]


@functools.lru_cache(maxsize=64)
def _puts(file: str) -> dict[str, tuple[int, ...]]:
    """The lines that put something into a container, by the last name of the container."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(syntax_of(file)):
        into: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
            into = [node.func.value]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            into = [node.target]
        elif isinstance(node, ast.Assign):
            into = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
        for container in into:
            while isinstance(container, (ast.Subscript, ast.Call)):
                container = container.value if isinstance(container, ast.Subscript) else container.func
            name = container.attr if isinstance(container, ast.Attribute) else getattr(container, "id", "")
            found.setdefault(name, []).append(node.lineno)  # type: ignore[attr-defined]
    return {name: tuple(dict.fromkeys(lines)) for name, lines in found.items()}
