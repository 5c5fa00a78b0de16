"""SemiSync from its start on: any program of what may happen to it, beside the loop that is one update stale.

The loop looks a batch up when the step before it has seen its own lookups, and holds what it found: values, the way
back, and whether there is one. Gradients of the dense part may be those of the step before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from conformance.harness import succeeds
from conformance.pipeline.jobs import Batch, Job
from conformance.pipeline.machine import ForwardError
from conformance.pipeline.model import OPTIMIZERS
from conformance.pipeline.orders import OrdersMachine


class StaleLoop:
    """A job that is trained one update stale.

    Attributes:
        ready: what the next batch was looked up as, and whether with a way back; None where nothing was.
        stash: gradients of the step before, by parameter; None before there are any.
    """

    def __init__(self, job: Job, start: int, *, stashes: bool) -> None:
        self.job, self.start, self.stashes = job, start, stashes
        self.ready: tuple[list[torch.Tensor], bool] | None = None
        self.stash: dict[torch.Tensor, torch.Tensor | None] | None = None

    def _look_up(self, batch: Batch) -> tuple[list[torch.Tensor], bool]:
        training = self.job.model.training
        with torch.set_grad_enabled(training):
            pairs = zip(self.job.model.collections, batch.ids, strict=True)
            return [collection(ids).values() for collection, ids in pairs], training

    def _scores(self, batch: Batch, pooled: list[torch.Tensor]) -> torch.Tensor:
        model = self.job.model
        dense = torch.tanh(model.bottom(batch.dense))
        scores: torch.Tensor = model.top(torch.cat([dense, *pooled], dim=1))[:, 0]
        return scores

    def step(self, batch: Batch, following: Batch | None, number: int, *, steps_dense: bool = True) -> torch.Tensor:
        """Step ``number``, which finds the batch behind it in flight, or none; the output.

        ``steps_dense``: whether the dense optimizer's own step succeeds.
        """
        training, known = self.job.model.training, self.ready
        pooled, _ = known if known is not None and known[1] >= training else self._look_up(batch)
        self.ready = None
        if training:
            self.job.optimizer.zero_grad()
        with torch.set_grad_enabled(training):
            leaves = [each.detach().requires_grad_(training) for each in pooled]
            scores = self._scores(batch, leaves)
            loss = (scores - batch.target).square().mean()
        if following is not None and number >= self.start:
            self.ready = self._look_up(following)
        if training:
            loss.backward()  # type: ignore[no-untyped-call]
            for each, leaf in zip(pooled, leaves, strict=True):
                each.backward(leaf.grad)  # type: ignore[no-untyped-call]
            has_gradients = not self.stashes or number < self.start or self._exchange_gradients()
            if has_gradients and steps_dense:
                self.job.optimizer.step()
        return scores.detach()

    def _exchange_gradients(self) -> bool:
        """Give parameters their gradients of the step before, if there was one, and keep those of this one."""
        params = [param for group in self.job.optimizer.param_groups for param in group["params"]]
        before, self.stash = self.stash, {param: param.grad for param in params}
        if before is None:
            return False
        for param in params:
            # One that has come since has no gradient of the step before.
            param.grad = before.get(param)
        return True


class StaleProgram(OrdersMachine):
    """See the module. A part of the model comes under the optimizer later, in a group of its own.

    The machine's events, drawn from a seed: most are steps, most of these train, so that gradients are stashed and
    rows are looked up ahead when something happens.
    """

    def begin(self, chosen: random.Random) -> None:
        """A schedule, and the loop."""
        start, stashes = chosen.choice([0, 0, 2]), chosen.random() < 0.6
        options = {"start_batch": start, "stash_gradients": stashes}
        super().start(("TrainPipelineSemiSync", options), chosen.choice(OPTIMIZERS), chosen.randint(0, 3))
        self.stale = StaleLoop(self.loop, start, stashes=stashes)
        self.later: list[list[torch.Tensor]] = []
        for job in (self.job, self.loop):
            self.later.append(list(job.model.bottom.parameters()))
            left_out = {id(param) for param in self.later[-1]}
            for group in job.optimizer.param_groups:
                group["params"] = [param for param in group["params"] if id(param) not in left_out]
        self.optimizer_fails = False
        self.job.optimizer.register_step_pre_hook(self._before_dense)

    def run(self, seed: int, count: int = 24) -> None:
        """So many events; after each everything is compared."""
        chosen = random.Random(seed)
        self.begin(chosen)
        events = self._events(chosen)
        for _ in range(count):
            (event,) = chosen.choices([each for _, each in events], [weight for weight, _ in events])
            with succeeds("an event", where=self.name):
                event()
            self.same()
            self.idle_stands_still()

    def _events(self, chosen: random.Random) -> list[tuple[int, Callable[[], None]]]:
        def flip() -> bool:
            return chosen.random() < 0.5

        return [
            (9, lambda: self.progress(chosen.randint(1, 3))),
            (1, lambda: self.mode(chosen.random() < 0.7)),
            (1, self.edit),
            (1, self.load),
            (1, lambda: self.detach(again=flip(), sparse_dist=flip())),
            (1, lambda: self.iterator(chosen.choice([None, None, None, 2, 4]))),
            (1, lambda: self.fail_loader(chosen.randint(0, 3))),
            (1, self.fail_forward),
            (2, self.fail_optimizer),
            (1, self.reset),
            (2, lambda: self.freeze(trains=flip())),
            (2, self.evaluate),
            (1, lambda: self.change_options(chosen.choice([0.05, 0.2]), chosen.choice([0.0, 0.5]))),
            (1, lambda: self.take(fills=flip())),
            (1, lambda: self.other_model(sparse_dist=flip(), training=chosen.random() < 0.8)),
            (5, self.add_group),
        ]

    def _next(self) -> tuple[Batch, Batch | None]:
        """The loop's next batch, and the one behind it if it is in flight."""
        batch, *following = (
            self.loop.there(self.loop.batches(1, n)[0]) for n in (self.at, self.at + 1) if n < self.pulled
        )
        return batch, following[0] if following else None

    def _forward(self, batch: Batch) -> Any:
        if self.forward_fails:
            self.stale.ready = None
        return super()._forward(batch)

    def _before_dense(self, *args: Any) -> None:
        if self.optimizer_fails:
            self.optimizer_fails = False
            self.stale.step(*self._next(), self.steps, steps_dense=False)
            self.stale.ready = None
            raise ForwardError("of the optimizer")

    def _expected(self) -> torch.Tensor:
        given = self._next()
        self.at += 1
        return self.stale.step(*given, self.steps)

    def evaluate(self) -> None:
        """A step of evaluation, which looks up ahead too, then training."""
        self.mode(False)
        self.progress(1)
        self.mode(True)

    def freeze(self, trains: bool) -> None:
        """Of both parts of the optimizer's parameters."""
        super().freeze(trains)
        for job in (self.job, self.loop):
            job.model.top.bias.requires_grad_(trains)

    def fail_optimizer(self) -> None:
        """The next step of the dense optimizer raises; the tables have been updated."""
        self.optimizer_fails = True

    def detach(self, again: bool, sparse_dist: bool) -> None:
        """The next batch is looked up afresh."""
        super().detach(again, sparse_dist)
        self.stale.ready = None

    def other_model(self, sparse_dist: bool, training: bool) -> None:
        """The other one looks the next batch up afresh."""
        super().other_model(sparse_dist, training)
        self.stale.ready = None

    def reset(self) -> None:
        """What is in flight is forgotten, and so are gradients of the step before."""
        super().reset()
        self.stale.ready = self.stale.stash = None

    def add_group(self) -> None:
        """The optimizer gets the rest of the parameters, once."""
        for job, params in zip((self.job, self.loop), self.later, strict=bool(self.later)):
            job.optimizer.add_param_group({"params": params})
        self.later = []
