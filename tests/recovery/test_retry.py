"""One rank's side of retried collectives: what is counted, kept, served and restored. In one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_accelpact.recovery import retry as retry_module
from lightning_accelpact.recovery.action import GroupReport
from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.recovery.retry import Retry


class Unwinds(BaseException):
    """Stands for what unwinds a pass."""


class Repairs:
    """Stands for the repair machine: every fault is repaired at once."""

    def __init__(self) -> None:
        self.collectives_count = True
        self.reducing = True
        self.joined = 0
        self.repairs: list[BaseException] = []
        self.during: Callable[[], None] = lambda: None

    def join(self) -> None:
        self.joined += 1

    def drill(self) -> None:
        pass

    def recovers(self, error: BaseException) -> bool:
        return isinstance(error, CommunicatorLost)

    def recover_in_place(self, error: BaseException) -> None:
        self.repairs.append(error)
        self.during()


class Collective:
    """A collective of one rank that fails as often as it is told, after it has written half of its output."""

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor] | None = None, *, failures: int = 0):
        self.group = SimpleNamespace(group_name="a")
        self.inputs = inputs
        self.outputs = inputs if outputs is None else outputs
        self.in_place = outputs is None
        self.bulky = sum(tensor.numel() for tensor in self.inputs) > sum(tensor.numel() for tensor in self.outputs)
        self.registered = self.waited = self.dense = True
        self.failures = failures
        self.calls: list[list[torch.Tensor]] = []

    def run(self) -> str:
        return self.finish(self.group, self.outputs, self.inputs)

    plain = run

    def finish(self, group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> str:
        self.calls.append([tensor.clone() for tensor in inputs])
        for tensor in outputs:
            tensor[:1] = -1
        if self.failures:
            self.failures -= 1
            raise CommunicatorLost("broken")
        for output, content in zip(outputs, self.calls[-1], strict=False):
            common = min(output.numel(), content.numel())
            output.view(-1)[:common] = content.reshape(-1)[:common] * 2
        return "done"


@pytest.fixture
def retry(monkeypatch: pytest.MonkeyPatch) -> Retry:
    monkeypatch.setattr(retry_module, "current_by_name", lambda name: SimpleNamespace(group_name=name))
    return Retry(Repairs())


def report(retry: Retry) -> GroupReport:
    return retry.report()["a"]


def test_a_collective_that_succeeds_is_counted_and_kept(retry: Retry) -> None:
    tensor = torch.arange(4.0)
    assert retry.run(Collective([tensor])) == "done"
    assert tensor.tolist() == [0, 2, 4, 6]
    assert report(retry) == GroupReport(finished=1, pending=0, kept=1)
    assert not retry.flying


def test_a_failed_one_runs_again_on_what_it_was_given(retry: Retry) -> None:
    tensor = torch.arange(4.0)
    collective = Collective([tensor], failures=2)
    retry.run(collective)
    assert tensor.tolist() == [0, 2, 4, 6]
    assert [call[0].tolist() for call in collective.calls] == [[0, 1, 2, 3]] * 3
    assert len(retry._repairs.repairs) == 2
    assert report(retry).finished == 1


def test_in_a_repair_it_says_that_it_is_inside(retry: Retry) -> None:
    seen = []
    retry._repairs.during = lambda: seen.append((report(retry), retry.flying))
    retry.run(Collective([torch.ones(1)]))
    retry.run(Collective([torch.ones(1)], failures=1))
    assert seen == [(GroupReport(finished=1, pending=1, kept=1), True)]


def test_what_the_repair_has_finished_is_not_run_once_more(retry: Retry) -> None:
    tensor = torch.arange(4.0)
    collective = Collective([tensor], failures=1)
    retry._repairs.during = lambda: retry.serve({"a": range(1, 2)})
    assert retry.run(collective) == "done"
    assert tensor.tolist() == [0, 2, 4, 6]
    assert len(collective.calls) == 2
    assert report(retry).finished == 1


def test_serving_changes_nothing_here(retry: Retry) -> None:
    tensor = torch.arange(4.0)
    collective = Collective([tensor])
    retry.run(collective)
    for _ in range(2):  # a fault in the first pass
        retry.serve({"other": range(7, 8), "a": range(1, 2)})
        assert report(retry) == GroupReport(finished=1, pending=0, kept=1)
    assert tensor.tolist() == [0, 2, 4, 6]
    assert [call[0].tolist() for call in collective.calls] == [[0, 1, 2, 3]] * 3


def test_the_copy_outlives_one_more_collective(retry: Retry) -> None:
    """While the next one is under way a peer may still need the last one."""
    first = Collective([torch.arange(4.0)])
    retry.run(first)
    retry._repairs.during = lambda: retry.serve({"a": range(1, 2)})
    retry.run(Collective([torch.full((4,), 9.0)], failures=1))
    assert first.calls[-1][0].tolist() == [0, 1, 2, 3]
    assert report(retry).finished == 2


def test_a_large_input_is_kept_as_it_is_and_a_write_to_it_is_noticed(retry: Retry) -> None:
    """As of a reduce-scatter in a backward pass."""
    source = torch.arange(4.0)
    collective = Collective([source], [torch.zeros(2)])
    retry.run(collective)
    assert retry.nbytes == 0
    assert report(retry).kept
    source.add_(1)
    assert not report(retry).kept


def test_outside_of_a_backward_pass_a_large_input_is_copied_too(retry: Retry) -> None:
    """It is the user's, who may write to it behind torch's back."""
    retry._repairs.reducing = False
    source = torch.arange(4.0)
    collective = Collective([source], [torch.zeros(2)])
    retry.run(collective)
    source.numpy()[:] = 7
    retry.serve({"a": range(1, 2)})
    assert collective.calls[-1][0].tolist() == [0, 1, 2, 3]


def test_an_expanded_tensor_is_brought_back(retry: Retry) -> None:
    tensor = torch.ones(1, 3).expand(2, 3)
    collective = Collective([tensor])
    collective.finish = _failing_once()
    retry.run(collective)
    assert tensor.tolist() == [[2] * 3] * 2


def _failing_once() -> Callable[..., str]:
    failures = [CommunicatorLost("broken")]

    def finish(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> str:
        inputs[0][:1].add_(1)
        if failures:
            raise failures.pop()
        return "done"

    return finish


def test_one_that_cannot_be_copied_is_left_alone(retry: Retry) -> None:
    """Such as that of a sparse tensor, on all ranks alike."""
    collective = Collective([torch.eye(2).to_sparse()])
    collective.dense, collective.plain = False, lambda: "plain"
    assert retry.run(collective) == "plain"
    assert retry.report() == {}


def test_a_small_input_is_copied_so_that_it_may_change(retry: Retry) -> None:
    """As of an all-gather, whose input is often a part of its output."""
    output = torch.zeros(4)
    collective = Collective([output[:2]], [output])
    output[:2] = torch.tensor([5.0, 6.0])
    retry.run(collective)
    output.zero_()
    retry.serve({"a": range(1, 2)})
    assert collective.calls[-1][0].tolist() == [5, 6]
    assert output.tolist() == [0] * 4  # the result went nowhere


def test_several_tensors_of_several_types(retry: Retry) -> None:
    tensors = [torch.arange(3, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(())[None]]
    collective = Collective([*tensors], failures=1)
    retry.run(collective)
    assert [tensor.dtype for tensor in collective.calls[1]] == [torch.int64, torch.bfloat16, torch.float32]
    assert [call[0].tolist() for call in collective.calls] == [[0, 1, 2]] * 2


def test_the_memory_is_used_again(retry: Retry) -> None:
    for size in (8, 100, 4, 100, 100, 50):
        retry.run(Collective([torch.ones(size)]))
    pointers = {retry._members["a"].kept[-1].inputs[0].data_ptr()}
    for _ in range(4):
        retry.run(Collective([torch.ones(100)]))
        pointers.add(retry._members["a"].kept[-1].inputs[0].data_ptr())
    assert len(pointers) == 2
    assert retry.nbytes == 2 * 448  # 400 bytes, aligned


def test_without_inputs(retry: Retry) -> None:
    """As a barrier."""
    collective = Collective([], failures=1)
    retry.run(collective)
    retry.serve({"a": range(1, 2)})
    assert len(collective.calls) == 3


def test_other_errors_are_the_callers(retry: Retry) -> None:
    class Wrong(Collective):
        def finish(self, *_: Any) -> str:
            raise ValueError("sizes differ")

    with pytest.raises(ValueError, match="sizes differ"):
        retry.run(Wrong([torch.ones(1)]))
    assert not retry.flying
    assert report(retry).finished == 0


def test_what_unwinds_goes_through(retry: Retry) -> None:
    def unwind() -> None:
        raise Unwinds

    retry._repairs.during = unwind
    with pytest.raises(Unwinds):
        retry.run(Collective([torch.ones(1)], failures=1))
    assert not retry.flying


def test_what_does_not_count_is_left_alone(retry: Retry) -> None:
    retry._repairs.collectives_count = False
    with pytest.raises(CommunicatorLost):
        retry.run(Collective([torch.ones(1)], failures=1))
    assert retry.report() == {}


def test_a_group_that_torch_does_not_know_is_left_alone(retry: Retry) -> None:
    collective = Collective([torch.ones(1)])
    collective.registered = False
    retry.run(collective)
    assert retry.report() == {}
    assert retry._repairs.joined == 0


def test_counting_begins_anew(retry: Retry) -> None:
    retry.run(Collective([torch.ones(1)]))
    retry.forget()
    assert report(retry) == GroupReport(finished=0, pending=0, kept=0)
