"""Faults of stages that subclasses know: not called, called twice, or with less than they say."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from conformance.pipeline.planted.planting import shared, shared_swap

_BASE = "twinproof.pipeline.driver:Pipeline"


def _losses_wanted(original: Any, schedule: Any, batch: Any) -> Any:
    losses, output = original(schedule, batch)
    if losses is None:
        losses, output = torch.zeros(1), output + float("nan")
    return losses, output


def _first_two_tables(original: Any, result: Any, pairs: Any) -> Any:
    found = original(result, pairs)
    if hasattr(type(result), "wait"):
        # What the lazy result's columns would give the tables is lost.
        pairs.clear()
    return found


def _no_subscript(kind: type, item: Any) -> Any:
    raise TypeError("not a generic class")


def _twice(original: Any, schedule: Any, batch: Any) -> None:
    original(schedule, batch)
    if batch.failure is None:
        schedule.wait_sparse_data_dist(batch.context)


def _uncounted(original: Any, schedule: Any, loader: Any) -> Any:
    before = schedule.pulled_count
    found = original(schedule, loader)
    schedule.pulled_count = min(schedule.pulled_count, before)
    return found


def _by_itself(original: Any, view: Any, index: Any) -> None:
    view._removed[0] = 0
    with contextlib.suppress(IndexError):
        original(view, index)


def _always_sent(original: Any, schedule: Any, model: Any = None, sparse_dist: bool = True) -> None:
    original(schedule, model, True)


def _sent_again(original: Any, schedule: Any, batch: Any) -> None:
    original(schedule, batch)
    batch.was_sent = batch.was_received = False


PLANTED = (
    shared("sent_again", "What was sent by hand is sent again.", ("PIPE-311",), f"{_BASE}._receive", _sent_again),
    shared(
        "losses_always", "Losses are looked at in evaluation.", ("PIPE-300",), f"{_BASE}.run_forward", _losses_wanted
    ),
    shared(
        "lazy_results_lost",
        "Gradients of lazy results never reach the tables.",
        ("PIPE-301",),
        "twinproof.pipeline.schedules:cut_off",
        _first_two_tables,
    ),
    shared_swap(
        "not_generic",
        "Pipelines are not generic.",
        ("PIPE-302",),
        f"{_BASE}.__class_getitem__",
        classmethod(_no_subscript),
    ),
    shared("stages_twice", "A stage is called twice.", ("PIPE-303",), f"{_BASE}.exchange", _twice),
    shared("own_pulls_uncounted", "Own pulls do not count.", ("PIPE-304",), f"{_BASE}.copy_batch_to_gpu", _uncounted),
    shared_swap(
        "overrides_not_checked",
        "Methods that nobody calls may be overridden.",
        ("PIPE-305",),
        "twinproof.pipeline.driver:check_overrides",
        lambda kind: None,
    ),
    shared(
        "queues_apart",
        "Removing a batch and its context removes two batches.",
        ("PIPE-306",),
        "twinproof.pipeline.stages:QueueView.__delitem__",
        _by_itself,
    ),
    shared("sent_when_attached", "attach() always sends.", ("PIPE-307",), f"{_BASE}.attach", _always_sent),
)
