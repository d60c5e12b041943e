"""One rank's side of deferred all-reduces: what is kept, what counts as finished, and when a pass cannot go on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_accelpact.recovery import c10d, fsdp2
from lightning_accelpact.recovery import retry as retry_module
from lightning_accelpact.recovery.action import GroupReport
from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.recovery.streams import StreamRetry


class Repairs:
    """Stands for the repair machine, inside a backward pass."""

    def __init__(self) -> None:
        self.collectives_count = self.passing = self.reducing = True
        self.pending = False
        self.repairs: list[BaseException] = []
        self.during: Callable[[], None] = lambda: None
        self.breaks = 0

    def join(self) -> None:
        pass

    def drill(self) -> None:
        if self.breaks:
            self.breaks -= 1
            raise CommunicatorLost("injected")

    def recovers(self, error: BaseException) -> bool:
        return isinstance(error, CommunicatorLost)

    def recover_in_place(self, error: BaseException) -> None:
        self.repairs.append(error)
        self.during()


class Started:
    """An all-reduce of one rank under way; doubles its tensor when it is told to end."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.ended = self.failed = False

    def end(self, *, well: bool = True) -> None:
        self.ended, self.failed = True, not well
        for tensor in self.collective.outputs:
            tensor.data.mul_(2 if well else torch.nan)

    def is_completed(self) -> bool:
        return self.ended

    def is_success(self) -> bool:
        return not self.failed


class Links:
    """Starts collectives, and ends them when it is asked to settle."""

    def __init__(self) -> None:
        self.down = False
        self.started: list[Started] = []
        self.ended = True

    def begin(self, collective: Collective) -> Started:
        for started in self.started:
            started.ended |= started.collective is collective  # the repair has ended it
        self.started.append(Started(collective))
        return self.started[-1]

    def mark(self) -> Callable[[], bool]:
        return lambda: self.ended

    def check(self) -> None:
        for started in self.started:
            if not started.ended:
                started.end()

    def settle(self) -> None:
        pass


class Collective:
    """An all-reduce in place, or an all-gather, in one process."""

    def __init__(self, tensor: torch.Tensor, *, in_place: bool = True, waited: bool = True) -> None:
        self.group = SimpleNamespace(group_name="a", count=0)
        self.inputs = [tensor]
        self.outputs = self.inputs if in_place else [tensor.clone()]
        self.in_place, self.waited, self.registered, self.dense, self.bulky = in_place, waited, True, True, False
        self.runs = 0

    def finish(self, group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> str:
        self.runs += 1
        outputs[0].data.copy_(inputs[0] * 2)
        return "done"

    def run(self) -> str:
        return self.finish(self.group, self.outputs, self.inputs)

    plain = run


class Rank(SimpleNamespace):
    """A retry with what surrounds it."""

    retry: StreamRetry
    repairs: Repairs
    links: Links
    unread: bool


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(retry_module, "current_by_name", lambda name: SimpleNamespace(group_name=name))
    group = SimpleNamespace(issued=0)
    monkeypatch.setattr(c10d, "current", lambda _: group.__class__)
    monkeypatch.setattr(c10d, "issued", lambda _: group.issued)
    rank = Rank(repairs=Repairs(), links=Links(), unread=True, group=group)
    rank.retry = StreamRetry(
        rank.repairs, links=rank.links, unread=lambda *_: rank.unread, timeout=timedelta(seconds=30)
    )
    return rank


def gradients(count: int) -> list[torch.Tensor]:
    return [torch.full((3,), float(index + 1)) for index in range(count)]


def defer(rank: Rank, tensors: list[torch.Tensor]) -> list[Started]:
    for tensor in tensors:
        rank.retry.run(Collective(tensor))
    return rank.links.started[-len(tensors) :]


def test_an_all_reduce_of_a_backward_pass_is_left_until_the_pass_is_over(rank: Rank) -> None:
    tensors = gradients(2)
    started = defer(rank, tensors)
    assert [tensor[0].item() for tensor in tensors] == [1, 2]
    assert rank.retry.report()["a"] == GroupReport(finished=0, pending=2, kept=0)
    started[0].end()
    assert rank.retry.report()["a"] == GroupReport(finished=1, pending=1, kept=1)
    rank.retry.settle()
    assert [tensor[0].item() for tensor in tensors] == [2, 4]
    assert rank.retry.report()["a"] == GroupReport(finished=2, pending=0, kept=2)
    assert rank.repairs.repairs == []


def test_what_ended_out_of_order_counts_in_order(rank: Rank) -> None:
    started = defer(rank, gradients(3))
    started[2].end()
    assert rank.retry.report()["a"].finished == 0
    started[0].end()
    started[1].end()
    assert rank.retry.report()["a"].finished == 3


def test_what_failed_runs_again_on_what_it_was_given(rank: Rank) -> None:
    tensors = gradients(3)
    started = defer(rank, tensors)
    started[0].end()
    started[1].end(well=False)
    rank.repairs.during = lambda: rank.retry.serve({})
    rank.retry.settle()
    assert [str(error) for error in rank.repairs.repairs] == ["an all-reduce of the backward pass failed"]
    assert [tensor[0].item() for tensor in tensors] == [2, 4, 6]


def test_one_that_cannot_even_begin_is_told_when_the_pass_is_over(rank: Rank) -> None:
    rank.repairs.breaks = 1
    tensors = gradients(2)
    defer(rank, tensors)
    assert rank.repairs.repairs == []
    assert rank.retry.whole
    rank.repairs.during = lambda: rank.retry.serve({})
    rank.retry.settle()
    assert len(rank.repairs.repairs) == 1
    assert [tensor[0].item() for tensor in tensors] == [2, 4]


def test_who_has_finished_serves_and_who_has_not_catches_up(rank: Rank) -> None:
    tensors = gradients(3)
    started = defer(rank, tensors)
    started[0].end()
    started[1].end(well=False)
    served: list[float] = []
    collectives = [flight.collective for flight in rank.retry._waiting]
    rank.retry.report()
    kept = rank.retry._members["a"].kept[0]
    kept._collective.finish = lambda group, outputs, inputs: served.append(inputs[0][0].item())
    rank.retry.serve({"a": range(1, 3)})
    assert served == [1.0]  # of the first one, from what it was given; its result stays
    assert [tensor[0].item() for tensor in tensors[:2]] == [2, 4]
    assert [collective.runs for collective in collectives] == [0, 1, 0]
    assert rank.retry.report()["a"] == GroupReport(finished=2, pending=1, kept=2)
    assert len(rank.links.started) == 4  # nobody has finished the third: it is under way again


def test_the_vote_ends_what_has_to_be_kept(rank: Rank) -> None:
    defer(rank, gradients(3))
    rank.retry.settle()
    assert rank.retry.reduced
    rank.retry.committed()
    assert rank.retry.report()["a"] == GroupReport(finished=3, pending=0, kept=1)
    assert not rank.retry.reduced


def test_an_update_that_runs_again_counts_anew(rank: Rank) -> None:
    defer(rank, gradients(2))
    rank.retry.forget()
    assert rank.retry.report()["a"] == GroupReport(finished=0, pending=0, kept=0)
    rank.retry.settle()


def test_the_copies_use_the_same_memory_in_every_update(rank: Rank) -> None:
    for _ in range(3):
        defer(rank, gradients(4))
        rank.retry.settle()
        rank.retry.committed()
    assert rank.retry.nbytes == 4 * 64


# -- what a pass cannot go on after


def test_a_result_that_somebody_has_written_to(rank: Rank) -> None:
    tensors = gradients(1)
    defer(rank, tensors)
    assert rank.retry.whole
    tensors[0].view(-1).div_(2)
    assert not rank.retry.whole


def test_a_result_that_somebody_may_have_read(rank: Rank) -> None:
    defer(rank, gradients(1))
    rank.unread = False
    assert not rank.retry.whole


def test_another_collective_that_has_not_ended(rank: Rank) -> None:
    rank.links.ended = False
    rank.retry.run(Collective(torch.ones(1), in_place=False))
    assert not rank.retry.whole


def test_links_that_were_cut_while_something_was_under_way(rank: Rank) -> None:
    defer(rank, gradients(1))
    rank.links.down = True
    assert not rank.retry.whole
    rank.links.down = False
    assert not rank.retry.whole  # an aborted kernel has ended too
    rank.retry.repaired()
    assert rank.retry.whole


def test_nothing_is_lost_with_links_on_which_nothing_is_under_way(rank: Rank) -> None:
    defer(rank, gradients(1))
    rank.retry.settle()
    rank.links.down = True
    assert rank.retry.whole


def test_a_collective_that_nobody_has_told_of(rank: Rank) -> None:
    defer(rank, gradients(1))
    rank.group.issued += 1
    defer(rank, gradients(1))
    assert not rank.retry.whole


def test_what_a_pass_consumes_and_cannot_get_ends_it(rank: Rank) -> None:
    collective = Collective(torch.ones(2), in_place=False)
    collective.finish = lambda *_: (_ for _ in ()).throw(CommunicatorLost("broken"))  # type: ignore[method-assign]
    wholes: list[bool] = []
    rank.repairs.during = lambda: wholes.append(rank.retry.whole)
    with pytest.raises(CommunicatorLost, match="broken"):  # the real machine raises UpdateAborted before
        rank.retry.run(collective)
    assert wholes == [False]


# -- elsewhere


def test_outside_of_passes_each_is_waited_for(rank: Rank) -> None:
    rank.repairs.passing = False
    tensor = torch.ones(2)
    assert rank.retry.run(Collective(tensor)) == "done"
    assert tensor.tolist() == [2, 2]
    assert rank.links.started == []
    assert rank.retry.report()["a"] == GroupReport(finished=1, pending=0, kept=1)


def test_in_a_forward_pass_nothing_is_deferred(rank: Rank) -> None:
    rank.repairs.reducing = False
    tensor = torch.ones(2)
    rank.retry.run(Collective(tensor))
    assert tensor.tolist() == [2, 2]
    assert rank.links.started == []


# -- gradients


class Gradient:
    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def to_local(self) -> torch.Tensor:
        return self.local


def parameters(*gradients: torch.Tensor | None, hook: bool = False) -> list[Any]:
    made = [None if gradient is None else Gradient(gradient) for gradient in gradients]
    hooks = {0: print} if hook else None
    params = [
        SimpleNamespace(sharded_param=SimpleNamespace(grad=one, _post_accumulate_grad_hooks=hooks)) for one in made
    ]
    return [SimpleNamespace(fsdp_params=params)]


def test_gradients_are_the_results_only_where_they_are_views_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    results = gradients(2)
    root = torch.nn.Module()

    def are(groups: list[Any], doubtful: list[torch.Tensor]) -> bool:
        monkeypatch.setattr(fsdp2, "param_groups", lambda _: groups)
        return fsdp2.gradients_are(root, doubtful, results)

    assert are(parameters(results[0][:1], results[0][1:], results[1], None), results)
    assert are(parameters(results[0], results[1]), results[:1])
    assert not are(parameters(results[0], results[1].clone()), results[:1])  # cast, accumulated or offloaded
    assert not are(parameters(results[1]), results[:1])  # not a gradient at all
    assert not are(parameters(results[0], results[1], hook=True), results)
