"""Training: the optimizer in the row is the optimizer, and weight and state are of one step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_within_derived, examples, raises, requirement, succeeds
from conformance.kvstore.cases import Clock, assert_bits, assert_contents, contents, ids_of, store_of
from conformance.kvstore.model import BETA1, BETA2, EPS, LR, dense_steps, f32, one_step, root
from twinproof.errors import ConfigError, ShapeError
from twinproof.optimizers import FUSED_OPTIMIZERS


class _Model(torch.nn.Module):
    """Both lookups, and a dense part over them."""

    def __init__(self, kvstore: Any) -> None:
        super().__init__()
        layout = kvstore.RowLayout(4, optimizer="adam")
        self.store = kvstore.KVStore({"a": layout, "b": layout}, optimizer_in_row=True, clock=Clock())
        self.bag = kvstore.KVEmbeddingBag(self.store, table="a")
        self.embedding = kvstore.KVEmbedding(self.store, table="b")
        self.dense = torch.nn.Linear(8, 3)

    def forward(self, bags: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dense(torch.cat([self.bag(bags), self.embedding(ids)], dim=1))).sum()


HYPER = {"eps": EPS, "beta1": BETA1, "beta2": BETA2}


@requirement(
    "KV-076",
    "k steps on the rows of a store MUST be k steps of the dense optimizer, within twice the error of the textbook "
    "formulas in float32, and bit for bit the same when it is saved, loaded and continued in the middle.",
)
def test_steps(kvstore: Any, tmp_path: Path, tolerance_factor: float) -> None:
    generator = torch.Generator().manual_seed(4)
    for optimizer in FUSED_OPTIMIZERS:
        layout, clock = kvstore.RowLayout(12, optimizer=optimizer), Clock()
        store = store_of(kvstore, layout, clock=clock, initializer=kvstore.Initializer.uniform(-1, 1))
        ids = ids_of(range(-20, 20))
        initial = store.get("t", ids)
        grads = [torch.randn(40, 12, generator=generator) for _ in range(8)]
        continued = None
        for step, grad in enumerate(grads, start=1):
            for each in (store, continued):
                if each is not None:
                    each.apply_gradients("t", ids, grad, LR, step, **HYPER)
            if step == 4:
                kvstore.save(store, tmp_path / optimizer, durable=False)
                continued = store_of(kvstore, layout, clock=clock, seed=99)
                kvstore.load(continued, tmp_path / optimizer)
        assert continued is not None
        assert_contents(continued, contents(store), where=f"{optimizer} continued")
        naive, exact = (dense_steps(optimizer, initial, grads, dtype) for dtype in (torch.float32, torch.float64))
        assert_within_derived(store.get("t", ids), naive, exact, factor=tolerance_factor, where=optimizer)


@requirement(
    "KV-092",
    "Duplicates MUST be reduced first, in float32 from +0 in ascending position, and the step MUST be the documented "
    "operations to the bit, for every optimizer and dtype.",
)
@examples(30)
@given(
    st.sampled_from(FUSED_OPTIMIZERS),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    st.integers(1, 30),
    st.integers(0, 1000),
)
def test_exact_step(kvstore: Any, optimizer: str, dtype: torch.dtype, keys: list[int], step: int, seed: int) -> None:
    layout = kvstore.RowLayout(11, dtype, optimizer)
    store = store_of(kvstore, layout)
    generator = torch.Generator().manual_seed(seed)
    for number in (step, step + 1):
        grads = torch.randn(len(keys), 11, generator=generator)
        before = {key: one_row(store, key) for key in set(keys)}
        store.apply_gradients("t", ids_of(keys), grads, LR, number, **HYPER)
        for key, (weight, m1, m2) in before.items():
            total = torch.zeros(11)
            for position, other in enumerate(keys):
                total = total + grads[position] if other == key else total
            expected = one_step(optimizer, weight.float(), total, m1, m2, number, **HYPER)
            found = one_row(store, key)
            for name, got, wanted, kind in zip(
                ("weight", "m1", "m2"), found, expected, (dtype, None, None), strict=True
            ):
                assert_bits(got, wanted if kind is None else wanted.to(kind), where=f"{optimizer} {name} of {key}")


def one_row(store: Any, key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight and states of one row; a state that is not there is empty."""
    slots, ids = store.layout("t").state_slots, ids_of([key])
    states = [store.get_state("t", n, ids)[0] if n in slots else torch.zeros(0) for n in ("momentum1", "momentum2")]
    return store.get("t", ids)[0], states[0], states[1]


@requirement(
    "KV-160",
    "LAMB MUST scale the step of each row to the norm of its weights, by itself; a row of zeros and a row without a "
    "gradient MUST be stepped as by Adam.",
)
def test_scaled_rows(kvstore: Any) -> None:
    weights = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1.0, -2.0, 2.0]])
    grads = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    found: dict[str, torch.Tensor] = {}
    for optimizer in ("lamb", "adam"):
        store = store_of(kvstore, kvstore.RowLayout(3, optimizer=optimizer))
        store.set("t", ids_of([1, 2, 3]), weights)
        store.apply_gradients("t", ids_of([1, 2, 3]), grads, LR, **HYPER)
        found[optimizer] = store.get("t", ids_of([1, 2, 3]))
    assert_bits(found["lamb"][1:], found["adam"][1:], where="a row of zeros, and one without a gradient")
    for row in range(3):
        empty = torch.zeros(3)
        expected, _, _ = one_step("lamb", weights[row], grads[row], empty, empty, 1, **HYPER)
        assert_bits(found["lamb"][row], expected, where=f"row {row}")


@requirement(
    "KV-077",
    "Weight and every state that is saved of an id MUST come from the same step, while training goes on.",
)
def test_one_moment(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adagrad"), initializer=kvstore.Initializer.zeros())
    ids = ids_of(range(50))
    for form in ("rows", "separate"):
        for step in range(1, 4):
            store.apply_gradients("t", ids, torch.ones(50, 4), 1.0, step)
            state = store.state_dict(chunk_rows=9)
            weights, states = [], []
            for start in range(0, 50, 9):
                count = min(9, 50 - start)
                weights.append(state["t.weight"].narrow(0, start, count))
                store.apply_gradients("t", ids, torch.ones(50, 4), 1.0, step + 1)
                states.append(state["t.momentum1"].narrow(0, start, count))
            # With gradients of one, momentum1 counts the steps and the weight is minus the sum of 1 / sqrt(k).
            momentum = torch.cat(states)
            assert_equal(torch.unique(momentum).numel(), 1, where="one step for all rows")
            steps = int(momentum[0, 0])
            expected = f32(0.0)
            for k in range(1, steps + 1):
                expected = expected - f32(1.0) / (root(f32(float(k))) + f32(1e-8))
            assert_bits(torch.cat(weights), expected.expand(50, 4).contiguous(), where=f"weights of step {steps}")
        kvstore.save(store, tmp_path / form, form=form, durable=False)


@requirement(
    "KV-093",
    "KVEmbeddingBag MUST pool like torch.nn.EmbeddingBag and train like it with the dense optimizer; KVEmbedding like "
    "torch.nn.Embedding; a missing id MUST read as its initial weight and be inserted by backward only.",
)
def test_modules(kvstore: Any, tolerance_factor: float) -> None:
    generator = torch.Generator().manual_seed(9)
    for mode in ("sum", "mean", None):
        store = store_of(kvstore, kvstore.RowLayout(8, optimizer="adagrad"))
        every = ids_of(range(12))
        initial = store.get("t", every)
        module = kvstore.KVEmbedding(store, lr=LR) if mode is None else kvstore.KVEmbeddingBag(store, mode=mode, lr=LR)
        tables = [torch.nn.Parameter(initial.to(dtype)) for dtype in (torch.float32, torch.float64)]
        optimizers = [torch.optim.Adagrad([table], lr=LR, eps=1e-8) for table in tables]
        for _ in range(4):
            ids = torch.randint(0, 12, (30,), generator=generator)
            offsets = ids_of([0, 0, 4, 5, 30])
            arguments = (ids.reshape(5, 6),) if mode is None else (ids, offsets)
            out = module(*arguments)
            grad = torch.randn(out.shape, generator=generator)
            dense = [
                torch.nn.functional.embedding(arguments[0], table)
                if mode is None
                else torch.nn.functional.embedding_bag(ids, table, offsets, mode=mode)
                for table in tables
            ]
            where = f"{mode} forward"
            assert_within_derived(
                out.detach(), dense[0].detach(), dense[1].detach(), factor=2 * tolerance_factor, where=where
            )
            out.backward(grad)
            for table, optimizer, result in zip(tables, optimizers, dense, strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(result, grad.to(table.dtype))
                optimizer.step()
        found = store.get("t", every)
        assert_within_derived(
            found, tables[0].detach(), tables[1].detach(), factor=2 * tolerance_factor, where=f"{mode}"
        )
        size = store.size("t")
        bag = ids_of([10**12]).reshape(1, 1)
        out = module(bag)
        assert_bits(out.reshape(1, 8).detach(), store.get("t", ids_of([10**12])), where="a missing id")
        assert_equal(store.size("t"), size, where="forward inserts nothing")
        out.sum().backward()
        assert_equal(store.size("t"), size + 1, where="backward inserts")


@requirement(
    "KV-340",
    "KVEmbeddingBag MUST cut ids by their offsets alone: as many bags as ids, with empty and longer ones among them, "
    "MUST be pooled and trained as any others.",
)
def test_as_many_bags_as_ids(kvstore: Any) -> None:
    for count in (1, 2, 3, 4):
        for sizes in product((0, 1, 2, 4), repeat=count):
            if sum(sizes) != count:
                continue
            for mode in ("sum", "mean"):
                where = f"bags of {sizes}, {mode}"
                store = store_of(kvstore, kvstore.RowLayout(2, optimizer="sgd"))
                ids, counts = torch.arange(count), torch.tensor(sizes)
                weights = torch.arange(1.0, 2 * count + 1).view(count, 2)
                store.set("t", ids, weights)
                found = kvstore.KVEmbeddingBag(store, mode=mode, lr=0.5)(ids, counts.cumsum(0) - counts)
                # Powers of two divide without a rounding.
                divisors = (counts if mode == "mean" else torch.ones_like(counts)).clamp(min=1)[:, None]
                sums = torch.stack([part.sum(0) for part in torch.split(weights, list(sizes))])
                assert_bits(found.detach(), sums / divisors, where)
                grads = torch.arange(1.0, 2 * count + 1).view(count, 2)
                found.backward(grads)
                expected = weights - 0.5 * (grads / divisors).repeat_interleave(counts, dim=0)
                assert_bits(store.get("t", ids), expected, f"{where}: rows behind a step")


@requirement(
    "KV-218",
    "A backward MUST step the rows that were looked up: it MUST be refused, and take no step, where their ids were "
    "written over meanwhile, and where it is a second one that retain_graph did not announce.",
)
def test_backward_of_other_ids(kvstore: Any) -> None:
    kinds: dict[str, Callable[[Any], Any]] = {
        "one row each": lambda store: kvstore.KVEmbedding(store, lr=LR),
        "sums": lambda store: kvstore.KVEmbeddingBag(store, mode="sum", lr=LR),
    }
    for name, kind in kinds.items():
        store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adagrad"))
        module, ids = kind(store), ids_of([1, 2, 3, 4]).reshape(2, 2)
        out = module(ids).sum()
        ids[0, 0] = 9
        with raises(RuntimeError, mentions=["modified by an inplace operation"], where=f"{name}: ids written over"):
            out.backward()
        assert_equal((store.size("t"), module.step_count), (0, 0), where=f"{name}: after ids were written over")
        out = module(ids).sum()
        out.backward(retain_graph=True)
        out.backward()
        before = contents(store)
        assert_equal((store.ids("t").tolist(), module.step_count), ([2, 3, 4, 9], 2), where=f"{name}: two backwards")
        with raises(RuntimeError, mentions=["second time"], where=f"{name}: a third backward"):
            out.backward()
        assert_contents(store, before, where=f"{name}: after a third backward")
        assert_equal(module.step_count, 2, where=f"{name}: steps after a third backward")


@requirement(
    "KV-373",
    "KVEmbeddingBag MUST take ids and offsets of the dimensions that torch.nn.EmbeddingBag takes, with as many bags, "
    "and refuse by name those that it refuses.",
)
def test_forms_of_bags(kvstore: Any) -> None:
    store, ids = store_of(kvstore), torch.arange(6)
    store.set("t", ids, torch.arange(36.0).reshape(6, 6))
    ours, theirs = kvstore.KVEmbeddingBag(store, mode="sum"), torch.nn.EmbeddingBag(6, 6, mode="sum")
    theirs.load_state_dict({"weight": store.get("t", ids)})
    forms = {"no dimension": ids[3], "one": ids, "two": ids.reshape(2, 3), "three": ids.reshape(1, 2, 3)}
    cuts = {"none": None, "one": ids_of([0, 4]), "as many as ids": ids_of([0] * 6), "two": ids_of([0, 4])[None]}
    for (form, bags), (cut, offsets) in product(forms.items(), cuts.items()):
        where = f"ids of {form} dimensions, offsets of {cut}"
        try:
            expected = theirs(bags, offsets)
        except (RuntimeError, ValueError, IndexError):
            with raises(ShapeError, where=where):
                ours(bags, offsets)
            continue
        with succeeds("a lookup", where=where):
            assert_bits(ours(bags, offsets), expected.detach(), where=where)


@requirement(
    "KV-448",
    "Each call of one KVEmbeddingBag MUST cut its ids by its own shape or offsets, whichever as many ids were given in "
    "the call before, and the backward of either MUST step by its own.",
)
def test_calls_behind_each_other(kvstore: Any) -> None:
    ids = ids_of([0, 1, 2, 3, 4, 5])
    forms: list[tuple[torch.Tensor, torch.Tensor | None]] = [(ids.reshape(n, 6 // n), None) for n in (1, 2, 3, 6)]
    forms += [(ids, ids_of(starts)) for starts in ([0, 2], [0, 4], [0, 0], [0, 1, 6], [0, 2, 4])]
    for first, second in product(forms, repeat=2):
        where = f"{[tuple(form.shape) for form, _ in (first, second)]}, {[cut for _, cut in (first, second)]}"
        store = store_of(kvstore, kvstore.RowLayout(2, optimizer="sgd"))
        weights = torch.arange(12.0).reshape(6, 2)
        store.set("t", ids, weights)
        ours, theirs = kvstore.KVEmbeddingBag(store, mode="sum", lr=0.5), torch.nn.EmbeddingBag(6, 2, mode="sum")
        theirs.load_state_dict({"weight": weights})
        found, expected = ([module(*form) for form in (first, second)] for module in (ours, theirs))
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_bits(one.detach(), other.detach(), where=f"{where}: call {number}")
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
        for one, other in zip(found, expected, strict=True):
            grads = torch.arange(1.0, other.numel() + 1).reshape(other.shape)
            one.backward(grads)
            optimizer.zero_grad()
            other.backward(grads)
            optimizer.step()
        assert_bits(store.get("t", ids), theirs.weight.detach(), where=f"{where}: rows behind two steps")


@requirement("KV-094", "Modules MUST refuse tables without an optimizer, other modes, and offsets that do not cut.")
def test_refused_modules(kvstore: Any) -> None:
    plain = store_of(kvstore, kvstore.RowLayout(4))
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="sgd"))
    bag = kvstore.KVEmbeddingBag(store, mode="sum")
    ids = ids_of([1, 2, 3])
    refusals: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ConfigError, lambda: kvstore.KVEmbeddingBag(plain)),
        (ConfigError, lambda: kvstore.KVEmbedding(plain)),
        (ConfigError, lambda: kvstore.KVEmbeddingBag(store, mode="max")),
        (ShapeError, lambda: bag(ids)),
        (ShapeError, lambda: bag(ids, ids_of([1, 2]))),
        (ShapeError, lambda: bag(ids, ids_of([0, 2, 1]))),
        (ShapeError, lambda: bag(ids, ids_of([0, 4]))),
        (ShapeError, lambda: bag(ids, ids_of([]))),
    ]
    for error, call in refusals:
        with raises(error):
            call()
    assert_bits(bag(ids_of([]), ids_of([])).detach(), torch.zeros(0, 4), where="no bags")


@requirement(
    "KV-357",
    "requires_grad_(False) of an embedding module MUST keep its rows, its step and its lookups out of a backward until "
    "requires_grad_(True), and MUST reach the parameters of a subclass.",
)
@pytest.mark.parametrize("kind", ["KVEmbedding", "KVEmbeddingBag"])
def test_frozen(kvstore: Any, kind: str) -> None:
    store, weight = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")), torch.ones(4, requires_grad=True)
    module, ids = getattr(kvstore, kind)(store, lr=0.1), ids_of([3, 1]).reshape(1, 2)
    module.scale = torch.nn.Parameter(torch.ones(1))
    (module(ids) * weight).sum().backward()
    before = contents(store)
    assert_equal(module.requires_grad_(False) is module, True, where="what it returns")
    assert_equal(module.scale.requires_grad, False, where="a parameter beside the rows")
    for _ in range(2):
        found = module(ids)
        assert_equal(found.requires_grad, False, where="a lookup of frozen rows")
        (found * weight).sum().backward()
    assert_contents(store, before, where="frozen")
    assert_equal(store.step_count("t"), 1, where="steps while frozen")
    module.requires_grad_()
    (module(ids) * weight).sum().backward()
    assert_equal((store.step_count("t"), module.scale.requires_grad), (2, True), where="trained again")


@requirement(
    "KV-358",
    "What no step or no state dict of an embedding module would take MUST be refused by name when the module is made.",
)
@pytest.mark.parametrize("kind", ["KVEmbedding", "KVEmbeddingBag"])
def test_arguments_of_modules(kvstore: Any, kind: str) -> None:
    store, wrong = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")), float("nan")
    refused: dict[str, list[Any]] = {
        "lr": ["fast", wrong, None],
        "eps": [-1.0, "1e-8", wrong],
        "beta1": [1.0, -0.1, "0.9", None],
        "beta2": [1.0, 1.5, wrong],
        "buckets": [4, "4", (4, "interleave")],
    }
    for name, values in refused.items():
        for value in values:
            with raises(ConfigError, mentions=["where: "], where=f"{name}={value!r}"):
                getattr(kvstore, kind)(store, **{name: value})
    taken: list[dict[str, Any]] = [{"lr": 1, "eps": 0.0}, {"lr": -0.5, "beta1": 0.0}, {"buckets": kvstore.Buckets(3)}]
    for options in taken:
        with succeeds("a module", where=f"{options}"):
            getattr(kvstore, kind)(store, **options)


@requirement(
    "KV-359",
    "A table that is looked up several times before one backward MUST take one step for each lookup, the later "
    "lookup's first, each with the gradients of its lookup alone, whichever module it was looked up through.",
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
def test_lookups_of_one_backward(kvstore: Any, optimizer: str) -> None:
    layout, first, second = kvstore.RowLayout(4, optimizer=optimizer), ids_of([1, 2]), ids_of([2, 3, 2])
    for modules_count in (1, 2):
        store, plain = store_of(kvstore, layout), store_of(kvstore, layout)
        modules = [kvstore.KVEmbedding(store, lr=0.1) for _ in range(modules_count)]
        found, others = modules[0](first), modules[-1](second)
        (3 * others.sum() + found.sum()).backward()
        plain.apply_gradients("t", second, torch.full((3, 4), 3.0), 0.1, 1)
        plain.apply_gradients("t", first, torch.ones(2, 4), 0.1, 2)
        where = f"{optimizer}, through {modules_count}"
        assert_equal(store.step_count("t"), 2, where=f"{where}: steps")
        assert_contents(store, contents(plain), where=where)


def _nothing_looked_up() -> dict[str, tuple[str, tuple[torch.Tensor, ...]]]:
    """Lookups of no ids, as (kind of module, arguments)."""
    none = ids_of([])
    return {
        "no ids": ("KVEmbedding", (none,)),
        "no rows of ids": ("KVEmbedding", (none.reshape(0, 3),)),
        "rows of no ids": ("KVEmbedding", (none.reshape(2, 0),)),
        "no bags": ("KVEmbeddingBag", (none.reshape(0, 3),)),
        "empty bags": ("KVEmbeddingBag", (none.reshape(2, 0),)),
        "bags that offsets leave empty": ("KVEmbeddingBag", (none, ids_of([0, 0]))),
        "no offsets": ("KVEmbeddingBag", (none, none)),
    }


@requirement(
    "KV-415",
    "A step with no ids, by a lookup's backward or by the store itself, MUST be a step of its table as any other: "
    "counted, told to who listens to steps, in every state dict, and what the next one is corrected for; it MUST make "
    "no row.",
)
@pytest.mark.parametrize("optimizer", ["adam", "lamb", "rowwise_adagrad"])
def test_steps_of_no_ids(kvstore: Any, optimizer: str) -> None:
    layout, ids = kvstore.RowLayout(4, optimizer=optimizer), ids_of([1, 2])
    for name, (kind, arguments) in {**_nothing_looked_up(), "the store": ("", ())}.items():
        store, plain = (store_of(kvstore, layout) for _ in range(2))
        made = {each: getattr(kvstore, each)(store, lr=LR) for each in ("KVEmbedding", "KVEmbeddingBag")}
        heard: list[str] = []
        store.add_listener(heard.append, steps=True)
        made["KVEmbedding"](ids).sum().backward()
        before, where = contents(store), f"{name}, {optimizer}"
        for _ in range(3):
            if kind:
                with succeeds("a backward", where=where):
                    made[kind](*arguments).sum().backward()
            else:
                store.apply_gradients("t", ids[:0], torch.zeros(0, 4), LR, None)
        assert_contents(store, before, where=where)
        assert_equal((store.step_count("t"), len(heard)), (4, 4), where=f"steps that were counted and heard, {where}")
        assert_equal(int(store.state_dict()["t.step"].full_tensor()), 4, where=f"the step of a state dict, {where}")
        made["KVEmbedding"](ids).sum().backward()
        for step in (1, 5):
            plain.apply_gradients("t", ids, torch.ones(2, 4), LR, step)
        assert_contents(store, contents(plain), where=f"the step behind, {where}")


@requirement(
    "KV-422",
    "Under a GradScaler rows MUST take the gradients that come to them, scaled and not finite ones too, in steps that "
    "the scaler cannot skip; where a hook of the module's output takes the scale out and puts zeros for what is not "
    "finite, each step MUST be the one without a scaler, bit for bit.",
)
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_grad_scaler(kvstore: Any, optimizer: str) -> None:
    stores = [store_of(kvstore, kvstore.RowLayout(5, optimizer=optimizer)) for _ in range(4)]
    bags = [kvstore.KVEmbeddingBag(store, mode="sum", lr=LR, **HYPER) for store in stores]
    plain, hooked, scaled, expected = bags
    dense = torch.nn.Parameter(torch.ones(5))
    trainer, scaler = torch.optim.SGD([dense], lr=0.5), torch.amp.GradScaler("cpu", init_scale=4.0)

    def unscaled(grad: torch.Tensor) -> torch.Tensor:
        return (grad / scaler.get_scale()).nan_to_num(0, 0, 0)

    for step in range(4):
        ids = ids_of(range(step, step + 6)).reshape(2, 3)
        grads = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        factor, scale = torch.tensor(float("inf") if step == 2 else 1.0), scaler.get_scale()
        before = dense.detach().clone()
        # A step that overflows is one with gradients of zero where the hook says so.
        plain(ids).backward(torch.zeros_like(grads) if step == 2 else grads)
        out = hooked(ids)
        out.register_hook(unscaled)
        scaler.scale(((out + dense) * grads * factor).sum()).backward()
        scaler.scale((scaled(ids) * grads * factor).sum()).backward()
        expected(ids).backward(grads * scale * factor)
        scaler.step(trainer)
        scaler.update()
        trainer.zero_grad()
        assert_equal(torch.equal(dense, before), step == 2, where=f"the scaler skips step {step} of what is dense")
        held = [contents(store) for store in stores]
        assert_equal(held[1] == held[0], True, where=f"{optimizer}, step {step}: unscaled, rows of no scaler")
        assert_equal([s.step_count("t") for s in stores], [step + 1] * 4, where=f"{optimizer}, step {step}: steps")
        found, wanted = (store.get("t", store.ids("t")) for store in stores[2:])
        assert_equal(torch.equal(found.nan_to_num(7), wanted.nan_to_num(7)), True, where=f"{optimizer}, step {step}")
    assert_equal(bool(found.isfinite().all()), False, where=f"{optimizer}: rows that took what is not finite")


@pytest.mark.night
@requirement(
    "KV-424",
    "A compiled model MUST have the eager model's rows and losses after every step, and one graph, that of its dense "
    "part, whatever the number of ids, the learning rate and the step.",
)
@pytest.mark.filterwarnings("ignore")  # The compiler reads, and instantiates, what warns of that.
def test_compiled(kvstore: Any) -> None:
    from torch._dynamo.testing import CompileCounter

    models = [_Model(kvstore), _Model(kvstore)]
    models[1].dense.load_state_dict(models[0].dense.state_dict())
    torch._dynamo.reset()
    counter = CompileCounter()
    calls: list[Any] = [models[0], torch.compile(models[1], backend=counter)]
    for step in range(3):
        ids = torch.arange(2 * (3 + step)).reshape(2, -1) % 5
        losses = []
        for model, call in zip(models, calls, strict=True):
            model.bag.lr = model.embedding.lr = 0.1 / (1 + step)
            with succeeds("a step", where=f"step {step}"):
                losses.append(call(ids, ids_of([step, 7])))
                losses[-1].backward()
        assert_bits(losses[1].detach(), losses[0].detach(), where=f"loss of step {step}")
        assert_contents(models[1].store, contents(models[0].store), where=f"rows after step {step}")
        assert_equal(counter.frame_count, 1, where=f"graphs after step {step}")
