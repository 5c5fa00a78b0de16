"""Weights of ids by their position in the bag, and weighted collections whose weights such processors make."""

# TorchScript resolves annotations by value: they are no strings here.
from collections.abc import Mapping
from typing import Any

import torch

from twinproof.errors import ConfigError, IdRangeError, MissingKeyError
from twinproof.pipeline.data import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from twinproof.pipeline.embeddings import EmbeddingBagCollectionBase
from twinproof.pipeline.foreign import own_batch
from twinproof.pipeline.jagged import Bags

__all__ = [
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "position_processors",
    "position_weights_of",
]


def _too_long(weight: torch.Tensor, positions: torch.Tensor, name: str) -> None:
    longest = int(positions.max()) + 1 if positions.numel() and not positions.is_meta else 0
    if longest > weight.numel():
        raise IdRangeError("a bag longer than its weights", got=longest, expected=weight.numel(), where=name)


def _of_positions(weight: torch.Tensor, positions: torch.Tensor, name: str) -> torch.Tensor:
    """Float32 [N]: the weight of each position. Raises IdRangeError for a bag longer than the weights."""
    if not torch.jit.is_scripting():
        _too_long(weight, positions, name)
    return weight.index_select(0, positions)


def _positions(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Int64 [N]: the place of each of ``count`` ids in its bag."""
    wide = lengths.reshape(-1).to(torch.int64)
    begins = (wide.cumsum(0) - wide).repeat_interleave(wide)
    return torch.arange(count, device=lengths.device) - begins


def position_weights_of(name: str, bags: Bags, weight: torch.Tensor | None) -> torch.Tensor:
    """Float32 [N] for the ids of one feature, 1 where it has no weights. Raises IdRangeError for a bag too long."""
    if weight is None:
        return torch.ones(bags.indices.numel(), device=bags.indices.device)
    return _of_positions(weight, _positions(bags.offsets.diff(), bags.indices.numel()), name)


@torch.fx.wrap
def _weighted_bags(features: JaggedTensor, weight: torch.Tensor, is_processed: bool) -> JaggedTensor:
    if is_processed:
        positions = features.weights().to(torch.int64)
    else:
        positions = _positions(features.lengths(), features.values().size(0))
    weights = _of_positions(weight, positions, "position_weight")
    return JaggedTensor(features.values(), weights, features.lengths(), features.offsets())


@torch.fx.wrap
def _weighted_batch(
    features: KeyedJaggedTensor, position_weights: dict[str, torch.Tensor], is_processed: bool
) -> KeyedJaggedTensor:
    if is_processed:
        positions = features.weights().to(torch.int64)
    else:
        positions = _positions(features.lengths(), features.values().size(0))
    ends = features.offset_per_key()
    parts: list[torch.Tensor] = []
    for i, key in enumerate(features.keys()):
        mine = positions[ends[i] : ends[i + 1]]
        if key in position_weights:
            parts.append(_of_positions(position_weights[key], mine, key))
        else:
            parts.append(torch.ones(mine.size(0), device=mine.device))
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        torch.cat(parts) if len(parts) > 0 else features.weights_or_none(),
        features.lengths(),
        features.offsets(),
        features.stride(),
        features._stride_per_key_per_rank if features.variable_stride_per_key() else None,
        length_per_key=features.length_per_key(),
        inverse_indices=features.inverse_indices_or_none(),
    )


class FeatureProcessor(torch.nn.Module):
    """What makes the weights of one feature's bags."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with weights."""
        raise NotImplementedError("a feature processor says what it does")


class FeatureProcessorsCollection(torch.nn.Module):
    """What makes the weights of several features' bags."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with weights."""
        raise NotImplementedError("a feature processor says what it does")


def _check_lengths(lengths: Mapping[str, int]) -> None:
    if any(type(length) is not int or length < 1 for length in lengths.values()):
        raise ConfigError("not lengths of bags", got=dict(lengths), expected="ints >= 1")


def _write_positions(features: Any) -> None:
    with torch.no_grad():
        features.weights().copy_(_positions(features.lengths(), features.values().shape[0]))


class PositionWeightedModule(FeatureProcessor):
    """Weights of one feature's ids by position: the n-th id of a bag weighs ``position_weight[n]``, 1 at first.

    Args:
        max_feature_length: positions; a longer bag is refused.
    """

    def __init__(self, max_feature_length: int, device: Any = None) -> None:
        super().__init__()
        _check_lengths({"max_feature_length": max_feature_length})
        self.position_weight = torch.nn.Parameter(torch.ones(max_feature_length, device=device))
        self._pre_processed = False

    def reset_parameters(self) -> None:
        """All weights 1."""
        torch.nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with these weights. Raises IdRangeError for a bag longer than them."""
        return _weighted_bags(features, self.position_weight, self._pre_processed)

    def pre_process_input(self, features: JaggedTensor) -> None:
        """Write each id's position over its weight; from here on weights of bags are taken for positions."""
        _write_positions(features)
        self._pre_processed = True


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Weights of ids by position: the n-th id of a bag of feature f weighs ``position_weights.f[n]``, 1 at first.

    Args:
        max_feature_lengths: feature -> positions; a longer bag is refused. Ids of other features weigh 1.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: Any = None) -> None:
        super().__init__()
        _check_lengths(max_feature_lengths)
        self.max_feature_lengths = dict(max_feature_lengths)
        self._pre_processed = False
        self.position_weights = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(torch.ones(length, device=device))
                for name, length in max_feature_lengths.items()
            }
        )

    @property
    def position_weights_dict(self) -> dict[str, torch.Tensor]:
        """Feature -> its weights, as they are now."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """All weights 1."""
        for weight in self.position_weights.values():
            torch.nn.init.ones_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with these weights. Raises IdRangeError for a bag longer than them."""
        return _weighted_batch(features, self.position_weights_dict, self._pre_processed)

    def pre_process_input(self, features: KeyedJaggedTensor) -> None:
        """Write each id's position over its weight; from here on weights of batches are taken for positions."""
        _write_positions(features)
        self._pre_processed = True

    def copy(self, device: Any) -> "PositionWeightedModuleCollection":
        """These weights on another device; returns self."""
        return self.to(device)


def position_processors(processors: Any) -> PositionWeightedModuleCollection:
    """The processors of cut tables, which only weigh by position, as one collection of the same parameters.

    Raises:
        ConfigError: another processor, or one that takes weights of batches for positions.
    """
    parts = list(processors.values()) if isinstance(processors, torch.nn.ModuleDict) else [processors]
    kinds = (PositionWeightedModule, PositionWeightedModuleCollection)
    if not all(type(part) in kinds and not part._pre_processed for part in parts):
        got = [type(part).__name__ for part in parts]
        raise ConfigError("cut tables take processors by position, not processed before", got=got, expected=kinds)
    if not isinstance(processors, torch.nn.ModuleDict):
        found: PositionWeightedModuleCollection = processors
        return found
    made = PositionWeightedModuleCollection({})
    for name, part in processors.items():
        made.position_weights[name] = part.position_weight
    return made


class _Each(FeatureProcessorsCollection):
    """A processor for each feature; ids of other features weigh 1."""

    def __init__(self, processors: torch.nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        parts, keys = features.to_dict(), features.keys()
        found = {key: self._feature_processors[key](parts[key]) for key in keys if key in self._feature_processors}
        ones = torch.ones(features.values().shape[0], device=features.device())
        weights = [found[key].weights() if key in found else ones[: parts[key].values().shape[0]] for key in keys]
        whole: KeyedJaggedTensor = features._with_weights(torch.cat(weights))
        return whole


class FeatureProcessedEmbeddingBagCollection(torch.nn.Module):
    """A weighted collection whose weights feature processors make: torchrec's class.

    Args:
        embedding_bag_collection: the tables.
        feature_processors: one for all features, or one for each by name.

    Raises:
        ConfigError: a collection without weights; processors by name that are not the features.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollectionBase, feature_processors: Any) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError("feature processors need a weighted collection", got=False, expected=True)
        names = list(dict.fromkeys(embedding_bag_collection.feature_names))
        if isinstance(feature_processors, (Mapping, torch.nn.ModuleDict)):
            if set(feature_processors.keys()) != set(names):
                found = sorted(feature_processors.keys())
                raise ConfigError("processors are not the features", got=found, expected=sorted(names))
            feature_processors = torch.nn.ModuleDict(dict(feature_processors.items()))
        self._embedding_bag_collection, self._feature_processors = embedding_bag_collection, feature_processors
        self._feature_names = names

    def is_weighted(self) -> bool:
        """Whether the collection is weighted, which it is."""
        return self._embedding_bag_collection.is_weighted()

    def embedding_bag_configs(self) -> list[Any]:
        """The tables."""
        return list(self._embedding_bag_collection.embedding_bag_configs())

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollectionBase]:
        """The processors as one, and the collection."""
        processors = self._feature_processors
        one = _Each(processors) if isinstance(processors, torch.nn.ModuleDict) else processors
        return one, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Weights by the processors, then the collection."""
        result: KeyedTensor = self._embedding_bag_collection(self._processed(features))
        return result

    def _processed(self, features: Any) -> Any:
        is_traced = isinstance(features, torch.fx.Proxy)
        batch = features if is_traced else own_batch(features)
        if not isinstance(self._feature_processors, torch.nn.ModuleDict):
            if not is_traced:
                # Only what is looked up; a trace takes the whole batch.
                batch = _picked(batch, self._feature_names)
            return self._feature_processors(batch)
        parts = batch.to_dict() if is_traced else _picked(batch, self._feature_names).to_dict()
        found = [self._feature_processors[name](parts[name]) for name in self._feature_names]
        values, weights, lengths = (
            torch.cat([getattr(part, name)() for part in found]) for name in ("values", "weights", "lengths")
        )
        sizes: dict[str, Any] = {}
        if not is_traced and batch.variable_stride_per_key():
            ranks = [[part.lengths().numel()] for part in found]
            sizes = {"stride_per_key_per_rank": ranks, "inverse_indices": batch.inverse_indices_or_none()}
        return KeyedJaggedTensor(self._feature_names, values, weights, lengths, **sizes)


def _picked(batch: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """These features of the batch. Raises MissingKeyError."""
    places = batch.index_per_key()
    missing = [name for name in names if name not in places]
    if missing:
        raise MissingKeyError("not features of this batch", got=missing, expected=batch.keys())
    picked = batch.permute([places[name] for name in names])
    picked._inverse_indices = batch.inverse_indices_or_none()
    return picked
