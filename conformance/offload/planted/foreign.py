"""Faults in which part moves, in when memory goes, and in what optimizers of other makers get."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"
BOOKS = "twinproof.offload.plan"
COPIED_OUT = "twinproof.offload.offloader:_CopiedOut"
DRIVER = "twinproof.offload.driver"


def _bug(id: str, sentence: str, requirement: str, patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, (requirement,), target, patch)


def _everything(original: Any, offloader: Any, states: bool = True, masters: bool = True, **flags: Any) -> None:
    original(offloader)
    if not states and flags.get("offload_optimizer_states"):
        original(offloader, states, **flags)


def _at_once(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    original(offloader, *flags, **named)
    offloader._copied_out.release(offloader.plan, offloader.transfers)


def _old_copies(original: Any, copied_out: Any, plan: Any, transfers: Any) -> None:
    class Same:
        """Equal to every version."""

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    copied_out._noted = {key: (tensor, Same()) for key, (tensor, _) in copied_out._noted.items()}
    original(copied_out, plan, transfers)


def _in_parts(original: Any, offloader: Any, arithmetic: Any) -> None:
    groups = offloader.optimizer.param_groups
    offloader._bring_all()
    try:
        for group in groups:
            for param in group["params"]:
                offloader.optimizer.param_groups = [{**group, "params": [param]}]
                arithmetic()
    finally:
        offloader.optimizer.param_groups = groups
        if offloader.options.release == "at_offload":
            offloader.offload()


def _without_options(original: Any, driver: Any) -> Any:
    made = original(driver)

    def step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        return made.__func__(optimizer, *arguments)

    return type(made)(step, driver.optimizer)


def _none_known(kind: type) -> None:
    del kind


def _shapes_of_params(original: Any, plan: Any, param: Any, state: Any, options: Any, where: str) -> None:
    was, plan.is_separable = plan.is_separable, True
    try:
        original(plan, param, state, options, where)
    except Exception:
        state.clear()
    finally:
        plan.is_separable = was


def _masters_stay(original: Any, given: Any) -> Any:
    return original(given)[0], []


def _dulled(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    original(offloader, *flags, **named)
    if offloader.masters is not None and offloader.options.release == "on_request":
        with torch.no_grad():
            for master in offloader.masters.parameters():
                master.copy_(master.bfloat16())


PLANTED = (
    _bug("flags_ignored", "offload() ignores its flags.", "OPT-250", wrap(f"{BASE}.offload", _everything)),
    _bug("released_at_once", "offload() lets the device's memory go.", "OPT-251", wrap(f"{BASE}.offload", _at_once)),
    _bug(
        "written_in_between", "A write after the copy is lost.", "OPT-251", wrap(f"{COPIED_OUT}.release", _old_copies)
    ),
    _bug("masters_rounded", "Masters lose bits when they are copied.", "OPT-259", wrap(f"{BASE}.offload", _dulled)),
    _bug(
        "cut_into_parts", "An unknown optimizer is cut into parts.", "OPT-252", wrap(f"{BASE}._step_whole", _in_parts)
    ),
    _bug(
        "options_of_steps_lost",
        "A step gets its closure only.",
        "OPT-257",
        wrap(f"{DRIVER}:StepDriver._make", _without_options),
    ),
    _bug(
        "subclass_unknown",
        "A subclass counts as unknown.",
        "OPT-253",
        swap("twinproof.offload.plan:known_kind", _none_known),
    ),
    _bug(
        "shapes_of_params",
        "States of another shape than the parameter's are dropped.",
        "OPT-258",
        wrap("twinproof.offload.plan:_check_state", _shapes_of_params),
    ),
    _bug(
        "shared_memory_parted",
        "Views of one another are moved apart.",
        "OPT-256",
        swap(f"{BOOKS}:check_separate", lambda param, state, number: None),
    ),
    _bug(
        "masters_of_wrapper_stay",
        "The masters of a wrapper stay on the device.",
        "OPT-254",
        wrap("twinproof.offload.offloader:unwrapped", _masters_stay),
    ),
)
