"""Faults that ``test_ahead`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

modules_ahead_keep_their_mode = patched(
    "What a module gave ahead in another mode is used.",
    mutated("twinproof.pipeline.stages:Traces.follow", "is_other |= modes_ahead != self._seen[1]", "pass"),
    kills="PIPE-512",
    of="fastimpl",
)

first_mode_is_traced_alone = patched(
    "A forward's branch on its mode is that of the mode in which it was traced.",
    mutated(
        "twinproof.pipeline.stages:Traces.follow",
        "is_other = [call.way for call in found] != [call.way for call in before]",
        "is_other = False",
    ),
    kills="PIPE-513",
)

both_modes_are_traced_whole = patched(
    "A forward that cannot be traced to its end in one mode ends the pipeline there.",
    mutated("twinproof.pipeline.stages:find_calls", "and (not calls or", "and (True or"),
    kills="PIPE-513",
)

only_the_mode_of_the_model = patched(
    "A forward is traced again where the mode of the model changed, whatever modes the modules in it have.",
    mutated(
        "twinproof.pipeline.stages:Traces._modes", "module.training for module in self._open", "[self._model.training]"
    ),
    kills="PIPE-527",
)

what_is_sent_stays = patched(
    "What was sent ahead in one mode is not sent anew in another.",
    mutated("twinproof.pipeline.driver:Pipeline.progress", "self.detach()", "pass"),
    kills="PIPE-512",
    of="fastimpl",
)

changing_hooks_pass = patched(
    "A hook on the way to a sharded module is bypassed without a word.",
    mutated("twinproof.pipeline.driver:Pipeline._result_of", "self._is_hooked", "False"),
    kills="PIPE-514",
)

results_of_modules_unhooked = patched(
    "Hooks of modules that run ahead are bypassed without a word.",
    mutated("twinproof.pipeline.stages:Traces.has_hooks", "(call.module, *call.postprocs.values())", "(call.module,)"),
    kills="PIPE-514",
)

arguments_made_anew_differ = patched(
    "An argument that the forward makes anew is taken for another one where a hook looks.",
    mutated("twinproof.pipeline.stages:_same", "type(one) is not type(other)", "isinstance(one, KeyedJaggedTensor)"),
    kills="PIPE-515",
)

changes_in_place_missed = patched(
    "A change in place of what a sharded module is called with is missed by what runs ahead.",
    mutated("twinproof.pipeline.stages:_calls_in", "elif _changed_before(node, numbers, sharded):", "elif False:"),
    kills="PIPE-524",
)

attributes_missed = patched(
    "An attribute of a batch that the forward assigns is missed by what runs ahead.",
    mutated("twinproof.pipeline.tracing:_Noting.__setattr__", "if name not in self._OWN:", "if False:"),
    kills="PIPE-524",
)

changes_beside_count = patched(
    "A change in place of anything in the batch leaves its sharded modules to the model.",
    mutated("twinproof.pipeline.stages:_changed_before", "if is_known or any", "if True or any"),
    kills="PIPE-524",
)

ids_of_the_first_batch = patched(
    "A batch that is put in the place of another has the other's lookups.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._replace",
        "in_flight is self._current or in_flight not in self._queue",
        "True",
    ),
    kills="PIPE-525",
    of="fastimpl",
)

traces_draw = patched(
    "A trace draws what the model draws.",
    mutated("twinproof.pipeline.tracing:drawn_apart", "with torch.random.fork_rng(devices):", "if True:"),
    kills="PIPE-526",
)

kept_of_the_exchange = patched(
    "What the exchange of a batch gave is kept when the batch is recalled.",
    mutated("fastimpl.pipeline.stages:StreamedBatch.forget", "self.given.clear()", "pass"),
    kills="PIPE-512",
    of="fastimpl",
)

refused_once = patched(
    "What strict refuses is known at the next step, which goes on with it.",
    mutated(
        "twinproof.pipeline.stages:Traces.follow", "check(calls)", "self._found[modes] = reads, calls; check(calls)"
    ),
    kills="PIPE-531",
)

keywords_are_not_looked_at = patched(
    "Two modes that differ in a keyword argument are taken for one.",
    mutated("twinproof.pipeline.stages:_formula_of", "(each.args, each.kwargs)", "each.args"),
    kills="PIPE-532",
)

weights_are_not_compared = patched(
    "Of what a module is called with the weights are not compared with what was looked up ahead.",
    mutated("twinproof.pipeline.stages:_same", '"values", "weights_or_none", "lengths"', '"values", "lengths"'),
    kills="PIPE-533",
)
lengths_are_not_compared = patched(
    "Of what a module is called with the lengths are not compared with what was looked up ahead.",
    mutated("twinproof.pipeline.stages:_same", '"values", "weights_or_none", "lengths"', '"values", "weights_or_none"'),
    kills="PIPE-533",
)

some_operators_alone = patched(
    "Operators of arithmetic alone are known to change their operand in place.",
    mutated("twinproof.pipeline.stages:_changes", "in IN_PLACE.values()", "in list(IN_PLACE.values())[:5]"),
    kills="PIPE-536",
)

functions_for_each_reader = patched(
    "A function of the forward is called for each sharded module that reads what it gives.",
    mutated(
        "twinproof.pipeline.stages:FromBatch.value",
        "if node not in self._values",
        'if node.op == "call_function" or node not in self._values',
    ),
    kills="PIPE-550",
)
methods_for_each_reader = patched(
    "A method of the batch is called for each sharded module that reads what it gives.",
    mutated(
        "twinproof.pipeline.stages:FromBatch.value",
        "if node not in self._values",
        'if node.op == "call_method" or node not in self._values',
    ),
    kills="PIPE-550",
)
modules_for_each_reader = patched(
    "A module that runs ahead is called for each sharded module that reads what it gives.",
    mutated(
        "twinproof.pipeline.stages:FromBatch.value",
        "if node not in self._values",
        'if node.op == "call_module" or node not in self._values',
    ),
    kills="PIPE-550",
)

hooks_of_all_modules_pass = patched(
    "A hook of all modules that changes what a module is called with is bypassed without a word.",
    mutated("twinproof.pipeline.stages:Traces.has_hooks", "return True", "pass"),
    kills="PIPE-753",
)
hooks_of_results_pass = patched(
    "Of hooks of all modules those before a forward alone count.",
    mutated("twinproof.pipeline.stages:Traces.has_hooks", " or everywhere._global_forward_hooks", ""),
    kills="PIPE-753",
)
hooks_of_wrappers_pass = patched(
    "Hooks of wrappers inside of the outermost are bypassed without a word.",
    mutated("twinproof.pipeline.stages:Traces.has_hooks", "*_layers(self._model)", "self._model"),
    kills="PIPE-754",
)
