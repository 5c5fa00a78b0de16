"""What modules of embedding tables are told: torchrec's configurations, and the optimizer in their backward.

Prevents settings that are taken and then ignored: what has no effect here is refused by name, with the reason.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

import torch

from twinproof.engine import locals_of_callers
from twinproof.errors import ConfigError, MissingKeyError, UnsupportedError, check_kind, check_number
from twinproof.optimizers import FUSED_OPTIMIZERS, OPTIMIZERS, STEP_MAX, Hyper
from twinproof.pipeline.tracing import share_memory, tensors_of, versions_now, written_since

__all__ = [
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "FusedOptimizer",
    "InBackwardOptimizer",
    "PoolingType",
    "UniformInit",
    "apply_optimizer_in_backward",
    "carry_over",
    "check_attributes",
    "check_given",
    "check_names",
    "check_tables",
    "embedding_names",
    "initial_weight",
    "initialized",
    "optimizer_in_backward",
    "own_config",
    "own_step",
    "readable",
]


class DataType(enum.Enum):
    """Dtypes of weights: torchrec's names. Those of quantized tables have no tables here."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


class PoolingType(enum.Enum):
    """How the rows of a bag become one: torchrec's names. NONE is what an ``EmbeddingCollection`` does."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


_FLOATS = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
# Settings that are taken at their defaults alone, and what to do instead.
_REFUSED = {
    "num_embeddings_post_pruning": "tables are not pruned for inference",
    "need_pos": "it serves position weights of row-wise tables, which are refused: cut by column or not at all",
    "input_dim": "the number of rows is num_embeddings",
    "total_num_buckets": "buckets belong to the plan: key_value(store, buckets)",
    "use_virtual_table": "a table of unbounded ids is a KVStore: key_value(store, buckets)",
    "virtual_table_eviction_policy": "eviction belongs to the store: KVStore(..., eviction=)",
    "enable_embedding_update": "rows are written from outside through load_state_dict",
    "stash_weights": "memory is given back by an offloader",
}


@dataclass(frozen=True)
class UniformInit:
    """Weights uniform in [low, high), from torch's generator: what a table without ``init_fn`` has."""

    low: float
    high: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return weight.uniform_(self.low, self.high)


@dataclass
class EmbeddingConfig:
    """One table whose rows are looked up one by one, as torchrec names its parts.

    Args:
        num_embeddings: rows E; ids are 0 to E - 1. Not used by a key-value table, whose ids are any int64: any number
            will do, 1 too.
        embedding_dim: columns D, any number from 1.
        name: of the table.
        data_type: FP32, FP16 or BF16, or torch's float32, float16 or bfloat16.
        feature_names: features looked up in this table; one name may stand at several tables. A table without any has
            its own name as its feature.
        weight_init_max, weight_init_min: bounds of the first weights; 1 / sqrt(E) and its negative by default.
        init_fn: writes the first weights into the tensor that it is given, or returns them; in place of the bounds.
        num_embeddings_post_pruning, need_pos, input_dim, total_num_buckets, use_virtual_table,
            virtual_table_eviction_policy, enable_embedding_update, stash_weights: refused at other than their defaults.

    A module keeps a copy: an attribute that is assigned later is for the modules that are made later.

    Raises:
        ConfigError: a value outside these. UnsupportedError: what is refused, with the reason.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        names: Any = self.feature_names
        if isinstance(names, str | bytes) or not isinstance(names, Sequence):
            raise ConfigError("features come in a list", got=names, expected="a list of names", where="feature_names")
        self.feature_names = list(self.feature_names)
        self.check()
        if self.init_fn is None:
            self.init_fn = UniformInit(self.get_weight_init_min(), self.get_weight_init_max())

    def check(self) -> None:
        """Demand values that a module can honour. Raises ConfigError, UnsupportedError."""
        check_kind(self.name, str, "name", "a string")
        for size in (self.num_embeddings, self.embedding_dim):
            if type(size) is not int or not 1 <= size < 2**63:
                raise ConfigError("not a size of a table", got=size, expected="an int >= 1", where=self.name)
        if self.init_fn is not None:
            check_kind(self.init_fn, Callable, f"init_fn of {self.name}", "a function of the tensor")
        _ = self.dtype
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in _REFUSED and value != setting.default:
                message, expected = f"{setting.name} is not taken: {_REFUSED[setting.name]}", str(setting.default)
                raise UnsupportedError(message, got=value, expected=expected, where=self.name)
        low = check_number(self.get_weight_init_min(), f"weight_init_min of {self.name}")
        high = check_number(self.get_weight_init_max(), f"weight_init_max of {self.name}")
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            expected = "finite numbers, min <= max"
            raise ConfigError("not bounds of first weights", got=(low, high), expected=expected, where=self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the weights. Raises ConfigError for another than float32, float16 and bfloat16."""
        found: Any = _FLOATS.get(str(getattr(self.data_type, "value", "")), self.data_type)
        if found not in _FLOATS.values():
            raise ConfigError("not a dtype of weights", got=self.data_type, expected=list(_FLOATS), where=self.name)
        dtype: torch.dtype = found
        return dtype

    def get_weight_init_max(self) -> float:
        """The upper bound of the first weights."""
        return self.num_embeddings**-0.5 if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """The lower bound of the first weights."""
        return -(self.num_embeddings**-0.5) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """How many features are looked up here."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    __doc__ = (
        (EmbeddingConfig.__doc__ or "")
        .replace("whose rows are looked up one by one", "whose rows are pooled by bag")
        .replace(
            "        num_embeddings_post_pruning, need_pos",
            "        pooling: sum, or mean over the number of ids of the bag; an empty bag gives zeros.\n"
            "        num_embeddings_post_pruning, need_pos",
        )
    )

    pooling: Any = PoolingType.SUM

    def check(self) -> None:
        """Demand values that a module can honour. Raises ConfigError, UnsupportedError."""
        super().check()
        if getattr(self.pooling, "value", None) not in ("SUM", "MEAN"):
            raise ConfigError("not a pooling", got=self.pooling, expected=["SUM", "MEAN"], where=self.name)

    @property
    def is_mean(self) -> bool:
        """Whether a bag is the mean of its rows."""
        return bool(self.pooling.value == "MEAN")


Config = TypeVar("Config", bound=EmbeddingConfig)


def own_config(kind: type[Config], table: Any) -> Config:
    """The configuration as ours: itself, or what another library's of the same parts says. Raises ConfigError."""
    if isinstance(table, kind):
        return table
    names = [each.name for each in fields(kind)]
    if not all(hasattr(table, name) for name in ("num_embeddings", "embedding_dim", "name", "feature_names")):
        raise ConfigError("not a configuration of a table", got=type(table), expected=kind.__name__, where="tables")
    parts = {name: getattr(table, name) for name in names if hasattr(table, name)}
    function: Any = parts.get("init_fn")
    if getattr(function, "func", None) is torch.nn.init.uniform_ and set(function.keywords) == {"a", "b"}:
        # torchrec's own default, which has no state: known here, so that every cut of the table gets the same weights.
        parts["init_fn"] = UniformInit(function.keywords["a"], function.keywords["b"])
    return kind(**parts)


def check_tables(tables: Sequence[Any], kind: type[Config]) -> tuple[Config, ...]:
    """Copies of the tables, with distinct names, whose features are distinct within a table. Raises ConfigError."""
    if isinstance(tables, str) or not isinstance(tables, Sequence):
        got, expected = type(tables).__name__, f"a list of {kind.__name__}"
        raise ConfigError("tables come in a list", got=got, expected=expected, where="tables")
    # Copies, for the caller may make another module of the same ones, or go on editing them.
    found = tuple(copy.copy(own_config(kind, table)) for table in tables)
    names = [table.name for table in found]
    if not tables or len(set(names)) != len(names) or not all(names):
        raise ConfigError(
            "tables without names of their own",
            got=names,
            expected="one table or more, with distinct names",
            where="tables",
        )
    for table in found:
        table.check()
        table.feature_names = list(table.feature_names) or [table.name]
        if len(set(table.feature_names)) != len(table.feature_names):
            raise ConfigError(
                "a feature twice in a table", got=table.feature_names, expected="distinct features", where=table.name
            )
    return found


def check_bounds_kind(kind: Any) -> str:
    """One of ``BOUNDS_CHECKS``. Raises ConfigError."""
    if kind not in BOUNDS_CHECKS:
        raise ConfigError("not a check", got=kind, expected=BOUNDS_CHECKS, where="bounds_check")
    return str(kind)


def check_given(
    tables: Sequence[EmbeddingConfig], *, optimizer: Any, in_backward: Any, weights: Any, device: Any
) -> None:
    """Demand arguments that do not take each other's place, and a tensor for each table. Raises ConfigError."""
    if in_backward is not None:
        check_kind(in_backward, InBackwardOptimizer, "in_backward", "an InBackwardOptimizer")
    pairs = (("in_backward", in_backward, "optimizer", optimizer), ("weights", weights, "device", device))
    for name, value, other, unused in pairs:
        if value is not None and unused is not None:
            raise ConfigError(f"{other} has no effect beside {name}", got=repr(unused), expected="None", where=other)
    if weights is not None and len(weights) != len(tables):
        raise ConfigError("a weight for each table", got=len(weights), expected=len(tables), where="weights")
    for table, weight in zip(tables, () if weights is None else weights, strict=False):
        if not isinstance(weight, torch.Tensor):
            raise ConfigError("no weight of this table", got=type(weight), expected=torch.Tensor, where=table.name)


def check_names(tables: Sequence[EmbeddingConfig]) -> None:
    """Demand names that parameters can have: a path of attributes leads to each. Raises ConfigError."""
    check_attributes([table.name for table in tables], torch.nn.ModuleDict(), "table")


def check_attributes(names: Iterable[str], holder: torch.nn.Module, what: str) -> None:
    """Demand names that a holder of torch's can have. Raises ConfigError."""
    for name in names:
        if not isinstance(name, str) or not name or "." in name or hasattr(holder, name):
            expected = f"a name without a point that is no attribute of torch.nn.{type(holder).__name__}"
            raise ConfigError(f"torch cannot hold a {what} of this name", got=name, expected=expected, where=f"{what}s")


def embedding_names(tables: Sequence[EmbeddingConfig]) -> list[str]:
    """Names of the looked up columns, by table, then feature: ``feature``, or ``feature@table`` where tables share it.

    Source of the rule: torchrec's ``get_embedding_names_by_table``.
    """
    features = [feature for table in tables for feature in table.feature_names]
    return [
        f"{feature}@{table.name}" if features.count(feature) > 1 else feature
        for table in tables
        for feature in table.feature_names
    ]


def initial_weight(table: EmbeddingConfig, device: Any = None) -> torch.Tensor:
    """The first weights, [E, D], as ``init_fn`` makes them. Raises ConfigError for more bytes than torch counts."""
    size_bytes = table.num_embeddings * table.embedding_dim * table.dtype.itemsize
    if size_bytes >= 2**63:
        # Torch would say that a storage size overflowed, and not whose.
        expected = "fewer than 2**63 bytes; of a key_value table num_embeddings is not used, and may be any number"
        got = f"{table.num_embeddings} x {table.embedding_dim} of {table.dtype}"
        raise ConfigError("more weights than a tensor may have", got=got, expected=expected, where=table.name)
    weight = torch.empty(table.num_embeddings, table.embedding_dim, dtype=table.dtype, device=device)
    return weight if weight.is_meta else initialized(table, weight)


def readable(weight: torch.Tensor) -> torch.Tensor:
    """The weight, in float32 where a cast of its module has made it of a dtype that no lookup reads."""
    return weight if weight.dtype in _FLOATS.values() else weight.to(torch.float32)


def initialized(table: EmbeddingConfig, weight: torch.Tensor) -> torch.Tensor:
    """The weight, filled in place by ``init_fn``. Raises ConfigError for first weights of another shape."""
    assert table.init_fn is not None
    with torch.no_grad():
        made = table.init_fn(weight)
        if made is not None and made is not weight:
            if made.shape != weight.shape:
                raise ConfigError("init_fn gave another shape", got=made.shape, expected=weight.shape, where=table.name)
            weight.copy_(made)
    return weight


BOUNDS_CHECKS = ("fatal", "warning", "ignore")


@dataclass(frozen=True)
class FusedOptimizer:
    """The optimizer that the backward runs; the formulas are the implementations'.

    Args:
        kind: "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam" or "lamb".
        lr, eps, beta1, beta2: see ``Hyper``.

    Raises:
        ConfigError: a value outside these.
    """

    kind: str = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.kind not in FUSED_OPTIMIZERS:
            raise ConfigError("not an optimizer", got=self.kind, expected=FUSED_OPTIMIZERS, where="kind")
        self.hyper(self.lr, 1)

    def hyper(self, lr: float, step: int) -> Hyper:
        """The hyperparameters of one step."""
        return Hyper(lr, step, self.eps, self.beta1, self.beta2)

    def state_widths(self, columns: int) -> dict[str, int]:
        """State name -> float32 values of a row of this many columns."""
        return OPTIMIZERS[self.kind].widths(columns)


def own_step(value: Any, where: str) -> int:
    """A count of steps out of a state dict: a whole number, or a tensor of one. Raises ConfigError."""
    found = value
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        found = value.item()
    if isinstance(found, float) and found.is_integer():
        # Torch's own optimizers keep their steps in float32.
        found = int(found)
    try:
        count = operator.index(found)
    except TypeError:
        count = -1
    # The step behind the last is none.
    if not 0 <= count < STEP_MAX:
        got, expected = repr(value)[:200], f"one whole number from 0 to {STEP_MAX - 1}"
        raise ConfigError("not a count of steps", got=got, expected=expected, where=where)
    return count


# What users know of torch's groups, and no step here reads: the first are constants of it, the others it does without.
_UNREAD = ("eps", "betas", "beta1", "beta2")
_WITHOUT = ("weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "amsgrad", "maximize")


class StateHolder(Protocol):
    """Who has the states of an optimizer in the backward, by the name of each table's weight, then of the state."""

    def named_states(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """All of them: themselves, not copies."""

    def load_named_states(self, states: Mapping[Any, Any]) -> None:
        """Take the values of all. Raises a TwinproofError for others than these; then nothing was changed."""


class InBackwardOptimizer(torch.optim.Optimizer):
    """A handle on the optimizer in the backward, for schedulers: ``step()`` and ``zero_grad()`` do nothing.

    Its state dict has the learning rate and the step. That of a cut collection has the states of the cut tables, too,
    as torchrec's ``KeyedOptimizer``: ``["state"]["embedding_bags.{table}.weight"]["{table}.momentum1"]`` is this rank's
    part, itself and not a copy, of what ``optimizer_state_dict`` of the collection has. States of key-value tables are
    in their rows, those of ``TableBatchedEmbeddingBags`` in the module's own state dict. A copy of the handle alone
    has no tables, and so no states.

    A ``GradScaler`` knows nothing of these steps: it neither unscales their gradients nor skips them. See the page on
    pipelines for a hook that does.

    Attributes:
        config: what was asked for; the learning rate of the moment is ``param_groups[0]["lr"]``. eps and betas are
            those of ``config``: put into the group they are refused by the next backward, as weight_decay, momentum
            and what else of torch's optimizers no formula here has, unless it is 0 or False.
        step_count: backward passes so far; Adam's step. It is an option of the group, so that a state dict has it.

    Raises:
        ConfigError: what is no FusedOptimizer; a step that is none; ``load_state_dict`` of states of other tables.
            MissingKeyError: ``load_state_dict`` without its groups, the learning rate, the step or the state of a cut
            table.
            ShapeError: a state of another shape, place or dtype. UnsupportedError: a state that is no dense tensor, or
            one on meta; the collection was deleted. Then nothing was changed.
    """

    _holder: weakref.ref[StateHolder] | None = None

    def __init__(self, config: FusedOptimizer) -> None:
        # One of torch's, which users have at hand, is none that a backward can run.
        check_kind(config, FusedOptimizer, "optimizer", f"FusedOptimizer(kind), of {', '.join(FUSED_OPTIMIZERS)}")
        super().__init__([torch.nn.Parameter(torch.zeros(0, device="cpu"))], {"lr": config.lr, "step_count": 0})
        self.config = config

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer names what is copied and pickled; its own attributes are not among it.
        state: dict[str, Any] = super().__getstate__()
        return {**state, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Torch's load_state_dict comes here, too, before it changes anything.
        for group in state["param_groups"]:
            missing = [name for name in ("lr", "step_count") if name not in group]
            if missing:
                expected = "lr and step_count, as state_dict() of the optimizer in the backward has them"
                raise MissingKeyError("options are not here", got=missing, expected=expected, where="param_groups")
            group["step_count"] = own_step(group["step_count"], "step_count")
        if self._holder is not None:
            self._held(self._holder).load_named_states(state["state"])
            # They are the tables', wherever these go: here would be copies.
            state = {**state, "state": defaultdict(dict)}
        elif state["state"]:
            got, expected = [str(name) for name in state["state"]], "none: the module's own state dict has them"
            raise ConfigError("states that no table has here", got=got, expected=expected, where="state")
        super().__setstate__(state)

    def bind(self, holder: StateHolder) -> None:
        """Have state dicts carry the states that somebody else has, and who may be gone before this handle."""
        self._holder = weakref.ref(holder)

    def _held(self, holder: weakref.ref[StateHolder]) -> StateHolder:
        found = holder()
        if found is None:
            got, expected = "the optimizer of a collection that was deleted", "a collection that lives as long"
            raise UnsupportedError("states of no table", got=got, expected=expected, where="fused_optimizer")
        return found

    def _check_names(self) -> None:
        """Refuse torch's functions that name states by the parameters of a model. Raises UnsupportedError.

        Cut tables are none: torch would miss their names in a table of its own, by a bare KeyError.
        """
        callers = zip(locals_of_callers("optim"), locals_of_callers("info"), strict=True)
        if any(optim is self and hasattr(info, "fqn_param_mapping") for optim, info in callers):
            raise UnsupportedError(
                "tables that an optimizer in the backward steps are no parameters of a model",
                got="a call of torch's get_optimizer_state_dict, set_optimizer_state_dict or their like",
                expected="the dense optimizers alone there, and this one's own state_dict() and load_state_dict()",
                where="fused_optimizer",
            )

    def state_dict(self) -> dict[str, Any]:
        """See the class. Raises UnsupportedError: the collection was deleted, or torch asks by names of parameters."""
        self._check_names()
        if self._holder is None:
            return super().state_dict()
        # Where torch finds them, and hooks of state dicts, too.
        self.state.update(self._held(self._holder).named_states())  # type: ignore[arg-type]
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: Any) -> None:
        """See the class. Tensors are copied into the tables' states."""
        self._check_names()
        try:
            super().load_state_dict(state_dict)
        except KeyError as error:
            if error.args[0] not in ("state", "param_groups"):
                raise
            got, expected = list(state_dict), "state and param_groups, which torchrec's KeyedOptimizer leaves out"
            raise MissingKeyError("not a state dict", got=got, expected=expected, where="load_state_dict") from None

    @property
    def step_count(self) -> int:
        """See the class."""
        count: int = self.param_groups[0]["step_count"]
        return count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.param_groups[0]["step_count"] = own_step(count, "step_count")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The backward has taken it already."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""

    def count_step(self) -> None:
        """A backward is a step, unless what it would step with is refused; schedulers are told. Raises ConfigError."""
        self._hyper(self.step_count + 1)
        self.param_groups[0]["step_count"] += 1
        self._opt_called = True

    def hyper(self) -> Hyper:
        """Hyperparameters of the step that is being taken."""
        return self._hyper(self.step_count)

    def _hyper(self, step: int) -> Hyper:
        group = self.param_groups[0]
        for name in _UNREAD:
            if name in group:
                expected = f"none: FusedOptimizer({self.config.kind!r}, eps=, beta1=, beta2=) has it, for good"
                raise ConfigError(f"{name} of a group is not read", got=group[name], expected=expected, where=name)
        for name in _WITHOUT:
            if group.get(name):
                got, expected = group[name], f"0, False or none: {self.config.kind!r} in the backward has no {name}"
                raise ConfigError(f"{name} of a group is not read", got=got, expected=expected, where=name)
        return self.config.hyper(check_number(group["lr"], "lr"), step)


# By name: row-wise ones are no classes of torch's.
_KINDS = {OPTIMIZERS[name].class_name: name for name in FUSED_OPTIMIZERS}
_TAKEN = ("params", "lr", "eps", "betas", "foreach", "fused", "capturable", "differentiable")


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer], params: Iterable[torch.nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Have each parameter stepped by an optimizer of its own as soon as its gradient is there, which is then None.

    Of a collection that is cut afterwards, the optimizer moves into the backward of the cut tables.
    """
    with warnings.catch_warnings():
        # The package around torch's own function scripts others of its optimizers when it is first imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)


def optimizer_in_backward(params: Sequence[torch.nn.Parameter]) -> FusedOptimizer | None:
    """The optimizer that all of these parameters carry, with its own hyperparameters; None where none carries any.

    Raises:
        ConfigError: some carry one and some none, several, or different ones; one without a fused formula; one that has
            states of steps, which a cut would lose.
    """
    carried = [_carried(param) for param in params]
    if not any(carried):
        return None
    if any(len(some) != 1 for some in carried):
        got = [len(some) for some in carried]
        raise ConfigError(
            "tables that are cut together without one optimizer each",
            got=got,
            expected="one optimizer each, or none",
            where="apply_optimizer_in_backward",
        )
    found = [_as_fused(some[0]) for some in carried]
    if any(one != found[0] for one in found):
        raise ConfigError(
            "tables that are cut together with different optimizers",
            got=found,
            expected="one optimizer for all",
            where="apply_optimizer_in_backward",
        )
    return found[0]


def _carried(param: torch.nn.Parameter) -> list[torch.optim.Optimizer]:
    """The optimizers that step a parameter in the backward."""
    found: list[torch.optim.Optimizer] = getattr(param, "_in_backward_optimizers", [])
    return found


def _as_fused(optimizer: torch.optim.Optimizer) -> FusedOptimizer:
    name, (group,) = type(optimizer).__name__, optimizer.param_groups
    if name not in _KINDS:
        raise ConfigError(
            "no formula of this optimizer runs in the backward",
            got=name,
            expected=tuple(_KINDS),
            where="apply_optimizer_in_backward",
        )
    # What is none of its own options is a scheduler's, which keeps its own beside them.
    own = {key: value for key, value in group.items() if key in optimizer.defaults}
    others = {key: value for key, value in own.items() if key not in _TAKEN and value}
    if others:
        raise ConfigError(
            "not taken by an optimizer in the backward", got=others, expected="each of them 0 or False", where=name
        )
    if steps := [float(states["step"]) for states in optimizer.state.values() if states.get("step", 0) > 0]:
        raise ConfigError(
            "the optimizer of a table has stepped, and a cut takes none of its states",
            got=f"{name} after {steps[0]:.0f} steps",
            expected="a cut before the first step, or an optimizer whose state was cleared",
            where="apply_optimizer_in_backward",
        )
    parts: dict[str, float] = {key: float(group[key]) for key in ("lr", "eps") if key in group}
    if "betas" in group:
        parts |= {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    return FusedOptimizer(_KINDS[name], **parts)


def carry_over(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    """Have the target carry what the source does, with the options that it has now."""
    classes, options = getattr(source, "_optimizer_classes", []), getattr(source, "_optimizer_kwargs", [])
    for index, (kind, given) in enumerate(zip(classes, options, strict=True)):
        apply_optimizer_in_backward(kind, [target], given)
        held, made = (_carried(each)[index].param_groups[0] for each in (source, target))
        made.update({key: value for key, value in held.items() if key != "params"})


# What a pipeline is given, and what its model answers.


def check_parts(model: Any, optimizer: Any) -> None:
    """Demand a module, and an optimizer unless it is None. Raises ConfigError."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("not a model", got=type(model).__name__, expected="a torch.nn.Module", where="model")
    lacks = [name for name in ("step", "zero_grad") if optimizer is not None and not hasattr(optimizer, name)]
    if lacks:
        got, expected = f"{type(optimizer).__name__} without {lacks}", "a torch.optim.Optimizer, or what steps as one"
        raise ConfigError("not an optimizer", got=got, expected=expected, where="optimizer")


def check_loader(loader: Any) -> Iterator[Any]:
    """The iterator that batches are taken from. Raises ConfigError for what is none, a list and a DataLoader too."""
    if not hasattr(loader, "__next__"):
        got, expected = type(loader).__name__, "an iterator of batches: iter(loader)"
        raise ConfigError("no iterator", got=got, expected=expected, where="dataloader_iter")
    found: Iterator[Any] = loader
    return found


class Ended:
    """An iterator that has ended, which this keeps only where it is of a class without weak references."""

    def __init__(self, iterator: Any) -> None:
        self._given_count = self._count_of(iterator)
        try:
            self._iterator: Callable[[], Any] = weakref.ref(iterator)
        except TypeError:
            self._iterator = lambda: iterator

    def is_still(self, iterator: Any) -> bool:
        """Whether this is the iterator, and was not seen to begin anew; None is no iterator."""
        is_it = iterator is not None and iterator is self._iterator()
        return is_it and self._count_of(iterator) == self._given_count

    @staticmethod
    def _count_of(iterator: Any) -> int | None:
        """How many batches it has given since ``iter()``, which torch's iterators count; None of any other."""
        found = getattr(iterator, "_num_yielded", None)
        return found if isinstance(found, int) else None


def _are_among(some: list[Any], others: list[Any]) -> bool:
    # A batch computes some of its tensors when it is asked for them.
    return set(map(id, some)) <= set(map(id, others))


class LoaderEnds:
    """What a pipeline knows of its iterator: ``iter(loader)`` may be the one that has ended, begun anew.

    While batches are in flight, an iterator that has ended is not asked again. Once StopIteration has come out of the
    pipeline, whatever it is given next is: Python's protocol has an iterator that has really ended say so again.
    """

    _dataloader_iter: Any
    _dataloader_exhausted: bool
    _ended: Ended | None
    agree: Callable[[int], int]

    def _take_loader(self, dataloader_iter: Any) -> None:
        """What has ended has ended on all ranks, until some rank is given another iterator, or sees its own anew."""
        if self._dataloader_exhausted:
            # A subclass that pulls in its own way says only that there is no batch.
            ended = self._ended or Ended(self._dataloader_iter)
            if self.agree(int(ended.is_still(dataloader_iter))):
                return
        self._dataloader_iter, self._dataloader_exhausted, self._ended = dataloader_iter, False, None

    def _pulled(self, in_flight: Iterable[Any]) -> Any:
        """The next batch. Raises ConfigError where the loader has written it over one of these, which have its memory.

        A loop is done with a batch when it asks for the next; whoever pulls ahead is not.
        """
        loader, in_flight = check_loader(self._dataloader_iter), list(in_flight)
        for each in in_flight:
            # Somebody may have put another batch in its place.
            if each.lent is None or each.lent[0] is not each.batch:
                each.lent = each.batch, tensors_of(each.batch)
        lent = [tensor for each in in_flight for tensor in each.lent[1]]
        versions = versions_now(lent)
        batch = next(loader)
        written = written_since(lent, versions)
        given = tensors_of(batch) if written or any(each.batch is batch for each in in_flight) else []
        refilled = [each for each in in_flight if each.batch is batch and not _are_among(each.lent[1], given)]
        if refilled or share_memory(written, given):
            raise ConfigError(
                "the loader has written over a batch that is in flight",
                got="a batch in memory, or an object, that one before it has",
                expected="batches of their own: clone what the loader fills again; then reset()",
                where="dataloader_iter",
            )
        return batch

    def _end_loader(self) -> None:
        """No rank asks any more."""
        self._ended = Ended(self._dataloader_iter)
        self._dataloader_iter, self._dataloader_exhausted = None, True

    def _forget_loader(self) -> StopIteration:
        """Nothing is known of any iterator; what tells the caller so."""
        self._dataloader_iter, self._dataloader_exhausted, self._ended = None, False, None
        return StopIteration()


def check_start(start_batch: Any) -> int:
    """The number of a batch. Raises ConfigError."""
    try:
        return operator.index(start_batch)
    except TypeError:
        got = repr(start_batch)[:200]
        raise ConfigError("not the number of a batch", got=got, expected="an int", where="start_batch") from None


def check_answer(answer: Any, model: torch.nn.Module) -> tuple[Any, Any]:
    """What a forward returned, which is losses and an output. Raises ConfigError."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        size = f" of {len(answer)}" if isinstance(answer, (tuple, list, dict)) else ""
        got = f"{type(answer).__name__}{size}"
        expected = "a pair (losses, output); custom_model_fwd makes one of another answer"
        raise ConfigError(
            "the forward returns losses and an output", got=got, expected=expected, where=type(model).__name__
        )
    return answer[0], answer[1]


def check_losses(losses: Any, model: torch.nn.Module) -> torch.Tensor:
    """Losses of a model in training: a tensor that a backward can begin at. Raises ConfigError."""
    if losses is None:
        raise ConfigError(
            "a model in training returned no losses",
            got=None,
            expected="a tensor of losses",
            where=type(model).__name__,
        )
    if not isinstance(losses, torch.Tensor):
        got, expected = type(losses).__name__, "a torch.Tensor with a gradient"
        raise ConfigError("losses are a tensor", got=got, expected=expected, where=type(model).__name__)
    if not losses.requires_grad:
        got = f"losses of {losses.dtype} without a gradient, torch.is_grad_enabled() is {torch.is_grad_enabled()}"
        expected = "losses of trained parameters, outside of torch.no_grad(); or model.eval()"
        raise ConfigError(
            "losses that nothing can be trained by", got=got, expected=expected, where=type(model).__name__
        )
    return losses


def untraceable(model: torch.nn.Module, error: Exception) -> ConfigError:
    """The error for a model that a pipeline cannot look into."""
    expected = "a forward of torch.fx; functions that branch on the batch behind torch.fx.wrap"
    where = type(model).__name__
    return ConfigError("the model cannot be traced", got=repr(error)[:500], expected=expected, where=where)
