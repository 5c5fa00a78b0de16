"""The pretend device refuses what a GPU refuses, counts what the host waits for, and is silent on right programs."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import Mismatch
from conformance.harness.devices import is_kept_from
from conformance.provers.pretend_device import (
    Counts,
    HostReadError,
    MixedPlacesError,
    PretendDevice,
    PretendEngine,
    Traffic,
    on_host,
)
from twinproof.errors import UnsupportedError

N = 4


def _values(device: PretendDevice) -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32).to(device.device)


def test_values_and_gradients_are_those_of_the_host() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    data = torch.randn(7, 3)
    twin = copy.deepcopy(model)
    with PretendDevice() as device:
        model.to(device.device)
        for module, given in ((model, data.to(device.device)), (twin, data)):
            # Adam divides by numbers, which a GPU does in another way.
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                module(given).pow(2).sum().backward()
                optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.device.type == "pretend"
        assert torch.equal(on_host(mine), theirs)
    device.check()
    # Five tensors went there, each in a copy that the host waits for; nothing came back.
    assert device.counts().to_host == Traffic()
    assert device.counts().host_waits == device.counts().to_device.count == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_number_divides_as_its_reciprocal_multiplies(dtype: torch.dtype) -> None:
    given = torch.arange(1, 200).to(dtype)
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = (given.to(computed) * (torch.ones((), dtype=computed) / 3)).to(dtype if dtype.is_floating_point else None)
    with PretendDevice() as device:
        mine = given.to(device.device)
        out = torch.empty_like(wanted, device=device.device)
        torch.div(mine, 3, out=out)
        found = [mine / 3, mine / torch.tensor(3), out]
        if dtype.is_floating_point:
            found.append(mine.clone().div_(3))
        by_itself = mine / torch.full_like(mine, 3)
        whole = torch.div(mine, 3, rounding_mode="floor")
    for value in found:
        assert value.dtype == wanted.dtype
        assert torch.equal(on_host(value), wanted)
    assert torch.equal(on_host(by_itself), given / torch.full_like(given, 3))
    assert torch.equal(on_host(whole), torch.div(given, 3, rounding_mode="floor"))
    # Else nobody could tell the two apart. Halves of a number have room for the difference.
    assert dtype is torch.bfloat16 or not torch.equal(wanted, given / 3)


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.stack([there[0], here[0]]),
        lambda there, here: there.index_add_(0, torch.tensor([0]), there[:1]),
        lambda there, here: here[torch.tensor([1], device=there.device)],
        lambda there, here: there.add_(here),
        lambda there, here: torch.bucketize(there, here),
        lambda there, here: torch.randn(2, device=there.device, generator=torch.Generator()),
        lambda there, here: torch.equal(there, here),
    ],
)
def test_an_operator_with_operands_in_two_places_is_refused_with_its_line(mix: Callable[..., Any]) -> None:
    with PretendDevice() as device, pytest.raises(MixedPlacesError, match=r"meta/test_pretend_device.py:\d+"):
        mix(_values(device), torch.zeros(N))


def test_a_mix_that_the_program_swallows_is_still_known() -> None:
    with PretendDevice() as device, contextlib.suppress(RuntimeError):
        _values(device).add(torch.zeros(N))
    with pytest.raises(Mismatch, match=r"mix: aten::add at meta/test_pretend_device.py"):
        device.check()


def test_a_mix_in_a_backward_is_found() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * torch.full((N,), 2.0)

    with PretendDevice() as device, pytest.raises(MixedPlacesError, match=r"test_pretend_device.py:\d+ backward"):
        Wrong.apply(_values(device).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def test_what_a_hook_or_an_operator_raises_in_a_backward_reaches_the_caller() -> None:
    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0].cpu()

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("a hook's own")

    with PretendDevice() as device:
        leaf = _values(device).requires_grad_()
        # The product's backward is torch's own code, which multiplies by the gradient of the host.
        with pytest.raises(MixedPlacesError, match="aten::mul"):
            Back.apply(leaf * _values(device)).sum().backward()  # type: ignore[no-untyped-call]
        leaf.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="a hook's own"):
            (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]


def test_a_device_that_comes_after_the_first_backward_differentiates_too(tmp_path: Path) -> None:
    program = """
import threading, torch
torch.ones(1, requires_grad=True).backward()
from conformance.provers.pretend_device import PretendDevice
with PretendDevice() as device:
    def step():
        value = torch.ones(3, device=device.device, requires_grad=True)
        (value * 2).sum().cpu().backward()
        assert value.grad.tolist() == [2, 2, 2]
    step()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    print(sorted({event.where for event in device.events if "MulBackward0" in event.where}))
"""
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    found = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "program.py:8 step, in MulBackward0" in found.stdout


def test_nobody_finds_the_device_who_does_not_name_it() -> None:
    PretendDevice()
    assert not torch.accelerator.is_available()


def test_scalars_of_the_host_are_values_where_a_kernel_takes_them_so() -> None:
    with PretendDevice() as device:
        there, scalar = _values(device), torch.tensor(2.0)
        begin = device.mark
        for made in (there * scalar, torch.where(there > 1, there, scalar), there.masked_fill(there > 1, scalar)):
            assert made.device == device.device
        there.fill_(scalar)
    device.check()
    device.check_no_waits(begin)
    options: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    param, grad, first, second = ([_values(device)] for _ in range(4))
    step = [torch.tensor(1.0)]
    with pytest.raises(MixedPlacesError):
        torch._fused_adamw_(param, grad, first, second, [], step, amsgrad=False, maximize=False, **options)


@pytest.mark.parametrize(
    "look",
    [
        lambda value: value.sum().item(),
        lambda value: bool(value.sum()),
        lambda value: int(value[1]),
        lambda value: [0, 1, 2][value.long()[1]],
        lambda value: value.tolist(),
        lambda value: value.cpu(),
        lambda value: value.to("cpu", non_blocking=True),
        lambda value: torch.empty(N).copy_(value, non_blocking=True),
        lambda value: pickle.dumps(value),
        lambda value: value.nonzero(),
        lambda value: value[value > 1],
        lambda value: value.masked_select(value > 1),
        lambda value: torch.repeat_interleave(value.long()),
        lambda value: torch.equal(value, value),
        lambda value: value.unique(),
        lambda value: value[torch.tensor([1, 2])],
        lambda value: torch.tensor([1, 2], device=value.device),
        lambda value: torch.ones(2).to(value.device),
    ],
)
def test_what_makes_the_host_wait_is_counted_with_its_line(look: Callable[[torch.Tensor], Any]) -> None:
    with PretendDevice() as device:
        value = _values(device)
        begin = device.mark
        look(value)
    assert device.counts(begin).host_waits == 1
    with pytest.raises(Mismatch, match=r"test_pretend_device.py:\d+"):
        device.check_no_waits(begin)
    device.check()


def test_what_stays_on_the_device_waits_for_nothing() -> None:
    with PretendDevice() as device:
        value, index = _values(device), torch.arange(N, device=device.device)
        begin = device.mark
        value.add_(1).cumsum(0).view(2, 2).t().contiguous().sum()
        value[index].mul(2)
        value[1:3].zero_()
        value[value > 1] = 0.0
        value.repeat_interleave(index, output_size=6)
        torch.zeros_like(value).copy_(value)
        value.clone().record_stream(torch.Stream(device=device.device))
    device.check()
    device.check_no_waits(begin)
    counts = device.counts(begin)
    assert counts.launches > 0
    assert counts.to_device == counts.to_host == Traffic()


def test_copies_are_counted_by_direction_bytes_and_kind_of_memory() -> None:
    with PretendDevice() as device:
        pinned = device.pinned_empty(4 * N).view(torch.float32)
        there = torch.empty(N, device=device.device)
        there.copy_(pinned, non_blocking=True)
        pinned.copy_(there, non_blocking=True)
        assert device.counts() == Counts(0, 0, Traffic(1, 16), Traffic(1, 16))
        there.copy_(torch.zeros(N), non_blocking=True)
        assert device.counts().host_waits == 0
        assert device.counts().to_device == Traffic(2, 32, pageable_count=1)
        there.copy_(pinned)
        assert device.counts().host_waits == 1
        there[torch.tensor([0])]
        assert device.counts().to_device == Traffic(4, 56, pageable_count=2, hidden_count=1)


def test_memory_of_the_device_is_not_the_hosts() -> None:
    with PretendDevice() as device:
        value = _values(device)
        for read in (value.numpy, value.__array__, value.__dlpack__):
            with pytest.raises(HostReadError):
                read()
        with pytest.raises(HostReadError):
            value.pin_memory()
        # An address identifies memory, and leads nowhere.
        assert value.data_ptr() == value.view(2, 2).data_ptr() == value.untyped_storage().data_ptr()
        assert value.data_ptr() != on_host(value).data_ptr()
        assert [event.kind for event in device.events].count("address") == 3
    with pytest.raises(Mismatch, match="numpy"):
        device.check()


def test_every_thread_is_watched() -> None:
    with PretendDevice() as device:
        value = _values(device)
        thread = threading.Thread(target=lambda: torch.zeros(2, device=device.device).tolist())
        begin = device.mark
        thread.start()
        thread.join()
        assert device.counts(begin).host_waits == 1
    value.tolist()
    assert device.counts(begin).host_waits == 1


def test_shapes_change_in_place() -> None:
    with PretendDevice() as device:
        value = _values(device)
        value.resize_(2 * N).zero_()
        value.unsqueeze_(0).t_()
        assert (tuple(value.shape), value.stride()) == ((2 * N, 1), (1, 2 * N))
        assert (value + 1).tolist() == [[1.0]] * (2 * N)
        found = torch.empty(0, device=device.device)
        torch.add(value, 1, out=found)
        assert found.shape == value.shape


def test_layouts_without_strides_are_refused_by_name() -> None:
    with PretendDevice() as device, pytest.raises(UnsupportedError, match="layout"):
        _values(device).to_sparse()


def test_a_parameter_is_parked_on_the_host_and_comes_back() -> None:
    with PretendDevice() as device:
        param = torch.nn.Parameter(_values(device))
        memory = device.pinned_empty(4 * N).view(torch.float32)
        memory.copy_(param.detach(), non_blocking=True)
        begin, there = device.mark, param.detach()
        param.data = memory
        assert param.device.type == "cpu"
        assert param.data_ptr() == memory.data_ptr()
        assert param.detach().add(1).tolist() == [1, 2, 3, 4]
        assert device.events[begin:] == []
        with pytest.raises(MixedPlacesError):
            param.detach().add(there)
        param.data = there
        param.detach().add_(there)
        assert param.device == device.device
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            torch.zeros(N).data = there


def test_a_deep_copy_is_another_memory_of_the_device() -> None:
    with PretendDevice() as device:
        kept = torch.arange(6.0).view(2, 3).t().to(device.device).requires_grad_()
        kept.square().sum().backward()  # type: ignore[no-untyped-call]
        module = torch.nn.Linear(3, 2).to(device.device)
        begin = device.mark
        made, again = copy.deepcopy([kept, kept])
        other = copy.deepcopy(module)
        assert made is again
        assert (made.device, made.requires_grad, made.stride()) == (kept.device, True, kept.stride())
        with torch.no_grad():
            kept.zero_()
            module.weight.zero_()
        assert on_host(made.detach()).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert made.grad is not None
        assert on_host(made.grad).tolist() == [[0, 6], [2, 8], [4, 10]]
        assert on_host(other.weight.detach()).count_nonzero() == 6
        device.check_no_waits(begin)
        with pytest.raises(RuntimeError, match="leaves"):
            copy.deepcopy(made * 2)


def test_data_of_another_tensor_is_taken() -> None:
    with PretendDevice() as device:
        value = _values(device)
        value.data = torch.ones(2, device=device.device)
        assert value.tolist() == [1, 1]
        again = pickle.loads(pickle.dumps(value))
        assert again.device == device.device
        assert on_host(copy.deepcopy(value)).data_ptr() != on_host(value).data_ptr()


def test_the_documented_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = Path(__file__).with_name("pretend_program.txt").read_text(encoding="utf-8")
    exec(compile(program, "pretend_program.py", "exec"), {})
    said = capsys.readouterr().out
    assert "aten::mul mixes host and device" in said
    assert "host_waits=1, launches=0" in said
    assert "1 wait: aten::_local_scalar_dense" in said


def test_an_engine_counts_copies_and_the_waits_that_it_is_asked_for() -> None:
    engine = PretendEngine()
    with PretendDevice() as device:
        there, here = engine.device_empty(8), engine.host_empty(8)
        assert engine.holds(there)
        assert not engine.holds(here)
        engine.copy(there, here)
        engine.copy(here, there)
        engine.synchronize(engine.event())
    assert device.counts() == Counts(1, 0, Traffic(1, 8), Traffic(1, 8))


def test_under_inference_tensors_move_as_they_do_elsewhere() -> None:
    with PretendDevice() as device, torch.inference_mode():
        value = torch.arange(4, device=device.device)
        begin = device.mark
        for moved in (value.cpu(), value.to("cpu"), value.to("cpu", torch.float32)):
            assert moved.device.type == "cpu"
            assert moved.tolist() == [0, 1, 2, 3]
        assert device.counts(begin).to_host.count == 3
        assert value.reshape(2, 2).device == device.device
        assert torch.ones(2).to(device.device).device == device.device


def test_a_process_that_works_on_a_gpu_makes_none() -> None:
    test_turned, test_values, test_places, test_sharded = (
        importlib.import_module(f"conformance.{name}")
        for name in ("offload.test_turned", "offload.test_values", "pipeline.test_places", "pipeline.test_sharded")
    )
    for device in ("cuda", "cuda-host"):
        # By a function of its module, in a function inside of it, and in a test that Hypothesis drives.
        assert is_kept_from(device, test_places.test_steps)
        assert is_kept_from(device, test_turned.test_no_elements)
        # One that has its device from the suite.
        assert not is_kept_from(device, test_values.test_any_partition)
        assert not is_kept_from(device, test_sharded.test_rows)
    assert not is_kept_from("pretend", test_places.test_steps)


def test_the_module_may_be_taken_away() -> None:
    """As by whoever restores the modules of before, which pytest's runs of tests within tests do."""
    with PretendDevice():
        pass
    del sys.modules["torch.pretend"]
    with PretendDevice() as device:
        assert torch.ones(2).to(device.device).device == device.device
