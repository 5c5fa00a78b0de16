"""States that their user swaps, hands to another parameter or cuts between steps, where they lie in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import requirement, succeeds
from conformance.offload.cases import PLAIN_SGD, Twins, proven_on, reread, values

SHAPES = ((8, 16), (8, 16), (8, 16), (4, 4))


def _swapped(optimizer: Any, params: list[Any]) -> None:
    state = optimizer.state
    state[params[0]], state[params[2]] = state[params[2]], state[params[0]]


def _exchanged(optimizer: Any, params: list[Any]) -> None:
    """Two states of one parameter."""
    state = optimizer.state[params[1]]
    state["exp_avg_sq"], state["max_exp_avg_sq"] = state["max_exp_avg_sq"], state["exp_avg_sq"]


def _handed(optimizer: Any, params: list[Any]) -> None:
    """The first parameter begins anew."""
    optimizer.state[params[2]] = optimizer.state.pop(params[0])


def _replaced(optimizer: Any, params: list[Any]) -> None:
    """New parameters, as many as there were, with the states of the old ones."""
    for i, old in enumerate(params):
        params[i] = torch.nn.Parameter(old.detach().clone())
        optimizer.param_groups[0]["params"][i] = params[i]
        optimizer.state[params[i]] = optimizer.state.pop(old)


def _pruned(optimizer: Any, params: list[Any]) -> None:
    """A new parameter with some rows of an old one, and of its states."""
    old = params[1]
    params[1] = torch.nn.Parameter(old.detach()[2:5].clone())
    optimizer.param_groups[0]["params"][1] = params[1]
    state = optimizer.state[params[1]] = optimizer.state.pop(old)
    for name, value in state.items():
        state[name] = value[2:5] if value.dim() else value


def _shortened(optimizer: Any, params: list[Any]) -> None:
    """A parameter and its states lose their last row."""
    params[0].data = params[0].data[:-1].clone()
    state = optimizer.state[params[0]]
    for name, value in state.items():
        state[name] = value[:-1] if value.dim() else value


def _thinned(optimizer: Any, params: list[Any]) -> None:
    """A new parameter with every second column of an old one, and of its states."""
    old = params[2]
    params[2] = torch.nn.Parameter(old.detach()[:, ::2].clone())
    optimizer.param_groups[0]["params"][2] = params[2]
    state = optimizer.state[params[2]] = optimizer.state.pop(old)
    for name, value in state.items():
        state[name] = value[:, ::2] if value.dim() else value


def _close_gaps(optimizer: Any) -> None:
    """What moves takes no gaps along, which a plain optimizer keeps."""
    for state in optimizer.state.values():
        state.update({name: value.contiguous() for name, value in state.items()})


EDITS = (_thinned, _shortened, _swapped, _exchanged, _handed, _replaced, _pruned)
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pretend", {"chunk_bytes": 0}),
    ("cpu", {}),
    ("pretend", {"fraction": 0.5}),
    ("pretend", {"release": "on_request"}),
)


@requirement(
    "OPT-516",
    "States that are swapped, handed to another parameter, or cut between steps MUST be what the next steps take, "
    "wherever they lie and whatever was prefetched.",
)
@pytest.mark.parametrize(("place", "options"), SETTINGS, ids=["whole", "chunks", "fraction", "on_request"])
def test_handed_over(offload: Any, place: str, options: dict[str, Any]) -> None:
    for edit in EDITS:
        where = f"{edit.__name__[1:]} with {options or 'chunks'}"
        with proven_on(place) as device:
            given = [values(shape, i) for i, shape in enumerate(SHAPES)]
            twins = Twins(offload, device, "AdamW", given, options={"amsgrad": True}, **options)
            for number in range(3):
                if number == 1:
                    twins.offloader.prefetch()
                if number == 2:
                    twins.offloader.offload()
                    twins.offloader.release_gpu_memory()
                    twins.offloader.settle_for_writing()
                if number:
                    edit(twins.plain, twins.plain_params)
                    _close_gaps(twins.plain)
                    edit(twins.optimizer, twins.params)
                # What somebody else keeps there is no state, and no tensor of a parameter.
                other = torch.zeros(2)
                twins.optimizer.state[other] = "a note"
                with succeeds("a step", where=where):
                    twins.step()
                del twins.optimizer.state[other]
            twins.check()


READINGS: dict[torch.dtype, Any] = {
    torch.float32: torch.Tensor.t,
    torch.complex64: lambda value: value.mul_(1 + 2j).conj(),
    torch.bfloat16: lambda value: value.view(torch.float16),
}


@requirement(
    "OPT-590",
    "A state that is replaced by a view of all of its memory, a transpose, a conjugate or one of another dtype, MUST "
    "be what the next steps take and offload, in host memory and on the device.",
)
@pytest.mark.parametrize(("place", "options"), SETTINGS, ids=["whole", "chunks", "fraction", "on_request"])
def test_read_otherwise(offload: Any, place: str, options: dict[str, Any]) -> None:
    # The pretend device does not compute with conjugates.
    readings = {dtype: way for dtype, way in READINGS.items() if place == "cpu" or not dtype.is_complex}
    for dtype, reading in readings.items():
        for is_brought in (False, True):
            with proven_on(place) as device:
                given = [values((8, 8), i, dtype) for i in range(2)]
                twins = Twins(offload, device, "SGD", given, options=PLAIN_SGD, **options)
                twins.step()
                for number in range(2):
                    if is_brought:
                        twins.offloader.to_device(twins.offloader.bundles)
                    twins.offloader.settle_for_writing()
                    for optimizer, params in ((twins.plain, twins.plain_params), (twins.optimizer, twins.params)):
                        state = optimizer.state[params[number]]
                        state["momentum_buffer"] = reading(state["momentum_buffer"])
                    # What moves is what is read, and no bit beside it.
                    state = twins.plain.state[twins.plain_params[number]]
                    state["momentum_buffer"] = state["momentum_buffer"].resolve_conj()
                    if is_brought:
                        twins.offloader.offload()
                        twins.offloader.release_gpu_memory()
                    with succeeds("a step", where=f"{dtype} with {options or 'chunks'}, brought: {is_brought}"):
                        twins.step()
                    twins.check()


@requirement(
    "OPT-517",
    "A state whose tensor is given other memory between steps, as by assigning its data, MUST be stepped and offloaded "
    "with what it holds then.",
)
def test_other_memory(offload: Any) -> None:
    with proven_on("cpu") as device:
        twins = Twins(offload, device, "Adam", options={})
        for number in range(5):
            if number in (2, 3):
                for optimizer, params in ((twins.plain, twins.plain_params), (twins.optimizer, twins.params)):
                    state = optimizer.state[params[number - 2]]["exp_avg"]
                    state.data = torch.ones(state.shape) * number
            with succeeds("a step", where=f"step {number}"):
                twins.step()
            twins.check()


def _added(optimizer: Any, params: list[Any]) -> None:
    params.append(torch.nn.Parameter(values((5, 4), 9)))
    optimizer.add_param_group({"params": params[-1:]})


@requirement(
    "OPT-518",
    "A state dict that is loaded behind an edit of the groups, a group that was added or parameters that were "
    "replaced, MUST be loaded as a plain optimizer loads it.",
)
@pytest.mark.parametrize("edit", [_added, _replaced], ids=["added", "replaced"])
def test_loaded_behind_edits(offload: Any, edit: Any) -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {"release": "on_request"})
    for options in kinds:
        with proven_on("cpu") as device:
            given = [values(shape, i) for i, shape in enumerate(SHAPES)]
            twins, saver = (Twins(offload, device, "Adam", given, options={}, **options) for _ in range(2))
            twins.step()
            saver.step()
            edit(saver.plain, saver.plain_params)
            edit(saver.optimizer, saver.params)
            saver.step()
            saved = saver.plain.state_dict()
            edit(twins.plain, twins.plain_params)
            edit(twins.optimizer, twins.params)
            twins.plain.load_state_dict(reread(saved))
            with succeeds("a load", where=f"{edit.__name__} with {options}"):
                twins.offloader.load_state_dict(reread(saved))
            twins.step()
            twins.check()
