"""Faults that ``test_surface`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.errors import CorruptionError, DistributedError, TwinproofError


@fault(kills="CKPT-425", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__init__")
def signature_of_anything(original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The writer says that it takes any arguments."""
    original(*arguments, **options)


@fault(kills="CKPT-426", at="twinproof.checkpoint.catalog:_stored")
def storage_data_off_by_one(original: Callable[..., Any], chunk: Any, dtype: str) -> Any:
    """What storage_data says of a chunk begins a byte late."""
    return original(chunk._replace(begin=chunk.begin + 1), dtype)


@fault(kills="CKPT-427", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata")
def metadata_error_as_text(original: Callable[..., Any], reader: Any, *arguments: Any, **options: Any) -> Any:
    """An error of read_metadata lacks its fields got and expected."""
    try:
        return original(reader, *arguments, **options)
    except TwinproofError as error:
        if "rank" in options:
            raise
        raise CorruptionError(str(error), got=None, expected=None, where=None) from None


def _blames_another(original: Callable[..., Any], tensor: Any, where: str) -> None:
    try:
        original(tensor, where)
    except TwinproofError as error:
        raise DistributedError("another rank failed", got=str(error), expected=None, where=None) from None


own_failure_is_another_ranks = patched(
    "A tensor that cannot be stored is said to be another rank's failure.",
    wrap("refimpl.checkpoint:check_storable", _blames_another),
    kills="CKPT-428",
)


def _taken(*arguments: Any, **options: Any) -> None:
    """Whatever is given."""


any_backend = patched(
    "load_file takes any backend.",
    swap("twinproof.checkpoint.shards:check_backend", _taken),
    kills="CKPT-429",
    of="refimpl",
)
own_failure_is_another_ranks_fast = patched(
    "A tensor that cannot be stored is said to be another rank's failure.",
    wrap("fastimpl.checkpoint.writer:check_storable", _blames_another),
    kills="CKPT-428",
)
any_backend_fast = patched(
    "load_file takes any backend.",
    swap("twinproof.checkpoint.shards:check_backend", _taken),
    kills="CKPT-429",
    of="fastimpl",
)

place_asked_of_an_object = patched(
    "Whether a writer can save at a place has to be asked of a writer.",
    swap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.validate_checkpoint_id", lambda writer, place: True),
    kills="CKPT-426",
)

other_ranks_items_nowhere = patched(
    "Of items of other ranks the metadata of a save says no file.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._placed",
        "if self.options.writes_shards",
        "if self.options.writes_shards or result.index.offset",
    ),
    kills="CKPT-607",
)
bytes_before_the_cast = patched(
    "The metadata of a save counts bytes as they were before an export cast.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._result",
        "dtype.itemsize",
        "item.tensor_data.properties.dtype.itemsize",
    ),
    kills="CKPT-607",
)
shards_begin_at_0 = patched(
    "The metadata of a save of shards says no offset.",
    mutated("twinproof.checkpoint.shards:write_shards", "{name: (file, begin)", "{name: (file, 0)"),
    kills="CKPT-607",
)
none_is_nothing = patched(
    "An error that got None says nothing of what it got.",
    mutated(
        "twinproof.errors:TwinproofError.__init__",
        'f"{message}; got: {got}; expected',
        'f"{message}; got: {got or message}; expected',
    ),
    kills="CKPT-678",
)
where_lost_on_the_way = patched(
    "An error that another rank sends says no where.",
    mutated(
        "twinproof.errors:TwinproofError.__reduce__",
        '"where": self.where}',
        '"where": None}',
    ),
    kills="CKPT-678",
)

errno_stays_behind = patched(
    "An error that is sent to another rank loses what the system said.",
    mutated("twinproof.errors:TwinproofError.__reduce__", "isinstance(self, OSError)", "False"),
    kills="CKPT-678",
)

missing_names_stay = patched(
    "A planner tells names that an earlier load of it lacked.",
    mutated(
        "twinproof.checkpoint.planners:HuggingFaceLoadPlanner.create_local_plan",
        "self.missing_keys = sorted(self.state_dict.keys() - saved.keys())",
        "self.missing_keys = sorted(self.state_dict.keys() - saved.keys()) or self.missing_keys",
    ),
    kills="CKPT-429",
)


groups_that_travel = patched(
    "A writer says nothing of what cannot travel with it.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.__getstate__",
        '{**self.__dict__, "group": None, "_owns_group": False}',
        "dict(self.__dict__)",
    ),
    kills="CKPT-821",
)
nothing_found_is_none = patched(
    "What was found of nothing is nothing.",
    mutated("twinproof.checkpoint.catalog:Catalog.__bool__", "return True", "return bool(len(self))"),
    kills="CKPT-821",
)
