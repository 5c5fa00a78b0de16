"""Tables whose options meet in pairs, and what loops over bags make of them: the oracle of ``test_pairs``.

It adds and updates row by row, and knows of each option only what it means alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from conformance.harness import Rank, assert_equal, raises
from conformance.kvstore.model import BETA1, BETA2, EPS, LR
from conformance.pipeline.batches import Jagged, place_of, values_of
from conformance.pipeline.model import OPTIMIZERS, assert_bits, fused_of
from conformance.pipeline.sharding import collection_of
from refimpl.optimizers import Hyper, row_sum, update
from twinproof.errors import UnsupportedError
from twinproof.optimizers import OPTIMIZERS as FORMULAS

Case = Mapping[str, Any]

# One table has a single row, so that a second rank has none of it; no width is a multiple of another's or of 8.
NAMES, ROWS, WIDTHS = ("t", "t1", "t10"), (7, 1, 5), (5, 4, 9)
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel", "key_value")
PARTIAL = ("row_wise", "key_value")
FEATURES = {
    "none": (("a",), ("b",), ("c",)),
    "within": (("a", "d"), ("b",), ("c",)),
    "between": (("a",), ("b",), ("a", "c")),
    "both": (("a", "d"), ("b",), ("d", "a")),
}
DTYPES = {
    "float32": (torch.float32,) * 3,
    "float16": (torch.float16,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
}
POOLINGS = {"sum": "SSS", "mean": "MMM", "mixed": "SMM", "mixed the other way": "MSS"}
BOUNDS = ("fatal", "warning", "ignore")
WEIGHTS = ("none", "given", "given in float64", "wanted", "wanted by one rank", "processed")
BAGS = ("usual", "of one row", "a feature without ids", "a step without ids")
SIZES = ("even", "uneven", "one rank without samples")
FORMS = ("lengths", "int32", "offsets", "strided", "permuted, with keys twice", "variable strides")
# The kinds of the tables in a case, which may have fewer.
PLACES = ("first", "second", "third")
EVENTS = ("nothing", "another lr", "parts loaded", "whole loaded", "copied", "looked up in vain")
LONGEST, STEPS, DENSE_LR = 3, 3, 0.0625
HYPER = (EPS, BETA1, BETA2)

TABLES = {
    "optimizer": OPTIMIZERS,
    "first": KINDS,
    "second": KINDS,
    "third": KINDS,
    "weights": WEIGHTS,
    "form": FORMS,
    "event": EVENTS,
    "dtype": tuple(DTYPES),
    "pooling": tuple(POOLINGS),
    "shared": tuple(FEATURES),
    "bags": BAGS,
    "sizes": SIZES,
    "bounds": BOUNDS,
    "place": ("2 ranks", "alone", "not cut"),
}


def kinds_in(case: Case) -> tuple[str, ...]:
    """Of each table; one that is not cut trains as a replica of one rank does."""
    kinds = tuple(case[place] for place in PLACES if place in case)
    return ("data_parallel",) * len(kinds) if case["place"] == "not cut" else kinds


def features_in(case: Case) -> list[tuple[str, ...]]:
    """Of each table."""
    return list(FEATURES[case["shared"]][: len(kinds_in(case))])


def is_allowed(case: Case) -> bool:
    """What is refused otherwise; PIPE-496 has it."""
    whole = set(kinds_in(case)) <= {"table_wise", "column_wise"}
    return case["weights"] != "processed" or whole


def configs_in(pipeline: Any, case: Case) -> list[Any]:
    pooling = {"S": pipeline.PoolingType.SUM, "M": pipeline.PoolingType.MEAN}
    parts = zip(features_in(case), NAMES, ROWS, WIDTHS, DTYPES[case["dtype"]], POOLINGS[case["pooling"]], strict=False)
    return [
        pipeline.EmbeddingBagConfig(rows, width, name, dtype, list(features), pooling=pooling[kind])
        for features, name, rows, width, dtype, kind in parts
    ]


def limits_in(case: Case) -> dict[str, int]:
    """Feature -> the rows of the smallest table that looks it up."""
    pairs = [(name, rows) for names, rows in zip(features_in(case), ROWS, strict=False) for name in names]
    return {name: min(rows for other, rows in pairs if other == name) for name, _ in pairs}


def batch_in(case: Case, seed: int, step: int, rank: int) -> Jagged:
    """Of one rank; every other sample of every other feature has the bag before it, which a batch may have once."""
    stride = {"even": 2, "uneven": 1 + (step + 2 * rank) % 4, "one rank without samples": 3 * ((step + rank) % 2)}
    drawn = random.Random(1000 * seed + 10 * step + rank).randrange
    limits, bags, weights = limits_in(case), [], []
    for place, (name, limit) in enumerate(sorted(limits.items())):
        mine: list[list[int]] = []
        theirs: list[list[float]] = []
        empty = (case["bags"] == BAGS[2] and name == "a") or (case["bags"] == BAGS[3] and step == 1)
        for sample in range(stride[case["sizes"]]):
            bag = [drawn(limit) for _ in range(0 if empty else drawn(LONGEST + 1))]
            mine.append([0] * len(bag) if case["bags"] == BAGS[1] else bag)
            theirs.append([(drawn(9) - 4) / 3 for _ in bag])
            if place % 2 and sample % 2:
                mine[-1], theirs[-1] = mine[-2], theirs[-2]
        bags.append(mine)
        weights.append(theirs)
    plain = case["weights"] in ("none", "processed")
    return Jagged(sorted(limits), bags, None if plain else weights)


class Given:
    """A batch as the implementation's class, in one of the forms.

    Attributes:
        kjt: the batch.
        weights: the tensor that the caller holds, or None.
        places: (feature, sample, position) -> the place of the id's weight in it.
    """

    def __init__(self, pipeline: Any, case: Case, batch: Jagged) -> None:
        self._case, form = case, case["form"]
        order = list(range(len(batch.keys)))
        # A repeated key's first is not meant, nor one that no table has; both stand before the others.
        extra = ["a", "x"] if form == FORMS[4] else []
        order = order[::-1] if extra else order
        self.places: dict[tuple[int, int, int], int] = {}
        ids, lengths, scales = [], [2] * (len(extra) * batch.stride), []
        for _ in range(sum(lengths)):
            ids.append(0)
            scales.append(9.0)
        for feature in order:
            for sample, bag in enumerate(batch.bags[feature]):
                if self._is_twin(feature, sample):
                    self._share(feature, sample, len(bag))
                    continue
                lengths.append(len(bag))
                for position, row in enumerate(bag):
                    self.places[feature, sample, position] = len(ids)
                    ids.append(self._id(batch.keys[feature], row, sample))
                    scales.append(0.0 if batch.weights is None else batch.weights[feature][sample][position])
        keys = [*extra, *(batch.keys[feature] for feature in order)]
        self.weights: torch.Tensor | None = None
        if batch.weights is not None:
            dtype = torch.float64 if case["weights"] == "given in float64" else torch.float32
            self.weights = torch.tensor(scales, dtype=torch.float64).to(dtype)
        self._build = (pipeline, keys, ids, lengths, batch.stride)

    def _is_twin(self, feature: int, sample: int) -> bool:
        return bool(self._case["form"] == "variable strides" and feature % 2 and sample % 2)

    def _share(self, feature: int, sample: int, count: int) -> None:
        for position in range(count):
            self.places[feature, sample, position] = self.places[feature, sample - 1, position]

    def _id(self, name: str, row: int, sample: int) -> int:
        """Row 0 of what no store has is asked for by ids that its tables do not have, where these are not refused."""
        stored = [kind == "key_value" for kind in kinds_in(self._case)]
        tables = [index for index, names in enumerate(features_in(self._case)) if name in names]
        if row or self._case["bounds"] == "fatal" or any(stored[index] for index in tables):
            return row
        return (0, -1, 10**6, -(2**31))[sample % 4]

    def kjt(self, *, wanting: bool = False) -> Any:
        """The batch; ``wanting``: its weights require a gradient."""
        pipeline, keys, ids, lengths, stride = self._build
        form = self._case["form"]
        dtype = torch.int32 if form == "int32" else torch.int64
        values, sizes = torch.tensor(ids, dtype=dtype), torch.tensor(lengths, dtype=dtype)
        weights = self.weights
        if weights is not None and form == "strided":
            self.weights = weights = weights.repeat_interleave(2)
            self.places = {key: 2 * place for key, place in self.places.items()}
        if weights is not None and wanting:
            weights.requires_grad_()
        if form == "strided":
            values, weights = values.repeat_interleave(2)[::2], None if weights is None else weights[::2]
        if form == "offsets":
            return pipeline.KeyedJaggedTensor(keys, values, weights, offsets=torch.tensor([0, *lengths]).cumsum(0))
        if form != "variable strides":
            return pipeline.KeyedJaggedTensor(keys, values, weights, sizes, stride=stride)
        odd = -(-stride // 2)
        inverse = [[sample // 2 if feature % 2 else sample for sample in range(stride)] for feature in range(len(keys))]
        return pipeline.KeyedJaggedTensor(
            keys,
            values,
            weights,
            sizes,
            stride_per_key_per_rank=[[odd if feature % 2 else stride] for feature in range(len(keys))],
            inverse_indices=(keys, torch.tensor(inverse, dtype=torch.int64).reshape(len(keys), stride)),
        )


class Oracle:
    """The tables as loops over bags know them: uncut, but for sums of several ranks' rows and columns with states.

    Attributes:
        weights: of each table.
        states: of each table, for each of its column blocks.
        replicas, scales: parameters of a dense optimizer, by table and by feature.
    """

    def __init__(self, case: Case, configs: Sequence[Any], weights: Sequence[torch.Tensor], world_size: int) -> None:
        self.case, self.configs, self.world_size = case, configs, world_size
        self.kinds, self.optimizer = kinds_in(case), case["optimizer"]
        self.weights = [weight.clone() for weight in weights]
        self.states = [
            [self._zeros(weight.shape[0], block.stop - block.start) for _, block in self.blocks(table)]
            for table, weight in enumerate(weights)
        ]
        self.replicas = {
            table: torch.nn.Parameter(self.weights[table])
            for table, kind in enumerate(self.kinds)
            if kind == "data_parallel"
        }
        names = sorted(limits_in(case)) if case["weights"] == "processed" else []
        self.scales = {name: torch.nn.Parameter(values_of((LONGEST,), 50 + i)) for i, name in enumerate(names)}
        self.dense = dense_of([*self.replicas.values(), *self.scales.values()])
        self.lr, self.step_count = LR, 0

    def _zeros(self, rows: int, width: int) -> dict[str, torch.Tensor]:
        return {state: torch.zeros(rows, size) for state, size in FORMULAS[self.optimizer].widths(width).items()}

    def blocks(self, table: int) -> list[tuple[int, slice]]:
        """Rank and columns of each part of a row, by rank; a last rank has the first columns."""
        width, kind = WIDTHS[table], self.kinds[table]
        if kind != "column_wise":
            return [(self.world_size - 1 if kind == "table_wise" else 0, slice(0, width))]
        size = -(-width // self.world_size)
        begins = [size * (self.world_size - 1 - rank) for rank in range(self.world_size)]
        return [(rank, slice(begin, min(begin + size, width))) for rank, begin in enumerate(begins)]

    def owner(self, table: int, row: int) -> int:
        """The rank whose sum a row belongs to."""
        if self.kinds[table] == "row_wise":
            return row // -(-ROWS[table] // self.world_size)
        return row % 4 * self.world_size // 4 if self.kinds[table] == "key_value" else 0

    def bags(self, batch: Jagged, name: str) -> list[list[tuple[int, int, np.float32]]]:
        """(position, row, weight) of each id of each sample."""
        found = []
        for bag, weights in zip(*self._weighed(batch, name), strict=True):
            found.append(
                [(i, row, np.float32(weight)) for i, (row, weight) in enumerate(zip(bag, weights, strict=True))]
            )
        return found

    def _weighed(self, batch: Jagged, name: str) -> tuple[list[list[int]], list[list[float]]]:
        bags = batch.picked([name]).bags[0]
        if name in self.scales:
            weights = self.scales[name].tolist()
            return bags, [weights[: len(bag)] for bag in bags]
        given = batch.picked([name]).weights
        return bags, [[1.0] * len(bag) for bag in bags] if given is None else given[0]

    def pooled(self, batch: Jagged) -> torch.Tensor:
        """Float32 [B, columns], by table, then feature."""
        columns = []
        for table, config in enumerate(self.configs):
            rows = self.weights[table].detach().float().numpy()
            for name in config.feature_names:
                result = np.zeros((batch.stride, rows.shape[1]), np.float32)
                for sample, bag in enumerate(self.bags(batch, name)):
                    sums = np.zeros((self.world_size, rows.shape[1]), np.float32)
                    for _, row, weight in bag:
                        sums[self.owner(table, row)] += weight * rows[row]
                    for one in sums:
                        result[sample] += one
                    result[sample] /= self.divisor(table, bag)
                columns.append(torch.from_numpy(result))
        return torch.cat(columns, dim=1)

    def divisor(self, table: int, bag: Sequence[Any]) -> np.float32:
        """Of a bag's sum."""
        is_mean = self.configs[table].pooling.value == "MEAN"
        return np.float32(len(bag) if is_mean and bag else 1)

    def step(self, batches: Sequence[Jagged], grads: Sequence[torch.Tensor]) -> None:
        """One backward of every rank, and a step of the dense optimizer."""
        self.step_count += 1
        for param, grad in zip(self.scales.values(), self._scale_gradients(batches, grads), strict=True):
            param.grad = grad
        at = 0
        for table, config in enumerate(self.configs):
            sums: dict[tuple[int, int], Any] = {}
            for name in config.feature_names:
                for rank, batch in enumerate(batches):
                    part = grads[rank][:, at : at + WIDTHS[table]].numpy()
                    self._add(sums, table, rank, self.bags(batch, name), part)
                at += WIDTHS[table]
            if table in self.replicas:
                self.replicas[table].grad = self._mean(table, sums)
            else:
                self._update(table, {row: total for (_, row), total in sums.items()})
        if self.dense is not None:
            self.dense.step()

    def _add(self, sums: dict[tuple[int, int], Any], table: int, rank: int, bags: Any, grad: Any) -> None:
        is_replica = table in self.replicas
        for sample, bag in enumerate(bags):
            g = grad[sample] if is_replica else grad[sample] / np.float32(self.world_size)
            g = g / self.divisor(table, bag)
            for _, row, weight in bag:
                key = (rank if is_replica else 0, row)
                sums[key] = sums.get(key, np.zeros(WIDTHS[table], np.float32)) + weight * g

    def _mean(self, table: int, sums: dict[tuple[int, int], Any]) -> torch.Tensor:
        """Over ranks, of gradients that each rank rounds to what its table is made of."""
        dtype, total = self.weights[table].dtype, torch.zeros(ROWS[table], WIDTHS[table])
        for rank in range(self.world_size):
            own = torch.zeros(ROWS[table], WIDTHS[table])
            for row in range(ROWS[table]):
                if (rank, row) in sums:
                    own[row] = torch.from_numpy(sums[rank, row])
            total = total + own.to(dtype).float() / self.world_size
        return total.to(dtype)

    def _update(self, table: int, sums: dict[int, Any]) -> None:
        rows, hyper = sorted(sums), Hyper(self.lr, self.step_count, *HYPER)
        if not rows:
            return
        total = torch.stack([torch.from_numpy(sums[row]) for row in rows])
        for (_, block), held in zip(self.blocks(table), self.states[table], strict=True):
            states = {name: state[rows] for name, state in held.items()}
            weight = self.weights[table][rows][:, block]
            weight, states = update(self.optimizer, weight, total[:, block], states, hyper)
            whole = self.weights[table][rows]
            whole[:, block] = weight
            self.weights[table][rows] = whole
            for name, state in states.items():
                held[name][rows] = state

    def _shares(self, batch: Jagged, grad: torch.Tensor) -> list[tuple[int, str, int, int, int, torch.Tensor]]:
        """(table, feature, rank, sample, position, gradient) of each id's weight, for each part of its row."""
        found, at = [], 0
        for table, config in enumerate(self.configs):
            rows = self.weights[table].detach().float()
            divisor = 1 if table in self.replicas else self.world_size
            for name in config.feature_names:
                mine = grad[:, at : at + WIDTHS[table]] / divisor
                for sample, bag in enumerate(self.bags(batch, name)):
                    g = mine[sample] / float(self.divisor(table, bag))
                    for position, row, _ in bag:
                        for rank, block in self.blocks(table):
                            part = row_sum((g[block] * rows[row, block])[None])[0, 0]
                            found.append((table, name, rank, sample, position, part))
                at += WIDTHS[table]
        return found

    def weight_gradients(self, batch: Jagged, grad: torch.Tensor) -> dict[tuple[int, int, int], torch.Tensor]:
        """(feature, sample, position) -> of an id's weight, before the step. A feature is in two tables at most."""
        each: dict[tuple[int, str, int, int], torch.Tensor] = {}
        for table, name, _, sample, position, part in self._shares(batch, grad):
            key = (table, name, sample, position)
            each[key] = each.get(key, torch.zeros(())) + part
        found: dict[tuple[int, int, int], torch.Tensor] = {}
        for (table, name, sample, position), total in each.items():
            place = (batch.keys.index(name), sample, position)
            total = total * (1 if table in self.replicas else self.world_size)
            found[place] = found.get(place, torch.zeros(())) + total
        return found

    def _scale_gradients(self, batches: Sequence[Jagged], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the processors: what each rank looks up for each table, then the tables' sums, then the ranks'."""
        if not self.scales:
            return []
        sums: dict[tuple[str, int, int], torch.Tensor] = {}
        for batch, grad in zip(batches, grads, strict=True):
            for table, name, rank, _, position, part in self._shares(batch, grad):
                sums.setdefault((name, rank, table), torch.zeros(LONGEST))[position] += part
        found = []
        for name in self.scales:
            total = torch.zeros(LONGEST)
            for rank in range(self.world_size):
                mine = [part for (other, r, _), part in sums.items() if (other, r) == (name, rank)]
                total = total + sum(mine, torch.zeros(LONGEST))
            found.append(total)
        return found


def dense_of(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The optimizer of what is no cut table, if there is any."""
    return torch.optim.SGD(list(params), lr=DENSE_LR) if params else None


def assert_gradient(got: torch.Tensor, expected: torch.Tensor | None, where: str) -> None:
    """The gradient that a tensor has."""
    assert_equal(got.grad is None, expected is None, where=f"{where} is there")
    if got.grad is not None and expected is not None:
        assert_bits(got.grad, expected, where)


class Trained:
    """The implementation's tables of a case on one rank, beside the oracle.

    Args:
        components: pipeline and kvstore.
        rank: None is a process without ranks.
    """

    def __init__(self, components: tuple[Any, Any], case: Case, seed: int, rank: Rank | None) -> None:
        self.pipeline, self.kvstore = components
        self.case, self.seed, self.ranks = case, seed, rank
        self.rank, self.world_size = (0, 1) if rank is None else (rank.rank, rank.world_size)
        self.configs = configs_in(self.pipeline, case)
        self.kinds = kinds_in(case)
        weights = [
            values_of((config.num_embeddings, config.embedding_dim), 10 * seed + i, config.data_type)
            for i, config in enumerate(self.configs)
        ]
        self.oracle = Oracle(case, self.configs, weights, self.world_size)
        self.stored = "key_value" in self.kinds
        # A store of the host is read from the host.
        self.place = torch.device("cpu") if self.stored else place_of(self.pipeline)
        self.store: Any = self._store(weights) if self.stored else None
        self.module = self._made(weights)
        self.dense = dense_of(self._dense_params())

    def mine(self, table: int) -> torch.Tensor:
        """The rows of a stored table that this rank has."""
        rows = [row for row in range(ROWS[table]) if self.oracle.owner(table, row) == self.rank]
        return torch.tensor(rows, dtype=torch.int64)

    def _store(self, weights: Sequence[torch.Tensor]) -> Any:
        tables = [table for table, kind in enumerate(self.kinds) if kind == "key_value"]
        optimizer = self.case["optimizer"]
        layouts = {
            NAMES[table]: self.kvstore.RowLayout(
                WIDTHS[table], weight_dtype=self.configs[table].data_type, optimizer=optimizer
            )
            for table in tables
        }
        store = self.kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1)
        for table in tables:
            store.set(NAMES[table], self.mine(table), weights[table][self.mine(table)])
        return store

    def _plan(self) -> dict[str, Any]:
        pipeline, last = self.pipeline, self.world_size - 1
        made = {
            "table_wise": lambda: pipeline.table_wise(last),
            "row_wise": pipeline.row_wise,
            "column_wise": lambda: pipeline.column_wise(list(range(last, -1, -1))),
            "data_parallel": pipeline.data_parallel,
            "key_value": lambda: pipeline.key_value(self.store, self.kvstore.Buckets(4)),
        }
        return {name: made[kind]() for name, kind in zip(NAMES, self.kinds, strict=False)}

    def _made(self, weights: Sequence[torch.Tensor]) -> Any:
        """The module, with these weights."""
        pipeline, case = self.pipeline, self.case
        is_cut = case["place"] != "not cut"
        # A module that is cut is told by itself.
        bounds = {} if is_cut else {"bounds_check": case["bounds"]}
        whole = collection_of(pipeline, self.configs, weights, is_weighted=case["weights"] != "none", **bounds)
        if case["weights"] == "processed":
            processors = pipeline.PositionWeightedModuleCollection(dict.fromkeys(self.oracle.scales, LONGEST))
            with torch.no_grad():
                for name, scale in self.oracle.scales.items():
                    processors.position_weights[name].copy_(scale)
            whole = pipeline.FeatureProcessedEmbeddingBagCollection(whole, processors)
        if is_cut:
            whole = pipeline.ShardedEmbeddingBagCollection(
                whole,
                self._plan(),
                optimizer=fused_of(pipeline, case["optimizer"]),
                process_group=None if self.ranks is None else self.ranks.group,
                bounds_check=case["bounds"],
            )
        return whole.to(self.place)

    def _dense_params(self) -> list[torch.Tensor]:
        """In the oracle's order."""
        replicas = [self.module.embedding_bags[NAMES[table]].weight for table in self.oracle.replicas]
        names = self.oracle.scales
        return replicas + [self.module.feature_processors.position_weights[name] for name in names]

    def run(self) -> None:
        """Some steps, and the case's event behind the first."""
        for step in range(STEPS):
            self.step(step, f"case {self.seed} {dict(self.case)}: step {step}")
            if step == 0:
                getattr(self, "_" + self.case["event"].replace(" ", "_"))()

    def step(self, step: int, where: str) -> None:
        """One of this rank and of the oracle."""
        case, rank, oracle = self.case, self.rank, self.oracle
        batches = [batch_in(case, self.seed, step, r) for r in range(self.world_size)]
        given, width = (
            Given(self.pipeline, case, batches[rank]),
            sum(config.embedding_dim * len(config.feature_names) for config in self.configs),
        )
        grads = [values_of((b.stride, width), 100 * self.seed + 10 * step + r) for r, b in enumerate(batches)]
        last = self.world_size - 1
        wanting = case["weights"] == "wanted" or (case["weights"] == "wanted by one rank" and rank == last)
        pooled = self.module(given.kjt(wanting=wanting).to(self.place)).values()
        assert_bits(pooled.detach(), oracle.pooled(batches[rank]), f"{where}: pooled")
        expected = oracle.weight_gradients(batches[rank], grads[rank]) if wanting else None
        if self.dense is not None:
            self.dense.zero_grad()
        pooled.backward(grads[rank].to(self.place))
        oracle.step(batches, grads)
        self._check_dense(where)
        if self.dense is not None:
            self.dense.step()
        self.check(where)
        if given.weights is not None:
            self._check_weights(given, expected, where)

    def _check_weights(self, given: Given, expected: Any, where: str) -> None:
        assert given.weights is not None
        assert_equal(given.weights.grad is not None, expected is not None, where=f"{where}: a gradient of weights")
        if expected is not None:
            total: dict[int, torch.Tensor] = {}
            for key, part in expected.items():
                total[given.places[key]] = total.get(given.places[key], torch.zeros(())) + part
            whole = torch.zeros(given.weights.shape)
            for place, part in total.items():
                whole[place] = part
            assert_gradient(given.weights, whole, f"{where}: gradient of weights")

    def _check_dense(self, where: str) -> None:
        theirs = [*self.oracle.replicas.values(), *self.oracle.scales.values()]
        for got, expected in zip(self._dense_params(), theirs, strict=True):
            assert_gradient(got, expected.grad, f"{where}: gradient of a replica or a processor")

    def check(self, where: str) -> None:
        """Every table, state and count is the oracle's."""
        oracle = self.oracle
        for got, expected in zip(
            self._dense_params(), [*oracle.replicas.values(), *oracle.scales.values()], strict=True
        ):
            assert_bits(got.detach(), expected.detach(), f"{where}: a replica or a processor")
        for table, kind in enumerate(self.kinds):
            if kind == "key_value":
                rows = self.store.get(NAMES[table], self.mine(table))
                assert_bits(rows, oracle.weights[table][self.mine(table)], f"{where}: rows of {NAMES[table]}")
        if self.case["place"] == "not cut":
            return
        assert_equal(self.module.fused_optimizer.step_count, oracle.step_count, where=f"{where}: steps")
        for name, (shard, weight, states) in self.module.local_shards().items():
            table = NAMES.index(name)
            rows, blocks = slice(*shard.rows), oracle.blocks(table)
            at = next(i for i, (rank, _) in enumerate(blocks) if rank == self.rank or self.kinds[table] == "row_wise")
            assert_bits(weight, oracle.weights[table][rows, blocks[at][1]], f"{where}: weight of {name}")
            for state, value in states.items():
                assert_bits(value, oracle.states[table][at][state][rows], f"{where}: {state} of {name}")

    def _nothing(self) -> None:
        """Happens."""

    def _another_lr(self) -> None:
        self.oracle.lr = 0.25
        if self.case["place"] != "not cut":
            self.module.fused_optimizer.param_groups[0]["lr"] = 0.25

    def _anew(self, load: Any) -> None:
        """Another module, of other weights, which loads."""
        module, zeros = self.module, [torch.zeros_like(weight) for weight in self.oracle.weights]
        self.module = self._made(zeros)
        load(module)
        self.dense = dense_of(self._dense_params())

    def _parts_loaded(self) -> None:
        def load(module: Any) -> None:
            self.module.load_state_dict(module.state_dict())
            if self.case["place"] != "not cut":
                self.module.load_optimizer_state_dict(module.optimizer_state_dict())

        self._anew(load)

    def _whole_loaded(self) -> None:
        def load(module: Any) -> None:
            state = dict(module.state_dict())
            state.update(
                {
                    name: self.oracle.weights[NAMES.index(name.split(".")[1])]
                    for name in state
                    if name.startswith("embedding_bags.")
                }
            )
            self.module.load_state_dict(state)
            if self.case["place"] != "not cut":
                self.module.load_optimizer_state_dict(self._whole_states())

        self._anew(load)

    def _whole_states(self) -> dict[str, torch.Tensor]:
        """As one whole tensor each: columns side by side, by column block."""
        found: dict[str, torch.Tensor] = {"fused_optimizer.step": torch.tensor([self.oracle.step_count])}
        for table, kind in enumerate(self.kinds):
            if kind in ("data_parallel", "key_value"):
                continue
            blocks = zip(self.oracle.blocks(table), self.oracle.states[table], strict=True)
            ordered = [held for (_, _), held in sorted(blocks, key=lambda pair: pair[0][1].start)]
            for state in ordered[0]:
                found[f"embedding_bags.{NAMES[table]}.{state}"] = torch.cat([held[state] for held in ordered], dim=1)
        return found

    def _copied(self) -> None:
        if self.stored:
            with raises(UnsupportedError, mentions=("store", "state_dict()")):
                copy.deepcopy(self.module)
            return
        module, self.module = self.module, copy.deepcopy(self.module)
        self.dense = dense_of(self._dense_params())
        # What happens to the first is nothing to its copy.
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
            if self.case["place"] != "not cut":
                for _, weight, _ in module.local_shards().values():
                    weight.mul_(0.5)

    def _looked_up_in_vain(self) -> None:
        """Without a way back, and with one that nobody goes."""
        batch = Given(self.pipeline, self.case, batch_in(self.case, self.seed, 9, self.rank)).kjt().to(self.place)
        with torch.no_grad():
            self.module(batch)
        self.module(batch)
