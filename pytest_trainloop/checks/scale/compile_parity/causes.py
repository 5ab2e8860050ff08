"""The causes of ``compile_parity``, as data."""

from __future__ import annotations

from pytest_trainloop.registry import Cause

_EXPLAINS = ("overfit_one_batch", "update_ratio")

CAUSES = {
    "result_dropped": Cause(
        proof="torch.compile was called, nobody held what it returned when training began, and nothing was compiled",
        repair="model = torch.compile(model), and train what it returns; or model.compile(), which changes the model "
        "in place",
        change=("seen",),
    ),
    "compiling_raises": Cause(
        proof="fit raises with compiling and comes back where torch.compile stands aside",
        repair="leave what the compiler refuses out of the graph: @torch.compiler.disable on that function, or "
        "without fullgraph=True",
        change=("seen",),
    ),
    "copy_compiled": Cause(
        proof="what was compiled shares no parameter with what the optimizers hold, and those get no gradient",
        repair="build the optimizer from the model that is compiled and trained, with no copy.deepcopy between them; "
        "compile after the last change of the model",
        change=("seen",),
    ),
    "prefix_hides_parameters": Cause(
        proof="with compiling, parameters have other options, gradients or values than without, and their names begin "
        "with _orig_mod.; with the names that they have without compiling they do not",
        repair="freeze and group parameters before torch.compile, or by the names of the model that is not compiled; "
        "model.compile() in place of torch.compile(model) leaves names as they are",
        change=("optimizer",),
        do_not="do not add _orig_mod. to the patterns: they then miss everything without compiling",
    ),
    "wrapper_changes": Cause(
        proof="with torch.compile's wrapper around the model and nothing compiled the loop trains otherwise, and as "
        "without compiling where the wrapper is left out",
        repair="ask the model that is not compiled for its type and its attributes (keep it, or compiled._orig_mod); "
        "or model.compile(), which leaves the model what it is",
        change=("seen",),
    ),
    "other_computation": Cause(
        proof="with the knob on, the loop trains otherwise also where torch.compile stands aside; or torch "
        "refuses what it does, there as well",
        repair="let the knob compile, and change nothing else: same layers, same loss, same options of the optimizer",
        change=("seen",),
    ),
    "stale_value": Cause(
        proof="compiled anew for each step, the loop trains as the eager one does",
        repair="hold what changes during training in a tensor (a buffer) or pass it as an argument; without "
        "guard_filter_fn and torch.compiler.assume_constant_result torch looks at each value again",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "drawn_again": Cause(
        proof="compiled, each later step draws random numbers, and without compiling none does",
        repair="draw once before what is compiled, and keep the result in a buffer: a cache in Python is traced "
        "through, and holds nothing",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "asks_whether_compiled": Cause(
        proof="where torch.compiler.is_compiling() answers False the compiled loop trains as the eager one does",
        repair="compute the same in both branches; leave out of the graph only what does not enter the loss",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "capture_differs": Cause(
        proof="the captured graph, run by torch's own kernels, gives other gradients, also compiled anew for each step",
        repair="leave the named module out of the graph: @torch.compiler.disable on its forward; then simplify it",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "operator_misdeclared": Cause(
        proof="an operator of the project's own does something else than it declares to the compiler",
        repair="name every input that the operator writes to in mutates_args, and give its fake implementation the "
        "shapes, dtypes and strides of the real one; torch.library.opcheck tests both",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "traced_backward_differs": Cause(
        proof="the captured graph gives the same gradients with backend eager, others with aot_eager, which traces "
        "the backward pass ahead",
        repair="leave the named module out of the graph: @torch.compiler.disable on its forward; look at custom "
        "autograd functions, operators and tensor subclasses in it",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "generated_code_differs": Cause(
        proof="with aot_eager, which runs the same graph by torch's own kernels, the gradients are the eager ones",
        repair="leave the named module out of the graph: @torch.compiler.disable on its forward; look there for "
        "memory that is read before it is written (torch.empty), for addresses and strides; else report it to torch",
        explains=_EXPLAINS,
        change=("seen",),
    ),
    "never_runs": Cause(
        proof="torch.compile was called, its result is held, and nothing was compiled while the loop trained",
        repair="call what torch.compile returned in the training step",
    ),
    "graph_breaks": Cause(
        proof="torch ended a graph at this line",
        repair='TORCH_LOGS="graph_breaks" shows all; move logging, .item(), numpy and printing out of what is compiled',
    ),
    "recompilations": Cause(
        proof="torch compiled the same function again after the second step, and again after that",
        repair='TORCH_LOGS="recompiles" shows all; hold what changes in a tensor; mark sizes that vary '
        "(torch._dynamo.mark_dynamic, dynamic=True), or pad them to a few",
    ),
    "checkpoint_not_restored": Cause(
        proof="with compiling, load() leaves parameters as they were that save() has saved, and without it does not",
        repair="save and load through the same model, the one that is not compiled or the compiled one; with "
        "strict=True load_state_dict raises where names do not fit",
        change=("seen",),
    ),
    "checkpoint_needs_compile": Cause(
        proof="what save() gives of the compiled loop is not restored by load() of the loop without compiling",
        repair="save the state of the model that is not compiled (keep it, or compiled._orig_mod.state_dict()), or "
        "strip _orig_mod. from its keys",
    ),
}
