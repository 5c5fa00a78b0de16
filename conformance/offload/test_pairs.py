"""Options of an offloader in pairs, and with kinds of optimizers, of parameters and of events between two steps.

Every case is a short program beside the plain optimizer. What it has to give follows from what each option means alone:
the plain optimizer's bits; those of a formula where a chunk is stepped by one; and the share of the bytes that moves.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import Mismatch, assert_equal, pairs_of, requirement
from conformance.offload.cases import adagrad_grows, assert_same_state, values
from conformance.offload.paired import (
    ADAMS,
    COVERED,
    EVENTS,
    KINDS,
    NUMBERS,
    OFFLOADING,
    PATHS,
    SHAPES,
    Arms,
    Case,
    LateEngine,
    is_moment,
    laid_out,
    placed_on,
)

THEN = ["nothing", "prefetched", "kept", "loaded", "attached anew"]
# What one of torch's other optimizers does is much the same for all: each takes its turn.
RARE = ("dampened", "rmsprop", "nadam", "rprop", "asgd", "adafactor", "muon", "decoupled")
TABLE: dict[str, list[Any]] = {
    "kind": ["adamw", "amsgrad", "sgd", "nesterov", "adagrad", "clipped", "rare"],
    # What is left out comes as a second event.
    "event": [event for event in EVENTS if event not in ("prefetched", "kept", "released")],
    "numbers": list(NUMBERS),
    "path": list(PATHS),
    "form": ["plain", "channels_last", "ones", "gaps"],
    "differs": [None, "states", "rate", "maximize", "path"],
    "gradients": ["all", "some", "late", "none", "turned"],
    "then": THEN,
    "sizes": list(SHAPES),
    "start": ["new", "ran"],
    **OFFLOADING,
}


def _is_half(case: Case) -> bool:
    return case["numbers"] in ("bfloat16", "float16", "mixed")


def _is_stepped_by_torch(case: Case) -> bool:
    """Whether torch itself can do it, in a way that is the same for a chunk as for all."""
    kind, path, event = case["kind"], case["path"], case["event"]
    if kind == "rare" and (path in ("fused", "not fused") or case["differs"] == "maximize"):
        return False
    # Torch's fused steps on the CPU take memory in its order, whatever the strides of the states are. SGD's has bits
    # that are a matter of chance in half precision, and fails where only some parameters of a group have a buffer.
    is_turned = event in ("bound", "loaded turned") or case["form"] == "gaps" or case["gradients"] == "turned"
    is_wrong = is_turned or ((_is_half(case) or case["gradients"] == "late") and kind in ("sgd", "nesterov"))
    if path == "fused" and (kind not in COVERED or case["differs"] == "path" or is_wrong):
        return False
    # One kernel steps it where it is asked to; those are cases of the other table.
    is_covered = kind in COVERED and (path in ("default", "foreach") or case["differs"] == "path")
    is_by_kernel = case["fused_update"] and is_covered and case["release"] == "at_offload"
    return _is_allowed(case) and not is_by_kernel


def _is_allowed(case: Case) -> bool:
    """Masters are all that an optimizer steps when it is attached to, and stay its own."""
    if case["kind"] == "adagrad" and case["event"] in ("grown", "came back") and not adagrad_grows():
        return False
    if "masters" not in case["numbers"]:
        return True
    return case["event"] != "came back" and (case["event"], case["then"]) != ("grown", "attached anew")


def _with_rare(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rare = itertools.cycle(RARE)
    for case in cases:
        if case["kind"] == "rare":
            case["kind"] = next(rare)
        if case["kind"] == "muon":
            case.update(path="default", differs=None if case["differs"] == "path" else case["differs"])
    return cases


CASES = _with_rare(pairs_of(TABLE, allowed=_is_stepped_by_torch))
# Some have moments, the first does not, and one has no elements: three options at once, each of which has its bytes.
CASES.append(
    {
        **CASES[0],
        "kind": "nesterov",
        "differs": "states",
        "numbers": "masters",
        "sizes": "corners",
        "fraction": 0.5,
    }
)
ON_CPU = pairs_of(
    {
        **TABLE,
        "kind": list(ADAMS),
        "event": [
            *("nothing", "written", "model loaded", "loaded turned", "came back"),
            *("attached anew", "brought", "bound", "option", "grown"),
        ],
        "numbers": ["float32", "masters", "mixed masters"],
        "path": ["single", "default", "foreach"],
        "form": ["plain", "channels_last", "ones"],
        "differs": [None, "states", "rate", "maximize"],
        "gradients": ["all", "some", "late", "turned"],
        "then": ["nothing", "prefetched", "loaded"],
        "release": ["at_offload"],
        "fused_update": [None, False],
        "step_device": ["cpu"],
    },
    allowed=_is_allowed,
)
# Every parameter of a chunk is one that the kernel covers: torch steps the others, and with them the whole chunk.
IN_SLOTS = pairs_of(
    {
        **TABLE,
        "kind": [kind for kind in COVERED if kind not in ("sgd", "dampened")],
        "event": ["nothing", "written", "came back", "attached anew", "brought", "grown"],
        "numbers": ["float32", "masters", "bfloat16", "mixed masters"],
        "path": ["default", "foreach"],
        "form": ["plain", "channels_last"],
        "differs": [None, "states", "rate", "maximize"],
        "gradients": ["all", "some", "none"],
        "then": ["nothing", "prefetched", "loaded"],
        "sizes": ["lines", "off"],
        "release": ["at_offload"],
        "fused_update": [True],
    },
    allowed=_is_allowed,
)


def _named(check: Callable[[Case], None], cases: Sequence[Case]) -> None:
    """Check each; an error of one says which it is."""
    for case in cases:
        try:
            check(case)
        except Mismatch as error:
            where = f"{error.where}; of the case {case}"
            raise Mismatch(error.message, got=error.got, expected=error.expected, where=where) from error
        except Exception as error:
            raise RuntimeError(f"of the case {case}") from error


def _program(offload: Any, device: str, case: Case, by: str) -> None:
    if device == "cuda" and (case["kind"], case["path"]) == ("adagrad", "fused"):
        # Torch has that one for the CPU alone.
        case = {**case, "path": "foreach"}
    with placed_on(device) as place:
        arms, grads = Arms(offload, place, case, by), case["gradients"]
        every = range(len(arms.params))
        arms.step(every[:1] if grads == "late" else ())
        arms.step({"some": every[1::2], "late": every[:1], "none": every}.get(grads, ()), turned=grads == "turned")
        EVENTS[case["event"]](arms)
        arms.step()
        arms.check()
        EVENTS[case["then"]](arms)
        arms.step(turned=grads == "turned")
        arms.check_places()
        arms.check()
        arms.offloader.close()
        arms.attached = False
        arms.step()
        arms.check()


@requirement(
    "OPT-422",
    "Any two options of an offloader, of an optimizer, of its parameters' memory and of what happens between two steps "
    "MUST together give the plain optimizer's bits, and move the share of the bytes that was asked for.",
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_torch(offload: Any, device: str, kind: str) -> None:
    _named(lambda case: _program(offload, device, case, "torch"), [case for case in CASES if case["kind"] == kind])


@requirement(
    "OPT-423",
    "Where a step on the CPU or one kernel has a formula of its own, any two such options MUST together give the "
    "formula's bits in all that moves, and the plain optimizer's in all that does not.",
)
@pytest.mark.parametrize("step", ["cpu", "slot"])
def test_steps_by_formula(offload: Any, device: str, step: str) -> None:
    # An implementation without such a kernel has the optimizer's own step.
    by = "torch" if step == "slot" and "fused_updates" not in offload.CAPABILITIES else step
    _named(lambda case: _program(offload, device, case, by), ON_CPU if step == "cpu" else IN_SLOTS)


# What is refused when an offloader is made: whether a case has it, and what its error says.
WHY_NOT_MADE: tuple[tuple[Callable[[Case], bool], str], ...] = (
    (lambda c: c["on_cpu"] and c["kind"] not in ADAMS, "UnsupportedError: not an optimizer that steps on the CPU"),
    (lambda c: c["on_cpu"] and c["release"] == "on_request", "ConfigError: states never come to the device"),
    (lambda c: c["on_cpu"] and c["fused_update"] is True, "ConfigError: a step on the CPU has its own formula"),
    (lambda c: c["on_cpu"] and c["option"] == "fused", "ConfigError: fused has no meaning there"),
    (lambda c: c["on_cpu"] and c["option"] == "capturable", "ConfigError: capturable has no meaning there"),
    (lambda c: c["on_cpu"] and c["option"] == "differentiable", "ConfigError: differentiable has no meaning there"),
    (lambda c: c["on_cpu"] and c["option"] == "betas", "ConfigError: betas has to be on the host"),
    (lambda c: c["on_cpu"] and _is_half(c), "ConfigError: the CPU steps float32 weights"),
    (lambda c: c["on_cpu"] and c["by"] == "wrapper", "ConfigError: the wrapper keeps and rounds its masters itself"),
    (lambda c: c["by"] == "wrapper" and "masters" in c["numbers"], "ConfigError: the wrapper keeps and rounds its"),
    (lambda c: c["stepped"] == "others too" and "masters" in c["numbers"], "ConfigError: the optimizer has to step"),
    (lambda c: c["by"] == "attached already", "OffloadConflictError: this optimizer is offloaded already"),
    (lambda c: c["engine"] == "none" and not c["on_cpu"], "OffloadConflictError: the parameters are on the CPU"),
)
MADE_OF: dict[str, list[Any]] = {
    "kind": ["adamw", "amsgrad", "nesterov", "rmsprop"],
    "option": [None, "fused", "capturable", "differentiable", "betas"],
    "numbers": ["float32", "masters", "bfloat16", "mixed masters"],
    "on_cpu": [True, False],
    "release": [None, "on_request"],
    "fused_update": [None, True],
    "by": ["plain", "wrapper", "attached already"],
    "stepped": ["all", "others too"],
    "engine": ["given", "none"],
}


def _two_at_a_time(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Any two values, all others usual: of several reasons one would hide the others."""
    usual = {name: values[0] for name, values in options.items()}
    found = [usual]
    for first, second in itertools.combinations(options, 2):
        found += [{**usual, first: a, second: b} for a in options[first] for b in options[second]]
    return [case for i, case in enumerate(found) if case not in found[:i]]


MADE = _two_at_a_time(MADE_OF)


def _error_of(call: Callable[[], Any]) -> str:
    """What a call raises, in words; empty if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _optimizer_of(offload: Any, case: Case) -> tuple[Any, Any]:
    """One that has run, and its masters."""
    kind, options, _ = KINDS[case["kind"]]
    dtypes = NUMBERS[case["numbers"]]
    params = [torch.nn.Parameter(values((4, 3), i, dtypes[i % len(dtypes)])) for i in range(2)]
    masters = offload.MasterWeights(params) if "masters" in case["numbers"] else None
    stepped = params if masters is None else list(masters.parameters())
    if case["stepped"] == "others too":
        stepped = [*stepped, torch.nn.Parameter(values((5,), 9))]
    optimizer = getattr(torch.optim, kind)(stepped, **options)
    for param in stepped:
        param.grad = torch.ones_like(param)
    optimizer.step()
    group = optimizer.param_groups[0]
    if case["option"] == "betas" and "betas" in group:
        group["betas"] = tuple(map(torch.tensor, group["betas"]))
    elif case["option"]:
        group[case["option"]] = True
    return optimizer, masters


def _look(optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and options, copied; what else the optimizer has, hooks by their number."""
    others = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    with _disable_current_modes():
        state = copy.deepcopy(torch.optim.Optimizer.state_dict(optimizer))
    return state, {name: len(value) if "hooks" in name else value for name, value in others.items()}


def _check_made(offload: Any, case: Case) -> None:
    optimizer, masters = _optimizer_of(offload, case)
    engine = LateEngine() if case["engine"] == "given" else None
    step_device = "cpu" if case["on_cpu"] else "device"
    options = {name: case[name] for name in ("release", "fused_update")}
    first = case["by"] == "attached already"
    if first and masters is not None:
        # Beside others it cannot be given them.
        masters.attach(optimizer)
    other = offload.OptimizerStateOffloader(optimizer, engine=LateEngine()) if first else None
    given = optimizer
    if case["by"] == "wrapper":
        given = SimpleNamespace(optimizer=optimizer, fp32_from_float16_groups=[optimizer.param_groups[0]["params"][:1]])
    state, attributes = _look(optimizer)
    made: list[Any] = []
    options.update(master_weights=masters, step_device=step_device, engine=engine)
    said = _error_of(lambda: made.append(offload.OptimizerStateOffloader(given, **options)))
    reasons = [words for applies, words in WHY_NOT_MADE if applies(case)]
    is_named = any(said.startswith(words) for words in reasons) if reasons else not said
    assert_equal(is_named, True, where=f"{said!r} is one of {reasons}")
    if reasons:
        now, attributes_now = _look(optimizer)
        assert_same_state(now, state)
        assert_equal(attributes_now, attributes, where="attributes of the optimizer")
    for offloader in (*made, *([other] if other else ())):
        offloader.close()
    left, _ = _look(optimizer)
    assert_same_state(left, state)


# What is refused between two steps: the error, and a call that raises it. Each returns what makes it right again.
Refusal = Callable[["Arms"], tuple[Callable[[], Any], Callable[[], Any]]]


def _new_gradients(arms: Arms) -> None:
    for i, param in enumerate(arms.params):
        param.grad = values(param.shape, 5000 + i, param.dtype)


def _sparse(arms: Arms) -> Any:
    _new_gradients(arms)
    last = arms.params[-1]
    last.grad = values(last.shape, 1, last.dtype).to_sparse()
    return arms.optimizer.step, lambda: None


def _stale(arms: Arms) -> Any:
    _new_gradients(arms)
    with torch.no_grad():
        arms.params[1].mul_(1)

    def refreshed() -> None:
        arms.offloader.refresh_masters()
        for plain, param in zip(arms.plain_params, arms.params, strict=True):
            plain.data.copy_(param.detach())

    return arms.optimizer.step, refreshed


def _captured(arms: Arms) -> Any:
    _new_gradients(arms)
    arms.place.engine.is_capturing = lambda: True
    return arms.optimizer.step, lambda: vars(arms.place.engine).pop("is_capturing")


def _spoilt(spoil: Callable[[dict[str, Any]], Any]) -> Refusal:
    """A state dict that does not fit, with other options in its first group."""

    def refusal(arms: Arms) -> Any:
        saved = arms.saved()
        saved["param_groups"][0]["lr"] = 77.0
        spoil(saved)
        return lambda: arms.offloader.load_state_dict(saved), lambda: None

    return refusal


def _grown_state(saved: dict[str, Any]) -> None:
    state = saved["state"][1]
    name = next(name for name, value in state.items() if is_moment(value))
    state[name] = values((3, 3, 3), 1)


def _option_turned(arms: Arms) -> Any:
    _new_gradients(arms)
    for group in arms.optimizer.param_groups:
        group["capturable"] = True
    return arms.optimizer.step, lambda: [group.update(capturable=False) for group in arms.optimizer.param_groups]


def _half_moment(arms: Arms) -> Any:
    _new_gradients(arms)
    arms.offloader.settle()
    state = arms.optimizer.state[arms.stepped[0]]
    kept = state["exp_avg"].clone()
    state["exp_avg"] = kept.bfloat16()

    def bound() -> None:
        state["exp_avg"] = kept
        arms.offloader.offload()

    return arms.optimizer.step, bound


def _with_gaps(arms: Arms) -> Any:
    _new_gradients(arms)
    param = arms.params[0]
    kept = param.data
    param.data = laid_out(kept, "gaps")
    param.grad = torch.zeros_like(param)

    def laid() -> None:
        param.data = kept

    return arms.optimizer.step, laid


REFUSALS: dict[str, tuple[str, Refusal]] = {
    "sparse": ("UnsupportedError: sparse gradients", _sparse),
    "captured": ("OffloadConflictError: a graph is being captured", _captured),
    "lacking": ("PlanError: states are missing", _spoilt(lambda saved: saved["state"][1].popitem())),
    "groups": (
        "PlanError: other parameter groups; got",
        _spoilt(lambda saved: saved["param_groups"][0]["params"].pop()),
    ),
    "shape": ("PlanError: a state of another shape", _spoilt(_grown_state)),
    "stranger": ("PlanError: states of no parameter", _spoilt(lambda saved: saved["state"].update({99: {}}))),
    "second": (
        "OffloadConflictError: this optimizer is offloaded already",
        lambda arms: (arms.attach, lambda: None),
    ),
    "flags": (
        "ConfigError: states and offload_optimizer_states are one flag",
        lambda arms: (lambda: arms.offloader.offload(states=False, offload_optimizer_states=True), lambda: None),
    ),
    "no masters": (
        "ConfigError: there are no masters",
        lambda arms: (arms.offloader.refresh_masters, lambda: None),
    ),
    "other masters": (
        "PlanError: these are other masters",
        lambda arms: (lambda: arms.offloader.load_masters([values((3,), 1)]), lambda: None),
    ),
    "stale": ("StaleMasterError: a parameter changed behind its master's back", _stale),
    "option of torch": ("AssertionError: If capturable=True", _option_turned),
    "option": ("ConfigError: capturable has no meaning there", _option_turned),
    "half moment": ("UnsupportedError: the CPU steps float32 moments", _half_moment),
    "gaps": ("UnsupportedError: a parameter with gaps", _with_gaps),
}
BEFORE = ["nothing", "prefetched", "brought"]


def _fitted(case: dict[str, Any]) -> dict[str, Any]:
    """What the refusal needs is what the case has."""
    refused = case["refused"]
    if refused in ("option", "half moment", "gaps"):
        case["step_device"] = "cpu"
    elif refused in ("option of torch", "no masters"):
        case["step_device"] = "device"
    if refused in ("no masters", "gaps"):
        case["numbers"] = "float32"
    elif refused in ("other masters", "stale") and case["numbers"] == "float32":
        case["numbers"] = "masters"
    if case["step_device"] == "cpu" or refused in ("option of torch", "lacking"):
        case["kind"] = "amsgrad" if case["kind"] == "nesterov" else case["kind"]
    if case["step_device"] == "cpu":
        case["release"] = "at_offload"
    return case


REFUSED = [
    _fitted(case)
    for case in pairs_of(
        {
            "refused": list(REFUSALS),
            "event": BEFORE,
            "kind": ["adamw", "nesterov", "amsgrad"],
            "numbers": ["float32", "masters", "mixed masters"],
            "step_device": ["device", "cpu"],
            "differs": [None, "rate"],
            "start": ["new", "ran"],
            "fraction": [1.0, 0.5],
            "chunk_bytes": [600, 0, 1],
            "slots": [2, 1],
            "pin_memory": [True, False],
            "release": ["at_offload", "on_request"],
            "fused_update": [None, False],
            "path": ["single"],
            "form": ["plain", "channels_last"],
            "sizes": ["off", "lines"],
        }
    )
]


def _check_refused(offload: Any, case: Case) -> None:
    with placed_on("cpu") as place:
        arms = Arms(offload, place, case, "cpu" if case["step_device"] == "cpu" else "torch")
        arms.step()
        EVENTS[case["event"]](arms)
        words, refusal = REFUSALS[case["refused"]]
        call, mended = refusal(arms)
        count = arms.offloader.stats().step_count
        said = _error_of(call)
        assert_equal(said.startswith(words), True, where=f"{said!r} begins with {words!r}")
        assert_equal(arms.offloader.stats().step_count, count, where="steps that were counted")
        mended()
        arms.check()
        arms.step()
        arms.check_places()
        arms.check()
        arms.offloader.close()


@requirement(
    "OPT-424",
    "Of any two options or events a refused pair MUST be refused by its name, when the offloader is made or between "
    "two steps, with nothing changed; any other MUST be taken.",
)
@pytest.mark.parametrize("when", ["made", "between steps"])
def test_refused(offload: Any, when: str) -> None:
    if when == "made":
        _named(lambda case: _check_made(offload, case), MADE)
    else:
        _named(lambda case: _check_refused(offload, case), REFUSED)
