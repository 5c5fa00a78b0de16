"""A real stream of ids: words and pairs of words of the standard library's own source text, hashed to 64 bits.

Sample i is a position in the text. Its bag is the word there and its pairs with the three words before it; its contexts
are the word that follows and two more, drawn from the text by a counter-based generator. All of it is a pure function
of the text and the position, so that any process makes any sample.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from conformance.harness import Mismatch
from twinproof.kvstore.options import GOLDEN, mix

__all__ = ["CONTEXTS", "Corpus", "hashed", "standard_library"]

CONTEXTS = 3
_BEFORE, _BEHIND = 3, 1


def standard_library() -> Iterator[bytes]:
    """The source files of the standard library, its tests included where they are installed, in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        yield path.read_bytes()


def hashed(kind: bytes, data: bytes) -> int:
    """An id: blake2b of 8 bytes, personalised by kind, as a signed little-endian integer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "little", signed=True)


@dataclass(frozen=True)
class Corpus:
    """``words``: int64 [n + 4], the id of each word of the text. ``bags``: int64 [n, 4], see the module."""

    words: torch.Tensor
    bags: torch.Tensor

    @property
    def sample_count(self) -> int:
        """N."""
        return self.bags.shape[0]

    def contexts(self, samples: torch.Tensor) -> torch.Tensor:
        """Ids int64 [k, 3]: the word behind each sample, and two of random places of the text."""
        following = self.words[samples + _BEFORE + _BEHIND]
        counters = samples[:, None] * (CONTEXTS - 1) + torch.arange(1, CONTEXTS)
        drawn = self.words[mix(counters * GOLDEN).remainder(self.words.numel())]
        return torch.cat([following[:, None], drawn], dim=1)

    @classmethod
    def of(cls, texts: Iterable[bytes], sample_count: int) -> Corpus:
        """The first samples of some texts, read as one; fewer where the texts end. Raises Mismatch for none."""
        wanted, index, stream = sample_count + _BEFORE + _BEHIND, dict[bytes, int](), list[int]()
        for text in texts:
            stream += [index.setdefault(word, len(index)) for word in re.findall(rb"\w+", text)]
            if len(stream) >= wanted:
                break
        if len(stream) <= _BEFORE + _BEHIND:
            raise Mismatch("too few words", got=len(stream))
        places = torch.tensor(stream[:wanted])
        words = torch.tensor([hashed(b"word", word) for word in index])[places]
        columns = [words[_BEFORE:-_BEHIND]]
        for distance in range(1, _BEFORE + 1):
            before = places[_BEFORE - distance : -_BEHIND - distance]
            columns.append(_pairs(words, places, before, places[_BEFORE:-_BEHIND], distance))
        return cls(words, torch.stack(columns, dim=1))

    def save(self, path: Path) -> None:
        """For other processes."""
        safetensors.torch.save_file({"words": self.words, "bags": self.bags}, path)

    @classmethod
    def load(cls, path: str) -> Corpus:
        """What ``save`` wrote."""
        found = safetensors.torch.load_file(path)
        return cls(found["words"], found["bags"])


def _pairs(
    words: torch.Tensor, places: torch.Tensor, first: torch.Tensor, second: torch.Tensor, distance: int
) -> torch.Tensor:
    """The id of each pair: the hash of its two words' ids, and of how far apart they stand."""
    count = int(places.max()) + 1
    ids_by_index = torch.zeros(count, dtype=torch.int64).index_copy(0, places, words)
    keys, inverse = torch.unique(first * count + second, return_inverse=True)
    both = torch.stack([ids_by_index[keys // count], ids_by_index[keys % count]], dim=1)
    raw, kind = both.numpy().tobytes(), b"pair%d" % distance
    return torch.tensor([hashed(kind, raw[at : at + 16]) for at in range(0, len(raw), 16)])[inverse]
