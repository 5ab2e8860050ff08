"""The causes of ``compile_parity``, and what is said of each. Plain data, no torch."""

from __future__ import annotations

from functools import partial

from pytest_trainloop.core.registry import Cause, finding_maker

DIFFER = (
    "in optimizer step {step} the {part} differ by {difference:share} of their size, {direction}, in {tensors:tensor}, "
    "{precision}; limit {limit:share}"
)
COMPARED = "in {compared:optimizer step}, {precision}"
STEPS_MADE = "after {made:optimizer step}"
"""What ``measured`` says."""

_TROUBLESHOOTING = "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html"
_COMPILE = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
_IN_PLACE = "model.compile(), which compiles the model in place"
_LEAVE_OUT = "leave the named module out of the graph: @torch.compiler.disable on its forward; "
_ALONE = "{module:?; compiled alone, {module} changes them too|}"
_INSIDE = "{module:? of {module}|}"

_differs = partial(Cause, measured="{measured}", change=("seen",))
_computes = partial(_differs, explains=("overfit_one_batch", "update_ratio"))

CAUSES = {
    "never_runs": Cause(
        change=("seen",),
        proof="torch.compile was called, and nothing was compiled while the loop trained",
        summary="training never calls the compiled {what}: nothing was compiled",
        measured="{calls:call} of {how}(), 0 functions compiled in {compared:optimizer step}",
        shown_by="{how} was called, and the loop keeps its result",
        repair="call what torch.compile returned in the training step",
        variants={
            "dropped": {
                "summary": "{how} returns a compiled {what} that the loop does not keep: it trains without compiling",
                "shown_by": "the returned object was freed before the first batch, and torch compiled nothing",
                "repair": f"model = torch.compile(model), and train what it returns; or {_IN_PLACE}",
            }
        },
        source=_COMPILE,
    ),
    "compiling_raises": _differs(
        proof="fit raises with compiling, and does not with torch.compile disabled",
        summary="with {knob}=True fit raises {raised}",
        shown_by="with torch.compile disabled fit does not raise, for {knob}=True and for {knob}=False",
        repair="leave what the compiler refuses out of the graph: @torch.compiler.disable on that function, or without "
        "fullgraph=True",
        source=_TROUBLESHOOTING,
    ),
    "copy_compiled": _differs(
        proof="the compiled module shares no parameter with the optimizers, and their parameters get no gradient",
        summary="{names} {names:get} no gradient: the loop computes with the compiled {what}, whose parameters are in "
        "no optimizer",
        shown_by="with {knob}=False {names:they} {names:get} one; no parameter of the compiled {what} is in an "
        "optimizer",
        repair="build the optimizer from the model that is compiled and trained, with no copy.deepcopy between them; "
        "compile after the last change of the model",
        source=_COMPILE,
    ),
    "prefix_hides_parameters": Cause(
        proof="compiling gives parameters other options, gradients or values, and names that begin with _orig_mod.; "
        "with plain names it does not",
        summary="with {knob}=True {does}: the loop finds parameters by name, and names in the compiled model begin "
        "with _orig_mod.",
        measured="{measured}",
        shown_by="torch.compile's wrapper alone, with nothing compiled, has the same effect; with plain names in the "
        "wrapper the loop trains as without compiling",
        repair="freeze and group parameters before torch.compile, or by the names of the model that is not compiled; "
        "model.compile() in place of torch.compile(model) does not change names",
        change=("seen", "optimizer"),
        do_not="do not add _orig_mod. to the patterns: they then miss everything without compiling",
        variants={
            "options": {
                "summary": "{names} {several:?have|has} other options with {knob}=True: names in the compiled model "
                "begin with _orig_mod.",
                "shown_by": "only the names and the compiler differ between {knob}=True and {knob}=False",
            },
            "loading": {
                "summary": "load_state_dict(strict=False) does not load {names} with {knob}=True: the keys differ only "
                "by _orig_mod.",
                "shown_by": "the state holds {names:them} under the name without _orig_mod. or with it; with "
                "torch.compile disabled {several:?they are|it is} loaded",
            },
        },
        source="https://github.com/pytorch/pytorch/issues/101107",
    ),
    "wrapper_changes": _differs(
        proof="torch.compile's wrapper, with nothing compiled, makes the loop train differently, with plain names too",
        summary="with {knob}=True {does}: torch.compile returns a wrapper, which is no {what}",
        shown_by="torch.compile's wrapper alone, with nothing compiled, has the same effect, with plain names too; "
        "without the wrapper the effect is gone",
        repair="ask the model that is not compiled for its type and its attributes (keep it, or compiled._orig_mod); "
        f"or {_IN_PLACE}",
        source=_COMPILE,
        change=(),
    ),
    "other_computation": _differs(
        proof="the loop trains differently with the knob on even if torch.compile is disabled; or fit raises then too",
        summary="with {knob}=True the loop trains {names} differently, and not because of the compiler",
        shown_by="the difference remains with {knob}=True and torch.compile disabled",
        repair="let the knob compile, and change nothing else: same layers, same loss, same options of the optimizer",
        variants={
            "options": {"shown_by": "the optimizers get other options before anything is compiled"},
            "refused": {
                "summary": "with {knob}=True fit raises {raised}",
                "measured": STEPS_MADE + ", in float64 and in the loop's own precision",
                "shown_by": "with torch.compile disabled fit raises too; with {knob}=False it does not",
            },
        },
        source=_TROUBLESHOOTING,
        change=(),
    ),
    "stale_value": _computes(
        proof="compiled again for each step, the loop trains as the eager one does",
        summary="the compiled loop uses {early:?a value from when the loop was built|a value of an earlier step}, "
        "which has changed since: the graph holds it as a constant",
        shown_by="compiled again for each step, the loop trains as the eager loop does{filtered:?; guard_filter_fn "
        "keeps torch from checking the value again|}",
        repair="hold what changes during training in a tensor (a buffer) or pass it as an argument; without "
        "guard_filter_fn and torch.compiler.assume_constant_result torch checks each value again",
        source="https://github.com/pytorch/pytorch/issues/176851",
    ),
    "compiled_code_differs": _computes(
        proof="compiling changes gradients: already in the captured graph (backend eager), in the traced backward pass "
        "(aot_eager), or in the generated code only",
        summary="the graph that torch captures" + _INSIDE + " changes the gradients",
        shown_by="they differ with backend eager, which runs the captured graph with torch's own kernels, also when "
        "compiled again for each step" + _ALONE,
        repair=_LEAVE_OUT + "then simplify it",
        variants={
            "draws": {
                "summary": "each compiled step draws random numbers ({drawn}) that the loop draws once without "
                "compiling",
                "shown_by": "torch's generator advances in every compiled step after the first, and in none without "
                "compiling",
                "repair": "draw once before what is compiled, and keep the result in a buffer: torch traces through a "
                "cache in Python, which then holds nothing",
            },
            "asks": {
                "summary": "the loop computes something else where torch.compiler.is_compiling() is True",
                "shown_by": "when is_compiling() returns False, the compiled loop trains as the eager one does",
                "repair": "compute the same in both branches; leave out of the graph only what does not enter the loss",
            },
            "backward": {
                "summary": "the backward pass that torch traces" + _INSIDE + " changes the gradients",
                "shown_by": "with backend eager they agree, with aot_eager they do not; the project's own operators do "
                "what they declare" + _ALONE,
                "repair": _LEAVE_OUT + "check custom autograd functions, operators and tensor subclasses in it",
            },
            "generated": {
                "summary": "the code that is generated for the graph" + _INSIDE + " changes the gradients",
                "shown_by": "with backends eager and aot_eager they agree, with the loop's own they do not" + _ALONE,
                "repair": _LEAVE_OUT + "check it for memory that is read before it is written (torch.empty), for "
                "addresses and strides; else report it to torch",
            },
        },
        source=_TROUBLESHOOTING,
    ),
    "operator_misdeclared": _computes(
        proof="an operator of the project does something that it does not declare to the compiler",
        summary="the operator {name} {writes:?writes to an input that it does not declare|returns something else than "
        "its fake implementation says}",
        shown_by="{said}",
        repair="name every input that the operator writes to in mutates_args, and give its fake implementation the "
        "shapes, dtypes and strides of the real one; torch.library.opcheck tests both",
        source="https://docs.pytorch.org/docs/stable/library.html",
    ),
    "graph_breaks": Cause(
        change=("seen",),
        proof="torch ended a graph at this line",
        summary="the graph breaks here: {reason}",
        measured="{breaks:break} in {compared:optimizer step}{several:?, at {lines} lines|}",
        shown_by="torch compiles the code before and after this line as separate graphs",
        repair='TORCH_LOGS="graph_breaks" shows all; move logging, .item(), numpy and printing out of what is compiled',
        source=_TROUBLESHOOTING,
    ),
    "recompilations": Cause(
        change=("seen",),
        proof="torch compiled the same function again after the second step, and again after that",
        summary="{names} is compiled again in {times} of the steps after the second: {guard} fails",
        measured="compiled again in steps {steps} of {compared}; after {most} times torch runs it without compiling",
        shown_by="the guard that torch names compares with a value of an earlier step",
        repair='TORCH_LOGS="recompiles" shows all; hold what changes in a tensor; mark sizes that vary '
        "(torch._dynamo.mark_dynamic, dynamic=True), or pad them to a few",
        source=_TROUBLESHOOTING,
    ),
    "checkpoint_not_restored": Cause(
        proof="parameters that the compiled loop has saved are not restored by load() with compiling, or not without",
        summary="with {knob}=True load() does not restore {names}, and raises nothing",
        measured="{parameters:parameter} with other values than save() was called with",
        shown_by="with {knob}=False load() restores what save() gives",
        repair="save and load through the same model, the one that is not compiled or the compiled one; with "
        "strict=True load_state_dict raises where names do not fit",
        variants={
            "without compiling": {
                "summary": "load() without compiling {refused:?raises on|does not restore} what the compiled loop "
                "saves{refused:?|, and raises nothing}",
                "measured": "{keys} names in the saved state begin with _orig_mod.",
                "shown_by": "{refused:?load() raises {refused}|{names} {several:?have|has} other values than were "
                "saved}",
                "repair": "save the state of the model that is not compiled (keep it, or "
                "compiled._orig_mod.state_dict()), or strip _orig_mod. from its keys",
            }
        },
        source="https://github.com/google-research/flood-forecasting/pull/263",
    ),
}

found = finding_maker(CAUSES)
