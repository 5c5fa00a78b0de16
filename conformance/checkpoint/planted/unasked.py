"""Faults that ``test_unasked`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_NATIVE = "twinproof.checkpoint.native"
_OPTIMIZERS = "twinproof.checkpoint.optimizer_states:OptimizerStates"

unasked_entries_left = patched(
    "What a fresh object does not ask for stays in the checkpoint, without a word.",
    swap(f"{_NATIVE}:not_asked", lambda asked, owners, metadata: ([], [], set())),
    kills=("CKPT-833", "CKPT-834"),
)
unasked_entries_not_handed_out = patched(
    "What was loaded beside the keys of an object is not handed to it.",
    mutated(f"{_NATIVE}:with_own_keys", "else text] = _as_saved(each)", "else text] = None"),
    kills="CKPT-832",
)
targets_of_objects_changed = patched(
    "Places are made in what the fresh object said, which may be what it has.",
    mutated(f"{_NATIVE}:_placed_in", "made: Any = copy.copy(value) if", "made: Any = value if"),
    kills="CKPT-832",
)
numbers_are_text = patched(
    "A key that may be a number is handed out as its text.",
    swap(f"{_NATIVE}:_may_be_no_text", lambda key: False),
    kills="CKPT-833",
)
parts_of_all_ranks_loaded = patched(
    "Each rank loads what the others ask for, too.",
    mutated(
        f"{_NATIVE}:load_native", "for name in rest if not any(name in names for names in by_rank)", "for name in rest"
    ),
    kills="CKPT-834",
)
keys_of_new_entries_stay_text = patched(
    "A number among the keys of what an object had nothing of comes back as its text.",
    mutated(f"{_NATIVE}:_as_saved", "if isinstance(text, _Literal) else", "if False else"),
    kills="CKPT-832",
)
paths_of_every_planner = patched(
    "A checkpoint is taken to have the paths of its names, whatever planner saved it.",
    mutated(
        f"{_NATIVE}:not_asked", "not names + optimizers or not isinstance(paths, Mapping)", "not names + optimizers"
    ),
    kills="CKPT-825",
)
later_entries_demanded = patched(
    "A checkpoint has to have all that an object says by now.",
    swap(f"{_NATIVE}:as_saved", lambda value, name, saved: value),
    kills="CKPT-900",
)
emptied_mappings_dropped = patched(
    "A mapping of the object's own is gone where its entries are.",
    mutated(f"{_NATIVE}:as_saved", "isinstance(each, Mapping):", "False:"),
    kills="CKPT-900",
)
values_stay_cut = patched(
    "One value of the checkpoint is not found where the object has several by now.",
    mutated(
        f"{_NATIVE}:_placed_in",
        "        return tree.value",
        "        return value if isinstance(value, Mapping | list) and value else tree.value",
    ),
    kills="CKPT-900",
)

values_cast_to_fresh_ones = patched(
    "A tensor of an object is cast to the dtype of a fresh one.",
    mutated(
        f"{_NATIVE}:_fits",
        "(target.dtype, target.shape) == (saved.properties.dtype, saved.size)",
        "target.shape == saved.size",
    ),
    kills="CKPT-901",
)
options_of_optimizers_cast = patched(
    "A tensor option of an optimizer is cast to the dtype of a fresh one.",
    mutated(f"{_NATIVE}:not_asked", "if isinstance(each, OptimizerStates)", "if False"),
    kills="CKPT-901",
)
unlike_entries_of_all_ranks_loaded = patched(
    "What fits no place on one rank is loaded by the others, too.",
    mutated(f"{_NATIVE}:not_asked", "mine_of[fqn][0] in names}", "mine_of[fqn][0] in names and fqn not in unlike}"),
    kills="CKPT-901",
)
objects_are_mappings = patched(
    "The state of an object is taken to be a mapping.",
    mutated(f"{_NATIVE}:as_saved", "not isinstance(value, Mapping) or name in saved", "name in saved"),
    kills="CKPT-955",
)
objects_of_nothing_demanded = patched(
    "An object that says nothing has to be in the checkpoint.",
    mutated(f"{_NATIVE}:as_saved", " and any(part is _UNSAVED for part in parts.values())", ""),
    kills="CKPT-956",
)
states_of_any_size = patched(
    "A state of a parameter is loaded in the size that it was saved with.",
    mutated(f"{_NATIVE}:not_asked", "if path[0] in names or str(path[1]).startswith(GROUPS)", "if True"),
    kills="CKPT-957",
)
filled_without_memory = patched(
    "A tensor without memory is taken for one that is read into.",
    mutated(f"{_NATIVE}:_fits", " and not target.is_meta", ""),
    kills="CKPT-958",
)
placed_without_memory = patched(
    "What takes the place of a tensor without memory has none.",
    mutated(f"{_NATIVE}:_placed_in", " and not value.is_meta", ""),
    kills="CKPT-958",
)
gaps_are_asked_for = patched(
    "A place in a list of which the checkpoint has nothing is asked for, as torch does.",
    mutated("twinproof.checkpoint.planners:FillingPlanner.set_up_planner", "del self.state_dict[name]", "pass"),
    kills="CKPT-959",
)
later_entries_in_gaps = patched(
    "What an object says by now in the place of a mapping without entries is asked for.",
    mutated(f"{_NATIVE}:_saved_part", "_emptied(value[place]) if", "value[place] if"),
    kills="CKPT-959",
)
nothing_in_gaps = patched(
    "A mapping without entries comes back as None where a fresh object had said nothing.",
    mutated(f"{_NATIVE}:_placed_in", "[{} for _ in", "[None for _ in"),
    kills="CKPT-959",
)
objects_that_begin_alike = patched(
    "What the checkpoint has of an object is found by how its names begin, without the dot behind the object's.",
    mutated(f"{_NATIVE}:as_saved", 'each.startswith(f"{name}.")', "each.startswith(name)"),
    kills="CKPT-989",
)
first_wrong_name_only = patched(
    "What a load of training lacks is left to torch, which names the first.",
    swap("twinproof.checkpoint.planners:FillingPlanner._check_asked", lambda planner, saved: None),
    kills="CKPT-990",
)
extra_states_as_they_are = patched(
    "A module's extra state is asked for as a fresh module says it.",
    mutated(f"{_NATIVE}:_objects", 'if name.rpartition(".")[2] == _EXTRA_STATE', "if False"),
    kills="CKPT-970",
)
objects_of_all_ranks_alone = patched(
    "What no rank asks for is loaded where all ranks have the same objects, and nowhere else.",
    mutated(
        f"{_NATIVE}:load_native",
        "if not any(name in names for names in by_rank)",
        "if len({*map(frozenset, by_rank)}) == 1",
    ),
    kills="CKPT-971",
)
later_states_left = patched(
    "States that a fresh optimizer does not make by its first step stay in the checkpoint.",
    mutated(f"{_OPTIMIZERS}.not_asked", "self.later[name] = param", "pass"),
    kills="CKPT-972",
)
later_states_whole = patched(
    "States of sharded parameters that come later are not sharded.",
    mutated(f"{_NATIVE}:_params_of_states", "for name, param in owner.later.items()", "for name, param in ()"),
    kills="CKPT-972",
)
new_options_left = patched(
    "Options that the groups of a fresh optimizer do not have stay in the checkpoint.",
    mutated(f"{_OPTIMIZERS}.not_asked", "options.append(name)", "pass"),
    kills="CKPT-973",
)
names_of_other_groups = patched(
    "The names of a group's parameters are those of the group that was saved.",
    mutated(f"{_OPTIMIZERS}.not_asked", '("param_names", *groups[param])', "groups[param]"),
    kills="CKPT-973",
)
any_dtype_holds = patched(
    "Values of the checkpoint are cast to whatever dtype a model has.",
    swap(f"{_NATIVE}:_holds", lambda target, saved: True),
    kills="CKPT-974",
)
floats_are_not_rounded = patched(
    "A model has to have the dtypes that were saved.",
    swap(f"{_NATIVE}:_holds", lambda target, saved: target == saved),
    kills="CKPT-974",
)
options_of_the_first = patched(
    "All parameters of a group get the options of the first.",
    mutated(f"{_OPTIMIZERS}._check_options", "if wrong:", "if False:"),
    kills="CKPT-976",
)
options_by_value_alone = patched(
    "What is not a number differs from itself.",
    mutated("twinproof.checkpoint.optimizer_states:_alike", "repr(a) == repr(b) or ", ""),
    kills="CKPT-976",
)
