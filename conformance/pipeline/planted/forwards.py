"""Faults that ``test_forwards`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

any_argument_is_the_batch = patched(
    "Every argument of a forward is taken for the batch.",
    mutated("twinproof.pipeline.stages:_needs_more", "each is batch\n", 'each.op == "placeholder"\n'),
    kills="PIPE-577",
)
absent_defaults_traced = patched(
    "An argument without a default is traced as what stands for none.",
    mutated(
        "twinproof.pipeline.tracing:Tracer.create_args_for_root",
        "if defaults.get(name, inspect.Parameter.empty) is not inspect.Parameter.empty:",
        "if name in defaults:",
    ),
    kills="PIPE-577",
)
names_of_functions_missed = patched(
    "A function's name does not say that it changes something.",
    mutated("twinproof.pipeline.stages:_changes", "is_named_so or target is assigned", "target is assigned"),
    kills="PIPE-578",
)
functions_without_a_result_missed = patched(
    "A function of somebody's without a result changes nothing.",
    mutated("twinproof.pipeline.stages:_changes", " or is_own):", "):"),
    kills="PIPE-578",
)
methods_of_python_in_place = patched(
    "A method of Python's is one in place.",
    mutated("twinproof.pipeline.stages:_changes", ' and not target.endswith("__")', ""),
    kills="PIPE-578",
)
traces_cut_short = patched(
    "A mode that cannot be traced is taken for the one before, whatever it calls.",
    mutated(
        "twinproof.pipeline.stages:find_calls",
        "not calls or [call.formula for call in calls] != [call.formula for call in known]",
        "not calls",
    ),
    kills="PIPE-579",
)
forwards_of_others_do_not_run_ahead = patched(
    "A forward that somebody put on a module is not what runs ahead.",
    mutated(
        "twinproof.pipeline.stages:FromBatch._called",
        "forward.replaced if isinstance(forward, Prepared) else forward",
        "None if isinstance(forward, Prepared) else forward",
    ),
    kills="PIPE-580",
)
forwards_put_on_unseen = patched(
    "What was made ahead is kept where another forward was put on the module.",
    mutated("twinproof.pipeline.driver:Pipeline.progress", " or self._attachment.is_overlaid()", ""),
    kills="PIPE-635",
)
detached_forwards_hand_out = patched(
    "A forward that was given back hands out what is prepared, if there is something.",
    mutated("twinproof.pipeline.stages:Prepared.close", "self._result_of = None", "pass"),
    kills="PIPE-635",
)
names_of_tuples_lost = patched(
    "A module that runs ahead is called with a plain tuple.",
    mutated(
        "twinproof.pipeline.stages:FromBatch._called",
        "return node.target(*positional, **named)",
        'return positional if hasattr(node.target, "_fields") else node.target(*positional, **named)',
    ),
    kills="PIPE-638",
)
classes_moved = patched(
    "A class in a batch is moved as a batch.",
    mutated("twinproof.pipeline.stages:move_batch", " and not isinstance(batch, type)", ""),
    kills="PIPE-581",
)
drawn_ahead = patched(
    "Ids that the forward draws are drawn ahead, and again in the forward.",
    mutated("twinproof.pipeline.stages:_calls_in", "elif any(map(draws, _on_the_way(node))):", "elif False:"),
    kills="PIPE-709",
)
dropout_ahead = patched(
    "A module that drops some of what it is given runs ahead.",
    mutated(
        "twinproof.pipeline.stages:_postprocs_of", "isinstance(part, torch.nn.modules.dropout._DropoutNd)", "False"
    ),
    kills="PIPE-709",
)
dropout_of_evaluation_drawn = patched(
    "Dropout counts as a draw where it draws nothing.",
    mutated("twinproof.pipeline.tracing:draws", ' or node.kwargs.get("training") is False', ""),
    kills="PIPE-709",
)
python_drawn_in_traces = patched(
    "A trace draws from Python's generator.",
    mutated("twinproof.pipeline.tracing:drawn_apart", "random.setstate(before)", "pass"),
    kills="PIPE-719",
)
numpy_drawn_in_traces = patched(
    "A trace draws from numpy's generator.",
    mutated("twinproof.pipeline.tracing:drawn_apart", "numpy.set_state(of_numpy)", "pass"),
    kills="PIPE-719",
)
