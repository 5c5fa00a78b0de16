"""A. Numerics of table-batched lookups: pooled rows, one update a row, every bit as the naive loops have it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import (
    assert_equal,
    assert_same_tensor,
    assert_within_derived,
    examples,
    raises,
    requirement,
    succeeds,
)
from conformance.kvstore.model import LR, dense_steps, f32, root
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.model import (
    DTYPES,
    OPTIMIZERS,
    Naive,
    assert_bits,
    features_of,
    lookups_of,
    random_tables,
    train,
)
from conformance.pipeline.sharding import placed
from twinproof.errors import ConfigError


@requirement(
    "PIPE-012",
    "A bag MUST be the sum of its rows from +0 in their order, a weighted row multiplied first, and a mean that sum "
    "divided by the number of ids; an empty bag MUST be zeros. Mixed dims, dtypes and shared features alike.",
)
@examples(40)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 7))
def test_pooled(pipeline: Any, seed: int, weighted: bool, stride: int) -> None:
    configs, weights, keys, limits = random_tables(pipeline, seed)
    batch = random_jagged(keys, limits, stride, seed, weighted=weighted)
    flat = batch.picked(features_of(configs)).flat()
    pooled = lookups_of(pipeline, configs, weights)(*flat)
    assert_bits(pooled.detach(), Naive(configs, weights, "sgd").pooled(batch), "pooled")


@requirement(
    "PIPE-010",
    "Occurrences of a row, in a bag, across bags and across features of a table, MUST be summed in their order from "
    "+0 and the row updated once, for every optimizer and dtype, bit for bit.",
)
@examples(40)
@given(st.integers(0, 10**6), st.sampled_from(OPTIMIZERS), st.booleans())
def test_steps(pipeline: Any, seed: int, optimizer: str, weighted: bool) -> None:
    configs, weights, keys, limits = random_tables(pipeline, seed)
    lookups, naive = (
        placed(pipeline, lookups_of(pipeline, configs, weights, optimizer)),
        Naive(configs, weights, optimizer),
    )
    for step in range(3):
        batch = random_jagged(keys, limits, 1 + step, seed + step, weighted=weighted)
        train(lookups, naive, batch, seed + step, f"step {step}")


@requirement("PIPE-011", "Rows that no id of a batch names MUST keep every bit of weight and state, Adam's included.")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_untouched(pipeline: Any, optimizer: str) -> None:
    config = pipeline.EmbeddingBagConfig(20, 8, "t", feature_names=["f"])
    lookups = lookups_of(pipeline, [config], [values_of((20, 8), 1)], optimizer)
    for ids in ([list(range(20))], [[3, 5]], [[5, 7]]):
        before = [lookups.weight(0).clone(), *(state.clone() for state in lookups.states(0).values())]
        batch = Jagged(["f"], [ids])
        lookups(*batch.flat()).backward(values_of((1, 8), 2))
        kept = torch.tensor([row not in ids[0] for row in range(20)])
        after = [lookups.weight(0), *lookups.states(0).values()]
        for name, old, new in zip(("weight", "momentum1", "momentum2"), before, after, strict=False):
            assert_bits(new[kept], old[kept], f"{optimizer} {name}")
            assert_equal(bool((new[~kept] != old[~kept]).any()), True, where=f"{optimizer} {name} of looked-up rows")


@requirement(
    "PIPE-013",
    "Weights of ids MUST get a gradient exactly when they require one: the bag's gradient times the row as it was "
    "looked up, within twice the error of the naive product.",
)
@examples(20)
@given(seed=st.integers(0, 10**6))
def test_weight_gradients(pipeline: Any, seed: int, tolerance_factor: float) -> None:
    configs, weights, keys, limits = random_tables(pipeline, seed)
    batch = random_jagged(keys, limits, 4, seed, weighted=True).picked(features_of(configs))
    ids, offsets, scale = batch.flat()
    assert scale is not None
    lookups = lookups_of(pipeline, configs, weights, "adagrad")
    pooled = lookups(ids, offsets, scale.clone().requires_grad_())
    grad = values_of(pooled.shape, seed)
    wanting = scale.clone().requires_grad_()
    again = lookups(ids, offsets, wanting)
    again.backward(grad)
    assert_equal(scale.grad is None, True, where="weights that want no gradient")
    results = []
    for dtype in (torch.float32, torch.float64):
        found, at, feature = [], 0, 0
        for config, weight in zip(configs, weights, strict=True):
            mean = config.pooling is pipeline.PoolingType.MEAN
            for _ in config.feature_names:
                g = grad[:, at : at + config.embedding_dim].to(dtype)
                for sample, bag in enumerate(batch.bags[feature]):
                    part = g[sample] / len(bag) if mean and bag else g[sample]
                    found += [float((part * weight[row].to(dtype)).sum()) for row in bag]
                at, feature = at + config.embedding_dim, feature + 1
        results.append(torch.tensor(found, dtype=dtype))
    assert wanting.grad is not None
    assert_within_derived(wanting.grad, results[0], results[1], factor=tolerance_factor, where="gradient of weights")


@requirement(
    "PIPE-014",
    "k steps MUST be k steps of the textbook's dense optimizer, within twice its own float32 error; k = 1, 2, 3.",
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_textbook(pipeline: Any, tolerance_factor: float, optimizer: str) -> None:
    config = pipeline.EmbeddingBagConfig(8, 36, "t", feature_names=["f"])
    weight = values_of((8, 36), 3)
    batch = Jagged(["f"], [[[row] for row in range(8)]])
    lookups, grads = lookups_of(pipeline, [config], [weight], optimizer), []
    for step in range(3):
        grads.append(values_of((8, 36), 10 + step))
        lookups(*batch.flat()).backward(grads[-1])
        naive, exact = (dense_steps(optimizer, weight, grads, dtype) for dtype in (torch.float32, torch.float64))
        assert_within_derived(lookups.weight(0), naive, exact, factor=tolerance_factor, where=optimizer)


@requirement(
    "PIPE-385",
    "With row-wise Adagrad a row MUST lose (lr / (sqrt(m) + eps)) times its gradient, each operation rounded once, so "
    "that it has the bits of FBGEMM's rows; m is the row's momentum after this step.",
)
def test_rowwise_factor(pipeline: Any) -> None:
    config, rate, eps = pipeline.EmbeddingBagConfig(32, 36, "t", feature_names=["f"]), 0.05, 1e-3
    optimizer = pipeline.FusedOptimizer("rowwise_adagrad", lr=rate, eps=eps)
    weight = values_of((32, 36), 3)
    lookups = pipeline.TableBatchedEmbeddingBags([config], optimizer=optimizer, weights=[weight.clone()])
    batch = Jagged(["f"], [[[row] for row in range(32)]])
    for step in range(3):
        grad = values_of((32, 36), 20 + step)
        lookups(*batch.flat()).backward(grad)
        divisor = root(lookups.states(0)["momentum1"].reshape(32, 1)) + f32(eps)
        weight = weight - (f32(rate) / divisor) * grad
        assert_bits(lookups.weight(0), weight, f"step {step}")


@requirement("PIPE-015", "Every dim from 1 to 1024 MUST work, multiples of 4 or not, side by side in one lookup.")
def test_dims(pipeline: Any) -> None:
    dims = [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        100,
        127,
        128,
        129,
        256,
        300,
        512,
        1000,
        1024,
    ]
    configs = [pipeline.EmbeddingBagConfig(5, dim, f"t{dim}", DTYPES[i % 3], ["f"]) for i, dim in enumerate(dims)]
    weights = [values_of((5, dim), i, DTYPES[i % 3]) for i, dim in enumerate(dims)]
    for optimizer in ("rowwise_adagrad", "adam"):
        lookups, naive = (
            placed(pipeline, lookups_of(pipeline, configs, weights, optimizer)),
            Naive(configs, weights, optimizer),
        )
        for step in range(2):
            train(lookups, naive, random_jagged(["f"], [5], 3, step), step, optimizer)


@requirement(
    "PIPE-017",
    "A row named 10^5 times in one batch MUST get the sum in order, the same bits for any number of threads and again.",
)
def test_heavy_duplicates(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(50, 20, "t", feature_names=["f"])
    bags = [[7] * 100 + [sample % 50] for sample in range(1000)]
    flat = Jagged(["f"], [bags]).flat()
    weight, grad = values_of((50, 20), 5), values_of((1000, 20), 6)
    sums = torch.zeros(50, 20).index_add_(0, flat[0], grad.repeat_interleave(101, dim=0))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            lookups = lookups_of(pipeline, [config], [weight])
            lookups(*flat).backward(grad)
            assert_bits(lookups.weight(0), weight - torch.tensor(LR) * sums, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@requirement("PIPE-018", "A lookup that the loss does not use MUST change nothing and count no step.")
def test_unused(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weight = values_of((6, 4), 1)
    lookups = lookups_of(pipeline, [config], [weight], "adagrad")
    other = torch.ones(3, requires_grad=True)
    unused = lookups(*Jagged(["f"], [[[1, 2]]]).flat())
    other.sum().backward()  # type: ignore[no-untyped-call]
    assert_equal(unused.requires_grad, True, where="the pooled rows")
    assert_bits(lookups.weight(0), weight, "weight")
    assert_equal(lookups.fused_optimizer.step_count, 0, where="steps")


@requirement(
    "PIPE-019",
    "The learning rate MUST be that of the moment of the backward, set by a scheduler or by hand, not of the lookup.",
)
def test_learning_rate(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weight, flat, grad = values_of((6, 4), 1), Jagged(["f"], [[[0, 3]]]).flat(), values_of((1, 4), 2)
    lookups = lookups_of(pipeline, [config], [weight])
    early = lookups(*flat)
    scheduler = torch.optim.lr_scheduler.LambdaLR(lookups.fused_optimizer, lambda epoch: 0.5**epoch)
    lookups.fused_optimizer.step()
    scheduler.step()
    early.backward(grad)
    expected = weight.clone()
    expected[[0, 3]] -= torch.tensor(LR * 0.5) * grad
    assert_bits(lookups.weight(0), expected, "after a scheduler's step")


@requirement("PIPE-117", "A copy of a module of lookups MUST go on as the original does, and apart from it.")
def test_copy(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weights = [values_of((6, 4), 1)]
    lookups, naive = placed(pipeline, lookups_of(pipeline, [config], weights, "adam")), Naive([config], weights, "adam")
    train(lookups, naive, random_jagged(["f"], [6], 3, 1), 1)
    again, apart = copy.deepcopy(lookups), copy.deepcopy(naive)
    for step in (2, 3):
        train(lookups, naive, random_jagged(["f"], [6], 3, step), step, f"original, step {step}")
    train(again, apart, random_jagged(["f"], [6], 3, 7), 7, "copy")


@requirement(
    "PIPE-446",
    "Lookups that are loaded from a state dict MUST go on as those that it was taken of, Adam's step among it; so MUST "
    "the learning rate and the step of the optimizer's own state dict; a step that is absent MUST be refused.",
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed(pipeline: Any, optimizer: str) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weights = [values_of((6, 4), 1)]
    lookups, naive = (
        placed(pipeline, lookups_of(pipeline, [config], weights, optimizer)),
        Naive([config], weights, optimizer),
    )
    for step in (1, 2):
        train(lookups, naive, random_jagged(["f"], [6], 3, step), step, f"step {step}")
    saved, handle = copy.deepcopy(lookups.state_dict()), copy.deepcopy(lookups.fused_optimizer.state_dict())
    model = torch.nn.ModuleDict({"lookups": lookups_of(pipeline, [config], weights, optimizer)})
    again = placed(pipeline, model)["lookups"]
    model.load_state_dict({f"lookups.{name}": value for name, value in saved.items()})
    train(again, copy.deepcopy(naive), random_jagged(["f"], [6], 3, 3), 3, "loaded")
    again.fused_optimizer.param_groups[0]["lr"] = 7.0
    again.fused_optimizer.load_state_dict(handle)
    assert_equal(again.fused_optimizer.step_count, 2, where="steps of the handle")
    assert_equal(again.fused_optimizer.param_groups[0]["lr"], LR, where="learning rate of the handle")
    absent = {name: value for name, value in saved.items() if name != "step"}
    with raises(RuntimeError, mentions=("step",)):
        again.load_state_dict(absent)
    assert_equal(again.load_state_dict(absent, strict=False).missing_keys, ["step"], where="what is missing")


@requirement(
    "PIPE-020", "The step MUST count backwards: lookups in evaluation, repeated ones and unused ones MUST NOT count."
)
def test_step_count(pipeline: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weights = [values_of((6, 4), 1)]
    lookups, naive = lookups_of(pipeline, [config], weights, "adam"), Naive([config], weights, "adam")
    for step in range(3):
        batch = random_jagged(["f"], [6], 3, step)
        with torch.no_grad():
            lookups(*batch.flat())
        lookups(*batch.flat())
        train(lookups, naive, batch, step, f"step {step}")
    assert_equal(lookups.fused_optimizer.step_count, 3, where="steps")


@requirement(
    "PIPE-363",
    "A backward MUST give gradients to the rows that were looked up: where ids, offsets or weights were written over "
    "meanwhile it MUST be refused and step nothing, and so MUST a second one that retain_graph did not announce.",
)
@pytest.mark.parametrize("kind", ["lookups", "bags", "rows"])
def test_backward_of_other_ids(pipeline: Any, kind: str) -> None:
    module, given = _one_table(pipeline, kind, torch.arange(24.0).reshape(6, 4))
    begun = {name: value.clone() for name, value in module.state_dict().items()}
    # Rows one by one are looked up by a copy of the ids, which nobody writes to.
    for name, tensor in () if kind == "rows" else given.items():
        out = _looked_up(pipeline, kind, module, given)
        tensor[1] += 1
        with raises(RuntimeError, mentions=["modified by an inplace operation"], where=f"{name} written over"):
            out.backward()
        tensor[1] -= 1
        _check_same(module, begun, f"after {name} were written over")
    out = _looked_up(pipeline, kind, module, given)
    out.backward(retain_graph=True)
    out.backward()
    stepped = {name: value.clone() for name, value in module.state_dict().items()}
    with raises(RuntimeError, mentions=["second time"], where="a third backward"):
        out.backward()
    _check_same(module, stepped, "after a third backward")


@requirement(
    "PIPE-687",
    "A table that is written over between a lookup and its backward MUST be refused there, as torch's EmbeddingBag "
    "does, where the weights of ids want a gradient, which is made of the rows; where they want none it MUST be taken.",
)
@pytest.mark.parametrize("table_count", [1, 2])
def test_backward_of_another_table(pipeline: Any, table_count: int) -> None:
    names = [f"t{index}" for index in range(table_count)]
    configs = [pipeline.EmbeddingBagConfig(6, 4, name, feature_names=[f"f{name}"]) for name in names]
    module = pipeline.EmbeddingBagCollection(configs, is_weighted=True)
    theirs = torch.nn.EmbeddingBag(6, 4, mode="sum")
    for wants_gradient in (False, True):
        scale = torch.ones(table_count).requires_grad_(wants_gradient)
        batch = pipeline.KeyedJaggedTensor(
            [f"f{name}" for name in names], torch.arange(table_count), scale, torch.ones(table_count, dtype=torch.int64)
        )
        ids, offsets = torch.arange(table_count), torch.arange(table_count)
        for made, last in (
            (module(batch).values().sum(), module.embedding_bags[names[-1]].weight),
            (theirs(ids, offsets, scale).sum(), theirs.weight),
        ):
            where = f"{type(made.grad_fn).__name__}, weights want a gradient: {wants_gradient}"
            with torch.no_grad():
                last.mul_(2)
            if wants_gradient:
                with raises(RuntimeError, mentions=["modified by an inplace operation"], where=where):
                    made.backward()
            else:
                with succeeds("a backward", where=where):
                    made.backward()


@requirement(
    "PIPE-688",
    "A learning rate of the optimizer in the backward that is no finite number MUST be refused by name there. That is "
    "no step: neither table nor step count changes, and the next backward is the one that it would be.",
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_no_learning_rate(pipeline: Any, is_sharded: bool) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    lookups = [lookups_of(pipeline, [config], [torch.ones(6, 4)], "adam") for _ in range(2)]
    batch = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    if is_sharded:
        plan, chosen = {"t": pipeline.table_wise(0)}, pipeline.FusedOptimizer("adam")
        plain = pipeline.EmbeddingBagCollection([config])
        with torch.no_grad():
            plain.embedding_bags["t"].weight.fill_(1)
        lookups = [pipeline.ShardedEmbeddingBagCollection(plain, plan, optimizer=chosen) for _ in range(2)]

    def pooled(module: Any) -> Any:
        made: Any = module(batch).values() if is_sharded else module(batch.values(), batch.offsets())
        return made.sum()

    got, expected = lookups
    for wrong in ("x", None, float("nan"), float("inf")):
        got.fused_optimizer.param_groups[0]["lr"] = wrong
        made = pooled(got)
        with raises(ConfigError, mentions=["where: lr", f"{wrong}"], where=f"a learning rate of {wrong}"):
            made.backward()
        assert_equal(got.fused_optimizer.step_count, 0, where=f"steps, after {wrong}")
    for rate in (0.1, torch.tensor(0.2)):
        for module in lookups:
            module.fused_optimizer.param_groups[0]["lr"] = rate
            pooled(module).backward()
        _check_same(got, {name: value.clone() for name, value in expected.state_dict().items()}, f"after {rate}")


def _check_same(module: Any, expected: dict[str, torch.Tensor], where: str) -> None:
    for name, value in module.state_dict().items():
        assert_same_tensor(value, expected[name], where=f"{name} {where}")


def _one_table(pipeline: Any, kind: str, weight: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """A module of one table, and the tensors of a batch with two ids in a bag."""
    given = {"ids": torch.tensor([0, 1, 2, 3])}
    if kind == "rows":
        return pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(6, 4, "t", feature_names=["f"])]), given
    given["weights"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    if kind == "bags":
        return pipeline.EmbeddingBagCollection([config], is_weighted=True), given
    given["offsets"] = torch.tensor([0, 2, 4])
    return lookups_of(pipeline, [config], [weight], "sgd"), given


def _looked_up(pipeline: Any, kind: str, module: Any, given: dict[str, torch.Tensor]) -> Any:
    """The sum of what is looked up."""
    if kind == "lookups":
        return module(given["ids"], given["offsets"], given["weights"]).sum()
    batch = pipeline.KeyedJaggedTensor(["f"], given["ids"], given.get("weights"), lengths=torch.tensor([2, 2]))
    found = module(batch)
    return (found["f"].values() if kind == "rows" else found.values()).sum()
