"""Faults that ``test_resumed`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_PLAN, _PARTS = "twinproof.checkpoint.plan", "twinproof.pipeline.sharded:TableParts"
_STORED = "self.store.step_count(self.table) + 1"

steps_of_the_collection = patched(
    "Rows are stepped with the collection's step, whatever their table had.",
    mutated("twinproof.pipeline.modules:StoreRows.step", f"max(hyper.step, {_STORED})", "hyper.step"),
    kills="PIPE-689",
)
steps_of_the_table = patched(
    "Rows are stepped with the step behind their table's last, whatever the collection was set to.",
    mutated("twinproof.pipeline.modules:StoreRows.step", f"max(hyper.step, {_STORED})", _STORED),
    kills="PIPE-689",
)
last_step_again = patched(
    "The last step of a table is taken once more.",
    mutated("twinproof.pipeline.modules:StoreRows.step", "(self.table) + 1", "(self.table)"),
    kills="PIPE-689",
)
steps_as_python_takes_them = patched(
    "The step of a state dict is whatever Python makes an int of.",
    swap("twinproof.pipeline.sharded:own_step", lambda value, where: int(value)),
    swap("twinproof.pipeline.modules:own_step", lambda value, where: int(value)),
    kills="PIPE-693",
)
steps_behind_the_states = patched(
    "The step of a state dict is looked at when states are loaded.",
    mutated(
        "twinproof.pipeline.sharded:TableParts.load_optimizer_state_dict",
        "step = own_step(state[STEP], STEP)\n",
        "step = state[STEP]\n",
    ),
    kills="PIPE-693",
)
steps_behind_the_tables = patched(
    "The step of a state dict is looked at when tables are loaded.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags._load_from_state_dict",
        "own_step(state_dict.get(name, 0), name)",
        "state_dict.get(name, 0)",
    ),
    kills="PIPE-693",
)
groups_without_options = patched(
    "An option that is not in the group is missed when it is read.",
    mutated("twinproof.pipeline.config:InBackwardOptimizer.__setstate__", "if name not in group", "if False"),
    kills="PIPE-694",
)
any_step_of_a_handle = patched(
    "A step is loaded as it is given.",
    mutated(
        "twinproof.pipeline.config:InBackwardOptimizer.__setstate__",
        'own_step(group["step_count"], "step_count")',
        'group["step_count"]',
    ),
    kills="PIPE-694",
)
no_more_steps = patched(
    "The last step is taken for one that another can follow.",
    mutated("twinproof.pipeline.config:own_step", "count < STEP_MAX", "count <= STEP_MAX"),
    kills="PIPE-694",
)
options_passed_over = patched(
    "eps and betas of the group are not read, and nobody says so.",
    mutated("twinproof.pipeline.config:InBackwardOptimizer._hyper", "if name in group:", "if False:"),
    kills="PIPE-695",
)
betas_passed_over = patched(
    "betas of the group are not read, and nobody says so.",
    swap("twinproof.pipeline.config:_UNREAD", ("eps",)),
    kills="PIPE-695",
)
decay_passed_over = patched(
    "What the fused formulas do without is not looked for in the group.",
    mutated("twinproof.pipeline.config:InBackwardOptimizer._hyper", "if group.get(name):", "if False:"),
    kills="PIPE-695",
)
rows_left_out = patched(
    "What is saved of a model has no row of a key-value table.",
    mutated(
        "twinproof.checkpoint.native:model_states", "(_own_states(part), stored_rows(part))", "(_own_states(part),)"
    ),
    kills="PIPE-796",
)
rows_kept_back = patched(
    "Rows of a checkpoint are not given to the collection.",
    mutated("twinproof.checkpoint.native:set_model", "set_stored_rows(model, state)", "pass"),
    kills="PIPE-796",
)
rows_beside_others = patched(
    "Rows of a checkpoint come beside those that are there.",
    mutated(f"{_PARTS}.load_key_value_state_dict", ", clear=True", ""),
    kills="PIPE-796",
)
wrappers_named = patched(
    "Rows have the names of wrappers in their own.",
    mutated(f"{_PLAN}:_holders", "(name,) = _get_fqns(part, ", "(name,) = (lambda _, name: (name,))(part, "),
    kills="PIPE-797",
)
names_without_their_module = patched(
    "Rows of all modules are named alike.",
    mutated(f"{_PLAN}:stored_rows", 'f"{prefix}{name}"', "name"),
    kills="PIPE-797",
)
rows_of_one_rank_for_all = patched(
    "One process takes the rows of one rank of several for all.",
    mutated("twinproof.kvstore.statedict:check_rows_of_rank", "world_size == 1 and ", "False and "),
    kills="PIPE-798",
)
rows_by_other_counts = patched(
    "Rows of other buckets in number are taken.",
    mutated("twinproof.kvstore.statedict:check_rows_of_rank", "counts.shape[0] != end - begin", "False"),
    kills="PIPE-798",
)
rows_of_any_bucket = patched(
    "Rows of buckets of another rank are taken.",
    mutated("twinproof.kvstore.statedict:check_rows_of_rank", "begin, end)\n", "0, total_count)\n"),
    kills="PIPE-798",
)

rows_among_states_left_out = patched(
    "A module with key-value tables stands among the states, and its rows are not saved.",
    mutated("twinproof.checkpoint.native:check_stateful", "(tables := stored_tables(module))", "(tables := ())"),
    kills="PIPE-775",
)
tables_of_no_name = patched(
    "A refusal names tables without the modules that they are in.",
    mutated(f"{_PLAN}:stored_tables", 'f"{prefix}{table}"', "table"),
    kills="PIPE-775",
)
any_cut_table_refused = patched(
    "Any cut table is taken for one whose rows stores have.",
    mutated("twinproof.pipeline.sharded:TableParts.key_value_tables", "if sharding.rule.is_stored", ""),
    kills="PIPE-775",
)
