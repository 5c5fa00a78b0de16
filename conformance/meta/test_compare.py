"""Each comparer is shown to fail on what it exists for; a comparer that always agrees would pass every other test."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from conformance.harness import (
    Mismatch,
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    assert_within_derived,
    raises,
)
from twinproof.errors import ConfigError


def _all_dtypes() -> list[torch.dtype]:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # Quantized dtypes need a quantizer, and those below a byte have no layout: nobody can store them.
    return sorted((dtype for dtype in dtypes if not _unstorable(str(dtype))), key=str)


def _unstorable(name: str) -> bool:
    return (
        "qint" in name
        or "quint" in name
        or name.removeprefix("torch.").lstrip("u") in {f"int{bits}" for bits in range(1, 8)}
    )


def _filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is called experimental
        tensor = torch.empty(shape, dtype=dtype)
    storage = tensor.untyped_storage()
    storage.copy_(torch.arange(storage.nbytes()).remainder(2).to(torch.uint8).untyped_storage())
    return tensor


@pytest.mark.parametrize("dtype", _all_dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_compares(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    got, expected = _filled(dtype, shape), _filled(dtype, shape)
    assert_same_tensor(got, expected)
    if got.numel() > 0:
        storage = got.untyped_storage()
        storage[storage.nbytes() - 1] = 1 - storage[storage.nbytes() - 1]
        with pytest.raises(Mismatch, match=f"1 of {got.numel()} elements differ") as caught:
            assert_same_tensor(got, expected, where="w")
        assert caught.value.where == f"w[{', '.join(str(size - 1) for size in shape)}]"


def _float_of(bits: int) -> torch.Tensor:
    return torch.tensor([0, bits], dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (_float_of(0x7FC00001), _float_of(0x7FC00000), "1 of 2 elements"),
        (torch.tensor([-0.0]), torch.tensor([0.0]), "1 of 1 elements"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtypes"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shapes"),
        (torch.zeros(0, 2), torch.zeros(2, 0), "shapes"),
        (torch.zeros(1), torch.zeros(()), "shapes"),
        ([0.0], torch.zeros(1), "not a tensor"),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), "1 of 1 elements"),
    ],
)
def test_tensors_that_look_alike_differ(got: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        assert_same_tensor(got, expected)


def test_strides_and_lazy_conjugation_are_not_differences() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert_same_tensor(tensor.t(), tensor.t().contiguous())
    assert_same_tensor(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))


def test_a_nan_payload_is_shown() -> None:
    with pytest.raises(Mismatch, match="0x7fc00001") as caught:
        assert_same_tensor(_float_of(0x7FC00001), _float_of(0x7FC00000), where="model.weight")
    assert caught.value.where == "model.weight[1]"
    assert caught.value.expected == "nan (0x7fc00000)"


def test_names_of_tensors() -> None:
    assert_same_tensors({"a": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(Mismatch, match=r"missing \['b'\], unexpected \['a'\]"):
        assert_same_tensors({"a": torch.ones(1)}, {"b": torch.ones(1)})
    with pytest.raises(Mismatch, match=r"where: +here:a\[0\]"):
        assert_same_tensors({"a": torch.ones(1)}, {"a": torch.zeros(1)}, where="here")


@pytest.mark.parametrize(("got", "offset"), [(b"abXd", 2), (b"abc", 3), (b"abcde", 4), (b"", 0)])
def test_bytes(tmp_path: Path, got: bytes, offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(got)
    assert_same_bytes(path, bytearray(got))
    for value in (got, memoryview(got), path, str(path)):
        with pytest.raises(Mismatch, match=f"first at offset {offset}"):
            assert_same_bytes(value, b"abcd")


def test_bytes_past_the_first_chunk() -> None:
    expected = bytes(3 << 20)
    got = bytearray(expected)
    got[(2 << 20) + 7] = 1
    with pytest.raises(Mismatch, match=str((2 << 20) + 7)):
        assert_same_bytes(got, expected)


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        (1, 2, "values differ"),
        ({"a": 1}, {"a": 1, "b": 2}, "at key 'b'"),
        ([1, 2], [1, 3], "at index 1"),
        ((1,), (1, None), "at index 1"),
        (float("nan"), float("nan"), "values differ"),
    ],
)
def test_plain_values(got: object, expected: object, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        assert_equal(got, expected)


def test_tensors_are_not_plain_values() -> None:
    with pytest.raises(TypeError, match="assert_same_tensor"):
        assert_equal(torch.ones(1), torch.ones(1))


def test_bounds() -> None:
    assert_le(1, 1)
    for value in (1.5, float("nan")):
        with pytest.raises(Mismatch, match="bound"):
            assert_le(value, 1)


def test_a_mismatch_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(Mismatch("m", got=torch.float32, expected=1, where="w")))
    assert (error.message, error.got, error.expected, error.where) == ("m", "torch.float32", 1, "w")


def test_derived_tolerance() -> None:
    exact = torch.tensor([1.0, 2.0, float("inf")], dtype=torch.float64)
    naive = torch.tensor([1.125, 2.0, float("inf")])
    assert_within_derived(torch.tensor([1.0, 2.25, float("inf")]), naive, exact)
    for wrong in ([1.0, 2.5, float("inf")], [float("nan"), 2.0, float("inf")], [1.0, 2.0, 3.0]):
        with pytest.raises(Mismatch):
            assert_within_derived(torch.tensor(wrong), naive, exact)
    with pytest.raises(Mismatch, match="dtype"):
        assert_within_derived(naive.half(), naive, exact)


def test_raises_finds_the_error_that_matters() -> None:
    with raises(ValueError, mentions=("file", "tensor")) as caught:
        raise ValueError("file and tensor")
    assert isinstance(caught.error, ValueError)
    with raises(ValueError, mentions=("file",)):
        raise ConfigError("no file", got=None, expected="a file", where="path")
    with raises(ValueError):
        raise RuntimeError("outer") from ValueError("inner")
    with raises(OSError, mentions=("disk",)) as caught:
        raise CheckpointException("save", {1: _wrap_exception(OSError("disk"))})
    assert isinstance(caught.outer, CheckpointException)


def test_raises_takes_no_folder_of_a_test_for_what_an_error_says() -> None:
    folder = "/tmp/pytest-of-root/pytest-27/test_of_a_file0"
    with raises(ValueError, mentions=("run/step-1", f"{folder}/run", "got: 3")):
        raise ConfigError("gone", got=3, expected=4, where=f"{folder}/run/step-1")
    for mention in ("27", "file", "root"):
        with pytest.raises(Mismatch, match=f"does not mention '{mention}'"), raises(ValueError, mentions=(mention,)):
            raise ConfigError("gone", got=3, expected=4, where=f"{folder}/run/step-1")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (None, "no error"),
        (TypeError("x"), "another error"),
        (ValueError("x"), "does not mention 'file'"),
        (CheckpointException("save", {0: _wrap_exception(TypeError("x"))}), "another error"),
        (ConfigError("no file", got=1, expected=2, where=None), "no where"),
        (ConfigError("no file", got=1, expected=None, where="path"), "nothing that was expected"),
    ],
)
def test_raises_is_not_satisfied(error: BaseException | None, message: str) -> None:
    def job() -> None:
        if error is not None:
            raise error

    with pytest.raises(Mismatch, match=message), raises(ValueError, mentions=("file",)):
        job()


def test_raises_refuses_a_string_of_letters() -> None:
    with pytest.raises(TypeError, match="collection of strings"):
        raises(ValueError, mentions="file")


def _mishandle() -> None:
    try:
        raise ValueError("handled")
    except ValueError:
        raise TypeError("bug in the handler")  # noqa: B904 - the implicit context is the point


def test_raises_does_not_follow_implicit_contexts() -> None:
    with pytest.raises(Mismatch, match="another error"), raises(ValueError):
        _mishandle()


def test_raises_lets_a_comparison_and_a_skip_through() -> None:
    with pytest.raises(Mismatch, match="bound"), raises(ValueError):
        assert_le(2, 1)
    with pytest.raises(pytest.skip.Exception), raises(BaseException):
        pytest.skip("absent")
